//! Payloads from GPU to GPU of one host, by the copy engine of the sender: no library, and no multiprocessor works for it.
//!
//! Hazard: nothing but a number in shared memory says that a payload has arrived, and a GPU goes on with what was queued
//! for it when its process is stopped or its peer is gone. A number that comes before its payload, a slot that is written
//! while it is read, or a number of an older life would be believed. Guarantee: a payload is there once the number in its
//! slot's word is the one that is due when its header has come; that number is written by the stream that copied, behind the
//! copy. Both ranks count the payloads of each slot, so the number is known before the header is there. The credit is written by a stream, too, behind the last work that reads the slot. No GPU waits for a peer: hosts alone look
//! at numbers. Each generation has memory of its own for slots and numbers, so what an older one still writes is not seen.
//!
//! Choices: a slot is a pair of buffers. The stage of the sender writes into its own; the copy goes into memory of the
//! receiver's device which both map ([`pp_device::SharedMemory`]). A stage that has issued all of a payload may let it move
//! behind its work ([`DeviceTx::send_ahead`](super::DeviceTx::send_ahead)); the header follows when the work was seen done. The
//! numbers of all edges with a peer lie in one sealed
//! page, which is registered alone. An abort marks the edges, and ends nothing: copies into the memory of a dead peer
//! complete like others, and it is unmapped when the stream has passed them.
//!
//! A chunk costs a rank these calls of the driver beside the work of its stages: to send, one wait for an event, one copy
//! and one number; to give back, one wait for an event and one number, on a stream of their own. What has arrived and what
//! is read costs a load.
//!
//! Whether two ranks can send in this way is found out by trying, before any edge is made ([`GpuBackend`](crate::gpu_backend::GpuBackend)).

mod life;
mod numbers;
pub(crate) mod trial;
