//! What the ranks did about a fault, against what they have to do.

use std::path::Path;

use pp_contract::{Pipeline, Rank};
use pp_job::command_line::code_of;

use super::catalogue::{End, OnPipeline};
use super::clip;
use super::job::Outcome;
use super::log;
use crate::hook::AFTER;
use crate::trial::{ASIDE, Ended};

/// Everything that is wrong with how a job ended; not how long that took.
pub(super) fn judge(trial: &OnPipeline<'_>, outcome: &Outcome, folder: &Path) -> Vec<String> {
    let OnPipeline { entry, pipeline } = *trial;
    let mut wrong = Vec::new();
    for (rank, ended) in pipeline.world_size().ranks().zip(&outcome.ranks) {
        if let Err(why) = check_end(entry.ends.of(rank, pipeline), pipeline, ended) {
            wrong.push(format!("rank {rank}: {why}"));
        }
        let misread = ended.lines.iter().filter(|line| line.contains(AFTER));
        wrong.extend(misread.map(|line| format!("rank {rank}: {line}")));
    }
    if outcome.left_behind {
        wrong.push("a process of a rank outlived it".into());
    }
    wrong.extend(check_files(folder, entry.ends.is_done()));
    if entry.is_hooked() && !is_hooked(&outcome.ranks) {
        wrong.push("the fault was never made".into());
    }
    if !entry.logs.is_empty() {
        wrong.extend(log::check(entry.logs, pipeline, &outcome.ranks));
    }
    for word in entry.words {
        let has_word = |ended: &Ended| ended.lines.iter().any(|line| line.contains(word));
        if !outcome.ranks.iter().any(has_word) {
            wrong.push(format!("no rank said {word:?}"));
        }
    }
    wrong
}

fn is_hooked(ranks: &[Ended]) -> bool {
    let mut lines = ranks.iter().flat_map(|ended| &ended.lines);
    lines.any(|line| crate::hook::is_strike(line))
}

fn check_end(end: End, pipeline: &Pipeline, ended: &Ended) -> Result<(), String> {
    let (code, wanted) = match end {
        End::Done => (0, None),
        End::Killed => (-9, None),
        End::Fault(kind, role, operation) => {
            let rank: Rank = role.rank(pipeline);
            let line = format!("{kind}: rank {rank}: {operation}: ");
            (code_of(kind).into(), Some(line))
        }
    };
    ended.check(&[code])?;
    let errors: Vec<_> = ended.errors().collect();
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
        .filter(|name| name != clip::NAME && !ASIDE.iter().any(|(aside, _)| aside == name))
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
    use crate::trial::TWO;

    const ERROR_8: &str = "pp: error: peer misbehaved: rank 0: receive header: half a frame";

    fn ended(code: i32, lines: &[&str]) -> Ended {
        Ended {
            code: Some(code),
            lines: lines.iter().map(|&line| line.to_owned()).collect(),
        }
    }

    /// What two ranks do about half a frame when all is well, and what is wrong after a change.
    fn wrong_after(change: impl FnOnce(&mut Outcome)) -> Vec<String> {
        let entry = all().find(|entry| entry.id == "size.truncated").unwrap();
        let hook = format!("{}truncated-frame at chunk 3", crate::hook::SAYS);
        let mut outcome = Outcome {
            ranks: vec![ended(8, &[ERROR_8]), ended(8, &[&hook, ERROR_8])],
            took: Duration::from_millis(3),
            left_behind: false,
        };
        change(&mut outcome);
        let pipeline = &TWO.parse().unwrap();
        let trial = OnPipeline { entry, pipeline };
        judge(&trial, &outcome, Path::new("/no/such/folder"))
    }

    #[test]
    fn a_job_that_ends_as_it_must_behaves() {
        assert_eq!(wrong_after(|_| ()), [""; 0]);
    }

    #[test]
    fn each_thing_that_is_wrong_is_found() {
        type Change = fn(&mut Outcome);
        let changes: [(&str, Change); 9] = [
            ("rank 0: it ended with 0", |o| o.ranks[0] = ended(0, &[])),
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
            ("did not end", |o| o.ranks[1].code = None),
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
        let misread = format!("{}decode worked on chunk 3 {AFTER}", crate::hook::SAYS);
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
