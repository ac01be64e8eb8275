//! The shipped kernels on the clip, beside ffmpeg's nlmeans at every strength that may be its best.
//!
//! Both read the same noisy file and write a file; the time is that of the whole command.

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};

use super::quality::luma_psnr_db;
use super::{ROUNDS, median};
use crate::clip;
use crate::process::{command, output, succeeds, target};

const SIGMA: &str = "20";
const STRENGTHS: [u32; 7] = [9, 11, 13, 15, 18, 22, 27];

/// Prints decibels and frames a second for both.
pub(super) fn run(pp: &Path) -> Result<()> {
    let directory = target().join("bench");
    fs::create_dir_all(&directory)?;
    let [noisy, denoised] = ["noisy.y4m", "denoised.y4m"].map(|name| directory.join(name));
    let clean = clip::expanded()?;
    // Without a step phase B is the identity: the output is the input with its noise.
    output(
        command(pp)
            .args([
                "run",
                "--denoise-steps",
                "0",
                "--add-noise",
                SIGMA,
                "--input",
            ])
            .arg(&clean)
            .arg("--output")
            .arg(&noisy),
    )?;
    let before = luma_psnr_db(&clean, &noisy)?;
    println!("\nDenoise, the clip with Gaussian noise of sigma {SIGMA}: luma PSNR {before:.2} dB");
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
        let after = luma_psnr_db(&clean, &denoised)?;
        println!(
            "{label:<22} {after:>10.2} {:>+8.2} {:>12.1}",
            after - before,
            median(&mut rates)
        );
        Ok(())
    };
    let ours = || {
        output(
            command(pp)
                .args(["run", "--input"])
                .arg(&noisy)
                .arg("--output")
                .arg(&denoised),
        )
        .map(drop)
    };
    measure("pp", &ours, ROUNDS.min(3))?;
    if !succeeds(command("ffmpeg").arg("-version")) {
        println!("skipped: ffmpeg; to have it: apt-get install ffmpeg");
        return Ok(());
    }
    for strength in STRENGTHS {
        let nlmeans = || {
            let mut ffmpeg = command("ffmpeg");
            ffmpeg.args(["-loglevel", "error", "-y", "-i"]).arg(&noisy);
            ffmpeg
                .args([
                    "-vf",
                    &format!("nlmeans=s={strength}"),
                    "-f",
                    "yuv4mpegpipe",
                ])
                .arg(&denoised);
            output(&mut ffmpeg).map(drop)
        };
        measure(&format!("ffmpeg nlmeans s={strength}"), &nlmeans, 1)?;
    }
    measure("pp again", &ours, 1)
}

fn frames(path: &Path) -> Result<usize> {
    let clip = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    super::quality::Clip::parse(&clip).map(|clip| clip.luma().count())
}
