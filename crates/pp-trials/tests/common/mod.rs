//! What the tests of this crate share.

#![allow(dead_code, reason = "each test file uses its part")]

use std::process::Command;

use pp_testing::{Folder, process};

/// The folder of a test.
pub(crate) fn folder(test: &str) -> Folder {
    Folder::new(env!("CARGO_TARGET_TMPDIR"), test)
}

/// `pp-trials` with these arguments: `pp`, where PP_FAULT works.
pub(crate) fn pp<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Command {
    let (program, folder) = (env!("CARGO_BIN_EXE_pp-trials"), env!("CARGO_TARGET_TMPDIR"));
    process::program(program, folder, args)
}
