//! Frames on a byte stream: a length (u32, little endian), then that many bytes.
//!
//! Hazard: the length comes from the other end, which may be a stranger. Guarantee: it is checked
//! against a bound before anything is allocated, and the reader takes no byte beyond the frame it
//! is reading, so that descriptors passed behind a frame arrive with the call that expects them,
//! and `poll` tells the truth about what is left.

use std::io;

pub(crate) const PREFIX_BYTES: usize = 4;

/// Where a [`FrameReader`] stands after it took what was there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadProgress {
    /// A whole frame is in [`FrameReader::frame`]; the next read starts the next one.
    Frame,
    /// Nothing more to read now.
    Pending,
    /// The stream ended, between frames or inside one.
    Eof {
        /// Bytes of the next frame had come.
        inside: bool,
    },
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("a frame of {bytes} bytes was announced; {min} to {max} are allowed")]
    Length { bytes: u32, min: usize, max: usize },
    #[error(transparent)]
    Io(#[from] io::Error),
}

#[derive(Debug)]
pub(crate) struct FrameReader {
    min: usize,
    max: usize,
    prefix: [u8; PREFIX_BYTES],
    /// Bytes of prefix and frame taken so far.
    taken: usize,
    /// Holds one frame; grows at most to `max`, and only for a length that was checked.
    buf: Vec<u8>,
}

impl FrameReader {
    pub(crate) fn new(min: usize, max: usize) -> Self {
        Self {
            min,
            max,
            prefix: [0; PREFIX_BYTES],
            taken: 0,
            buf: Vec::new(),
        }
    }

    /// Reads until a frame is whole, the source has no more, or it ends.
    pub(crate) fn poll(
        &mut self,
        mut read: impl FnMut(&mut [u8]) -> io::Result<usize>,
    ) -> Result<ReadProgress, FrameError> {
        loop {
            let rest = match self.taken.checked_sub(PREFIX_BYTES) {
                None => &mut self.prefix[self.taken..],
                Some(taken) => &mut self.buf[taken..],
            };
            match read(rest) {
                Ok(0) => {
                    return Ok(ReadProgress::Eof {
                        inside: self.taken != 0,
                    });
                }
                Ok(bytes) => self.taken += bytes.min(rest.len()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(ReadProgress::Pending);
                }
                Err(error) => return Err(error.into()),
            }
            if self.taken == PREFIX_BYTES {
                let bytes = u32::from_le_bytes(self.prefix);
                let (len, min, max) = (bytes as usize, self.min, self.max);
                if !(min..=max).contains(&len) {
                    return Err(FrameError::Length { bytes, min, max });
                }
                self.buf.resize(len, 0);
            }
            if self.taken == PREFIX_BYTES + self.buf.len() && self.taken > PREFIX_BYTES {
                self.taken = 0;
                return Ok(ReadProgress::Frame);
            }
        }
    }

    /// The frame that [`ReadProgress::Frame`] announced; valid until the next `poll`.
    pub(crate) fn frame(&self) -> &[u8] {
        &self.buf
    }
}

#[cfg(test)]
mod tests;
