//! Video in and out: files, pipes and devices on their own threads, so that none of them ever holds up the driver.
//!
//! The hazard is a picture that lies: a file cut off in the middle that reads as a shorter one, a result half written
//! under its final name, a full disk that no code notices. So the reader tells an end from a break and names the frame
//! and the byte; the writer shows a file only when all of it is there.

pub mod buffer;
mod error;
pub mod estimates;
pub mod header;
pub mod kept;
pub mod noise;
pub mod origin;
pub mod played;
pub mod psnr;
mod scene;
pub mod sink;
pub mod source;
#[cfg(test)]
mod testing;
pub mod thumbnail;
pub mod y4m;

pub use crate::error::{At, HeaderFault, InputError};

/// Chunks read ahead, and decoded chunks that wait to be written.
pub const QUEUE: usize = 4;

/// Gives the number of threads that read, and of those that write: a few, since the other cores are the kernels'.
#[must_use]
pub fn io_threads() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / 4).clamp(1, 8)
}
