//! The NCCL backend: payloads go from device to device, headers beside them on a lane.
//!
//! Hazard: NCCL checks nothing. A receive of another size than its send truncates silently or
//! hangs later, two threads race, a buffer is reused while a send still reads it, a peer that died
//! is never noticed, and an aborted receive looks like a good one. Guarantee: a receive is posted
//! only with a matched header, with the size that the header says; one thread issues, in one
//! order; a slot is written again only when the device has sent it and the peer has given it back,
//! and given back only when the device says that its readers are done; after an abort nothing that
//! was in flight is believed.
//!
//! Choices: one communicator and one stream for each directed edge, so that no direction waits for
//! the other. With `CUDA_DEVICE_MAX_CONNECTIONS=1` that is not so: both streams may share the one
//! queue of the device, where a send that is too large for NCCL's buffers waits for its receiver,
//! and the receive behind it for the send; the connection warns of it. Communicators are
//! made and tried out before the first payload, with a deadline, on a thread that may be left
//! behind (`connect.rs`), and can be given up from any thread ([`AbortHandle`]). Blocking
//! communicators by default: a send takes the thread 6 to 10 µs on one, 43 to 50 µs on a
//! non-blocking one (docs/measuring.md), and what a non-blocking one allows, leaving a call that
//! hangs, a thread that may be lost allows too.
//!
//! A chunk costs a rank these calls of the driver beside one `ncclSend` and one `ncclRecv`: four
//! `cuEventRecord` (written, sent, arrived, read), one `cuStreamWaitEvent` (the send waits for what
//! was written), and one successful `cuEventQuery` each for sent, arrived and read; none of them
//! allocates, none waits. What the host has seen done needs no wait of a stream: so a receive into
//! a slot that came back, and the work on a payload that has arrived, wait for nothing.

mod backend;
mod calls;
mod collectives;
mod communicator;
mod connect;
mod edge;
mod id;
mod issuer;
mod life;
mod settings;
mod warm_up;

pub use backend::{NcclBackend, uuid_text};
pub use communicator::Communicator;
pub use edge::Agreed;
pub use id::UniqueId;
pub use issuer::Issuer;
pub use life::{AbortHandle, is_at_rest};
pub use nccl_sys::{LoadError, Nccl, NcclError, Version};
pub use warm_up::warm_up;
