//! Memory for frames: the heap's, or what a GPU reads and writes without a copy.

use std::any::Any;
use std::ops::{Deref, DerefMut};

/// Memory for frames: the heap's, or what the caller brings.
pub trait FrameMemory: Any + Send {
    /// Gives all of its bytes.
    fn bytes(&self) -> &[u8];
    /// Gives all of its bytes, to be written.
    fn bytes_mut(&mut self) -> &mut [u8];
    /// Says whether nothing else reads or writes it any more.
    fn is_idle(&self) -> bool;
}

impl FrameMemory for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
    fn is_idle(&self) -> bool {
        true
    }
}

/// Frames one after the other, in memory of any kind.
///
/// # If dropped
/// As the memory in it: a GPU's knows whether it is still in use.
pub struct Buffer {
    memory: Box<dyn FrameMemory>,
    len: usize,
}

impl Default for Buffer {
    fn default() -> Self {
        Self::from(Box::new(Vec::new()) as Box<dyn FrameMemory>)
    }
}

impl From<Box<dyn FrameMemory>> for Buffer {
    fn from(memory: Box<dyn FrameMemory>) -> Self {
        Self { memory, len: 0 }
    }
}

impl Buffer {
    /// Makes it `len` bytes long; what is in it stays, and is anything where it grows. Memory that was
    /// given and is too small goes back, and the heap's takes its place.
    pub fn resize(&mut self, len: usize) {
        if self.memory.bytes().len() < len {
            match (&mut *self.memory as &mut dyn Any).downcast_mut::<Vec<u8>>() {
                Some(heap) => heap.resize(len, 0),
                None => self.memory = Box::new(vec![0; len]),
            }
        }
        self.len = len;
    }

    /// Says whether nothing but its owner reads or writes it.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.memory.is_idle()
    }

    /// Gives the memory that the caller brought, if it is a `T`.
    #[must_use]
    pub fn given<T: FrameMemory>(&self) -> Option<&T> {
        (&*self.memory as &dyn Any).downcast_ref()
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory.bytes()[..self.len]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory.bytes_mut()[..self.len]
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let is_heap = self.given::<Vec<u8>>().is_some();
        let kind = if is_heap { "heap" } else { "given" };
        write!(f, "Buffer({kind}, {} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Four([u8; 4]);

    impl FrameMemory for Four {
        fn bytes(&self) -> &[u8] {
            &self.0
        }
        fn bytes_mut(&mut self) -> &mut [u8] {
            &mut self.0
        }
        fn is_idle(&self) -> bool {
            true
        }
    }

    #[test]
    fn given_memory_is_used_where_it_is_large_enough() {
        let mut buffer = Buffer::from(Box::new(Four([1, 2, 3, 4])) as Box<dyn FrameMemory>);
        buffer.resize(3);
        assert_eq!(*buffer, [1, 2, 3]);
        buffer[0] = 9;
        assert_eq!(buffer.given::<Four>().unwrap().0, [9, 2, 3, 4]);
        buffer.resize(5);
        assert!(buffer.given::<Four>().is_none());
        assert_eq!(buffer.len(), 5);
    }

    #[test]
    fn the_heap_keeps_its_memory_when_it_shrinks_and_grows_again() {
        let mut buffer = Buffer::default();
        buffer.resize(100);
        let at = buffer.as_ptr();
        buffer.resize(10);
        buffer.resize(100);
        assert_eq!(buffer.as_ptr(), at);
    }
}
