//! Compiles the C sources of the fakes once for all test programs: the newest NCCL and an older one, each in a folder
//! with the driver.

use std::path::{Path, PathBuf};
use std::process::Command;

const FLAGS: &[&str] = &[
    "-std=gnu11",
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-shared",
];

fn main() {
    println!("cargo::rerun-if-changed=c");
    println!("cargo::rerun-if-env-changed=CC");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").unwrap());
    let sources = std::fs::read_dir("c").unwrap();
    let mut sources: Vec<PathBuf> = sources.map(|entry| entry.unwrap().path()).collect();
    sources.retain(|path| path.extension().is_some_and(|end| end == "c"));
    sources.sort();
    let is_of_nccl = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("nccl_")
    };
    let (nccl, driver): (Vec<_>, Vec<_>) = sources.into_iter().partition(is_of_nccl);
    let folders = ["newest", "without_revoke"].map(|name| out.join(name));
    for folder in &folders {
        std::fs::create_dir_all(folder).unwrap();
    }
    let [newest, without_revoke] = &folders;
    run(cc(newest, "libcuda.so.1").args(&driver).arg("-lm"));
    // Some loaders ask for the name without a version first, and a real driver may have it: an empty library of that
    // name, through which the fake is found.
    run(cc(newest, "libcuda.so").args([
        "-x",
        "c",
        "/dev/null",
        "-Wl,-rpath,$ORIGIN,--no-as-needed",
        "-l:libcuda.so.1",
    ]));
    for name in ["libcuda.so.1", "libcuda.so"] {
        std::fs::copy(newest.join(name), without_revoke.join(name)).unwrap();
    }
    for (folder, define) in [
        (newest, None),
        (without_revoke, Some("-DPP_FAKE_NO_REVOKE")),
    ] {
        run(cc(folder, "libnccl.so.2")
            .args(define)
            .args(&nccl)
            .args(["-Wl,-rpath,$ORIGIN,--no-undefined", "-l:libcuda.so.1"]));
    }
}

/// A call of the C compiler that makes a library of this name.
fn cc(folder: &Path, name: &str) -> Command {
    let mut cc = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    cc.args(FLAGS).arg(format!("-Wl,-soname,{name}"));
    cc.arg("-o").arg(folder.join(name)).arg("-L").arg(folder);
    cc
}

fn run(command: &mut Command) {
    let status = command.status().expect("a C compiler (cc, or $CC)");
    assert!(status.success(), "{command:?} ended with {status}");
}
