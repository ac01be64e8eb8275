//! Frames between page-locked host memory and the device, in as few copies as their planes allow.
//!
//! On the device the planes of a frame lie without gaps, and the frames `stride` bytes apart. Planes that lie so on the
//! host too, as they do in Y4M, become one copy: for the whole chunk where a frame is a multiple of 256 bytes, else for
//! each frame. A plane with a stride of its own becomes one copy of rows.

use std::ops::Deref;

use super::gpu::{Gpu, Rows};
use crate::error::Failure;
use crate::frame::{FrameView, FrameViewMut, Plane};

/// Frames on the device.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeviceFrames {
    pub(super) address: u64,
    /// Bytes from one frame to the next.
    pub(super) stride: usize,
    /// Planes of a frame.
    pub(super) planes: usize,
}

/// One plane in host memory.
#[derive(Debug, Clone, Copy)]
struct HostPlane {
    frame: usize,
    data: *mut u8,
    stride: usize,
    width: usize,
    height: usize,
}

impl HostPlane {
    fn of<D: Deref<Target = [u8]>>(frame: usize, data: *mut u8, plane: &Plane<D>) -> HostPlane {
        HostPlane {
            frame,
            data,
            stride: plane.stride(),
            width: plane.width(),
            height: plane.height(),
        }
    }
}

/// One copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    host: *mut u8,
    device: u64,
    rows: Rows,
}

/// Enqueues the copies of all planes of `frames` to the device.
///
/// # Safety
/// The device memory is large enough for all planes; it and the samples stay allocated until the stream has passed.
pub(super) unsafe fn upload(
    gpu: &impl Gpu,
    device: DeviceFrames,
    frames: &[FrameView<'_>],
) -> Result<(), Failure> {
    let planes = frames.iter().enumerate().flat_map(|(number, frame)| {
        (0..device.planes).map(move |index| {
            let plane = frame.plane(index);
            HostPlane::of(number, plane.as_ptr().cast_mut(), &plane)
        })
    });
    pieces(device, planes, |piece| {
        // SAFETY: the caller's duty; the pieces cover the planes and nothing else.
        unsafe { gpu.upload(piece.host, piece.rows, piece.device) }
    })
}

/// Enqueues the copies from the device to all planes of `frames`.
///
/// # Safety
/// As [`upload`].
pub(super) unsafe fn download(
    gpu: &impl Gpu,
    device: DeviceFrames,
    frames: &mut [FrameViewMut<'_>],
) -> Result<(), Failure> {
    let planes = frames.iter_mut().enumerate().flat_map(|(number, frame)| {
        (0..device.planes).map(move |index| {
            let plane = frame.plane_mut(index);
            HostPlane::of(number, plane.as_mut_ptr(), plane)
        })
    });
    pieces(device, planes, |piece| {
        // SAFETY: the caller's duty; the pieces cover the planes and nothing else.
        unsafe { gpu.download(piece.host, piece.rows, piece.device) }
    })
}

/// Cuts planes into copies: what lies without gaps on both sides is joined.
fn pieces<E>(
    frames: DeviceFrames,
    planes: impl Iterator<Item = HostPlane>,
    mut copy: impl FnMut(Piece) -> Result<(), E>,
) -> Result<(), E> {
    let mut joined: Option<Piece> = None;
    let (mut frame, mut device) = (0, frames.address);
    for plane in planes.filter(|plane| plane.width > 0 && plane.height > 0) {
        if plane.frame != frame {
            frame = plane.frame;
            device = frames.address + (frame * frames.stride) as u64;
        }
        let bytes = plane.width * plane.height;
        let is_packed = plane.stride == plane.width || plane.height == 1;
        let follows = |run: &Piece| {
            run.host.wrapping_add(run.rows.width) == plane.data
                && run.device + run.rows.width as u64 == device
        };
        match &mut joined {
            Some(run) if is_packed && follows(run) => {
                run.rows.width += bytes;
                run.rows.host_pitch = run.rows.width;
            }
            _ => {
                joined.take().map_or(Ok(()), &mut copy)?;
                // The driver refuses rows that are wider than their pitch.
                let (width, count, host_pitch) = if is_packed {
                    (bytes, 1, bytes)
                } else {
                    (plane.width, plane.height, plane.stride)
                };
                let piece = Piece {
                    host: plane.data,
                    device,
                    rows: Rows {
                        count,
                        width,
                        host_pitch,
                    },
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

    fn plane(frame: usize, at: usize, stride: usize, width: usize, height: usize) -> HostPlane {
        HostPlane {
            frame,
            data: std::ptr::without_provenance_mut(at),
            stride,
            width,
            height,
        }
    }

    /// Host and device address, width and rows of each copy.
    fn copies(stride: usize, planes: &[HostPlane]) -> Vec<(usize, u64, usize, usize)> {
        let device = DeviceFrames {
            address: 1000,
            stride,
            planes: 3,
        };
        let mut found = Vec::new();
        let Ok(()) = pieces(device, planes.iter().copied(), |piece| {
            found.push((
                piece.host.addr(),
                piece.device,
                piece.rows.width,
                piece.rows.count,
            ));
            Ok::<_, Infallible>(())
        });
        found
    }

    #[test]
    fn packed_planes_are_one_copy_and_others_are_rows() {
        let packed = [
            plane(0, 100, 6, 6, 4),
            plane(0, 124, 3, 3, 2),
            plane(0, 130, 3, 3, 2),
        ];
        assert_eq!(copies(36, &packed), [(100, 1000, 36, 1)]);

        let gap = [plane(0, 100, 6, 6, 4), plane(0, 125, 3, 3, 2)];
        assert_eq!(copies(36, &gap), [(100, 1000, 24, 1), (125, 1024, 6, 1)]);

        let strided = [
            plane(0, 100, 6, 6, 4),
            plane(0, 124, 8, 3, 2),
            plane(0, 140, 3, 3, 2),
            plane(0, 146, 9, 5, 1),
        ];
        let expected = [(100, 1000, 24, 1), (124, 1024, 3, 2), (140, 1030, 6 + 5, 1)];
        assert_eq!(copies(64, &strided), expected);
        assert_eq!(copies(64, &[plane(0, 0, 0, 0, 0)]), []);
    }

    #[test]
    fn frames_are_joined_only_where_the_device_has_no_gap_between_them() {
        let frames = [
            plane(0, 100, 6, 6, 4),
            plane(1, 124, 6, 6, 4),
            plane(2, 148, 6, 6, 4),
        ];
        assert_eq!(copies(24, &frames), [(100, 1000, 72, 1)]);
        assert_eq!(
            copies(32, &frames),
            [(100, 1000, 24, 1), (124, 1032, 24, 1), (148, 1064, 24, 1)]
        );
    }
}
