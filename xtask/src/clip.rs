//! The clip in `assets/`, expanded.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result, anyhow, ensure};

use crate::process::{root, target};

const BYTES: usize = 7_299_440;

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

#[cfg(test)]
mod tests {
    use super::*;

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
