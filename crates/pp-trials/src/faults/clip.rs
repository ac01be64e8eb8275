//! The clip that faults are made on: small, with a scene cut in the middle.

use std::path::Path;

use pp_testing::scenes;

/// Its file in the folder of a job.
pub(super) const NAME: &str = "in.y4m";
/// Frames that travel together.
pub(super) const FRAMES_PER_CHUNK: &str = "2";
/// Chunks in the clip.
pub(super) const CHUNKS: u64 = 12;

/// Writes the clip.
pub(super) fn write(folder: &Path) -> std::io::Result<()> {
    let clip = scenes(64, 48, "420jpeg", 2 * CHUNKS as usize, CHUNKS as usize);
    std::fs::write(folder.join(NAME), clip)
}
