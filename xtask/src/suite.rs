//! `cargo xtask test`: everything that can show a fault without a benchmark or a GPU.

use std::env;
use std::path::Path;
use std::process::Command;
use std::thread;

use anyhow::{Context, Result};

use crate::chosen::{MUST_RUN, PART, cannot_run, seed};
use crate::process::{built, cargo, command, listed, output, run as run_command, target};
use crate::{python, trials};

/// Where the plugins lie that are built with the tests.
const BUILT: &str = "PP_TESTS_BUILT";
/// Crates with unsafe code, and so with something for a sanitizer to find.
const UNSAFE_CRATES: &str =
    "-p pp-device -p pp-words -p pp-meet -p pp-edges -p pp-gpu -p pp-transport -p pp-kernels";

/// Runs the suite and stops at the first part that fails. Many tests wait: meanwhile the other builds use the processors,
/// and so do the commands of `beside`, which are made once the tests are built.
pub(crate) fn run(beside: impl FnOnce() -> Result<Vec<Command>>) -> Result<()> {
    let seed = seed();
    println!("{PART}={seed} chooses which faults, shutdowns and placements run");
    let mut tests = cargo("test --workspace --no-run");
    let trials = built(&mut tests, "pp-trials")?;
    // Only what is asked for by name gets a name of its own above.
    let plugins = &trials.with_file_name("deps");
    let mut later = vec![loom()?];
    later.extend(memory(plugins)?);
    let mut beside = beside()?;
    beside.extend(later.iter().map(build_of));
    let beside = &mut beside;
    thread::scope(|scope| {
        let beside = scope.spawn(|| {
            let quiet = |command: &mut Command| output(command).map(drop);
            beside.iter_mut().try_for_each(quiet)
        });
        let mut tests = cargo("test --workspace --no-fail-fast");
        run_command(tests.env(PART, &seed).env(BUILT, plugins))?;
        trials::part_of_placements(&trials, &seed)?;
        beside.join().expect("it does not panic")
    })?;
    later.iter_mut().try_for_each(run_command)?;
    python::test("--workspace --lib --tests")
}

/// Builds what `test` runs, when nobody else wants the processors.
pub(crate) fn build_of(test: &Command) -> Command {
    let mut build = command("nice");
    // Behind a `--` it would not be for cargo.
    let mut args = test.get_args();
    build.arg(test.get_program()).args(args.next());
    build.arg("--no-run").args(args);
    let set = test.get_envs();
    build.envs(set.filter_map(|(name, value)| Some((name, value?))));
    if let Some(folder) = test.get_current_dir() {
        build.current_dir(folder);
    }
    build
}

/// Queue, credits and shutdown in every order of their steps. The models have their own build: loom replaces the atomics.
fn loom() -> Result<Command> {
    let mut test = cargo("test --package pp-words --release --lib --target-dir");
    test.arg(target()?.join("loom"))
        .env("RUSTFLAGS", "--cfg loom")
        // Built sooner; the models take a few seconds either way.
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1");
    Ok(test)
}

/// The unsafe code under AddressSanitizer, where the toolchain has that.
///
/// Toolchains from rust-lang.org ship the sanitizer's runtime. Only nightly ones take the flag by themselves.
fn memory(plugins: &Path) -> Result<Option<Command>> {
    let libraries = output(command(rustc()).args(["--print", "target-libdir"]))?;
    if !has_sanitizer(Path::new(libraries.trim()))? {
        cannot_run(
            "the unsafe code under AddressSanitizer: this Rust toolchain has no librustc-*_rt.asan.a; \
             use one that rustup installs",
            env::var_os(MUST_RUN).is_some(),
        )?;
        return Ok(None);
    }
    // With --target the flags do not reach build scripts and macros.
    let tests = "--lib --test conformance --test plugin";
    let mut test = cargo(&format!(
        "test --target {} {tests} {UNSAFE_CRATES}",
        host()?
    ));
    test.arg("--target-dir")
        .arg(target()?.join("asan"))
        .env("RUSTC_BOOTSTRAP", "1")
        .env("RUSTFLAGS", "-Zsanitizer=address")
        .env(BUILT, plugins)
        // What is in flight when a peer dies is leaked on purpose.
        .env("ASAN_OPTIONS", "detect_leaks=0");
    Ok(Some(test))
}

fn rustc() -> std::ffi::OsString {
    env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())
}

/// The target that this toolchain builds for by default.
pub(crate) fn host() -> Result<String> {
    let version = output(command(rustc()).arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc -vV names no host")?.to_owned())
}

fn has_sanitizer(libraries: &Path) -> Result<bool> {
    let files = listed(libraries)?;
    Ok((files.iter()).any(|file| file.to_string_lossy().ends_with("_rt.asan.a")))
}
