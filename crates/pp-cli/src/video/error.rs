//! What can be wrong with an input or an output, each with the place and the remedy in one line.

use std::io;
use std::path::{Path, PathBuf};

use pp_contract::FaultKind;
use pp_transport::error::lift_limit;
use rustix::io::Errno;

use super::place::is_stdout;

/// The command that turns anything ffmpeg can read into what we read.
const CONVERT: &str = "ffmpeg -i INPUT -pix_fmt yuv420p -f yuv4mpegpipe - | pp run --input -";

/// Why an input cannot be used. The fault lies with the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum InputError {
    #[error("the reading thread is gone; its last words stand above")]
    ReaderDied,
    #[error("{name}: cannot be opened: {source}; {}", remedy_of_input(source))]
    Open { name: String, source: io::Error },
    #[error("{name}: is a directory; name a .y4m file in it")]
    IsDirectory { name: String },
    #[error("{name}: reading failed at byte {offset} (frame {frame}): {source}")]
    Read {
        name: String,
        frame: u64,
        offset: u64,
        source: io::Error,
    },
    #[error("{name}: empty, not one byte in it; check the command that should have written it")]
    Empty { name: String },
    #[error("{name}: has a header but no frame; check the command that should have written it")]
    NoFrames { name: String },
    #[error("{name}: not a Y4M file but {what}; convert it: {CONVERT}")]
    Foreign { name: String, what: &'static str },
    #[error("{name}: bad Y4M header: {what}")]
    Header { name: String, what: String },
    #[error("{name}: {what} is not supported; convert it: {CONVERT}")]
    Unsupported { name: String, what: String },
    #[error(
        "{name}: interlacing mixed from frame to frame (Im) is not supported, and ffmpeg cannot read such a file; convert \
         its source: ffmpeg -i ORIGINAL -vf yadif -pix_fmt yuv420p -f yuv4mpegpipe - | pp run --input -"
    )]
    Mixed { name: String },
    #[error(
        "{name}: truncated: frame {frame} ends after {have} of {want} bytes, at byte {offset}; \
         check the program that should have written all of it"
    )]
    Truncated {
        name: String,
        frame: u64,
        offset: u64,
        have: usize,
        want: usize,
    },
    #[error(
        "{name}: became shorter while it was read: it had {had} bytes, and ends at byte {offset} behind frame {frame}"
    )]
    Shrunk {
        name: String,
        frame: u64,
        offset: u64,
        had: u64,
    },
    #[error(
        "{name}: no FRAME marker at byte {offset}, where frame {frame} should begin, but {found}; \
         the header's size or colour space may be wrong, or bytes were lost"
    )]
    NoMarker {
        name: String,
        frame: u64,
        offset: u64,
        found: String,
    },
}

impl InputError {
    /// Whose fault it is: the file's place, its contents, or ours.
    pub(crate) fn kind(&self) -> FaultKind {
        match self {
            Self::ReaderDied => FaultKind::Internal,
            Self::Open { .. } | Self::IsDirectory { .. } | Self::Read { .. } => FaultKind::Io,
            Self::Empty { .. }
            | Self::NoFrames { .. }
            | Self::Foreign { .. }
            | Self::Header { .. }
            | Self::Unsupported { .. }
            | Self::Mixed { .. }
            | Self::Truncated { .. }
            | Self::Shrunk { .. }
            | Self::NoMarker { .. } => FaultKind::BadInput,
        }
    }

    /// Whether whole frames came before it, which can be processed all the same.
    pub(crate) fn follows_frames(&self) -> bool {
        match self {
            Self::Read { frame, .. }
            | Self::Truncated { frame, .. }
            | Self::Shrunk { frame, .. }
            | Self::NoMarker { frame, .. } => *frame > 0,
            _ => false,
        }
    }
}

/// Why an output cannot be written. The fault lies with the place it should go to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum OutputError {
    #[error("{path}: cannot be created: {source}; {}", remedy(source))]
    Create { path: Shown, source: io::Error },
    #[error(
        "{path}: cannot be created: {source}; the file system there takes no new files, choose another place"
    )]
    NoNewFiles { path: Shown, source: io::Error },
    #[error("{path}: is a directory; name a file in it")]
    IsDirectory { path: Shown },
    #[error("{path}: is a file that is open already; name the file, or - for standard output")]
    IsDescriptor { path: Shown },
    #[error("{path}: this user may not replace it; make it writable, or choose another name")]
    Protected { path: Shown },
    #[error(
        "{path}: is a socket; name a file, or pipe --output - into a program that connects to it"
    )]
    IsSocket { path: Shown },
    #[error(
        "{path}: writing failed after {bytes} bytes: {source}; {}",
        remedy(source)
    )]
    Write {
        path: Shown,
        bytes: u64,
        source: io::Error,
    },
    #[error(
        "{path}: complete, but cannot be stored under its name: {source}; {}",
        remedy(source)
    )]
    Commit { path: Shown, source: io::Error },
}

/// A path in a message. A name of standard output reads as what it stands for.
#[derive(Clone, Debug)]
pub(crate) struct Shown(PathBuf);

impl From<&Path> for Shown {
    fn from(path: &Path) -> Self {
        Self(path.to_path_buf())
    }
}

impl std::fmt::Display for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if is_stdout(&self.0) {
            return f.write_str("standard output");
        }
        self.0.display().fmt(f)
    }
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "free some space or choose another place"
        }
        io::ErrorKind::BrokenPipe => "the program that reads it has ended; look at its messages",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "choose a directory that you may write to"
        }
        io::ErrorKind::NotFound => "create its directory first",
        io::ErrorKind::FileTooLarge => {
            "lift the limit on file sizes (ulimit -f) or choose another place"
        }
        _ => Errno::from_io_error(error)
            .and_then(lift_limit)
            .unwrap_or("choose another place"),
    }
}

fn remedy_of_input(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => "check its name",
        io::ErrorKind::PermissionDenied => "choose a file that you may read",
        _ => Errno::from_io_error(error)
            .and_then(lift_limit)
            .unwrap_or("choose another file"),
    }
}
