//! Regions that a peer writes as it likes: see [`crate::fuzz`].

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::LazyLock;

use pp_contract::{
    CacheEpoch, CallId, ChunkIndex, Composer, DType, Lockstep, Manifest, Message, Pipeline, Plan,
    PlanError, Rank, StageSpec,
};

use super::*;
use crate::bell::Bell;
use crate::in_flight::Completion;
use pp_words::fuzz::Script;

pub use pp_words::ring::fuzz::ring;

const DEPTH: u32 = 2;
const SLOT_BYTES: u64 = 64;
/// Its source sends.
static PIPELINE: LazyLock<Pipeline> = LazyLock::new(|| "a@0 -> b@1".parse().expect("a pipeline"));

/// A plan that says nothing but its number.
#[derive(Clone, Debug, PartialEq)]
struct Blob(u64);

impl Plan for Blob {
    const NAME: &'static str = "blob";
    const VERSION: u16 = 1;
    type Parts = u64;

    fn from_parts(parts: u64) -> Result<Self, PlanError> {
        Ok(Self(parts))
    }
    fn parts(&self) -> &u64 {
        &self.0
    }
    fn start_frame(&self) -> u64 {
        self.0
    }
    fn check(&self, _: &StageSpec, _: bool, _: &Manifest) -> Result<(), PlanError> {
        Ok(())
    }
}

/// One rank, and all that it holds.
struct FuzzRank {
    tx: HostTx,
    rx: HostRx,
    composer: Composer,
    lockstep: Lockstep,
    sent: u64,
    inbox: Vec<u8>,
    leases: Vec<TxLease>,
    sendings: Vec<InFlight<Sending>>,
    received: Vec<RxLease>,
}

/// The job would end here.
struct Ended;

impl<E: std::error::Error> From<E> for Ended {
    fn from(error: E) -> Self {
        assert!(!error.to_string().is_empty());
        Self
    }
}

impl FuzzRank {
    fn new(out: SharedEnd, incoming: SharedEnd) -> Self {
        Self {
            tx: HostTx::new(out),
            rx: HostRx::new(incoming),
            composer: Composer::new(),
            lockstep: Lockstep::new(),
            sent: 0,
            inbox: Vec::new(),
            leases: Vec::new(),
            sendings: Vec::new(),
            received: Vec::new(),
        }
    }

    fn step(&mut self, step: u8) -> Result<(), Ended> {
        match step % 10 {
            0 | 1 => {
                if let Some(mut lease) = self.tx.try_lease()? {
                    assert!(self.leases.iter().all(|other| other.slot != lease.slot));
                    lease.bytes_mut().fill(step);
                    self.leases.push(lease);
                }
            }
            2 | 3 => self.send()?,
            4 | 5 => {
                if self.rx.poll_frame(&mut self.inbox)? {
                    let matched = self.lockstep.admit(&self.inbox)?;
                    let receiving = self.rx.receive(&matched)?;
                    let Ok(Completion::Done(lease)) = receiving.complete() else {
                        panic!("on this backend the payload is there");
                    };
                    assert!(self.received.iter().all(|other| other.slot != lease.slot));
                    assert!(lease.bytes().len() <= SLOT_BYTES as usize);
                    self.received.push(lease);
                }
            }
            6 => {
                if let Some(sending) = self.sendings.pop() {
                    match sending.complete() {
                        Ok(Completion::Done(lease)) => self.leases.push(lease),
                        Ok(Completion::Pending(sending)) => self.sendings.push(sending),
                        Err(failed) => return Err(failed.error.into()),
                    }
                }
            }
            7 => drop(self.sendings.pop()),
            8 => drop(self.sendings.pop().map(InFlight::abort)),
            _ => drop(self.received.pop()),
        }
        Ok(())
    }

    fn send(&mut self) -> Result<(), Ended> {
        let Some(lease) = self.leases.pop() else {
            return Ok(());
        };
        let tensors = Manifest::single("blob", DType::U8, &[SLOT_BYTES])?;
        let message = Message::new(Blob(self.sent), &PIPELINE.stages()[0], tensors)?;
        let (chunk, call) = (ChunkIndex::new(self.sent), CallId::new(self.sent));
        let stamp = Stamp::new(chunk, CacheEpoch::new(0), call);
        let prepared = self.composer.prepare(&message)?;
        match self.tx.send(prepared, stamp, Some(lease)) {
            Ok(sent) => {
                self.sent += 1;
                self.sendings.extend(sent.payload);
                Ok(())
            }
            Err(rejected) if rejected.error.is_backpressure() => {
                self.leases.extend(rejected.buffer);
                Ok(())
            }
            Err(rejected) => Err(rejected.error.into()),
        }
    }
}

/// Both ends of an edge from one rank to another.
fn pair(shape: EdgeShape, from: u32, to: u32) -> [SharedEnd; 2] {
    let bell = Bell::new().expect("a bell");
    let rank = |rank| (Rank::new(rank), &bell);
    let ends = SharedEnd::pair(shape, Holds::All, rank(from), rank(to));
    ends.expect("a shape that there can be, and memory").into()
}

/// The memory of an edge, to be written as a file.
fn raw(end: &SharedEnd) -> File {
    let fd = end.region.fd().try_clone_to_owned();
    File::from(fd.expect("a descriptor"))
}

/// A rank that sends and gets its slots back, while its peer writes the word of one of them all
/// the time, from another thread: between any look at it and the next.
#[cfg(test)]
#[test]
fn a_word_that_the_peer_changes_all_the_time_does_no_harm() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let shape = EdgeShape {
        depth: 1,
        slot_bytes: SLOT_BYTES,
    };
    let [end, _] = pair(shape, 0, 1);
    let (raw, at) = (raw(&end), end.place.slot_words as u64);
    let edge = HostTx::new(end).edge;
    let stop = AtomicBool::new(false);
    /// Ends the other thread, also when this one panics.
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let soon = std::time::Instant::now() + std::time::Duration::from_secs(3);
    let mut back = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                for word in [0_u32, 1] {
                    let _ = raw.write_at(&word.to_le_bytes(), at);
                }
            }
        });
        let _stop = Stop(&stop);
        while back == 0 || (back < 20_000 && std::time::Instant::now() < soon) {
            let Some(lease) = TxLease::of(&edge) else {
                continue;
            };
            let sending = InFlight::new(Sending::unsent(lease));
            let mut sending = Some(sending);
            while let Some(waiting) = sending.take() {
                // Looks at no fixed time after the word was written.
                for _ in 0..back * 7 % 199 {
                    std::hint::spin_loop();
                }
                match waiting.complete() {
                    Ok(Completion::Done(lease)) => {
                        back += 1;
                        drop(lease);
                    }
                    Ok(Completion::Pending(waiting)) => sending = Some(waiting),
                    Err(failed) => panic!("{}", failed.error),
                }
            }
        }
    });
}

/// Two honest ranks with an edge each way, and somebody who writes into words, headers and payloads
/// between any two of their steps, and after the last.
pub fn region(bytes: &[u8]) {
    const SHAPE: EdgeShape = EdgeShape {
        depth: DEPTH,
        slot_bytes: SLOT_BYTES,
    };
    thread_local! {
        /// Memory costs more than all that is tried in it, so every input has the same.
        static MEMORY: [[SharedEnd; 2]; 2] = [pair(SHAPE, 0, 1), pair(SHAPE, 1, 0)];
        static ZEROS: Vec<u8> = {
            let layout = Layout::new([SHAPE], Holds::All).expect("a shape that there can be");
            vec![0; layout.len]
        };
    }
    let [up, down] = MEMORY.with(Clone::clone);
    let places = [&up, &down].map(|[end, _]| (raw(end), end.place));
    for (raw, _) in &places {
        ZEROS
            .with(|zeros| raw.write_all_at(zeros, 0))
            .expect("a region may be written");
    }
    let ([up_tx, up_rx], [down_tx, down_rx]) = (up, down);
    let mut ends = [FuzzRank::new(up_tx, down_rx), FuzzRank::new(down_tx, up_rx)];
    let mut script = Script::new(bytes);
    while !script.is_over() {
        let step = script.byte();
        if step < 192 {
            if ends[usize::from(step / 96)].step(step).is_err() {
                return;
            }
            continue;
        }
        let (raw, place) = &places[usize::from(step % 2)];
        let near = u64::from(script.byte());
        let (at, what) = match step / 2 % 4 {
            // Head or tail, near the start or anywhere.
            0 => (place.ring_words + 128 * (near as usize % 2), near * 8),
            1 => (place.ring_words, script.number()),
            2 => (
                place.slot_words + size_of::<pp_words::slots::SlotWord>() * (near as usize % 2),
                u64::from(script.byte() % 4),
            ),
            _ => (place.ring_data + near as usize, script.number()),
        };
        raw.write_at(&what.to_le_bytes(), at as u64)
            .expect("a region may be written");
    }
}
