//! `cargo xtask layers`: who may depend on whom, checked against what cargo resolves.
//!
//! The tree is read as cargo prints it and must contain the crate itself, so a misspelt name or a cargo that fails is a
//! failure here too; `! cargo tree --invert x` would pass on both.

use std::collections::BTreeSet;

use anyhow::{Context, Result, bail, ensure};

use crate::process::{cargo, output};

struct Layer {
    name: &'static str,
    /// When given, the tree may hold nothing else.
    allowed: Option<&'static [&'static str]>,
    banned: &'static [&'static [&'static str]],
}

/// Everything pp-contract stands on: data and errors. No threads, clocks, sockets or devices.
const CONTRACT: &[&str] = &[
    "pp-contract",
    // Serialization.
    "serde",
    "serde_core",
    "serde_derive",
    "postcard",
    "cobs",
    // Errors, checksums, digests.
    "thiserror",
    "thiserror-impl",
    "crc32fast",
    "cfg-if",
    "xxhash-rust",
    // Run by the compiler only.
    "proc-macro2",
    "quote",
    "syn",
    "unicode-ident",
];
const CUDA: &[&str] = &["cudarc", "cust", "cust_raw", "nccl-sys"];

const CLI: &[&str] = &["pp-cli"];
const COMPUTE: &[&str] = &["pp-kernels", "libloading"];
const RUNTIME: &[&str] = &["pp-runtime"];
const WIRE: &[&str] = &["pp-transport", "snow"];

/// The whole table. pp-cli joins everything and may know everything.
const LAYERS: &[Layer] = &[
    Layer {
        name: "pp-contract",
        allowed: Some(CONTRACT),
        banned: &[],
    },
    Layer {
        name: "pp-transport",
        allowed: None,
        banned: &[RUNTIME, COMPUTE, CLI],
    },
    Layer {
        name: "pp-runtime",
        allowed: None,
        banned: &[CUDA, COMPUTE, CLI],
    },
    Layer {
        name: "pp-kernels",
        allowed: None,
        banned: &[WIRE, RUNTIME, CLI],
    },
    Layer {
        name: "downstream",
        allowed: None,
        banned: &[CUDA, WIRE, RUNTIME, COMPUTE, CLI],
    },
];

/// Checks every layer and reports every breach.
pub(crate) fn run() -> Result<()> {
    let mut breaches = Vec::new();
    for layer in LAYERS {
        breaches.extend(layer.breaches(&tree(layer.name)?));
    }
    ensure!(
        breaches.is_empty(),
        "layers broken:\n  {}",
        breaches.join("\n  ")
    );
    println!("layers: {} crates keep to their layer", LAYERS.len());
    Ok(())
}

impl Layer {
    fn breaches(&self, tree: &BTreeSet<String>) -> Vec<String> {
        let is_breach = |name: &&String| {
            let name = name.as_str();
            let unlisted = self.allowed.is_some_and(|allowed| !allowed.contains(&name));
            unlisted || self.banned.iter().any(|list| list.contains(&name))
        };
        tree.iter()
            .filter(is_breach)
            .map(|name| format!("{} must not depend on {name}", self.name))
            .collect()
    }
}

/// Names of all packages that `package` needs at run time or while it is compiled, itself included.
fn tree(package: &str) -> Result<BTreeSet<String>> {
    let args = [
        "tree",
        "--package",
        package,
        "--edges",
        "normal",
        "--prefix",
        "none",
        "--format",
        "{p}",
    ];
    let printed = output(&mut cargo(&args))
        .with_context(|| format!("cannot read the dependencies of {package}"))?;
    let names: BTreeSet<String> = printed
        .lines()
        .filter_map(|line| line.split(' ').next())
        .filter(|name| !name.is_empty())
        .map(String::from)
        .collect();
    if !names.contains(package) {
        bail!("cargo tree says nothing about {package}");
    }
    Ok(names)
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
        assert!(tree("pp-contarct").is_err());
    }

    #[test]
    fn banned_and_unlisted_names_are_breaches() {
        let tree: BTreeSet<String> = ["me", "friend", "foe", "spy"].map(String::from).into();
        let layer = Layer {
            name: "me",
            allowed: None,
            banned: &[&["foe"], &["spy"]],
        };
        assert_eq!(
            layer.breaches(&tree),
            ["me must not depend on foe", "me must not depend on spy"]
        );
        let strict = Layer {
            name: "me",
            allowed: Some(&["me", "friend", "foe"]),
            banned: &[],
        };
        assert_eq!(strict.breaches(&tree), ["me must not depend on spy"]);
    }

    #[test]
    fn the_tree_sees_through_other_crates() {
        let tree = tree("pp-runtime").unwrap();
        assert!(tree.contains("pp-contract") && tree.contains("serde_core"));
    }
}
