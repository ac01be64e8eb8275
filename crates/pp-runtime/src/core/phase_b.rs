//! What Phase B does next: begin with the oldest envelope, answer a shutdown once all is answered.

use std::collections::VecDeque;

use pp_contract::ChunkIndex;

/// What Phase B is to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PhaseBAction {
    /// Nothing until something new is handled.
    Wait,
    /// Begin to compute the oldest envelope that waits. Then [`PhaseBCore::handle_started`], and
    /// [`PhaseBCore::handle_answered`] once its result has left.
    Compute {
        /// The chunk it belongs to.
        chunk: ChunkIndex,
    },
    /// All is answered and the front has said goodbye: answer it. Then
    /// [`PhaseBCore::handle_shutdown_answered`].
    AnswerShutdown,
    /// Done.
    Finish,
}

/// More envelopes than the front may have in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("chunk {chunk} came while {depth} were in flight, which is the depth")]
pub struct TooMany {
    /// The chunk that is one too many.
    pub chunk: ChunkIndex,
    /// The agreed depth.
    pub depth: u32,
}

/// Phase B's state.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PhaseBCore {
    depth: u32,
    /// What is not answered yet, oldest first.
    queue: VecDeque<ChunkIndex>,
    /// How many of them are being computed: always the oldest.
    started: usize,
    shutdown: bool,
    answered: bool,
}

impl PhaseBCore {
    /// A Phase B whose front keeps at most `depth` chunks in flight.
    pub fn new(depth: u32) -> Self {
        Self {
            depth,
            queue: VecDeque::with_capacity(depth as usize),
            started: 0,
            shutdown: false,
            answered: false,
        }
    }

    /// An envelope arrived and its receive is posted.
    ///
    /// # Errors
    /// The front sends more than the depth allows.
    pub fn handle_envelope(&mut self, chunk: ChunkIndex) -> Result<(), TooMany> {
        if self.queue.len() >= self.depth as usize {
            let depth = self.depth;
            return Err(TooMany { chunk, depth });
        }
        self.queue.push_back(chunk);
        Ok(())
    }

    /// The front will send nothing more.
    pub fn handle_shutdown(&mut self) {
        self.shutdown = true;
    }

    /// What to do now; `credit`: a slot of the way back is leased and waits for a result.
    pub fn poll(&self, credit: bool) -> PhaseBAction {
        match self.queue.get(self.started) {
            Some(&chunk) if credit => PhaseBAction::Compute { chunk },
            _ if !self.queue.is_empty() => PhaseBAction::Wait,
            _ if self.answered => PhaseBAction::Finish,
            _ if self.shutdown => PhaseBAction::AnswerShutdown,
            _ => PhaseBAction::Wait,
        }
    }

    /// The compute of the oldest envelope that waited has begun.
    pub fn handle_started(&mut self) {
        self.started += 1;
        debug_assert!(self.started <= self.queue.len());
    }

    /// The result of the oldest compute has left.
    pub fn handle_answered(&mut self) {
        let gone = self.queue.pop_front();
        debug_assert!(gone.is_some() && self.started > 0);
        self.started -= 1;
    }

    /// The answer to the shutdown has left.
    pub fn handle_shutdown_answered(&mut self) {
        self.answered = true;
    }

    /// Envelopes without an answer.
    pub fn unanswered(&self) -> u32 {
        self.queue.len() as u32
    }
}
