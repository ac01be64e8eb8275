//! What a job does to keep up with a source that does not wait.

use serde::{Deserialize, Serialize};

/// What happens to chunks that come faster than they can be worked on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Late {
    /// The source waits, and nothing is lost: what comes out is as late as it is.
    #[default]
    Block,
    /// Chunks that would come out too late are dropped before they are built: what comes out is fresh.
    Drop,
}

/// How a job keeps up with its source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LiveOptions {
    /// What happens to late chunks.
    pub late: Late,
    /// The most time from when the first frame of a chunk is there until the sink has the chunk, in nanoseconds.
    pub max_latency_ns: Option<u64>,
    /// The fewest and the most denoising steps of a chunk; `None` where they do not vary.
    pub steps: Option<(u16, u16)>,
}

/// Decides how a job keeps up with its source.
#[derive(Clone, Debug)]
pub struct LivePolicy {
    options: LiveOptions,
}

impl LivePolicy {
    /// Before the first chunk.
    #[must_use]
    pub fn new(options: LiveOptions) -> Self {
        Self { options }
    }

    /// The denoising steps of the next chunk; `None`: as the source likes.
    #[must_use]
    pub fn steps(&self) -> Option<u16> {
        self.options.steps.map(|(_, most)| most)
    }
}
