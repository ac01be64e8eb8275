//! `cargo xtask mutants [NAME...]`: does a test find a mistake in the product's own code?
//!
//! Each file in `xtask/mutants` is one mistake: a line `test: ARGUMENTS OF cargo test`, what the mistake is, and a patch
//! of the product. The command applies each patch to a copy of the tree and runs the tests that are named. A mutant that
//! they let live is a failure, and so is a patch that does not apply. A test that does not end has found its mutant.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::process::{self, cargo, command, output, root, target};

/// How long tests may run. Rust's test harness names those that take more than 60 s.
const LIMIT_S: &str = "75";

/// A mutant, and how its tests are run.
struct Mutant {
    name: String,
    /// The arguments of `cargo test`.
    test: Vec<String>,
    patch: String,
}

/// Walks larger cases than the suite does: the core of the ranks, the watchdog's, and the supervisor's.
pub(crate) fn walk() -> Result<()> {
    let mut walks = cargo(&["test", "--release", "--package", "pp-runtime"]);
    walks.args([
        "--package",
        "pp-job",
        "--lib",
        "--test",
        "sim",
        "larger_walk",
    ]);
    process::run(walks.args(["--", "--ignored", "--nocapture"]))
}

/// Runs all mutants, or those whose names are given.
pub(crate) fn run(names: &[String]) -> Result<()> {
    let mut mutants = read_all()?;
    if let Some(unknown) = names
        .iter()
        .find(|name| !mutants.iter().any(|m| m.name == **name))
    {
        bail!("no mutant is called {unknown}; xtask/mutants has them all");
    }
    mutants.retain(|mutant| names.is_empty() || names.contains(&mutant.name));
    let place = target()?.join("mutants");
    let tree = place.join("tree");
    let mut alive = Vec::new();
    for mutant in &mutants {
        copy_tree(&tree)?;
        let file = place.join("patch");
        fs::write(&file, &mutant.patch)?;
        let mut apply = command("git");
        apply
            .current_dir(&tree)
            .args(["apply", "--unsafe-paths"])
            .arg(&file);
        output(&mut apply).with_context(|| format!("{} does not apply", mutant.name))?;
        match killer(mutant, &tree, &place.join("target"))? {
            Some(test) => println!("{:<28} died by {test}", mutant.name),
            None => {
                println!("{:<28} LIVES", mutant.name);
                alive.push(mutant.name.as_str());
            }
        }
    }
    ensure!(alive.is_empty(), "no test finds {}", alive.join(", "));
    println!("{} mutants died", mutants.len());
    Ok(())
}

fn read_all() -> Result<Vec<Mutant>> {
    let folder = root().join("xtask/mutants");
    let mut paths: Vec<_> = fs::read_dir(&folder)?.collect::<Result<_, _>>()?;
    paths.sort_by_key(fs::DirEntry::path);
    let read = |entry: &fs::DirEntry| {
        let path = entry.path();
        let text = fs::read_to_string(&path)?;
        let (first, _) = text.split_once('\n').unwrap_or_default();
        let test = first.strip_prefix("test: ");
        let test =
            test.with_context(|| format!("{} does not begin with `test: `", path.display()))?;
        Ok(Mutant {
            name: path
                .file_stem()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            test: test.split_whitespace().map(str::to_owned).collect(),
            patch: text.clone(),
        })
    };
    paths.iter().map(read).collect()
}

/// Copies what git knows. A file that is the same keeps its time, so that cargo builds what differs.
fn copy_tree(to: &Path) -> Result<()> {
    let listed = output(command("git").args([
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]))?;
    for name in listed.split('\0').filter(|name| !name.is_empty()) {
        let (from, to) = (root().join(name), to.join(name));
        // A file that is deleted, and git does not know it yet.
        let Ok(wanted) = fs::read(&from) else {
            continue;
        };
        if fs::read(&to).ok().as_ref() != Some(&wanted) {
            fs::create_dir_all(to.parent().unwrap_or(&to))?;
            fs::write(&to, wanted)?;
        }
    }
    Ok(())
}

/// The test that fails because of the mutant, if one does.
fn killer(mutant: &Mutant, tree: &Path, target: &Path) -> Result<Option<String>> {
    let in_tree = |test: &mut Command| {
        test.args(&mutant.test)
            .current_dir(tree)
            .env("CARGO_TARGET_DIR", target)
            .env("RUST_BACKTRACE", "0")
            .stderr(Stdio::piped())
            .output()
            .context("cannot start cargo")
    };
    let built = in_tree(&mut cargo(&["test", "--quiet", "--no-run"]))?;
    let errors = String::from_utf8_lossy(&built.stderr);
    ensure!(
        built.status.success(),
        "{} does not build: {errors}",
        mutant.name
    );
    let mut test = command("timeout");
    test.args(["--kill-after=5", LIMIT_S])
        .arg(cargo(&[]).get_program())
        .args(["test", "--quiet", "--no-fail-fast"]);
    let ran = in_tree(&mut test)?;
    let said = String::from_utf8_lossy(&ran.stdout);
    if ran.status.success() {
        ensure!(
            said.contains(" passed"),
            "{}: no test ran: {said}",
            mutant.name
        );
        return Ok(None);
    }
    let mut lines = said.lines();
    let endless = lines.find_map(|line| line.split_once(" has been running for"));
    if let (Some(124), Some((test, _))) = (ran.status.code(), endless) {
        let name = test.trim_start_matches("test ");
        return Ok(Some(format!("{name}, which does not end")));
    }
    // The list of failures: one name a line, indented.
    let list = said.rsplit_once("failures:");
    let (_, list) = list.with_context(|| format!("{}: {said}", mutant.name))?;
    let failed = list.lines().find(|line| line.starts_with("    "));
    Ok(failed.map(|name| name.trim().to_owned()))
}
