//! The ring that header frames travel in between two ranks of one host.
//!
//! Hazard: a frame seen before it is whole, or overwritten before it was read; and a peer that
//! writes nonsense into the words. Guarantee: one producer and one consumer, a frame becomes
//! visible only as a whole and in order, and lengths that cannot be true are an error, never an
//! out-of-bounds copy. A frame is copied out before anybody decodes it, so what was checked is
//! what is used.
//!
//! Layout of one record: length u32, tag u32 (the slot that goes with the frame, or
//! [`NO_SLOT`]), the frame, padding to 8 bytes. Records wrap around the end.

use std::ops::Deref;

use crate::sync::{AtomicU64, Ordering};

/// Tag of a frame that hands over no slot.
pub const NO_SLOT: u32 = u32::MAX;
/// Length and tag in front of each frame.
const RECORD_HEADER: usize = 8;

/// The positions of both sides, in bytes since the start; each on its own pair of cache lines.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub struct RingWords {
    head: CursorLine,
    tail: CursorLine,
}

#[derive(Debug, Default)]
#[repr(C, align(128))]
struct CursorLine(AtomicU64);

/// The bytes of a ring: a power of two of them, written and read at offsets inside it.
#[expect(clippy::len_without_is_empty, reason = "it never is")]
pub trait RingBytes {
    fn len(&self) -> usize;
    fn put(&self, at: usize, bytes: &[u8]);
    fn get(&self, at: usize, bytes: &mut [u8]);
}

/// No room for the frame until the peer has read more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingFull;

/// The peer's words or lengths cannot be true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingCorrupt {
    pub used: u64,
    pub record: u64,
}

/// Returns the bytes that a frame takes up in a ring.
#[must_use]
pub fn record_bytes(frame: usize) -> u64 {
    (RECORD_HEADER + frame).next_multiple_of(8) as u64
}

fn put_wrapped(data: &impl RingBytes, position: u64, bytes: &[u8]) {
    let at = position as usize & (data.len() - 1);
    let first = bytes.len().min(data.len() - at);
    data.put(at, &bytes[..first]);
    data.put(0, &bytes[first..]);
}

fn get_wrapped(data: &impl RingBytes, position: u64, bytes: &mut [u8]) {
    let at = position as usize & (data.len() - 1);
    let first = bytes.len().min(data.len() - at);
    data.get(at, &mut bytes[..first]);
    data.get(0, &mut bytes[first..]);
}

/// The producing side.
#[derive(Debug)]
pub struct RingSender<W, D> {
    words: W,
    data: D,
    head: u64,
    /// The tail as last read, so that the peer's cache line is fetched only when it matters.
    tail: u64,
}

impl<W: Deref<Target = RingWords>, D: RingBytes> RingSender<W, D> {
    pub fn new(words: W, data: D) -> Self {
        assert!(data.len().is_power_of_two());
        Self {
            words,
            data,
            head: 0,
            tail: 0,
        }
    }

    /// Says whether a frame of this many bytes can be pushed now.
    pub fn has_room(&mut self, frame: usize) -> bool {
        let need = record_bytes(frame);
        let capacity = self.data.len() as u64;
        if capacity - (self.head - self.tail) >= need {
            return true;
        }
        // A tail beyond the head, or running backwards, is a peer's nonsense: no room then.
        let tail = self.words.tail.0.load(Ordering::Acquire);
        if (self.tail..=self.head).contains(&tail) {
            self.tail = tail;
        }
        capacity - (self.head - self.tail) >= need
    }

    /// Publishes one frame with its tag, whole.
    pub fn push(&mut self, tag: u32, frame: &[u8]) -> Result<(), RingFull> {
        let need = record_bytes(frame.len());
        if !self.has_room(frame.len()) {
            return Err(RingFull);
        }
        let mut header = [0; RECORD_HEADER];
        header[..4].copy_from_slice(&(frame.len() as u32).to_le_bytes());
        header[4..].copy_from_slice(&tag.to_le_bytes());
        put_wrapped(&self.data, self.head, &header);
        put_wrapped(&self.data, self.head + RECORD_HEADER as u64, frame);
        self.head += need;
        self.words.head.0.store(self.head, Ordering::Release);
        Ok(())
    }
}

/// The consuming side.
#[derive(Debug)]
pub struct RingReceiver<W, D> {
    words: W,
    data: D,
    tail: u64,
    head: u64,
    max_frame: usize,
}

impl<W: Deref<Target = RingWords>, D: RingBytes> RingReceiver<W, D> {
    pub fn new(words: W, data: D, max_frame: usize) -> Self {
        assert!(data.len().is_power_of_two() && record_bytes(max_frame) <= data.len() as u64);
        Self {
            words,
            data,
            tail: 0,
            head: 0,
            max_frame,
        }
    }

    /// Copies the next frame into `frame` (replacing what it held) and gives its tag.
    pub fn pop(&mut self, frame: &mut Vec<u8>) -> Result<Option<u32>, RingCorrupt> {
        if self.head == self.tail {
            self.head = self.words.head.0.load(Ordering::Acquire);
            if self.head == self.tail {
                return Ok(None);
            }
        }
        let used = self.head.wrapping_sub(self.tail);
        let mut header = [0; RECORD_HEADER];
        if used > self.data.len() as u64 || used < RECORD_HEADER as u64 {
            return Err(RingCorrupt { used, record: 0 });
        }
        get_wrapped(&self.data, self.tail, &mut header);
        let (len, tag) = header.split_at(4);
        let len = u32::from_le_bytes(len.try_into().expect("four bytes")) as usize;
        let tag = u32::from_le_bytes(tag.try_into().expect("four bytes"));
        if len > self.max_frame || record_bytes(len) > used {
            let record = len as u64;
            return Err(RingCorrupt { used, record });
        }
        frame.resize(len, 0);
        get_wrapped(&self.data, self.tail + RECORD_HEADER as u64, frame);
        self.tail += record_bytes(len);
        self.words.tail.0.store(self.tail, Ordering::Release);
        Ok(Some(tag))
    }
}

#[cfg(all(any(test, feature = "fuzz"), not(loom)))]
pub mod fuzz;

#[cfg(all(test, not(loom)))]
mod tests {
    use std::rc::Rc;

    use super::fuzz::Heap;
    use super::*;

    type Ends = (
        RingSender<Rc<RingWords>, Heap>,
        RingReceiver<Rc<RingWords>, Heap>,
        Rc<RingWords>,
    );

    fn ring(bytes: usize, max_frame: usize) -> Ends {
        let words = Rc::new(RingWords::default());
        let heap = Heap::new(bytes);
        (
            RingSender::new(Rc::clone(&words), heap.clone()),
            RingReceiver::new(Rc::clone(&words), heap, max_frame),
            words,
        )
    }

    #[test]
    fn frames_of_every_length_survive_the_wrap() {
        let (mut tx, mut rx, _) = ring(128, 64);
        let mut out = Vec::new();
        for round in 0..1000_usize {
            let frame: Vec<u8> = (0..round % 65).map(|i| (i * 7 + round) as u8).collect();
            tx.push(round as u32, &frame).unwrap();
            assert_eq!(rx.pop(&mut out), Ok(Some(round as u32)));
            assert_eq!(out, frame);
        }
        assert_eq!(rx.pop(&mut out), Ok(None));
    }

    #[test]
    fn a_full_ring_refuses_and_takes_again_after_a_read() {
        let (mut tx, mut rx, _) = ring(64, 24);
        tx.push(1, &[1; 24]).unwrap();
        tx.push(2, &[2; 24]).unwrap();
        assert_eq!(tx.push(3, &[3; 24]), Err(RingFull));
        let mut out = Vec::new();
        rx.pop(&mut out).unwrap();
        tx.push(3, &[3; 24]).unwrap();
        rx.pop(&mut out).unwrap();
        assert_eq!((rx.pop(&mut out), &out[..]), (Ok(Some(3)), &[3; 24][..]));
    }

    #[test]
    fn a_head_that_lies_is_an_error() {
        for lie in [1 << 40, 65, 4] {
            let (_tx, mut rx, words) = ring(64, 24);
            words.head.0.store(lie, Ordering::Release);
            assert_eq!(
                rx.pop(&mut Vec::new()).unwrap_err().used,
                lie,
                "a head at {lie} was believed"
            );
        }
    }

    #[test]
    fn a_record_longer_than_what_was_published_is_an_error() {
        let (mut tx, mut rx, _) = ring(64, 24);
        tx.push(0, &[9; 8]).unwrap();
        tx.data.put(0, &20_u32.to_le_bytes());
        assert_eq!(rx.pop(&mut Vec::new()).unwrap_err().record, 20);
    }

    #[test]
    fn a_tail_that_lies_gives_no_room() {
        let (mut tx, _rx, words) = ring(64, 24);
        tx.push(1, &[1; 24]).unwrap();
        tx.push(2, &[2; 24]).unwrap();
        words.tail.0.store(1 << 30, Ordering::Release);
        assert_eq!(tx.push(3, &[3; 24]), Err(RingFull));
    }
}
