//! The trial of edges at connect: each slot goes from its sender to its receiver once, with a pattern at both ends.
//!
//! Hazard: memory of another process may map, and a device may still reach other bytes than those that were sent.
//! Guarantee: an edge with a device at one end is used only after both ranks have seen the bytes of the other one.

use std::ops::Range;

use pp_contract::{Fault, FaultKind};

use crate::backend::{EdgeEnd, Peer, exchange};
use crate::lane::shared::SharedEnd;

/// Bytes of the pattern at each end of a slot.
const PATTERN: usize = 4096;
/// The operation of a fault while two ranks try their edges.
pub const WHAT: &str = "try edges";

/// A byte came as another one than was sent.
#[derive(Debug, thiserror::Error)]
#[error("byte {at} of slot {slot} of edge {edge} is not what was sent")]
pub struct Differs {
    /// The number of the edge.
    pub edge: u32,
    /// The slot.
    pub slot: u32,
    /// The offset of the byte in the slot.
    pub at: usize,
}

/// Returns the byte of the pattern at offset `at` of a slot.
#[must_use]
pub fn pattern(end: &EdgeEnd, slot: u32, at: usize) -> u8 {
    let place = at as u32 ^ slot.rotate_left(20) ^ end.edge.rotate_left(26);
    (place.wrapping_mul(0x9e37_79b1) >> 24) as u8
}

/// Returns the ranges of the two ends of a slot of `capacity` bytes. They may overlap.
#[must_use]
pub fn ends_of(capacity: usize) -> [Range<usize>; 2] {
    let len = capacity.min(PATTERN);
    [0..len, capacity - len..capacity]
}

/// Tries the edges between this rank, whose slots lie in host memory, and a rank whose device copies them. Each writes what
/// it sends, tells the other, and compares what it receives. No slot has an owner yet.
///
/// # Errors
/// The other rank is lost, or the edges do not work.
pub(crate) fn with_device(
    peer: &mut dyn Peer,
    edges: &[EdgeEnd],
    shared: &[SharedEnd],
) -> Result<(), Fault> {
    let ends = |is_sender: bool| {
        let all = edges.iter().zip(shared);
        all.filter(move |(end, _)| end.is_sender == is_sender)
    };
    ends(true).for_each(|(end, shared)| write(end, shared));
    let mut tried = exchange(peer, WHAT, Ok::<_, Differs>(()))?;
    if tried.is_ok() {
        let came = ends(false).try_for_each(|(end, shared)| compare(end, shared));
        tried = exchange(peer, WHAT, came)?;
    }
    tried.map_err(|why| Fault::new(FaultKind::Device, peer.own_rank(), WHAT, why))
}

/// Lists both ends of each slot of an edge, each with its address.
fn pieces(shared: &SharedEnd) -> impl Iterator<Item = (u32, Range<usize>, *mut u8)> {
    let ends = ends_of(shared.place.slot_bytes);
    let all = (0..shared.place.depth).flat_map(move |slot| ends.clone().map(|range| (slot, range)));
    all.map(|(slot, range)| {
        let at = shared.slot_at(slot) + range.start;
        let address = shared.region.bytes_at(at, range.len()).as_ptr();
        (slot, range, address)
    })
}

fn write(end: &EdgeEnd, shared: &SharedEnd) {
    for (slot, range, to) in pieces(shared) {
        let bytes: Vec<u8> = range.map(|at| pattern(end, slot, at)).collect();
        // SAFETY: the range lies in the region (`bytes_at` has checked it). No lease of the slot exists yet, and the other
        // rank reads it only after the next message.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }
}

fn compare(end: &EdgeEnd, shared: &SharedEnd) -> Result<(), Differs> {
    let (edge, mut bytes) = (end.edge, Vec::new());
    for (slot, range, from) in pieces(shared) {
        bytes.resize(range.len(), 0);
        // SAFETY: as in `write`; the other rank wrote the slot before its last message. A peer that writes on changes bytes
        // that are copied once and compared.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) }
        let mut came = bytes.iter().zip(range);
        if let Some((_, at)) = came.find(|(byte, at)| **byte != pattern(end, slot, *at)) {
            return Err(Differs { edge, slot, at });
        }
    }
    Ok(())
}
