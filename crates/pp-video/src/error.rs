//! What can be wrong with an input or an output, each with the place and the remedy in one line.

use std::io;

use pp_contract::{Fault, FaultKind};
use pp_job::{Error, RANK_0};
use pp_runtime::stage::remedy_of_file;

/// The command that turns anything ffmpeg can read into what we read.
const CONVERT: &str = "ffmpeg -i INPUT -pix_fmt yuv420p -f yuv4mpegpipe - | pp run --input -";

/// Where reading stopped: the input, the whole frames before, and the byte.
#[derive(Debug)]
pub struct At {
    /// The name of the input.
    pub name: String,
    /// Whole frames before the place.
    pub frame: u64,
    /// Bytes before the place.
    pub offset: u64,
}

/// Why an input cannot be used. The fault lies with the file.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the message of each variant says what it is
pub enum InputError {
    #[error("the thread that reads the input panicked; the lines above say where")]
    ReaderDied,
    #[error("{name}: cannot be opened: {source}; {}", remedy_of_file(source))]
    Open { name: String, source: io::Error },
    #[error("{0}: is a directory; name a .y4m file in it")]
    IsDirectory(String),
    #[error("{}: reading failed at byte {} (frame {}): {source}; check the disk or the program that writes the input", .at.name, .at.offset, .at.frame)]
    Read { at: At, source: io::Error },
    #[error("{0}: empty, not one byte in it; check the command that should have written it")]
    Empty(String),
    #[error("{0}: has a header but no frame; check the command that should have written it")]
    NoFrames(String),
    #[error("{0}: not a Y4M file but {1}; convert it: {CONVERT}")]
    Foreign(String, &'static str),
    #[error("{0}: {1}")]
    Header(String, HeaderFault),
    #[error(
        "{}: truncated: frame {} ends after {have} of {want} bytes, at byte {}; \
         check the program that should have written all of it", .at.name, .at.frame, .at.offset
    )]
    Truncated { at: At, have: usize, want: usize },
    #[error(
        "{}: became shorter while it was read: it had {had} bytes, and ends at byte {} behind frame {}; \
         do not change the file while pp reads it",
        .at.name, .at.offset, .at.frame
    )]
    Shrunk { at: At, had: u64 },
    #[error(
        "{name}: {frames} frames are read, and --skip {skip} is behind them; skip {frames} at most"
    )]
    Skipped {
        name: String,
        frames: u64,
        skip: u64,
    },
    #[error(
        "{}: no FRAME marker at byte {}, where frame {} should begin, but {found}; \
         the header's size or colour space may be wrong, or bytes were lost", .at.name, .at.offset, .at.frame
    )]
    NoMarker { at: At, found: String },
    #[error(
        "{}: the sample at byte {} is {sample} (frame {}, {place}), and 10 bits hold 1023 at most; check the program that should \
         have written samples of 10 bits, the lower byte first", .at.name, .at.offset, .at.frame
    )]
    TooLarge { at: At, sample: u16, place: String },
}

/// What is wrong with a header: malformed, or well formed and beyond us.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // as above
pub enum HeaderFault {
    #[error("bad Y4M header: {0}")]
    Malformed(String),
    #[error("{0} is not supported; convert it: {CONVERT}")]
    Unsupported(String),
    #[error(
        "colour space C{tag} is not supported, but 8 and 10 bits are; convert it: ffmpeg -i IN -pix_fmt {format} -strict -1 OUT.y4m"
    )]
    Depth { tag: String, format: &'static str },
    #[error(
        "interlacing mixed from frame to frame (Im) is not supported, and ffmpeg cannot read such a file; convert \
         its source: ffmpeg -i ORIGINAL -vf yadif -pix_fmt yuv420p -f yuv4mpegpipe - | pp run --input -"
    )]
    Mixed,
}

impl From<InputError> for Error {
    fn from(error: InputError) -> Self {
        // Rank 0 alone reads.
        Self::Fault(Fault::new(error.kind(), RANK_0, "read input", error))
    }
}

impl InputError {
    /// Says whose fault it is: the file's place, its contents, or ours.
    #[must_use]
    pub fn kind(&self) -> FaultKind {
        match self {
            Self::ReaderDied => FaultKind::Internal,
            Self::Open { .. } | Self::IsDirectory(_) | Self::Read { .. } => FaultKind::Io,
            _ => FaultKind::BadInput,
        }
    }

    /// Says whether whole frames came before it, which can be processed all the same.
    #[must_use]
    pub fn follows_frames(&self) -> bool {
        match self {
            Self::Read { at, .. }
            | Self::Truncated { at, .. }
            | Self::Shrunk { at, .. }
            | Self::NoMarker { at, .. }
            | Self::TooLarge { at, .. } => at.frame > 0,
            _ => false,
        }
    }
}
