//! What `pp-trials faults` prints.

use std::fmt::Write as _;
use std::time::Duration;

use pp_cli::print;
use pp_job::Error;
use serde::Serialize;
use serde_json::json;

use super::catalogue::{Entry, How, Transport};
use super::entries::all;
use super::judge::Said;

/// What is known of one entry after its job.
#[derive(Debug, Default, Serialize)]
pub(super) struct Verdict {
    pub(super) id: &'static str,
    /// `behaved`, `misbehaved` or `skipped`.
    result: &'static str,
    /// What was wrong, or why it was skipped.
    why: Vec<String>,
    /// From the fault to the end of the last process.
    ms: Option<u128>,
    /// The bound of that, where there is one, and whether it was kept.
    bound_ms: Option<u128>,
    in_time: Option<bool>,
    ranks: Vec<Said>,
}

const BEHAVED: &str = "behaved";
const MISBEHAVED: &str = "misbehaved";
const SKIPPED: &str = "skipped";

impl Verdict {
    pub(super) fn skipped(entry: &Entry, why: &str) -> Self {
        Self::without_times(entry, SKIPPED, vec![why.to_owned()])
    }

    pub(super) fn failed(entry: &Entry, why: String) -> Self {
        Self::without_times(entry, MISBEHAVED, vec![why])
    }

    fn without_times(entry: &Entry, result: &'static str, why: Vec<String>) -> Self {
        Self {
            id: entry.id,
            result,
            why,
            ..Self::default()
        }
    }

    pub(super) fn judged(
        entry: &Entry,
        wrong: Vec<String>,
        said: [Said; 2],
        took: Duration,
    ) -> Self {
        let result = match wrong.is_empty() {
            true => BEHAVED,
            false => MISBEHAVED,
        };
        let bound = entry.bound();
        Self {
            ms: Some(took.as_millis()),
            bound_ms: bound.map(|bound| bound.as_millis()),
            in_time: bound.map(|bound| took <= bound),
            ranks: said.into(),
            ..Self::without_times(entry, result, wrong)
        }
    }

    /// It took longer than its bound.
    pub(super) fn is_late(&self) -> bool {
        self.in_time == Some(false)
    }

    pub(super) fn is_bad(&self) -> bool {
        self.result == MISBEHAVED
    }
}

/// The text of what is done to break a rule.
fn how(entry: &Entry) -> String {
    match entry.how {
        How::Hook(hook) => format!("PP_FAULT={hook}"),
        How::Variable(rank, name, value) => format!("{name}={value} on rank {rank}"),
        How::Arguments(rank, args) => format!("{} on rank {rank}", args.join(" ")),
        How::Nothing => "nothing".into(),
    }
}

/// Which rank each rank has to blame, and for what; or how else it ends.
fn ends(entry: &Entry) -> [String; 2] {
    use super::catalogue::End;
    entry.ends.map(|end| match end {
        End::Done => "done".into(),
        End::Killed => "killed".into(),
        End::Fault(kind, rank, operation) => format!("{kind}: rank {rank}: {operation}"),
    })
}

/// Prints the catalogue.
pub(super) fn list(as_json: bool) -> Result<(), Error> {
    if as_json {
        let entries = all().map(|entry| {
            json!({
                "id": entry.id,
                "rule": entry.rule,
                "breaks": entry.breaks,
                "how": how(entry),
                "rank": entry.rank(),
                "transports": entry.transports,
                "needs_fakes": entry.needs_fakes,
                "args": entry.args,
                "ends": ends(entry),
            })
        });
        let entries: Vec<_> = entries.collect();
        return print(&format!("{}\n", json!(entries)));
    }
    let mut text = String::new();
    for entry in all() {
        let [front, phase_b] = ends(entry);
        let on: Vec<_> = entry.transports.iter().map(|t| format!("{t:?}")).collect();
        let on = on.join(", ").to_lowercase();
        let needs = entry.needs_fakes.then_some(", needs the fakes");
        let needs = needs.unwrap_or_default();
        let _ = writeln!(text, "{:26} {}", entry.id, entry.rule);
        let _ = writeln!(text, "{:26} broken: {} ({})", "", entry.breaks, how(entry));
        let ends = if front == phase_b {
            format!("both ranks: {front}")
        } else {
            format!("rank 0: {front}; rank 1: {phase_b}")
        };
        let _ = writeln!(text, "{:26} {ends} [{on}{needs}]", "");
    }
    print(&text)
}

/// Prints the hooks of `PP_FAULT`.
pub(super) fn hooks(as_json: bool) -> Result<(), Error> {
    if as_json {
        let hooks: Vec<_> = crate::hook::hooks()
            .map(|(name, ranks, needs)| json!({"name": name, "ranks": ranks, "needs": needs}))
            .collect();
        return print(&format!("{}\n", json!(hooks)));
    }
    let mut text = "PP_FAULT=NAME[@RANK][:chunk=N][:ms=T][:times=N]\n".to_owned();
    for (name, ranks, needs) in crate::hook::hooks() {
        let ranks: Vec<_> = ranks.iter().map(ToString::to_string).collect();
        let needs = needs.map_or(String::new(), |needs| format!(", needs {needs}"));
        let _ = writeln!(text, "{name:26} rank {}{needs}", ranks.join(" or "));
    }
    print(&text)
}

/// Prints what became of the entries that were run.
pub(super) fn verdicts(
    as_json: bool,
    transport: Transport,
    verdicts: &[Verdict],
) -> Result<(), Error> {
    let count = |result: &str| verdicts.iter().filter(|v| v.result == result).count();
    let (behaved, misbehaved, skipped) = (count(BEHAVED), count(MISBEHAVED), count(SKIPPED));
    let late = verdicts.iter().filter(|v| v.is_late()).count();
    if as_json {
        let report = json!({
            "transport": transport,
            "behaved": behaved,
            "misbehaved": misbehaved,
            "skipped": skipped,
            "late": late,
            "faults": verdicts,
        });
        return print(&format!("{report}\n"));
    }
    let mut text = String::new();
    for verdict in verdicts {
        let (id, result) = (verdict.id, verdict.result);
        let ms = verdict.ms.map_or(String::new(), |ms| format!("{ms} ms"));
        let bound = verdict.bound_ms;
        let bound = bound.map_or(String::new(), |bound| format!(" of {bound} ms"));
        let late = if verdict.is_late() { " LATE" } else { "" };
        let _ = writeln!(text, "{id:26} {result:10} {ms:>8}{bound}{late}");
        for said in &verdict.ranks {
            let _ = writeln!(text, "{:26} {said}", "");
        }
        for why in &verdict.why {
            let _ = writeln!(text, "{:26} ! {why}", "");
        }
    }
    let _ = writeln!(
        text,
        "{behaved} behaved, {misbehaved} misbehaved, {skipped} skipped; {late} late"
    );
    print(&text)
}

#[cfg(test)]
mod tests {
    use super::super::job::Ended;
    use super::*;

    fn entry(id: &str) -> &'static Entry {
        all().find(|entry| entry.id == id).unwrap()
    }

    #[test]
    fn the_bound_is_a_second_after_the_fault_is_noticed() {
        let bound = |id| entry(id).bound().map(|bound| bound.as_secs());
        assert_eq!(bound("OM-13.kill-front"), Some(1));
        assert_eq!(bound("OM-13.stop-front"), Some(3 + 1));
        assert_eq!(bound("OM-13.stuck"), Some(3 + 1));
        // Nothing says when it was made; the job goes on.
        assert_eq!(bound("OM-04.setting"), None);
        assert_eq!(bound("OM-09"), None);
    }

    #[test]
    fn a_late_end_is_told_beside_the_outcome() {
        let verdict = |seconds, wrong: &[&str]| {
            let wrong = wrong.iter().map(|&what| what.to_owned()).collect();
            let said = [0, 1].map(|rank| Said::of(rank, &Ended::default()));
            let took = Duration::from_secs(seconds);
            Verdict::judged(entry("OM-13.kill-front"), wrong, said, took)
        };
        let result = |verdict: &Verdict| (verdict.is_bad(), verdict.is_late());
        assert_eq!(result(&verdict(1, &[])), (false, false));
        assert_eq!(result(&verdict(11, &[])), (false, true));
        assert_eq!(result(&verdict(1, &["it was silent"])), (true, false));
    }
}
