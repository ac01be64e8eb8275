//! The commands of this workspace: `cargo xtask help` lists them.
//!
//! What continuous integration checks is what a person can check here, with the same words: `cargo xtask ci` is the whole
//! gate. Each command is one file.

use std::process::ExitCode;

use anyhow::{Result, bail};

mod bench;
mod bundle;
mod chosen;
mod ci;
mod circles;
mod clip;
mod container;
mod everything;
mod fuzz;
mod kernels;
mod layers;
mod mutants;
mod nccl_bindings;
mod process;
mod python;
mod run_pp;
mod suite;
mod tidy;
mod training;
mod trials;
mod wheels;

const HELP: &str = "\
cargo xtask <command>

  run-pp [args]   build pp in release mode and run it; without arguments: denoise the clip in assets/
  test            the whole suite: unit, integration and doc tests, loom models, AddressSanitizer
  layers          who may depend on whom, and no circles of files or folders inside a crate
  tidy            module docs, SAFETY comments, leftovers, long files, paths in pages
  kernels [--check]
                  compile the CUDA kernels to the PTX that is checked in, or compare them
  nccl-bindings [--check]
                  make the bindings of crates/nccl-sys from NCCL's header, or compare them
  ci              fmt, layers, tidy, nccl-bindings, kernels, clippy, fuzz targets, test, one mutant
  everything [PART...]
                  before a release: all of what ci chooses a part of by the commit, and what takes long. The parts are
                  doc, install, container, faults, shutdown, kills, placements, mutants, walk, fuzz, soak
  mutants [NAME... | --by SEED]
                  put mistakes into the product, one at a time: which test finds each
  walk            every order of events in larger cases than the suite walks: cores, watchdog, supervisor (minutes)
  placements [--part SEED] [--only TEXT...] [--jobs N]
                  the shipped job on every placement of its stages gives the bytes of one process
  python          the suite of the Python package alone
  torch           install PyTorch for the part of the suite that needs it, once, outside of the clone (6 GB)
  wheel [--out DIR]
                  the wheel of the Python package, for any Linux with glibc and CPython 3.10 or later
  bundle [--out DIR]
                  what a machine with GPUs and without Rust needs: programs, plugins, clip, gpu-check.sh
  fuzz [--inputs N] [TARGET...]
                  every decoder that a stranger, a peer or a file reaches, under libFuzzer
  soak [--chunks N] [--minutes N] [--seed S]
                  long jobs whose ranks between source and sink are killed and stopped all the time; no frame is lost or changed
  bench WHAT      overlap | touch | denoise | all: ours beside its peers, interleaved;
                  door: a job beside somebody who attacks the place where its ranks meet";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[String]) -> Result<()> {
    let rest = args.get(1..).unwrap_or_default();
    match args.first().map(String::as_str) {
        Some("run-pp") => run_pp::run(rest),
        Some("test") => suite::run(|| Ok(Vec::new())),
        Some("layers") => layers::run(),
        Some("tidy") => tidy::run(),
        Some("mutants") => mutants::run(rest),
        Some("walk") => mutants::walk(),
        Some("kernels") => kernels::run(rest),
        Some("nccl-bindings") => nccl_bindings::run(rest),
        Some("ci") => ci::run(),
        Some("everything") => everything::run(rest),
        Some("fuzz") => fuzz::run(rest),
        Some("bundle") => bundle::run(rest),
        Some("python") => {
            python::test("--package pp-python --package pp-cli --package pp-plugin-aoti")
        }
        Some("torch") => python::install_torch(),
        Some("wheel") => python::wheel(rest),
        Some("soak") => trials::soak(rest),
        Some("placements") => trials::placements(rest),
        Some("bench") => bench::run(rest),
        None | Some("help" | "--help" | "-h") => {
            println!("{HELP}");
            Ok(())
        }
        Some(other) => bail!("no command {other:?}; cargo xtask help lists them"),
    }
}
