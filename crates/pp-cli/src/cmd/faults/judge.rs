//! What the ranks did about a fault, against what they have to do.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use pp_contract::Rank;
use serde::Serialize;

use super::catalogue::{End, Entry};
use super::job::{ASIDE, Ended, Outcome};
use super::log;
use crate::exit::code_of;
use crate::fault::AFTER;
use crate::job::WORLD;

/// Time from a fault to the end of the last rank, however loaded the machine.
const WITHIN: Duration = Duration::from_secs(10);
/// How the line of an error begins.
const ERROR: &str = "pp: error: ";

/// What a rank said and how it ended.
#[derive(Debug, Serialize)]
pub(super) struct Said {
    rank: u32,
    ended: String,
    /// Its error.
    said: Option<String>,
}

impl Said {
    pub(super) fn of(rank: usize, ended: &Ended) -> Self {
        let error = ended.lines.iter().rev().find_map(|l| l.strip_prefix(ERROR));
        Self {
            rank: rank as u32,
            ended: ended.how(),
            said: error.map(|line| without_hint(line).to_owned()),
        }
    }
}

/// The record that the hint behind an error names goes away with the job.
fn without_hint(error: &str) -> &str {
    let hint = error.find(" (what the ranks did last: ");
    &error[..hint.unwrap_or(error.len())]
}

/// On one line.
impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, ended, said } = self;
        write!(f, "rank {rank} ({ended})")?;
        said.as_ref().map_or(Ok(()), |said| write!(f, ": {said}"))
    }
}

/// Everything that is wrong with how a job ended.
pub(super) fn judge(entry: &Entry, outcome: &Outcome, folder: &Path) -> Vec<String> {
    let mut wrong = Vec::new();
    for (rank, (end, ended)) in entry.ends.iter().zip(&outcome.ranks).enumerate() {
        if let Err(why) = check_end(end, ended) {
            wrong.push(format!("rank {rank}: {why}"));
        }
        let misread = ended.lines.iter().filter(|line| line.contains(AFTER));
        wrong.extend(misread.map(|line| format!("rank {rank}: {line}")));
    }
    if outcome.left_behind {
        wrong.push("a process of a rank outlived it".into());
    }
    let is_done = entry.ends.iter().all(|end| matches!(end, End::Done));
    // Without a hook nobody knows when it happened; the deadline of the job counts.
    if outcome.took > WITHIN && entry.is_hooked() && !is_done {
        let (took, within) = (outcome.took.as_millis(), WITHIN.as_millis());
        wrong.push(format!(
            "{took} ms from the fault to the last end, of {within}"
        ));
    }
    wrong.extend(check_files(folder, is_done && entry.writes));
    if entry.is_hooked() && !is_hooked(&outcome.ranks) {
        wrong.push("the fault was never made".into());
    }
    if !entry.logs.is_empty() {
        wrong.extend(log::check(entry.logs, &outcome.ranks));
    }
    for word in entry.words {
        let has_word = |ended: &Ended| ended.lines.iter().any(|line| line.contains(word));
        if !outcome.ranks.iter().any(has_word) {
            wrong.push(format!("no rank said {word:?}"));
        }
    }
    wrong
}

fn is_hooked(ranks: &[Ended; WORLD as usize]) -> bool {
    let mut lines = ranks.iter().flat_map(|ended| &ended.lines);
    lines.any(|line| line.starts_with(crate::fault::SAYS))
}

fn check_end(end: &End, ended: &Ended) -> Result<(), String> {
    if ended.by_us {
        return Err("it was still there at the deadline".into());
    }
    let (wanted_how, wanted) = match end {
        End::Done => ("exit 0".to_owned(), None),
        End::Killed => ("signal 9".to_owned(), None),
        End::Fault(kind, rank, operation) => (
            format!("exit {}", code_of(*kind)),
            Some(format!("{kind}: rank {}: {operation}: ", Rank::new(*rank))),
        ),
    };
    let errors: Vec<_> = ended
        .lines
        .iter()
        .filter_map(|line| line.strip_prefix(ERROR))
        .collect();
    if ended.how() != wanted_how {
        let said = errors.join(" | ");
        return Err(format!(
            "{}, not {wanted_how}; it said: {said:?}",
            ended.how()
        ));
    }
    match (wanted, &errors[..]) {
        (None, []) => Ok(()),
        (Some(wanted), [said]) if said.starts_with(&wanted) => Ok(()),
        (wanted, said) => Err(format!("it said {said:?}, not {wanted:?}")),
    }
}

/// An output has its name only when the job is done, and nothing else is there.
fn check_files(folder: &Path, is_done: bool) -> Vec<String> {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<_> = names
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| !ASIDE.contains(&name.as_str()))
        .collect();
    names.sort();
    let wanted: &[&str] = if is_done { &["out.y4m"] } else { &[] };
    if names == wanted {
        return Vec::new();
    }
    vec![format!("files {names:?}, not {wanted:?}")]
}
