//! How a cell ought to end, and in which time.

use std::time::Duration;

use super::cell::{Cell, Event, Ground, Ours, Side, Wish};
use super::play::Played;
use super::scene::SHORT;

/// A death is seen as soon as a socket says so.
const DEATH_WITHIN: Duration = Duration::from_millis(100);
/// Silence of this many heartbeats is a fault.
const HEARTBEATS: u32 = 3;
/// How late a sleep may end, and a line be read here.
const LATE: Duration = Duration::from_millis(25);
/// From the moment a rank knows until every rank is gone.
const GONE_WITHIN: Duration = Duration::from_secs(1);
/// A drain on GPUs ends in good order, which is no fault's end: NCCL destroys its communicators, which takes it
/// half a second, and longer while other jobs on the same GPUs do.
const DESTROY: Duration = Duration::from_millis(700);

/// Exit codes, as `exit.rs` has them.
const DONE: i32 = 0;
const DIED: i32 = 7;
const LATE_CODE: i32 = 9;
const DEVICE: i32 = 10;
const INTERRUPTED: i32 = 130;
const KILLED: i32 = -9;

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
    // The fakes' transfer that hangs: nothing can drain, so somebody's time is up.
    let hangs = cell.ours == Ours::Receive && ground == Ground::Fakes;
    // What the event alone leads to.
    let (mut ours, mut peers) = match cell.event {
        Event::Computing if hangs => (vec![LATE_CODE], vec![LATE_CODE]),
        Event::Computing => (vec![DONE], vec![DONE]),
        Event::Left if !begun => (vec![DIED, INTERRUPTED], vec![INTERRUPTED]),
        Event::Left if cell.side == Side::Front => (vec![DIED], vec![DONE]),
        Event::Left => (vec![DONE], vec![DONE]),
        Event::Killed => (vec![DIED], vec![KILLED]),
        // A stopped peer that goes on is told, or finds that nobody is there.
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
        Wish::Drain => !begun && (cell.side == Side::Front || cell.event != Event::Stopped),
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
    if cell.ours == Ours::Idle && cell.side == Side::Front && cell.wish != Wish::GoOn {
        // With nothing in flight a drain is done before the second interrupt comes, and a peer that
        // goes on finds that it was told to shut down.
        if cell.event == Event::Computing {
            ours.push(DONE);
        }
        if matches!(cell.event, Event::Computing | Event::Stopped) {
            peers.push(DONE);
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
    if cell.wish == Wish::Abort {
        ours = vec![INTERRUPTED];
    }
    let peers = vec![];
    Expected { ours, peers }
}

/// What was not as it should be: how it ended, and what was left.
pub(super) fn wrong(cell: Cell, ground: Ground, played: &Played) -> Vec<String> {
    let Expected { ours, peers } = expected(cell, ground);
    let mut wrong = played.left.clone();
    for (who, wanted, code) in [
        ("we", ours, played.codes.first()),
        ("the peer", peers, played.codes.get(1)),
    ] {
        match code {
            Some(Some(code)) if !wanted.contains(code) => {
                wrong.push(format!("{who} ended with {code}, not {wanted:?}"));
            }
            _ => {}
        }
    }
    wrong
}

/// Which bounds were missed, and by what.
pub(super) fn missed(
    cell: Cell,
    ground: Ground,
    heartbeat: Duration,
    played: &Played,
) -> Vec<String> {
    let mut missed = Vec::new();
    let silence = heartbeat * HEARTBEATS + LATE;
    let bound = match cell.event {
        Event::Computing => None,
        Event::Left | Event::Killed => Some(DEATH_WITHIN),
        Event::Stopped | Event::Cut => Some(silence),
    };
    if let (Some(noticed), Some(bound)) = (played.noticed, bound)
        && noticed > bound
    {
        missed.push(format!(
            "noticed after {} ms, bound {} ms",
            noticed.as_millis(),
            bound.as_millis()
        ));
    }
    // Where nobody noticed anything, an interrupt or the peer's good end came at the beginning.
    let mut from = played.noticed.unwrap_or_default();
    let mut within = GONE_WITHIN;
    if cell.event == Event::Cut {
        // Each side finds out for itself.
        from = from.max(silence);
    }
    if from.is_zero() && matches!(cell.event, Event::Computing | Event::Left) {
        within += SHORT;
        if ground == Ground::Gpus && cell.wish == Wish::Drain {
            within += DESTROY;
        }
    }
    if let Some(all_gone) = played.all_gone
        && all_gone > from + within
    {
        missed.push(format!(
            "all gone {} ms later, bound {} ms",
            (all_gone - from).as_millis(),
            within.as_millis()
        ));
    }
    if let Some(resumed) = played.resumed
        && resumed > GONE_WITHIN
    {
        missed.push(format!("it went on for {} ms", resumed.as_millis()));
    }
    missed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cell(event: Event, ours: Ours, wish: Wish) -> Cell {
        Cell {
            side: Side::Front,
            ours,
            event,
            wish,
            supervised: false,
        }
    }

    #[test]
    fn nccl_may_say_first_that_its_network_is_gone_while_it_connects() {
        let ended = |ours, ground, codes: [i32; 2]| {
            let played = Played {
                codes: codes.map(Some).into(),
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
        let late = |event, wish, ground| {
            let played = Played {
                all_gone: Some(Duration::from_millis(1800)),
                ..Played::default()
            };
            let heartbeat = Duration::from_millis(250);
            missed(cell(event, Ours::Send, wish), ground, heartbeat, &played).len()
        };
        assert_eq!(late(Event::Computing, Wish::Drain, Ground::Gpus), 0);
        assert_eq!(late(Event::Computing, Wish::Drain, Ground::Fakes), 1);
        assert_eq!(late(Event::Computing, Wish::Abort, Ground::Gpus), 1);
        assert_eq!(late(Event::Killed, Wish::Drain, Ground::Gpus), 1);
    }
}
