//! How a rank runs.

use std::sync::Arc;

use pp_contract::Pipeline;
use pp_transport::edge::Capabilities;
use pp_transport::flight::FlightRecorder;

use super::tap::Tap;
use crate::core::{LiveOptions, Order};

/// How a rank runs.
#[derive(Clone, Debug)]
pub struct RankOptions {
    /// The job's pipeline.
    pub pipeline: Arc<Pipeline>,
    /// The most chunks in flight.
    pub depth: u32,
    /// How often a rank may be started anew. With 0 nothing is kept for it.
    pub restarts: u32,
    /// Chunks before one that hold all that a stage must know to begin with it: their payloads are
    /// kept, where there may be a restart.
    pub context_chunks: u32,
    /// How often a chunk goes through a ring that is walked once for each step.
    pub steps: u16,
    /// What carries the payloads.
    pub capabilities: Capabilities,
    /// Says whether the device of this rank has failed for every process on it.
    pub has_failed: fn() -> bool,
    /// In which order this rank works. A fixed one takes no restarts.
    pub order: Order,
    /// Keeps the latest messages of this rank.
    pub flight: FlightRecorder,
    /// Shows the record of each chunk to another thread, on the rank of the source.
    pub tap: Option<Tap>,
    /// How the job keeps up with its source; a fixed order keeps up with none.
    pub live: LiveOptions,
}

impl RankOptions {
    /// Without restarts, in the order of the stream; nothing is recorded.
    pub fn new(pipeline: Pipeline, depth: u32, capabilities: Capabilities) -> Self {
        Self {
            pipeline: Arc::new(pipeline),
            depth,
            restarts: 0,
            context_chunks: 0,
            steps: 1,
            capabilities,
            has_failed: || false,
            order: Order::Streaming,
            flight: FlightRecorder::off(),
            tap: None,
            live: LiveOptions::default(),
        }
    }

    /// Says whether payloads are kept until the sink has accepted their chunks.
    pub(super) fn keeps(&self) -> bool {
        self.restarts > 0
    }

    /// Payloads that are kept as context.
    pub(super) fn kept(&self) -> u32 {
        if self.keeps() { self.context_chunks } else { 0 }
    }
}
