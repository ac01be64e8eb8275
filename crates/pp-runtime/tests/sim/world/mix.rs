//! A fast hash: most of a walk is hashing.

use std::hash::{Hash, Hasher};

/// Mixes what is written, a word at a time.
#[derive(Default)]
struct Mixer(u64);

impl Hasher for Mixer {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn write_u64(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
        self.0 = ((product >> 64) as u64 ^ product as u64).rotate_left(23);
    }

    fn write_u8(&mut self, word: u8) {
        self.write_u64(word.into());
    }

    fn write_u16(&mut self, word: u16) {
        self.write_u64(word.into());
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(word.into());
    }

    fn write_usize(&mut self, word: usize) {
        self.write_u64(word as u64);
    }
}

/// Enough of a state to know it again. In a walk of a million states the chance that two are mixed up is one in ten
/// million.
pub(crate) fn print_of<T: Hash>(state: &T) -> u64 {
    let mut hasher = Mixer::default();
    state.hash(&mut hasher);
    hasher.finish()
}
