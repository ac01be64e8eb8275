//! What happened, in one sentence.
//!
//! Hazard: a job that only got a SIGUSR1 looks as if it stood still, and one that a fault ended shows where its ranks
//! happened to be. Guarantee: why the recordings were written comes first: a panic, then a fault. Only of a fault that
//! ran out of time, or of a wait that is long beside everything before it, is it said that the job stood still.

use std::collections::BTreeMap;

use pp_contract::FaultKind;
use pp_transport::flight::Reason;

use super::pairs::Lack;
use super::ranked::Ranked;
use super::tell::{lasting, ranks};
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
    lacks: &[Lack],
) -> (String, bool) {
    // The last life of each rank, in the order of the ranks.
    let newest = ranked.iter().enumerate().map(|(at, r)| (r.rank(), at));
    let newest: Vec<usize> = newest.collect::<BTreeMap<_, _>>().into_values().collect();
    let did = |at: &usize| format!("{}{}", waits[*at].named, lasting(waits[*at].for_ns));
    let recordings = || newest.iter().map(|at| &ranked[*at].recording);
    let panic = recordings().find_map(|r| match &r.reason {
        Reason::Panic(text) => Some(format!("rank {} panicked: {text}", r.rank)),
        _ => None,
    });
    let faults = recordings().filter_map(|r| match &r.reason {
        Reason::Fault(fault) => Some((r.written.realtime_ns, fault)),
        _ => None,
    });
    let fault = faults.min_by_key(|(at, _)| *at).map(|(_, fault)| fault);
    let is_late = fault.is_some_and(|fault| fault.kind == FaultKind::TimedOut);
    // Of what ran out of time, where it stood says more than who noticed.
    let told = fault.filter(|_| !is_late || !missing.is_empty());
    let cause = panic.or_else(|| told.map(ToString::to_string));
    if cause.is_some() || !missing.is_empty() {
        let lost = (!missing.is_empty()).then(|| {
            let why = "left no recording: killed, stopped, or the file was not given";
            format!("{} {why}", ranks(missing))
        });
        let all = cause.into_iter().chain(lost);
        let all: Vec<String> = all.chain(newest.iter().map(did)).collect();
        return (all.join("; "), false);
    }
    let asked = "the job was running when it was asked";
    match (stood(ranked, waits, lacks), fault) {
        (Some((at, text)), _) if is_late || is_long(&ranked[at], &waits[at]) => (text, false),
        (Some((at, _)), _) => {
            let is_busy = |at: &&usize| waits[**at].on.is_empty();
            let mut busy: Vec<String> = newest.iter().filter(is_busy).map(did).collect();
            if busy.is_empty() {
                busy.push(did(&at));
            }
            (format!("{asked}; {}", busy.join("; ")), true)
        }
        (None, Some(fault)) => (fault.to_string(), false),
        (None, None) => {
            let idle = "no rank had begun what it had not ended";
            (format!("{asked}; {idle}"), true)
        }
    }
}

/// Says whether a wait is long beside what was usual at this rank.
fn is_long(own: &Ranked, wait: &Wait) -> bool {
    let mut begun: Vec<u64> = own.operations().map(|o| o.prepared_ns).collect();
    begun.sort_unstable();
    let longest = begun.windows(2).map(|pair| pair[1] - pair[0]).max();
    let usual = longest.unwrap_or(0).saturating_mul(TIMES_AS_LONG);
    let least = match begun.len() {
        0..3 => LONG_AT_FIRST_NS,
        _ => LONG_NS,
    };
    wait.for_ns.unwrap_or(0) >= least.max(usual)
}

/// Where it stood still, and whose wait led there; nothing where no rank had anything to wait for.
fn stood(ranked: &[Ranked], waits: &[Wait], lacks: &[Lack]) -> Option<(usize, String)> {
    let place = |rank: &u32| ranked.iter().rposition(|r| r.rank() == *rank);
    // The rank that waits longest is asked first, and then the rank that it waits for.
    let waiting = waits.iter().enumerate().filter(|(_, wait)| !wait.is_idle);
    let (mut at, _) = waiting.max_by_key(|(_, wait)| wait.for_ns)?;
    let mut seen = vec![at];
    loop {
        let (rank, wait) = (ranked[at].rank(), &waits[at]);
        let Some(next) = wait.on.iter().find_map(place) else {
            let what = format!("{}{}", wait.what, lasting(wait.for_ns));
            return Some((at, format!("it stood still at rank {rank}: {what}")));
        };
        if waits[next].is_idle {
            let other = ranked[next].rank();
            let why = match lacks.iter().any(|lack| lack.rank == other) {
                true => format!("never came; there, {}", waits[next].what),
                false => "had nothing to do: look at what was between them".to_owned(),
            };
            let text = format!("rank {rank} waited for rank {other}, which {why}");
            return Some((at, text));
        }
        if seen.contains(&next) {
            let all: Vec<u32> = seen.iter().map(|at| ranked[*at].rank()).collect();
            return Some((at, format!("{} waited for each other", ranks(&all))));
        }
        seen.push(next);
        at = next;
    }
}
