//! What happened, in one sentence.
//!
//! Hazard: a job that only got a SIGUSR1 looks as if it stood still, and one that a fault ended shows where its ranks
//! happened to be. Guarantee: why the recordings were written comes first: a panic, then a fault. Only of a fault that
//! ran out of time, or of a wait that is long beside everything before it, is it said that the job stood still.

use std::collections::BTreeMap;

use pp_contract::FaultKind;
use pp_transport::flight::Reason;

use super::pairs::Findings;
use super::ranked::Ranked;
use super::tell;
use super::waits::Wait;

/// No wait below this is called a standstill when nothing failed.
const LONG_NS: u64 = 1_000_000_000;
/// No wait below this is called a standstill of a rank that had too few operations to tell what is
/// usual.
const LONG_AT_FIRST_NS: u64 = 5_000_000_000;
/// A standstill is so many times as long as the longest pause before it.
const TIMES_AS_LONG: u64 = 4;

/// What happened; and whether the job was asked while it ran, with nothing wrong with it.
pub(super) fn story(
    ranked: &[Ranked],
    waits: &[Wait],
    missing: &[u32],
    findings: &Findings,
) -> (String, bool) {
    let ended = |verdict: String| (verdict, false);
    let newest = newest(ranked);
    let panic = newest
        .iter()
        .find_map(|at| match &ranked[*at].recording.reason {
            Reason::Panic(text) => Some(format!("rank {} panicked: {text}", ranked[*at].rank())),
            _ => None,
        });
    let faults = newest.iter().filter_map(|at| {
        let recording = &ranked[*at].recording;
        match &recording.reason {
            Reason::Fault(fault) => Some((recording.written.realtime_ns, fault)),
            _ => None,
        }
    });
    let fault = faults.min_by_key(|(at, _)| *at).map(|(_, fault)| fault);
    let is_late = fault.is_some_and(|fault| fault.kind == FaultKind::TimedOut);
    let cause = panic.or_else(|| {
        // Of what ran out of time, where it stood says more than who noticed.
        let fault = fault.filter(|_| !is_late || !missing.is_empty());
        fault.map(ToString::to_string)
    });
    let mut doing: Vec<String> = cause.into_iter().collect();
    let is_explained = !doing.is_empty();
    if is_explained || !missing.is_empty() {
        if !missing.is_empty() {
            doing.push(format!(
                "{} left no recording: killed, stopped, or the file was not given",
                tell::ranks(missing)
            ));
        }
        doing.extend(newest.iter().map(|at| did(&ranked[*at], &waits[*at])));
        return ended(doing.join("; "));
    }
    let Some((at, text)) = stood(ranked, waits, findings) else {
        return match fault {
            Some(fault) => ended(fault.to_string()),
            None => {
                let idle = "the job was running when it was asked; no rank had begun what it had not ended";
                (idle.into(), true)
            }
        };
    };
    if is_late || is_long(&ranked[at], &waits[at]) {
        return ended(text);
    }
    let mut busy = newest;
    busy.retain(|at| waits[*at].on.is_empty());
    if busy.is_empty() {
        busy.push(at);
    }
    let busy: Vec<String> = busy
        .iter()
        .map(|at| did(&ranked[*at], &waits[*at]))
        .collect();
    let verdict = format!("the job was running when it was asked; {}", busy.join("; "));
    (verdict, true)
}

/// The last life of each rank, in the order of the ranks.
fn newest(ranked: &[Ranked]) -> Vec<usize> {
    let by_rank = ranked.iter().enumerate().map(|(at, r)| (r.rank(), at));
    by_rank.collect::<BTreeMap<_, _>>().into_values().collect()
}

/// What a rank did last: `rank 1 was inside phase_b for 1.568 s`.
fn did(own: &Ranked, wait: &Wait) -> String {
    let lasted = tell::lasting(wait.for_ns);
    match wait.what.strip_prefix("it ") {
        Some(what) => format!("rank {} {what}{lasted}", own.rank()),
        None => format!("rank {}: {}{lasted}", own.rank(), wait.what),
    }
}

/// Whether a wait is long beside what was usual at this rank.
fn is_long(own: &Ranked, wait: &Wait) -> bool {
    let waited = wait.for_ns.unwrap_or(0);
    let mut begun: Vec<u64> = (own.recording.operations.iter())
        .map(|o| o.prepared_ns)
        .collect();
    begun.sort_unstable();
    let longest = begun.windows(2).map(|pair| pair[1] - pair[0]).max();
    let usual = longest.unwrap_or(0).saturating_mul(TIMES_AS_LONG);
    let least = if begun.len() < 3 {
        LONG_AT_FIRST_NS
    } else {
        LONG_NS
    };
    waited >= least.max(usual)
}

/// Where it stood still, and whose wait led there; nothing where no rank had anything to wait for.
fn stood(ranked: &[Ranked], waits: &[Wait], findings: &Findings) -> Option<(usize, String)> {
    let place = |rank: u32| ranked.iter().rposition(|r| r.rank() == rank);
    // The rank that waits longest is asked first, and then the rank that it waits for.
    let longest = waits
        .iter()
        .enumerate()
        .filter(|(_, wait)| !wait.is_idle)
        .max_by_key(|(_, wait)| wait.for_ns)
        .map(|(at, _)| at)?;
    let mut at = longest;
    let mut seen = vec![at];
    loop {
        let (rank, wait) = (ranked[at].rank(), &waits[at]);
        let next = wait.on.iter().find_map(|rank| place(*rank));
        match next {
            None => {
                let lasted = tell::lasting(wait.for_ns);
                let text = format!("it stood still at rank {rank}: {}{lasted}", wait.what);
                return Some((at, text));
            }
            Some(next) if waits[next].is_idle => {
                let other = ranked[next].rank();
                if findings.absent.contains(&other) {
                    let theirs = &waits[next].what;
                    let text = format!(
                        "rank {rank} waited for rank {other}, which never came; there, {theirs}"
                    );
                    return Some((at, text));
                }
                let text = format!(
                    "rank {rank} waited for rank {other}, which had nothing to do: look at what was \
                     between them"
                );
                return Some((at, text));
            }
            Some(next) if seen.contains(&next) => {
                let all: Vec<u32> = seen.iter().map(|at| ranked[*at].rank()).collect();
                return Some((at, format!("{} waited for each other", tell::ranks(&all))));
            }
            Some(next) => {
                seen.push(next);
                at = next;
            }
        }
    }
}
