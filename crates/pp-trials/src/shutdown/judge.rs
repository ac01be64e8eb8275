//! How a cell ought to end, and in which time.

use std::time::Duration;

use pp_runtime::times::MISSED_HEARTBEATS;

use super::cell::{Cell, Event, Ours, Side, Wish};
use super::play::Played;
use super::scene::SHORT;
use crate::trial::{ENDS_WITHIN, Ended, Ground, Time};

/// A death is seen as soon as a socket says so.
pub(super) const DEATH_WITHIN: Duration = Duration::from_millis(100);
/// How late a sleep may end, and a line be read here.
pub(super) const LATE: Duration = Duration::from_millis(25);
/// A drain on GPUs ends in good order, which is no fault's end: NCCL destroys its communicators, which takes it
/// half a second, and longer while other jobs on the same GPUs do.
const DESTROY: Duration = Duration::from_millis(700);

/// Exit codes, as `exit.rs` has them.
const DONE: i32 = 0;
pub(super) const DIED: i32 = 7;
pub(super) const LATE_CODE: i32 = 9;
const DEVICE: i32 = 10;
pub(super) const INTERRUPTED: i32 = 130;
pub(super) const KILLED: i32 = -9;

/// The codes that a cell may end with: ours, and the peer's.
pub(super) struct Expected {
    pub(super) ours: Vec<i32>,
    pub(super) peers: Vec<i32>,
}

pub(super) fn expected(cell: Cell, ground: Ground) -> Expected {
    if cell.supervised {
        return supervised(cell);
    }
    let begun = !cell.ours.is_before_the_first_chunk();
    // The fakes' transfer that hangs: nothing can drain, so one of them runs out of time.
    let hangs = cell.ours == Ours::Receive && ground == Ground::Fakes;
    let asked = cell.wish != Wish::GoOn;
    let done = if asked { INTERRUPTED } else { DONE };
    // What the event alone leads to.
    let (mut ours, mut peers) = match cell.event {
        Event::Computing if hangs => (vec![LATE_CODE], vec![LATE_CODE]),
        Event::Computing => (vec![done], vec![done]),
        Event::Left if !begun => (vec![DIED, INTERRUPTED], vec![INTERRUPTED]),
        Event::Left if cell.side == Side::Source => (vec![DIED], vec![DONE]),
        // It leaves because it was interrupted, or by itself.
        Event::Left => (vec![DONE, INTERRUPTED], vec![DONE, INTERRUPTED]),
        Event::Killed => (vec![DIED], vec![KILLED]),
        // A stopped peer that goes on was told to drain, or why we ended, or finds us gone.
        Event::Stopped if asked => (vec![LATE_CODE], vec![LATE_CODE, DIED, INTERRUPTED]),
        Event::Stopped => (vec![LATE_CODE], vec![LATE_CODE, DIED]),
        // NCCL itself may be the first to say that its network is gone.
        Event::Cut if cell.ours == Ours::Connect && ground == Ground::Gpus => {
            (vec![LATE_CODE, DEVICE], vec![LATE_CODE, DEVICE])
        }
        Event::Cut => (vec![LATE_CODE], vec![LATE_CODE]),
    };
    let ends_at_once = match cell.wish {
        Wish::GoOn => false,
        // Where nothing was admitted there is nothing to finish.
        Wish::Drain => !begun && (cell.side == Side::Source || cell.event != Event::Stopped),
        Wish::Abort => true,
    };
    if ends_at_once || (cell.wish == Wish::Drain && !begun) {
        // The first to come counts: what happened, or the interrupt.
        if matches!(cell.event, Event::Computing | Event::Stopped | Event::Cut) {
            ours = vec![];
        }
        ours.push(INTERRUPTED);
        match cell.event {
            Event::Computing => peers = vec![INTERRUPTED],
            Event::Stopped | Event::Left => peers.push(INTERRUPTED),
            Event::Killed | Event::Cut => {}
        }
        if hangs && cell.event == Event::Computing {
            // Its process is ended under a call that does not come back.
            peers.push(LATE_CODE);
        }
    }
    if cell.ours == Ours::Idle && cell.side == Side::Source && asked {
        // With nothing in flight a drain is done at once, whatever becomes of the peer; one that goes on finds that it
        // was told to drain.
        ours.push(INTERRUPTED);
        if matches!(cell.event, Event::Computing | Event::Stopped) {
            peers.push(INTERRUPTED);
        }
    }
    Expected { ours, peers }
}

/// The one code of a job: that of the supervisor.
fn supervised(cell: Cell) -> Expected {
    let mut ours = match cell.event {
        Event::Killed if cell.restarts() => vec![DONE],
        Event::Killed => vec![DIED],
        Event::Stopped => vec![LATE_CODE],
        _ => vec![DONE],
    };
    if cell.wish == Wish::Abort || (cell.wish == Wish::Drain && cell.event == Event::Computing) {
        ours = vec![INTERRUPTED];
    }
    let peers = vec![];
    Expected { ours, peers }
}

/// What was not as it should be: how it ended, and what was left.
pub(super) fn wrong(cell: Cell, ground: Ground, played: &Played) -> Vec<String> {
    let Expected { ours, peers } = expected(cell, ground);
    let mut wrong = played.left.clone();
    let ended = played.ended.iter();
    for ((who, wanted), ended) in [("we", ours), ("the peer", peers)].iter().zip(ended) {
        if let Err(why) = ended.check(wanted) {
            wrong.push(format!("{who}: {why}"));
        }
    }
    wrong
}

/// The times that were seen, with their bounds.
pub(super) fn times(cell: Cell, ground: Ground, heartbeat: Duration, played: &Played) -> Vec<Time> {
    let seen = played.times;
    let silence = heartbeat * MISSED_HEARTBEATS + LATE;
    let noticed = match cell.event {
        Event::Computing => None,
        Event::Left | Event::Killed => Some(DEATH_WITHIN),
        Event::Stopped | Event::Cut => Some(silence),
    };
    // Where no rank noticed anything, an interrupt or the peer's good end came at the beginning.
    let mut from = seen.noticed.unwrap_or_default();
    let mut within = ENDS_WITHIN;
    let waits_for_the_answer = cell.event == Event::Stopped
        && (cell.side, cell.ours, cell.wish) == (Side::Source, Ours::Idle, Wish::Drain);
    if cell.event == Event::Cut || waits_for_the_answer {
        // Each side finds out for itself; a source that has every result waits for the answer to its shutdown.
        from = from.max(silence);
    }
    // An abort of which no rank speaks came once the work was drained: the ranks end in good order.
    let speaks = |ended: &Ended| ended.errors().next().is_some();
    let is_drained = match cell.wish {
        Wish::GoOn => false,
        Wish::Drain => true,
        Wish::Abort => !played.ended.iter().any(speaks),
    };
    let in_order = match ground {
        Ground::Gpus if is_drained => DESTROY,
        _ => Duration::ZERO,
    };
    if matches!(cell.event, Event::Computing | Event::Left) {
        if from.is_zero() {
            within += SHORT;
        }
        if from.is_zero() || cell.wish == Wish::Abort {
            within += in_order;
        }
    }
    let all = [
        ("noticed", seen.noticed, noticed),
        ("gone", seen.gone, None),
        ("all gone", seen.all_gone, Some(from + within)),
        (
            "gone after it went on",
            seen.resumed,
            Some(ENDS_WITHIN + in_order),
        ),
    ];
    let time = |(what, took, bound): (_, Option<Duration>, _)| Some(Time::new(what, took?, bound));
    all.into_iter().filter_map(time).collect()
}

#[cfg(test)]
mod tests {
    use super::super::play::Seen;
    use super::*;

    fn cell(event: Event, ours: Ours, wish: Wish) -> Cell {
        Cell {
            side: Side::Source,
            ours,
            event,
            wish,
            supervised: false,
        }
    }

    /// What is told of a cell whose ranks were gone after so many milliseconds, and of which one said this.
    fn all_gone(cell: Cell, ground: Ground, ms: u64, said: &str) -> String {
        let times = Seen {
            all_gone: Some(Duration::from_millis(ms)),
            ..Seen::default()
        };
        let ended = Ended {
            lines: vec![said.into()],
            ..Ended::default()
        };
        let played = Played {
            ended: vec![Ended::default(), ended],
            times,
            ..Played::default()
        };
        super::times(cell, ground, Duration::from_millis(250), &played)[0].to_string()
    }

    #[test]
    fn nccl_may_say_first_that_its_network_is_gone_while_it_connects() {
        let ended = |ours, ground, codes: [i32; 2]| {
            let ended = |code| Ended {
                code: Some(code),
                ..Ended::default()
            };
            let played = Played {
                ended: codes.map(ended).into(),
                ..Played::default()
            };
            wrong(cell(Event::Cut, ours, Wish::GoOn), ground, &played).len()
        };
        assert_eq!(ended(Ours::Connect, Ground::Gpus, [10, 10]), 0);
        assert_eq!(ended(Ours::Connect, Ground::Gpus, [9, 10]), 0);
        assert_eq!(ended(Ours::Connect, Ground::Fakes, [10, 10]), 2);
        assert_eq!(ended(Ours::Receive, Ground::Gpus, [10, 10]), 2);
    }

    #[test]
    fn only_a_drain_on_gpus_has_the_time_that_nccl_takes_to_end() {
        let late = |event, wish, ground, said| {
            let cell = cell(event, Ours::Send, wish);
            usize::from(all_gone(cell, ground, 1800, said).ends_with("LATE"))
        };
        assert_eq!(late(Event::Computing, Wish::Drain, Ground::Gpus, ""), 0);
        assert_eq!(late(Event::Computing, Wish::Drain, Ground::Fakes, ""), 1);
        // The second interrupt came once the work was drained, or it ended the job.
        assert_eq!(late(Event::Computing, Wish::Abort, Ground::Gpus, ""), 0);
        let aborted = "pp: error: interrupted";
        assert_eq!(
            late(Event::Computing, Wish::Abort, Ground::Gpus, aborted),
            1
        );
        assert_eq!(late(Event::Stopped, Wish::Abort, Ground::Gpus, ""), 1);
        assert_eq!(late(Event::Killed, Wish::Drain, Ground::Gpus, ""), 1);
        assert_eq!(late(Event::Stopped, Wish::Drain, Ground::Gpus, ""), 1);
    }

    #[test]
    fn a_source_that_has_every_result_waits_for_its_peer_until_that_is_missed() {
        let told = |ours| {
            let cell = cell(Event::Stopped, ours, Wish::Drain);
            all_gone(cell, Ground::Gpus, 0, "")
        };
        assert_eq!(told(Ours::Idle), "all gone 0 of 1775 ms");
        assert_eq!(told(Ours::SetUp), "all gone 0 of 1000 ms");
    }
}
