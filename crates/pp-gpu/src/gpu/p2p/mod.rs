//! Payloads between GPUs of one host, by the copy engine of the sender. This needs no library and no multiprocessor.
//!
//! Hazard: only a number in shared memory says that a payload has arrived. A GPU goes on with its queued work even if
//! its process is stopped or its peer is gone. So a number could come before its payload, a slot could be written while
//! it is read, or a number of an older life could count. Guarantee: when a header has come, its payload is there once
//! the word of its slot holds the number that is due. The stream that copied the payload writes that number behind the
//! copy. Both ranks count the payloads of each slot, so the number is known before the header comes. A stream writes
//! the credit too, as a number. Each generation has its own memory for slots and numbers, so late writes of an older
//! one are never seen.
//!
//! Choices: a slot is a pair of buffers. The stage of the sender writes into the sender's buffer. The copy goes into
//! memory of the receiver's device, which both ranks map ([`pp_device::SharedMemory`]). A stage that has issued all
//! writes of a payload may let it move behind those writes ([`DeviceTx::send_ahead`](super::DeviceTx::send_ahead)); the
//! header follows when the driver hands the chunk on. The numbers of all edges with a peer lie in one sealed page, which
//! alone is registered. An abort marks the edges and ends nothing: copies into the memory of a dead peer complete like
//! others, and the memory is unmapped when the stream has passed them.
//!
//! For each chunk a rank makes these calls of the driver beside the work of its stages. A send takes one wait for an
//! event, one copy and one number. A return takes one wait for an event and one number, on a stream of its own.
//! Checking whether a payload has arrived or was read takes one load.
//!
//! Two ranks find out whether this works by trying it, before any edge is made
//! ([`GpuBackend`](crate::gpu_backend::GpuBackend)).

pub(super) mod life;
mod numbers;
pub(crate) mod trial;
