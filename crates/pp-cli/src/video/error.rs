//! What can be wrong with an input or an output, each with the place and the remedy in one line.

use std::io;
use std::path::{Path, PathBuf};

/// The command that turns anything ffmpeg can read into what we read.
const CONVERT: &str = "ffmpeg -i INPUT -pix_fmt yuv420p -f yuv4mpegpipe - | pp run --input -";

/// Why an input cannot be used. The fault lies with the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum InputError {
    #[error("the reading thread is gone; its last words stand above")]
    ReaderDied,
    #[error("{name}: cannot be opened: {source}")]
    Open { name: String, source: io::Error },
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
        "{name}: truncated: frame {frame} ends after {have} of {want} bytes, at byte {offset}; \
         the first {frame} frames are whole, ask for fewer chunks or get the whole file"
    )]
    Truncated {
        name: String,
        frame: u64,
        offset: u64,
        have: usize,
        want: usize,
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

/// Why an output cannot be written. The fault lies with the place it should go to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum OutputError {
    #[error("{path}: cannot be created: {source}; {}", remedy(source))]
    Create { path: Shown, source: io::Error },
    #[error("{path}: is a directory; name a file in it")]
    IsDirectory { path: Shown },
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
        "{path}: complete, but cannot be given its name: {source}; {}",
        remedy(source)
    )]
    Commit { path: Shown, source: io::Error },
}

/// A path in a message; `-` reads as what it stands for.
#[derive(Clone, Debug)]
pub(crate) struct Shown(PathBuf);

impl From<&Path> for Shown {
    fn from(path: &Path) -> Self {
        Self(path.to_path_buf())
    }
}

impl std::fmt::Display for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0.as_os_str() == "-" {
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
        _ => "choose another place",
    }
}
