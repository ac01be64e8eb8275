//! Borrowed views of 8-bit frames: where decoded video enters and leaves, without a copy.

use std::ops::{Deref, Range};

use crate::config::Chroma;

/// One plane of samples in `D`. Row `y` starts at `data[y * stride]`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Plane<D> {
    data: D,
    stride: usize,
    width: usize,
    height: usize,
}

/// One plane to read.
pub type PlaneView<'a> = Plane<&'a [u8]>;
/// One plane to write.
pub type PlaneViewMut<'a> = Plane<&'a mut [u8]>;

impl<D: Deref<Target = [u8]>> Plane<D> {
    /// `None` where `data` is too short for `height` rows, or the rows overlap.
    #[must_use]
    pub fn new(data: D, stride: usize, width: usize, height: usize) -> Option<Self> {
        fits(data.len(), stride, width, height).then_some(Plane {
            data,
            stride,
            width,
            height,
        })
    }

    /// Samples in a row.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows.
    #[must_use]
    pub fn height(&self) -> usize {
        self.height
    }

    /// Bytes from one row to the next.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The bytes of row `y`.
    fn range(&self, y: usize) -> Range<usize> {
        assert!(y < self.height, "row {y} of {}", self.height);
        let start = y * self.stride;
        start..start + self.width
    }
}

impl<'a> PlaneView<'a> {
    /// The samples of row `y`.
    ///
    /// # Panics
    /// When `y` is not below the height.
    #[must_use]
    pub fn row(&self, y: usize) -> &'a [u8] {
        &self.data[self.range(y)]
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.data.as_ptr()
    }
}

impl PlaneViewMut<'_> {
    /// The samples of row `y`.
    ///
    /// # Panics
    /// When `y` is not below the height.
    pub fn row_mut(&mut self, y: usize) -> &mut [u8] {
        let range = self.range(y);
        &mut self.data[range]
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.data.as_mut_ptr()
    }
}

fn fits(len: usize, stride: usize, width: usize, height: usize) -> bool {
    stride >= width
        && match height.checked_sub(1) {
            None => true,
            Some(last) => last
                .checked_mul(stride)
                .and_then(|start| start.checked_add(width))
                .is_some_and(|end| end <= len),
        }
}

/// One frame: 1 plane (mono) or 3.
#[derive(Debug, Clone, Copy, Default)]
pub struct Frame<P> {
    planes: [P; 3],
}

/// One frame to read.
pub type FrameView<'a> = Frame<PlaneView<'a>>;
/// One frame to write.
pub type FrameViewMut<'a> = Frame<PlaneViewMut<'a>>;

impl<P> Frame<P> {
    /// A frame of the given planes; mono leaves the last two empty (`Plane::default()`).
    #[must_use]
    pub fn new(planes: [P; 3]) -> Self {
        Frame { planes }
    }
}

impl<'a> FrameView<'a> {
    /// A frame whose planes lie one after the other without gaps, as in Y4M.
    /// `None` where `data` has another length.
    #[must_use]
    pub fn packed(data: &'a [u8], width: u32, height: u32, chroma: Chroma) -> Option<Self> {
        let mut rest = data;
        let take = |bytes| rest.split_off(..bytes);
        let frame = spread(take, 0, width, height, chroma)?;
        rest.is_empty().then_some(frame)
    }

    /// Plane 0 is luma, 1 and 2 chroma.
    #[must_use]
    pub fn plane(&self, index: usize) -> PlaneView<'a> {
        self.planes[index]
    }
}

impl<'a> FrameViewMut<'a> {
    /// As [`FrameView::packed`].
    #[must_use]
    pub fn packed(data: &'a mut [u8], width: u32, height: u32, chroma: Chroma) -> Option<Self> {
        let mut rest = data;
        let take = |bytes| rest.split_off_mut(..bytes);
        let frame = spread(take, 0, width, height, chroma)?;
        rest.is_empty().then_some(frame)
    }

    /// Plane 0 is luma, 1 and 2 chroma.
    #[must_use]
    pub fn plane(&self, index: usize) -> &PlaneViewMut<'a> {
        &self.planes[index]
    }

    /// Plane 0 is luma, 1 and 2 chroma.
    pub fn plane_mut(&mut self, index: usize) -> &mut PlaneViewMut<'a> {
        &mut self.planes[index]
    }
}

/// The frame of planes that `take` gives, each of so many bytes, with `pad` bytes between two rows.
pub(crate) fn spread<D: Default + Deref<Target = [u8]>>(
    mut take: impl FnMut(usize) -> Option<D>,
    pad: usize,
    width: u32,
    height: u32,
    chroma: Chroma,
) -> Option<Frame<Plane<D>>> {
    let mut frame = Frame::<Plane<D>>::default();
    for (index, plane) in frame.planes.iter_mut().enumerate().take(chroma.planes()) {
        let (w, h) = chroma.plane_size(index, width, height);
        let (w, h) = (w as usize, h as usize);
        let stride = w + pad;
        *plane = Plane::new(take(stride * h - pad)?, stride, w, h)?;
    }
    Some(frame)
}

impl Chroma {
    /// Bytes of one frame whose planes lie without gaps.
    #[must_use]
    pub fn packed_frame_bytes(self, width: u32, height: u32) -> usize {
        (0..self.planes())
            .map(|index| {
                let (w, h) = self.plane_size(index, width, height);
                w as usize * h as usize
            })
            .sum()
    }
}
