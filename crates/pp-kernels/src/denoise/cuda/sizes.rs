//! What the kernels are told about frames: structures that cross by value, and the sizes that follow from them.
//!
//! Hazard: a launch passes raw bytes. So the structures mirror those of `kernels/geometry.cuh` and `kernels/attend.cu`,
//! and their sizes are asserted here and against the PTX.

use pp_device::LaunchConfig;

use crate::denoise::geometry::{Geometry, PATCH};
use crate::error::Failure;

/// One plane, as the kernels take it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PlaneArgument {
    width: i32,
    height: i32,
    tokens_x: i32,
    tokens_y: i32,
    first_token: i32,
    /// Where it begins in a packed frame of samples.
    offset: i32,
}

/// A frame, as the kernels take it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct GeometryArgument {
    pub(super) planes: i32,
    pub(super) tokens: i32,
    pub(super) plane: [PlaneArgument; 3],
}

/// One pass, as the kernels take it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct AttendArgument {
    pub(super) values: u64,
    pub(super) guides: u64,
    pub(super) out: u64,
    pub(super) sigma: u64,
    pub(super) step: u64,
    pub(super) noise_scale: f32,
    pub(super) bias: f32,
    pub(super) frames: i32,
    pub(super) context: i32,
    pub(super) context_at: [i32; 2],
    pub(super) slots: i32,
    pub(super) first_slot: i32,
    pub(super) last: i32,
    pub(super) reserved: i32,
    pub(super) geometry: GeometryArgument,
}

const _: () = {
    assert!(size_of::<PlaneArgument>() == 24);
    assert!(size_of::<GeometryArgument>() == 80);
    assert!(size_of::<AttendArgument>() == 160);
};

/// Samples around a plane in a scratch frame, both sides together; and bytes of scratch for each of its places.
pub(super) const SCRATCH_MARGIN: usize = 24;
pub(super) const SCRATCH_BYTES: usize = 8;
/// Places in a block that unfolds.
pub(super) const UNFOLD_TILE: [usize; 2] = [64, 64];
/// By how many patches blocks of the attention lie apart: they overlap by one.
pub(super) const TILE: [usize; 2] = [15, 23];
/// The sizes from which every launch follows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) argument: GeometryArgument,
    /// Bytes of the tokens of a frame.
    pub(super) token_bytes: usize,
    /// Bytes from one frame of samples to the next: those of a packed frame, rounded up so that every frame is aligned.
    pub(super) frame_stride: usize,
    /// Bytes of a scratch frame.
    pub(super) scratch_bytes: usize,
    /// Blocks that unfold all planes of a frame, and that attend to them.
    pub(super) unfold_tiles: u32,
    pub(super) attend_tiles: u32,
}

impl Sizes {
    pub(super) fn new(geometry: &Geometry) -> Result<Sizes, Failure> {
        let too_large =
            |_| Failure::unsupported("frames of this size are too large for the ptx kernels");
        let narrow = |number: usize| i32::try_from(number).map_err(too_large);
        let mut sizes = Sizes {
            argument: GeometryArgument {
                planes: narrow(geometry.planes.len())?,
                tokens: narrow(geometry.tokens)?,
                ..GeometryArgument::default()
            },
            token_bytes: geometry.frame_bytes(),
            frame_stride: 0,
            scratch_bytes: 0,
            unfold_tiles: 0,
            attend_tiles: 0,
        };
        let mut offset = 0;
        for (plane, argument) in geometry.planes.iter().zip(&mut sizes.argument.plane) {
            *argument = PlaneArgument {
                width: narrow(plane.width)?,
                height: narrow(plane.height)?,
                tokens_x: narrow(plane.tokens_x())?,
                tokens_y: narrow(plane.tokens_y())?,
                first_token: narrow(plane.first_token)?,
                offset: narrow(offset)?,
            };
            offset += plane.width * plane.height;
            let (width, height) = (
                plane.padded_width() + SCRATCH_MARGIN,
                plane.padded_height() + SCRATCH_MARGIN,
            );
            sizes.scratch_bytes += SCRATCH_BYTES * width * height;
            sizes.unfold_tiles +=
                (width.div_ceil(UNFOLD_TILE[0]) * height.div_ceil(UNFOLD_TILE[1])) as u32;
            let across = |tokens: usize, tile: usize| (2 * tokens - 2).div_ceil(tile).max(1);
            sizes.attend_tiles +=
                (across(plane.tokens_x(), TILE[0]) * across(plane.tokens_y(), TILE[1])) as u32;
        }
        sizes.frame_stride = offset.next_multiple_of(256);
        Ok(sizes)
    }

    /// A block of 256 threads for 256 rows of tokens.
    pub(super) fn rows(&self, frames: u32) -> LaunchConfig {
        let rows = u64::from(frames) * self.argument.tokens as u64 * PATCH as u64;
        LaunchConfig::line(rows.div_ceil(256) as u32, 256)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Chroma;

    #[test]
    fn sizes_of_720p_are_those_of_the_kernels() {
        let geometry = Geometry::new(1280, 720, Chroma::C420);
        let sizes = Sizes::new(&geometry).unwrap();
        assert_eq!(sizes.frame_stride, 1_382_400);
        assert_eq!(sizes.scratch_bytes, 11_841_024);
        assert_eq!(sizes.scratch_bytes % 256, 0);
        assert_eq!(sizes.argument.plane[2].offset, 1280 * 720 + 640 * 360);
        assert_eq!(sizes.unfold_tiles, 21 * 12 + 2 * 11 * 6);
        let tiles = |tx: u32, ty: u32| (2 * tx - 2).div_ceil(15) * (2 * ty - 2).div_ceil(23);
        assert_eq!(sizes.attend_tiles, tiles(160, 90) + 2 * tiles(80, 45));
        // The smallest frame has one token in each chroma plane, and a tile is needed for it.
        let smallest = Sizes::new(&Geometry::new(16, 16, Chroma::C420)).unwrap();
        assert_eq!(smallest.attend_tiles, 3);
    }

    #[test]
    fn frames_beyond_what_the_kernels_count_are_refused() {
        let geometry = Geometry::new(32_768, 32_768, Chroma::C444);
        assert!(Sizes::new(&geometry).is_err());
        assert!(Sizes::new(&Geometry::new(32_768, 32_768, Chroma::C420)).is_ok());
    }
}
