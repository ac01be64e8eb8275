//! What a rank is to do next, and what it must know for that.

use pp_contract::{CacheEpoch, ChunkIndex};

/// Tells the core, when it is polled, what only the driver knows of a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct StageFacts {
    /// The payload of the chunk that [`oldest_waiting`](super::RankCore::oldest_waiting) gives for each input is here.
    pub is_here: [bool; 2],
    /// A slot of each output is leased. At the sink: it would take a chunk now.
    pub is_free: [bool; 2],
}

/// A chunk, as a rank knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ticket {
    /// Its index.
    pub chunk: ChunkIndex,
    /// Its epoch.
    pub epoch: CacheEpoch,
    /// The attempt that it belongs to.
    pub attempt: u16,
    /// The lap of its ring in which the stage works on it; 0 outside of a ring.
    pub lap: u16,
    /// The output by which it leaves the stage, and the lap in which the next stage works on it.
    pub way_out: (usize, u16),
    /// A stage before has seen that a hard cut overtook it.
    pub is_stale: bool,
}

/// Tells the driver of a rank what to do next. Stages and inputs are named by their places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Decision {
    /// Nothing until something new is handled.
    Wait,
    /// Build the offered chunk and hand it on. Then [`handle_built`](super::RankCore::handle_built).
    Build {
        /// Its index.
        chunk: ChunkIndex,
        /// The epoch it belongs to.
        epoch: CacheEpoch,
        /// True for the first chunk of an epoch.
        starts_epoch: bool,
        /// The chunk before was not sent in this attempt: what the stages must know of those before comes with this one.
        rebuilds: bool,
    },
    /// Send a chunk again that was lost with a rank; as stale if its epoch is before
    /// [`oldest_epoch`](super::RankCore::oldest_epoch). Then [`handle_sent_again`](super::RankCore::handle_sent_again).
    SendAgain {
        /// The chunk before was not sent in this attempt: what the stages must know of those before comes with this one.
        rebuilds: bool,
    },
    /// Work on the oldest chunk of this input: [`begin`](super::RankCore::begin), then
    /// [`handle_working`](super::RankCore::handle_working) if a device works on it. When it is done, hand it on, if
    /// [`is_current`](super::RankCore::is_current). At the sink: [`handle_taken`](super::RankCore::handle_taken), and
    /// the acceptance.
    Run {
        /// The stage.
        stage: usize,
        /// The input.
        input: usize,
    },
    /// Run two stages at once, each as in [`Decision::Run`]: begin both, the first one first, and hand both results on when
    /// both are done.
    RunOverlapped {
        /// The stages.
        stages: [usize; 2],
    },
    /// Do what a stage has put off of a chunk. Then [`handle_later`](super::RankCore::handle_later).
    Later {
        /// The stage.
        stage: usize,
        /// The chunk.
        chunk: ChunkIndex,
    },
    /// Hand the oldest chunk of this input on without work: a hard cut overtook it. [`begin`](super::RankCore::begin)
    /// gives it.
    PassOn {
        /// The stage.
        stage: usize,
        /// The input.
        input: usize,
    },
    /// Release the oldest chunk of this input: it is of an older attempt, or the sink has it.
    /// [`begin`](super::RankCore::begin) gives it.
    Drop {
        /// The stage.
        stage: usize,
        /// The input.
        input: usize,
    },
    /// Say over all outputs of this stage that nothing more comes. Then
    /// [`handle_closed_behind`](super::RankCore::handle_closed_behind).
    Close {
        /// The stage.
        stage: usize,
    },
    /// All is done.
    Finish,
    /// The job was aborted: nothing is worked on, taken or written any more.
    Stop,
}

/// More chunks came over an edge than can be in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("chunk {chunk} came although {depth} chunks wait already")]
pub struct TooMany {
    /// The chunk.
    pub chunk: ChunkIndex,
    /// The most chunks that can be in flight.
    pub depth: u32,
}
