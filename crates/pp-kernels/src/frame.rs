//! Borrowed views of frames: where decoded video enters and leaves, without a copy.

use std::ops::{Deref, Range};

use crate::config::Bits;
use crate::stage::FrameGeometry;

/// One plane of samples in `D`. Row `y` starts at `data[y * stride]`; a sample of two bytes begins at an even address.
#[derive(Debug, Clone, Copy, Default)]
pub struct Plane<D> {
    data: D,
    stride: usize,
    width: usize,
    height: usize,
    bits: Bits,
}

/// One plane to read.
pub type PlaneView<'a> = Plane<&'a [u8]>;
/// One plane to write.
pub type PlaneViewMut<'a> = Plane<&'a mut [u8]>;

impl<D: Deref<Target = [u8]>> Plane<D> {
    /// A plane of 8 bits a sample. `None` where `data` is too short for `height` rows, or the rows overlap.
    #[must_use]
    pub fn new(data: D, stride: usize, width: usize, height: usize) -> Option<Self> {
        Self::with_bits(data, stride, (width, height), Bits::Eight)
    }

    /// A plane of so many bits a sample. `None` where `data` is too short for all rows of `stride` bytes, the rows overlap, or
    /// samples of two bytes begin at an odd address.
    #[must_use]
    pub fn with_bits(
        data: D,
        stride: usize,
        (width, height): (usize, usize),
        bits: Bits,
    ) -> Option<Self> {
        let even = bits == Bits::Eight || (data.as_ptr().addr() | stride).is_multiple_of(2);
        let row_bytes = width.checked_mul(bits.bytes())?;
        let fits = height == 0 || (even && fits(data.len(), stride, row_bytes, height));
        fits.then_some(Plane {
            data,
            stride,
            width,
            height,
            bits,
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

    /// Bits of a sample.
    #[must_use]
    pub fn bits(&self) -> Bits {
        self.bits
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
        start..start + self.width * self.bits.bytes()
    }
}

impl<'a> PlaneView<'a> {
    /// The bytes of row `y`, one or two for each sample.
    ///
    /// # Panics
    /// When `y` is not below the height.
    #[must_use]
    pub fn row(&self, y: usize) -> &'a [u8] {
        &self.data[self.range(y)]
    }

    /// The samples of row `y`.
    ///
    /// # Panics
    /// When `y` is not below the height.
    pub fn samples(&self, y: usize) -> impl Iterator<Item = u16> + 'a {
        let sample = |bytes: &[u8]| match *bytes {
            [low, high] => u16::from_le_bytes([low, high]),
            [byte] => byte.into(),
            _ => 0,
        };
        self.row(y).chunks_exact(self.bits.bytes()).map(sample)
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.data.as_ptr()
    }
}

impl PlaneViewMut<'_> {
    /// The bytes of row `y`, one or two for each sample.
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

fn fits(len: usize, stride: usize, row_bytes: usize, height: usize) -> bool {
    stride >= row_bytes
        && (height - 1)
            .checked_mul(stride)
            .and_then(|start| start.checked_add(row_bytes))
            .is_some_and(|end| end <= len)
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
    pub fn packed(data: &'a [u8], geometry: &FrameGeometry) -> Option<Self> {
        let mut rest = data;
        let take = |bytes| rest.split_off(..bytes);
        let frame = spread(take, 0, geometry)?;
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
    pub fn packed(data: &'a mut [u8], geometry: &FrameGeometry) -> Option<Self> {
        let mut rest = data;
        let take = |bytes| rest.split_off_mut(..bytes);
        let frame = spread(take, 0, geometry)?;
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

/// The frame of planes that `take` gives, each of so many bytes, with room for `pad` samples between two rows.
pub(crate) fn spread<D: Default + Deref<Target = [u8]>>(
    mut take: impl FnMut(usize) -> Option<D>,
    pad: usize,
    geometry: &FrameGeometry,
) -> Option<Frame<Plane<D>>> {
    let mut frame = Frame::<Plane<D>>::default();
    let (bits, planes) = (geometry.bits, geometry.chroma.planes());
    for (index, plane) in frame.planes.iter_mut().enumerate().take(planes) {
        let (w, h) = geometry.plane_size(index);
        let (w, h) = (w as usize, h as usize);
        let stride = (w + pad) * bits.bytes();
        let data = take(stride * h - pad * bits.bytes())?;
        *plane = Plane::with_bits(data, stride, (w, h), bits)?;
    }
    Some(frame)
}
