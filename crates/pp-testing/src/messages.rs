//! Messages with a number, and payloads of any size.

use std::time::{Duration, Instant};

use pp_contract::{
    CacheEpoch, ChunkIndex, Composer, DType, Envelope, Manifest, Matched, Prepared, Stamp,
    TensorSpec,
};
use pp_transport::in_flight::{Completion, InFlight, Submission};

use crate::Toy;

/// A lost wake-up makes a test hang; after this long it fails instead.
pub const HANG: Duration = Duration::from_secs(60);

/// One tensor of so many bytes.
pub fn bytes(bytes: usize) -> Manifest {
    let spec = TensorSpec::new("x", DType::U8, &[bytes as u64]).unwrap();
    Manifest::new(&[spec]).unwrap()
}

/// Message `n`, which brings so many bytes and asks for none.
pub fn envelope(n: u64, inputs: usize) -> Envelope<Toy> {
    Envelope::new(Toy(n), bytes(inputs), Manifest::empty()).unwrap()
}

/// Message `n` with a payload of so many bytes.
pub fn prepare(composer: &mut Composer, n: u64, bytes: usize) -> (Prepared<'_>, Stamp) {
    let stamp = Stamp::fresh(ChunkIndex::new(n), CacheEpoch::new(0));
    let message = composer.prepare_envelope(&envelope(n, bytes)).unwrap();
    (message, stamp)
}

/// The number of a message.
pub fn number(matched: &Matched<'_>) -> u64 {
    matched.envelope::<Toy>().unwrap().plan().0
}

/// Byte `i` of payload `n`: any mix-up of messages or offsets shows.
pub fn pattern(n: u64, i: usize) -> u8 {
    (n.wrapping_mul(31) as usize ^ i ^ (i >> 8) ^ (i >> 16)) as u8
}

/// Waits until an operation is complete; gives its buffer.
pub fn wait_for<S: Submission>(mut flight: InFlight<S>) -> S::Buffer {
    let deadline = Instant::now() + HANG;
    loop {
        match flight.complete() {
            Ok(Completion::Done(buffer)) => return buffer,
            Ok(Completion::Pending(again)) => flight = again,
            Err(failed) => panic!("{}", failed.error),
        }
        assert!(Instant::now() < deadline, "never completed");
        std::thread::yield_now();
    }
}
