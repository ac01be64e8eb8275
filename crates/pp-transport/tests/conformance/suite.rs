//! The claims, each a function over any backend.

use std::time::{Duration, Instant};

use pp_contract::{Composer, Lockstep};
use pp_testing::{HANG, assert_has, number, pattern, prepare, until, wait_for};
use pp_transport::bell::Listening;
use pp_transport::edge::Edges;
use pp_transport::in_flight::{Completion, InFlight};

use crate::two_way::TwoWay;

/// What the suite needs to know of a backend.
pub(crate) trait Backend: 'static {
    type Edges: Edges<Out: Send, In: Send> + 'static;

    /// Whether the bell rings for completions.
    const COMPLETIONS_RING: bool;

    /// Whether a payload that was sent is there for its receiver after its sender is gone. Where it
    /// moves by itself its sender has to stay.
    const SENT_OUTLIVES_SENDER: bool;

    /// A size that is large for this backend on this machine.
    fn large() -> usize;

    /// Both ends: a sender with this edge, and its receiver.
    fn pair(depth: u32, slot_bytes: u64) -> (Link<Self>, Link<Self>);

    /// Writes these bytes from byte `at` of the slot on, or lets a device do it.
    fn write(lease: &mut Tx<Self>, at: usize, bytes: &[u8]);

    /// The payload as it arrived.
    fn read(lease: &Rx<Self>) -> Vec<u8>;
}

pub(crate) type Link<B> = TwoWay<<B as Backend>::Edges>;
type Tx<B> = <<B as Backend>::Edges as Edges>::Tx;
type Rx<B> = <<B as Backend>::Edges as Edges>::Rx;
type Sending<B> = <<B as Backend>::Edges as Edges>::Sending;

/// Waits for a ring; where completions do not ring, no longer than until they are worth a look.
fn nap<B: Backend>(ear: Listening<'_>, deadline: Instant) {
    let look = Instant::now() + Duration::from_millis(1);
    ear.wait(if B::COMPLETIONS_RING { deadline } else { look });
}

/// A sender and what it needs.
struct Sender<B: Backend> {
    link: Link<B>,
    composer: Composer,
    next: u64,
}

impl<B: Backend> Sender<B> {
    fn new(link: Link<B>) -> Self {
        Self {
            link,
            composer: Composer::new(),
            next: 0,
        }
    }

    fn lease(&mut self) -> Tx<B> {
        let deadline = Instant::now() + HANG;
        loop {
            let bell = self.link.bell().clone();
            let ear = bell.listen();
            if let Some(lease) = self.link.try_lease().unwrap() {
                return lease;
            }
            assert!(Instant::now() < deadline, "no credit came");
            nap::<B>(ear, deadline);
        }
    }

    fn fill(&self, lease: &mut Tx<B>, bytes: usize) {
        let payload: Vec<u8> = (0..bytes).map(|i| pattern(self.next, i)).collect();
        B::write(lease, 0, &payload);
    }

    /// Sends the next message with this payload.
    fn send(&mut self, bytes: usize, lease: Option<Tx<B>>) -> Option<InFlight<Sending<B>>> {
        let (message, stamp) = prepare(&mut self.composer, self.next, bytes);
        let sent = self.link.send(message, stamp, lease).unwrap();
        assert_eq!(sent.header.payload_bytes(), bytes as u64);
        self.next += 1;
        sent.payload
    }

    fn send_filled(&mut self, bytes: usize) -> Option<InFlight<Sending<B>>> {
        if bytes == 0 {
            return self.send(0, None);
        }
        let mut lease = self.lease();
        self.fill(&mut lease, bytes);
        self.send(bytes, Some(lease))
    }
}

/// A receiver and what it needs.
struct Receiver<B: Backend> {
    link: Link<B>,
    lockstep: Lockstep,
    inbox: Vec<u8>,
}

impl<B: Backend> Receiver<B> {
    fn new(link: Link<B>) -> Self {
        Self {
            link,
            lockstep: Lockstep::new(),
            inbox: Vec::new(),
        }
    }

    /// The number of the next message, and its payload if it has one.
    fn receive(&mut self) -> (u64, Option<Rx<B>>) {
        let deadline = Instant::now() + HANG;
        loop {
            let bell = self.link.bell().clone();
            let ear = bell.listen();
            if self.link.poll_frame(&mut self.inbox).unwrap() {
                break;
            }
            assert!(Instant::now() < deadline, "no frame came");
            nap::<B>(ear, deadline);
        }
        let matched = self.lockstep.admit(&self.inbox).unwrap();
        let n = number(&matched);
        if matched.header().payload_bytes() == 0 {
            return (n, None);
        }
        let flight = self.link.receive(&matched).unwrap();
        (n, Some(wait_for(flight)))
    }
}

fn ends<B: Backend>(depth: u32, slot_bytes: u64) -> (Sender<B>, Receiver<B>) {
    let (tx, rx) = B::pair(depth, slot_bytes);
    (Sender::new(tx), Receiver::new(rx))
}

#[track_caller]
fn assert_payload<B: Backend>(n: u64, bytes: usize, payload: Option<&Rx<B>>) {
    let Some(payload) = payload else {
        assert_eq!(bytes, 0, "message {n} lost its payload");
        return;
    };
    let got = B::read(payload);
    assert_eq!(got.len(), bytes);
    let wrong = (0..bytes).find(|&i| got[i] != pattern(n, i));
    assert_eq!(wrong, None, "first wrong byte of message {n}");
}

pub(crate) fn messages_arrive_whole_and_in_order<B: Backend>() {
    const MESSAGES: u64 = 2000;
    let size = |n: u64| (n as usize * 97) % 1500;
    for depth in [1, 2, 4] {
        let (mut sender, mut receiver) = ends::<B>(depth, 1500);
        let sending = std::thread::spawn(move || {
            for n in 0..MESSAGES {
                drop(sender.send_filled(size(n)));
            }
            // Stays until all has arrived.
            sender
        });
        for n in 0..MESSAGES {
            let (got, payload) = receiver.receive();
            assert_eq!(got, n);
            assert_payload::<B>(n, size(n), payload.as_ref());
        }
        drop(sending.join().unwrap());
    }
}

pub(crate) fn there_are_as_many_leases_as_slots<B: Backend>() {
    for depth in [1, 3, 8] {
        let (mut sender, _receiver) = ends::<B>(depth, 16);
        let leases: Vec<_> = (0..depth).map(|_| sender.lease()).collect();
        assert!(sender.link.try_lease().unwrap().is_none());
        drop(leases);
        assert!(sender.link.try_lease().unwrap().is_some());
    }
}

pub(crate) fn backpressure_ends_when_the_receiver_lets_go<B: Backend>() {
    let (mut sender, mut receiver) = ends::<B>(2, 16);
    let first = sender.send_filled(16).unwrap();
    let _second = sender.send_filled(16).unwrap();
    assert!(sender.link.try_lease().unwrap().is_none());
    let (_, payload) = receiver.receive();
    let Ok(Completion::Pending(first)) = first.complete() else {
        panic!("done while the receiver reads");
    };
    assert!(sender.link.try_lease().unwrap().is_none());
    let bell = sender.link.bell().clone();
    let ear = bell.listen();
    drop(payload);
    // The bell rings for a credit; a lost ring would make this wait an hour.
    let far = Instant::now() + Duration::from_secs(3600);
    ear.wait(far);
    let lease = wait_for(first);
    assert!(
        sender.link.try_lease().unwrap().is_none(),
        "one slot, two leases"
    );
    drop(lease);
    assert!(sender.link.try_lease().unwrap().is_some());
}

pub(crate) fn payloads_of_every_size_arrive<B: Backend>() {
    const LARGEST: usize = 22_118_400;
    let (mut sender, mut receiver) = ends::<B>(1, LARGEST as u64);
    let sizes = [
        0,
        1,
        2,
        255,
        256,
        4095,
        4096,
        4097,
        65_536,
        (1 << 20) + 1,
        LARGEST,
    ];
    for (n, bytes) in (0..).zip(sizes) {
        let flight = sender.send_filled(bytes);
        let (got, payload) = receiver.receive();
        assert_eq!(got, n);
        assert_payload::<B>(n, bytes, payload.as_ref());
        drop(payload);
        drop(flight.map(wait_for));
    }
}

pub(crate) fn a_large_payload_arrives<B: Backend>() {
    const STEP: usize = 65_521;
    let bytes = B::large();
    let places = || (0..bytes).step_by(STEP).chain([bytes - 1]);
    let (mut sender, mut receiver) = ends::<B>(1, bytes as u64);
    let mut lease = sender.lease();
    for at in places() {
        B::write(&mut lease, at, &[pattern(0, at)]);
    }
    let _flight = sender.send(bytes, Some(lease));
    let (_, payload) = receiver.receive();
    let payload = payload.unwrap();
    let got = B::read(&payload);
    assert_eq!(got.len(), bytes);
    for at in places() {
        assert_eq!(got[at], pattern(0, at));
    }
}

pub(crate) fn a_dropped_lease_is_free_again<B: Backend>() {
    let (mut sender, mut receiver) = ends::<B>(1, 16);
    drop(sender.lease());
    drop(sender.send_filled(16));
    let (n, payload) = receiver.receive();
    assert_payload::<B>(n, 16, payload.as_ref());
}

pub(crate) fn a_send_dropped_in_flight_keeps_its_slot_until_read<B: Backend>() {
    let (mut sender, mut receiver) = ends::<B>(1, 4096);
    drop(sender.send_filled(4096));
    assert!(
        sender.link.try_lease().unwrap().is_none(),
        "freed in flight"
    );
    let (n, payload) = receiver.receive();
    assert!(
        sender.link.try_lease().unwrap().is_none(),
        "freed while read"
    );
    assert_payload::<B>(n, 4096, payload.as_ref());
    drop(payload);
    drop(sender.lease());
}

pub(crate) fn a_forgotten_send_is_leaked_not_reused<B: Backend>() {
    let (mut sender, mut receiver) = ends::<B>(1, 16);
    std::mem::forget(sender.send_filled(16));
    drop(receiver.receive());
    assert!(sender.link.try_lease().unwrap().is_none());
}

pub(crate) fn a_poisoned_slot_is_never_used_again<B: Backend>() {
    let (mut sender, mut receiver) = ends::<B>(2, 16);
    drop(sender.send_filled(16).unwrap().abort());
    drop(receiver.receive());
    let _other = sender.lease();
    assert!(sender.link.try_lease().unwrap().is_none());
}

pub(crate) fn a_refused_send_returns_its_buffer_and_uses_no_number<B: Backend>() {
    let (mut sender, mut receiver) = ends::<B>(1, 16);
    let (mut stranger, _other) = ends::<B>(1, 16);
    let mut lease = sender.lease();
    sender.fill(&mut lease, 16);
    let mut composer = Composer::new();

    let (message, stamp) = prepare(&mut composer, 0, 17);
    let rejected = sender.link.send(message, stamp, Some(lease)).unwrap_err();
    let text = rejected.error.to_string();
    assert_has(&text, &["17 bytes", "slot of 16 bytes"]);

    let (message, stamp) = prepare(&mut composer, 0, 0);
    let rejected = sender
        .link
        .send(message, stamp, rejected.buffer)
        .unwrap_err();

    let (message, stamp) = prepare(&mut composer, 0, 16);
    let foreign = stranger
        .link
        .send(message, stamp, rejected.buffer)
        .unwrap_err();
    assert!(foreign.error.to_string().contains("another edge"));

    let (message, stamp) = prepare(&mut composer, 0, 16);
    assert!(
        sender
            .link
            .send(message, stamp, None)
            .unwrap_err()
            .buffer
            .is_none()
    );

    // The buffer came through all of that unharmed, and the first number is still the first.
    let _flight = sender.send(16, foreign.buffer);
    let (n, payload) = receiver.receive();
    assert_payload::<B>(n, 16, payload.as_ref());
}

pub(crate) fn a_receive_needs_an_announced_payload<B: Backend>() {
    let (mut sender, mut receiver) = ends::<B>(2, 16);
    drop(sender.send_filled(16));
    assert!(receiver.link.poll_frame(&mut receiver.inbox).unwrap());
    let matched = receiver.lockstep.admit(&receiver.inbox).unwrap();
    let first = receiver.link.receive(&matched).unwrap();
    let again = receiver.link.receive(&matched);
    assert!(again.is_err(), "one header, two receives");
    drop(first);
}

pub(crate) fn leases_outlive_their_link<B: Backend>() {
    let (mut sender, mut receiver) = ends::<B>(2, 4096);
    let mut lease = sender.lease();
    drop(sender.send_filled(4096));
    let (n, payload) = receiver.receive();
    drop((sender.link, receiver.link));
    B::write(&mut lease, 0, &[1]);
    assert_payload::<B>(n, 4096, payload.as_ref());
}

/// One side is gone after each step of a transfer; the other must neither crash nor read what
/// was never sent, and what it was given stays readable.
pub(crate) fn a_peer_may_vanish_at_every_step<B: Backend>() {
    for step in 0..5 {
        let (mut sender, receiver) = ends::<B>(1, 64);
        let mut receiver = Some(receiver);
        let gone_at = |at: usize, receiver: &mut Option<Receiver<B>>| {
            if step == at {
                *receiver = None;
            }
        };
        gone_at(0, &mut receiver);
        let mut lease = sender.lease();
        gone_at(1, &mut receiver);
        sender.fill(&mut lease, 64);
        let flight = sender.send(64, Some(lease)).unwrap();
        gone_at(2, &mut receiver);
        let payload = receiver.as_mut().map(|r| r.receive().1);
        gone_at(3, &mut receiver);
        // The payload is a lease of the dead peer's own: it may still be read by its holder.
        drop(payload);
        gone_at(4, &mut receiver);
        let is_back = step >= 3;
        if is_back {
            until(|| flight.is_done().unwrap());
        }
        assert_eq!(flight.is_done().unwrap(), is_back, "step {step}");
        drop(flight);
        assert_eq!(sender.link.try_lease().unwrap().is_some(), is_back);
    }
    for step in 0..3 {
        let (mut sender, mut receiver) = ends::<B>(1, 64);
        let mut lease = (step > 0).then(|| sender.lease());
        if step > 1 {
            sender.fill(lease.as_mut().unwrap(), 64);
            drop(sender.send(64, lease.take()));
        }
        drop((sender, lease));
        let has_frame = receiver.link.poll_frame(&mut receiver.inbox).unwrap();
        assert_eq!(has_frame, step == 2);
        if has_frame {
            let matched = receiver.lockstep.admit(&receiver.inbox).unwrap();
            let flight = receiver.link.receive(&matched).unwrap();
            if !B::SENT_OUTLIVES_SENDER {
                // It comes or does not come; the test does not wait for it.
                continue;
            }
            assert_payload::<B>(0, 64, Some(&wait_for(flight)));
        }
    }
}
