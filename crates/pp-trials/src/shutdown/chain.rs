//! Three ranks in a row: each is killed, stopped and interrupted, while it is idle, works, or has something in flight.

use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use pp_contract::Pipeline;
use pp_runtime::times::MISSED_HEARTBEATS;
use rustix::process::Signal;

use super::cell::name;
use super::judge::{DEATH_WITHIN, DIED, INTERRUPTED, KILLED, LATE, LATE_CODE};
use super::play::noticed;
use super::ranks::{ENDS_WITHIN, REACHED_WITHIN, Ranks, SETTLES};
use super::scene::{LONG, SHORT, Scene, sent, stall, stalls};
use crate::trial::{self, Ended, Ground, Time, Told};

/// What a rank is doing when it happens to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum State {
    /// Two chunks are done, and no more comes.
    Idle,
    /// It is inside its stage.
    Working,
    /// A chunk is on its way to or from it.
    InFlight,
}

/// What becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Lot {
    Killed,
    Stopped,
    Interrupted,
}

/// One cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Link {
    rank: usize,
    state: State,
    lot: Lot,
}

impl Link {
    /// All of them.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let states = State::value_variants().iter();
        let both =
            states.flat_map(|state| Lot::value_variants().iter().map(move |lot| (state, lot)));
        both.flat_map(|(&state, &lot)| (0..3).map(move |rank| Self { rank, state, lot }))
    }

    /// Said in the table.
    pub(super) fn means(self) -> &'static str {
        match self.state {
            State::Idle => "two chunks are done, the input gives nothing more",
            State::Working => "it is inside its stage",
            State::InFlight => {
                "what it sent, or is to get, waits for a rank that is inside its stage"
            }
        }
    }

    fn scene(self) -> Scene {
        // An interrupted job finishes its work.
        let lasts = match self.lot {
            Lot::Interrupted => SHORT,
            _ => LONG,
        };
        let busy = |rank| Scene {
            depth: 3,
            chunks: 3,
            fault: stall(rank, lasts),
            signs: vec![stalls(rank)],
            ..Scene::new()
        };
        match (self.state, self.rank) {
            (State::Idle, _) => Scene::new(),
            (State::Working, rank) => busy(rank),
            (State::InFlight, 2) => busy(1),
            (State::InFlight, rank) => {
                let mut scene = busy(rank + 1);
                scene.signs.push(sent(rank, 2));
                scene
            }
        }
    }

    /// The codes that its rank may end with, and the others.
    fn codes(self) -> (&'static [i32], &'static [i32]) {
        match self.lot {
            Lot::Killed => (&[KILLED], &[DIED]),
            // It goes on once all others have ended, and hears why or finds them gone.
            Lot::Stopped => (&[LATE_CODE, DIED], &[LATE_CODE]),
            Lot::Interrupted => (&[INTERRUPTED], &[INTERRUPTED]),
        }
    }

    /// Plays it; what came of it.
    pub(super) fn play(
        self,
        pipeline: &Pipeline,
        ground: Ground,
        heartbeat: Duration,
        folder: &Path,
        told: &mut Told,
    ) {
        let scene = self.scene();
        let ranks = Ranks::start(&scene, (pipeline, false), None, ground, folder);
        let reached = ranks.and_then(|ranks| {
            let deadline = Instant::now() + REACHED_WITHIN;
            ranks.give(scene.chunks, false, true, false);
            let mut signs = scene.signs.iter();
            let reached = signs.try_for_each(|sign| ranks.await_sign(sign, deadline));
            reached.map_err(|why| why + &ranks.logs())?;
            Ok(ranks)
        });
        match reached {
            Err(why) => told.wrong = vec![format!("the state was not reached: {why}")],
            Ok(ranks) => {
                std::thread::sleep(SETTLES);
                self.act(&ranks, heartbeat, told);
            }
        }
    }

    fn act(self, ranks: &Ranks, heartbeat: Duration, told: &mut Told) {
        let began = Instant::now();
        let deadline = began + ENDS_WITHIN;
        ranks.signal(
            self.rank,
            match self.lot {
                Lot::Killed => Signal::KILL,
                Lot::Stopped => Signal::STOP,
                Lot::Interrupted => Signal::INT,
            },
        );
        let others = (0..ranks.count()).filter(|rank| *rank != self.rank);
        let others: Vec<_> = others.map(|rank| ranks.voice(rank)).collect();
        let is_noticed_within = match self.lot {
            Lot::Killed => DEATH_WITHIN,
            Lot::Stopped => heartbeat * MISSED_HEARTBEATS + LATE,
            Lot::Interrupted => SHORT,
        };
        let gone = others.iter().filter_map(|rank| rank.ends(deadline));
        let all_gone = gone
            .map(|(at, _)| at.saturating_duration_since(began))
            .max();
        if self.lot != Lot::Interrupted {
            let seen = others.iter().filter_map(|rank| noticed(rank, began)).max();
            let time = |took| Time::new("noticed", took, Some(is_noticed_within));
            told.times.extend(seen.map(time));
        }
        let bound = is_noticed_within + trial::ENDS_WITHIN;
        let time = |took| Time::new("the others gone", took, Some(bound));
        told.times.extend(all_gone.map(time));
        if self.lot == Lot::Stopped {
            ranks.signal(self.rank, Signal::CONT);
        }
        let (own, of_others) = self.codes();
        for rank in 0..ranks.count() {
            let process = ranks.voice(rank);
            process.ends(deadline);
            let ended = Ended::of(process);
            let wanted = if rank == self.rank { own } else { of_others };
            if let Err(why) = ended.check(wanted) {
                told.wrong.push(format!("rank {rank}: {why}"));
            }
            told.ended.push(format!("rank {rank} {ended}"));
        }
        told.wrong.extend(ranks.left());
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, state, lot } = *self;
        write!(f, "chain/rank-{rank}/{}/{}", name(state), name(lot))
    }
}
