//! What only the NCCL backend does: order past what NCCL buffers, ends that are bounded, one thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pp_contract::{Composer, Lockstep, Rank};
use pp_device::{Device, Event, Stream};
use pp_testing::{number, pattern, prepare, wait_for};
use pp_transport::bell::Bell;
use pp_transport::control::{ControlError, ControlSender, Message};
use pp_transport::error::TransportError;
use pp_transport::gpu::{DeviceRx, DeviceTx, Receiving, Sending};
use pp_transport::host::EdgeShape;
use pp_transport::in_flight::{Completion, InFlight};
use pp_transport::lane;
use pp_transport::launch::Via;
use pp_transport::nccl::{self, Issuer, Nccl, NcclOptions};

use crate::control_support;
use crate::devices::{
    HANG, NcclLink, Shape, connect, download, fakes, ids, is_real, issuers, options, pair,
    settled_free, small_lanes, upload, wait, within,
};
use crate::two_way::{Lanes, edge_ends};
use pp_fakes::raw::TestKernels;

/// More than NCCL sends with no receiver there: 64 MiB on an H200, 1 MiB on the fake.
pub(crate) fn past_the_buffers() -> usize {
    if is_real() { 160 << 20 } else { 2 << 20 }
}

/// One rank, sending and receiving.
pub(crate) struct End {
    on: usize,
    pub(crate) link: NcclLink,
    composer: Composer,
    lockstep: Lockstep,
    inbox: Vec<u8>,
    pub(crate) sent: u64,
    pub(crate) received: u64,
    arriving: VecDeque<(u64, InFlight<Receiving>)>,
}

pub(crate) fn ends((lower, higher): (NcclLink, NcclLink)) -> [End; 2] {
    let end = |on, link| End {
        on,
        link,
        composer: Composer::new(),
        lockstep: Lockstep::new(),
        inbox: Vec::new(),
        sent: 0,
        received: 0,
        arriving: VecDeque::new(),
    };
    [end(0, lower), end(1, higher)]
}

pub(crate) fn payload(on: usize, n: u64, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|i| pattern(n * 2 + on as u64, i)).collect()
}

impl End {
    pub(crate) fn lease(&mut self) -> DeviceTx {
        let deadline = Instant::now() + HANG;
        loop {
            if let Some(lease) = self.link.try_lease().unwrap() {
                return lease;
            }
            assert!(Instant::now() < deadline, "no credit came");
        }
    }

    pub(crate) fn try_send(
        &mut self,
        bytes: usize,
        lease: DeviceTx,
    ) -> Result<InFlight<Sending>, TransportError> {
        let (message, stamp) = prepare(&mut self.composer, self.sent, bytes);
        let sent = self.link.send(message, stamp, Some(lease));
        self.sent += 1;
        sent.map(|sent| sent.payload.unwrap()).map_err(|r| r.error)
    }

    /// A send that fails: its payload comes back.
    pub(crate) fn fail_to_send(&mut self, bytes: usize) -> DeviceTx {
        let mut lease = self.lease();
        upload(self.on, &mut lease, 0, &payload(self.on, self.sent, bytes));
        let (message, stamp) = prepare(&mut self.composer, self.sent, bytes);
        let sent = self.link.send(message, stamp, Some(lease));
        sent.unwrap_err().buffer.expect("the payload comes back")
    }

    pub(crate) fn send(&mut self, bytes: usize) -> InFlight<Sending> {
        let mut lease = self.lease();
        upload(self.on, &mut lease, 0, &payload(self.on, self.sent, bytes));
        self.try_send(bytes, lease).unwrap()
    }

    /// Posts the receive of the next message, if one is there.
    pub(crate) fn hear(&mut self) -> bool {
        self.try_hear(|| ()).unwrap()
    }

    pub(crate) fn try_hear(&mut self, before: impl FnOnce()) -> Result<bool, TransportError> {
        if !self.link.poll_frame(&mut self.inbox)? {
            return Ok(false);
        }
        let matched = self.lockstep.admit(&self.inbox).unwrap();
        before();
        let flight = self.link.receive(&matched)?;
        self.arriving.push_back((number(&matched), flight));
        Ok(true)
    }

    pub(crate) fn hear_one(&mut self) -> (u64, InFlight<Receiving>) {
        let deadline = Instant::now() + HANG;
        while !self.hear() {
            assert!(Instant::now() < deadline, "no frame came");
        }
        self.arriving.pop_back().unwrap()
    }

    /// Waits until a slot comes back, which must not be before its reader is done.
    pub(crate) fn assert_back_once(&mut self, read: &Event, sent: &InFlight<Sending>) {
        wait(|| {
            self.hear();
            let is_back = sent.is_done().unwrap();
            let is_read = read.is_done().unwrap();
            assert!(is_read || !is_back, "given back while it is read");
            is_read
        });
        let deadline = Instant::now() + HANG;
        while !sent.is_done().unwrap() {
            // The link gives it back in any of its calls.
            self.link.try_lease().unwrap();
            assert!(Instant::now() < deadline);
        }
    }

    /// Reads what has arrived, and checks that it is the next and whole.
    pub(crate) fn take(&mut self, bytes: usize) {
        while let Some((n, flight)) = self.arriving.pop_front() {
            match flight.complete().unwrap() {
                Completion::Pending(again) => return self.arriving.push_front((n, again)),
                Completion::Done(lease) => {
                    assert_eq!(n, self.received);
                    let wanted = payload(1 - self.on, n, bytes);
                    assert!(download(self.on, &lease) == wanted, "message {n} is wrong");
                    self.received += 1;
                }
            }
        }
    }
}

pub(crate) fn both_ways(depth: u32, bytes: usize) -> Shape {
    let edge = EdgeShape {
        depth,
        slot_bytes: bytes as u64,
    };
    Shape {
        up: edge,
        down: edge,
        blocking: true,
    }
}

/// Sends this many messages each way at once, all of one thread, and checks each.
pub(crate) fn talk(ends: &mut [End; 2], bytes: usize, messages: u64) {
    let deadline = Instant::now() + HANG * 2;
    let goal = ends[0].sent + messages;
    while ends.iter().any(|end| end.received < goal) {
        assert!(Instant::now() < deadline, "the talk stands still");
        for end in &mut *ends {
            if end.sent < goal
                && let Some(mut lease) = end.link.try_lease().unwrap()
            {
                upload(end.on, &mut lease, 0, &payload(end.on, end.sent, bytes));
                drop(end.try_send(bytes, lease).unwrap());
            }
            while end.hear() {}
            end.take(bytes);
        }
    }
}

/// Both directions at once, with payloads that NCCL does not buffer: a wrong order would hang.
#[test]
fn payloads_past_the_buffers_keep_their_order_both_ways() {
    let bytes = past_the_buffers();
    for depth in [1, 2] {
        talk(&mut ends(pair(both_ways(depth, bytes))), bytes, 6);
    }
}

#[test]
fn a_link_of_non_blocking_communicators_moves_the_same() {
    let shape = Shape {
        blocking: false,
        ..both_ways(2, 70_000)
    };
    talk(&mut ends(pair(shape)), 70_000, 20);
}

/// Both ends of a link whose lane goes over the control channel; a rank whose flag is set does not
/// read there.
fn over_the_channel(
    via: Via,
    shape: Shape,
) -> ([End; 2], [ControlSender; 2], [Arc<AtomicBool>; 2]) {
    let (zero, one) = control_support::pair(via);
    let stopped = [(); 2].map(|()| Arc::<AtomicBool>::default());
    let mut lanes = Vec::new();
    let mut senders = Vec::new();
    for (channel, stopped) in [zero, one].into_iter().zip(stopped.clone()) {
        let (sender, mut receiver) = channel.split();
        let bell = Bell::new().unwrap();
        let edges = edge_ends(shape.up, shape.down, lanes.is_empty());
        let (ends, inlet) = lane::over_channel(sender.clone(), bell.clone(), &edges).unwrap();
        let [up, down] = ends.try_into().unwrap();
        lanes.push(Lanes { up, down, bell });
        senders.push(sender);
        std::thread::spawn(move || {
            loop {
                while stopped.load(Ordering::Relaxed) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let soon = Instant::now() + Duration::from_millis(5);
                match receiver.recv_deadline(soon) {
                    Ok(Message::Frame(body)) => inlet.deliver(body).unwrap(),
                    Ok(_) | Err(ControlError::TimedOut { .. }) => {}
                    // The other end is done.
                    Err(_) => return,
                }
            }
        });
    }
    let (one, zero) = (lanes.pop().unwrap(), lanes.pop().unwrap());
    let peers = (zero.up.peer(), one.down.peer());
    assert_eq!(peers, (Rank::new(1), Rank::new(0)));
    let senders = senders.try_into().unwrap();
    (ends(connect(shape, (zero, one)).unwrap()), senders, stopped)
}

#[test]
fn a_lane_over_the_control_channel_carries_frames_and_credits() {
    let (mut ends, ..) = over_the_channel(Via::Tcp, both_ways(2, 5000));
    talk(&mut ends, 5000, 50);
}

/// Sends to a peer that does not read, until nothing more goes. A Unix socket holds little; to fill one of TCP may take
/// half a minute.
fn fill(sender: &ControlSender) {
    // Smaller than what comes later, which would otherwise fit where this does not.
    let filler = Message::Hello(&[0]);
    let soon = || Instant::now() + Duration::from_millis(500);
    while sender.send(&filler, soon()).is_ok() {}
}

/// The socket to a peer that does not read is full: sends and credits wait there, and no call waits
/// with them.
#[test]
fn a_peer_that_does_not_read_holds_up_no_call() {
    let (mut ends, [sender, _], [_, stopped]) = over_the_channel(Via::Unix, both_ways(2, 5000));
    talk(&mut ends, 5000, 5);
    drop(ends[1].send(5000));
    let payload = wait_for(ends[0].hear_one().1);
    ends[0].received += 1;
    let mut leases = Vec::new();
    while leases.len() < 2 {
        leases.extend(ends[0].link.try_lease().unwrap());
        ends[1].hear();
    }
    stopped.store(true, Ordering::Relaxed);
    fill(&sender);
    drop(payload);
    for mut lease in leases {
        let bytes = crate::nccl_link::payload(0, ends[0].sent, 5000);
        upload(0, &mut lease, 0, &bytes);
        drop(ends[0].try_send(5000, lease).unwrap());
    }
    assert!(!ends[1].hear());
    stopped.store(false, Ordering::Relaxed);
    talk(&mut ends, 5000, 5);
}

/// The end of a link waits for no peer that does not read. What was sent leaves before the goodbye of the rank.
#[test]
fn a_goodbye_leaves_behind_the_last_words_of_a_link() {
    let ([mut first, mut second], [sender, _], [_, stopped]) =
        over_the_channel(Via::Unix, both_ways(2, 64));
    stopped.store(true, Ordering::Relaxed);
    fill(&sender);
    let last_words = 5;
    for call in 0..last_words {
        let (message, stamp) = prepare(&mut first.composer, call, 0);
        assert!(first.link.send(message, stamp, None).is_ok());
    }
    let deadline = Instant::now() + HANG;
    first.link.close(deadline).unwrap();
    stopped.store(false, Ordering::Relaxed);
    sender.send(&Message::Bye, deadline).unwrap();
    for _ in 0..last_words {
        while !second.link.poll_frame(&mut second.inbox).unwrap() {
            assert!(Instant::now() < deadline, "one of its last words was lost");
        }
    }
}

/// Device memory in use does not grow with the messages.
#[test]
fn the_steady_state_allocates_nothing() {
    let mut ends = ends(pair(both_ways(4, 4096)));
    talk(&mut ends, 4096, 20);
    let free = || [0, 1].map(|ordinal| settled_free(&Device::open(ordinal).unwrap()));
    let before = free();
    talk(&mut ends, 4096, 200);
    let after = free();
    // What an earlier test has dropped may be freed only now.
    let is_kept = before
        .iter()
        .zip(&after)
        .all(|(before, after)| after >= before);
    assert!(is_kept, "{before:?} free, then {after:?}");
}

#[test]
fn a_slot_goes_back_only_when_its_reader_is_done() {
    let Some(_) = fakes() else {
        return;
    };
    let mut ends = ends(pair(both_ways(1, 4096)));
    let kernels = on_device(1);
    let streams = [0, 1].map(|_| Stream::new(&Device::open(1).unwrap()).unwrap());
    let flight = ends[0].send(4096);
    let (_, arriving) = ends[1].hear_one();
    let payload: DeviceRx = wait_for(arriving);
    // Two readers; the first takes longer than the second, and must not be forgotten over it.
    let passed = [0, 1].map(|_| Event::new(&Device::open(1).unwrap()).unwrap());
    for (i, us) in [400_000, 1000].into_iter().enumerate() {
        let read = payload.read_on(&streams[i], |_| -> Result<(), TransportError> {
            kernels.spin(streams[i].raw(), us);
            Ok(passed[i].record(&streams[i])?)
        });
        read.unwrap();
    }
    wait(|| passed[1].is_done().unwrap());
    drop(payload);
    ends[1].assert_back_once(&passed[0], &flight);
}

#[test]
fn a_send_waits_for_what_writes_its_slot() {
    let Some(_) = fakes() else {
        return;
    };
    let mut ends = ends(pair(both_ways(2, 4096)));
    let kernels = on_device(0);
    let streams = [0, 1].map(|_| Stream::new(&Device::open(0).unwrap()).unwrap());
    let mut lease = ends[0].lease();
    // The later writer wins, though the first one is slow.
    for (stream, (us, n)) in streams.iter().zip([(100_000, 7), (0, 0)]) {
        let written = lease.write_on(stream, |slot| -> Result<(), TransportError> {
            kernels.spin(stream.raw(), us);
            kernels.fill(stream.raw(), slot.address, slot.len, n);
            Ok(())
        });
        written.unwrap();
    }
    let flight = ends[0].try_send(4096, lease).unwrap();
    let (_, arriving) = ends[1].hear_one();
    let got = download(1, &wait_for(arriving));
    assert!(got == payload(0, 0, 4096), "sent before it was written");
    drop(flight);
}

/// The kernels of the fake driver, on this device.
pub(crate) fn on_device(ordinal: u32) -> TestKernels {
    Device::open(ordinal).unwrap().bind().unwrap();
    TestKernels::load()
}

/// Issues a write of the slot that takes so many microseconds.
pub(crate) fn write_slowly(lease: &mut DeviceTx, on: &Stream, kernels: &TestKernels, us: u64) {
    let written = lease.write_on(on, |_| -> Result<(), TransportError> {
        kernels.spin(on.raw(), us);
        Ok(())
    });
    written.unwrap();
}

/// The same for a read of what arrived.
pub(crate) fn read_slowly(payload: &DeviceRx, on: &Stream, kernels: &TestKernels, us: u64) {
    let read = payload.read_on(on, |_| -> Result<(), TransportError> {
        kernels.spin(on.raw(), us);
        Ok(())
    });
    read.unwrap();
}

#[test]
fn an_abort_ends_what_is_in_flight_and_a_new_generation_works() {
    let bytes = past_the_buffers();
    for round in 0..2 {
        let mut ends = ends(pair(both_ways(1, bytes)));
        // The peer does not receive it, and it is too large to be buffered.
        let flight = ends[0].send(bytes);
        let handles = [0, 1].map(|on| ends[on].link.abort_handle());
        assert!(!handles[0].is_aborted());
        let deadline = Instant::now() + HANG;
        let threads = handles.map(|handle| {
            std::thread::spawn(move || handle.abort("the test gave it up", deadline))
        });
        for thread in threads {
            thread.join().unwrap().unwrap();
        }
        // The device lets go and calls it a success; the link must not believe it.
        std::thread::sleep(Duration::from_millis(50));
        for error in [
            flight.is_done().unwrap_err(),
            ends[0].link.try_lease().unwrap_err(),
            ends[1].link.poll_frame(&mut Vec::new()).unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(text.contains("the test gave it up"), "{round}: {text}");
        }
        drop(flight.complete().unwrap_err().buffer);
        drop(ends);
    }
    talk(&mut ends(pair(both_ways(2, 4096))), 4096, 10);
}

/// A receive that an abort cuts short: the device says that it succeeded.
#[test]
fn an_aborted_receive_is_never_believed() {
    let Some(_) = fakes() else {
        return;
    };
    let mut ends = ends(pair(both_ways(1, 4096)));
    let kernels = on_device(0);
    let stream = Stream::new(&Device::open(0).unwrap()).unwrap();
    let mut lease = ends[0].lease();
    write_slowly(&mut lease, &stream, &kernels, 300_000);
    let _sending = ends[0].try_send(4096, lease).unwrap();
    let (_, receiving) = ends[1].hear_one();
    assert!(!receiving.is_done().unwrap());
    let handle = ends[1].link.abort_handle();
    handle
        .abort("its peer is late", Instant::now() + HANG)
        .unwrap();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(100) {
        assert!(receiving.is_done().is_err());
    }
    drop(receiving.complete().unwrap_err());
}

#[test]
fn connecting_alone_ends_at_its_deadline_and_says_where_it_stood() {
    let [lower, higher] = issuers();
    let (lanes, _other) = small_lanes();
    let options = NcclOptions {
        deadline: Instant::now() + Duration::from_millis(300),
        ..options(lower, lanes, ids())
    };
    let error = nccl::connect(options, &|| true).unwrap_err().to_string();
    assert!(error.contains("rank 1"), "{error}");
    assert!(error.contains("communicators of the edges"), "{error}");
    drop(higher);
    // What was given up does not hinder the next link.
    talk(&mut ends(pair(both_ways(1, 64))), 64, 5);
}

#[test]
fn one_issuer_per_device_and_one_thread_per_issuer() {
    let mut ends = ends(pair(both_ways(1, 64)));
    let nccl = Nccl::load().unwrap();
    let taken = Issuer::open(&nccl, &Device::open(0).unwrap()).unwrap_err();
    assert!(matches!(taken, TransportError::DeviceTaken { ordinal: 0 }));

    talk(&mut ends, 64, 1);
    let [mut first, second] = ends;
    let first = std::thread::spawn(move || {
        let lease = first.lease();
        let error = first.try_send(64, lease).unwrap_err();
        assert!(
            matches!(error, TransportError::WrongThread { ordinal: 0 }),
            "{error}"
        );
        first
    });
    let mut first = first.join().unwrap();
    // Refused before anything left: the numbers go on where they were.
    first.sent -= 1;
    talk(&mut [first, second], 64, 1);
}

#[test]
fn a_send_that_fails_after_its_header_breaks_the_link() {
    let Some(fakes) = fakes() else {
        return;
    };
    let mut ends = ends(pair(both_ways(2, 64)));
    talk(&mut ends, 64, 1);
    let lease = ends[0].lease();
    fakes.set("FAULTS", "ncclSend:1:3,nothing:1:skip");
    let error = ends[0].try_send(64, lease).unwrap_err().to_string();
    fakes.set("FAULTS", "");
    assert!(
        error.contains("rank 1") && error.contains("ncclSend"),
        "{error}"
    );
    let after = ends[0].link.try_lease().unwrap_err();
    assert!(matches!(after, TransportError::Aborted { .. }), "{after}");
}

#[test]
fn a_communicator_that_fails_by_itself_is_noticed() {
    let Some(fakes) = fakes() else {
        return;
    };
    let bytes = past_the_buffers();
    let mut ends = ends(pair(both_ways(1, bytes)));
    let flight = ends[0].send(bytes);
    fakes.set("FAULTS", "asyncError:1:6,nothing:2:skip");
    let deadline = Instant::now() + HANG;
    let error = loop {
        assert!(Instant::now() < deadline, "nobody noticed");
        // A thread that waits for a credit asks, too.
        match flight.is_done() {
            Ok(done) => assert!(!done),
            Err(error) => break error.to_string(),
        }
    };
    fakes.set("FAULTS", "");
    assert!(error.contains("ncclRemoteError"), "{error}");
}

#[test]
fn a_lease_that_outlives_its_link_while_it_is_read_keeps_its_memory() {
    let Some(_) = fakes() else {
        return;
    };
    let mut ends = ends(pair(both_ways(1, 4096)));
    let kernels = on_device(1);
    let stream = Stream::new(&Device::open(1).unwrap()).unwrap();
    drop(ends[0].send(4096));
    let (_, arriving) = ends[1].hear_one();
    let lease = wait_for(arriving);
    let [first, second] = ends;
    read_slowly(&lease, &stream, &kernels, 200_000);
    drop(second);
    drop(lease);
    // Nothing gives the slot back any more, and nothing frees it under its reader: the fake driver
    // ends the process when that happens.
    wait(|| stream.is_idle().unwrap());
    drop(first);
}

#[test]
fn closing_in_order_is_quick_and_says_so() {
    let mut ends = ends(pair(both_ways(2, 64)));
    talk(&mut ends, 64, 3);
    let [first, second] = ends;
    let deadline = Instant::now() + within();
    // Each may wait for the other, so they close at once; both calls end in order.
    std::thread::scope(|scope| {
        let first = scope.spawn(move || first.link.close(deadline));
        second.link.close(deadline).unwrap();
        first.join().unwrap().unwrap();
    });
}
