//! The shipped kernels on natural video, beside ffmpeg's nlmeans at every strength that may be its best.
//!
//! Both read the same noisy file and write a file; the time is that of the whole command.

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};

use super::clips;
use super::figures::{ROUNDS, median};
use super::peers::Contenders;
use super::quality::luma_psnr_db;
use crate::process::{command, output, succeeds, target};

const SIGMA: &str = "20";
const STRENGTHS: [u32; 6] = [9, 11, 13, 15, 18, 22];

/// Prints decibels and frames a second for both, on every clip that can be had.
pub(super) fn run(contenders: &Contenders) -> Result<()> {
    for (name, clean) in clips::all()? {
        on_clip(&contenders.pp, name, &clean)?;
    }
    Ok(())
}

fn on_clip(pp: &Path, name: &str, clean: &Path) -> Result<()> {
    let directory = target()?.join("bench");
    fs::create_dir_all(&directory)?;
    let [noisy, denoised] = ["noisy.y4m", "denoised.y4m"].map(|name| directory.join(name));
    // Without a step phase_b is the identity: the output is the input with its noise.
    let mut add_noise = command(pp);
    add_noise.args(["run", "--denoise-steps", "0", "--add-noise", SIGMA]);
    add_noise.arg("--input").arg(clean);
    output(add_noise.arg("--output").arg(&noisy))?;
    let before = luma_psnr_db(clean, &noisy)?;
    println!("\nDenoise, {name}, Gaussian noise of sigma {SIGMA}: luma PSNR {before:.2} dB");
    println!(
        "{:<22} {:>10} {:>8} {:>12}",
        "", "PSNR dB", "gain", "frames/s"
    );
    let measure = |label: &str, run: &dyn Fn() -> Result<()>, rounds: usize| -> Result<()> {
        let mut rates = Vec::new();
        for _ in 0..rounds {
            let began = Instant::now();
            run()?;
            rates.push(frames(&denoised)? as f64 / began.elapsed().as_secs_f64());
        }
        let after = luma_psnr_db(clean, &denoised)?;
        let (gain, rate) = (after - before, median(&mut rates));
        println!("{label:<22} {after:>10.2} {gain:>+8.2} {rate:>12.1}");
        Ok(())
    };
    let ours = || {
        let mut run = command(pp);
        run.args(["run", "--input"]).arg(&noisy);
        output(run.arg("--output").arg(&denoised)).map(drop)
    };
    measure("pp", &ours, ROUNDS.min(3))?;
    if !succeeds(command("ffmpeg").arg("-version")) {
        return Ok(());
    }
    for strength in STRENGTHS {
        let filter = format!("nlmeans=s={strength}");
        let nlmeans = || {
            let mut ffmpeg = command("ffmpeg");
            ffmpeg.args(["-loglevel", "error", "-y", "-i"]).arg(&noisy);
            ffmpeg.args(["-vf", &filter, "-f", "yuv4mpegpipe"]);
            output(ffmpeg.arg(&denoised)).map(drop)
        };
        measure(&format!("ffmpeg nlmeans s={strength}"), &nlmeans, 1)?;
    }
    measure("pp again", &ours, 1)
}

fn frames(path: &Path) -> Result<usize> {
    let clip = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    super::quality::Clip::parse(&clip).map(|clip| clip.luma().count())
}
