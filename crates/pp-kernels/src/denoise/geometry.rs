//! Sizes that everything else is derived from: planes, padded planes, tokens.

use crate::config::{Chroma, SessionConfig};

/// Side of a patch token in samples.
pub const PATCH: usize = 8;
/// Elements of a token.
pub const TOKEN: usize = PATCH * PATCH;

/// One plane of every frame of the session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlaneGeometry {
    /// Samples in a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
    /// Index of the plane's first token in the frame.
    pub first_token: usize,
}

impl PlaneGeometry {
    /// Tokens in a row of tokens.
    #[must_use]
    pub fn tokens_x(&self) -> usize {
        self.width.div_ceil(PATCH)
    }

    /// Rows of tokens.
    #[must_use]
    pub fn tokens_y(&self) -> usize {
        self.height.div_ceil(PATCH)
    }

    /// Samples in a row, with the padding.
    #[must_use]
    pub fn padded_width(&self) -> usize {
        self.tokens_x() * PATCH
    }

    /// Rows, with the padding.
    #[must_use]
    pub fn padded_height(&self) -> usize {
        self.tokens_y() * PATCH
    }

    /// Tokens of the plane.
    #[must_use]
    pub fn tokens(&self) -> usize {
        self.tokens_x() * self.tokens_y()
    }
}

/// The planes of a frame and its number of tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Luma, then chroma.
    pub planes: Vec<PlaneGeometry>,
    /// Tokens of a frame: those of each plane in raster order, plane after plane.
    pub tokens: usize,
}

impl Geometry {
    /// The geometry of frames of this size.
    #[must_use]
    pub fn new(width: u32, height: u32, chroma: Chroma) -> Geometry {
        let mut tokens = 0;
        let planes = (0..chroma.planes())
            .map(|index| {
                let (width, height) = chroma.plane_size(index, width, height);
                let plane = PlaneGeometry {
                    width: width as usize,
                    height: height as usize,
                    first_token: tokens,
                };
                tokens += plane.tokens();
                plane
            })
            .collect();
        Geometry { planes, tokens }
    }

    /// The geometry of a session.
    #[must_use]
    pub fn of(config: &SessionConfig) -> Geometry {
        Geometry::new(config.width, config.height, config.chroma)
    }

    /// Bytes of one frame as tokens of two bytes a sample.
    #[must_use]
    pub fn frame_bytes(&self) -> usize {
        self.tokens * TOKEN * 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_of_720p_has_the_bytes_of_the_design() {
        let geometry = Geometry::new(1280, 720, Chroma::C420);
        assert_eq!(geometry.tokens, 14_400 + 2 * 3_600);
        assert_eq!(8 * geometry.frame_bytes(), 22_118_400);
    }

    #[test]
    fn odd_sizes_round_up_twice() {
        let geometry = Geometry::new(35, 17, Chroma::C420);
        let sizes: Vec<_> = geometry
            .planes
            .iter()
            .map(|p| (p.padded_width(), p.padded_height()))
            .collect();
        assert_eq!(sizes, [(40, 24), (24, 16), (24, 16)]);
        assert_eq!(geometry.planes[2].first_token, 15 + 6);
    }
}
