//! Devices, streams, events and buffers of CUDA, as values that cannot be misused by accident.
//!
//! Hazard: memory freed while a stream still works on it, a call made while another device's
//! context is current, a destructor that waits for a kernel that never ends, a missing driver
//! that ends the process. Guarantee: every call binds its context first; nothing here waits for
//! the device, destructors least of all; a buffer whose last known use is not over is leaked and
//! said, not freed; a missing or old driver is an error with the remedy.
//!
//! Choices: the primary context of each device, which NCCL uses too, retained once and never
//! released. The driver's library is found by cudarc; its functions are called through a table
//! of our own, filled and checked once, so that no symbol is missed in the middle of a run and a
//! result code that a newer driver invents is a number and not undefined behaviour. Memory comes
//! from `cuMemAlloc`: plain memory that NCCL and every kernel can use. Freeing waits for the
//! device, so a thread of its own does that.

mod copy;
mod device;
mod driver;
mod error;
mod memory;
mod stream;

pub use device::{About, Device, Memory};
pub use error::CudaError;
pub use memory::{DeviceBuffer, DevicePtr, PinnedBuffer};
pub use stream::{Event, Stream};
