//! What the ranks of a pipeline say to each other, and what must be true of it.
//!
//! *Hazard.* A pipeline moves large payloads over channels that check nothing: a receive that is
//! smaller than its send truncates silently, a larger one hangs, a header that is sent before its
//! message could be serialized leaves the peer waiting for ever.
//!
//! *Guarantee.* Every value here is right by construction, on both sides:
//! - a [`Header`] can only be sent for a message that was prepared in full
//!   ([`Composer`] → [`Prepared`] → [`Committed`]);
//! - a receive can only be posted with a header that was checked and is in order
//!   ([`Lockstep`] → [`Matched`]);
//! - a body decodes into the same types through the same constructors
//!   ([`Message`], [`Hello`], [`Fault`]);
//! - no byte of a peer can cause a panic, and none sizes an allocation beyond a fixed bound.
//!
//! *Choices.* A fixed 64-byte header, checksummed, in front of a [postcard] body of at most
//! [`MAX_BODY_BYTES`]. The plan, which says what the stages are to do, is a type parameter
//! ([`Plan`]): [`VideoPlan`] is the one shipped, another crate brings its own.
//!
//! *Not here.* Threads, clocks, sockets, devices: nothing in this crate waits or does I/O.
//!
//! [postcard]: https://postcard.jamesmunns.com/wire-format

#![forbid(unsafe_code)]

#[macro_use]
mod codes;

mod bounded;
mod codec;
mod device;
mod digest;
mod dtype;
mod fault;
mod handshake;
mod header;
mod ids;
mod lockstep;
mod manifest;
mod message;
pub mod pipeline;
mod plan;
mod prepare;
mod seal;
mod trail;

pub use bounded::{List, Text, TooLong};
pub use codec::BodyError;
pub use codes::UnknownCode;
pub use device::{DeviceName, DeviceNameError};
pub use digest::{DIGEST_BLOCK_BYTES, Digest, Digests, digest, tensor_digest};
pub use dtype::{DType, MAX_DIMS, MAX_ELEMENTS, Shape, ShapeError};
pub use fault::{Fault, FaultKind, with_source};
pub use handshake::{
    DeviceClash, DeviceConflict, DeviceMap, HELLO_HEADER_BYTES, HandshakeError, Hello, HelloParts,
    MAX_HELLO_BYTES, MAX_SETTINGS, Mismatch, Settings, check_devices, compare,
};
pub use header::{
    Action, HEADER_BYTES, Header, HeaderError, MAGIC, MAX_BODY_BYTES, MAX_FRAME_BYTES, Stamp,
    WIRE_VERSION,
};
pub use ids::{CacheEpoch, CallId, ChunkIndex, EdgeSeq, Generation, IdError, Rank, WorldSize};
pub use lockstep::{Lockstep, LockstepError, Matched};
pub use manifest::{
    MAX_PAYLOAD_BYTES, MAX_TENSORS, Manifest, ManifestError, TENSOR_ALIGN_BYTES, TensorName,
    TensorSpec,
};
pub use message::{MAX_NOTE_BYTES, Message};
pub use pipeline::{Pipeline, PipelineError, StageSpec};
pub use plan::fields::plan_digest;
pub use plan::video::{MAX_CONTEXT_GAPS, VideoPlan, VideoPlanParts, pass_range};
pub use plan::{Plan, PlanError};
pub use prepare::{Bare, Committed, Composer, PrepareError, Prepared, Sequencer};
pub use seal::{SEAL_TENSOR, Seal};
pub use trail::{StageReport, Trail, TrailError};
