//! Digests that catch ranks that drift apart. Not a defence against forgery.
//!
//! *Hazard.* A bit that flips on its way, a buffer that is written while it is sent, kernels that are not the same: the
//! output looks right for a while, and no rank can say where it began to be wrong.
//! *Guarantee.* [`tensor_digest`] is the same number for the same bytes wherever they lie.
//! *Choices.* XXH3 (64 bits, seed 0) over blocks of 4 KiB, then over the digests of the blocks, until one block is left.
//! So a GPU works on all blocks at once, and a processor streams through them; and as every block is filled up with
//! zeros, there is one length of input and one way through XXH3. Neither name, type nor shape goes in: the manifest has
//! those, and it is compared itself.

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::manifest::{MAX_TENSORS, Manifest};

/// Bytes of a block of [`tensor_digest`].
pub const DIGEST_BLOCK_BYTES: usize = 4096;
/// Bytes of one digest in a block of digests.
const DIGEST_BYTES: usize = 8;
/// Levels of digests above the blocks: 512 times as much fits with each, and three hold 512 GiB.
const LEVELS: usize = 3;

/// Digest of `bytes`.
#[must_use]
pub fn digest(bytes: &[u8]) -> u64 {
    xxh3_64(bytes)
}

/// Digest of one tensor, by its bytes.
///
/// The bytes are cut into blocks of [`DIGEST_BLOCK_BYTES`], the last one filled up with zeros; no bytes are one block of
/// zeros. The digests (XXH3) of the blocks, little endian, are the bytes of the next level. The digest of the level that
/// has one block is the result.
#[must_use]
pub fn tensor_digest(bytes: &[u8]) -> u64 {
    let (whole, rest) = bytes.as_chunks::<DIGEST_BLOCK_BYTES>();
    let mut tree = Tree::new();
    for block in whole {
        tree.push(xxh3_64(block));
    }
    if !rest.is_empty() || whole.is_empty() {
        let mut block = [0; DIGEST_BLOCK_BYTES];
        block[..rest.len()].copy_from_slice(rest);
        tree.push(xxh3_64(&block));
    }
    tree.finish()
}

/// The levels above the blocks, each as far as it is filled.
struct Tree {
    levels: [Level; LEVELS],
}

#[derive(Clone, Copy)]
struct Level {
    block: [u8; DIGEST_BLOCK_BYTES],
    filled: usize,
    /// The digests that it has had.
    count: u64,
    last: u64,
}

impl Tree {
    fn new() -> Self {
        let empty = Level {
            block: [0; DIGEST_BLOCK_BYTES],
            filled: 0,
            count: 0,
            last: 0,
        };
        Self {
            levels: [empty; LEVELS],
        }
    }

    /// Takes the digest of the next block of the lowest level.
    fn push(&mut self, digest: u64) {
        let mut digest = digest;
        for level in &mut self.levels {
            level.take(digest);
            if level.filled < DIGEST_BLOCK_BYTES {
                return;
            }
            digest = level.close();
        }
    }

    fn finish(mut self) -> u64 {
        let mut pushed = None;
        for level in &mut self.levels {
            if let Some(digest) = pushed.take() {
                level.take(digest);
            }
            if level.count <= 1 {
                return level.last;
            }
            if level.filled > 0 {
                pushed = Some(level.close());
            }
        }
        // More than a payload can hold.
        pushed.unwrap_or_default()
    }
}

impl Level {
    fn take(&mut self, digest: u64) {
        self.block[self.filled..][..DIGEST_BYTES].copy_from_slice(&digest.to_le_bytes());
        self.filled += DIGEST_BYTES;
        self.count += 1;
        self.last = digest;
    }

    /// The digest of the block, which begins again.
    fn close(&mut self) -> u64 {
        self.block[self.filled..].fill(0);
        self.filled = 0;
        xxh3_64(&self.block)
    }
}

/// Digests of the tensors of one payload, in their order.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Digests {
    values: [u64; MAX_TENSORS],
    len: usize,
}

impl Digests {
    /// Computes those of the tensors that `manifest` names. `None` when the payload is shorter than that says.
    #[must_use]
    pub fn of(manifest: &Manifest, payload: &[u8]) -> Option<Self> {
        let mut digests = Self::default();
        for (_, spec) in manifest.iter() {
            digests.push(tensor_digest(payload.get(manifest.range(spec.name())?)?));
        }
        Some(digests)
    }

    /// Those that `bytes` hold, little endian. `None` when that is not a whole number of them, or too many.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (values, []) = bytes.as_chunks() else {
            return None;
        };
        let mut digests = Self::default();
        if values.len() > MAX_TENSORS {
            return None;
        }
        for value in values {
            digests.push(u64::from_le_bytes(*value));
        }
        Some(digests)
    }

    /// Writes them into `to`, which has the room for exactly these; whether it has.
    #[must_use]
    pub fn write_to(&self, to: &mut [u8]) -> bool {
        let (places, []) = to.as_chunks_mut::<DIGEST_BYTES>() else {
            return false;
        };
        if places.len() != self.len {
            return false;
        }
        for (place, value) in places.iter_mut().zip(self.as_slice()) {
            *place = value.to_le_bytes();
        }
        true
    }

    /// The digests.
    #[must_use]
    pub fn as_slice(&self) -> &[u64] {
        &self.values[..self.len]
    }

    /// The first that differs; the end of the shorter one counts as a difference.
    #[must_use]
    pub fn first_difference(&self, other: &Self) -> Option<usize> {
        let both = self.as_slice().iter().zip(other.as_slice());
        let equal = both.take_while(|(a, b)| a == b).count();
        (equal < self.len.max(other.len)).then_some(equal)
    }

    /// One number for all: [`digest`] of their bytes, little endian.
    #[must_use]
    pub fn seal(&self) -> u64 {
        let mut bytes = [0; MAX_TENSORS * DIGEST_BYTES];
        let bytes = &mut bytes[..self.len * DIGEST_BYTES];
        let _ = self.write_to(bytes);
        digest(bytes)
    }

    fn push(&mut self, digest: u64) {
        self.values[self.len] = digest;
        self.len += 1;
    }
}

impl core::fmt::Debug for Digests {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let values = self.as_slice().iter();
        let texts = values.map(|value| format!("{value:016x}"));
        f.debug_list().entries(texts).finish()
    }
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

    /// `length` bytes without a pattern of a block's length.
    fn ramp(length: usize) -> Vec<u8> {
        let byte = |i: usize| (i as u32).wrapping_mul(2_654_435_761) >> 24;
        (0..length).map(|i| byte(i) as u8).collect()
    }

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

    /// The definition, word by word.
    fn by_definition(bytes: &[u8]) -> u64 {
        let mut padded = bytes.to_vec();
        padded.resize(bytes.len().max(1).next_multiple_of(4096), 0);
        let digests: Vec<u64> = padded.chunks(4096).map(digest).collect();
        match digests[..] {
            [only] => only,
            _ => {
                let bytes: Vec<u8> = digests.iter().flat_map(|d| d.to_le_bytes()).collect();
                by_definition(&bytes)
            }
        }
    }

    #[test]
    fn tensor_digest_is_as_defined_at_every_edge_of_a_level() {
        let level = 4096 * 512;
        let around = [0, 4096, 2 * 4096, level - 4096, level, 2 * level, 3 * level];
        let bytes = ramp(3 * level + 1);
        for edge in around {
            for length in edge.saturating_sub(1)..=(edge + 1).min(bytes.len()) {
                let bytes = &bytes[..length];
                assert_eq!(tensor_digest(bytes), by_definition(bytes), "{length} bytes");
            }
        }
    }

    #[test]
    fn three_levels_are_closed_in_order() {
        // As 512 GiB would: by their block digests alone.
        for blocks in [1u64, 511, 512, 513, 512 * 512, 512 * 512 + 1, 512 * 512 * 3] {
            let digests: Vec<u64> = (0..blocks).map(|n| n.wrapping_mul(0x9e37_79b9)).collect();
            let mut tree = Tree::new();
            digests.iter().for_each(|digest| tree.push(*digest));
            let bytes: Vec<u8> = digests.iter().flat_map(|d| d.to_le_bytes()).collect();
            let expected = match digests[..] {
                [only] => only,
                _ => by_definition(&bytes),
            };
            assert_eq!(tree.finish(), expected, "{blocks} blocks");
        }
    }

    #[test]
    fn tensor_digests_do_not_change() {
        for (length, expected) in GOLDEN {
            let found = tensor_digest(&ramp(length));
            assert_eq!(found, expected, "{length} bytes: {found:#018x}");
        }
    }

    /// Bytes of [`ramp`], and their digest, computed with the reference implementation of XXH3 in C.
    const GOLDEN: [(usize, u64); 7] = [
        (0, 0x93d7_6fe1_48c6_89ba),
        (1, 0x93d7_6fe1_48c6_89ba),
        (6, 0xf7bf_092d_18f7_34f3),
        (4096, 0x9bf6_7f8d_eff8_76ae),
        (4097, 0x9819_094f_a1c5_35cd),
        (100_000, 0x70ec_8c8d_2ead_941c),
        (2_097_153, 0x2f1c_23fb_fcb1_3a33),
    ];

    #[test]
    fn every_byte_counts_and_zeros_at_the_end_do_not() {
        let bytes = ramp(9000);
        for at in [0, 4095, 4096, 8191, 8192, 8999] {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert_ne!(tensor_digest(&other), tensor_digest(&bytes), "byte {at}");
        }
        let longer = [&bytes[..], &[0; 3]].concat();
        assert_eq!(tensor_digest(&longer), tensor_digest(&bytes));
    }

    #[test]
    fn digests_of_a_payload_ignore_the_gaps_and_nothing_else() {
        let spec = |name, dims| TensorSpec::new(name, DType::U8, &[dims]).unwrap();
        let manifest = Manifest::new(&[spec("a", 3), spec("b", 2)]).unwrap();
        let mut payload = vec![1u8; 258];
        let before = Digests::of(&manifest, &payload).unwrap();
        payload[3] = 9;
        assert_eq!(Digests::of(&manifest, &payload), Some(before));
        payload[257] = 9;
        let after = Digests::of(&manifest, &payload).unwrap();
        assert_eq!(before.first_difference(&after), Some(1));
        assert_ne!(before.seal(), after.seal());
        assert_eq!(Digests::of(&manifest, &payload[..257]), None);
    }

    #[test]
    fn digests_travel_as_little_endian_numbers() {
        let mut bytes = [0; 24];
        (bytes[0], bytes[8], bytes[23]) = (1, 2, 0x80);
        let digests = Digests::from_bytes(&bytes).unwrap();
        assert_eq!(digests.as_slice(), [1, 2, 1 << 63]);
        let mut again = [9; 24];
        assert!(digests.write_to(&mut again));
        assert_eq!(again, bytes);
        assert!(!digests.write_to(&mut [0; 16]));
        assert_eq!(Digests::from_bytes(&bytes[..23]), None);
        assert_eq!(Digests::from_bytes(&[0; 8 * 17]), None);
        let shorter = Digests::from_bytes(&bytes[..16]).unwrap();
        assert_eq!(digests.first_difference(&shorter), Some(2));
        assert_eq!(digests.first_difference(&digests), None);
    }
}
