//! `cargo xtask everything training`: what takes too long of training for each commit.

use std::env;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::clip;
use crate::process::{build_pp, built, cargo, command, output, run as run_command, target};
use crate::python;

/// The denoiser must have learnt within this time.
const LEARNS_WITHIN: Duration = Duration::from_mins(30);
/// What it must gain on each picture that it has not seen.
const GAIN_DB: f64 = 4.0;

/// Compares all cells of up to 4 ranks with one process, trains the denoiser, runs the package that it leaves, and measures.
pub(crate) fn run() -> Result<()> {
    let python = python::torch()?.context("there is no PyTorch: cargo xtask torch installs it")?;
    let pictures = pictures(&python)?;
    let paths = env::join_paths([python::package("--release --package pp-python")?, pictures])?;
    let program = |file: &str| {
        let mut program = command(&python);
        program.env("PYTHONPATH", &paths).env("PP_FLIGHT_OPS", "0");
        program.arg(file);
        program
    };
    for ranks in ["1", "2", "3", "4"] {
        run_command(program("python/tests/train_cells.py").args([ranks, "4", "12", "20"]))?;
    }
    let pp = build_pp()?;
    denoiser(
        &mut program("examples/python/train_denoiser.py"),
        &pp,
        &python,
    )?;
    for case in ["simulate", "host", "memory", "torch"] {
        run_command(
            program("python/bench/train.py")
                .args([case, "--pp"])
                .arg(&pp),
        )?;
    }
    Ok(())
}

/// A folder with the package that has the pictures.
fn pictures(python: &Path) -> Result<std::path::PathBuf> {
    let folder = target()?.join("python/pictures");
    let mut install = command(python);
    install.args(["-m", "pip", "install", "--quiet", "--only-binary=:all:"]);
    install.args(["--upgrade", "--constraint", "python/requirements-test.txt"]);
    install.args([
        "--requirement",
        "python/requirements-pictures.txt",
        "--target",
    ]);
    run_command(
        install
            .arg(&folder)
            .env("PIP_DISABLE_PIP_VERSION_CHECK", "1"),
    )?;
    Ok(folder)
}

/// Trains it, and denoises the sample clip with the PyTorch of this Python.
fn denoiser(program: &mut Command, pp: &Path, python: &Path) -> Result<()> {
    let folder = target()?.join("training");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    let package = folder.join("net.pt2");
    program.args("--steps 10000 --every 1000 --size 352x288 --weights".split(' '));
    program.arg(&folder).arg("--pt2").arg(&package);
    let started = Instant::now();
    let said = output(program)?;
    let took = started.elapsed();
    print!("{said}");
    ensure!(took <= LEARNS_WITHIN, "the denoiser took {took:?}");
    let gains: Vec<f64> = said.lines().filter_map(gain).collect();
    ensure!(
        gains.len() == 2 && gains.iter().all(|gain| *gain >= GAIN_DB),
        "the denoiser gained {gains:?} dB on two pictures, and must gain {GAIN_DB} on each"
    );
    let plugin = built(
        &mut cargo("build --release --package pp-plugin-aoti"),
        "pp_aoti",
    )?;
    let mut film = command(pp);
    film.arg("run").arg("--kernels").arg(plugin);
    film.arg("--plugin-arg")
        .arg(format!("phase_b={}", package.display()));
    film.arg("--input").arg(clip::expanded()?);
    film.args(["--add-noise", "20", "--output"]);
    let environment = python.ancestors().nth(2);
    film.env(
        "VIRTUAL_ENV",
        environment.context("Python has no environment")?,
    );
    run_command(film.arg(folder.join("out.y4m")))
}

/// What the denoiser says that it gains on a picture of scikit-image.
fn gain(line: &str) -> Option<f64> {
    let (picture, rest) = line.split_once(": ")?;
    let gain = rest.strip_suffix(" dB")?.rsplit(' ').next()?;
    ["camera", "coins"].contains(&picture).then_some(())?;
    gain.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gain_of_a_picture_is_read_and_that_of_a_made_one_is_not() {
        let line = "camera: 22.10 dB with noise, 29.04 dB denoised, +6.94 dB";
        assert_eq!(gain(line), Some(6.94));
        assert_eq!(gain(&line.replace("camera", "made 1")), None);
        assert_eq!(gain("step 10: loss 0.006, 400 patches/s, bubble 20%"), None);
    }
}
