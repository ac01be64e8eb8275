//! A ring of records that any thread reads while others write it, and that no thread waits for.
//!
//! Hazard: a reader asks what a rank was doing because a thread of it is stuck, perhaps in the
//! middle of a record; and a reader must not take half of an old record for half of a new one.
//! Guarantee: no call waits for another thread. A record is read whole or not at all: a version
//! around its words tells (a sequence lock), and the words are atomics, so a race is a wrong value
//! that is noticed and never undefined.
//!
//! Choices: a slot that is being written is left alone by other writers, who drop what they had to
//! say, and by readers, after a few tries. With one writer, as a driver is, nothing is dropped.

use crate::sync::{AtomicU64, Ordering, fence};

/// Words of a record. The first is the ring's own: the record's number, plus one.
#[cfg(not(loom))]
pub const WORDS: usize = 14;
/// As few as can be torn: a model walks through every value that each of them may have.
#[cfg(loom)]
pub const WORDS: usize = 3;
/// The words of one record.
pub type Words = [u64; WORDS];

/// Where the number of a record stands.
const NUMBER: usize = 0;
/// Looks at a slot that is being written before a reader gives up.
const TRIES: usize = if cfg!(loom) { 1 } else { 16 };

/// Two cache lines: the version is odd while the words change.
#[derive(Debug)]
#[repr(align(64))]
struct Slot {
    version: AtomicU64,
    words: [AtomicU64; WORDS],
}

/// The latest records, as many as there are slots.
#[derive(Debug)]
pub struct Ring {
    slots: Box<[Slot]>,
    /// Records ever begun, which is the number of the next.
    begun: AtomicU64,
}

impl Ring {
    /// A ring with room for so many records, at least one.
    pub fn new(records: usize) -> Self {
        let slot = |_| Slot {
            version: AtomicU64::new(0),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        };
        Self {
            slots: (0..records.max(1)).map(slot).collect(),
            begun: AtomicU64::new(0),
        }
    }

    /// Records that it keeps.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Records ever begun.
    pub fn begun(&self) -> u64 {
        self.begun.load(Ordering::Acquire)
    }

    /// Writes a record, over the oldest one; gives its number. The first word is not looked at.
    pub fn append(&self, words: &Words) -> u64 {
        let number = self.begun.fetch_add(1, Ordering::AcqRel);
        self.change(number, |kept, place| {
            // A thread that is late does not write over a record that is younger than its own.
            if kept > number {
                return;
            }
            place[NUMBER].store(number + 1, Ordering::Relaxed);
            for (place, word) in place.iter().zip(words).skip(NUMBER + 1) {
                place.store(*word, Ordering::Relaxed);
            }
        });
        number
    }

    /// Changes some words of a record, by their places, unless it is no longer kept.
    pub fn amend(&self, number: u64, changes: impl IntoIterator<Item = (usize, u64)>) {
        self.change(number, |kept, place| {
            if kept == number + 1 {
                for (at, word) in changes {
                    place[at].store(word, Ordering::Relaxed);
                }
            }
        });
    }

    fn slot(&self, number: u64) -> &Slot {
        &self.slots[(number % self.slots.len() as u64) as usize]
    }

    /// Gives `change` the number that the slot holds now (plus one) and its words, unless another
    /// thread is at them.
    fn change(&self, number: u64, change: impl FnOnce(u64, &[AtomicU64; WORDS])) {
        let Slot { version, words } = self.slot(number);
        let before = version.load(Ordering::Relaxed);
        let taken = before % 2 == 0
            && version
                .compare_exchange(before, before + 1, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        if !taken {
            return;
        }
        // Before any of the words: a reader that sees one of them sees the odd version too.
        fence(Ordering::Release);
        change(words[NUMBER].load(Ordering::Relaxed), words);
        version.store(before + 2, Ordering::Release);
    }

    /// The words of a record, if it is still kept and no thread writes it.
    pub fn read(&self, number: u64) -> Option<Words> {
        let Slot { version, words } = self.slot(number);
        for _ in 0..TRIES {
            let before = version.load(Ordering::Acquire);
            let copy: Words = std::array::from_fn(|at| words[at].load(Ordering::Relaxed));
            // After all of the words: what was read of a change shows in the version.
            fence(Ordering::Acquire);
            if before % 2 == 0 && version.load(Ordering::Relaxed) == before {
                return (copy[NUMBER] == number + 1).then_some(copy);
            }
        }
        None
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// A record that can be told from a torn one: all its words say the same.
    fn words(value: u64) -> Words {
        [value; WORDS]
    }

    #[test]
    fn the_latest_records_are_kept_in_order() {
        let ring = Ring::new(3);
        assert_eq!((ring.begun(), ring.read(0)), (0, None));
        for value in 0..8 {
            assert_eq!(ring.append(&words(value * 10)), value);
        }
        let kept: Vec<_> = (0..9).map(|n| ring.read(n).map(|w| w[5])).collect();
        let none = [None; 5];
        assert_eq!(kept[..5], none);
        assert_eq!(kept[5..], [Some(50), Some(60), Some(70), None]);
    }

    #[test]
    fn an_amendment_reaches_its_record_and_never_a_younger_one() {
        let ring = Ring::new(2);
        let first = ring.append(&words(1));
        ring.amend(first, [(3, 33), (4, 44)]);
        let seen = ring.read(first).unwrap();
        assert_eq!((seen[2], seen[3], seen[4]), (1, 33, 44));
        ring.append(&words(2));
        let third = ring.append(&words(3));
        ring.amend(first, [(3, 99)]);
        assert_eq!(ring.read(third).unwrap()[3], 3);
        assert_eq!(ring.read(first), None);
    }

    #[test]
    fn a_slot_that_somebody_is_stuck_at_holds_nobody_up() {
        let ring = Ring::new(2);
        ring.append(&words(1));
        ring.slot(0).version.fetch_add(1, Ordering::Relaxed);
        assert_eq!(ring.read(0), None);
        ring.amend(0, [(3, 9)]);
        ring.append(&words(2));
        ring.append(&words(3));
        assert_eq!(ring.read(1).unwrap()[5], 2);
        assert_eq!((ring.read(0), ring.read(2)), (None, None));
    }
}
