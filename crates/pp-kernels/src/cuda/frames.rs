//! Frames between page-locked host memory and the device, in as few copies as their planes allow.
//!
//! On the device the planes of a chunk lie without gaps, frame after frame. Planes that lie so on the host too, as they
//! do in Y4M, become one copy for the whole chunk; a plane with a stride of its own becomes one copy of rows.

use std::ffi::c_void;

use cudarc::driver::sys;

use super::driver::{CudaError, Stream};
use crate::frame::{FrameView, FrameViewMut};

/// One plane in host memory.
#[derive(Debug, Clone, Copy)]
struct HostPlane {
    data: *mut u8,
    stride: usize,
    width: usize,
    height: usize,
}

/// One copy: `rows` of `width` bytes, `stride` apart on the host and without gaps on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    host: *mut u8,
    device: u64,
    stride: usize,
    width: usize,
    rows: usize,
}

/// Enqueues the copies of all planes of `frames` to `device`.
///
/// # Safety
/// The device memory is large enough for all planes; it and the samples stay allocated until the stream has passed.
pub(super) unsafe fn upload(
    stream: Stream,
    device: u64,
    frames: &[FrameView<'_>],
    planes: usize,
) -> Result<(), CudaError> {
    let planes = frames.iter().flat_map(|frame| {
        (0..planes).map(|index| {
            let plane = frame.plane(index);
            HostPlane {
                data: plane.as_ptr().cast_mut(),
                stride: plane.stride(),
                width: plane.width(),
                height: plane.height(),
            }
        })
    });
    pieces(device, planes, |piece| {
        // SAFETY: the caller's duty; the pieces cover the planes and nothing else.
        unsafe {
            if piece.rows == 1 {
                stream.upload(piece.device, piece.host, piece.width)
            } else {
                stream.copy_rows(&sys::CUDA_MEMCPY2D {
                    srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
                    srcHost: piece.host.cast::<c_void>().cast_const(),
                    srcPitch: piece.stride,
                    dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
                    dstDevice: piece.device,
                    dstPitch: piece.width,
                    ..rows_of(piece)
                })
            }
        }
    })
}

/// Enqueues the copies from `device` to all planes of `frames`.
///
/// # Safety
/// As [`upload`].
pub(super) unsafe fn download(
    stream: Stream,
    device: u64,
    frames: &mut [FrameViewMut<'_>],
    planes: usize,
) -> Result<(), CudaError> {
    let planes = frames.iter_mut().flat_map(|frame| {
        (0..planes).map(|index| {
            let plane = frame.plane_mut(index);
            HostPlane {
                stride: plane.stride(),
                width: plane.width(),
                height: plane.height(),
                data: plane.as_mut_ptr(),
            }
        })
    });
    pieces(device, planes, |piece| {
        // SAFETY: the caller's duty; the pieces cover the planes and nothing else.
        unsafe {
            if piece.rows == 1 {
                stream.download(piece.host, piece.device, piece.width)
            } else {
                stream.copy_rows(&sys::CUDA_MEMCPY2D {
                    srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
                    srcDevice: piece.device,
                    srcPitch: piece.width,
                    dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
                    dstHost: piece.host.cast::<c_void>(),
                    dstPitch: piece.stride,
                    ..rows_of(piece)
                })
            }
        }
    })
}

fn rows_of(piece: Piece) -> sys::CUDA_MEMCPY2D {
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: std::ptr::null(),
        srcDevice: 0,
        srcArray: std::ptr::null_mut(),
        srcPitch: 0,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
        dstHost: std::ptr::null_mut(),
        dstDevice: 0,
        dstArray: std::ptr::null_mut(),
        dstPitch: 0,
        WidthInBytes: piece.width,
        Height: piece.rows,
    }
}

/// Cuts planes into copies: what lies without gaps on both sides is joined.
fn pieces<E>(
    mut device: u64,
    planes: impl Iterator<Item = HostPlane>,
    mut copy: impl FnMut(Piece) -> Result<(), E>,
) -> Result<(), E> {
    let mut joined: Option<Piece> = None;
    for plane in planes.filter(|plane| plane.width > 0 && plane.height > 0) {
        let bytes = plane.width * plane.height;
        let is_packed = plane.stride == plane.width || plane.height == 1;
        match &mut joined {
            Some(run) if is_packed && run.host.wrapping_add(run.width) == plane.data => {
                run.width += bytes;
            }
            _ => {
                joined.take().map_or(Ok(()), &mut copy)?;
                let (width, rows) = if is_packed {
                    (bytes, 1)
                } else {
                    (plane.width, plane.height)
                };
                let piece = Piece {
                    host: plane.data,
                    device,
                    stride: plane.stride,
                    width,
                    rows,
                };
                if is_packed {
                    joined = Some(piece);
                } else {
                    copy(piece)?;
                }
            }
        }
        device += bytes as u64;
    }
    joined.map_or(Ok(()), copy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn plane(at: usize, stride: usize, width: usize, height: usize) -> HostPlane {
        let data = std::ptr::without_provenance_mut(at);
        HostPlane {
            data,
            stride,
            width,
            height,
        }
    }

    /// Host and device address, width and rows of each copy.
    fn copies(planes: &[HostPlane]) -> Vec<(usize, u64, usize, usize)> {
        let mut found = Vec::new();
        let Ok(()) = pieces(1000, planes.iter().copied(), |piece| {
            found.push((piece.host.addr(), piece.device, piece.width, piece.rows));
            Ok::<_, Infallible>(())
        });
        found
    }

    #[test]
    fn packed_planes_are_one_copy_and_others_are_rows() {
        let packed = [
            plane(100, 6, 6, 4),
            plane(124, 3, 3, 2),
            plane(130, 3, 3, 2),
        ];
        assert_eq!(copies(&packed), [(100, 1000, 36, 1)]);

        let gap = [plane(100, 6, 6, 4), plane(125, 3, 3, 2)];
        assert_eq!(copies(&gap), [(100, 1000, 24, 1), (125, 1024, 6, 1)]);

        let strided = [
            plane(100, 6, 6, 4),
            plane(124, 8, 3, 2),
            plane(140, 3, 3, 2),
            plane(146, 9, 5, 1),
        ];
        let expected = [(100, 1000, 24, 1), (124, 1024, 3, 2), (140, 1030, 6 + 5, 1)];
        assert_eq!(copies(&strided), expected);
        assert_eq!(copies(&[plane(0, 0, 0, 0)]), []);
    }
}
