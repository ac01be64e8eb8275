//! What the end-to-end tests of this crate share.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use pp_testing::{Folder, assert_has, process};

/// The folder of a test.
pub(crate) fn folder(test: &str) -> Folder {
    Folder::new(env!("CARGO_TARGET_TMPDIR"), test)
}

/// The folder of a test with this clip in it, the path of the clip, and where an output may go.
pub(crate) fn files(test: &str, clip: &[u8]) -> (Folder, PathBuf, PathBuf) {
    let folder = folder(test);
    let input = folder.write("in.y4m", clip);
    let output = folder.file("out.y4m");
    (folder, input, output)
}

/// `pp` with these arguments.
pub(crate) fn pp<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Command {
    let (program, folder) = (env!("CARGO_BIN_EXE_pp"), env!("CARGO_TARGET_TMPDIR"));
    process::program(program, folder, args)
}

/// Arguments of a run from file to file.
pub(crate) fn run_args(input: &Path, output: &Path, more: &[&str]) -> Vec<OsString> {
    let mut args: Vec<OsString> = vec!["run".into(), "--input".into(), input.into()];
    args.extend(["--output".into(), output.into()]);
    args.extend(more.iter().map(OsString::from));
    args
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
                // Digests have the names of tensors, and kernels those of stages.
                if !["source", "origin"].contains(&&**key) {
                    assert_keys_are_documented(value);
                }
            }
        }
        serde_json::Value::Array(list) => list.iter().for_each(assert_keys_are_documented),
        _ => {}
    }
}
