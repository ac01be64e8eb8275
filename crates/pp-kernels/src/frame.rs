//! Borrowed views of 8-bit frames: where decoded video enters and leaves, without a copy.

use crate::config::Chroma;

/// One plane to read. Row `y` starts at `data[y * stride]`.
#[derive(Debug, Clone, Copy, Default)]
pub struct PlaneView<'a> {
    data: &'a [u8],
    stride: usize,
    width: usize,
    height: usize,
}

impl<'a> PlaneView<'a> {
    /// `None` where `data` is too short for `height` rows, or the rows overlap.
    #[must_use]
    pub fn new(data: &'a [u8], stride: usize, width: usize, height: usize) -> Option<Self> {
        fits(data.len(), stride, width, height).then_some(PlaneView {
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

    /// The samples of row `y`.
    ///
    /// # Panics
    /// When `y` is not below the height.
    #[must_use]
    pub fn row(&self, y: usize) -> &'a [u8] {
        assert!(y < self.height, "row {y} of {}", self.height);
        &self.data[y * self.stride..][..self.width]
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.data.as_ptr()
    }
}

/// One plane to write.
#[derive(Debug, Default)]
pub struct PlaneViewMut<'a> {
    data: &'a mut [u8],
    stride: usize,
    width: usize,
    height: usize,
}

impl<'a> PlaneViewMut<'a> {
    /// `None` where `data` is too short for `height` rows, or the rows overlap.
    #[must_use]
    pub fn new(data: &'a mut [u8], stride: usize, width: usize, height: usize) -> Option<Self> {
        fits(data.len(), stride, width, height).then_some(PlaneViewMut {
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

    /// The samples of row `y`.
    ///
    /// # Panics
    /// When `y` is not below the height.
    pub fn row_mut(&mut self, y: usize) -> &mut [u8] {
        assert!(y < self.height, "row {y} of {}", self.height);
        &mut self.data[y * self.stride..][..self.width]
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

/// One frame to read: 1 plane (mono) or 3.
#[derive(Debug, Clone, Copy, Default)]
pub struct FrameView<'a> {
    planes: [PlaneView<'a>; 3],
}

impl<'a> FrameView<'a> {
    /// A frame of the given planes; mono leaves the last two empty (`PlaneView::default()`).
    #[must_use]
    pub fn new(planes: [PlaneView<'a>; 3]) -> Self {
        FrameView { planes }
    }

    /// A frame whose planes lie one after the other without gaps, as in Y4M.
    /// `None` where `data` has another length.
    #[must_use]
    pub fn packed(data: &'a [u8], width: u32, height: u32, chroma: Chroma) -> Option<Self> {
        let mut frame = FrameView::default();
        let mut rest = data;
        for (index, plane) in frame.planes.iter_mut().enumerate().take(chroma.planes()) {
            let (w, h) = chroma.plane_size(index, width, height);
            let (here, after) = rest.split_at_checked(w as usize * h as usize)?;
            *plane = PlaneView::new(here, w as usize, w as usize, h as usize)?;
            rest = after;
        }
        rest.is_empty().then_some(frame)
    }

    /// Plane 0 is luma, 1 and 2 chroma.
    #[must_use]
    pub fn plane(&self, index: usize) -> PlaneView<'a> {
        self.planes[index]
    }
}

/// One frame to write.
#[derive(Debug, Default)]
pub struct FrameViewMut<'a> {
    planes: [PlaneViewMut<'a>; 3],
}

impl<'a> FrameViewMut<'a> {
    /// A frame of the given planes; mono leaves the last two empty (`PlaneViewMut::default()`).
    #[must_use]
    pub fn new(planes: [PlaneViewMut<'a>; 3]) -> Self {
        FrameViewMut { planes }
    }

    /// A frame whose planes lie one after the other without gaps, as in Y4M.
    /// `None` where `data` has another length.
    #[must_use]
    pub fn packed(data: &'a mut [u8], width: u32, height: u32, chroma: Chroma) -> Option<Self> {
        let mut frame = FrameViewMut::default();
        let mut rest = data;
        for (index, plane) in frame.planes.iter_mut().enumerate().take(chroma.planes()) {
            let (w, h) = chroma.plane_size(index, width, height);
            let (here, after) = rest.split_at_mut_checked(w as usize * h as usize)?;
            *plane = PlaneViewMut::new(here, w as usize, w as usize, h as usize)?;
            rest = after;
        }
        rest.is_empty().then_some(frame)
    }

    /// Plane 0 is luma, 1 and 2 chroma.
    pub fn plane_mut(&mut self, index: usize) -> &mut PlaneViewMut<'a> {
        &mut self.planes[index]
    }

    /// Plane 0 is luma, 1 and 2 chroma.
    #[must_use]
    pub fn plane(&self, index: usize) -> &PlaneViewMut<'a> {
        &self.planes[index]
    }
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
