//! Seeded bugs: each is one mistake that a driver or a core could make. The walk has to find it.

use pp_contract::{CacheEpoch, ChunkIndex};
use pp_runtime::core::{Cut, Facts, FrontAction, FrontCore};

/// One mistake.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Bug {
    /// Admission: one chunk more than the depth.
    AdmitsOneMore,
    /// Admission: a chunk that must wait for a flush does not.
    FlushDoesNotWait,
    /// Credits: the slot of an accepted chunk counts as free twice.
    CreditTwice,
    /// Credits: a slot never comes back.
    CreditLost,
    /// Credits: a payload that is still context is given up.
    ContextGivenUp,
    /// Drain: nothing in flight is waited for.
    DrainForgets,
    /// Drain: new chunks are taken all the same.
    DrainAdmits,
    /// Abort: results are decoded that came before it.
    DecodesAfterAbort,
    /// Restart: what was accepted is asked for again.
    SendsAcceptedAgain,
    /// Restart: what was lost is not sent again.
    ForgetsToSendAgain,
    /// Restart: a result whose payload was still on its way counts as arrived.
    TakesHalfAResult,
    /// Restart: the first chunk brings nothing with it.
    BringsNoContext,
    /// Restart: new chunks go before those that were lost.
    NewBeforeLost,
    /// Restart: a frame of the dead Phase B is still read.
    HearsTheDead,
    /// Hard cut: a result of the old epoch is decoded.
    DecodesStale,
    /// Hard cut: a chunk of the old epoch is sent again to the next Phase B.
    SendsStaleAgain,
    /// Hard cut: it is taken for a flush, so that nothing is dropped.
    CutIsNoCut,
}

/// The core of the front, with a bug or without.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Front {
    pub(crate) core: FrontCore,
    depth: u32,
    bug: Option<Bug>,
    offered: bool,
    drained: bool,
}

impl Front {
    pub(crate) fn new(depth: u32, bug: Option<Bug>) -> Self {
        let more = u32::from(bug == Some(Bug::AdmitsOneMore));
        Self {
            core: FrontCore::new(depth + more),
            depth,
            bug,
            offered: false,
            drained: false,
        }
    }

    pub(crate) fn handle_offer(&mut self, cut: Cut) {
        self.offered = true;
        self.core.handle_offer(match (cut, self.bug) {
            (Cut::Flush, Some(Bug::FlushDoesNotWait)) => Cut::Hard,
            (Cut::Hard, Some(Bug::CutIsNoCut)) => Cut::None,
            (cut, _) => cut,
        });
    }

    pub(crate) fn handle_drain(&mut self) {
        self.drained = true;
        if self.bug != Some(Bug::DrainAdmits) {
            self.core.handle_drain();
        }
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.drained
    }

    pub(crate) fn handle_sent(&mut self, chunk: ChunkIndex, epoch: CacheEpoch) {
        self.offered = false;
        self.core.handle_sent(chunk, epoch);
    }

    pub(crate) fn poll(&self, facts: Facts) -> FrontAction {
        let action = self.core.poll(facts);
        match (self.bug, action) {
            (Some(Bug::DrainForgets), FrontAction::Wait) if self.drained => FrontAction::Finish,
            (Some(Bug::DecodesStale), FrontAction::Drop { chunk }) if facts.sink_ready => {
                FrontAction::Decode { chunk }
            }
            (
                Some(Bug::BringsNoContext),
                FrontAction::SendAgain {
                    chunk,
                    epoch,
                    starts_epoch,
                    ..
                },
            ) => FrontAction::SendAgain {
                chunk,
                epoch,
                starts_epoch,
                rebuilds: false,
            },
            (
                Some(Bug::BringsNoContext),
                FrontAction::Build {
                    chunk,
                    epoch,
                    starts_epoch,
                    ..
                },
            ) => FrontAction::Build {
                chunk,
                epoch,
                starts_epoch,
                rebuilds: false,
            },
            (Some(Bug::NewBeforeLost), FrontAction::SendAgain { .. }) if self.offered => {
                let counts = self.core.counts();
                if self.core.in_flight() == self.depth || self.drained {
                    return action;
                }
                FrontAction::Build {
                    chunk: ChunkIndex::new(counts.admitted),
                    epoch: self.core.epoch(),
                    starts_epoch: false,
                    rebuilds: true,
                }
            }
            _ => action,
        }
    }

    /// What the driver would tell the core of a loss: so many results are here whole.
    pub(crate) fn handle_lost(&mut self, whole: usize, with_half: usize) {
        let arrived = match self.bug {
            Some(Bug::SendsAcceptedAgain) => self.core.decoding(),
            Some(Bug::ForgetsToSendAgain) => self.core.in_flight() as usize,
            Some(Bug::TakesHalfAResult) => with_half,
            _ => whole,
        };
        self.core.handle_lost(arrived);
    }
}
