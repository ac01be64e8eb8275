//! Asking the Python on PATH where it has NVIDIA's wheels, into which no dynamic linker looks.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// A Python on a cold network drive is slow; one that hangs must not hang the job.
const PATIENCE: Duration = Duration::from_secs(10);
/// Paths are shorter. What prints more is not our script.
const MOST_BYTES: u64 = 64 << 10;

/// Finds the packages without importing them, so that nothing of them runs. The first entry of the path is the working
/// directory, where anything could lie.
const SCRIPT: &str = "\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
from importlib.util import find_spec
spec = find_spec('nvidia')
for place in (spec.submodule_search_locations or []) if spec else []:
    print(place)
";

/// Returns the directories of the wheels.
///
/// # Errors
/// There is no Python; it did not answer within 10 s.
pub fn wheels() -> Result<Vec<PathBuf>, String> {
    said_by(Command::new("python3").args(["-c", SCRIPT]), PATIENCE)
}

fn said_by(python: &mut Command, patience: Duration) -> Result<Vec<PathBuf>, String> {
    let python = python
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("no python3 on PATH: {error}"))?;
    let printed = printed_by(python, patience)
        .ok_or_else(|| format!("python3 did not answer within {} s", patience.as_secs()))?;
    let places = printed.lines().filter(|line| line.starts_with('/'));
    Ok(places.map(PathBuf::from).collect())
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

    #[test]
    fn a_python_that_hangs_is_given_up_and_what_is_no_path_is_left_out() {
        let shell = |script| {
            let mut shell = Command::new("sh");
            shell.args(["-c", script]);
            shell
        };
        let error = said_by(&mut shell("sleep 600"), Duration::ZERO).unwrap_err();
        assert!(error.contains("did not answer"), "{error}");
        let error = said_by(&mut Command::new("/nowhere/python3"), PATIENCE).unwrap_err();
        assert!(error.contains("no python3"), "{error}");
        let said = said_by(&mut shell("echo hello; echo /a; echo /b/c"), PATIENCE);
        assert_eq!(said, Ok(vec!["/a".into(), "/b/c".into()]));
    }

    #[test]
    fn packages_are_found_and_nothing_of_the_working_directory_runs() {
        let root = std::env::temp_dir().join(format!("pp-python-{}", std::process::id()));
        let (here, there) = (root.join("here/nvidia"), root.join("there/nvidia"));
        for package in [&here, &there] {
            std::fs::create_dir_all(package).unwrap();
            let ran = package.join("ran");
            let code = format!("open({ran:?}, 'w').close()\n");
            std::fs::write(package.join("__init__.py"), code).unwrap();
        }
        let said = said_by(
            Command::new("python3")
                .args(["-c", SCRIPT])
                .current_dir(root.join("here"))
                .env("PYTHONPATH", root.join("there")),
            PATIENCE,
        );
        let has_run = here.join("ran").exists() || there.join("ran").exists();
        std::fs::remove_dir_all(&root).unwrap();
        // A machine without Python has nothing to find.
        let is_there = said.is_ok();
        assert!(!is_there || said == Ok(vec![there]), "{said:?}");
        assert!(!has_run);
    }
}
