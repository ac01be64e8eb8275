//! Buffers, edges and the control channel between the ranks of a pipeline.
//!
//! Hazard: a buffer reused while the other side still reads it, a receive posted for a payload that
//! no rank sends, a peer that is gone unnoticed. Guarantee: buffers in flight are types that cannot
//! be touched ([`in_flight`]); a header leaves only for a message that was prepared whole, and a
//! receive is posted only with the header that announced it ([`edge`]).
//!
//! Choices: backends are values behind [`backend::Backend`]; [`host`] is shared memory between processes of one machine,
//! [`nccl`] moves payloads between the GPUs of any, and [`gpu_backend`] takes it or the copy engine, for each two ranks.
//! Both have the slots of [`gpu`]. Headers and credits take a [`lane`] beside the payloads. [`control`] carries the handshake,
//! descriptors, heartbeats and faults, authenticated; [`launch`] finds out which rank this process is; [`flight`] keeps this
//! rank's last operations, to explain why a job stands still.

#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;

pub use pp_edges::{backend, bell, edge, error, flight, group, host, in_flight};
pub use pp_gpu::{gpu, gpu_backend, nccl};
pub use pp_meet::{control, launch};

/// The way of headers and credits between two ranks. What a payload's memory relies on stays in the parts of this crate.
pub mod lane {
    pub use pp_edges::lane::{Inlet, LaneEnd, LaneRx, LaneTx, over_channel, pair};
}

/// How long ranks wait for each other, and edges for their end.
pub mod times {
    pub use pp_gpu::times::ENDED_WITHIN;
    pub use pp_meet::times::{DECLINE_WITHIN, MEET_WITHIN};
}
