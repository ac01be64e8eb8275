//! What `pp faults` prints.

use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;
use serde_json::json;

use super::catalogue::{Entry, How, Transport, all};
use super::judge::Said;
use crate::exit::{Failure, print};

/// What is known of one entry after its job.
#[derive(Debug, Serialize)]
pub(super) struct Verdict {
    pub(super) id: &'static str,
    /// `behaved`, `misbehaved` or `skipped`.
    result: &'static str,
    /// What was wrong, or why it was skipped.
    why: Vec<String>,
    /// From the fault to the end of the last process.
    ms: Option<u128>,
    ranks: Vec<Said>,
}

const BEHAVED: &str = "behaved";
const MISBEHAVED: &str = "misbehaved";
const SKIPPED: &str = "skipped";

impl Verdict {
    pub(super) fn skipped(entry: &Entry, why: &str) -> Self {
        Self {
            id: entry.id,
            result: SKIPPED,
            why: vec![why.to_owned()],
            ms: None,
            ranks: Vec::new(),
        }
    }

    pub(super) fn failed(entry: &Entry, why: String) -> Self {
        Self {
            id: entry.id,
            result: MISBEHAVED,
            why: vec![why],
            ms: None,
            ranks: Vec::new(),
        }
    }

    pub(super) fn judged(
        entry: &Entry,
        wrong: Vec<String>,
        said: [Said; 2],
        took: Duration,
    ) -> Self {
        Self {
            id: entry.id,
            result: if wrong.is_empty() {
                BEHAVED
            } else {
                MISBEHAVED
            },
            why: wrong,
            ms: Some(took.as_millis()),
            ranks: said.into(),
        }
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

/// Whom each rank has to blame, and for what; or how else it ends.
fn ends(entry: &Entry) -> [String; 2] {
    use super::catalogue::End;
    entry.ends.map(|end| match end {
        End::Done => "done".into(),
        End::Killed => "killed".into(),
        End::Fault(kind, rank, operation) => format!("{kind}: rank {rank}: {operation}"),
    })
}

/// Prints the catalogue.
pub(super) fn list(as_json: bool) -> Result<(), Failure> {
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
        let needs = if entry.needs_fakes {
            ", needs the fakes"
        } else {
            ""
        };
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
pub(super) fn hooks(as_json: bool) -> Result<(), Failure> {
    if as_json {
        let hooks: Vec<_> = crate::fault::hooks()
            .map(|(name, ranks, needs)| json!({"name": name, "ranks": ranks, "needs": needs}))
            .collect();
        return print(&format!("{}\n", json!(hooks)));
    }
    let mut text = "PP_FAULT=NAME[@RANK][:chunk=N][:ms=T][:times=N]\n".to_owned();
    for (name, ranks, needs) in crate::fault::hooks() {
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
) -> Result<(), Failure> {
    let count = |result: &str| verdicts.iter().filter(|v| v.result == result).count();
    let (behaved, misbehaved, skipped) = (count(BEHAVED), count(MISBEHAVED), count(SKIPPED));
    if as_json {
        let report = json!({
            "transport": transport,
            "behaved": behaved,
            "misbehaved": misbehaved,
            "skipped": skipped,
            "faults": verdicts,
        });
        return print(&format!("{report}\n"));
    }
    let mut text = String::new();
    for Verdict {
        id,
        result,
        why,
        ms,
        ranks,
    } in verdicts
    {
        let ms = ms.map_or(String::new(), |ms| format!("{ms} ms"));
        let _ = writeln!(text, "{id:26} {result:10} {ms:>8}");
        for said in ranks {
            let _ = writeln!(text, "{:26} {said}", "");
        }
        for why in why {
            let _ = writeln!(text, "{:26} ! {why}", "");
        }
    }
    let _ = writeln!(
        text,
        "{behaved} behaved, {misbehaved} misbehaved, {skipped} skipped"
    );
    print(&text)
}
