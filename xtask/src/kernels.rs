//! `cargo xtask kernels [--check]`: the PTX that is built into pp-kernels, and what each kernel uses.
//!
//! PTX is text that the driver compiles for its device. It is checked in, so that building the project takes no CUDA
//! toolkit; this command makes it from the sources with nvcc 13.0: `$PP_NVCC`, the one on PATH, or the one of the packages
//! that `crates/pp-kernels/kernels/requirements.txt` pins. The same nvcc writes the same bytes on every machine.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, bail, ensure};

use crate::process::{command, listed, output, root, stem_of, target};
use crate::wheels;

/// What PTX is made for: the oldest device that runs it. On an H200 PTX for compute_90a was no faster.
const COMPUTE: &str = "compute_80";
/// What ptxas assembles it for.
const SM: &str = "sm_80";
/// The nvcc whose bytes are checked in, as it prints itself.
const RELEASE: &str = "release 13.0";
/// The newest PTX that a driver 580 takes.
const PTX_VERSION: &str = ".version 9.0";
/// Where the table of what each kernel uses lies, in the directory of the sources.
const TABLE: &str = "ptxas.txt";

/// nvcc and ptxas of one toolkit.
struct Toolkit {
    nvcc: PathBuf,
    ptxas: PathBuf,
}

/// Writes the PTX and the table, or with `--check` compares them with those that are there.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let check = match args {
        [] => false,
        [only] if only == "--check" => true,
        _ => bail!("cargo xtask kernels takes --check and nothing else"),
    };
    let sources = root().join("crates/pp-kernels/kernels");
    let toolkit = Toolkit::find(&sources)?;
    let scratch = target()?.join(format!("kernels.{}", std::process::id()));
    fs::create_dir_all(&scratch)?;
    let made = build(&toolkit, &sources, &scratch);
    fs::remove_dir_all(&scratch)?;
    let made = made?;

    let there = checked_in(&sources)?;
    if check {
        return compare(&made, &there);
    }
    for stale in there.keys().filter(|name| !made.contains_key(*name)) {
        fs::remove_file(sources.join(stale))?;
    }
    fs::create_dir_all(sources.join("ptx"))?;
    for (name, text) in &made {
        fs::write(sources.join(name), text)?;
    }
    println!(
        "kernels: wrote {} files with {}",
        made.len(),
        toolkit.nvcc.display()
    );
    Ok(())
}

impl Toolkit {
    fn find(sources: &Path) -> Result<Toolkit> {
        if let Some(given) = std::env::var_os("PP_NVCC") {
            let nvcc = PathBuf::from(given);
            ensure!(
                is_release(&nvcc),
                "PP_NVCC is {}, which is no nvcc of {RELEASE}",
                nvcc.display()
            );
            return Ok(Toolkit::of(nvcc));
        }
        let on_path = std::env::var_os("PATH").unwrap_or_default();
        let on_path = std::env::split_paths(&on_path).map(|place| place.join("nvcc"));
        if let Some(nvcc) = on_path
            .into_iter()
            .find(|nvcc| nvcc.is_file() && is_release(nvcc))
        {
            return Ok(Toolkit::of(nvcc));
        }
        let wheels = wheels::unpacked("nvcc", &sources.join("requirements.txt"))
            .context("set PP_NVCC to an nvcc 13.0 where PyPI cannot be reached")?;
        let toolkit = Toolkit::of(wheels.join("nvidia/cu13/bin/nvcc"));
        ensure!(
            is_release(&toolkit.nvcc),
            "{} does not run here; nvcc wants gcc and g++",
            toolkit.nvcc.display()
        );
        Ok(toolkit)
    }

    fn of(nvcc: PathBuf) -> Toolkit {
        Toolkit {
            ptxas: nvcc.with_file_name("ptxas"),
            nvcc,
        }
    }
}

fn is_release(nvcc: &Path) -> bool {
    output(command(nvcc).arg("--version")).is_ok_and(|text| text.contains(RELEASE))
}

/// The files as they must be: their names from the directory of the sources, and what is in them.
fn build(toolkit: &Toolkit, sources: &Path, scratch: &Path) -> Result<BTreeMap<String, String>> {
    let mut kernels = listed(sources)?;
    kernels.retain(|path| path.extension().is_some_and(|extension| extension == "cu"));
    let kernels: Vec<String> = kernels.iter().map(|path| stem_of(path)).collect();
    ensure!(!kernels.is_empty(), "no kernels in {}", sources.display());

    let mut made = BTreeMap::new();
    let mut table = String::from(
        "# What ptxas makes of each kernel; made by `cargo xtask kernels`.\n\
         # kernel target registers stack spill_stores spill_loads shared (bytes; the attention's is dynamic)\n",
    );
    let jobs: Vec<_> = kernels
        .iter()
        .map(|kernel| (format!("{kernel}.ptx"), kernel))
        .collect();
    // Names of sources are relative, so that no path of this machine gets into the text.
    all(jobs.iter().map(|(name, kernel)| {
        let mut nvcc = Command::new(&toolkit.nvcc);
        nvcc.current_dir(sources)
            .args(["-ptx", "-std=c++17", "-O3"])
            .arg(format!("-arch={COMPUTE}"))
            .arg(format!("{kernel}.cu"))
            .arg("-o")
            .arg(scratch.join(name));
        nvcc
    }))?;
    let texts = all(jobs.iter().map(|(name, _)| {
        let mut ptxas = Command::new(&toolkit.ptxas);
        ptxas
            .arg("-v")
            .arg(format!("-arch={SM}"))
            .arg(scratch.join(name))
            .arg("-o")
            .arg(scratch.join(format!("{name}.cubin")));
        ptxas
    }))?;
    for ((name, kernel), text) in jobs.iter().zip(texts) {
        let ptx = fs::read_to_string(scratch.join(name))?;
        made.insert(format!("ptx/{name}"), without_header(&ptx, kernel)?);
        for line in used(&text, SM).with_context(|| format!("ptxas on {name}"))? {
            table += &line;
            table.push('\n');
        }
    }
    made.insert(TABLE.to_owned(), table);
    Ok(made)
}

/// Runs commands at the same time and gives what each printed, standard error included.
fn all(commands: impl Iterator<Item = Command>) -> Result<Vec<String>> {
    let run = |mut command: Command| {
        let output = command.stdin(Stdio::null()).output();
        let output = output.with_context(|| format!("cannot start {command:?}"))?;
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        if !output.status.success() {
            eprint!("{text}");
            bail!("{command:?} ended with {}", output.status);
        }
        Ok(text)
    };
    thread::scope(|scope| {
        let started: Vec<_> = commands.map(|one| scope.spawn(move || run(one))).collect();
        let ended = started.into_iter().map(|one| one.join());
        ended.map(|one| one.expect("it does not panic")).collect()
    })
}

/// The compiler's header tells its build; ours tells where the text comes from.
fn without_header(ptx: &str, kernel: &str) -> Result<String> {
    let body = ptx
        .find(".version")
        .map(|at| &ptx[at..])
        .context("PTX without a version")?;
    ensure!(
        body.starts_with(PTX_VERSION),
        "{kernel} became PTX {}, drivers of release 580 take {PTX_VERSION}",
        body.lines().next().unwrap_or_default()
    );
    Ok(format!(
        "// {kernel}.cu for {COMPUTE}; made by `cargo xtask kernels`.\n{body}"
    ))
}

/// One line for each kernel of what `ptxas -v` printed.
fn used(text: &str, sm: &str) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    let mut kernel = None;
    let mut stack = Vec::new();
    for line in text.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.split('\'').next();
        } else if line.contains("bytes stack frame") {
            stack = numbers(line);
        } else if let Some((_, rest)) = line.split_once("Used ") {
            let kernel = kernel.take().context("registers of no kernel")?;
            let registers = *numbers(rest).first().context("no number of registers")?;
            let shared = rest
                .split(", ")
                .find(|part| part.ends_with("bytes smem"))
                .and_then(|part| numbers(part).first().copied())
                .unwrap_or(0);
            let [stack, stores, loads] = stack[..] else {
                bail!("no line about the stack of {kernel}");
            };
            lines.push(format!(
                "{kernel} {sm} {registers} {stack} {stores} {loads} {shared}"
            ));
        }
    }
    ensure!(!lines.is_empty(), "no kernel in it");
    lines.sort();
    Ok(lines)
}

fn numbers(text: &str) -> Vec<u32> {
    text.split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect()
}

/// The files that are there, like those of [`build`].
fn checked_in(sources: &Path) -> Result<BTreeMap<String, String>> {
    let mut files = listed(sources.join("ptx")).unwrap_or_default();
    files.push(sources.join(TABLE));
    let mut there = BTreeMap::new();
    for file in files {
        if let Ok(text) = fs::read_to_string(&file) {
            let name = file.strip_prefix(sources)?.to_string_lossy();
            there.insert(name.into_owned(), text);
        }
    }
    Ok(there)
}

fn compare(made: &BTreeMap<String, String>, there: &BTreeMap<String, String>) -> Result<()> {
    let names: BTreeSet<_> = made.keys().chain(there.keys()).collect();
    let mut faults = Vec::new();
    for name in names {
        match (made.get(name), there.get(name)) {
            (Some(made), Some(there)) if made == there => {}
            (Some(made), Some(there)) => {
                let same = made.lines().zip(there.lines()).take_while(|(a, b)| a == b);
                faults.push(format!("{name} differs from line {} on", same.count() + 1));
            }
            (Some(_), None) => faults.push(format!("{name} is missing")),
            (None, _) => faults.push(format!("{name} has no source")),
        }
    }
    ensure!(
        faults.is_empty(),
        "crates/pp-kernels/kernels is not what its sources give: {}; run cargo xtask kernels",
        faults.join(", ")
    );
    println!("kernels: {} files as generated", made.len());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_says_what_ptxas_says() {
        let text = "ptxas info    : 0 bytes gmem\n\
            ptxas info    : Compiling entry function 'b' for 'sm_90a'\n\
            ptxas info    : Function properties for b\n\
            \x20   8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n\
            ptxas info    : Used 40 registers, used 1 barriers, 15756 bytes smem\n\
            ptxas info    : Compiling entry function 'a' for 'sm_90a'\n\
            \x20   0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
            ptxas info    : Used 8 registers, used 0 barriers\n";
        assert_eq!(
            used(text, "sm_90a").unwrap(),
            ["a sm_90a 8 0 0 0 0", "b sm_90a 40 8 16 24 15756"]
        );
        assert!(used("nothing", "sm_90a").is_err());
    }

    #[test]
    fn every_difference_is_named() {
        let files = |names: &[(&str, &str)]| -> BTreeMap<String, String> {
            names
                .iter()
                .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
                .collect()
        };
        let made = files(&[("a", "1\n2\n"), ("b", "x")]);
        assert!(compare(&made, &made).is_ok());
        let there = files(&[("a", "1\n3\n"), ("c", "x")]);
        let text = compare(&made, &there).unwrap_err().to_string();
        for part in ["a differs from line 2", "b is missing", "c has no source"] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn newer_ptx_is_refused() {
        assert!(without_header("//\n.version 9.1\n", "a").is_err());
        assert_eq!(
            without_header("// build\n.version 9.0\n.target sm_80\n", "a").unwrap(),
            "// a.cu for compute_80; made by `cargo xtask kernels`.\n.version 9.0\n.target sm_80\n"
        );
    }
}
