//! Guard bytes: how a write past the end of a tensor is found.
//!
//! Kernels get raw pointers into a slot. Before a call every byte that lies between two tensors is zeroed (so that a
//! payload is the same byte for byte, run after run) and the bytes behind the payload are filled with a pattern; after
//! it, both must be what they were. A write further away than [`GUARD_BYTES`] is not found.

use std::ops::Range;

use pp_contract::{Manifest, TensorSpec};

/// Bytes that a slot should have behind its payload.
pub const GUARD_BYTES: usize = 256;

/// Fills `tail` with the pattern.
pub fn arm(tail: &mut [u8]) {
    for (index, byte) in tail.iter_mut().enumerate() {
        *byte = pattern(index);
    }
}

/// The index of the first byte of `tail` that is no longer the pattern.
#[must_use]
pub fn first_changed(tail: &[u8]) -> Option<usize> {
    tail.iter().enumerate().position(|(i, b)| *b != pattern(i))
}

/// No two neighbours alike, and none of the values that code writes by accident (0, 255).
fn pattern(index: usize) -> u8 {
    0xA5 ^ (index as u8 & 0x1F)
}

/// Zeroes the bytes between the tensors of a payload.
pub(crate) fn zero_gaps(tensors: &Manifest, data: &mut [u8]) {
    for (_, gap) in gaps(tensors) {
        data[gap].fill(0);
    }
}

/// The tensor in front of the first gap that is not zero.
pub(crate) fn first_overrun<'a>(tensors: &'a Manifest, data: &[u8]) -> Option<&'a TensorSpec> {
    let is_changed = |gap: &Range<usize>| data[gap.clone()].iter().any(|b| *b != 0);
    gaps(tensors).find_map(|(spec, gap)| is_changed(&gap).then_some(spec))
}

fn gaps(tensors: &Manifest) -> impl Iterator<Item = (&TensorSpec, Range<usize>)> {
    let next = tensors.iter().skip(1);
    tensors.iter().zip(next).map(|((at, spec), (next, _))| {
        let end = at + spec.bytes();
        (spec, end as usize..next as usize)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_changed_guard_byte_is_found() {
        for index in 0..GUARD_BYTES {
            for value in [0u8, 1, 127, 255] {
                let mut tail = [0; GUARD_BYTES];
                arm(&mut tail);
                assert_eq!(first_changed(&tail), None);
                tail[index] = value;
                assert_eq!(first_changed(&tail), Some(index), "value {value}");
            }
        }
    }
}
