//! The video that a command reads.

use std::ops::Deref;
use std::path::{Path, PathBuf};

use clap::Args;

/// `--input FILE`, or FILE alone. As a path it is "-", standard input, where neither is given.
#[derive(Args, Clone, Debug)]
pub struct Input {
    /// Y4M video to read: 8 or 10 bits, 4:2:0, 4:2:2, 4:4:4 or mono, frames of 16x16 to 16384x16384. "-" is standard input, which
    /// pp run reads by default; without a file pp plan measures with noise.
    #[arg(short, long, value_name = "FILE.y4m|-")]
    input: Option<PathBuf>,
    /// As --input.
    #[arg(value_name = "FILE.y4m|-", conflicts_with = "input")]
    file: Option<PathBuf>,
}

impl Input {
    /// The path that was given, if one was.
    #[must_use]
    pub fn given(&self) -> Option<&Path> {
        self.file.as_deref().or(self.input.as_deref())
    }
}

impl Deref for Input {
    type Target = Path;

    fn deref(&self) -> &Path {
        self.given().unwrap_or(Path::new("-"))
    }
}
