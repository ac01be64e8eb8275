//! Backends as a rank uses them: any number of edges with a peer, of any shapes, and edges within a rank.

use std::sync::Arc;
use std::thread;

use pp_contract::{Composer, FaultKind, Lockstep, Rank};
use pp_testing::{Barrier, HANG, edge, number, prepare, until, until_some, wait_for};
use pp_transport::backend::{Backend, EdgeEnd, End, Peer as _};
use pp_transport::bell::Bell;
use pp_transport::edge::{EdgeLocal as _, EdgeRx as _, EdgeTx as _, Edges};
use pp_transport::error::TransportError;
use pp_transport::flight::FlightRecorder;
use pp_transport::in_flight::InFlight;
use pp_transport::launch::Via;

use crate::edges_support::{Gpu, Host, Kind, Meeting, OneGpu, P2pGpu, Peer, Rx, Tx, turn};
use crate::two_way::{how, whole};

const ROUNDS: u64 = 30;

/// Edges as rank 0 sees them, in no order.
fn mixed() -> Vec<EdgeEnd> {
    [
        (9, edge(2, 1000), true),
        (2, edge(0, 0), false),
        (5, edge(1, 5000), true),
        (7, edge(3, 64), false),
        (3, edge(4, 0), true),
        (1, edge(2, 300), false),
    ]
    .map(|(edge, shape, is_sender)| EdgeEnd {
        edge,
        shape,
        is_sender,
    })
    .into()
}

fn mirrored(ends: &[EdgeEnd]) -> Vec<EdgeEnd> {
    let mirror = |end: &EdgeEnd| EdgeEnd {
        is_sender: !end.is_sender,
        ..*end
    };
    // Each rank may give them in another order.
    ends.iter().rev().map(mirror).collect()
}

/// How much goes over an edge in a round.
fn bytes(shape: pp_transport::host::EdgeShape) -> usize {
    (shape.slot_bytes as usize).saturating_sub(3)
}

/// An end at work.
struct Worker<K: Kind> {
    edge: u32,
    bytes: usize,
    end: End<K::Backend>,
    composer: Composer,
    lockstep: Lockstep,
    inbox: Vec<u8>,
}

impl<K: Kind> Worker<K> {
    fn new(edge: u32, bytes: usize, end: End<K::Backend>) -> Self {
        Self {
            edge,
            bytes,
            end,
            composer: Composer::new(),
            lockstep: Lockstep::new(),
            inbox: Vec::new(),
        }
    }

    /// What is written to this edge in this round.
    fn content(&self, round: u64) -> u64 {
        u64::from(self.edge) << 32 | round
    }

    fn send(&mut self, memory: &mut K, round: u64) {
        let (n, bytes) = (self.content(round), self.bytes);
        let End::Out(end) = &mut self.end else {
            return;
        };
        let mut payload = None;
        if bytes > 0 {
            let mut lease = lease_of(|| end.try_lease());
            memory.write(&mut lease, bytes, n);
            payload = Some(lease);
        } else {
            assert!(end.try_lease().unwrap().is_none(), "it has no slot");
        }
        let (message, stamp) = prepare(&mut self.composer, round, bytes);
        drop(end.send(message, stamp, payload).unwrap());
    }

    /// Says whether all that was sent over this end has left.
    fn has_left(&mut self) -> bool {
        match &mut self.end {
            End::Out(end) => end.advance().unwrap(),
            End::In(_) => true,
        }
    }

    fn receive(&mut self, memory: &mut K, round: u64) {
        let (n, bytes) = (self.content(round), self.bytes);
        let End::In(end) = &mut self.end else {
            return;
        };
        until(|| end.poll_frame(&mut self.inbox).unwrap());
        let matched = self.lockstep.admit(&self.inbox).unwrap();
        assert_eq!(number(&matched), round, "edge {}", self.edge);
        if bytes > 0 {
            let payload = wait_for(end.receive(&matched).unwrap());
            memory.assert_holds(&payload, bytes, n);
        } else {
            assert!(end.receive(&matched).is_err(), "it has no payload");
        }
    }
}

fn lease_of<T>(mut lease: impl FnMut() -> Result<Option<T>, TransportError>) -> T {
    until_some("a slot", || lease().unwrap())
}

/// A rank from its meeting to its end: all edges at work, then all but the first.
fn work<K: Kind>(mut peer: Peer, ends: &[EdgeEnd], all: &Barrier) {
    let rank = peer.own_rank();
    let (mut memory, mut backend) = K::rank(rank.get());
    let bell = Bell::new().unwrap();
    let (agreed, on_frame) = backend.agree(&mut peer, ends, &bell).unwrap();
    let listening = peer.listen(on_frame, &Arc::default());
    let connected = backend.connect(agreed, how(HANG, &|| true, &FlightRecorder::off()));
    let connected = connected.unwrap();
    let numbers: Vec<_> = connected.ends.iter().map(|(edge, _)| *edge).collect();
    assert!(numbers.is_sorted());
    let has_payloads = ends.iter().any(|end| end.shape.has_payloads());
    let payload_moves = backend.capabilities().payload_moves;
    assert_eq!(connected.abort.is_some(), has_payloads && payload_moves);
    let workers = connected.ends.into_iter().map(|(number, end)| {
        let given = ends.iter().find(|given| given.edge == number).unwrap();
        assert_eq!(matches!(end, End::Out(_)), given.is_sender);
        Worker::<K>::new(number, bytes(given.shape), end)
    });
    let mut workers: Vec<_> = workers.collect();
    for round in 0..ROUNDS * 2 {
        if round == ROUNDS {
            all.wait();
            drop(workers.remove(0));
        }
        workers
            .iter_mut()
            .for_each(|worker| worker.send(&mut memory, round));
        // What this rank receives may wait for what it sends.
        while workers.iter_mut().any(|worker| !worker.has_left()) {}
        workers
            .iter_mut()
            .for_each(|worker| worker.receive(&mut memory, round));
    }
    all.wait();
    drop(workers);
    all.wait();
    drop(listening);
}

fn two_ranks<K: Kind>(via: Via, ends: &[EdgeEnd]) {
    two_kinds::<K, K>(via, ends);
}

fn two_kinds<Zero: Kind, One: Kind>(via: Via, ends: &[EdgeEnd]) {
    let _turn = turn();
    let (all, mirrored) = (Barrier::new(2), mirrored(ends));
    let [zero, one] = Meeting::of_two(via);
    thread::scope(|scope| {
        scope.spawn(|| work::<Zero>(zero.beside(One::IS_ON_DEVICE), ends, &all));
        work::<One>(one.beside(Zero::IS_ON_DEVICE), &mirrored, &all);
    });
    assert!(Zero::Backend::is_at_rest() && One::Backend::is_at_rest());
}

#[test]
fn edges_of_all_shapes_share_a_region() {
    two_ranks::<Host>(Via::Unix, &mixed());
}

#[test]
fn edges_of_all_shapes_share_a_life() {
    two_ranks::<Gpu>(Via::Unix, &mixed());
}

#[test]
fn edges_of_all_shapes_share_a_channel() {
    two_ranks::<Gpu>(Via::Tcp, &mixed());
}

#[test]
fn edges_of_all_shapes_share_a_page_of_numbers() {
    two_ranks::<P2pGpu>(Via::Unix, &mixed());
}

#[test]
fn edges_of_all_shapes_lie_between_host_and_device() {
    two_kinds::<Host, P2pGpu>(Via::Unix, &mixed());
    two_kinds::<P2pGpu, Host>(Via::Unix, &mixed());
}

/// Each of these backends has no NCCL that it could call.
#[test]
fn edges_that_carry_headers_alone_need_no_nccl() {
    let mut ends = mixed();
    ends.retain(|end| !end.shape.has_payloads());
    assert_eq!(ends.len(), 2);
    for via in [Via::Unix, Via::Tcp] {
        two_ranks::<OneGpu>(via, &ends);
    }
}

#[test]
fn a_backend_without_nccl_refuses_payloads_of_another_rank() {
    let _turn = turn();
    let [mut zero, _one] = Meeting::of_two(Via::Unix);
    let (_memory, mut backend) = OneGpu::rank(0);
    let bell = Bell::new().unwrap();
    let fault = backend.agree(&mut zero, &mixed(), &bell);
    let fault = fault.map(drop).unwrap_err();
    assert_eq!(
        (fault.kind, fault.rank),
        (FaultKind::Internal, Rank::new(0))
    );
    let text = fault.to_string();
    assert!(
        text.contains("NcclBackend::new") && !text.contains('\n'),
        "{text}"
    );
}

/// One end hears it; all edges with the peer are over.
fn a_peer_that_is_gone_ends_all_edges_with_it<K: Kind<Backend: Edges<Out: Send, In: Send>>>() {
    let _turn = turn();
    let ends = mixed();
    let mirrored = mirrored(&ends);
    let [zero, one] = Meeting::of_two(Via::Unix);
    let connect = |mut peer: Peer, ends: &[EdgeEnd]| {
        let (_, mut backend) = K::rank(peer.own_rank().get());
        let bell = Bell::new().unwrap();
        let (agreed, _) = backend.agree(&mut peer, ends, &bell).unwrap();
        let connected = backend.connect(agreed, how(HANG, &|| true, &FlightRecorder::off()));
        connected.unwrap().ends
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| connect(one, &mirrored));
        let mut ends = connect(zero, &ends);
        let End::In(first) = &mut ends[0].1 else {
            panic!("edge 1 comes from the peer");
        };
        first.peer_is_gone();
        for (number, end) in &mut ends {
            let error = match end {
                End::Out(end) => end.try_lease().map(drop).unwrap_err(),
                End::In(end) => end.poll_frame(&mut Vec::new()).map(drop).unwrap_err(),
            };
            let text = error.to_string();
            assert!(text.contains("its peer is gone"), "edge {number}: {text}");
        }
        drop((ends, other.join().unwrap()));
    });
}

#[test]
fn a_peer_that_is_gone_ends_all_edges_over_nccl() {
    a_peer_that_is_gone_ends_all_edges_with_it::<Gpu>();
}

#[test]
fn a_peer_that_is_gone_ends_all_edges_by_copy_engine() {
    a_peer_that_is_gone_ends_all_edges_with_it::<P2pGpu>();
}

fn local<K: Kind>(depth: u32, bytes: u64) -> (K, <K::Backend as pp_transport::edge::Edges>::Local) {
    let (memory, mut backend) = K::rank(0);
    (memory, backend.local(edge(depth, bytes)).unwrap())
}

fn payloads_are_handed_on<K: Kind>() {
    let _turn = turn();
    let (mut memory, mut edge) = local::<K>(2, 4096);
    let mut held = std::collections::VecDeque::new();
    for n in 0..100 {
        let mut lease = lease_of(|| edge.try_lease());
        let bytes = 1 + (n as usize * 997) % 4096;
        memory.write(&mut lease, bytes, n);
        let (sending, payload) = edge.hand_on(lease, bytes as u64).unwrap();
        held.push_back((n, bytes, payload));
        drop(sending);
        if held.len() == 2 {
            let (n, bytes, payload) = held.pop_front().unwrap();
            memory.assert_holds(&payload, bytes, n);
        }
    }
}

fn a_slot_is_free_when_reader_and_sender_are_done<K: Kind>() {
    let _turn = turn();
    for reader_first in [true, false] {
        let (mut memory, mut edge) = local::<K>(1, 64);
        let mut lease = lease_of(|| edge.try_lease());
        memory.write(&mut lease, 64, 1);
        let (sending, payload) = edge.hand_on(lease, 64).unwrap();
        assert!(!sending.is_done().unwrap(), "done before it is read");
        memory.assert_holds(&payload, 64, 1);
        assert!(edge.try_lease().unwrap().is_none());
        if reader_first {
            drop(payload);
            until(|| {
                assert!(edge.try_lease().unwrap().is_none(), "the sender holds it");
                sending.is_done().unwrap()
            });
            assert!(edge.try_lease().unwrap().is_none(), "the sender holds it");
            drop(sending);
        } else {
            drop(sending);
            assert!(edge.try_lease().unwrap().is_none(), "it is read yet");
            drop(payload);
        }
        lease_of(|| edge.try_lease());
    }
}

fn what_cannot_be_handed_on_comes_back<K: Kind>() {
    let _turn = turn();
    let (mut memory, mut backend) = K::rank(0);
    let mut local = |depth, bytes| backend.local(edge(depth, bytes)).unwrap();
    let (mut edge, mut other, mut bare) = (local(1, 64), local(1, 64), local(7, 0));
    assert!(bare.try_lease().unwrap().is_none());
    let mut lease = lease_of(|| edge.try_lease());
    memory.write(&mut lease, 64, 3);
    for (bytes, why) in [(0, "needs none"), (65, "a slot of 64 bytes")] {
        let rejected = edge.hand_on(lease, bytes).unwrap_err();
        let text = rejected.error.to_string();
        assert!(text.contains(why), "{text}");
        lease = rejected.buffer.unwrap();
    }
    let rejected = other.hand_on(lease, 64).unwrap_err();
    assert!(rejected.error.to_string().contains("another edge"));
    let (_sending, payload) = edge.hand_on(rejected.buffer.unwrap(), 64).unwrap();
    memory.assert_holds(&payload, 64, 3);
    assert!(backend.local(pp_testing::edge(0, 64)).is_err());
}

fn what_was_handed_on_can_be_copied_and_outlives_its_edge<K: Kind>() {
    let _turn = turn();
    let (mut memory, mut first) = local::<K>(1, 64);
    let (_, mut second) = local::<K>(1, 64);
    let mut lease = lease_of(|| first.try_lease());
    memory.write(&mut lease, 64, 5);
    let (sending, payload) = first.hand_on(lease, 64).unwrap();
    drop(first);
    let mut copy = lease_of(|| second.try_lease());
    sending.copy_into(&[whole(64)], &mut copy).unwrap();
    let (_sending, copied) = second.hand_on(copy, 64).unwrap();
    memory.assert_holds(&copied, 64, 5);
    memory.assert_holds(&payload, 64, 5);
    // Given up by its sender, it is still there for its reader.
    drop(sending.abort());
    memory.assert_holds(&payload, 64, 5);
}

macro_rules! on_both {
    ($($claim:ident)+) => {
        mod host {
            $(#[test] fn $claim() { super::$claim::<super::Host>(); })+
        }
        mod one_gpu {
            $(#[test] fn $claim() { super::$claim::<super::OneGpu>(); })+
        }
    };
}
on_both!(
    payloads_are_handed_on
    a_slot_is_free_when_reader_and_sender_are_done
    what_cannot_be_handed_on_comes_back
    what_was_handed_on_can_be_copied_and_outlives_its_edge
);

/// A slot of one edge on a GPU, handed on while the device works.
fn handed_on(
    edge: &mut pp_transport::gpu::DeviceLocal,
    write: impl FnOnce(&mut Tx<OneGpu>),
) -> (InFlight<pp_transport::gpu::Sending>, Rx<OneGpu>) {
    let mut lease = lease_of(|| edge.try_lease());
    write(&mut lease);
    edge.hand_on(lease, 4096).unwrap()
}

#[test]
fn a_reader_waits_for_the_writer_on_the_device() {
    let _turn = turn();
    let (mut memory, mut edge) = local::<OneGpu>(1, 4096);
    let writer = memory.stream();
    for n in 0..3 {
        let (_sending, payload) = handed_on(&mut edge, |lease| {
            memory.write_slowly(lease, &writer, 50_000, n);
        });
        memory.assert_holds(&payload, 4096, n);
    }
}

#[test]
fn a_slot_is_not_leased_while_any_stream_reads_it() {
    let _turn = turn();
    let (mut memory, mut edge) = local::<OneGpu>(1, 4096);
    let (slow, quick) = (memory.stream(), memory.stream());
    for nested in [false, true] {
        let (sending, payload) = handed_on(&mut edge, |lease| memory.write(lease, 4096, 1));
        let passed = memory.event();
        let read_slowly = || memory.read_slowly(&payload, &slow, 100_000, &passed);
        if nested {
            memory.read(&payload, &quick, read_slowly);
        } else {
            read_slowly();
            memory.read(&payload, &quick, || ());
        }
        drop((sending, payload));
        lease_of(|| edge.try_lease());
        assert!(passed.is_done().unwrap(), "leased while it is read");
    }
}

/// The copy waits for its turn; the slot it is made from is read, leased and written meanwhile.
#[test]
fn a_copy_of_what_was_handed_on_comes_before_the_next_writer() {
    let _turn = turn();
    let (mut memory, mut edge) = local::<OneGpu>(2, 4096);
    let (slow, other) = (memory.stream(), memory.stream());
    for reads_behind in [false, true] {
        let (sending, payload) = handed_on(&mut edge, |lease| memory.write(lease, 4096, 1));
        let mut copy = lease_of(|| edge.try_lease());
        memory.write_slowly(&mut copy, &slow, 100_000, 2);
        if !reads_behind {
            memory.assert_holds(&payload, 4096, 1);
            drop(payload);
            until(|| {
                assert!(edge.try_lease().unwrap().is_none());
                sending.is_done().unwrap()
            });
            sending.copy_into(&[whole(4096)], &mut copy).unwrap();
        } else {
            sending.copy_into(&[whole(4096)], &mut copy).unwrap();
            memory.read(&payload, &other, || ());
            drop(payload);
        }
        drop(sending);
        let mut next = lease_of(|| edge.try_lease());
        memory.write(&mut next, 4096, 9);
        let (_sending, copied) = edge.hand_on(copy, 4096).unwrap();
        memory.assert_holds(&copied, 4096, 1);
    }
}

/// A stage that panics leaves work behind that no event tells of.
#[test]
fn a_slot_whose_writer_panicked_is_not_handed_on() {
    let _turn = turn();
    let (memory, mut edge) = local::<OneGpu>(2, 4096);
    let stream = memory.stream();
    let mut lease = lease_of(|| edge.try_lease());
    let panics = |_| -> Result<(), TransportError> { panic!("a stage panics") };
    let caught = std::panic::AssertUnwindSafe(|| lease.write_on(&stream, panics));
    std::panic::catch_unwind(caught).unwrap_err();
    let rejected = edge.hand_on(lease, 4096).unwrap_err();
    let text = rejected.error.to_string();
    assert!(text.contains("without an event"), "{text}");
    drop(rejected.buffer);
    let _other = lease_of(|| edge.try_lease());
    assert!(edge.try_lease().unwrap().is_none(), "it is used again");
}

#[test]
fn many_ranks_share_one_backend() {
    let _turn = turn();
    let shape = edge(1, 256);
    // A ring of three: each rank sends to the next.
    let number = |from: u32| from + 10;
    let meeting = Arc::new(Meeting::new(&[0, 1, 2].map(Rank::new), Via::Unix));
    thread::scope(|scope| {
        for me in 0..3_u32 {
            let meeting = Arc::clone(&meeting);
            scope.spawn(move || {
                let (mut memory, mut backend) = Gpu::rank(me);
                let bell = Bell::new().unwrap();
                let (mut out, mut incoming) = (None, None);
                // The same order all over the job.
                for (low, high) in [(0, 1), (0, 2), (1, 2)] {
                    if ![low, high].contains(&me) {
                        continue;
                    }
                    let mut peer = meeting.peer(Rank::new(me), Rank::new(low + high - me));
                    let from = if (low + 1) % 3 == high { low } else { high };
                    let end = EdgeEnd {
                        edge: number(from),
                        shape,
                        is_sender: from == me,
                    };
                    let (agreed, _) = backend.agree(&mut peer, &[end], &bell).unwrap();
                    let made = backend.connect(agreed, how(HANG, &|| true, &FlightRecorder::off()));
                    for made in made.unwrap().ends {
                        match made.1 {
                            End::Out(_) => out = Some(made),
                            End::In(_) => incoming = Some(made),
                        }
                    }
                }
                let mut workers = [out, incoming].map(|end: Option<(u32, End<_>)>| {
                    let (edge, end) = end.expect("an edge out and one in");
                    Worker::<Gpu>::new(edge, 256, end)
                });
                for round in 0..ROUNDS {
                    let [out, incoming] = &mut workers;
                    out.send(&mut memory, round);
                    incoming.receive(&mut memory, round);
                }
                meeting.all.wait();
            });
        }
    });
}
