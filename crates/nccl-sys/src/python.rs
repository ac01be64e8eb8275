//! Asking a Python where its NCCL is.
//!
//! PyTorch brings NCCL as a package of its own, in a directory that no dynamic linker looks into.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// A Python on a cold network drive is slow; one that hangs must not hang the job.
const PATIENCE: Duration = Duration::from_secs(10);
/// A path is shorter. What prints more is not our script.
const MOST_BYTES: u64 = 64 << 10;

/// Finds the package without importing it, so that nothing of PyTorch or CUDA runs. The first entry of the path is the
/// working directory, where anything could lie.
const SCRIPT: &str = "\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
from importlib.util import find_spec
try:
    spec = find_spec('nvidia.nccl')
except ImportError:
    spec = None
for place in (spec.submodule_search_locations or []) if spec else []:
    print(place)
";

/// The library in the package of the `python3` on `PATH`, or why there is none.
pub(crate) fn library() -> Result<PathBuf, String> {
    library_of(Command::new("python3").args(["-c", SCRIPT]), PATIENCE)
}

fn library_of(python: &mut Command, patience: Duration) -> Result<PathBuf, String> {
    let python = python
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| {
            format!("no python3 on PATH to ask for the package nvidia.nccl ({error})")
        })?;
    let printed = printed_by(python, patience)
        .ok_or_else(|| format!("python3 did not answer within {} s", patience.as_secs()))?;
    let places = printed.lines().filter(|line| line.starts_with('/'));
    places
        .map(|place| PathBuf::from(place).join("lib/libnccl.so.2"))
        .find(|library| library.is_file())
        .ok_or_else(|| "python3 has no package with nvidia/nccl/lib/libnccl.so.2".to_owned())
}

/// What the child prints until it closes its output; nothing if that takes too long. Either way the child is gone after.
fn printed_by(mut child: Child, patience: Duration) -> Option<String> {
    let output = child.stdout.take()?;
    let (sender, receiver) = mpsc::channel();
    // On its own, because a grandchild may hold the pipe open for as long as it likes.
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = output.take(MOST_BYTES).read_to_end(&mut bytes);
        let _ = sender.send(read.map(|_| String::from_utf8_lossy(&bytes).into_owned()));
    });
    let printed = receiver.recv_timeout(patience);
    // Only what was printed counts, so a child that is still busy with its end can be ended.
    let _ = child.kill();
    let _ = child.wait();
    printed.ok()?.ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut shell = Command::new("sh");
        shell.args(["-c", script]);
        shell
    }

    #[test]
    fn a_python_that_hangs_is_given_up() {
        let error = library_of(&mut shell("sleep 600"), Duration::ZERO).unwrap_err();
        assert!(error.contains("did not answer"), "{error}");
    }

    #[test]
    fn a_python_without_the_package_or_with_other_words_is_no_library() {
        for script in ["true", "exit 1", "echo hello", "echo /nowhere", "yes /"] {
            let error = library_of(&mut shell(script), PATIENCE).unwrap_err();
            assert!(error.contains("no package"), "{script}: {error}");
        }
    }

    #[test]
    fn no_python_is_said() {
        let mut command = Command::new("/nowhere/python3");
        assert!(
            library_of(&mut command, PATIENCE)
                .unwrap_err()
                .contains("no python3")
        );
    }
}
