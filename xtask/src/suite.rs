//! `cargo xtask test`: everything that can show a fault without a benchmark or a GPU.

use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::process::{self, cargo, command, output, succeeds, target};

/// Crates with unsafe code, and so with something for a sanitizer to find.
const UNSAFE_CRATES: [&str; 4] = ["--package", "pp-transport", "--package", "pp-kernels"];
const HOST: &str = "x86_64-unknown-linux-gnu";

/// Runs the suite and stops at the first part that fails.
pub(crate) fn run() -> Result<()> {
    process::run(&mut cargo(&["test", "--workspace", "--no-fail-fast"]))?;
    loom()?;
    memory()
}

/// Queue, credits and shutdown in every order of their steps. The models have their own build: loom replaces the atomics.
fn loom() -> Result<()> {
    let mut test = cargo(&[
        "test",
        "--package",
        "pp-transport",
        "--release",
        "--lib",
        "--target-dir",
    ]);
    test.arg(target().join("loom"))
        .env("RUSTFLAGS", "--cfg loom");
    process::run(&mut test)
}

/// The unsafe code under AddressSanitizer, or valgrind, or not at all, and it says which.
fn memory() -> Result<()> {
    if succeeds(command("rustup").args(["run", "nightly", "rustc", "--version"])) {
        return process::run(&mut address_sanitizer());
    }
    if succeeds(command("valgrind").arg("--version")) {
        return valgrind();
    }
    println!(
        "skipped: no nightly toolchain and no valgrind, the unsafe code was not run under a memory checker"
    );
    Ok(())
}

fn address_sanitizer() -> Command {
    let mut test = command("rustup");
    test.args(["run", "nightly", "cargo", "test", "--target", HOST, "--lib"])
        .args(["--test", "conformance", "--test", "plugin"])
        .args(UNSAFE_CRATES);
    test.arg("--target-dir").arg(target().join("asan"));
    test.env("RUSTFLAGS", "-Zsanitizer=address")
        .env_remove("RUSTUP_TOOLCHAIN")
        .env_remove("CARGO");
    // What is in flight when a peer dies is leaked on purpose.
    test.env("ASAN_OPTIONS", "detect_leaks=0");
    test
}

fn valgrind() -> Result<()> {
    let mut build = cargo(&["test", "--lib", "--no-run", "--message-format=json"]);
    let messages = output(build.args(UNSAFE_CRATES))?;
    for message in messages.lines() {
        let message: Value = serde_json::from_str(message).context("cargo printed no JSON")?;
        if let Some(test) = message["executable"].as_str() {
            process::run(command("valgrind").args([
                "--quiet",
                "--error-exitcode=1",
                "--leak-check=no",
                test,
            ]))?;
        }
    }
    Ok(())
}
