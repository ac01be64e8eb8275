//! The record of one chunk: every moment that the measures, the trace and the timeline need, on the front's clock.
//!
//! It is a plain `Copy` value with public fields because it carries no invariant: times come from two processes, one of
//! which may be wrong, so every reader subtracts with saturation and none may panic on any content.

use pp_contract::{ChunkIndex, Fault};
use serde::{Serialize, Serializer};

/// Times of one chunk at the phase B side, in nanoseconds of the front's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PhaseBTimes {
    /// The payload could be read.
    pub recv_ns: u64,
    /// Phase B began.
    pub compute_start_ns: u64,
    /// Phase B ended.
    pub compute_end_ns: u64,
    /// The result was handed to the edge back.
    pub sent_ns: u64,
}

/// Everything measured about one chunk. Times are nanoseconds of one monotonic clock, the front's. In JSON durations are
/// milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ChunkRecord {
    /// Place of the chunk in the output order.
    pub chunk_index: u64,
    /// Id of the call that carried it.
    pub call_id: u64,
    /// Epoch it was sent in.
    pub cache_epoch: u64,
    /// Video frames in the chunk; a hard cut makes a chunk shorter.
    pub frames: u32,

    /// The first frame of the chunk had been read. Where the source reads nothing, stage A began.
    pub first_read_ns: u64,
    /// The last frame of the chunk had been read. Where the source reads nothing, stage A began.
    pub last_read_ns: u64,
    /// Stage A (encode into the slot) began.
    pub build_start_ns: u64,
    /// Stage A ended.
    pub build_end_ns: u64,
    /// The header had left.
    pub sent_ns: u64,
    /// The result could be read.
    pub received_ns: u64,
    /// Stage C (decode) began.
    pub decode_start_ns: u64,
    /// Stage C ended.
    pub decode_end_ns: u64,
    /// The decoded chunk was handed to the sink. Zero when it was dropped.
    pub emitted_ns: u64,

    /// Duration of phase B as the phase B side measured it.
    #[serde(rename = "phase_b_ms", serialize_with = "as_ms")]
    pub phase_b_us: u64,
    /// How long phase B had waited for this chunk, as the phase B side measured it.
    #[serde(rename = "idle_ms", serialize_with = "as_ms")]
    pub idle_us: u64,
    /// Times of the phase B side, where they are known. The measures do without them; the pictures do not.
    pub phase_b: Option<PhaseBTimes>,

    /// Payload bytes sent to phase B.
    pub forward_bytes: u64,
    /// Payload bytes received from it.
    pub back_bytes: u64,
    /// Chunks waiting in the source queue when this one was taken from it.
    pub source_queue: u32,
    /// Chunks waiting in the sink queue when this one was put into it.
    pub sink_queue: u32,
    /// Chunks in flight, this one included, when it was sent. A chunk is in flight from its admission until the end of
    /// its decode.
    pub in_flight: u32,
    /// The result belonged to an old epoch and was received but not decoded.
    pub dropped: bool,
}

impl ChunkRecord {
    /// Duration of stage A.
    pub fn build_ns(&self) -> u64 {
        self.build_end_ns.saturating_sub(self.build_start_ns)
    }

    /// Duration of stage C; 0 for a dropped chunk.
    pub fn decode_ns(&self) -> u64 {
        self.decode_end_ns.saturating_sub(self.decode_start_ns)
    }

    /// `stage0_k`: the work of the front on this chunk, build and decode.
    pub fn stage0_ns(&self) -> u64 {
        self.build_ns().saturating_add(self.decode_ns())
    }

    /// `stage1_k`: the reported duration of phase B.
    pub fn stage1_ns(&self) -> u64 {
        self.phase_b_us.saturating_mul(1_000)
    }

    /// From the moment when the first frame of the chunk had been read until the chunk was handed to the sink. None for
    /// a dropped chunk.
    pub fn latency_ns(&self) -> Option<u64> {
        (!self.dropped).then(|| self.emitted_ns.saturating_sub(self.first_read_ns))
    }

    /// The part of it after the last frame of the chunk had been read: what the pipeline adds to gathering the frames.
    pub fn added_latency_ns(&self) -> Option<u64> {
        (!self.dropped).then(|| self.emitted_ns.saturating_sub(self.last_read_ns))
    }
}

pub(crate) fn as_ms<S: Serializer>(us: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(*us as f64 / 1e3)
}

/// A Phase B that was lost, and the one that took its place. Times are of the monotonic clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Restart {
    /// Why the old one was given up.
    pub fault: Fault,
    /// When.
    pub lost_ns: u64,
    /// The first chunk that the new one got; `None` if there was none left for it.
    pub chunk: Option<ChunkIndex>,
    /// When that chunk was sent.
    pub sent_ns: Option<u64>,
    /// When its result was there.
    pub served_ns: Option<u64>,
    /// Chunks that were sent a second time.
    pub sent_again: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_of_nonsense_times_are_zero() {
        let record = ChunkRecord {
            build_start_ns: 9,
            build_end_ns: 3,
            phase_b_us: u64::MAX,
            ..ChunkRecord::default()
        };
        assert_eq!(record.stage0_ns(), 0);
        assert_eq!(record.stage1_ns(), u64::MAX);
    }
}
