//! Builds plugins for the tests: C files with the system's compiler, Rust ones with the cargo that runs the tests.

#![allow(dead_code, reason = "each test program uses its part")]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use pp_kernels::check::{CHECKS, Subject};
use serde_json::Value;

/// The workspace's root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../..")
        .canonicalize()
        .expect("the workspace is there")
}

/// The checks that fail, and why. What a whole process allocates is counted in processes of `pp plugin check` alone.
pub(crate) fn failed_checks(subject: &Subject<'_>) -> Vec<(&'static str, String)> {
    let checks = CHECKS
        .iter()
        .filter(|check| !check.name().contains("leave no memory"));
    let outcomes = checks.map(|check| (check.name(), check.run(subject)));
    outcomes
        .filter_map(|(name, outcome)| Some((name, outcome.err()?)))
        .collect()
}

/// A path of its own for a file that a test makes.
pub(crate) fn scratch(name: &str) -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let dir =
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("plugins-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("the target directory can be written");
    dir.join(format!("{number}-{name}"))
}

/// Compiles a C file that lies in the repository into a shared library.
pub(crate) fn compile_c_file(source: &Path, defines: &[&str]) -> PathBuf {
    let name = source
        .file_stem()
        .expect("a file")
        .to_string_lossy()
        .into_owned();
    let out = scratch(&format!("{name}.so"));
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let output = Command::new(compiler)
        .args([
            "-std=c11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O1",
        ])
        .args(defines.iter().map(|define| format!("-D{define}")))
        .arg("-I")
        .arg(root().join("crates/pp-kernels/include"))
        .arg("-o")
        .arg(&out)
        .arg(source)
        .output()
        .expect("a C compiler (cc, or the one named by CC) can be run");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    out
}

/// Compiles a C text into a shared library.
pub(crate) fn compile_c(name: &str, text: &str, defines: &[&str]) -> PathBuf {
    let source = scratch(&format!("{name}.c"));
    std::fs::write(&source, text).expect("the target directory can be written");
    compile_c_file(&source, defines)
}

/// The C example plugin.
pub(crate) fn median() -> PathBuf {
    compile_c_file(&root().join("plugins/median/median.c"), &[])
}

/// A `cdylib` of the workspace. PP_TESTS_BUILT names the folder in which it lies if the whole workspace was built; else
/// cargo builds it, and what it depends on once more, because a package alone has fewer features.
pub(crate) fn rust_plugin(package: &str) -> PathBuf {
    let library = format!("lib{}.so", package.replace('-', "_"));
    if let Some(built) = std::env::var_os("PP_TESTS_BUILT") {
        return Path::new(&built).join(library);
    }
    let output = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--offline", "--package", package])
        .arg("--message-format=json-render-diagnostics")
        .current_dir(root())
        // A sanitizer of the tests is not for plugins: cargo would build its scripts with the same flags.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_BOOTSTRAP")
        .output()
        .expect("cargo can be run");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    // Cargo says where its target directory is.
    let messages = String::from_utf8(output.stdout).expect("cargo prints text");
    let messages = messages
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("cargo prints JSON"));
    let files: Vec<String> = messages
        .filter_map(|message| serde_json::from_value(message["filenames"].clone()).ok())
        .flat_map(|files: Vec<String>| files)
        .collect();
    let found = files.iter().map(PathBuf::from);
    let mut found = found.filter(|file| file.ends_with(&library));
    found
        .next()
        .unwrap_or_else(|| panic!("cargo built no {library}: {files:?}"))
}
