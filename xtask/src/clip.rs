//! The clip in `assets/`, expanded.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, ensure};

use crate::process::{root, target};

const BYTES: usize = 7_299_440;
/// Of a frame: what stands before it, its luma, and all of it with two planes of a quarter of that.
const FRAME: &[u8] = b"FRAME\n";
const LUMA_BYTES: usize = 352 * 288;
const FRAME_BYTES: usize = FRAME.len() + LUMA_BYTES * 3 / 2;

/// Expands the clip into the target directory, unless it is there, and says where.
pub(crate) fn expanded() -> Result<PathBuf> {
    let folder = target()?.join("clip");
    let path = folder.join("cup.y4m");
    if fs::metadata(&path).is_ok_and(|there| there.len() == BYTES as u64) {
        return Ok(path);
    }
    let packed = root().join("assets/cup.y4m.zlib");
    let packed = fs::read(&packed).with_context(|| format!("cannot read {}", packed.display()))?;
    fs::create_dir_all(&folder)?;
    let part = path.with_extension("part");
    fs::write(&part, expand(&packed)?)?;
    fs::rename(&part, &path)?;
    Ok(path)
}

fn expand(packed: &[u8]) -> Result<Vec<u8>> {
    let clip = miniz_oxide::inflate::decompress_to_vec_zlib_with_limit(packed, BYTES)
        .map_err(|error| anyhow!("assets/cup.y4m.zlib is damaged: {error}"))?;
    ensure!(
        clip.len() == BYTES,
        "assets/cup.y4m.zlib holds {} bytes, not {BYTES}",
        clip.len()
    );
    Ok(clip)
}

/// The clip as three scenes: the middle third of its frames has the luma of a negative.
pub(crate) fn in_three_scenes(mut clip: Vec<u8>) -> Vec<u8> {
    let header = clip.iter().position(|byte| *byte == b'\n');
    let frames = &mut clip[header.map_or(0, |end| end + 1)..];
    let third = frames.len() / FRAME_BYTES / 3;
    let middle = frames.chunks_exact_mut(FRAME_BYTES).skip(third).take(third);
    for frame in middle {
        for sample in &mut frame[FRAME.len()..FRAME.len() + LUMA_BYTES] {
            *sample = !*sample;
        }
    }
    clip
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_three_scenes_is_a_negative() {
        let plain = fs::read(expanded().unwrap()).unwrap();
        let cut = in_three_scenes(plain.clone());
        let header = plain.len() % FRAME_BYTES;
        let [plain, cut] = [&plain, &cut].map(|clip| clip[header..].chunks_exact(FRAME_BYTES));
        for (n, (plain, cut)) in plain.zip(cut).enumerate() {
            assert_eq!(cut[..6], *FRAME, "frame {n}");
            assert_eq!(plain != cut, (16..32).contains(&n), "frame {n}");
        }
    }

    #[test]
    fn the_clip_is_whole_and_small_enough_to_carry() {
        let packed = fs::read(root().join("assets/cup.y4m.zlib")).unwrap();
        assert!(packed.len() <= 2 << 20, "{} bytes", packed.len());
        let clip = expand(&packed).unwrap();
        assert!(clip.starts_with(b"YUV4MPEG2 W352 H288 F25:1 "));
        assert_eq!(clip.windows(6).filter(|w| w == b"FRAME\n").count(), 48);
        assert!(expand(&packed[..packed.len() / 2]).is_err());
    }
}
