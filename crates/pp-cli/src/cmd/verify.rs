//! `pp verify A.json B.json`: where two runs with `--verify` began to differ.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use pp_command::print_result;
use pp_contract::{Fault, FaultKind, Rank};
use pp_job::Error;
use pp_runtime::stage::StageError;
use serde::{Deserialize, Serialize};

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
    all_results: String,
    /// All, the source first and the sink last.
    stages: Vec<Stage>,
    chunks: Vec<Chunk>,
}

#[derive(Deserialize)]
struct Stage {
    stage: String,
    rank: u32,
}

/// Chunks that are named where runs verified different ones.
const NAMED: usize = 5;

/// Digests by tensor.
type Digests = BTreeMap<String, String>;

#[derive(Deserialize)]
struct Chunk {
    chunk: u64,
    source: Digests,
    /// Of the stages between source and sink.
    seals: Vec<String>,
}

/// Two runs beside each other, as `verify` prints it.
#[derive(Serialize)]
struct SideBySide {
    /// Verified chunks that are the same.
    same: u64,
    /// Verified chunks that one of the runs has alone.
    only_first: Vec<u64>,
    only_second: Vec<u64>,
    /// Older chunks, whose results were compared together.
    older: u64,
    /// Where the runs began to differ.
    difference: Option<String>,
}

impl fmt::Display for SideBySide {
    /// Of runs that are the same; the others end with an error that says more.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (same, older) = (self.same, self.older);
        match older {
            0 => writeln!(f, "{same} verified chunks are the same"),
            _ => writeln!(
                f,
                "{same} verified chunks are the same; so are the results of {older} older ones together"
            ),
        }
    }
}

/// Compares the chunks that both runs verified. Done is only when they verified the same ones.
pub(crate) fn verify([first, second]: [&Path; 2], json: bool) -> Result<(), Error> {
    let (a, b) = (read(first)?, read(second)?);
    let mut compared = SideBySide {
        same: 0,
        only_first: alone(&a.chunks, &b.chunks),
        only_second: alone(&b.chunks, &a.chunks),
        older: a.chunks_verified.saturating_sub(a.chunks.len() as u64),
        difference: None,
    };
    let done = judge((first, &a), (second, &b), &mut compared);
    if json || done.is_ok() {
        print_result(&compared, json)?;
    }
    done
}

/// Says what is not the same.
fn judge(
    (first, a): (&Path, &Verified),
    (second, b): (&Path, &Verified),
    compared: &mut SideBySide,
) -> Result<(), Error> {
    let found = |difference: Fault, compared: &mut SideBySide| {
        compared.difference = Some(difference.detail.to_string());
        Err(difference.into())
    };
    let same = match compare(a, b) {
        Ok(same) => same,
        Err(difference) => return found(difference, compared),
    };
    compared.same = same;
    if same == 0 {
        let why = "they have no verified chunk in common; run both with the same --verify every=N";
        return Err(refuse(second, format!("beside {}: {why}", first.display())));
    }
    let (only_a, only_b) = (&compared.only_first, &compared.only_second);
    if !only_a.is_empty() || !only_b.is_empty() {
        let has = |path: &Path, run: &Verified, only: &[u64]| {
            let every = run.every.as_deref().unwrap_or("?");
            let path = path.display();
            format!("{path} ({every}) has {}", named(only))
        };
        let why = format!(
            "compared {same} chunks, which are the same; {}; {}",
            has(first, a, only_a),
            has(second, b, only_b)
        );
        return Err(Error::local(FaultKind::BadInput, "compare runs", why));
    }
    if (a.chunks_verified, &a.all_results) != (b.chunks_verified, &b.all_results) {
        let why = format!(
            "the {same} chunks of the reports are the same, but older ones, of which only the digest of all results \
             was kept, are not: {} of {} chunks and {} of {}",
            a.all_results, a.chunks_verified, b.all_results, b.chunks_verified
        );
        return found(differ(last_maker(a), why), compared);
    }
    Ok(())
}

fn differ(rank: Rank, what: String) -> Fault {
    Fault::new(FaultKind::Drift, rank, "compare runs", what)
}

fn refuse(path: &Path, why: impl std::fmt::Display) -> Error {
    let text = format!("{}: {why}", path.display());
    Error::local(FaultKind::BadInput, "read report", text)
}

fn read(path: &Path) -> Result<Verified, Error> {
    let text = std::fs::read(path).map_err(|e| StageError::file("read report", path, &e))?;
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

/// How many chunks both have, if all are the same. The stages come in their order: what is made of other tensors differs
/// for a reason. A stage that one run does not have, such as a part of a stage, is left out.
fn compare(a: &Verified, b: &Verified) -> Result<u64, Fault> {
    let other: BTreeMap<u64, &Chunk> = b.chunks.iter().map(|chunk| (chunk.chunk, chunk)).collect();
    let mut same = 0;
    for chunk in &a.chunks {
        let Some(other) = other.get(&chunk.chunk) else {
            continue;
        };
        let differs = |stage: &Stage, detail: String| {
            let what = format!("chunk {}: {}: {detail}", chunk.chunk, stage.stage);
            differ(Rank::new(stage.rank), what)
        };
        if let (Some(source), Some(detail)) = (
            a.stages.first(),
            first_difference(&chunk.source, &other.source),
        ) {
            return Err(differs(source, detail));
        }
        for (stage, ours) in between(a, chunk) {
            let mut theirs = between(b, other);
            let theirs = theirs.find(|(other, _)| other.stage == stage.stage);
            if let Some((_, theirs)) = theirs.filter(|(_, theirs)| *theirs != ours) {
                let detail = format!(
                    "what it made has the digest {ours} in the first run and {theirs} in the second"
                );
                return Err(differs(stage, detail));
            }
        }
        same += 1;
    }
    Ok(same)
}

/// The stages between source and sink, and the digest of what each made of a chunk.
fn between<'a>(
    run: &'a Verified,
    chunk: &'a Chunk,
) -> impl Iterator<Item = (&'a Stage, &'a String)> {
    run.stages.iter().skip(1).zip(&chunk.seals)
}

/// The rank of the stage in front of the sink.
fn last_maker(run: &Verified) -> Rank {
    let maker = run.stages.iter().nth_back(1);
    Rank::new(maker.map_or(0, |stage| stage.rank))
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

    fn chunk(index: u64, input: &str, seals: &[&str]) -> Chunk {
        Chunk {
            chunk: index,
            source: BTreeMap::from([("in".into(), input.into())]),
            seals: seals.iter().map(|seal| (*seal).into()).collect(),
        }
    }

    fn run(stages: &[&str], chunks: Vec<Chunk>) -> Verified {
        let stage = |(rank, name): (u32, &&str)| Stage {
            stage: (*name).into(),
            rank,
        };
        Verified {
            every: None,
            chunks_verified: chunks.len() as u64,
            all_results: String::new(),
            stages: (0..).zip(stages).map(stage).collect(),
            chunks,
        }
    }

    const THREE: [&str; 3] = ["encode", "phase_b", "decode"];

    #[test]
    fn first_chunk_and_stage_that_differ_are_named() {
        let of = |seal, source| {
            let last = chunk(6, source, &["6"]);
            run(
                &THREE,
                vec![chunk(0, "1", &["2"]), chunk(3, "3", &[seal]), last],
            )
        };
        let (a, b) = (of("4", "5"), of("9", "9"));
        let difference = compare(&a, &b).unwrap_err();
        assert_eq!(difference.rank, Rank::new(1));
        let expected =
            "chunk 3: phase_b: what it made has the digest 4 in the first run and 9 in the second";
        assert_eq!(&*difference.detail, expected);
        let difference = compare(&a, &of("4", "9")).unwrap_err();
        assert_eq!(difference.rank, Rank::new(0));
        let expected = "chunk 6: encode: tensor in is 5 in the first run and 9 in the second";
        assert_eq!(&*difference.detail, expected);
        assert_eq!(compare(&a, &a), Ok(3));
    }

    #[test]
    fn runs_of_other_pipelines_are_compared_by_the_stages_that_both_have() {
        let whole = run(&THREE, vec![chunk(0, "1", &["2"])]);
        let parts = ["encode", "phase_b part 1 of 2", "phase_b", "decode"];
        let in_parts = |seal| run(&parts, vec![chunk(0, "1", &["7", seal])]);
        assert_eq!(compare(&whole, &in_parts("2")), Ok(1));
        assert_eq!(compare(&in_parts("2"), &whole), Ok(1));
        let difference = compare(&in_parts("3"), &whole).unwrap_err();
        assert_eq!(difference.rank, Rank::new(2));
        assert_eq!(last_maker(&in_parts("2")), Rank::new(2));
    }

    #[test]
    fn chunks_that_one_run_has_alone_are_left_out() {
        let a = run(&THREE, vec![chunk(0, "1", &["2"]), chunk(1, "7", &["7"])]);
        let b = run(&THREE, vec![chunk(0, "1", &["2"]), chunk(2, "8", &["8"])]);
        assert_eq!(compare(&a, &b), Ok(1));
        let alone_in_a = run(&THREE, vec![chunk(1, "7", &["7"])]);
        assert_eq!(compare(&alone_in_a, &b), Ok(0));
        let (a, b) = (&a.chunks, &b.chunks);
        assert_eq!([alone(a, b), alone(b, a)], [[1], [2]]);
        assert_eq!(named(&[1]), "1 more, chunk 1");
        assert_eq!(
            named(&[1, 2, 3, 4, 5, 6]),
            "6 more, chunks 1, 2, 3, 4, 5, …"
        );
    }

    #[test]
    fn tensor_that_is_missing_is_a_difference() {
        let a = run(&THREE, vec![chunk(0, "1", &["2"])]);
        let mut b = run(&THREE, vec![chunk(0, "1", &["2"])]);
        b.chunks[0].source.clear();
        let detail = compare(&a, &b).unwrap_err().detail;
        assert!(
            detail.contains("tensor in is 1") && detail.contains("none"),
            "{detail}"
        );
    }
}
