//! `cargo xtask ci`: the whole gate, the same here and on a build machine.

use anyhow::Result;

use crate::process::{cargo, command, run as run_command, target};
use crate::{chosen, kernels, layers, mutants, nccl_bindings, suite, tidy};

/// Runs every check, cheapest first, and stops at the first that fails.
pub(crate) fn run() -> Result<()> {
    run_command(&mut cargo("fmt --all --check"))?;
    layers::run()?;
    tidy::run()?;
    nccl_bindings::run(&["--check".to_owned()])?;
    kernels::run(&["--check".to_owned()])?;
    run_command(&mut cargo(
        "clippy --workspace --all-targets -- --deny warnings",
    ))?;
    // The fuzz targets are a workspace of their own. Without libFuzzer they need no C++ compiler. At the same level of
    // optimization they share the packages that clippy has checked.
    let mut fuzz = cargo("check --manifest-path fuzz/Cargo.toml --locked");
    fuzz.arg("--no-default-features");
    fuzz.env("CARGO_TARGET_DIR", target()?);
    fuzz.env("CARGO_PROFILE_DEV_OPT_LEVEL", "1");
    let one = ["--by".to_owned(), chosen::seed()];
    let mut doc = command("nice");
    doc.args("cargo doc --workspace --no-deps --quiet".split(' '));
    doc.env("RUSTDOCFLAGS", "--deny warnings");
    suite::run(|| Ok(vec![fuzz, mutants::build(&one)?, doc]))?;
    mutants::run(&one)
}
