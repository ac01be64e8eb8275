//! loom models of the shared-memory protocols: every order of every step, under the weak memory
//! order of the standard. Run with `cargo xtask test`, or
//! `RUSTFLAGS="--cfg loom" cargo test -p pp-words --lib --release`.

use std::sync::Arc as StdArc;

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use pp_contract::Rank;

use crate::bell::{BellWords, Ticket};
use crate::flight::{Ring, WORDS};
use crate::gate::{Calling, Gate};
use crate::group::{
    Call, Counts, GroupWords, LifeWords, MemberWords, PairWords, SLOTS, Side, Stop,
};
use crate::ring::{RingBytes, RingReceiver, RingSender, RingWords};
use crate::slots::{Consumer, Producer, SlotWord};
use crate::sync::{AtomicU32, Ordering};

/// Walks every interleaving with at most this many preemptions; a fault in such protocols needs
/// one or two, and every spin loop doubles what is to be walked.
const PREEMPTIONS: usize = 3;

fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(PREEMPTIONS);
    builder.check(model);
}

/// Ring data whose every access loom checks for races.
struct Cells(Vec<UnsafeCell<u8>>);

impl RingBytes for Arc<Cells> {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn put(&self, at: usize, bytes: &[u8]) {
        for (cell, byte) in self.0[at..].iter().zip(bytes) {
            // SAFETY: loom reports any access that is not ordered with this one.
            cell.with_mut(|p| unsafe { *p = *byte });
        }
    }
    fn get(&self, at: usize, bytes: &mut [u8]) {
        for (cell, byte) in self.0[at..].iter().zip(bytes) {
            // SAFETY: as above.
            *byte = cell.with(|p| unsafe { *p });
        }
    }
}

type EdgeWords = StdArc<Vec<SlotWord>>;
type Tx = RingSender<Arc<RingWords>, Arc<Cells>>;
type Rx = RingReceiver<Arc<RingWords>, Arc<Cells>>;

fn ring(bytes: usize, max_frame: usize) -> (Tx, Rx) {
    let words = Arc::new(RingWords::default());
    let cells = Arc::new(Cells((0..bytes).map(|_| UnsafeCell::new(0)).collect()));
    (
        RingSender::new(Arc::clone(&words), Arc::clone(&cells)),
        RingReceiver::new(words, cells, max_frame),
    )
}

fn pop(rx: &mut Rx) -> (u32, Vec<u8>) {
    let mut frame = Vec::new();
    loop {
        if let Some(tag) = rx.pop(&mut frame).unwrap() {
            return (tag, frame);
        }
        thread::yield_now();
    }
}

#[test]
fn frames_are_seen_whole_and_in_order_and_their_room_is_reused_only_after() {
    check(|| {
        // Room for two records: the third push reuses the bytes of the first.
        let (mut tx, mut rx) = ring(32, 4);
        let sender = thread::spawn(move || {
            for n in 0..3_u8 {
                while tx.push(u32::from(n), &[n, n + 10]).is_err() {
                    thread::yield_now();
                }
            }
        });
        for n in 0..3_u8 {
            assert_eq!(pop(&mut rx), (u32::from(n), vec![n, n + 10]));
        }
        sender.join().unwrap();
    });
}

/// One edge: slot states, their payloads, and the ring that announces them.
struct Edge {
    producer: Arc<Producer<EdgeWords>>,
    consumer: Consumer<EdgeWords>,
    payload: Arc<Vec<UnsafeCell<u32>>>,
    tx: Tx,
    rx: Rx,
}

fn edge(depth: usize) -> Edge {
    let words: EdgeWords = StdArc::new((0..depth).map(|_| SlotWord::default()).collect());
    let (tx, rx) = ring(64, 4);
    Edge {
        producer: Arc::new(Producer::new(StdArc::clone(&words), Rank::new(1))),
        consumer: Consumer::new(words),
        payload: Arc::new((0..depth).map(|_| UnsafeCell::new(0)).collect()),
        tx,
        rx,
    }
}

fn read(consumer: &Consumer<EdgeWords>, payload: &[UnsafeCell<u32>], rx: &mut Rx) -> u32 {
    let (slot, _) = pop(rx);
    consumer.take(slot).unwrap();
    // SAFETY: loom reports a write that is not ordered with this read.
    let value = payload[slot as usize].with(|p| unsafe { *p });
    consumer.give_back(slot);
    value
}

#[test]
fn a_slot_is_never_written_while_the_peer_reads_it() {
    check(|| {
        let Edge {
            producer,
            consumer,
            payload,
            mut tx,
            mut rx,
        } = edge(1);
        let written = Arc::clone(&payload);
        let sender = thread::spawn(move || {
            for n in 1..=2 {
                // Dropped in flight each time: the reaper alone brings the slot back.
                let slot = loop {
                    match producer.lease() {
                        Some(slot) => break slot,
                        None => thread::yield_now(),
                    }
                };
                // SAFETY: loom reports a read that is not ordered with this write.
                written[slot as usize].with_mut(|p| unsafe { *p = n });
                producer.submit(slot);
                tx.push(slot, &[]).unwrap();
                producer.orphan(slot);
            }
        });
        assert_eq!(read(&consumer, &payload, &mut rx), 1);
        assert_eq!(read(&consumer, &payload, &mut rx), 2);
        sender.join().unwrap();
    });
}

#[test]
fn two_threads_never_lease_the_same_slot() {
    check(|| {
        let Edge {
            producer, payload, ..
        } = edge(1);
        let (other, others) = (Arc::clone(&producer), Arc::clone(&payload));
        let write = |producer: &Producer<EdgeWords>, payload: &[UnsafeCell<u32>]| {
            if let Some(slot) = producer.lease() {
                // SAFETY: loom reports two accesses that are not ordered.
                payload[slot as usize].with_mut(|p| unsafe { *p += 1 });
                producer.give_up(slot);
            }
        };
        let racing = thread::spawn(move || write(&other, &others));
        write(&producer, &payload);
        racing.join().unwrap();
    });
}

#[test]
fn two_threads_may_ask_after_the_same_slot_in_flight() {
    check(|| {
        let Edge {
            producer, consumer, ..
        } = edge(1);
        let slot = producer.lease().unwrap();
        producer.submit(slot);
        let other = Arc::clone(&producer);
        let asking = thread::spawn(move || other.has_come_back(slot).unwrap());
        let giving = thread::spawn(move || consumer.give_back(slot));
        producer.has_come_back(slot).unwrap();
        asking.join().unwrap();
        giving.join().unwrap();
        assert!(producer.has_come_back(slot).unwrap());
        producer.redeem(slot);
    });
}

/// A futex as the kernel gives it: compares and sleeps in one step.
struct Futex {
    words: BellWords,
    kernel: Mutex<()>,
    queue: Condvar,
}

impl Futex {
    fn ring(&self) {
        if self.words.ring() {
            let _kernel = self.kernel.lock().unwrap();
            self.queue.notify_all();
        }
    }

    /// What a driver does that found nothing: listens, looks again, sleeps.
    fn wait_unless(&self, found: impl FnOnce() -> bool) {
        let ticket = self.words.listen();
        if !found() {
            self.sleep(ticket);
        }
        self.words.unlisten();
    }

    fn sleep(&self, ticket: Ticket) {
        if self.words.enter(ticket) {
            let kernel = self.kernel.lock().unwrap();
            if self.words.is_silent_since(ticket) {
                drop(self.queue.wait(kernel).unwrap());
            }
        }
        self.words.leave();
    }
}

#[test]
fn no_ring_is_lost_between_looking_and_sleeping() {
    // Loom calls it a deadlock when the sleeper is never woken.
    check(|| {
        let futex = Arc::new(Futex {
            words: BellWords::default(),
            kernel: Mutex::new(()),
            queue: Condvar::new(),
        });
        let work = Arc::new(AtomicU32::new(0));
        let (their_futex, their_work) = (Arc::clone(&futex), Arc::clone(&work));
        let ringer = thread::spawn(move || {
            their_work.store(1, Ordering::Release);
            their_futex.ring();
        });
        while work.load(Ordering::Acquire) == 0 {
            futex.wait_unless(|| work.load(Ordering::Acquire) == 1);
        }
        ringer.join().unwrap();
    });
}

#[test]
fn a_shutdown_wakes_a_driver_that_waits_for_a_credit() {
    // The driver waits for a credit; the peer gives one back, or a fault is raised, or both.
    check(|| {
        let futex = Arc::new(Futex {
            words: BellWords::default(),
            kernel: Mutex::new(()),
            queue: Condvar::new(),
        });
        let credit = Arc::new(AtomicU32::new(0));
        let fault = Arc::new(AtomicU32::new(0));
        let peer = {
            let (futex, credit) = (Arc::clone(&futex), Arc::clone(&credit));
            thread::spawn(move || {
                credit.store(1, Ordering::Release);
                futex.ring();
            })
        };
        let watch = {
            let (futex, fault) = (Arc::clone(&futex), Arc::clone(&fault));
            thread::spawn(move || {
                fault.store(1, Ordering::Release);
                futex.ring();
            })
        };
        // It looks for both: neither may be missed, whichever comes first.
        let all = || credit.load(Ordering::Acquire) == 1 && fault.load(Ordering::Acquire) == 1;
        while !all() {
            futex.wait_unless(all);
        }
        peer.join().unwrap();
        watch.join().unwrap();
    });
}

/// A communicator whose end loom checks against every use.
struct Communicator {
    gate: Gate,
    memory: UnsafeCell<bool>,
}

impl Communicator {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            gate: Gate::default(),
            memory: UnsafeCell::new(true),
        })
    }

    fn touch(&self) {
        // SAFETY: loom reports an end that is not ordered with this use.
        assert!(
            self.memory.with(|alive| unsafe { *alive }),
            "used after its end"
        );
    }

    /// Closes the gate, waits for the call that is under way, and ends the communicator.
    fn end(&self) {
        self.gate.close();
        while self.gate.call().is_some() {
            thread::yield_now();
        }
        // SAFETY: loom reports a use that is not ordered with this.
        self.memory.with_mut(|alive| unsafe { *alive = false });
    }
}

#[test]
fn a_communicator_is_not_used_after_its_end() {
    check(|| {
        let communicator = Communicator::new();
        let ending = Arc::clone(&communicator);
        let ender = thread::spawn(move || ending.end());
        for _ in 0..2 {
            if let Some(_pass) = communicator.gate.enter(Calling::Prompt) {
                communicator.touch();
            }
        }
        ender.join().unwrap();
    });
}

/// A group is ended once it was begun, so it passes the gate once.
#[test]
fn a_group_that_was_begun_ends_before_its_communicator() {
    check(|| {
        let communicator = Communicator::new();
        let ending = Arc::clone(&communicator);
        let ender = thread::spawn(move || ending.end());
        if let Some(pass) = communicator.gate.enter(Calling::Prompt) {
            communicator.touch();
            pass.may_hang();
            communicator.touch();
        }
        ender.join().unwrap();
    });
}

/// The recorder's ring: what a reader takes for a record is one, whichever thread writes meanwhile.
#[test]
fn a_record_is_read_whole_or_not_at_all() {
    check(|| {
        let ring = Arc::new(Ring::new(1));
        let first = ring.append(&[1; WORDS]);
        let writing = Arc::clone(&ring);
        let writer = thread::spawn(move || {
            // Two words that change together, and then a younger record in their place.
            writing.amend(first, [(1, 2), (2, 2)]);
            writing.append(&[3; WORDS]);
        });
        if let Some(words) = ring.read(first) {
            assert!(words[1] == words[2] && words[1] < 3);
        }
        writer.join().unwrap();
        assert_eq!(ring.read(1).map(|words| words[1]), Some(3));
    });
}

/// Two writers at one slot: one of them drops what it has to say, and no record is a mixture.
#[test]
fn two_writers_of_a_slot_do_not_mix() {
    check(|| {
        let ring = Arc::new(Ring::new(1));
        let other = Arc::clone(&ring);
        let racing = thread::spawn(move || other.append(&[1; WORDS]));
        ring.append(&[2; WORDS]);
        racing.join().unwrap();
        let kept = (0..2).filter_map(|number| ring.read(number));
        for words in kept {
            assert!(words[1..].iter().all(|word| *word == words[1]));
        }
    });
}

/// The words of a group of two, and the staging of its first member.
#[derive(Clone)]
struct Pair(Arc<PairMemory>);

struct PairMemory {
    members: [MemberWords; 2],
    pairs: [PairWords; 4],
    staging: Vec<UnsafeCell<u64>>,
}

impl GroupWords for Pair {
    fn members(&self) -> usize {
        2
    }
    fn member(&self, at: usize) -> &MemberWords {
        &self.0.members[at]
    }
    fn pair(&self, from: usize, to: usize) -> &PairWords {
        &self.0.pairs[2 * from + to]
    }
}

impl Pair {
    fn put(&self, slot: u64, value: u64) {
        // SAFETY: loom reports a read that is not ordered with this write.
        self.0.staging[slot as usize].with_mut(|p| unsafe { *p = value });
    }
    fn get(&self, slot: u64) -> u64 {
        // SAFETY: as above.
        self.0.staging[slot as usize].with(|p| unsafe { *p })
    }
}

/// Both members of a group.
fn pair() -> [Counts<Pair>; 2] {
    let memory = Pair(Arc::new(PairMemory {
        members: Default::default(),
        pairs: Default::default(),
        staging: (0..SLOTS).map(|_| UnsafeCell::new(0)).collect(),
    }));
    [0, 1].map(|own| Counts::new(memory.clone(), own))
}

fn until(mut is_so: impl FnMut() -> Result<bool, Stop>) {
    while !is_so().unwrap() {
        thread::yield_now();
    }
}

fn call(what: u64) -> Call {
    Call {
        what,
        ..Call::default()
    }
}

#[test]
fn pieces_of_a_group_are_seen_whole_and_their_slots_are_used_again_only_after() {
    check(|| {
        let [mut giver, mut taker] = pair();
        let giving = thread::spawn(move || {
            giver.enter(call(7));
            until(|| giver.has_entered(1));
            for step in 0..SLOTS + 1 {
                until(|| giver.may_publish());
                giver.words.put(giver.free_slot(), 10 + step);
                giver.publish();
                giver.consume();
            }
        });
        taker.enter(call(7));
        until(|| taker.has_entered(0));
        for step in 0..SLOTS + 1 {
            until(|| taker.may_publish());
            taker.publish();
            until(|| taker.has_published(0));
            assert_eq!(taker.words.get(taker.slot()), 10 + step);
            taker.consume();
        }
        giving.join().unwrap();
    });
}

/// A member that is one call ahead does not hide what it called before.
#[test]
fn members_compare_the_same_call() {
    check(|| {
        let [mut one, mut other] = pair();
        let ahead = thread::spawn(move || {
            for what in 0..3 {
                one.enter(call(what));
                until(|| one.has_entered(1));
            }
        });
        for what in 0..3 {
            other.enter(call(what));
            until(|| other.has_entered(0));
        }
        ahead.join().unwrap();
    });
}

#[test]
fn a_transfer_of_a_group_is_whole_and_leaves_the_staging_free() {
    check(|| {
        let [mut sender, mut receiver] = pair();
        let sending = thread::spawn(move || {
            sender.begin(Side::Sender, 1, 9);
            until(|| sender.has_begun(Side::Sender, 1, 9));
            for piece in 0..SLOTS + 1 {
                until(|| sender.may_move(Side::Sender, 1, piece));
                sender.words.put(piece % SLOTS, 10 + piece);
                sender.has_moved(Side::Sender, 1, piece);
            }
            until(|| sender.finish(Side::Sender, 1, SLOTS + 1));
            sender.words.put(0, 0);
        });
        receiver.begin(Side::Receiver, 0, 9);
        until(|| receiver.has_begun(Side::Receiver, 0, 9));
        for piece in 0..SLOTS + 1 {
            until(|| receiver.may_move(Side::Receiver, 0, piece));
            assert_eq!(receiver.words.get(piece % SLOTS), 10 + piece);
            receiver.has_moved(Side::Receiver, 0, piece);
        }
        until(|| receiver.finish(Side::Receiver, 0, SLOTS + 1));
        sending.join().unwrap();
    });
}

/// Each enters its call, rings, and looks once: one of the two sees that they wait for each other.
#[test]
fn the_last_of_those_that_wait_for_each_other_sees_it() {
    check(|| {
        let [mut one, mut other] = pair();
        let first = thread::spawn(move || {
            one.enter(call(7));
            one.words.member(1).bell.ring();
            one.stuck_with().is_some()
        });
        other.begin(Side::Sender, 0, 9);
        other.words.member(0).bell.ring();
        let second = other.stuck_with().is_some();
        assert!(first.join().unwrap() || second);
    });
}

/// The first reason of an end is told whole, and no other.
#[test]
fn a_group_ends_for_one_reason() {
    check(|| {
        let life = Arc::new(LifeWords::default());
        let other = Arc::clone(&life);
        let ending = thread::spawn(move || other.end("eight by"));
        life.end("eight to");
        assert!(life.has_ended());
        ending.join().unwrap();
        let why = life.why();
        assert!(why == "eight to" || why == "eight by", "{why}");
    });
}
