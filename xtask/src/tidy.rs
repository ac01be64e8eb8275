//! `cargo xtask tidy`: rules of the house that neither rustc nor clippy knows.

use std::collections::BTreeSet;
use std::fs;

use anyhow::{Context, Result, ensure};

use crate::process::{command, git, root, succeeds};

/// Files that may contain `unsafe`, or directories of such, from the root. Every entry is a reviewed decision.
const UNSAFE_ALLOWED: &[&str] = &[
    // Calls into NCCL that need no communicator.
    "crates/nccl-sys/src/",
    // Memory that ranks share, and the slots in it.
    "crates/pp-edges/src/host/",
    "crates/pp-edges/src/shm/",
    "crates/pp-edges/src/trial.rs",
    // Calls of the CUDA driver, and of NCCL.
    "crates/pp-device/src/",
    "crates/pp-gpu/src/gpu/edge.rs",
    "crates/pp-gpu/src/gpu/lease.rs",
    // What a copy into the slot of another device asks of its caller.
    "crates/pp-gpu/src/gpu/far.rs",
    // Copies into memory of another process, and numbers and patterns in it.
    "crates/pp-gpu/src/gpu/host.rs",
    "crates/pp-gpu/src/gpu/p2p/",
    "crates/pp-gpu/src/gpu/patterns.rs",
    "crates/pp-gpu/src/nccl/",
    // Compiled for loom alone, which checks every access.
    "crates/pp-words/src/models.rs",
    // The allocator, and what is seen before `main`.
    "crates/pp-cli/src/limits.rs",
    // A function for `atexit`.
    "crates/pp-cli/src/exit.rs",
    // The program's handlers of signals, read and set.
    "crates/pp-job/src/handlers.rs",
    // A group is lent to Python, and hands its arrays to the transport.
    "python/src/group.rs",
    // An output video in memory, which several threads fill.
    "crates/pp-video/src/sink.rs",
    // Kernels that issue to a stream.
    "crates/pp-bench/src/bench/kernels.rs",
    "crates/pp-bench/src/bench/on_gpu.rs",
    "crates/pp-cli/src/cmd/plugin/worker.rs",
    "crates/pp-cli/src/run/on_gpu.rs",
    // A group hands memory of the kernels to the transport.
    "crates/pp-cli/src/run/group.rs",
    "crates/pp-cli/src/run/digests.rs",
    // Calls of the fakes.
    "crates/pp-fakes/src/",
    // The effect of signals in children.
    "crates/pp-testing/src/process/command.rs",
    // A byte of a payload that is changed on a GPU.
    "crates/pp-trials/src/hook/breakable.rs",
    // Kernels that are loaded as a rank does.
    "crates/pp-trials/src/kills/start.rs",
    // Messages on a GPU that are written and read.
    "crates/pp-trials/src/words/on_gpu.rs",
    "crates/pp-kernels/src/abi.rs",
    // A member of a group hands its memory to the collectives.
    "crates/pp-kernels/src/denoise/cpu/group.rs",
    // Kernels that issue to a stream, and calls of cublasLt.
    "crates/pp-kernels/src/cuda/",
    "crates/pp-kernels/src/denoise/cuda/",
    "crates/pp-kernels/src/measure/",
    "crates/pp-kernels/src/synthetic/",
    // Sessions on a device, and members of a group.
    "crates/pp-kernels/src/check/group.rs",
    "crates/pp-kernels/src/check/memory.rs",
    "crates/pp-kernels/src/check/session.rs",
    "crates/pp-kernels/src/check/subject.rs",
    // The table of functions, from both sides.
    "crates/pp-kernels/src/border.rs",
    "crates/pp-kernels/src/export.rs",
    "crates/pp-kernels/src/group.rs",
    "crates/pp-kernels/src/plugin.rs",
    "crates/pp-kernels/src/plugin/",
    // Example plugins implement the C interface.
    "examples/downstream/src/on_gpu.rs",
    "plugins/",
];
/// Where libraries lie: they do not print.
const LIBRARIES: &[&str] = &["crates/", "examples/"];
/// The programs there, which do.
const MAY_PRINT: &[&str] = &["crates/pp-cli/", "crates/pp-trials/"];
const PRINTING: &[&str] = &["println!", "eprintln!", "print!", "eprint!"];
const LEFTOVERS: &[&str] = &["dbg!", "todo!", "unimplemented!"];
/// Stands in a text for a figure that is not there yet.
const PLACEHOLDER: &str = "@@";
/// How a path of this repository begins in a text.
const PLACES: &[&str] = &["crates/", "docs/", "examples/", "plugins/", "xtask/"];
const LONG_LINES: usize = 400;
const MOST_LINES: usize = 600;
/// The program parses, calls libraries and prints; what is more belongs into a crate below it.
const PROGRAM: &str = "crates/pp-cli/src/";
const MOST_PROGRAM_LINES: usize = 8000;
/// How far above `unsafe` its reason may begin.
const SAFETY_WITHIN: usize = 15;

/// Checks every tracked file and reports every fault; long files are reported without failing.
pub(crate) fn run() -> Result<()> {
    let mut types = BTreeSet::new();
    let (mut faults, mut long, mut program) = (Vec::new(), Vec::new(), 0);
    // New files count before they are added.
    let listed = git("ls-files --cached --others --exclude-standard");
    let listed = listed.context("tidy needs git to list the files")?;
    let files: Vec<&str> = listed
        .lines()
        .filter(|file| root().join(file).is_file())
        .collect();
    ensure!(!files.is_empty(), "git lists no file");
    for file in &files {
        if is_stray(file) {
            faults.push(format!(
                "{file}: a result of a run or an editor's leftover; remove it"
            ));
        }
        if file.starts_with("xtask/mutants/") {
            let mut apply = command("git");
            apply.args(["-c", "safe.directory=*", "apply", "--check", file]);
            if !succeeds(&mut apply) {
                faults.push(format!(
                    "{file}: the patch does not apply; make it for the code as it is"
                ));
            }
        }
        let is_text = file.ends_with(".md");
        if !is_text && !file.ends_with(".rs") {
            continue;
        }
        let text =
            fs::read_to_string(root().join(file)).with_context(|| format!("cannot read {file}"))?;
        if is_text {
            faults.extend(faults_of_text(file, &text));
            continue;
        }
        faults.extend(faults_of(file, &text));
        faults.extend(repeated_types(file, &text, &mut types));
        let lines = text.lines().count();
        if file.starts_with(PROGRAM) {
            program += lines;
        }
        if lines > LONG_LINES {
            long.push(format!("{lines:5}  {file}"));
        }
    }
    if program > MOST_PROGRAM_LINES {
        faults.push(format!(
            "{PROGRAM}: {program} lines, more than {MOST_PROGRAM_LINES}"
        ));
    }
    if !long.is_empty() {
        println!(
            "tidy: over {LONG_LINES} lines (no failure up to {MOST_LINES}):\n  {}",
            long.join("\n  ")
        );
    }
    for fault in &faults {
        eprintln!("{fault}");
    }
    ensure!(faults.is_empty(), "{} places are untidy", faults.len());
    println!("tidy: {} files are in order", files.len());
    Ok(())
}

/// Types in the product code of `file` that have the name of a type in `seen`, of the same crate. Adds the others to `seen`.
fn repeated_types(file: &str, text: &str, seen: &mut BTreeSet<String>) -> Vec<String> {
    let parts = file.split_once("/src/");
    let of_product =
        |(package, path): &(&str, &str)| package.starts_with("crates/") && !path.contains("tests");
    let Some((package, _)) = parts.filter(of_product) else {
        return Vec::new();
    };
    let product = text.split("#[cfg(test)]\nmod ").next().unwrap_or(text);
    let repeated = product.lines().filter_map(|line| {
        let is_prefix = |word: &&str| word.starts_with("pub") || *word == "unsafe";
        let mut words = line.split_whitespace().skip_while(is_prefix);
        let (kind, name) = (words.next()?, words.next()?);
        let name = name
            .split(|c: char| !c.is_alphanumeric() && c != '_')
            .next()?;
        // An indented `type` belongs to a trait.
        let is_type = ["struct", "enum", "trait", "union"].contains(&kind)
            || kind == "type" && !line.starts_with(' ');
        let is_new = !is_type || name.is_empty() || seen.insert(format!("{package} {name}"));
        (!is_new).then(|| format!("{file}: {package} has another type {name}; rename one of them"))
    });
    repeated.collect()
}

fn is_stray(file: &str) -> bool {
    let name = file.rsplit('/').next().unwrap_or(file);
    let endings = [".part", ".orig", ".rej", ".swp", "~", ".y4m", ".so", ".o"];
    endings.iter().any(|ending| name.ends_with(ending))
        || ["report.json", "trace.json", "perf.data", "core"].contains(&name)
}

/// Places where a figure is still to come, and paths of files that are not there.
fn faults_of_text(file: &str, text: &str) -> Vec<String> {
    let is_missing = |path: &&str| {
        let is_ours = PLACES.iter().any(|place| path.starts_with(place));
        is_ours && !path.contains(['*', '{', ' ']) && !root().join(path).exists()
    };
    let faults = |(at, line): (usize, &str)| {
        let placeholder = format!("{PLACEHOLDER} marks what is still to be filled in");
        let placeholder = line.contains(PLACEHOLDER).then_some(placeholder);
        let missing = line.split('`').skip(1).step_by(2).filter(is_missing);
        let missing = missing.map(|path| format!("there is no {path}"));
        let found = placeholder.into_iter().chain(missing);
        let found = found.map(|what| format!("{file}:{at}: {what}"));
        found.collect::<Vec<_>>()
    };
    (1..).zip(text.lines()).flat_map(faults).collect()
}

fn faults_of(file: &str, text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let mut faults = Vec::new();
    let mut fault = |line: usize, what: &str| faults.push(format!("{file}:{}: {what}", line + 1));

    let is_test =
        file.contains("/tests/") || file.ends_with("/tests.rs") || file.contains("/benches/");
    let first = lines
        .iter()
        .position(|line| !line.trim().is_empty() && !line.starts_with("#!["));
    if !is_test && !first.is_some_and(|at| lines[at].starts_with("//!")) {
        fault(0, "no module documentation (//!)");
    }
    if lines.len() > MOST_LINES {
        fault(
            lines.len() - 1,
            &format!("{} lines; split what is over {MOST_LINES}", lines.len()),
        );
    }

    let lies_in = |places: &[&str]| places.iter().any(|place| file.starts_with(place));
    let unsafe_is_allowed = is_test || lies_in(UNSAFE_ALLOWED);
    let is_library = lies_in(LIBRARIES) && !lies_in(MAY_PRINT) && file.contains("/src/");
    let mut in_tests = is_test;
    for (at, line) in lines.iter().enumerate() {
        let code = code_of(line);
        in_tests |= code.trim_start().starts_with("#[cfg(test)]");
        for &word in LEFTOVERS {
            if has_macro(&code, word) {
                fault(at, &format!("{word} was left behind"));
            }
        }
        if is_library && !in_tests && PRINTING.iter().any(|word| has_macro(&code, word)) {
            fault(at, "a library does not print; return it or trace it");
        }
        if !has_word(&code, "unsafe") {
            continue;
        }
        if !unsafe_is_allowed && !in_tests {
            fault(
                at,
                "unsafe outside the files that may have it (see xtask/src/tidy.rs)",
            );
        }
        let needs_reason = code.contains("unsafe {") || code.contains("unsafe impl");
        let above = &lines[at.saturating_sub(SAFETY_WITHIN)..=at];
        if needs_reason
            && !above
                .iter()
                .any(|line| line.contains("SAFETY:") || line.contains("# Safety"))
        {
            fault(at, "unsafe without a SAFETY comment above it");
        }
    }
    faults
}

/// The line without string literals and without its comment.
fn code_of(line: &str) -> String {
    let mut code = String::new();
    let mut chars = line.chars().peekable();
    let mut quoted = false;
    while let Some(c) = chars.next() {
        match c {
            '\\' if quoted => {
                chars.next();
            }
            '"' => quoted = !quoted,
            '/' if !quoted && chars.peek() == Some(&'/') => break,
            // A quotation mark as a character does not begin a string.
            '\'' if !quoted && chars.peek() == Some(&'"') => {
                chars.next();
            }
            c if !quoted => code.push(c),
            _ => {}
        }
    }
    code
}

fn has_word(code: &str, word: &str) -> bool {
    code.split(|c: char| !c.is_alphanumeric() && c != '_')
        .any(|found| found == word)
}

fn has_macro(code: &str, name: &str) -> bool {
    code.match_indices(name).any(|(at, _)| {
        let before = code[..at].chars().next_back();
        !before.is_some_and(|c| c.is_alphanumeric() || c == '_')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIBRARY: &str = "crates/pp-runtime/src/a.rs";

    fn faults(file: &str, text: &str) -> String {
        faults_of(file, text).join("\n")
    }

    #[test]
    fn the_workspace_is_tidy() {
        run().unwrap();
    }

    #[test]
    fn a_module_needs_documentation_and_a_test_does_not() {
        assert!(faults(LIBRARY, "fn a() {}\n").contains("a.rs:1: no module documentation"));
        assert_eq!(
            faults(LIBRARY, "#![forbid(unsafe_code)]\n\n//! What it is.\n"),
            ""
        );
        assert_eq!(faults("crates/pp-runtime/tests/a.rs", "fn a() {}\n"), "");
        assert_eq!(
            faults("crates/pp-runtime/src/a/tests.rs", "fn a() {}\n"),
            ""
        );
    }

    #[test]
    fn unsafe_stands_only_where_it_may_and_with_its_reason() {
        let bare = "//! A.\nfn a() { unsafe { b() } }\n";
        assert!(faults(LIBRARY, bare).contains("a.rs:2: unsafe outside the files"));
        let allowed = "crates/pp-edges/src/host/a.rs";
        assert!(faults(allowed, bare).contains("a.rs:2: unsafe without a SAFETY comment"));
        assert_eq!(
            faults(allowed, "//! A.\n// SAFETY: b is fine.\nunsafe { b() }\n"),
            ""
        );
        assert_eq!(
            faults(
                LIBRARY,
                "//! A.\n#![deny(unsafe_code)]\n// unsafe {\nlet a = \"unsafe {\";\n"
            ),
            ""
        );
    }

    #[test]
    fn libraries_do_not_print_and_nobody_leaves_reminders() {
        assert!(
            faults(LIBRARY, "//! A.\nprintln!();\n").contains("a.rs:2: a library does not print")
        );
        assert_eq!(
            faults("crates/pp-cli/src/a.rs", "//! A.\nprintln!();\n"),
            ""
        );
        assert_eq!(
            faults(
                LIBRARY,
                "//! A.\n#[cfg(test)]\nmod tests { fn a() { println!() } }\n"
            ),
            ""
        );
        assert!(faults("xtask/src/a.rs", "//! A.\ndbg!(1);\n").contains("dbg! was left behind"));
        assert_eq!(faults(LIBRARY, "//! A.\nmy_todo!(1);\n"), "");
    }

    #[test]
    fn a_file_may_be_long_but_not_too_long() {
        let text = |lines: usize| format!("//! A.\n{}", "//\n".repeat(lines - 1));
        assert_eq!(faults(LIBRARY, &text(600)), "");
        assert!(faults(LIBRARY, &text(601)).contains("601 lines"));
    }

    #[test]
    fn a_text_has_no_placeholder_and_names_no_file_that_is_not_there() {
        let text = "@@TABLE@@\na@b.c `xtask/src/tidy.rs`, `xtask/src/*.rs`\n`a` `docs/gone.md`\n";
        let found = faults_of_text("README.md", text);
        assert_eq!(
            found,
            [
                "README.md:1: @@ marks what is still to be filled in",
                "README.md:3: there is no docs/gone.md"
            ]
        );
    }

    #[test]
    fn two_types_of_a_crate_have_two_names() {
        let mut seen = BTreeSet::new();
        let mut found = |file, text| repeated_types(file, text, &mut seen).join("\n");
        let product =
            "pub(crate) struct A<T>(T);\n    type E = A;\n#[cfg(test)]\nmod tests { struct A; }\n";
        assert_eq!(found(LIBRARY, product), "");
        assert_eq!(found("crates/pp-job/src/a.rs", "struct A;\n"), "");
        let fault = found(LIBRARY, "type E = u8;\n    trait A {}\n");
        assert!(
            fault.ends_with("pp-runtime has another type A; rename one of them"),
            "{fault}"
        );
        assert_eq!(fault.lines().count(), 1, "{fault}");
    }

    #[test]
    fn results_of_runs_are_strays() {
        assert!(is_stray("out/report.json") && is_stray("a/.b.y4m.12.part") && is_stray("core"));
        assert!(!is_stray("assets/cup.y4m.zlib") && !is_stray("crates/pp-runtime/src/core/mod.rs"));
    }
}
