//! A ring whose words and bytes a peer writes: see [`crate::fuzz`].

use std::cell::RefCell;
use std::rc::Rc;

use super::*;
use crate::fuzz::Script;

const BYTES: usize = 256;
const MAX_FRAME: usize = 96;

#[derive(Clone)]
pub struct Heap(Rc<RefCell<Vec<u8>>>);

impl Heap {
    pub fn new(bytes: usize) -> Self {
        Self(Rc::new(RefCell::new(vec![0; bytes])))
    }
}

impl RingBytes for Heap {
    fn len(&self) -> usize {
        self.0.borrow().len()
    }
    fn put(&self, at: usize, bytes: &[u8]) {
        self.0.borrow_mut()[at..at + bytes.len()].copy_from_slice(bytes);
    }
    fn get(&self, at: usize, bytes: &mut [u8]) {
        bytes.copy_from_slice(&self.0.borrow()[at..at + bytes.len()]);
    }
}

/// Both sides of a ring, while a peer of each writes what it likes into words and bytes.
pub fn ring(bytes: &[u8]) {
    let words = Rc::new(RingWords::default());
    let heap = Heap::new(BYTES);
    let mut tx = RingSender::new(Rc::clone(&words), heap.clone());
    let mut rx = RingReceiver::new(Rc::clone(&words), heap.clone(), MAX_FRAME);
    let mut script = Script::new(bytes);
    let mut frame = Vec::new();
    while !script.is_over() {
        match script.byte() % 8 {
            0..=1 => {
                let count = usize::from(script.byte()) % (MAX_FRAME + 1);
                let had_room = tx.has_room(MAX_FRAME);
                let pushed = tx.push(7, script.bytes(count));
                assert!(pushed.is_ok() || !had_room, "room that was there is gone");
            }
            2..=4 => match rx.pop(&mut frame) {
                Ok(_) => assert!(frame.len() <= MAX_FRAME),
                // The job would end here.
                Err(_) => return,
            },
            5 => words
                .head
                .0
                .store(u64::from(script.byte()) * 8, Ordering::Release),
            6 => words.tail.0.store(script.number(), Ordering::Release),
            _ => {
                let at = usize::from(script.byte());
                let bytes = script.bytes(8.min(BYTES - at));
                heap.put(at, bytes);
            }
        }
    }
}
