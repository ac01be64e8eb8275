//! `cargo xtask everything [PART...]`: the whole of what `cargo xtask ci` runs a part of, and what takes too long for each
//! commit. A release runs it.

use std::time::Instant;

use anyhow::{Context, Result};

use crate::chosen::PART;
use crate::process::{cargo, described, run as run_command};
use crate::{container, fuzz, mutants, training, trials};

type Part = (&'static str, fn() -> Result<()>);

const PARTS: [Part; 12] = [
    ("doc", doc),
    ("install", container::install),
    ("container", container::check),
    ("faults", || in_trials("faults")),
    ("shutdown", || in_trials("shutdown")),
    ("kills", || in_trials("each_kill")),
    ("placements", || trials::placements(&[])),
    ("training", training::run),
    ("mutants", || mutants::run(&[])),
    ("walk", mutants::walk),
    ("fuzz", || fuzz::run(&[])),
    ("soak", || trials::soak(&[])),
];

/// Runs these parts, or all, and says of each its commit and how long it took. It stops at the first that fails.
pub(crate) fn run(names: &[String]) -> Result<()> {
    let all = PARTS.map(|(name, _)| name);
    let find = |name: &String| {
        let part = PARTS.into_iter().find(|(part, _)| part == name);
        part.with_context(|| format!("no part is called {name:?}; there are {}", all.join(", ")))
    };
    let mut chosen = names.iter().map(find).collect::<Result<Vec<_>>>()?;
    if chosen.is_empty() {
        chosen = PARTS.into();
    }
    for (at, (name, part)) in chosen.iter().enumerate() {
        let started = Instant::now();
        part().with_context(|| {
            let rest: Vec<_> = chosen[at..].iter().map(|(name, _)| *name).collect();
            let rest = rest.join(" ");
            format!("{name}; to go on: cargo xtask everything {rest}")
        })?;
        let (commit, seconds) = (described()?, started.elapsed().as_secs());
        println!("everything: {name} at {commit} passed after {seconds} s");
    }
    Ok(())
}

/// Documents private items, too: a link that leads nowhere is an error.
fn doc() -> Result<()> {
    let mut doc = cargo("doc --workspace --no-deps");
    doc.arg("--document-private-items");
    run_command(doc.env("RUSTDOCFLAGS", "--deny warnings"))
}

/// Runs the tests that start the trials of this name, with all trials in place of a part.
fn in_trials(name: &str) -> Result<()> {
    let mut tests = cargo("test --package pp-trials --test suite");
    run_command(tests.args(["--", name]).env(PART, "all"))
}
