//! The real library, from its package on PyPI, and stand-ins made with the C compiler.

use std::env;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{self, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Set on build machines: there a test that cannot run has failed.
const MUST_RUN: &str = "PP_TESTS_MUST_RUN";

/// `target/tmp`, which cargo makes.
pub(crate) fn scratch() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

pub(crate) fn crate_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Says that a test did not run. Not through a macro of the test harness, which would swallow it.
pub(crate) fn skip(why: &str) {
    assert!(
        env::var_os(MUST_RUN).is_none(),
        "{MUST_RUN} is set, and {why}"
    );
    let _ = writeln!(io::stderr(), "skipped: {why}");
}

/// The root of the unpacked package, or nothing where it cannot be had, which was said then.
pub(crate) fn package() -> Option<&'static Path> {
    static PLACE: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    match PLACE.get_or_init(unpacked) {
        Ok(place) => Some(place),
        Err(why) => {
            skip(why);
            None
        }
    }
}

pub(crate) fn real_library() -> Option<PathBuf> {
    package().map(|root| root.join("nvidia/nccl/lib/libnccl.so.2"))
}

/// Where `cargo xtask nccl-bindings` has it too, and marked in the same way, so it is fetched once.
fn unpacked() -> Result<PathBuf, String> {
    let place = scratch()
        .parent()
        .ok_or("no target directory")?
        .join("wheels/nccl");
    let requirements = crate_dir().join("requirements.txt");
    let listed = fs::read_to_string(&requirements).map_err(|error| error.to_string())?;
    if fs::read_to_string(place.join("requirements.txt")).is_ok_and(|there| there == listed) {
        return Ok(place);
    }
    let part = place.with_extension(format!("{}.part", process::id()));
    let status = Command::new("python3")
        .args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-compile",
        ])
        .args(["--require-hashes", "--only-binary=:all:", "--requirement"])
        .arg(&requirements)
        .arg("--target")
        .arg(&part)
        .env("PIP_DISABLE_PIP_VERSION_CHECK", "1")
        .env("PIP_ROOT_USER_ACTION", "ignore")
        .stdin(Stdio::null())
        .status();
    if !status.is_ok_and(|status| status.success()) {
        let _ = fs::remove_dir_all(&part);
        return Err("python3 -m pip cannot fetch nvidia-nccl-cu13 from PyPI".to_owned());
    }
    let placed = fs::write(part.join("requirements.txt"), &listed).and_then(|()| {
        if place.exists() {
            fs::remove_dir_all(&place)?;
        }
        fs::rename(&part, &place)
    });
    placed.map(|()| place).map_err(|error| error.to_string())
}

/// Builds a shared library of `source`.
pub(crate) fn shared_library(name: &str, source: &str) -> PathBuf {
    let directory = scratch().join(format!("nccl-sys-{}", process::id()));
    fs::create_dir_all(&directory).unwrap();
    let library = directory.join(name);
    compile(source, &["-shared", "-fPIC"], &library);
    library
}

/// Compiles C with `cc`.
pub(crate) fn compile(source: &str, options: &[&str], made: &Path) {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let file = format!(
        "nccl-sys-{}-{}.c",
        process::id(),
        NEXT.fetch_add(1, Ordering::Relaxed)
    );
    let file = scratch().join(file);
    fs::write(&file, source).unwrap();
    let compiler = Command::new("cc")
        .args(options)
        .arg("-o")
        .arg(made)
        .arg(&file)
        .output()
        .expect("a C compiler is needed to build this project");
    assert!(
        compiler.status.success(),
        "{}",
        String::from_utf8_lossy(&compiler.stderr)
    );
    fs::remove_file(&file).unwrap();
}
