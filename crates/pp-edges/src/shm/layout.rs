//! The layout of the region that two ranks of one host share for all edges between them.
//!
//! Both sides compute the layout from the values agreed at the handshake. No part of it is read from the region, so a
//! peer cannot change it.

use pp_contract::MAX_FRAME_BYTES;

use crate::error::TransportError;
use pp_words::ring::RingWords;
use pp_words::slots::SlotWord;

/// The most slots an edge may have.
pub const MAX_SLOTS: u32 = 512;
/// Bytes of the largest frame in a header ring.
const FRAME_BYTES: usize = MAX_FRAME_BYTES + 16;
const PAGE: usize = 4096;

/// Depth and size of one directed edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EdgeShape {
    /// Number of slots, 1 to [`MAX_SLOTS`]. For an edge without slots: the most messages in flight.
    pub depth: u32,
    /// Bytes in each slot. 0 for an edge that carries headers alone and has no slots.
    pub slot_bytes: u64,
}

impl EdgeShape {
    /// Tells whether messages of this edge may have a payload.
    #[must_use]
    pub const fn has_payloads(self) -> bool {
        self.slot_bytes > 0
    }

    /// Returns the number of slots.
    pub const fn slots(self) -> u32 {
        if self.has_payloads() { self.depth } else { 0 }
    }

    /// Returns the bytes of all slots.
    pub const fn bytes(self) -> u64 {
        self.slot_bytes.saturating_mul(self.depth as u64)
    }

    /// Returns the bytes of a slot, after checking that the edge can be made.
    ///
    /// # Errors
    /// There are too many slots, or too few, or they do not fit the address space.
    pub fn capacity(self) -> Result<usize, TransportError> {
        Ok(direction(self, Holds::Slots, &mut 0)?.slot_bytes)
    }
}

/// One end of an edge between this rank and a peer, before the edge is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EdgeEnd {
    /// The number of the edge: the same on both ranks, and unique in the job.
    pub edge: u32,
    /// Number and size of its slots.
    pub shape: EdgeShape,
    /// Whether this rank sends.
    pub is_sender: bool,
}

/// Says which memory of its edges a region holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// Rings and slots, for ranks of one host.
    All,
    /// Rings alone, because the slots lie on devices.
    Rings,
    /// Slots alone, because the edge stays in this process.
    Slots,
}

/// The offsets of one edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Direction {
    pub(crate) depth: u32,
    pub(crate) slot_bytes: usize,
    pub(crate) ring_words: usize,
    pub(crate) slot_words: usize,
    pub(crate) ring_data: usize,
    pub(crate) ring_bytes: usize,
    pub(crate) slots: usize,
    /// Bytes from one slot to the next.
    pub(crate) stride: usize,
}

impl Direction {
    /// Returns the offset of a slot in the region, for an edge whose slots lie there.
    pub(crate) fn slot_at(&self, slot: u32) -> usize {
        assert!(slot < self.depth);
        self.slots + slot as usize * self.stride
    }
}

/// The layout of the whole region: its edges, in the order of their shapes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) edges: Vec<Direction>,
    pub(crate) len: usize,
}

impl Layout {
    pub(crate) fn new(
        shapes: impl IntoIterator<Item = EdgeShape>,
        holds: Holds,
    ) -> Result<Self, TransportError> {
        let mut end = 0;
        let edges = shapes
            .into_iter()
            .map(|shape| direction(shape, holds, &mut end));
        let edges = edges.collect::<Result<_, _>>()?;
        // A region may not be empty, so it has at least one page.
        Ok(Self {
            edges,
            len: end.max(PAGE),
        })
    }
}

/// Returns the bytes of the header ring of an edge with `depth` chunks in flight. A driver waits if a ring has no room
/// for the largest frame. Two rings that are both this full hold more frames than there are chunks, so two drivers
/// never wait for each other.
fn ring_bytes(depth: u32) -> usize {
    let frames = 1 + depth.clamp(4, MAX_SLOTS).div_ceil(2) as usize;
    (frames * FRAME_BYTES).next_power_of_two()
}

fn direction(shape: EdgeShape, holds: Holds, end: &mut usize) -> Result<Direction, TransportError> {
    let bad = || TransportError::BadShape {
        depth: shape.depth,
        slot_bytes: shape.slot_bytes,
        max_slots: MAX_SLOTS,
    };
    if shape.has_payloads() && !(1..=MAX_SLOTS).contains(&shape.depth) {
        return Err(bad());
    }
    let depth = shape.slots() as usize;
    let slot_bytes = usize::try_from(shape.slot_bytes).map_err(|_| bad())?;
    let stride = slot_bytes.checked_next_multiple_of(PAGE).ok_or_else(bad)?;
    let mut place = |is_here: bool, bytes: Option<usize>| -> Option<usize> {
        let at = *end;
        let bytes = if is_here { bytes? } else { 0 };
        *end = at.checked_add(bytes)?.checked_next_multiple_of(PAGE)?;
        isize::try_from(*end).ok()?;
        Some(at)
    };
    let mut place = |is_here, bytes| place(is_here, bytes).ok_or_else(bad);
    // Slots in other memory must fit the address space too.
    isize::try_from(stride.checked_mul(depth).ok_or_else(bad)?).map_err(|_| bad())?;
    let ring_bytes = ring_bytes(shape.depth);
    let (has_ring, has_slots) = (holds != Holds::Slots, holds != Holds::Rings);
    Ok(Direction {
        depth: shape.slots(),
        slot_bytes,
        stride,
        ring_words: place(has_ring, Some(size_of::<RingWords>()))?,
        slot_words: place(has_ring, Some(depth * size_of::<SlotWord>()))?,
        ring_data: place(has_ring, Some(ring_bytes))?,
        ring_bytes,
        slots: place(has_slots, stride.checked_mul(depth))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(depth: u32, slot_bytes: u64) -> EdgeShape {
        EdgeShape { depth, slot_bytes }
    }

    #[test]
    fn nothing_overlaps_and_slots_start_on_pages() {
        let shapes = [shape(4, 5000), shape(1, 0), shape(2, 64)];
        let layout = Layout::new(shapes, Holds::All).unwrap();
        assert_eq!(layout.edges[1].depth, 0, "headers alone need no slot");
        let mut ranges = Vec::new();
        for d in layout.edges {
            ranges.push(d.ring_words..d.ring_words + size_of::<RingWords>());
            ranges.push(d.slot_words..d.slot_words + d.depth as usize * size_of::<SlotWord>());
            ranges.push(d.ring_data..d.ring_data + d.ring_bytes);
            for i in 0..d.depth as usize {
                let start = d.slots + i * d.stride;
                assert_eq!(start % PAGE, 0);
                ranges.push(start..start + d.slot_bytes);
            }
        }
        ranges.sort_by_key(|r| (r.start, r.end));
        for pair in ranges.windows(2) {
            assert!(pair[0].end <= pair[1].start, "{pair:?} overlap");
        }
        assert!(ranges.iter().all(|r| r.end <= layout.len));
    }

    #[test]
    fn two_rings_are_never_full_of_the_largest_frames() {
        for depth in 1..=MAX_SLOTS {
            let layout = Layout::new([shape(depth, 0)], Holds::All).unwrap();
            let ring = layout.edges[0].ring_bytes;
            let largest = (8 + MAX_FRAME_BYTES).next_multiple_of(8);
            // As much as there can be before a sender waits.
            let full = ring - largest + 1;
            assert!(2 * full > depth as usize * largest, "{depth}");
        }
        assert_eq!(ring_bytes(4), 256 << 10);
    }

    #[test]
    fn shapes_that_cannot_be_are_errors() {
        for bad in [
            shape(0, 1),
            shape(MAX_SLOTS + 1, 1),
            shape(1, u64::MAX),
            shape(64, 1 << 58),
        ] {
            for holds in [Holds::All, Holds::Rings, Holds::Slots] {
                assert!(Layout::new([bad, shape(1, 0)], holds).is_err(), "{bad:?}");
                assert!(Layout::new([shape(1, 0), bad], holds).is_err(), "{bad:?}");
            }
        }
    }
}
