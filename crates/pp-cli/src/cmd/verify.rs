//! `pp verify A.json B.json`: where two runs with `--verify` began to differ.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context as _;
use pp_contract::{Fault, FaultKind, Rank};
use serde::Deserialize;

use crate::exit::{Failure, print};
use crate::job::{FRONT, PHASE_B};

/// What is looked at in a report.
#[derive(Deserialize)]
struct Report {
    run: Run,
}

#[derive(Deserialize)]
struct Run {
    verify: Option<Verified>,
}

#[derive(Deserialize)]
struct Verified {
    chunks: Vec<Chunk>,
}

/// Digests by tensor.
type Digests = BTreeMap<String, String>;

#[derive(Deserialize)]
struct Chunk {
    chunk: u64,
    inputs: Digests,
    outputs: Digests,
}

/// What differs first.
#[derive(Debug, PartialEq, Eq)]
struct Difference {
    rank: Rank,
    detail: String,
}

/// Compares the chunks that both runs verified.
pub(crate) fn verify(first: &Path, second: &Path) -> Result<(), Failure> {
    let (a, b) = (read(first)?, read(second)?);
    match compare(&a, &b) {
        Ok(0) => Err(Failure::Usage(format!(
            "{} and {} have no verified chunk in common; run both with the same --verify every=N",
            first.display(),
            second.display()
        ))),
        Ok(chunks) => print(&format!("{chunks} verified chunks are the same\n")),
        Err(Difference { rank, detail }) => {
            Err(Fault::new(FaultKind::Drift, rank, "compare runs", detail).into())
        }
    }
}

fn read(path: &Path) -> Result<Vec<Chunk>, Failure> {
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let report: Report = serde_json::from_slice(&text)
        .map_err(|e| Failure::Usage(format!("{} is no report of pp run: {e}", path.display())))?;
    let verified = report.run.verify.ok_or_else(|| {
        Failure::Usage(format!(
            "{} has no digests; make it with pp run --verify every=N --report",
            path.display()
        ))
    })?;
    Ok(verified.chunks)
}

/// How many chunks both have, if all are the same. Inputs come first: outputs of other inputs differ for a reason.
fn compare(a: &[Chunk], b: &[Chunk]) -> Result<u64, Difference> {
    let other: BTreeMap<u64, &Chunk> = b.iter().map(|chunk| (chunk.chunk, chunk)).collect();
    let mut same = 0;
    for chunk in a {
        let Some(other) = other.get(&chunk.chunk) else {
            continue;
        };
        for (rank, ours, theirs) in [
            (FRONT, &chunk.inputs, &other.inputs),
            (PHASE_B, &chunk.outputs, &other.outputs),
        ] {
            if let Some(detail) = first_difference(ours, theirs) {
                let detail = format!("chunk {}: {detail}", chunk.chunk);
                return Err(Difference { rank, detail });
            }
        }
        same += 1;
    }
    Ok(same)
}

fn first_difference(ours: &Digests, theirs: &Digests) -> Option<String> {
    let names = ours.keys().chain(theirs.keys());
    let differs = |name: &&String| ours.get(*name) != theirs.get(*name);
    let name = names.into_iter().find(differs)?;
    let of = |digests: &Digests| digests.get(name).map_or("none", String::as_str).to_owned();
    Some(format!(
        "tensor {name} is {} in the first run and {} in the second",
        of(ours),
        of(theirs)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(index: u64, input: &str, output: &str) -> Chunk {
        let one = |name: &str, digest: &str| BTreeMap::from([(name.into(), digest.into())]);
        Chunk {
            chunk: index,
            inputs: one("in", input),
            outputs: one("out", output),
        }
    }

    #[test]
    fn first_chunk_and_tensor_that_differ_are_named() {
        let a = [chunk(0, "1", "2"), chunk(3, "3", "4"), chunk(6, "5", "6")];
        let b = [chunk(0, "1", "2"), chunk(3, "3", "9"), chunk(6, "9", "6")];
        let difference = compare(&a, &b).unwrap_err();
        assert_eq!(difference.rank, PHASE_B);
        let expected = "chunk 3: tensor out is 4 in the first run and 9 in the second";
        assert_eq!(difference.detail, expected);
        assert_eq!(compare(&a[2..], &b[2..]).unwrap_err().rank, FRONT);
        assert_eq!(compare(&a, &a), Ok(3));
    }

    #[test]
    fn chunks_that_one_run_has_alone_are_left_out() {
        let a = [chunk(0, "1", "2"), chunk(1, "7", "7")];
        let b = [chunk(0, "1", "2"), chunk(2, "8", "8")];
        assert_eq!(compare(&a, &b), Ok(1));
        assert_eq!(compare(&a[1..], &b[1..]), Ok(0));
    }

    #[test]
    fn tensor_that_is_missing_is_a_difference() {
        let a = chunk(0, "1", "2");
        let mut b = chunk(0, "1", "2");
        b.inputs.clear();
        let detail = compare(&[a], &[b]).unwrap_err().detail;
        assert!(
            detail.contains("tensor in is 1") && detail.contains("none"),
            "{detail}"
        );
    }
}
