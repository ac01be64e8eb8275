//! What the ranks did about a fault, against what they have to do.

use std::fmt;
use std::path::Path;

use pp_contract::Rank;
use pp_job::{WORLD, code_of};
use serde::Serialize;

use super::catalogue::{End, Entry};
use super::job::{Ended, Outcome};
use super::log;
use crate::hook::AFTER;
use crate::trial::ASIDE;

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

/// Everything that is wrong with how a job ended; not how long that took.
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
    lines.any(|line| crate::hook::is_strike(line))
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
        .filter(|name| !ASIDE.iter().any(|(aside, _)| aside == name))
        .collect();
    names.sort();
    let wanted: &[&str] = if is_done { &["out.y4m"] } else { &[] };
    if names == wanted {
        return Vec::new();
    }
    vec![format!("files {names:?}, not {wanted:?}")]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::entries::all;
    use super::*;

    const ERROR_8: &str = "pp: error: peer misbehaved: rank 0: receive header: half a frame";

    fn ended(code: i32, lines: &[&str]) -> Ended {
        Ended {
            code: Some(code),
            lines: lines.iter().map(|&line| line.to_owned()).collect(),
            by_us: false,
        }
    }

    /// What both ranks do about half a frame when all is well, and what is wrong after a change.
    fn wrong_after(change: impl FnOnce(&mut Outcome)) -> Vec<String> {
        let entry = all().find(|entry| entry.id == "size.truncated").unwrap();
        let hook = format!("{}truncated-frame at chunk 3", crate::hook::SAYS);
        let mut outcome = Outcome {
            ranks: [ended(8, &[ERROR_8]), ended(8, &[&hook, ERROR_8])],
            took: Duration::from_millis(3),
            left_behind: false,
        };
        change(&mut outcome);
        judge(entry, &outcome, Path::new("/no/such/folder"))
    }

    #[test]
    fn a_job_that_ends_as_it_must_behaves() {
        assert_eq!(wrong_after(|_| ()), [""; 0]);
    }

    #[test]
    fn each_thing_that_is_wrong_is_found() {
        type Change = fn(&mut Outcome);
        let changes: [(&str, Change); 9] = [
            ("rank 0: exit 0", |o| o.ranks[0] = ended(0, &[])),
            ("rank 0: it said", |o| o.ranks[0].lines.clear()),
            ("rank 0: it said", |o| {
                o.ranks[0] = ended(8, &[ERROR_8, ERROR_8]);
            }),
            ("rank 1: it said", |o| {
                o.ranks[1].lines[1] = ERROR_8.replace("rank 0", "rank 1");
            }),
            ("rank 1: it said", |o| {
                o.ranks[1].lines[1] = ERROR_8.replace("header", "payload");
            }),
            ("deadline", |o| o.ranks[1].by_us = true),
            ("outlived", |o| o.left_behind = true),
            ("never made", |o| drop(o.ranks[1].lines.remove(0))),
            ("never made", |o| {
                o.ranks[1].lines[0] =
                    format!("{}truncated-frame did not strike", crate::hook::SAYS);
            }),
        ];
        for (word, change) in changes {
            let wrong = wrong_after(change);
            assert!(wrong.iter().any(|w| w.contains(word)), "{word}: {wrong:?}");
        }
        let misread = format!("{}chunk 3 was decoded {AFTER}", crate::hook::SAYS);
        let wrong = wrong_after(|o| o.ranks[0].lines.push(misread.clone()));
        assert_eq!(wrong, [format!("rank 0: {misread}")]);
    }

    #[test]
    fn a_file_that_is_left_is_found() {
        let folder = std::env::temp_dir().join(format!("pp-judge-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("flight")).unwrap();
        assert_eq!(check_files(&folder, false), [""; 0]);
        assert_eq!(check_files(&folder, true).len(), 1);
        std::fs::write(folder.join("out.y4m"), b"").unwrap();
        assert_eq!(check_files(&folder, true), [""; 0]);
        assert_eq!(check_files(&folder, false).len(), 1);
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
