//! `cargo xtask bundle [--out DIR]`: what a machine with GPUs and without Rust needs to check and measure this project.
//!
//! The directory is made anew each time: `pp`, `pp-trials`, the plugins, the test programs that want a device, the
//! sample clip, the programs to compare with, and `gpu-check.sh`, which runs them. Programs are built for release,
//! without symbols; they need the C library of a system at least as new as the one they were built on, and nothing else.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::clip;
use crate::process::{
    build_pp, build_program, built, cargo, command, git, listed, output, root, run as run_command,
    target,
};

/// What still travels easily.
const MOST_BYTES: u64 = 56 << 20;
/// Packages and their test programs that run on a device.
const TESTS: &[(&str, &str)] = &[
    ("pp-kernels", "gpu_oracle"),
    ("pp-transport", "conformance"),
    ("pp-transport", "race"),
];
/// Plugins in Rust: their packages and names in the bundle.
const PLUGINS: &[(&str, &str)] = &[
    ("pp-plugin-cust", "cust"),
    ("pp-plugin-temporal", "temporal"),
];

/// Makes the bundle and says how large it is.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let out = match args {
        [] => target()?.join("bundle"),
        [option, directory] if option == "--out" => std::path::absolute(directory)?,
        _ => bail!("cargo xtask bundle takes --out DIR and nothing else"),
    };
    prepare(&out)?;
    fs::copy(build_pp()?, out.join("bin/pp"))?;
    let trials = build_program("pp-trials", "pp-trials")?;
    fs::copy(trials, out.join("bin/pp-trials"))?;
    for (package, name) in PLUGINS {
        let mut build = cargo(&format!("build --release --package {package}"));
        let library = built(&mut build, &package.replace('-', "_"))?;
        fs::copy(library, out.join(format!("plugins/{name}.so")))?;
    }
    run_command(
        command("cc")
            .args("-std=c11 -O2 -shared -fPIC -s -I crates/pp-kernels/include".split(' '))
            .arg("-o")
            .arg(out.join("plugins/median.so"))
            .arg("plugins/median/median.c"),
    )?;
    for (package, test) in TESTS {
        let mut build = cargo(&format!("test --release --no-run --package {package}"));
        let program = built(build.args(["--test", test]), test)?;
        fs::copy(program, out.join("tests").join(test))?;
    }
    fs::copy(clip::expanded()?, out.join("clip/cup.y4m"))?;
    peers(&out.join("peers"))?;
    fs::copy(root().join("xtask/gpu-check.sh"), out.join("gpu-check.sh"))?;
    fs::write(out.join("about.json"), format!("{}\n", about()?))?;
    let bytes = size(&out)?;
    ensure!(
        bytes <= MOST_BYTES,
        "{} holds {bytes} bytes, more than {MOST_BYTES}",
        out.display()
    );
    println!(
        "bundle: {} holds {:.1} MiB; on the machine with GPUs: {}/gpu-check.sh",
        out.display(),
        bytes as f64 / f64::from(1 << 20),
        out.file_name().unwrap_or(out.as_os_str()).display()
    );
    Ok(())
}

/// An empty directory with its parts. One that is there is removed only if it is a bundle.
fn prepare(out: &Path) -> Result<()> {
    if out.exists() {
        let is_ours = out.join("gpu-check.sh").is_file() || listed(out)?.is_empty();
        ensure!(is_ours, "{} is there and no bundle", out.display());
        fs::remove_dir_all(out)?;
    }
    // Recognized as a bundle from now on, also when it is never finished.
    for part in ["bin", "plugins", "tests", "clip", "peers"] {
        fs::create_dir_all(out.join(part))
            .with_context(|| format!("cannot make {}", out.display()))?;
    }
    fs::write(out.join("gpu-check.sh"), "")?;
    Ok(())
}

/// Copies the programs to compare with.
fn peers(to: &Path) -> Result<()> {
    for file in listed(root().join("xtask/peers"))? {
        // Python leaves a directory where a program was imported.
        if file.is_file() {
            fs::copy(&file, to.join(file.file_name().unwrap_or_default()))?;
        }
    }
    Ok(())
}

/// What the bundle was made of.
fn about() -> Result<Value> {
    let commit = git("rev-parse HEAD").ok();
    let changed = git("status --porcelain").ok().map(|text| !text.is_empty());
    let rustc = output(command("rustc").arg("--version"))?;
    Ok(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "commit": commit,
        "changed_since": changed,
        "rustc": rustc.trim(),
    }))
}

/// Bytes of all files below a directory.
fn size(directory: &Path) -> Result<u64> {
    let mut bytes = 0;
    for path in listed(directory)? {
        bytes += match path.is_dir() {
            true => size(&path)?,
            false => path.metadata()?.len(),
        };
    }
    Ok(bytes)
}
