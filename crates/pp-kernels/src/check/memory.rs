//! Memory for a call, in which every byte that the call may touch is known.
//!
//! Hazard: kernels write where they should not, and read what is not theirs. So each payload and each plane lies between
//! guard bytes, a plane's rows lie apart, and host memory lies between pages that cannot be touched. After a call each
//! byte that it must leave alone is compared with what it was. Bytes that no call has written hold a value that the
//! check chooses: kernels whose results differ with that value read them, or do not write them.

use std::io;
use std::ops::{Deref, Range};
use std::ptr::{NonNull, null_mut};
use std::time::Duration;

use pp_contract::Manifest;
use pp_device::{Stream, StreamBuffer};

use super::outcome::{Outcome, fail};
use crate::cuda::Pinned;
use crate::frame::{Frame, FrameView, FrameViewMut, Plane, spread};
use crate::guard;
use crate::payload::{Payload, PayloadMut};
use crate::stage::FrameGeometry;

/// Guard bytes in front of each payload and plane, and behind the last.
const GUARD: usize = 16 << 10;
/// Room between two rows of a plane, in samples.
const PAD: usize = 13;
/// A multiple of the page size of every Linux.
const PAGES: usize = 64 << 10;

/// A payload, or the frames of a chunk.
pub(super) struct Guarded {
    home: Home,
    /// In their order.
    regions: Vec<Region>,
    /// The bytes before the call.
    before: Vec<u8>,
}

enum Home {
    Host(Pages),
    /// Frames for a device.
    Pinned(Pinned),
    /// A payload on a device, and what was last known of it.
    Device(StreamBuffer, Vec<u8>),
}

/// A tensor, which is one row, or a plane.
struct Region {
    name: String,
    rows: Vec<Range<usize>>,
}

impl Guarded {
    /// Makes a payload that begins with `content`. Its other bytes, and those around it, are `fill`; between tensors is zero.
    pub(super) fn payload(
        stream: Option<&Stream>,
        list: &Manifest,
        content: &[u8],
        fill: u8,
    ) -> Outcome<Guarded> {
        let bytes = list.payload_bytes() as usize;
        let mut before = vec![fill; bytes + 2 * GUARD];
        let payload = &mut before[GUARD..][..bytes];
        guard::zero_gaps(list, payload);
        payload[..content.len()].copy_from_slice(content);
        let regions = list.iter().map(|(offset, tensor)| {
            let start = GUARD + offset as usize;
            let row = start..start + tensor.bytes() as usize;
            Region {
                name: format!("tensor {}", tensor.name()),
                rows: std::iter::once(row).collect(),
            }
        });
        let home = match stream {
            None => Home::Host(Pages::with(&mut before)?),
            Some(stream) => {
                let memory = StreamBuffer::new(stream, before.len())?;
                memory.fill_with(before.clone())?;
                Home::Device(memory, before.clone())
            }
        };
        Ok(Guarded {
            home,
            regions: regions.collect(),
            before,
        })
    }

    /// Makes so many frames, of which `samples` are the first. Their other bytes, and those around their rows, are `fill`.
    pub(super) fn frames(
        stream: Option<&Stream>,
        geometry: &FrameGeometry,
        count: usize,
        samples: &[Vec<u8>],
        fill: u8,
    ) -> Outcome<Guarded> {
        let (mut regions, mut end) = (Vec::new(), 0);
        let (planes, sample) = (geometry.chroma.planes(), geometry.bits.bytes());
        for at in 0..count * planes {
            let (width, height) = geometry.plane_size(at % planes);
            let bytes = width as usize * sample;
            let starts = (0..height as usize).map(|y| end + GUARD + y * (bytes + PAD * sample));
            let rows: Vec<_> = starts.map(|start| start..start + bytes).collect();
            end = rows[rows.len() - 1].end;
            let name = format!("plane {} of frame {}", at % planes, at / planes);
            regions.push(Region { name, rows });
        }
        let mut before = vec![fill; end + GUARD];
        let samples = samples.concat();
        let mut samples = &samples[..];
        for row in regions.iter().flat_map(|region| region.rows.clone()) {
            if let Some(samples) = samples.split_off(..row.len()) {
                before[row].copy_from_slice(samples);
            }
        }
        let home = match stream {
            None => Home::Host(Pages::with(&mut before)?),
            Some(stream) => {
                let mut pinned = Pinned::new(stream, before.len())?;
                pinned.copy_from_slice(&before);
                Home::Pinned(pinned)
            }
        };
        Ok(Guarded {
            home,
            regions,
            before,
        })
    }

    /// Lends the payload to a call that reads it.
    pub(super) fn given(&self, list: &Manifest) -> Outcome<Payload<'_>> {
        let bytes = list.payload_bytes() as usize;
        Ok(match &self.home {
            Home::Device(memory, _) => {
                Payload::on_device(list, memory.address() + GUARD as u64, bytes)
            }
            home => Payload::new(list, &home.bytes()[GUARD..]),
        }?)
    }

    /// Lends the payload to a call that writes it.
    pub(super) fn taken(&mut self, list: &Manifest) -> Outcome<PayloadMut<'_>> {
        let bytes = list.payload_bytes() as usize;
        Ok(match &mut self.home {
            Home::Device(memory, _) => {
                PayloadMut::on_device(list, memory.address() + GUARD as u64, bytes)
            }
            home => PayloadMut::new(list, &mut home.bytes_mut()[GUARD..]),
        }?)
    }

    /// Lends the frames to a call that reads them.
    pub(super) fn views(&self, geometry: &FrameGeometry) -> Vec<FrameView<'_>> {
        let (count, mut rest) = (self.regions.len(), self.home.bytes());
        frames(count, geometry, |bytes| rest.split_off(..bytes))
    }

    /// Lends the frames to a call that writes them.
    pub(super) fn views_mut(&mut self, geometry: &FrameGeometry) -> Vec<FrameViewMut<'_>> {
        let (count, mut rest) = (self.regions.len(), self.home.bytes_mut());
        frames(count, geometry, |bytes| rest.split_off_mut(..bytes))
    }

    /// Spoils the memory on a device, and enqueues a copy that mends it; gives the memory that the copy reads.
    pub(super) fn arrive_late(&self, stream: &Stream) -> Outcome<Option<StreamBuffer>> {
        let Home::Device(memory, image) = &self.home else {
            return Ok(None);
        };
        let kept = StreamBuffer::new(stream, image.len())?;
        kept.fill_with(image.clone())?;
        // SAFETY: both are this check's, and used in the order of the stream, which frees the one behind the copy.
        unsafe {
            stream.fill(memory.ptr(), 0x5A)?;
            stream.wait_until_idle(Duration::MAX)?;
            stream.copy(kept.ptr(), memory.ptr())?;
        }
        Ok(Some(kept))
    }

    /// Gives the payload that `stage` wrote, if it wrote nothing else.
    pub(super) fn payload_of(&mut self, stage: &str, list: &Manifest) -> Outcome<Vec<u8>> {
        self.check_written(stage)?;
        Ok(self.before[GUARD..][..list.payload_bytes() as usize].to_vec())
    }

    /// Gives the frames that `stage` wrote, if it wrote nothing else.
    pub(super) fn frames_of(
        &mut self,
        stage: &str,
        geometry: &FrameGeometry,
    ) -> Outcome<Vec<Vec<u8>>> {
        self.check_written(stage)?;
        let frames = self.regions.chunks(geometry.chroma.planes());
        let samples = |planes: &[Region]| {
            let rows = planes.iter().flat_map(|plane| &plane.rows);
            rows.flat_map(|row| &self.before[row.clone()])
                .copied()
                .collect()
        };
        Ok(frames.map(samples).collect())
    }

    /// Fails if `stage` wrote anything outside of the tensors or planes; what it wrote is known from now on.
    fn check_written(&mut self, stage: &str) -> Outcome {
        self.home.read()?;
        for row in self.regions.iter().flat_map(|region| &region.rows) {
            self.before[row.clone()].copy_from_slice(&self.home.bytes()[row.clone()]);
        }
        self.check_unchanged(stage)
    }

    /// Fails if `stage` wrote anything at all.
    pub(super) fn check_unchanged(&mut self, stage: &str) -> Outcome {
        self.home.read()?;
        let now = self.home.bytes();
        if *now == *self.before {
            return Ok(());
        }
        let pairs = self.before.iter().zip(now).enumerate();
        let mut changed = pairs.filter_map(|(at, (before, now))| (before != now).then_some(at));
        let place = self.place(changed.next().unwrap_or(0));
        let count = 1 + changed.count();
        fail(format!("{stage} wrote {place} (bytes changed: {count})"))
    }

    /// Says where a byte lies.
    fn place(&self, at: usize) -> String {
        let Some(first) = self.regions.first() else {
            return "around a payload without tensors".into();
        };
        let starts_before = |region: &&Region| region.rows[0].start <= at;
        let Some(Region { name, rows }) = self.regions.iter().rfind(starts_before) else {
            return format!("in front of {}", first.name);
        };
        if rows.iter().any(|row| row.contains(&at)) {
            format!("into {name}, which it may only read")
        } else if rows[rows.len() - 1].end > at {
            format!("between the rows of {name}")
        } else {
            format!("behind {name}")
        }
    }
}

/// Gives the frames whose planes lie in these bytes, so many planes in all.
fn frames<D: Default + Deref<Target = [u8]>>(
    planes: usize,
    geometry: &FrameGeometry,
    mut split_off: impl FnMut(usize) -> Option<D>,
) -> Vec<Frame<Plane<D>>> {
    let mut take = |bytes| split_off(GUARD).and_then(|_| split_off(bytes));
    let frames = (0..planes / geometry.chroma.planes()).map(|_| spread(&mut take, PAD, geometry));
    frames.flatten().collect()
}

impl Home {
    fn bytes(&self) -> &[u8] {
        match self {
            Home::Host(pages) => pages.bytes(),
            Home::Pinned(pinned) => pinned,
            Home::Device(_, image) => image,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Home::Host(pages) => pages.bytes_mut(),
            Home::Pinned(pinned) => pinned,
            Home::Device(_, image) => image,
        }
    }

    /// Reads the memory of a device.
    fn read(&mut self) -> Outcome {
        if let Home::Device(memory, image) = self {
            *image = memory.read(Duration::MAX)?;
        }
        Ok(())
    }
}

/// Counts the bytes that the allocator of the C library has given out; 0 if it does not say.
pub(super) fn allocated() -> usize {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: it reads counters of the C library.
        let counters = unsafe { libc::mallinfo2() };
        counters.uordblks + counters.hblkhd
    }
    #[cfg(not(target_env = "gnu"))]
    0
}

/// Host memory between pages that cannot be touched.
struct Pages {
    start: NonNull<u8>,
    len: usize,
}

impl Pages {
    /// Makes memory that holds `image`, which is first filled up to whole pages with zeros.
    fn with(image: &mut Vec<u8>) -> io::Result<Pages> {
        let len = image.len().next_multiple_of(PAGES);
        image.resize(len, 0);
        let (access, kind) = (libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new memory at an address that the kernel chooses.
        let whole = unsafe { libc::mmap(null_mut(), len + 2 * PAGES, access, kind, -1, 0) };
        let start = NonNull::new(whole.cast::<u8>().wrapping_add(PAGES));
        let Some(start) = start.filter(|_| whole != libc::MAP_FAILED) else {
            return Err(io::Error::last_os_error());
        };
        let mut pages = Pages { start, len };
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the pages between the first and the last of the mapping, which nothing uses yet.
        if unsafe { libc::mprotect(start.as_ptr().cast(), len, access) } != 0 {
            return Err(io::Error::last_os_error());
        }
        pages.bytes_mut().copy_from_slice(image);
        Ok(pages)
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the pages that `with` made readable; kernels that they are lent to use them during a call alone.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let whole = self.start.as_ptr().wrapping_sub(PAGES);
        // SAFETY: the mapping of `with`, which nothing borrows any more.
        unsafe { libc::munmap(whole.cast(), self.len + 2 * PAGES) };
    }
}
