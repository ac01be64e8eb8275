//! The cells of two ranks: what we are doing, what becomes of the peer, and what is wished of us.

use std::fmt;

use clap::ValueEnum;

use crate::trial::Ground;

/// As it stands in the name of a cell.
pub(super) fn name(value: impl ValueEnum) -> String {
    let named = value.to_possible_value();
    named.map_or_else(String::new, |named| named.get_name().to_owned())
}

/// The rank that is "us": the other one is the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Side {
    /// Rank 0, with the source and the sink.
    Source,
    /// Rank 1, with the stage between them.
    Stage,
}

impl Side {
    pub(crate) fn rank(self) -> usize {
        self as usize
    }

    pub(crate) fn peer(self) -> Self {
        match self {
            Self::Source => Self::Stage,
            Self::Stage => Self::Source,
        }
    }
}

/// What we are doing when it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Ours {
    Idle,
    Queued,
    Send,
    Receive,
    SetUp,
    /// Inside NCCL, which connects the ranks.
    Connect,
}

impl Ours {
    /// Nothing was admitted yet: there is nothing to drain.
    pub(crate) fn is_before_the_first_chunk(self) -> bool {
        matches!(self, Self::SetUp | Self::Connect)
    }
}

/// What becomes of the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Event {
    /// Nothing: it does its part.
    Computing,
    Left,
    Killed,
    Stopped,
    Cut,
}

/// What is wished of us at that moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Wish {
    /// Nothing: we notice by ourselves.
    GoOn,
    /// One interrupt.
    Drain,
    /// Two.
    Abort,
}

/// One cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) side: Side,
    pub(crate) ours: Ours,
    pub(crate) event: Event,
    pub(crate) wish: Wish,
    /// A supervisor started both ranks, and the wishes go to it.
    pub(crate) supervised: bool,
}

impl Cell {
    /// All of them; those that cannot be on this ground as well, which then say why.
    pub(crate) fn all(ground: Ground) -> Vec<Self> {
        let mut cells = Vec::new();
        for &side in Side::value_variants() {
            for &ours in Ours::value_variants() {
                if ours == Ours::Connect && !ground.has_nccl() {
                    continue;
                }
                for &wish in Wish::value_variants() {
                    for &event in Event::value_variants() {
                        cells.push(Self {
                            side,
                            ours,
                            event,
                            wish,
                            supervised: false,
                        });
                    }
                }
            }
        }
        // A rank that only goes on while the peer works on does not end.
        cells.retain(|cell| cell.wish != Wish::GoOn || cell.event != Event::Computing);
        cells.extend(Self::supervised(ground));
        cells
    }

    /// Says whether the stage's rank is started again, and the job goes on.
    pub(crate) fn restarts(self) -> bool {
        self.supervised && self.ours == Ours::Connect
    }

    /// The supervisor's own path: a few.
    fn supervised(ground: Ground) -> Vec<Self> {
        let events = [
            (Event::Computing, Wish::Drain),
            (Event::Computing, Wish::Abort),
            (Event::Killed, Wish::GoOn),
            (Event::Killed, Wish::Drain),
            (Event::Stopped, Wish::GoOn),
            (Event::Stopped, Wish::Drain),
            (Event::Stopped, Wish::Abort),
        ];
        let cell = |side, ours, event, wish| Self {
            side,
            ours,
            event,
            wish,
            supervised: true,
        };
        let queued = |side| events.map(|(event, wish)| cell(side, Ours::Queued, event, wish));
        let mut cells: Vec<Self> = Side::value_variants()
            .iter()
            .copied()
            .flat_map(queued)
            .collect();
        if ground.has_nccl() {
            cells.push(cell(Side::Source, Ours::Connect, Event::Killed, Wish::GoOn));
        }
        cells
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let how = if self.supervised { "supervised-" } else { "" };
        write!(
            f,
            "{how}{}/{}/{}/{}",
            name(self.side),
            name(self.ours),
            name(self.event),
            name(self.wish)
        )
    }
}
