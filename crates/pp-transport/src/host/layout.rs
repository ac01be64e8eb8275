//! Where everything lies in the region that two ranks of one host share.
//!
//! Both sides compute the layout from what the handshake agreed; nothing of it is read from the
//! region, so a peer cannot move anything.

use super::ring::RingWords;
use super::slots::SlotWord;
use crate::error::TransportError;

/// The most slots an edge may have.
pub const MAX_SLOTS: u32 = 128;
/// Bytes of header ring in each direction; holds three frames of the largest size.
const RING_BYTES: usize = 256 * 1024;
const PAGE: usize = 4096;

/// Depth and size of one directed edge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EdgeShape {
    /// Number of slots, 1 to [`MAX_SLOTS`].
    pub depth: u32,
    /// Bytes in each slot; may be 0 for an edge that carries headers alone.
    pub slot_bytes: u64,
}

/// The offsets of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Direction {
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

/// The whole region: the direction from the lower rank to the higher, then the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) up: Direction,
    pub(crate) down: Direction,
    pub(crate) len: usize,
}

impl Layout {
    pub(crate) fn new(up: EdgeShape, down: EdgeShape) -> Result<Self, TransportError> {
        let mut end = 0;
        let up = direction(up, &mut end)?;
        let down = direction(down, &mut end)?;
        Ok(Self { up, down, len: end })
    }
}

fn direction(shape: EdgeShape, end: &mut usize) -> Result<Direction, TransportError> {
    let bad = || TransportError::BadShape {
        depth: shape.depth,
        slot_bytes: shape.slot_bytes,
        max_slots: MAX_SLOTS,
    };
    if !(1..=MAX_SLOTS).contains(&shape.depth) {
        return Err(bad());
    }
    let depth = shape.depth as usize;
    let slot_bytes = usize::try_from(shape.slot_bytes).map_err(|_| bad())?;
    let stride = slot_bytes.checked_next_multiple_of(PAGE).ok_or_else(bad)?;
    let mut place = |bytes: usize| -> Option<usize> {
        let at = *end;
        *end = at.checked_add(bytes)?.checked_next_multiple_of(PAGE)?;
        isize::try_from(*end).ok()?;
        Some(at)
    };
    let mut place = |bytes: Option<usize>| bytes.and_then(&mut place).ok_or_else(bad);
    Ok(Direction {
        depth: shape.depth,
        slot_bytes,
        stride,
        ring_words: place(Some(size_of::<RingWords>()))?,
        slot_words: place(Some(depth * size_of::<SlotWord>()))?,
        ring_data: place(Some(RING_BYTES))?,
        ring_bytes: RING_BYTES,
        slots: place(stride.checked_mul(depth))?,
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
        let layout = Layout::new(shape(4, 5000), shape(1, 0)).unwrap();
        let mut ranges = Vec::new();
        for d in [layout.up, layout.down] {
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
    fn shapes_that_cannot_be_are_errors() {
        for bad in [
            shape(0, 1),
            shape(MAX_SLOTS + 1, 1),
            shape(1, u64::MAX),
            shape(64, 1 << 58),
        ] {
            assert!(Layout::new(bad, shape(1, 0)).is_err(), "{bad:?}");
            assert!(Layout::new(shape(1, 0), bad).is_err(), "{bad:?}");
        }
    }
}
