//! `cargo xtask nccl-bindings [--check]`: what `crates/nccl-sys/src/bindings.rs` is made with.
//!
//! The header comes from the NCCL package, bindgen reads it with the libclang of another package, and the few lines that
//! the header wants of CUDA and the C library lie in `crates/nccl-sys/include`: so the result is the same, byte for byte,
//! on every machine, and none needs a CUDA toolkit.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};

use crate::process::{cargo, command, output, root, run as run_command, target};
use crate::wheels;

const BINDGEN: &str = "0.73.2";
/// What the generated table is called.
const TABLE: &str = "Symbols";

const HEADER: &str = "\
//! What this project needs of NCCL 2.28.9, from its header `nccl.h`.
//!
//! Made by `cargo xtask nccl-bindings`; changes by hand are lost.

";

/// Writes the bindings, or with `--check` compares them with those that are there.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let check = match args {
        [] => false,
        [only] if only == "--check" => true,
        _ => bail!("cargo xtask nccl-bindings takes --check and nothing else"),
    };
    let crate_dir = root().join("crates/nccl-sys");
    let place = crate_dir.join("src/bindings.rs");
    let made = bindings(&crate_dir)?;
    if !check {
        fs::write(&place, made)?;
        println!("nccl-bindings: wrote {}", place.display());
        return Ok(());
    }
    let there =
        fs::read_to_string(&place).with_context(|| format!("cannot read {}", place.display()))?;
    if let Some(line) = first_difference(&there, &made) {
        bail!(
            "crates/nccl-sys/src/bindings.rs differs from what the header gives, from line {line} on; \
             run cargo xtask nccl-bindings"
        );
    }
    println!("nccl-bindings: {} bytes as generated", there.len());
    Ok(())
}

fn bindings(crate_dir: &Path) -> Result<String> {
    let nccl = wheels::unpacked("nccl", &crate_dir.join("requirements.txt"))?;
    let libclang = wheels::unpacked("libclang", &crate_dir.join("requirements-libclang.txt"))?;
    let wanted = fs::read_to_string(crate_dir.join("src/functions.rs"))?;
    let wanted = functions(&wanted);
    let mut bindgen = command(bindgen()?);
    bindgen
        .arg(nccl.join("nvidia/nccl/include/nccl.h"))
        .args(["--dynamic-loading", TABLE])
        .args(["--allowlist-function", &wanted.join("|")])
        .args(["--allowlist-var", "NCCL_MAJOR|NCCL_VERSION_CODE"])
        // An integer that is no value of a Rust enum is undefined behaviour, and newer libraries return newer codes.
        .args(["--default-enum-style", "newtype"])
        // A process that sees an identifier can join its communicator.
        .args(["--no-debug", "ncclUniqueId"])
        .args("--no-doc-comments --use-core --disable-header-comment".split(' '))
        .args(["--rust-target", "1.85", "--rust-edition", "2024"])
        // Built into bindgen; rustfmt changes with the toolchain.
        .args(["--formatter", "prettyplease"])
        .args("-- -nostdinc -x c -target x86_64-unknown-linux-gnu".split(' '))
        .arg("-I")
        .arg(crate_dir.join("include"))
        .env("LIBCLANG_PATH", libclang.join("clang/native"));
    with_own_table(&output(&mut bindgen)?, wanted.len())
}

/// The functions that `functions.rs` takes from the table.
fn functions(source: &str) -> Vec<&str> {
    let names = source
        .lines()
        .filter_map(|line| line.split_once(": fn("))
        .map(|(name, _)| name.trim());
    names.filter(|name| name.starts_with("nccl")).collect()
}

/// The bindgen of our version, built once.
fn bindgen() -> Result<PathBuf> {
    let tools = target()?.join("tools");
    let program = tools.join("bin/bindgen");
    let there = output(command(&program).arg("--version"));
    if there.is_ok_and(|version| version.trim() == format!("bindgen {BINDGEN}")) {
        return Ok(program);
    }
    // Without optimization: building it takes a third of the time, and it runs for a second.
    let mut install = cargo("install bindgen-cli --locked --quiet --debug");
    run_command(
        install
            .args(["--version", BINDGEN, "--root"])
            .arg(tools)
            .env("CARGO_PROFILE_DEV_DEBUG", "0"),
    )?;
    Ok(program)
}

/// Replaces the functions of the generated table, which has so many: bindgen gives every symbol a method that panics when the
/// library does not have it.
fn with_own_table(generated: &str, wanted: usize) -> Result<String> {
    let opening = format!("impl {TABLE} {{\n");
    let (types, rest) = generated
        .split_once(&opening)
        .context("bindgen made no table")?;
    let (_, after) = rest
        .split_once("\n}\n")
        .context("the functions of bindgen's table have no end")?;
    let symbols = symbols(types);
    ensure!(
        symbols.len() == wanted && !after.contains(&opening),
        "bindgen's table has {} symbols instead of {wanted}, or an unknown form",
        symbols.len()
    );
    let made = format!("{HEADER}{types}{}{after}", table(&symbols));
    ensure!(
        !made.contains(".expect(") && !made.contains("panic"),
        "something that panics is left in the bindings"
    );
    Ok(made)
}

/// The fields of the table that bindgen declared.
fn symbols(types: &str) -> Vec<&str> {
    types
        .lines()
        .filter_map(|line| line.strip_prefix("    pub nccl"))
        .filter_map(|field| field.split_once(": Result<"))
        .map(|(name, _)| name)
        .collect()
}

/// The call of the macro that writes our own functions for the table.
fn table(symbols: &[&str]) -> String {
    let names: String = symbols
        .iter()
        .map(|name| format!("    nccl{name}\n"))
        .collect();
    format!("crate::table::table! {{\n    {TABLE}:\n{names}}}\n")
}

/// The first line, from 1, in which the texts differ.
fn first_difference(one: &str, other: &str) -> Option<usize> {
    if one == other {
        return None;
    }
    let same = one.split('\n').zip(other.split('\n'));
    Some(same.take_while(|(one, other)| one == other).count() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_those_of_the_list() {
        let source = "required: fn($in) -> out;\n        ncclSend: fn(u32) -> u32;\n        ncclRecv: fn(\n u32) -> u32;\n";
        assert_eq!(functions(source), ["ncclSend", "ncclRecv"]);
    }

    #[test]
    fn methods_that_panic_are_replaced() {
        let fields: String = (0..3)
            .map(|at| format!("    pub nccl{at}: Result<\n        fn(),\n    >,\n"))
            .collect();
        let generated = format!(
            "pub struct Symbols {{\n{fields}}}\nimpl Symbols {{\n    pub fn nccl0(&self) {{\n        \
             self.nccl0.as_ref().expect(\"it\")()\n    }}\n}}\n"
        );
        let table = |text: &str| with_own_table(text, 3);
        let made = table(&generated).unwrap();
        assert!(
            made.contains("table! {\n    Symbols:\n    nccl0\n    nccl1\n"),
            "{made}"
        );
        assert!(
            made.contains("\n    nccl2\n}\n") && !made.contains("expect"),
            "{made}"
        );
        assert!(table(&generated.replace("impl", "imp")).is_err());
        assert!(table(&generated.replace("2: Result<", "2: Option<")).is_err());
        let panicking = format!("{generated}fn f() {{ x.expect(\"it\") }}\n");
        assert!(table(&panicking).is_err());
    }

    #[test]
    fn a_difference_is_named_by_its_line() {
        assert_eq!(first_difference("a\nb\n", "a\nb\n"), None);
        assert_eq!(first_difference("a\nb\n", "a\nc\n"), Some(2));
        assert_eq!(first_difference("a\n", "a\nb\n"), Some(2));
        assert_eq!(first_difference("a", "a\n"), Some(2));
    }
}
