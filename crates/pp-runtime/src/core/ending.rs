//! How far a rank is on its way to the end of the job.
//!
//! Hazard: drain, loss, fault and the last acceptance come from different threads and ranks in any order, and each pair of
//! flags for them has a state that means nothing. Guarantee: a rank is in one [`Ending`], and [`Ending::after`] is the one
//! table of what comes next. The core holds it, and [`Switch`](crate::switch::Switch) applies the same table to the word
//! that other threads write. The simulator in `tests/sim` walks through both.

/// How far a rank is on its way to the end of the job. Each state is further on than those before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Ending {
    /// Chunks are admitted, worked on and accepted.
    #[default]
    Running,
    /// The source admits no new chunk. Chunks in flight are finished.
    Draining,
    /// The source needs no other rank: the loss of one is no fault, and the ranks do not meet again.
    Served,
    /// Other ranks are gone, and none is needed. The rank uses no edge and no group any more.
    Alone,
    /// A fault has stopped the rank. Over new edges it can go on: it has lost nothing of its own.
    Lost,
    /// The rank has given up. It cannot go on.
    Aborted,
}

/// Moves a rank toward its end, or back from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndEvent {
    /// The user, or the end of input, asks the job to take nothing new.
    Drain,
    /// The source needs no other rank any more.
    Serve,
    /// A rank has left that the source does not need.
    Leave,
    /// A rank is lost.
    Lose,
    /// A fault was raised, which counts although no rank is needed.
    Fault,
    /// A stage of this rank has failed, or a payload is gone that cannot be made again.
    Break,
    /// All ranks have met again, and all edges are new.
    Reconnect,
}

impl Ending {
    /// The states, by their numbers.
    const ALL: [Self; 6] = [
        Self::Running,
        Self::Draining,
        Self::Served,
        Self::Alone,
        Self::Lost,
        Self::Aborted,
    ];

    /// The state behind an event.
    #[must_use]
    pub fn after(self, event: EndEvent) -> Self {
        let is_needed = self < Self::Served;
        match event {
            EndEvent::Drain => self.max(Self::Draining),
            EndEvent::Serve => self.max(Self::Served),
            EndEvent::Leave if !is_needed => self.max(Self::Alone),
            EndEvent::Lose if is_needed => Self::Lost,
            EndEvent::Leave | EndEvent::Lose => self,
            EndEvent::Fault => self.max(Self::Lost),
            EndEvent::Break => Self::Aborted,
            EndEvent::Reconnect if self == Self::Aborted => self,
            EndEvent::Reconnect => Self::Running,
        }
    }

    /// The event that leads to this state; `None` for the first.
    #[must_use]
    pub fn reached_by(self) -> Option<EndEvent> {
        match self {
            Self::Running => None,
            Self::Draining => Some(EndEvent::Drain),
            Self::Served => Some(EndEvent::Serve),
            Self::Alone => Some(EndEvent::Leave),
            Self::Lost => Some(EndEvent::Fault),
            Self::Aborted => Some(EndEvent::Break),
        }
    }

    /// The state with this number.
    pub(crate) fn from_number(number: u8) -> Self {
        Self::ALL[usize::from(number)]
    }

    /// Says whether the source needs no other rank, and nothing has stopped this one.
    #[must_use]
    pub fn is_served(self) -> bool {
        matches!(self, Self::Served | Self::Alone)
    }

    /// Says whether a fault has stopped the rank.
    #[must_use]
    pub fn is_stopped(self) -> bool {
        self >= Self::Lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_event_leads_from_each_state_to_the_one_that_the_table_names() {
        use Ending::{Aborted, Alone, Draining, Lost, Running, Served};
        for (event, then) in [
            (
                EndEvent::Drain,
                [Draining, Draining, Served, Alone, Lost, Aborted],
            ),
            (
                EndEvent::Serve,
                [Served, Served, Served, Alone, Lost, Aborted],
            ),
            (
                EndEvent::Leave,
                [Running, Draining, Alone, Alone, Lost, Aborted],
            ),
            (EndEvent::Lose, [Lost, Lost, Served, Alone, Lost, Aborted]),
            (EndEvent::Fault, [Lost, Lost, Lost, Lost, Lost, Aborted]),
            (EndEvent::Break, [Aborted; 6]),
            (
                EndEvent::Reconnect,
                [Running, Running, Running, Running, Running, Aborted],
            ),
        ] {
            assert_eq!(
                Ending::ALL.map(|state| state.after(event)),
                then,
                "{event:?}"
            );
        }
        for (number, state) in (0..).zip(Ending::ALL) {
            assert_eq!((state as u8, Ending::from_number(number)), (number, state));
        }
    }
}
