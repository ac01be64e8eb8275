//! Digests (XXH3, 64 bits) that catch ranks that drift apart. Not a defence against forgery.

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::manifest::Manifest;

/// Digest of `bytes`.
#[must_use]
pub fn digest(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// Digest of the tensors of a payload, in order, without the bytes between them, which mean
/// nothing. `None` when the payload is shorter than its manifest says.
#[must_use]
pub fn digest_payload(manifest: &Manifest, payload: &[u8]) -> Option<u64> {
    let mut state = Digest::new();
    for (_, spec) in manifest.iter() {
        state.update(payload.get(manifest.range(spec.name())?)?);
    }
    Some(state.finish())
}

/// A digest fed piece by piece; equal to [`digest`] of the pieces joined.
#[derive(Clone, Default)]
pub struct Digest(Xxh3);

impl Digest {
    /// The digest of nothing so far.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes in the next piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Digest of all pieces.
    #[must_use]
    pub fn finish(&self) -> u64 {
        self.0.digest()
    }
}

impl core::fmt::Debug for Digest {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Digest({:016x})", self.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, TensorSpec};

    #[test]
    fn digest_is_xxh3_of_64_bits() {
        // Known answers of the reference implementation in C, seed 0.
        let ramp: Vec<u8> = (0..2000u32).map(|i| (i * 7) as u8).collect();
        assert_eq!(digest(b""), 0x2d06_8005_38d3_94c2);
        assert_eq!(digest(b"pipeline"), 0x43f9_b3f4_cf11_e8a3);
        assert_eq!(digest(&ramp), 0xe4a1_12bb_ea53_08a7);
    }

    #[test]
    fn pieces_give_the_digest_of_the_whole() {
        let bytes: Vec<u8> = (0..2000u32).map(|i| (i * 7) as u8).collect();
        let mut pieces = Digest::new();
        for piece in bytes.chunks(77) {
            pieces.update(piece);
        }
        assert_eq!(pieces.finish(), digest(&bytes));
    }

    #[test]
    fn payload_digest_ignores_the_gaps_and_nothing_else() {
        let spec = |name, dims| TensorSpec::new(name, DType::U8, &[dims]).unwrap();
        let manifest = Manifest::new(&[spec("a", 3), spec("b", 2)]).unwrap();
        let mut payload = vec![1u8; 258];
        let before = digest_payload(&manifest, &payload).unwrap();
        payload[3] = 9;
        assert_eq!(digest_payload(&manifest, &payload), Some(before));
        payload[257] = 9;
        assert_ne!(digest_payload(&manifest, &payload), Some(before));
        assert_eq!(digest_payload(&manifest, &payload[..257]), None);
    }
}
