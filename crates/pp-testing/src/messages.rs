//! Messages with a number, and payloads of any size.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use pp_contract::{
    CacheEpoch, CallId, ChunkIndex, Composer, DType, Manifest, Matched, Message, Pipeline,
    Prepared, Stamp,
};
use pp_transport::in_flight::{Completion, InFlight, Submission};

use crate::Toy;

/// A lost wake-up makes a test hang; after this long it fails instead.
pub const HANG: Duration = Duration::from_secs(60);

/// Three stages on two ranks: `a@0 -> b@1 -> c@0`.
pub fn pipeline() -> &'static Pipeline {
    static PIPELINE: LazyLock<Pipeline> = LazyLock::new(|| "a@0 -> b@1 -> c@0".parse().unwrap());
    &PIPELINE
}

/// One tensor of so many bytes.
pub fn bytes(bytes: usize) -> Manifest {
    Manifest::single("x", DType::U8, &[bytes as u64]).unwrap()
}

/// Message `n` of the source of [`pipeline`], with a payload of so many bytes.
pub fn message(n: u64, payload: usize) -> Message<Toy> {
    Message::new(Toy(n), &pipeline().stages()[0], bytes(payload)).unwrap()
}

/// That message, prepared, and its stamp.
pub fn prepare(composer: &mut Composer, n: u64, bytes: usize) -> (Prepared<'_>, Stamp) {
    let stamp = Stamp::new(ChunkIndex::new(n), CacheEpoch::new(0), CallId::new(n));
    (composer.prepare(&message(n, bytes)).unwrap(), stamp)
}

/// The number of a message from the source of [`pipeline`].
pub fn number(matched: &Matched<'_>) -> u64 {
    matched.message::<Toy>(pipeline(), 0).unwrap().plan().0
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

/// Waits until it is so.
#[track_caller]
pub fn until(mut is_so: impl FnMut() -> bool) {
    until_some("it", || is_so().then_some(()));
}

/// Waits until a look finds something, and gives it. A failure says that `what` never came.
#[track_caller]
pub fn until_some<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + HANG;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what} never came");
        std::thread::yield_now();
    }
}
