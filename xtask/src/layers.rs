//! `cargo xtask layers`: who may depend on whom, checked against what cargo resolves, and no circles inside a crate
//! ([`circles`]).
//!
//! The tree is read as cargo prints it and must not be empty, so a misspelt name or a cargo that fails is a
//! failure here too; `! cargo tree --invert x` would pass on both.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};

use crate::circles;
use crate::process::{cargo, output};

struct Layer {
    name: &'static str,
    /// When given, the tree may hold nothing else.
    allowed: Option<&'static str>,
    /// What the tree may not hold, however far down.
    banned: Lists,
    /// What the crate may not name itself, though a crate that it builds on may.
    hidden: Lists,
}

/// Lists of names, with blanks between them.
type Lists = &'static [&'static str];

/// Makes a layer whose tree may hold nothing but these.
const fn closed(name: &'static str, allowed: &'static str) -> Layer {
    Layer {
        allowed: Some(allowed),
        ..open(name, &[], &[])
    }
}

/// Makes a layer whose tree may hold all but the banned, and that may not name the hidden itself.
const fn open(name: &'static str, banned: Lists, hidden: Lists) -> Layer {
    Layer {
        name,
        allowed: None,
        banned,
        hidden,
    }
}

/// Everything pp-contract stands on: data and errors. No threads, clocks, sockets or devices.
const CONTRACT: &str = "pp-contract serde serde_core serde_derive postcard cobs thiserror thiserror-impl crc32fast cfg-if \
    xxhash-rust proc-macro2 quote syn unicode-ident";
/// The fakes, which know the C interfaces alone.
const FAKES: &str = "pp-fakes libloading cfg-if";
/// NCCL's interface: what loads a library, and errors.
const NCCL: &str = "nccl-sys pp-wheels libloading cfg-if thiserror thiserror-impl proc-macro2 quote syn unicode-ident";

/// The program, the crates that it is made of, the trials, and what tests share.
const CLI: &str =
    "pp-command pp-video pp-live pp-bench pp-schedule pp-cli pp-fakes pp-testing pp-trials";
const BENCH: &str = "pp-bench";
const COMMAND: &str = "pp-command";
const JOB: &str = "pp-job";
/// What serves viewers, and what it alone stands on.
const LIVE: &str = "pp-live hyper tokio";
const MESSAGES: &str = "pp-contract";
const DEVICE: &str = "pp-device cudarc cust cust_raw nccl-sys libloading";
const KERNELS: &str = "pp-kernels";
const PROGRAM: &str = "pp-cli";
const RUNTIME: &str = "pp-runtime";
/// What tests and trials share, and the trials.
const TESTING: &str = "pp-fakes pp-testing pp-trials";
const VIDEO: &str = "pp-video";
const WIRE: &str = "pp-transport nccl-sys snow";
const ABOVE_EDGES: &str = "pp-gpu pp-transport";
const EDGES: &str = "pp-edges pp-gpu pp-transport";
/// The parts of pp-transport, each of which may know those before it. Other crates name pp-transport alone.
const PARTS: [&str; 4] = ["pp-words", "pp-meet", "pp-edges", "pp-gpu"];

/// The whole table. pp-cli joins everything and may know everything but what tests share; pp-trials may know that, too.
const LAYERS: &[Layer] = &[
    closed("nccl-sys", NCCL),
    closed("pp-fakes", FAKES),
    closed("pp-contract", CONTRACT),
    open("pp-device", &[MESSAGES, WIRE, RUNTIME, KERNELS, CLI], &[]),
    open("pp-words", &[DEVICE, WIRE, RUNTIME, KERNELS, CLI], &[]),
    open("pp-meet", &[DEVICE, EDGES, RUNTIME, KERNELS, CLI], &[]),
    open("pp-edges", &[ABOVE_EDGES, RUNTIME, JOB, KERNELS, CLI], &[]),
    open("pp-transport", &[RUNTIME, JOB, KERNELS, CLI], &[]),
    // Devices are behind the traits of pp-transport.
    open("pp-runtime", &[JOB, KERNELS, CLI], &[DEVICE]),
    open("pp-job", &[KERNELS, CLI, LIVE], &[DEVICE]),
    open("pp-kernels", &[WIRE, RUNTIME, CLI], &[]),
    open("pp-plugin-aoti", &[WIRE, RUNTIME, CLI], &[]),
    open("pp-plugin-cust", &[WIRE, RUNTIME, CLI], &[]),
    open(
        "pp-video",
        &[COMMAND, LIVE, BENCH, PROGRAM, TESTING],
        &[DEVICE, WIRE],
    ),
    open(
        "pp-live",
        &[KERNELS, VIDEO, COMMAND, BENCH, PROGRAM, TESTING],
        &[DEVICE, RUNTIME],
    ),
    open("pp-command", &[VIDEO, LIVE, BENCH, PROGRAM, TESTING], &[]),
    open("pp-bench", &[LIVE, PROGRAM, TESTING], &[]),
    open("pp-schedule", &[LIVE, BENCH, PROGRAM, TESTING], &[DEVICE]),
    open("pp-cli", &[TESTING], &[]),
    open(
        "pp-example-contract",
        &[DEVICE, WIRE, RUNTIME, JOB, KERNELS, CLI],
        &[],
    ),
    open("pp-example-downstream", &[KERNELS, CLI], &[]),
];

/// Checks every layer and reports every breach.
pub(crate) fn run() -> Result<()> {
    let mut breaches = Vec::new();
    for layer in LAYERS {
        breaches.extend(layer.breaches(&all(layer.name)?, &direct(layer.name)?));
    }
    for member in tree("--workspace --depth 0 --edges normal")? {
        if member == "pp-transport" || PARTS.contains(&member.as_str()) {
            continue;
        }
        // Their tests name it alone, too.
        let direct = tree(&format!("--package {member} --depth 1 --edges all"))?;
        let parts = PARTS.iter().filter(|part| direct.contains(**part));
        breaches.extend(parts.map(|part| format!("{member} must name pp-transport, not {part}")));
    }
    ensure!(
        breaches.is_empty(),
        "layers broken: {}",
        breaches.join(", ")
    );
    let (circles, crates) = circles::find()?;
    ensure!(circles.is_empty(), "{}", circles.join("\n"));
    println!(
        "layers: {} crates keep to their layer; no circle in {crates} crates",
        LAYERS.len()
    );
    Ok(())
}

impl Layer {
    fn breaches(&self, tree: &BTreeSet<String>, direct: &BTreeSet<String>) -> Vec<String> {
        let has = |list: &str, name: &str| list.split_whitespace().any(|other| other == name);
        let lists = |lists: Lists, name: &str| lists.iter().any(|list| has(list, name));
        let unlisted = |name: &str| self.allowed.is_some_and(|allowed| !has(allowed, name));
        let deep = tree
            .iter()
            .filter(|name| unlisted(name) || lists(self.banned, name))
            .map(|name| format!("{} must not depend on {name}", self.name));
        let near = direct
            .iter()
            .filter(|name| lists(self.hidden, name))
            .map(|name| format!("{} must not depend on {name} directly", self.name));
        deep.chain(near).collect()
    }
}

/// The packages in a tree, the root included; `of` says which tree, as arguments of `cargo tree`.
fn tree(of: &str) -> Result<BTreeSet<String>> {
    let args = format!("tree {of} --prefix none --format {{p}}");
    let printed = output(&mut cargo(&args));
    let printed = printed.with_context(|| format!("cannot read the dependencies of {of}"))?;
    let names = printed.lines().filter_map(|line| line.split(' ').next());
    let names = names.filter(|name| !name.is_empty()).map(String::from);
    let names: BTreeSet<String> = names.collect();
    ensure!(!names.is_empty(), "cargo tree says nothing about {of}");
    Ok(names)
}

/// The packages that `package` needs at run time, or while they are compiled.
fn all(package: &str) -> Result<BTreeSet<String>> {
    tree(&format!("--package {package} --edges normal"))
}

/// The packages that `package` names itself.
fn direct(package: &str) -> Result<BTreeSet<String>> {
    tree(&format!("--package {package} --depth 1 --edges normal"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_keeps_to_its_layers() {
        run().unwrap();
    }

    #[test]
    fn a_misspelt_crate_is_an_error() {
        assert!(all("pp-contarct").is_err());
    }

    #[test]
    fn banned_hidden_and_unlisted_names_are_breaches() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let tree: BTreeSet<String> = names(&["me", "friend", "foe", "spy", "tool"]);
        let direct: BTreeSet<String> = names(&["me", "friend", "tool"]);
        let layer = open("me", &["foe", "spy"], &[]);
        assert_eq!(
            layer.breaches(&tree, &direct),
            ["me must not depend on foe", "me must not depend on spy"]
        );
        let strict = closed("me", "me friend foe tool");
        assert_eq!(
            strict.breaches(&tree, &direct),
            ["me must not depend on spy"]
        );
        let indirect = open("me", &[], &["foe tool"]);
        assert_eq!(
            indirect.breaches(&tree, &direct),
            ["me must not depend on tool directly"]
        );
    }

    #[test]
    fn the_tree_sees_through_other_crates_and_its_first_level_does_not() {
        let all = all("pp-runtime").unwrap();
        assert!(all.contains("pp-contract") && all.contains("serde_core"));
        let direct = direct("pp-runtime").unwrap();
        assert!(direct.contains("pp-contract") && !direct.contains("serde_core"));
    }
}
