use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const MIN: usize = 2;
const MAX: usize = 64;

/// Gives bytes in pieces of the given sizes, then `WouldBlock` once between pieces.
struct Trickle {
    bytes: VecDeque<u8>,
    pieces: Vec<usize>,
    next: usize,
    blocked: bool,
    most_asked: usize,
}

impl Trickle {
    fn new(bytes: &[u8], pieces: Vec<usize>) -> Self {
        Self {
            bytes: bytes.iter().copied().collect(),
            pieces,
            next: 0,
            blocked: false,
            most_asked: 0,
        }
    }

    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.most_asked = self.most_asked.max(buf.len());
        self.blocked = !self.blocked;
        if self.blocked && !self.pieces.is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let piece = match self.pieces.get(self.next % self.pieces.len().max(1)) {
            Some(piece) => (*piece).max(1),
            None => usize::MAX,
        };
        self.next += 1;
        let count = piece.min(buf.len()).min(self.bytes.len());
        for slot in &mut buf[..count] {
            *slot = self.bytes.pop_front().unwrap();
        }
        Ok(count)
    }
}

/// Reads to the end; the frames, and how it ended.
fn read_all(source: &mut Trickle) -> (Vec<Vec<u8>>, Result<ReadProgress, FrameError>) {
    let mut reader = FrameReader::new(MIN, MAX);
    let mut frames = Vec::new();
    loop {
        match reader.poll(|buf| source.read(buf)) {
            Ok(ReadProgress::Frame) => frames.push(reader.frame().to_vec()),
            Ok(ReadProgress::Pending) => {}
            end => return (frames, end),
        }
        assert!(reader.buf.capacity() <= 2 * MAX, "the buffer is bounded");
    }
}

/// What a stream of frames means, written a second time without state.
fn oracle(mut bytes: &[u8]) -> (Vec<Vec<u8>>, &'static str) {
    let mut frames = Vec::new();
    loop {
        if bytes.is_empty() {
            return (frames, "end");
        }
        let Some((prefix, rest)) = bytes.split_first_chunk::<4>() else {
            return (frames, "cut");
        };
        let len = u32::from_le_bytes(*prefix) as usize;
        if !(MIN..=MAX).contains(&len) {
            return (frames, "length");
        }
        if rest.len() < len {
            return (frames, "cut");
        }
        frames.push(rest[..len].to_vec());
        bytes = &rest[len..];
    }
}

/// Bytes that are mostly frames, so that a property reaches beyond the first length.
fn streams() -> impl Strategy<Value = Vec<u8>> {
    let frame = proptest::collection::vec(any::<u8>(), 0..=MAX + 2).prop_map(|body| {
        let mut bytes = (body.len() as u32).to_le_bytes().to_vec();
        bytes.extend(body);
        bytes
    });
    let noise = proptest::collection::vec(any::<u8>(), 0..12);
    proptest::collection::vec(prop_oneof![8 => frame, 1 => noise], 0..8)
        .prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn reader_agrees_with_the_oracle_however_the_bytes_come(
        bytes in prop_oneof![streams(), proptest::collection::vec(any::<u8>(), 0..256)],
        pieces in proptest::collection::vec(1_usize..9, 0..5),
    ) {
        let mut source = Trickle::new(&bytes, pieces);
        let (frames, end) = read_all(&mut source);
        let (expected, how) = oracle(&bytes);
        prop_assert_eq!(frames, expected);
        let ended = match end {
            Ok(ReadProgress::Eof { inside: false }) => "end",
            Ok(ReadProgress::Eof { inside: true }) => "cut",
            Err(FrameError::Length { .. }) => "length",
            _ => "otherwise",
        };
        prop_assert_eq!(ended, how);
        prop_assert!(source.most_asked <= MAX, "never asks beyond one frame");
    }
}

#[test]
fn reader_leaves_what_follows_a_frame_in_the_stream() {
    let mut source = Trickle::new(&[3, 0, 0, 0, 1, 2, 3, 9, 9], vec![]);
    let mut reader = FrameReader::new(MIN, MAX);
    assert_eq!(
        reader.poll(|buf| source.read(buf)).unwrap(),
        ReadProgress::Frame
    );
    assert_eq!(reader.frame(), [1, 2, 3]);
    assert_eq!(source.bytes, [9, 9]);
}

#[test]
fn lying_length_allocates_nothing() {
    let mut source = Trickle::new(&[0xff, 0xff, 0xff, 0xff, 1, 2, 3], vec![]);
    let mut reader = FrameReader::new(MIN, MAX);
    let error = reader.poll(|buf| source.read(buf)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "a frame of 4294967295 bytes was announced; 2 to 64 are allowed"
    );
    assert_eq!(reader.buf.capacity(), 0);
}
