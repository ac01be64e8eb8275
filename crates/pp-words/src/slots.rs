//! Who owns each slot of an edge, as a protocol of atomics.
//!
//! Hazard: two owners of one slot, in one process or across two. Guarantee: a slot is, at any
//! time, exactly one of: free at the producer, leased at the producer, with the consumer
//! (in flight or being read), or quarantined for good. Only a transition made here moves it.
//!
//! The word shared by both processes says on which side the slot is; it is the credit. The
//! producer's own bookkeeping (leased, in flight, dropped in flight) stays in its own memory,
//! where no peer can write it.

use pp_contract::Rank;

use crate::sync::{AtomicU32, Ordering};

/// The shared word of one slot, on a cache line of its own.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct SlotWord(AtomicU32);

// The state of a word that is zero, as fresh memory is.
const WITH_PRODUCER: u32 = 0;
const WITH_CONSUMER: u32 = 1;

/// Says whether the consumer has the slot. With the two below: for a lane whose peer cannot reach the
/// word, so that its messages move it.
pub fn is_with_consumer(word: &SlotWord) -> bool {
    word.0.load(Ordering::Acquire) == WITH_CONSUMER
}

/// The peer said that it handed the slot over.
pub fn move_to_consumer(word: &SlotWord) {
    word.0.store(WITH_CONSUMER, Ordering::Release);
}

/// The peer said that it gave the slot back.
pub fn move_to_producer(word: &SlotWord) {
    word.0.store(WITH_PRODUCER, Ordering::Release);
}

/// The shared words of an edge, wherever they lie.
pub trait SlotWords {
    fn depth(&self) -> u32;
    fn word(&self, slot: u32) -> &SlotWord;
}

/// Producer: may be leased.
const FREE: u32 = 0;
/// Producer: a lease exists.
const LEASED: u32 = 1;
/// Producer: handed over, and an in-flight handle waits for it.
const IN_FLIGHT: u32 = 2;
/// Producer: handed over, and no handle waits for it; it is free again once the consumer returned
/// it.
const ORPHANED: u32 = 3;
/// Either side: never to be used again.
const QUARANTINED: u32 = 4;
/// Producer: handed over and seen to be back, and an in-flight handle has it still.
const RETURNED: u32 = 5;

/// A word that the protocol cannot have written: the peer did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidWord {
    pub peer: Rank,
    pub slot: u32,
    pub word: u32,
}

/// The producing side of an edge's slots. Shared by its end and the leases, hence `&self`.
#[derive(Debug)]
pub struct Producer<W> {
    /// Who consumes.
    peer: Rank,
    words: W,
    own: Box<[AtomicU32]>,
}

impl<W: SlotWords> Producer<W> {
    pub fn new(words: W, peer: Rank) -> Self {
        let own = (0..words.depth()).map(|_| AtomicU32::new(FREE)).collect();
        Self { peer, words, own }
    }

    pub fn words(&self) -> &W {
        &self.words
    }

    /// Takes a slot that is free, or was dropped in flight and has come back; `None` is the lack
    /// of a credit. This is the reaper: nothing else looks after orphaned slots.
    pub fn lease(&self) -> Option<u32> {
        self.lease_if(|_| true)
    }

    /// As [`lease`](Self::lease), of those slots that this side, too, has done with: a backend
    /// whose send works on after the consumer has read has the last word.
    pub fn lease_if(&self, is_done: impl Fn(u32) -> bool) -> Option<u32> {
        (0..self.words.depth()).find(|&slot| {
            let own = &self.own[slot as usize];
            let seen = own.load(Ordering::Relaxed);
            let usable = seen == FREE || (seen == ORPHANED && self.is_back(slot));
            usable
                && is_done(slot)
                && own
                    .compare_exchange(seen, LEASED, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
        })
    }

    /// The lease ends unsent.
    pub fn give_up(&self, slot: u32) {
        self.step(slot, LEASED, FREE);
    }

    /// The slot goes over to the consumer. What was written to it becomes visible with the
    /// ring's publication of its frame, which must follow.
    pub fn submit(&self, slot: u32) {
        self.step(slot, LEASED, IN_FLIGHT);
        let word = &self.words.word(slot).0;
        word.store(WITH_CONSUMER, Ordering::Release);
    }

    /// True once the consumer gave the slot back: the credit.
    pub fn is_back(&self, slot: u32) -> bool {
        self.words.word(slot).0.load(Ordering::Acquire) == WITH_PRODUCER
    }

    /// [`Producer::is_back`] for a slot in flight. What was seen once is remembered where no peer
    /// can write: the word may say something else a moment later, and changes nothing.
    ///
    /// # Errors
    /// The word holds what no honest peer leaves there.
    pub fn has_come_back(&self, slot: u32) -> Result<bool, InvalidWord> {
        // In this order, with what another thread has seen before the word: where that thread saw
        // the slot come back, so does this one, unless the peer took it again.
        let own = self.own[slot as usize].load(Ordering::Acquire);
        let word = self.words.word(slot).0.load(Ordering::Acquire);
        match (word, own) {
            (WITH_PRODUCER, RETURNED) => Ok(true),
            (WITH_PRODUCER, _) => {
                if !self.try_step(slot, IN_FLIGHT, RETURNED) {
                    // Another thread saw it at the same moment, and nothing else may have happened.
                    self.step(slot, RETURNED, RETURNED);
                }
                Ok(true)
            }
            (WITH_CONSUMER, IN_FLIGHT) => Ok(false),
            (word, _) => Err(InvalidWord {
                peer: self.peer,
                slot,
                word,
            }),
        }
    }

    /// The in-flight handle, whose slot was seen to be back, becomes a lease again.
    pub fn redeem(&self, slot: u32) {
        self.step(slot, RETURNED, LEASED);
    }

    /// The slot was handed over and its frame did not leave, or the generation ended under it: it
    /// is a lease again, though the consumer did not give it back. Of a generation that is over.
    pub fn recall(&self, slot: u32) {
        self.step(slot, IN_FLIGHT, LEASED);
    }

    /// The in-flight handle was dropped.
    pub fn orphan(&self, slot: u32) {
        if !self.try_step(slot, RETURNED, FREE) {
            self.step(slot, IN_FLIGHT, ORPHANED);
        }
    }

    /// Says whether every slot is here: free, leased, or given back without a handle that waits for it.
    pub fn are_all_back(&self) -> bool {
        (0..self.words.depth()).all(|slot| {
            let seen = self.own[slot as usize].load(Ordering::Relaxed);
            seen == FREE || seen == LEASED || self.is_back(slot)
        })
    }

    /// The slot is given up for good, in flight.
    pub fn quarantine(&self, slot: u32) {
        if !self.try_step(slot, RETURNED, QUARANTINED) {
            self.step(slot, IN_FLIGHT, QUARANTINED);
        }
    }

    /// These states lie in this process: one that is wrong is a mistake of this program, and no
    /// peer can make it.
    fn step(&self, slot: u32, from: u32, to: u32) {
        let own = &self.own[slot as usize];
        own.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
            .unwrap_or_else(|was| panic!("slot {slot} is in state {was}, not {from}"));
    }

    fn try_step(&self, slot: u32, from: u32, to: u32) -> bool {
        let own = &self.own[slot as usize];
        own.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }
}

/// Why a slot that a frame names cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadSlot {
    /// There is no slot of that number.
    NoSuchSlot,
    /// The peer did not hand it over, or this side still reads it.
    NotHandedOver,
}

/// The consuming side of an edge's slots.
#[derive(Debug)]
pub struct Consumer<W> {
    words: W,
    own: Box<[AtomicU32]>,
}

impl<W: SlotWords> Consumer<W> {
    pub fn new(words: W) -> Self {
        let own = (0..words.depth()).map(|_| AtomicU32::new(FREE)).collect();
        Self { words, own }
    }

    pub fn depth(&self) -> u32 {
        self.words.depth()
    }

    /// Says whether the producer has handed the slot over.
    pub fn is_here(&self, slot: u32) -> bool {
        is_with_consumer(self.words.word(slot))
    }

    /// Takes the slot that a frame names.
    pub fn take(&self, slot: u32) -> Result<(), BadSlot> {
        let own = self.own.get(slot as usize).ok_or(BadSlot::NoSuchSlot)?;
        if !self.is_here(slot) {
            return Err(BadSlot::NotHandedOver);
        }
        own.compare_exchange(FREE, LEASED, Ordering::AcqRel, Ordering::Relaxed)
            .map(drop)
            .map_err(|_| BadSlot::NotHandedOver)
    }

    /// Gives the slot back: the credit travels with this store.
    pub fn give_back(&self, slot: u32) {
        let own = &self.own[slot as usize];
        if own.load(Ordering::Relaxed) == QUARANTINED {
            return;
        }
        own.store(FREE, Ordering::Relaxed);
        let word = &self.words.word(slot).0;
        word.store(WITH_PRODUCER, Ordering::Release);
    }

    /// Keeps the slot for good: the producer never gets this credit, also when the lease ends.
    pub fn quarantine(&self, slot: u32) {
        self.own[slot as usize].store(QUARANTINED, Ordering::Relaxed);
    }
}

/// Slot words in this process's own memory, for tests and models.
#[cfg(test)]
impl SlotWords for std::sync::Arc<Vec<SlotWord>> {
    fn depth(&self) -> u32 {
        self.len() as u32
    }
    fn word(&self, slot: u32) -> &SlotWord {
        &self[slot as usize]
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Arc;

    use super::*;

    type Words = Arc<Vec<SlotWord>>;

    const PEER: Rank = Rank::new(1);

    fn edge(depth: usize) -> (Producer<Words>, Consumer<Words>) {
        let words: Words = Arc::new((0..depth).map(|_| SlotWord::default()).collect());
        (
            Producer::new(Arc::clone(&words), PEER),
            Consumer::new(words),
        )
    }

    #[test]
    fn a_credit_comes_back_only_from_the_consumer() {
        let (tx, rx) = edge(1);
        let slot = tx.lease().unwrap();
        tx.submit(slot);
        assert!(!tx.is_back(slot));
        rx.take(slot).unwrap();
        assert!(!tx.is_back(slot));
        assert_eq!(tx.has_come_back(slot), Ok(false));
        rx.give_back(slot);
        assert!(tx.is_back(slot));
        assert_eq!(tx.has_come_back(slot), Ok(true));
        tx.redeem(slot);
        assert_eq!(tx.lease(), None, "a redeemed slot is a lease, not free");
    }

    #[test]
    fn a_peer_that_takes_a_slot_back_or_writes_nonsense_is_an_error_and_no_panic() {
        let (tx, rx) = edge(1);
        let slot = tx.lease().unwrap();
        tx.submit(slot);
        let word = &tx.words().word(slot).0;
        word.store(77, Ordering::Release);
        let peer = PEER;
        let invalid = |word| Err(InvalidWord { peer, slot, word });
        assert_eq!(tx.has_come_back(slot), invalid(77));
        rx.give_back(slot);
        assert_eq!(tx.has_come_back(slot), Ok(true));
        word.store(WITH_CONSUMER, Ordering::Release);
        assert_eq!(tx.has_come_back(slot), invalid(WITH_CONSUMER));
        // It was seen to be back before, and that counts.
        tx.redeem(slot);
        tx.submit(slot);
        assert_eq!(tx.has_come_back(slot), Ok(false));
    }

    #[test]
    fn a_slot_seen_to_be_back_can_be_dropped_and_given_up_in_flight() {
        let (tx, _) = edge(2);
        for is_dropped in [true, false] {
            let slot = tx.lease().unwrap();
            tx.submit(slot);
            move_to_producer(tx.words().word(slot));
            assert_eq!(tx.has_come_back(slot), Ok(true));
            if is_dropped {
                tx.orphan(slot);
                assert_eq!(tx.lease(), Some(slot));
                tx.give_up(slot);
            } else {
                tx.quarantine(slot);
                assert_eq!(tx.lease(), Some(1));
            }
        }
    }

    #[test]
    fn a_slot_that_was_not_handed_over_is_refused() {
        let (tx, rx) = edge(2);
        assert_eq!(rx.take(2), Err(BadSlot::NoSuchSlot));
        assert_eq!(rx.take(0), Err(BadSlot::NotHandedOver));
        let slot = tx.lease().unwrap();
        tx.submit(slot);
        rx.take(slot).unwrap();
        assert_eq!(rx.take(slot), Err(BadSlot::NotHandedOver), "read twice");
    }

    #[test]
    #[should_panic(expected = "slot 0 is in state 2, not 5")]
    fn redeeming_a_slot_in_flight_is_a_bug() {
        let (tx, _) = edge(1);
        let slot = tx.lease().unwrap();
        tx.submit(slot);
        tx.redeem(slot);
    }
}
