//! Guard bytes: how a write past the end of a tensor is found.
//!
//! Kernels get raw pointers into a slot. Before a call every byte that lies between two tensors is zeroed (so that a
//! payload is the same byte for byte, run after run) and the bytes behind the payload are filled with a pattern; after
//! it, both must be what they were. A write further away than [`GUARD_BYTES`] is not found.

use pp_contract::{Manifest, TensorSpec};

/// Bytes that a slot should have behind its payload.
pub const GUARD_BYTES: usize = 256;

/// Fills `tail` with the pattern.
pub fn arm(tail: &mut [u8]) {
    for (index, byte) in tail.iter_mut().enumerate() {
        *byte = pattern(index);
    }
}

/// The first byte of `tail` that is no longer the pattern.
///
/// # Errors
/// Its index.
pub fn check(tail: &[u8]) -> Result<(), usize> {
    match tail.iter().enumerate().position(|(i, b)| *b != pattern(i)) {
        None => Ok(()),
        Some(index) => Err(index),
    }
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
pub(crate) fn check_gaps<'a>(tensors: &'a Manifest, data: &[u8]) -> Result<(), &'a TensorSpec> {
    match gaps(tensors).find(|(_, gap)| data[gap.clone()].iter().any(|b| *b != 0)) {
        None => Ok(()),
        Some((spec, _)) => Err(spec),
    }
}

fn gaps(tensors: &Manifest) -> impl Iterator<Item = (&TensorSpec, std::ops::Range<usize>)> {
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
                assert_eq!(check(&tail), Ok(()));
                tail[index] = value;
                assert_eq!(check(&tail), Err(index), "value {value}");
            }
        }
    }
}
