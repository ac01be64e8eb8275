//! What the end-to-end tests of this crate share.

use std::process::Command;

use pp_testing::{Folder, assert_has, process};

/// The folder of a test.
pub(crate) fn folder(test: &str) -> Folder {
    Folder::new(env!("CARGO_TARGET_TMPDIR"), test)
}

/// `pp` with these arguments.
pub(crate) fn pp<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Command {
    let (program, folder) = (env!("CARGO_BIN_EXE_pp"), env!("CARGO_TARGET_TMPDIR"));
    process::program(program, folder, args)
}

/// A benchmark that runs until it is ended.
pub(crate) fn endless(bytes: &str, stage_ms: &str) -> Command {
    let mut command = pp(&["bench", "overlap", "--chunks", "10000000"]);
    command.args(["--bytes", bytes, "--decode-ms", stage_ms]);
    command.args(["--phase-b-ms", stage_ms]);
    command
}

/// Every key of a report stands in the document of the report file.
pub(crate) fn assert_keys_are_documented(value: &serde_json::Value) {
    const DOCUMENT: &str = include_str!("../../../../docs/report.md");
    match value {
        serde_json::Value::Object(object) => {
            for (key, value) in object {
                assert_has(DOCUMENT, &[&format!("`{key}`")]);
                // Digests have the names of tensors.
                if key != "source" {
                    assert_keys_are_documented(value);
                }
            }
        }
        serde_json::Value::Array(list) => list.iter().for_each(assert_keys_are_documented),
        _ => {}
    }
}
