//! Patterns that go through the slots of an edge once, before the edge is used.

use std::ops::Range;
use std::time::Instant;

use pp_device::{CudaError, Device, Event, PinnedBuffer};

use super::part;
use super::slots::DeviceSlots;
use crate::times::{FREED_WITHIN, LOOK_EVERY, TRIED_WITHIN};
use pp_edges::backend::EdgeEnd;
use pp_edges::error::TransportError;
use pp_edges::trial::{Differs, ends_of, pattern};

/// A failure on one rank.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failed {
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(
        "{bytes} bytes of shared memory cannot be page-locked: {source}; raise the limit of locked memory (ulimit -l), or use --transport host"
    )]
    Unlocked { bytes: usize, source: CudaError },
    #[error("a payload did not arrive within {TRIED_WITHIN:?}")]
    Late,
    #[error(transparent)]
    Differs(#[from] Differs),
}

/// Lists both ends of each slot of an edge, each with its offset in the staging buffer.
fn pieces(slots: &DeviceSlots) -> impl Iterator<Item = (u32, Range<usize>, usize)> + use<> {
    let (slots, ends) = (slots.count(), ends_of(slots.capacity));
    let len = ends[0].len();
    let all = (0..slots).flat_map(move |slot| ends.clone().map(|range| (slot, range)));
    (0..)
        .step_by(len)
        .zip(all)
        .map(|(at, (slot, range))| (slot, range, at))
}

/// Allocates the host buffer that stages the ends of all slots.
fn staging(device: &Device, slots: &DeviceSlots) -> Result<PinnedBuffer, CudaError> {
    let bytes = pieces(slots).map(|(_, range, _)| range.len()).sum();
    PinnedBuffer::new(device, bytes)
}

/// Sends each slot of an edge once. The caller keeps the returned staging buffer until the transfers are done ([`wait`]).
pub(super) fn send(
    device: &Device,
    end: &EdgeEnd,
    slots: &DeviceSlots,
) -> Result<PinnedBuffer, TransportError> {
    let mut staging = staging(device, slots)?;
    for (slot, range, place) in pieces(slots) {
        for (byte, at) in staging.bytes_mut()[place..].iter_mut().zip(range) {
            *byte = pattern(end, slot, at);
        }
    }
    let stream = &slots.stream;
    let issued = pieces(slots).try_for_each(|(number, range, place)| {
        let slot = slots.slot(number);
        let to = part(slot.ptr(), range.start, range.len());
        slot.write_on(&mut None, stream, || {
            // SAFETY: the slot has no owner yet, and is freed only behind the event that is recorded behind this; the bytes
            // are freed only behind their use, which is noted below.
            Ok::<_, TransportError>(unsafe {
                stream.upload(&staging, place..place + range.len(), to)
            }?)
        })
    });
    // This runs after a failure too, since some of the work may have been issued.
    let noted = staging.used_by(stream);
    issued?;
    noted?;
    for slot in slots.iter() {
        // SAFETY: the slot has no owner yet, and neither has that of the receiver. What wrote it is on the same stream.
        unsafe { slot.put(slots.capacity, Some(stream), stream) }?;
    }
    Ok(staging)
}

/// Waits until the transfer of each slot of an edge is done.
pub(super) fn wait(slots: &DeviceSlots) -> Result<(), Failed> {
    let deadline = Instant::now() + TRIED_WITHIN;
    for slot in slots.iter() {
        while !slot.has_moved()? {
            if Instant::now() > deadline {
                return Err(Failed::Late);
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
    Ok(())
}

/// Receives each slot of an edge once, and compares its bytes. Returns an event behind the work that has read them.
pub(super) fn compare(
    device: &Device,
    end: &EdgeEnd,
    slots: &DeviceSlots,
) -> Result<Event, Failed> {
    for slot in slots.iter() {
        // SAFETY: the slot has no owner yet, and the sender has filled its own or is about to.
        unsafe { slot.fetch(slots.capacity) }?;
    }
    wait(slots)?;
    let (stream, passed) = (&slots.stream, Event::new(device)?);
    let mut staging = staging(device, slots)?;
    let issued = pieces(slots).try_for_each(|(number, range, place)| {
        let slot = slots.slot(number);
        let from = part(slot.ptr(), range.start, range.len());
        slot.write_on(&mut None, stream, || {
            // SAFETY: the sender has written the slot, as its number says, and it stays mapped until the event that is
            // recorded behind this is done; the bytes are looked at behind the copy, and freed only behind their use.
            Ok::<_, TransportError>(unsafe { stream.download(from, &mut staging, place) }?)
        })
    });
    // This runs after a failure too, since some of the work may have been issued.
    let noted = staging.used_by(stream);
    issued?;
    noted?;
    passed.record(stream)?;
    stream.wait_until_idle(TRIED_WITHIN)?;
    for (slot, range, place) in pieces(slots) {
        let mut bytes = staging.bytes()[place..].iter().zip(range);
        if let Some((_, at)) = bytes.find(|(byte, at)| **byte != pattern(end, slot, *at)) {
            let edge = end.edge;
            return Err(Differs { edge, slot, at }.into());
        }
    }
    free(staging);
    Ok(passed)
}

/// Frees a staging buffer before the first payload moves: the driver may hold up all work while it frees.
pub(super) fn free(staging: PinnedBuffer) {
    staging.free_within(FREED_WITHIN);
}
