//! Stages that only take time, and payloads that are only written and read.

use std::time::{Duration, Instant};

use pp_transport::host::nt::stream_fill;
use rustix::time::{ClockId, clock_gettime};

use crate::args::Simulate;

/// A sleep ends late by tens of microseconds; the last stretch is spun.
const SPUN: Duration = Duration::from_micros(250);
/// Below this, stores that go around the cache cost more than they save.
const STREAMED_BYTES: usize = 32 * 1024;

/// A stage that takes a fixed time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Work {
    how: Simulate,
    time: Duration,
}

impl Work {
    pub(super) fn new(how: Simulate, time: Duration) -> Self {
        Self { how, time }
    }

    pub(super) fn run(self) {
        if self.time.is_zero() {
            return;
        }
        if self.how == Simulate::Spin {
            // By the processor's time: while another thread has the core, this one computes nothing.
            let end = processor_time() + self.time;
            while processor_time() < end {
                std::hint::spin_loop();
            }
            return;
        }
        sleep_exactly(self.time);
    }
}

/// Sleeps until shortly before the end, and spins the rest. [`sharpen_timers`] makes it shorter.
pub fn sleep_exactly(time: Duration) {
    let end = Instant::now() + time;
    if let Some(slept) = time.checked_sub(SPUN) {
        std::thread::sleep(slept);
    }
    while Instant::now() < end {
        std::hint::spin_loop();
    }
}

/// The time that this thread has had a core.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}

/// Asks the kernel to end sleeps of this thread as exactly as it can.
pub fn sharpen_timers() {
    // Where it refuses, sleeps end later and the spin to the mark is shorter.
    let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
}

/// Writes bytes that no other chunk has into the payload.
pub(super) fn produce(payload: &mut [u8], chunk: u64) {
    let word = word_of(chunk);
    if payload.len() >= STREAMED_BYTES {
        stream_fill(payload, word);
    } else {
        for (byte, value) in payload.iter_mut().zip(word.to_le_bytes().iter().cycle()) {
            *byte = *value;
        }
    }
}

/// Reads every byte of the payload; false if one is not this chunk's.
pub(super) fn consume(payload: &[u8], chunk: u64) -> bool {
    // Bytes side by side in arrays of the width of several vectors: the compiler's favourite loop.
    const WIDTH: usize = 128;
    let pattern: [u8; WIDTH] = std::array::from_fn(|i| word_of(chunk).to_le_bytes()[i % 8]);
    let (blocks, tail) = payload.as_chunks::<WIDTH>();
    let mut differ = [0_u8; WIDTH];
    for block in blocks {
        for i in 0..WIDTH {
            differ[i] |= block[i] ^ pattern[i];
        }
    }
    differ.iter().all(|bits| *bits == 0) && tail.iter().zip(pattern).all(|(a, b)| *a == b)
}

/// A pattern in which neighbouring chunks differ in every byte, most of the time.
fn word_of(chunk: u64) -> u64 {
    chunk.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_produced_is_consumed_at_every_size() {
        for bytes in (0..600).chain([STREAMED_BYTES - 1, STREAMED_BYTES, STREAMED_BYTES + 77]) {
            let mut payload = vec![0; bytes];
            produce(&mut payload, 7);
            assert!(consume(&payload, 7), "{bytes} bytes");
            assert!(bytes < 8 || !consume(&payload, 8), "{bytes} bytes");
        }
    }

    #[test]
    fn one_wrong_byte_is_noticed_wherever_it_is() {
        let mut payload = vec![0; 1003];
        produce(&mut payload, 3);
        for at in 0..payload.len() {
            payload[at] ^= 1;
            assert!(!consume(&payload, 3), "byte {at}");
            payload[at] ^= 1;
        }
    }
}
