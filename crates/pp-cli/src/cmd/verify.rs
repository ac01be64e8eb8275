//! `pp verify A.json B.json`: where two runs with `--verify` began to differ.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use pp_contract::{Fault, FaultKind, Rank};
use serde::Deserialize;

use crate::exit::print;
use pp_job::{Error, FRONT, PHASE_B};

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
    every: Option<String>,
    #[serde(default)]
    chunks_verified: u64,
    #[serde(default)]
    all_outputs: String,
    chunks: Vec<Chunk>,
}

/// Chunks that are named where runs verified different ones.
const NAMED: usize = 5;

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

/// Compares the chunks that both runs verified. Done is only when they verified the same ones.
pub(crate) fn verify(first: &Path, second: &Path) -> Result<(), Error> {
    let (a, b) = (read(first)?, read(second)?);
    let same = compare(&a.chunks, &b.chunks).map_err(|Difference { rank, detail }| {
        Fault::new(FaultKind::Drift, rank, "compare runs", detail)
    })?;
    if same == 0 {
        let why = "they have no verified chunk in common; run both with the same --verify every=N";
        return Err(refuse(second, format!("beside {}: {why}", first.display())));
    }
    let [only_a, only_b] = [alone(&a.chunks, &b.chunks), alone(&b.chunks, &a.chunks)];
    if !only_a.is_empty() || !only_b.is_empty() {
        let has = |path: &Path, run: &Verified, only: &[u64]| {
            let every = run.every.as_deref().unwrap_or("?");
            let path = path.display();
            format!("{path} ({every}) has {}", named(only))
        };
        let why = format!(
            "compared {same} chunks, which are the same; {}; {}",
            has(first, &a, &only_a),
            has(second, &b, &only_b)
        );
        return Err(Error::local(FaultKind::BadInput, "compare runs", why));
    }
    let older = |run: &Verified| run.chunks_verified.saturating_sub(run.chunks.len() as u64);
    if (a.chunks_verified, &a.all_outputs) != (b.chunks_verified, &b.all_outputs) {
        let why = format!(
            "the {same} chunks of the reports are the same, but older ones, of which only the digest of all outputs \
             was kept, are not: {} of {} chunks and {} of {}",
            a.all_outputs, a.chunks_verified, b.all_outputs, b.chunks_verified
        );
        return Err(Fault::new(FaultKind::Drift, PHASE_B, "compare runs", why).into());
    }
    let kept = match older(&a) {
        0 => String::new(),
        older => format!("; so are the outputs of {older} older ones together"),
    };
    print(&format!("{same} verified chunks are the same{kept}\n"))
}

fn refuse(path: &Path, why: impl std::fmt::Display) -> Error {
    let text = format!("{}: {why}", path.display());
    Error::local(FaultKind::BadInput, "read report", text)
}

fn read(path: &Path) -> Result<Verified, Error> {
    let text = std::fs::read(path).map_err(|e| {
        let text = format!("{}: {e}", path.display());
        Error::local(FaultKind::Io, "read report", text)
    })?;
    let report: Report = serde_json::from_slice(&text)
        .map_err(|e| refuse(path, format!("it is no report of pp run: {e}")))?;
    report.run.verify.ok_or_else(|| {
        let why = "it has no digests; make it with pp run --verify every=N --report";
        refuse(path, why)
    })
}

/// The chunks that one run verified and the other did not.
fn alone(own: &[Chunk], other: &[Chunk]) -> Vec<u64> {
    let other: BTreeSet<u64> = other.iter().map(|chunk| chunk.chunk).collect();
    let own = own.iter().map(|chunk| chunk.chunk);
    own.filter(|chunk| !other.contains(chunk)).collect()
}

/// How many chunks, and the first of them.
fn named(chunks: &[u64]) -> String {
    let first: Vec<_> = chunks.iter().take(NAMED).map(ToString::to_string).collect();
    let (first, more) = (
        first.join(", "),
        if chunks.len() > NAMED { ", …" } else { "" },
    );
    match chunks.len() {
        0 => "no other".into(),
        1 => format!("1 more, chunk {first}"),
        n => format!("{n} more, chunks {first}{more}"),
    }
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
        assert_eq!([alone(&a, &b), alone(&b, &a)], [[1], [2]]);
        assert_eq!(named(&[1]), "1 more, chunk 1");
        assert_eq!(
            named(&[1, 2, 3, 4, 5, 6]),
            "6 more, chunks 1, 2, 3, 4, 5, …"
        );
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
