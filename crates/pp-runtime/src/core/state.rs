//! What a rank knows of one of its stages.

use std::collections::VecDeque;

use pp_contract::{CacheEpoch, ChunkIndex};

use super::decision::Ticket;
use super::layout::LocalStage;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct StageState<C, W> {
    pub(super) stage: LocalStage,
    /// By input, oldest first.
    pub(super) waiting: [VecDeque<(Ticket, C)>; 2],
    /// What a device works on, oldest first.
    pub(super) working: VecDeque<(Ticket, W)>,
    /// Nothing more comes by this input.
    pub(super) is_closed: [bool; 2],
    /// The stages behind were told that nothing more comes, and the other members of the group that this rank leads.
    pub(super) has_closed: bool,
    /// Other members of that group that have said that nothing more comes from them.
    pub(super) left: usize,
    /// The epoch that was worked on last, by lap.
    pub(super) epochs: Vec<Option<CacheEpoch>>,
}

impl<C, W> StageState<C, W> {
    pub(super) fn new(stage: LocalStage) -> Self {
        Self {
            stage,
            waiting: [VecDeque::new(), VecDeque::new()],
            working: VecDeque::new(),
            is_closed: [false; 2],
            has_closed: false,
            left: 0,
            epochs: Vec::new(),
        }
    }

    /// Says whether this is the sink, and a device works on the chunk for it.
    pub(super) fn is_taking(&self, chunk: ChunkIndex) -> bool {
        let mut working = self.working.iter();
        self.stage.is_sink && working.any(|(ticket, _)| ticket.chunk == chunk)
    }

    /// All edges are new, and nothing was said over them.
    pub(super) fn reopen(&mut self) {
        self.is_closed = [false; 2];
        self.has_closed = false;
        self.left = 0;
    }

    pub(super) fn is_empty(&self) -> bool {
        self.working.is_empty() && self.waiting.iter().all(VecDeque::is_empty)
    }
}
