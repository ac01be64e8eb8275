//! What only NCCL does: lanes to other hosts, connections that are bounded, one thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pp_contract::{Composer, Rank};
use pp_device::Device;
use pp_testing::{HANG, assert_has, prepare, until, until_some, wait_for};
use pp_transport::backend::{Backend as _, Joined};
use pp_transport::control::{ControlSender, Message};
use pp_transport::error::TransportError;
use pp_transport::flight::FlightRecorder;
use pp_transport::group::Members;
use pp_transport::launch::Via;
use pp_transport::nccl::{Communicator, Issuer, NcclBackend, UniqueId};

use crate::devices::{Held, the_fakes, upload, with};
use crate::edges_support::{Meeting, Peer};
use crate::gpu_link::{End, Mover, edge, ends, ends_of, meet, on_one_host, past_the_buffers, talk};
use crate::two_way::{TwoWay, how};

pub(crate) struct Nccl;

impl Mover for Nccl {
    type Edges = NcclBackend;

    fn backends(held: &mut Held) -> &mut [NcclBackend; 2] {
        &mut held.nccl
    }
}

crate::gpu_suite::conformance_on_gpus!(Nccl);

/// Lets what a test connects have communicators that do not block, or that do.
pub(crate) fn set_blocking(blocking: bool) {
    with(|held| {
        held.nccl
            .each_mut()
            .map(|backend| backend.blocking = blocking)
    });
}

/// Connects rank 0, and its peer does not.
pub(crate) fn connect_alone(
    within: Duration,
    is_wanted: &dyn Fn() -> bool,
) -> Result<TwoWay<NcclBackend>, TransportError> {
    let small = edge(1, 64);
    let [zero, _one] = meet::<Nccl>(&mut on_one_host(), small, small);
    let connected = with(|held| zero.connect(&mut held.nccl[0], within, is_wanted));
    connected.map(|(link, _)| link)
}

/// Joins a group of these ranks as rank 0, with a backend whose communicators do not block.
pub(crate) fn join(
    backend: &mut NcclBackend,
    ranks: &[u32],
    within: Duration,
) -> Result<Joined<Communicator>, TransportError> {
    let ranks: Vec<Rank> = ranks.iter().copied().map(Rank::new).collect();
    let members = Members::new("mesh", &ranks, Rank::new(0)).unwrap();
    let nccl = backend.nccl.clone().unwrap();
    let ids = [(); 2].map(|()| UniqueId::new(&nccl).unwrap());
    backend.blocking = false;
    let off = FlightRecorder::off();
    backend.connect_group((members, ids), how(within, &|| true, &off))
}

#[test]
fn a_link_of_non_blocking_communicators_moves_the_same() {
    // The backends are for this test alone.
    set_blocking(false);
    talk(&mut ends::<Nccl>(edge(2, 70_000)), 70_000, 20);
}

/// Both ends of a link whose lanes go over the control channel; a rank whose flag is set does not
/// read there.
fn over_the_channel(
    via: Via,
    bytes: usize,
) -> ([End<Nccl>; 2], [ControlSender; 2], [Arc<AtomicBool>; 2]) {
    let edge = edge(2, bytes);
    let mut peers = Meeting::of_two(via).map(Peer::on_another_host);
    let mut met = meet::<Nccl>(&mut peers, edge, edge);
    let stopped = [(); 2].map(|()| Arc::<AtomicBool>::default());
    let mut senders = Vec::new();
    for ((met, peer), stopped) in met.iter_mut().zip(peers).zip(&stopped) {
        senders.extend(peer.listen(met.on_frame.take(), stopped));
    }
    (ends_of(met), senders.try_into().unwrap(), stopped)
}

#[test]
fn a_lane_over_the_control_channel_carries_frames_and_credits() {
    let (mut ends, ..) = over_the_channel(Via::Tcp, 5000);
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
    let (mut ends, [sender, _], [_, stopped]) = over_the_channel(Via::Unix, 5000);
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
        let bytes = crate::gpu_link::payload(0, ends[0].sent, 5000);
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
    let ([mut first, mut second], [sender, _], [_, stopped]) = over_the_channel(Via::Unix, 64);
    stopped.store(true, Ordering::Relaxed);
    fill(&sender);
    let (last_words, mut composer) = (5, Composer::new());
    for call in 0..last_words {
        let (message, stamp) = prepare(&mut composer, call, 0);
        assert!(first.link.send(message, stamp, None).is_ok());
    }
    let deadline = Instant::now() + HANG;
    drop(first.link);
    stopped.store(false, Ordering::Relaxed);
    sender.send(&Message::Bye, deadline).unwrap();
    for _ in 0..last_words {
        until(|| second.link.poll_frame(&mut Vec::new()).unwrap());
    }
}

#[test]
fn connecting_alone_ends_at_its_deadline_and_says_where_it_stood() {
    // What the first link of a device takes time for is there then.
    drop(ends::<Nccl>(edge(1, 64)));
    set_blocking(false);
    let error = connect_alone(Duration::from_secs(1), &|| true);
    let error = error.map(drop).unwrap_err().to_string();
    assert!(error.contains("rank 1"), "{error}");
    assert!(error.contains("communicators of the edges"), "{error}");
    // What was given up does not hinder the next link.
    talk(&mut ends::<Nccl>(edge(1, 64)), 64, 5);
}

#[test]
fn a_second_issuer_or_thread_on_a_device_is_refused() {
    let mut ends = ends::<Nccl>(edge(1, 64));
    let nccl = pp_transport::nccl::Nccl::load().unwrap();
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
    let fakes = the_fakes!();
    let mut ends = ends::<Nccl>(edge(2, 64));
    talk(&mut ends, 64, 1);
    let lease = ends[0].lease();
    fakes.set("FAULTS", "ncclSend:1:3,nothing:1:skip");
    let error = ends[0].try_send(64, lease).unwrap_err().to_string();
    fakes.set("FAULTS", "");
    assert_has(&error, &["rank 1", "ncclSend"]);
    let after = ends[0].link.try_lease().unwrap_err();
    assert!(matches!(after, TransportError::Aborted { .. }), "{after}");
}

#[test]
fn a_communicator_that_fails_by_itself_is_noticed() {
    let fakes = the_fakes!();
    let bytes = past_the_buffers();
    let mut ends = ends::<Nccl>(edge(1, bytes));
    let flight = ends[0].send(bytes);
    fakes.set("FAULTS", "asyncError:1:6,nothing:2:skip");
    // A thread that waits for a credit asks, too.
    let ask = || flight.is_done().map(|done| assert!(!done)).err();
    let error = until_some("an error", ask).to_string();
    fakes.set("FAULTS", "");
    assert!(error.contains("ncclRemoteError"), "{error}");
}

/// Both ends at once, since each may wait for the other.
#[test]
fn a_link_with_nothing_in_flight_ends_in_order() {
    let fakes = the_fakes!();
    let mut ends = ends::<Nccl>(edge(2, 64));
    talk(&mut ends, 64, 3);
    // All slots are back: on a busy machine that may take longer than a drop waits.
    for end in &mut ends {
        drop([end.lease(), end.lease()]);
    }
    fakes.set("FAULTS", "ncclCommAbort:0:3");
    let aborts = std::thread::scope(|scope| {
        let ends = ends.map(|end| scope.spawn(move || end.abort));
        ends.map(|end| end.join().unwrap())
    });
    fakes.set("FAULTS", "");
    // They have ended: these say how.
    for abort in aborts {
        abort("too late", Instant::now()).unwrap();
    }
}
