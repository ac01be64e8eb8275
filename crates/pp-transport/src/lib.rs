//! Buffers, edges and the control channel between the ranks of a pipeline.
//!
//! Hazard: a buffer reused while the other side still reads it, a receive posted for a payload that
//! no rank sends, a peer that is gone unnoticed. Guarantee: buffers in flight are types that cannot
//! be touched ([`in_flight`]); a header leaves only for a message that was prepared whole, and a
//! receive is posted only with the header that announced it ([`edge`]).
//!
//! Choices: backends are values behind [`backend::Backend`]; [`host`] is shared memory between processes of one machine,
//! [`nccl`] moves payloads between the GPUs of any, and [`gpu::p2p`] between those of one machine by copy engine. Both have
//! the slots of [`gpu`]. Headers and credits take a [`lane`] beside the payloads. [`control`] carries the handshake,
//! descriptors, heartbeats and faults, authenticated; [`launch`] finds out which rank this process is; [`flight`] keeps this
//! rank's last operations, to explain why a job stands still.

#[cfg(not(loom))]
pub mod backend;
#[cfg(not(loom))]
pub mod bell;
#[cfg(not(loom))]
pub mod control;
#[cfg(not(loom))]
pub mod edge;
#[cfg(not(loom))]
pub mod error;
#[cfg(not(loom))]
pub mod flight;
#[cfg(all(any(test, feature = "fuzz"), not(loom)))]
pub mod fuzz;
#[cfg(not(loom))]
pub mod gpu;
#[cfg(not(loom))]
pub mod group;
#[cfg(not(loom))]
pub mod host;
#[cfg(not(loom))]
pub mod in_flight;
#[cfg(not(loom))]
pub mod lane;
#[cfg(not(loom))]
pub mod launch;
#[cfg(not(loom))]
pub mod nccl;
#[cfg(not(loom))]
mod random;
mod sync;
#[cfg(not(loom))]
pub mod times;

// The models see the protocols alone, without the kernel.
#[cfg(loom)]
#[allow(dead_code, reason = "the models use part of what the recorder does")]
mod flight {
    pub(crate) mod ring;
}
#[cfg(loom)]
#[allow(dead_code, reason = "the models use part of what the backend does")]
mod host {
    pub(crate) mod bell_words;
    pub(crate) mod group {
        pub(crate) mod words;
    }
    pub(crate) mod ring;
    pub(crate) mod slots;
}
#[cfg(loom)]
#[allow(dead_code, reason = "as above")]
mod nccl {
    pub(crate) mod gate;
}
#[cfg(all(test, loom))]
mod models;
