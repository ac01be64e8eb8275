//! What the flight recorder costs, in nanoseconds: `cargo run --release -p pp-transport --example
//! flight_cost`.
//!
//! Both ends of a host link on one thread, everything in the cache: a message there, and its payload
//! handed over and given back, with the recorder and without, in turn. The least and the median of 400
//! rounds of 1,000 messages; each message is two operations, its send and its receive.

use std::hint::black_box;
use std::time::Instant;

use pp_contract::{
    Bare, CacheEpoch, ChunkIndex, Composer, Envelope, Generation, Lockstep, MAX_FRAME_BYTES, Rank,
    Stamp,
};
use pp_testing::{Toy, edge, envelope};
use pp_transport::bell::Bell;
use pp_transport::flight::{DEFAULT_OPERATIONS, FlightRecorder, Recorded};
use pp_transport::host::HostLink;
use pp_transport::in_flight::Completion;
use pp_transport::link::Link;

const ROUNDS: usize = 400;
const MESSAGES: u64 = 1000;

/// Both ends, and what goes over them.
struct Pair {
    low: Recorded<HostLink>,
    high: Recorded<HostLink>,
    composer: Composer,
    lockstep: Lockstep<pp_contract::Requests>,
    inbox: Vec<u8>,
    envelope: Option<Envelope<Toy>>,
    next: u64,
}

impl Pair {
    /// Two recorders, as two ranks have.
    fn new(bytes: u64, operations: usize) -> Self {
        let edge = edge(4, bytes.max(1));
        let bell = Bell::new().expect("a bell");
        let (low, high) = HostLink::pair(edge, edge, bell).expect("a link");
        let record = |link, peer| {
            let recorder = FlightRecorder::new(operations);
            Recorded::new(link, &recorder, Rank::new(peer), Generation::new(0))
        };
        Self {
            low: record(low, 1),
            high: record(high, 0),
            composer: Composer::new(),
            lockstep: Lockstep::requests(),
            inbox: Vec::with_capacity(MAX_FRAME_BYTES),
            envelope: (bytes > 0).then(|| envelope(0, bytes as usize)),
            next: 0,
        }
    }

    /// One message, from its slot until that is free again.
    fn message(&mut self) {
        let stamp = Stamp::fresh(ChunkIndex::new(self.next), CacheEpoch::new(0));
        self.next += 1;
        let Some(envelope) = &self.envelope else {
            let message = self.composer.prepare_bare(Bare::Noop);
            black_box(self.low.send(message, stamp, None).expect("room"));
            assert!(self.high.poll_frame(&mut self.inbox).expect("a frame"));
            let _ = black_box(self.lockstep.admit(&self.inbox).expect("in order"));
            return;
        };
        let lease = self.low.try_lease().expect("a link").expect("a slot");
        let message = self.composer.prepare_envelope(envelope).expect("it fits");
        let sent = self.low.send(message, stamp, Some(lease)).expect("room");
        assert!(self.high.poll_frame(&mut self.inbox).expect("a frame"));
        let matched = self.lockstep.admit(&self.inbox).expect("in order");
        let receiving = self.high.receive(&matched).expect("a payload");
        let Ok(Completion::Done(payload)) = receiving.complete() else {
            panic!("on the host a payload comes with its header");
        };
        drop(black_box(payload));
        let sending = sent.payload.expect("it has one");
        assert!(matches!(sending.complete(), Ok(Completion::Done(_))));
    }

    fn round(&mut self) -> f64 {
        let start = Instant::now();
        for _ in 0..MESSAGES {
            self.message();
        }
        start.elapsed().as_secs_f64() * 1e9 / MESSAGES as f64
    }
}

fn main() {
    println!(
        "{:>12} {:>22} {:>22} {:>24}",
        "payload", "off, ns a message", "on", "ns an operation"
    );
    for bytes in [0, 65_536] {
        let mut off = Pair::new(bytes, 0);
        let mut on = Pair::new(bytes, DEFAULT_OPERATIONS);
        let (mut without, mut with) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            without.push(off.round());
            with.push(on.round());
        }
        let [without, with] = [without, with].map(|mut all| {
            all.sort_by(f64::total_cmp);
            (all[0], all[all.len() / 2])
        });
        println!(
            "{bytes:>12} {:>12.1} ({:>7.1}) {:>12.1} ({:>7.1}) {:>14.1} ({:>7.1})",
            without.0,
            without.1,
            with.0,
            with.1,
            (with.0 - without.0) / 2.0,
            (with.1 - without.1) / 2.0,
        );
    }
    println!("the least of {ROUNDS} rounds (the median)");
}
