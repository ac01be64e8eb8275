//! Video in and out: files, pipes and devices on their own threads, so that none of them ever holds up the driver.
//!
//! The hazard is a picture that lies: a file cut off in the middle that reads as a shorter one, a result half written
//! under its final name, a full disk that no code notices. So the reader tells an end from a break and names the frame
//! and the byte; the writer shows a file only when all of it is there.

pub(crate) mod buffer;
pub(crate) mod error;
pub(crate) mod header;
pub(crate) mod noise;
pub(crate) mod psnr;
pub(crate) mod scene;
pub(crate) mod sink;
pub(crate) mod source;
#[cfg(test)]
mod testing;
pub(crate) mod y4m;

pub(crate) use error::InputError;
