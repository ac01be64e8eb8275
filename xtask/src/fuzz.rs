//! `cargo xtask fuzz [--inputs N] [TARGET...]`: every decoder that a stranger, a peer or a file reaches, under libFuzzer
//! and AddressSanitizer.
//!
//! libFuzzer is built from the crate `libfuzzer-sys` with the system's C++ compiler, and the flags that make coverage come
//! from the stable toolchain, so neither a nightly one nor cargo-fuzz is needed. Only this project's crates have the flags:
//! what their cryptography does inside leads libFuzzer nowhere, and would take most of the time. What is found is kept in
//! the target directory, and the next run begins with it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::process::{cargo, command, listed, root, run as run_command, stem_of, target};
use crate::suite::host;

/// Inputs for each target by default.
const INPUTS: u64 = 10_000_000;
/// An input that takes this long is a finding.
const TIMEOUT: &str = "-timeout=60";
/// The crates under test.
const PACKAGES: [&str; 7] = [
    "pp-contract",
    "pp-words",
    "pp-meet",
    "pp-edges",
    "pp-transport",
    "pp-live",
    "pp-fuzz",
];
/// What rustc is told for these.
const FLAGS: [&str; 8] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
    "-Cdebug-assertions",
    "-Zsanitizer=address",
];
/// Targets whose seeds are golden bytes of pp-contract.
const GOLDEN: [(&str, &[&str]); 3] = [
    ("frame", &["noop", "shutdown", "message", "lap", "accepted"]),
    ("hello", &["hello"]),
    ("fault", &["fault"]),
];

/// What is to be done, from the command line.
struct Options {
    inputs: u64,
    targets: Vec<String>,
}

/// Builds the targets and runs each for its number of inputs, as many at a time as there are cores.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let Options { inputs, targets } = options(args)?;
    let programs = build()?;
    let work = target()?.join("fuzz/work");
    println!("{inputs} inputs for each of {} targets", targets.len());
    let next = AtomicUsize::new(0);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let findings: Vec<Result<bool>> = std::thread::scope(|scope| {
        let worker = || {
            let mut found = Vec::new();
            while let Some(target) = targets.get(next.fetch_add(1, Ordering::Relaxed)) {
                found.push(fuzz(&programs.join(target), target, &work, inputs));
            }
            found
        };
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(worker)).collect();
        let ended = workers.into_iter().map(|worker| worker.join());
        ended
            .flat_map(|found| found.expect("a worker does not panic"))
            .collect()
    });
    let findings = findings.into_iter().collect::<Result<Vec<_>>>()?;
    let findings = findings.into_iter().filter(|found| *found).count();
    ensure!(findings == 0, "{findings} targets have a finding");
    Ok(())
}

fn options(args: &[String]) -> Result<Options> {
    let all = all()?;
    let mut options = Options {
        inputs: INPUTS,
        targets: Vec::new(),
    };
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        if arg == "--inputs" {
            let value = args.next().context("--inputs takes a value")?;
            options.inputs = value
                .parse()
                .ok()
                .filter(|inputs| *inputs > 0)
                .with_context(|| format!("--inputs is {value:?}; it takes a number above 0"))?;
        } else if all.contains(arg) {
            options.targets.push(arg.clone());
        } else {
            bail!("no target {arg:?}; there are {}", all.join(", "));
        }
    }
    if options.targets.is_empty() {
        options.targets = all;
    }
    Ok(options)
}

/// The names of all targets.
fn all() -> Result<Vec<String>> {
    let files = listed("fuzz/fuzz_targets")?;
    Ok(files.iter().map(|path| stem_of(path)).collect())
}

/// Builds all targets; the directory in which they are.
fn build() -> Result<PathBuf> {
    let host = host()?;
    let place = target()?.join("fuzz");
    let mut build = cargo("build --release --quiet --locked");
    build.args(["--manifest-path", "fuzz/Cargo.toml", "--target", &host]);
    build.arg("--target-dir").arg(&place);
    let flags = format!("{FLAGS:?}");
    build.arg("-Zprofile-rustflags");
    for package in PACKAGES {
        let setting = format!("profile.release.package.{package}.rustflags={flags}");
        build.args(["--config", &setting]);
    }
    // The stable toolchain takes unstable flags.
    run_command(build.env("RUSTC_BOOTSTRAP", "1"))
        .context("libFuzzer needs a C++ compiler: apt-get install g++")?;
    Ok(place.join(host).join("release"))
}

/// Runs one target and prints a line about it; true where something was found.
fn fuzz(program: &Path, target: &str, work: &Path, inputs: u64) -> Result<bool> {
    let corpus = work.join("corpus").join(target);
    fs::create_dir_all(&corpus)?;
    for (name, bytes) in seeds(target)? {
        fs::write(corpus.join(name), bytes)?;
    }
    let log = work.join(format!("{target}.log"));
    let mut fuzzer = command(program);
    fuzzer
        .args([&format!("-runs={inputs}"), TIMEOUT, "-print_final_stats=1"])
        .arg(format!("-artifact_prefix={}/{target}-", work.display()))
        .arg(&corpus)
        .stdout(Stdio::null())
        .stderr(File::create(&log)?);
    let began = Instant::now();
    let status = fuzzer
        .status()
        .with_context(|| format!("cannot start {}", program.display()))?;
    let seconds = began.elapsed().as_secs_f64();
    let said = fs::read(&log)?;
    let told = Told::of(&String::from_utf8_lossy(&said));
    let findings = match status.success() {
        true => "no findings".to_owned(),
        false => format!("A FINDING, {status}: {}", log.display()),
    };
    println!(
        "{target:<10} {:>10} inputs {:>8.0} a second {:>6} edges {:>6} features, {findings}",
        told.inputs,
        told.inputs as f64 / seconds,
        told.edges,
        told.features,
    );
    Ok(!status.success())
}

/// What libFuzzer said of a run.
#[derive(Debug, Default, PartialEq, Eq)]
struct Told {
    inputs: u64,
    edges: u64,
    features: u64,
}

impl Told {
    fn of(said: &str) -> Self {
        let after = |line: &str, word: &str| {
            let (_, rest) = line.split_once(word)?;
            rest.split_whitespace().next()?.parse().ok()
        };
        let last = |word: &str| said.lines().rev().find_map(|line| after(line, word));
        Self {
            inputs: last("stat::number_of_executed_units:").unwrap_or(0),
            edges: last(" cov: ").unwrap_or(0),
            features: last(" ft: ").unwrap_or(0),
        }
    }
}

/// The inputs that a target begins with, by name.
fn seeds(target: &str) -> Result<Vec<(String, Vec<u8>)>> {
    let golden = GOLDEN.iter().filter(|(of, _)| *of == target);
    let golden = golden.flat_map(|(_, names)| *names);
    let path = |name| format!("crates/pp-contract/tests/data/{name}.hex").into();
    let mut files: Vec<PathBuf> = golden.map(path).collect();
    files.extend(listed(Path::new("fuzz/seeds").join(target)).unwrap_or_default());
    let read = |file: &PathBuf| {
        let text = fs::read_to_string(root().join(file))?;
        let bytes = hexadecimal(&text).with_context(|| format!("{}", file.display()))?;
        Ok((stem_of(file), bytes))
    };
    files.iter().map(read).collect()
}

/// The bytes of hexadecimal digits with blanks and comments.
fn hexadecimal(text: &str) -> Result<Vec<u8>> {
    let lines = text.lines().filter_map(|line| line.split('#').next());
    let digits: Vec<u32> = lines
        .flat_map(str::chars)
        .filter(|c| !c.is_whitespace())
        .map(|c| c.to_digit(16).with_context(|| format!("{c:?} is no digit")))
        .collect::<Result<_>>()?;
    ensure!(digits.len().is_multiple_of(2), "half a byte at the end");
    let byte = |pair: &[u32]| (pair[0] << 4 | pair[1]) as u8;
    Ok(digits.chunks(2).map(byte).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_seeds_and_is_built() {
        let manifest = fs::read_to_string(root().join("fuzz/Cargo.toml")).unwrap();
        let targets = all().unwrap();
        assert_eq!(targets.len(), manifest.matches("[[bin]]").count());
        for target in targets {
            assert!(!seeds(&target).unwrap().is_empty(), "{target}");
            assert!(manifest.contains(&format!("name = \"{target}\"")));
        }
        assert_eq!(hexadecimal("0a 1B # c\n ff").unwrap(), [10, 27, 255]);
        assert!(hexadecimal("0a 1").is_err() && hexadecimal("0g").is_err());
    }

    #[test]
    fn the_last_words_of_libfuzzer_are_read() {
        let said = "#2\tINITED cov: 7 ft: 8 corp: 1/1b exec/s: 0 rss: 44Mb\n\
            #20000\tDONE   cov: 107 ft: 310 corp: 93/1610b lim: 74 exec/s: 0 rss: 68Mb\n\
            Done 20000 runs in 0 second(s)\nstat::number_of_executed_units: 20000\n";
        let told = Told {
            inputs: 20_000,
            edges: 107,
            features: 310,
        };
        assert_eq!(Told::of(said), told);
        assert_eq!(Told::of("nothing"), Told::default());
    }
}
