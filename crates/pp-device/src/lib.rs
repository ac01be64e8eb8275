//! The CUDA driver: devices, streams, events, memory and modules, as values that are hard to misuse.
//!
//! Hazard: memory freed while a stream still works on it, a call made while another device's
//! context is current, a destructor that waits for a kernel that never ends, a missing driver
//! that ends the process. Guarantee: what makes something binds its context first; destructors
//! never wait for the device; a buffer whose last known use is not over is leaked with a warning,
//! not freed; a missing or old driver is an error with the remedy.
//!
//! Choices: [`Device::open`] retains the primary context of a device, which NCCL uses too, once and
//! for good. [`Device::of_context`] and [`Stream::borrow`] take the context and the stream of
//! another library. cudarc finds the driver's library; its functions are called through a table of
//! our own ([`functions!`]), filled and checked once, so that no symbol is missed in the middle of
//! a run and a result code of a newer driver is a number and not undefined behaviour.
//!
//! There are three kinds of device memory. A [`DeviceBuffer`] comes from `cuMemAlloc`: NCCL and every
//! stream can use it. Freeing it waits for the device, so a thread of its own does that. A
//! [`StreamBuffer`] comes and goes in the order of one stream. [`SharedMemory`] is mapped by two
//! processes.
//!
//! Process-wide state, each a thing of which a process has only one: the driver's functions, the
//! devices that were opened (`OPENED`), and the thread that frees (`RECLAIMER`).

mod copy;
mod device;
mod driver;
mod error;
mod memory;
mod module;
mod reclaim;
mod stream;
mod stream_buffer;
mod table;
mod vmm;

pub use copy::{Apart, Rows};
pub use device::{About, Device, Memory, has_failed_for_all};
pub use error::CudaError;
pub use memory::{Allocation, DeviceBuffer, DevicePtr, PinnedBuffer};
pub use module::{Function, LaunchConfig, Module};
pub use stream::{Event, Stream};
pub use stream_buffer::StreamBuffer;
pub use vmm::{Reach, Registered, SharedMemory};
