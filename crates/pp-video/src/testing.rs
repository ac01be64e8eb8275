//! What the tests of this module share: frames in files.

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
