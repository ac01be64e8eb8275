//! What lasts from one link to the next.

use pp_contract::{CallId, ChunkIndex, Composer, Fault, Rank};
use pp_transport::link::Link;

use super::in_flight::{Context, InFlightChunk};
use crate::clock::{PeerClock, now_ns};
use crate::core::{Counts, FrontCore};
use crate::report::{ChunkRecord, Recorder, Restart};
use crate::stage::FrontStages;

/// How the front runs.
#[derive(Clone, Copy, Debug)]
pub struct FrontOptions {
    /// The rank that runs Phase B.
    pub peer: Rank,
    /// The most chunks in flight.
    pub depth: u32,
    /// How often Phase B may be started anew. With 0 nothing is kept for it.
    pub restarts: u32,
    /// Chunks before one that hold all that Phase B must know to begin with it: their payloads are
    /// kept, where there may be a restart.
    pub context_chunks: u32,
}

impl FrontOptions {
    /// Without restarts.
    pub fn new(peer: Rank, depth: u32) -> Self {
        Self {
            peer,
            depth,
            restarts: 0,
            context_chunks: 0,
        }
    }

    /// Whether payloads are kept until their results are accepted.
    pub(super) fn keeps(&self) -> bool {
        self.restarts > 0
    }

    /// Payloads that are kept as context.
    fn kept(&self) -> u32 {
        if self.keeps() { self.context_chunks } else { 0 }
    }
}

/// What a front that finished has to tell.
#[derive(Debug)]
pub struct FrontSummary {
    /// How many chunks went where.
    pub counts: Counts,
    /// The records of the latest chunks.
    pub recorder: Recorder,
    /// Short name of the backend that carried them.
    pub transport: &'static str,
    /// Every time that Phase B was lost and the run went on.
    pub restarts: Vec<Restart>,
}

/// A run of the front, over one link after the other.
///
/// # If dropped
/// What is in flight is poisoned.
pub struct FrontRun<'s, L: Link, S: FrontStages<L::Tx, L::Rx>> {
    pub(super) stages: &'s mut S,
    pub(super) options: FrontOptions,
    pub(super) core: FrontCore<InFlightChunk<L, S>, (S::Decoding, ChunkRecord)>,
    pub(super) composer: Composer,
    pub(super) inbox: Vec<u8>,
    pub(super) context: Context<L>,
    pub(super) next_call: CallId,
    pub(super) recorder: Recorder,
    pub(super) peer_clock: PeerClock,
    /// The next result is here, and the sink is not ready to take it.
    pub(super) waits_for_sink: bool,
    pub(super) transport: &'static str,
    pub(super) restarts: Vec<Restart>,
    /// The link to the Phase B that was lost.
    pub(super) old_link: Option<L>,
}

impl<'s, L, S> FrontRun<'s, L, S>
where
    L: Link,
    S: FrontStages<L::Tx, L::Rx>,
{
    /// A run at whose beginning nothing was read yet.
    pub fn new(stages: &'s mut S, options: FrontOptions) -> Self {
        Self {
            stages,
            core: FrontCore::new(options.depth),
            composer: Composer::new(),
            inbox: Vec::with_capacity(pp_contract::MAX_FRAME_BYTES),
            context: Context::new(options.kept() as usize),
            next_call: CallId::new(0),
            recorder: Recorder::new(),
            peer_clock: PeerClock::default(),
            waits_for_sink: false,
            transport: "none",
            restarts: Vec::new(),
            old_link: None,
            options,
        }
    }

    /// Ends the link to the Phase B that was lost, if there is one.
    pub fn drop_link(&mut self) {
        self.old_link = None;
    }

    /// What the run came to, once it has finished.
    pub fn finish(self) -> FrontSummary {
        FrontSummary {
            counts: self.core.counts(),
            recorder: self.recorder,
            transport: self.transport,
            restarts: self.restarts,
        }
    }

    /// Phase B is gone: what it had not given back whole is to be sent again.
    pub(super) fn lose(&mut self, fault: &Fault) {
        let oldest = self.core.oldest_epoch();
        let (mut arrived, mut are_whole) = (0, true);
        for chunk in self.core.chunks_mut() {
            // Results come in order: behind the first that is not here, none is taken for whole.
            are_whole = are_whole && matches!(chunk.transfers.is_back(), Ok(true));
            if are_whole {
                self.context.accept(chunk, oldest);
                arrived += 1;
            } else {
                chunk.transfers.lose_result();
            }
        }
        self.core.handle_lost(arrived);
        self.waits_for_sink = false;
        self.restarts.push(Restart {
            fault: fault.clone(),
            lost_ns: now_ns(),
            chunk: None,
            sent_ns: None,
            served_ns: None,
            sent_again: 0,
        });
    }

    /// The number that was given to a call is used up.
    pub(super) fn count_call(&mut self) {
        self.next_call = self.next_call.next().unwrap_or(self.next_call);
    }

    /// A chunk has left, perhaps the first over this link.
    pub(super) fn note_sent(&mut self, chunk: ChunkIndex, again: bool) {
        if let Some(restart) = self.restarts.last_mut() {
            restart.chunk.get_or_insert(chunk);
            restart.sent_ns.get_or_insert_with(now_ns);
            restart.sent_again += u32::from(again);
        }
    }

    /// A result is here, perhaps the first over this link.
    pub(super) fn note_served(&mut self) {
        if let Some(restart) = self.restarts.last_mut() {
            restart.served_ns.get_or_insert_with(now_ns);
        }
    }
}
