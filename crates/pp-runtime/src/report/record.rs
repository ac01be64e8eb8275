//! The record of one chunk: every moment that the measures, the trace and the timeline need, on the front's clock.
//!
//! It is a plain `Copy` value with public fields because it carries no invariant: times come from two processes, one of
//! which may be wrong, so every reader subtracts with saturation and none may panic on any content.

use serde::Serialize;

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

/// Everything measured about one chunk. Times are nanoseconds of one monotonic clock, the front's.
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

    /// Stage A (encode into the slot) began.
    pub build_start_ns: u64,
    /// Stage A ended.
    pub build_end_ns: u64,
    /// The header had left: from here on the chunk was in flight.
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
    pub phase_b_us: u64,
    /// How long phase B had waited for this chunk, as the phase B side measured it.
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
    /// Chunks in flight, this one included, when it was sent.
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
