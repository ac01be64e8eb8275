//! What the tests of this module share: scratch space, and frames in files.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use pp_testing::Folder;

use super::y4m::Frames;

/// Writes one frame without parameters.
pub(crate) fn write_frame(out: &mut impl std::io::Write, frame: &[u8]) {
    let frames = Frames {
        bytes: frame,
        frame_bytes: frame.len(),
        params: &Vec::new(),
    };
    frames.write(out).unwrap();
}

/// A folder that a drop removes.
pub(crate) fn scratch() -> Folder {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let unique = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("pp-video-test-{}-{unique}", std::process::id());
    Folder::new(std::env::temp_dir(), &name)
}

/// A new named pipe in the folder.
pub(crate) fn fifo(folder: &Folder) -> PathBuf {
    use rustix::fs::{CWD, FileType, mknodat};
    let path = folder.file("fifo");
    mknodat(CWD, &path, FileType::Fifo, 0o600.into(), 0).unwrap();
    path
}
