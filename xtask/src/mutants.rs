//! `cargo xtask mutants [NAME... | --by SEED]`: does a test find a mistake in the product's own code?
//!
//! Each file in `xtask/mutants` is one mistake: a line `test: ARGUMENTS OF cargo test`, what the mistake is, and a patch
//! of the product. The command applies each patch to a copy of the tree and runs the tests that are named. A mutant that
//! they let live is a failure, and so is a patch that does not apply. A test that does not end has found its mutant.
//! First the tests run without a mistake: one that fails then finds nothing. `--by` takes the one mutant that a text
//! chooses, as a commit's hash does in `cargo xtask ci`.

use std::collections::BTreeMap;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::process::{self, cargo, command, git, listed, output, root, stem_of, target};
use crate::suite::build_of;

/// How long tests may run at least. Rust's test harness names those that take more than 60 s.
const LIMIT: Duration = Duration::from_secs(75);

/// A mutant, and how its tests are run.
struct Mutant {
    name: String,
    /// The arguments of `cargo test`.
    test: Vec<String>,
    patch: String,
}

/// Walks larger cases than the suite does: the core of the ranks, the watchdog's, and the supervisor's.
pub(crate) fn walk() -> Result<()> {
    let mut walks = cargo("test --release --package pp-runtime");
    walks.args("--package pp-job --lib --test sim larger_walk".split(' '));
    process::run(walks.args(["--", "--ignored", "--nocapture"]))
}

/// Builds the tests of one mutant without it.
pub(crate) fn build(args: &[String]) -> Result<Command> {
    let place = Place::new()?;
    copy_tree(&place.tree)?;
    let mutant = &choose(read_all()?, args)?[0];
    Ok(build_of(
        place.cargo(&mut cargo("test --quiet"), &mutant.test),
    ))
}

/// Runs all mutants, those whose names are given, or the one that `--by` chooses.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let mutants = choose(read_all()?, args)?;
    let place = Place::new()?;
    copy_tree(&place.tree)?;
    let limits = place.limits(&mutants)?;
    let mut alive = Vec::new();
    for Mutant { name, test, patch } in &mutants {
        copy_tree(&place.tree)?;
        let file = place.tree.with_extension("patch");
        fs::write(&file, patch)?;
        let mut apply = command("git");
        apply
            .current_dir(&place.tree)
            .args(["apply", "--unsafe-paths"])
            .arg(&file);
        output(&mut apply).with_context(|| format!("{name} does not apply"))?;
        match place.killer(name, test, limits[test]) {
            Ok(Some(test)) => {
                println!("{name:<28} died by {test}");
                continue;
            }
            Ok(None) => println!("{name:<28} LIVES"),
            Err(error) => println!("{error:#}"),
        }
        alive.push(name.as_str());
    }
    ensure!(alive.is_empty(), "no test finds {}", alive.join(", "));
    println!("{} mutants died", mutants.len());
    Ok(())
}

fn choose(mut mutants: Vec<Mutant>, args: &[String]) -> Result<Vec<Mutant>> {
    if let [by, seed] = args
        && by == "--by"
    {
        let mut digest = DefaultHasher::new();
        seed.hash(&mut digest);
        let at = digest.finish() % mutants.len() as u64;
        return Ok(vec![mutants.swap_remove(at as usize)]);
    }
    if let Some(unknown) = args
        .iter()
        .find(|name| !mutants.iter().any(|m| m.name == **name))
    {
        bail!("no mutant is called {unknown}; xtask/mutants has them all");
    }
    mutants.retain(|mutant| args.is_empty() || args.contains(&mutant.name));
    Ok(mutants)
}

fn read_all() -> Result<Vec<Mutant>> {
    let read = |path: &PathBuf| {
        let text = fs::read_to_string(root().join(path))?;
        let (first, _) = text.split_once('\n').unwrap_or_default();
        let test = first.strip_prefix("test: ");
        let test =
            test.with_context(|| format!("{} does not begin with `test: `", path.display()))?;
        Ok(Mutant {
            name: stem_of(path),
            test: test.split_whitespace().map(str::to_owned).collect(),
            patch: text.clone(),
        })
    };
    let mut mutants = listed("xtask/mutants")?
        .iter()
        .map(read)
        .collect::<Result<Vec<_>>>()?;
    // Those of one test follow each other, so that few packages are built again between two.
    mutants.sort_by(|a, b| a.test.cmp(&b.test));
    Ok(mutants)
}

/// Copies what git knows. A file that is the same keeps its time, so that cargo builds what differs.
fn copy_tree(to: &Path) -> Result<()> {
    let listed = git("ls-files -z --cached --others --exclude-standard")?;
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

/// Where mutants are built.
struct Place {
    /// A copy of the workspace.
    tree: PathBuf,
    target: PathBuf,
}

impl Place {
    /// The first time it takes over what is built of other packages.
    fn new() -> Result<Self> {
        let (built, place) = (target()?.join("debug"), target()?.join("mutants"));
        let (tree, target) = (place.join("tree"), place.join("target"));
        if built.exists() && !place.exists() {
            let to = target.join("debug");
            fs::create_dir_all(&to)?;
            // The files of the tree get later times, so cargo builds the packages of the workspace again.
            let mut copy = command("cp");
            copy.arg("-a")
                .args([".fingerprint", "build", "deps"].map(|name| built.join(name)));
            output(copy.arg(&to))?;
        }
        Ok(Self { tree, target })
    }

    /// How long the tests of each line may take. They run without a mutant for that, and must pass.
    fn limits<'a>(&self, mutants: &'a [Mutant]) -> Result<BTreeMap<&'a Vec<String>, Duration>> {
        let mut limits = BTreeMap::new();
        for Mutant { test, .. } in mutants {
            if limits.contains_key(test) {
                continue;
            }
            let (line, started) = (test.join(" "), Instant::now());
            if let Some(failed) = self.killer("the tree without a mutant", test, LIMIT * 8)? {
                bail!("{failed} fails without a mutant, so `test: {line}` finds nothing");
            }
            println!("passes without a mutant: {line}");
            limits.insert(test, LIMIT.max(started.elapsed() * 3));
        }
        Ok(limits)
    }

    /// A command of cargo on these tests in the copy.
    fn cargo<'a>(&self, command: &'a mut Command, test: &[String]) -> &'a mut Command {
        let command = command.args(test).current_dir(&self.tree);
        command
            .env("CARGO_TARGET_DIR", &self.target)
            .env("RUST_BACKTRACE", "0")
    }

    /// Runs these tests, and says which fails, if one does.
    fn killer(&self, name: &str, test: &[String], limit: Duration) -> Result<Option<String>> {
        let run = |command: &mut Command| {
            let ran = self.cargo(command, test).output();
            ran.context("cannot start cargo")
        };
        let built = run(&mut cargo("test --quiet --no-run"))?;
        let errors = String::from_utf8_lossy(&built.stderr);
        ensure!(built.status.success(), "{name} does not build: {errors}");
        let mut tests = command("timeout");
        tests
            .args(["--kill-after=5", &limit.as_secs().to_string()])
            .arg(cargo("").get_program())
            .args(["test", "--quiet", "--no-fail-fast"]);
        let ran = run(&mut tests)?;
        let said = String::from_utf8_lossy(&ran.stdout);
        if ran.status.success() {
            ensure!(said.contains(" passed"), "{name}: no test ran: {said}");
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
        let (_, list) = list.with_context(|| format!("{name}: {said}"))?;
        let failed = list.lines().find(|line| line.starts_with("    "));
        Ok(failed.map(|name| name.trim().to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_fails_without_a_mutant_finds_none() {
        let tree = target().unwrap().join("mutants-test");
        let place = Place {
            target: tree.join("target"),
            tree,
        };
        let _ = fs::remove_dir_all(&place.tree);
        fs::create_dir_all(place.tree.join("src")).unwrap();
        let manifest = "[package]\nname = \"broken\"\nedition = \"2024\"\n[workspace]\n";
        fs::write(place.tree.join("Cargo.toml"), manifest).unwrap();
        let tests = "#[test]\nfn holds() {}\n#[test]\nfn fails() {\n    panic!();\n}\n";
        fs::write(place.tree.join("src/lib.rs"), tests).unwrap();
        let limits = |name: &str| {
            let mutant = Mutant {
                name: "any".into(),
                test: ["--lib", "--", name].map(str::to_owned).into(),
                patch: String::new(),
            };
            place.limits(&[mutant]).map(|limits| limits.len())
        };
        assert_eq!(limits("holds").unwrap(), 1);
        let error = limits("fails").unwrap_err().to_string();
        assert!(error.starts_with("fails fails without a mutant"), "{error}");
    }
}
