//! What Phase B does next: begin with the oldest envelope, answer a shutdown once all is answered.

use std::collections::VecDeque;

use pp_contract::ChunkIndex;

/// What Phase B is to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PhaseBAction {
    /// Nothing until something new is handled.
    Wait,
    /// Compute the oldest envelope that waits: [`PhaseBCore::begin_compute`], and then
    /// [`PhaseBCore::handle_computing`] if a device works on it.
    Compute,
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
///
/// The core holds the one record of each chunk for the driver, and never looks at it: a `C` until
/// its compute begins, and a `W` while a device works on it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PhaseBCore<C, W> {
    depth: u32,
    /// Envelopes that wait, oldest first.
    waiting: VecDeque<C>,
    /// Oldest first. All are older than those in `waiting`.
    computing: VecDeque<W>,
    shutdown: bool,
    answered: bool,
}

impl<C, W> PhaseBCore<C, W> {
    /// A Phase B whose front keeps at most `depth` chunks in flight.
    pub fn new(depth: u32) -> Self {
        Self {
            depth,
            waiting: VecDeque::with_capacity(depth as usize),
            computing: VecDeque::with_capacity(depth as usize),
            shutdown: false,
            answered: false,
        }
    }

    /// An envelope arrived. Gives its record, so that the receive can be noted once it is posted.
    ///
    /// # Errors
    /// The front sends more than the depth allows.
    pub fn handle_envelope(&mut self, chunk: ChunkIndex, record: C) -> Result<&mut C, TooMany> {
        if self.unanswered() >= self.depth {
            let depth = self.depth;
            return Err(TooMany { chunk, depth });
        }
        Ok(self.waiting.push_back_mut(record))
    }

    /// The front will send nothing more.
    pub fn handle_shutdown(&mut self) {
        self.shutdown = true;
    }

    /// What to do now; `credit`: a slot of the way back is leased and waits for a result.
    pub fn poll(&self, credit: bool) -> PhaseBAction {
        match self.unanswered() {
            0 if self.answered => PhaseBAction::Finish,
            0 if self.shutdown => PhaseBAction::AnswerShutdown,
            _ if credit && !self.waiting.is_empty() => PhaseBAction::Compute,
            _ => PhaseBAction::Wait,
        }
    }

    /// The records of the envelopes that wait, oldest first.
    pub fn waiting_mut(&mut self) -> impl Iterator<Item = &mut C> {
        self.waiting.iter_mut()
    }

    /// The compute of the oldest envelope that waits begins. Gives its record.
    ///
    /// # Panics
    /// If no envelope waits.
    pub fn begin_compute(&mut self) -> C {
        self.waiting.pop_front().expect("an envelope waits")
    }

    /// A device works on the compute that began last.
    pub fn handle_computing(&mut self, record: W) {
        self.computing.push_back(record);
    }

    /// Takes out the record of the oldest compute that a device works on, to ask how far it is and
    /// to answer it, or for [`PhaseBCore::handle_still_computing`].
    pub fn take_computing(&mut self) -> Option<W> {
        self.computing.pop_front()
    }

    /// The device still works on the compute that was taken out.
    pub fn handle_still_computing(&mut self, record: W) {
        self.computing.push_front(record);
    }

    /// Computes that a device works on.
    pub fn computing(&self) -> usize {
        self.computing.len()
    }

    /// The answer to the shutdown has left.
    pub fn handle_shutdown_answered(&mut self) {
        self.answered = true;
    }

    /// Envelopes without an answer.
    pub fn unanswered(&self) -> u32 {
        (self.waiting.len() + self.computing.len()) as u32
    }
}
