//! The NCCL backend: payloads go from device to device, and headers beside them on a lane.
//!
//! Hazard: NCCL checks nothing. A receive whose size differs from its send truncates silently or hangs later. Two
//! threads race. A buffer is reused while a send still reads it. The death of a peer goes unnoticed. An aborted receive
//! looks like a good one. Guarantee: a receive is posted only with a matched header, and with the size in that header.
//! One thread issues, in one order. A slot is written again only when the device has sent it and the peer has returned
//! it, and a slot is returned only when the device says that its readers are done. After an abort no completion of an
//! operation in flight counts.
//!
//! Choices: each directed edge has one communicator and one stream, so no direction waits for the other.
//! `CUDA_DEVICE_MAX_CONNECTIONS=1` breaks this: both streams may share the one queue of the device. There a send that
//! is too large for NCCL's buffers waits for its receiver, and the receive behind it waits for the send. The connection
//! warns of this setting. Communicators are made and tried out before the first payload, with a deadline, on a thread
//! that may be left behind (`connect.rs`). Any thread can give them up ([`Abort`](pp_edges::backend::Abort)).
//! Communicators are blocking by default: a send takes the thread 6 to 10 µs on a blocking one, and 43 to 50 µs on a non-blocking one
//! (docs/measuring.md). A non-blocking communicator would let a caller leave a call that hangs; a thread that may be
//! lost allows the same.
//!
//! For each chunk a rank makes one `ncclSend` and one `ncclRecv`, and these calls of the driver: four `cuEventRecord`
//! (written, sent, arrived, read), one `cuStreamWaitEvent` (the send waits for the write), and one successful
//! `cuEventQuery` each for sent, arrived and read. None of them allocates, and none waits. No stream waits for what the
//! host has already seen done. So a receive into a returned slot waits for nothing, and neither does work on a payload
//! that has arrived.

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
pub use life::is_at_rest;
pub use nccl_sys::{LoadError, Nccl, NcclError, Version};
pub use warm_up::warm_up;
