//! The Python package: its own suite, with NumPy alone and with PyTorch, and its wheel.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use crate::chosen::{MUST_RUN, PART, cannot_run, seed};
use crate::process::{built, cargo, command, listed, output, root, run, target};

/// The tests that need PyTorch, in two parts that take about as long. They run side by side: each process that imports
/// PyTorch is at that for seconds, with one thread, while others wait for it.
const TORCH_TESTS: [&[&str]; 2] = [
    &[
        "python/tests/test_train.py",
        "python/tests/test_export.py",
        "python/tests/test_torch.py",
        "python/tests/test_cuda.py",
    ],
    &[
        "python/tests/test_train_checkpoint.py",
        "python/tests/test_train_groups.py",
        "python/tests/test_networks.py",
    ],
];

/// Checks the types of the package and runs its suite. The tests with PyTorch run where there is one. `packages` is what cargo
/// builds: what was built with the whole workspace differs from what is built alone.
pub(crate) fn test(packages: &str) -> Result<()> {
    let package = package(packages)?;
    let python = Environment::of(&target()?.join("python"), &TESTS)?.make()?;
    let mut types = command(&python);
    types.args(["-m", "mypy", "--strict", "-p", "pp_pipeline"]);
    types.args(["--config-file", "python/pyproject.toml"]);
    types.env("MYPYPATH", root().join("python"));
    let cache = target()?.join("python/mypy");
    run(types.arg("--cache-dir").arg(cache))?;
    let left_out = TORCH_TESTS.iter().copied().flatten();
    let left_out = left_out.flat_map(|file| ["--ignore", file]);
    let others: Vec<&str> = left_out.chain(["python/tests"]).collect();
    pytest(&python, &package, &others, &[], 0)?;
    match torch()? {
        Some(python) => {
            let pp = built(&mut cargo(&format!("build {packages}")), "pp")?;
            let plugin = built(&mut cargo(&format!("build {packages}")), "pp_aoti")?;
            let set = [("PP_TEST_PP", &*pp), ("PP_TEST_AOTI", &*plugin)];
            thread::scope(|scope| {
                let part = |(at, tests): (usize, &&'static [&'static str])| {
                    let (tests, python, package, set) = (*tests, &python, &package, &set);
                    scope.spawn(move || pytest(python, package, tests, set, at + 1))
                };
                let parts: Vec<_> = TORCH_TESTS.iter().enumerate().map(part).collect();
                let mut ended = parts.into_iter().map(|part| part.join());
                ended.try_for_each(|ended| ended.expect("it does not panic"))
            })
        }
        None => cannot_run(
            "the tests with PyTorch; cargo xtask torch installs it once (6 GB), or PP_TORCH_VENV names an environment that has \
             what python/requirements-test.txt and python/requirements-torch.txt list",
            env::var_os(MUST_RUN).is_some(),
        ),
    }
}

/// The package as it is built for the tests, in a folder for `PYTHONPATH`.
pub(crate) fn package(packages: &str) -> Result<PathBuf> {
    let library = built(&mut cargo(&format!("build {packages}")), "_native")?;
    let folder = target()?.join("python/package/pp_pipeline");
    let files = [
        listed("python/pp_pipeline")?,
        listed("python/pp_pipeline/train")?,
    ];
    for file in files.concat() {
        let place = folder.join(file.strip_prefix("python/pp_pipeline")?);
        if file.extension().is_some_and(|is| is == "py" || is == "pyi") {
            fs::create_dir_all(place.parent().context("a file has a folder")?)?;
            fs::copy(root().join(&file), place)?;
        }
    }
    // A process that has the old one mapped keeps it.
    let native = folder.join("_native.abi3.so");
    let part = native.with_extension("part");
    fs::copy(library, &part)?;
    fs::rename(part, native)?;
    Ok(target()?.join("python/package"))
}

/// Runs tests, and says how many passed in the words of Rust's harness. Those that run side by side have numbers of their own.
fn pytest(
    python: &Path,
    package: &Path,
    tests: &[&str],
    set: &[(&str, &Path)],
    at: usize,
) -> Result<()> {
    let mut pytest = command(python);
    pytest.envs(set.iter().copied()).env(PART, seed());
    pytest.args(["-m", "pytest", "-q", "-p", "no:cacheprovider"]);
    pytest.args(tests);
    pytest
        .env("PYTHONPATH", package)
        .env("PYTHONDONTWRITEBYTECODE", "1");
    let results = target()?.join(format!("python/results-{at}.xml"));
    pytest.arg("--junit-xml").arg(&results);
    let ended = run(&mut pytest);
    let text = fs::read_to_string(&results).unwrap_or_default();
    let number = |name: &str| -> u32 {
        let found = text.split(&format!(" {name}=\"")).nth(1);
        let number = found.and_then(|rest| rest.split('"').next()?.parse().ok());
        number.unwrap_or(0)
    };
    let failed = number("failures") + number("errors");
    let passed = number("tests").saturating_sub(failed + number("skipped"));
    let word = if ended.is_ok() { "ok" } else { "FAILED" };
    println!("test result: {word}. {passed} passed; {failed} failed; 0 ignored; python");
    ended
}

/// A virtual environment with what some files list.
struct Environment {
    place: PathBuf,
    requirements: &'static [&'static str],
}

impl Environment {
    /// The one in this folder, which may not be made yet.
    fn of(folder: &Path, requirements: &'static [&'static str]) -> Result<Self> {
        let mut listed = String::new();
        for file in requirements {
            listed += &fs::read_to_string(root().join(file))
                .with_context(|| format!("cannot read {file}"))?;
        }
        Ok(Self {
            place: folder.join(format!("venv-{:016x}", digest(&listed))),
            requirements,
        })
    }

    /// Its Python, if it was made.
    fn made(&self) -> Option<PathBuf> {
        // Written last, so an environment that has it is whole.
        let is_whole = self.place.join("complete").exists();
        is_whole.then(|| self.place.join("bin/python"))
    }

    /// Its Python; it is made unless it is there.
    fn make(&self) -> Result<PathBuf> {
        if let Some(python) = self.made() {
            return Ok(python);
        }
        if self.place.exists() {
            fs::remove_dir_all(&self.place)?;
        }
        fs::create_dir_all(&self.place)?;
        run(command("python3").args(["-m", "venv"]).arg(&self.place))
            .context("cannot make a virtual environment; Debian's package is python3-venv")?;
        let python = self.place.join("bin/python");
        let mut install = command(&python);
        install.args(["-m", "pip", "install", "--quiet", "--only-binary=:all:"]);
        for file in self.requirements {
            install.args(["--requirement", file]);
        }
        run(install.env("PIP_DISABLE_PIP_VERSION_CHECK", "1"))?;
        fs::write(self.place.join("complete"), "")?;
        Ok(python)
    }
}

/// FNV-1a, 64 bits.
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The Python that has PyTorch: that of `PP_TORCH_VENV`, or the one that `cargo xtask torch` has made.
pub(crate) fn torch() -> Result<Option<PathBuf>> {
    if let Some(place) = env::var_os("PP_TORCH_VENV").filter(|place| !place.is_empty()) {
        let python = Path::new(&place).join("bin/python");
        ensure!(
            python.exists(),
            "PP_TORCH_VENV: there is no {}",
            python.display()
        );
        return Ok(Some(python));
    }
    Ok(Environment::of(&cache()?, &TORCH)?.made())
}

const TESTS: [&str; 1] = ["python/requirements-test.txt"];
const TORCH: [&str; 2] = [
    "python/requirements-test.txt",
    "python/requirements-torch.txt",
];

/// Makes the environment with PyTorch, outside of the clone, and says how long that took.
pub(crate) fn install_torch() -> Result<()> {
    let start = Instant::now();
    let python = Environment::of(&cache()?, &TORCH)?.make()?;
    let seconds = start.elapsed().as_secs();
    println!("PyTorch is in {} ({seconds} s)", python.display());
    Ok(())
}

fn cache() -> Result<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty());
    let cache = set("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| Some(PathBuf::from(set("HOME")?).join(".cache")));
    Ok(cache.context("HOME is not set")?.join("pp-pipeline"))
}

/// Builds the wheel that installs without Rust, on systems whose C library is at least as new as that of this one.
pub(crate) fn wheel(args: &[String]) -> Result<()> {
    let out = match args {
        [] => target()?.join("wheels-made"),
        [flag, folder] if flag == "--out" => PathBuf::from(folder),
        _ => bail!("cargo xtask wheel [--out DIR]"),
    };
    let folder = target()?.join("python");
    let python = Environment::of(&folder, &["python/requirements-wheel.txt"])?.make()?;
    let maturin = python.with_file_name("maturin");
    let mut build: Command = command(maturin);
    build.args("build --release --strip --manifest-path python/Cargo.toml --out".split(' '));
    build.arg(&out).env("CARGO_INCREMENTAL", "0");
    if let Some(target) = env::var_os("CARGO_TARGET_DIR") {
        build.env("CARGO_TARGET_DIR", target);
    }
    let said = output(&mut build)?;
    print!("{said}");
    Ok(())
}
