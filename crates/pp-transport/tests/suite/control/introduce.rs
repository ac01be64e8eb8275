//! Two ranks that rank 0 introduces to each other get a channel of their own, and nobody else does.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Rank};
use pp_transport::control::{ControlChannel, Message, Peers, Received, SocketKind, introduce};
use pp_transport::launch::Via;

use crate::control_support::{Job, later};

const ZERO: Rank = Rank::new(0);
const ONE: Rank = Rank::new(1);
const TWO: Rank = Rank::new(2);

type Introduced = (Peers, Result<(), Fault>);

/// Each of these ranks, which have met, calls [`introduce`].
fn start(
    job: &Job,
    peers: Vec<Peers>,
    pairs: &[(u32, u32)],
    deadline: Instant,
) -> Vec<JoinHandle<Introduced>> {
    let pair = |(a, b): &(u32, u32)| (Rank::new(*a), Rank::new(*b));
    let pairs: Vec<_> = pairs.iter().map(pair).collect();
    let start = |mut peers: Peers| {
        let (launch, pairs) = (job.launch(peers.rank().get()), pairs.clone());
        std::thread::spawn(move || {
            let result = introduce(&mut peers, &launch, &pairs, deadline);
            // The channels live on until all have heard.
            (peers, result)
        })
    };
    peers.into_iter().map(start).collect()
}

/// What came of it, in order.
fn joined(ranks: Vec<JoinHandle<Introduced>>) -> Vec<Introduced> {
    ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
}

fn introduced(
    job: &Job,
    peers: Vec<Peers>,
    pairs: &[(u32, u32)],
    deadline: Instant,
) -> Vec<Introduced> {
    joined(start(job, peers, pairs, deadline))
}

/// Each of the two hears the other.
fn check(a: &mut ControlChannel, b: &mut ControlChannel) {
    for (from, to) in [(&*a, 1), (&*b, 2)] {
        let body = [to];
        from.sender().send(&Message::Frame(&body), later()).unwrap();
    }
    let heard = |channel: &mut ControlChannel| {
        let message = channel.receiver().recv_deadline(later()).unwrap();
        matches!(message, Message::Frame(_))
    };
    assert!(heard(a) && heard(b));
}

fn take(peers: &mut [Peers], of: u32, to: u32) -> ControlChannel {
    peers[of as usize].take(Rank::new(to)).unwrap()
}

#[test]
fn ranks_that_share_an_edge_get_a_channel_and_others_none() {
    for via in [Via::Auto, Via::Unix, Via::Tcp] {
        for (ranks, pairs) in [
            (3, vec![(1, 2)]),
            // Those with rank 0 need nothing, and neither do the two directions.
            (4, vec![(0, 1), (1, 2), (2, 1), (3, 2), (3, 0)]),
            (4, vec![(1, 3), (3, 1), (1, 2), (2, 3), (2, 2)]),
        ] {
            let job = Job::new(ranks, via);
            let all = introduced(&job, job.meet(), &pairs, later());
            let mut peers: Vec<Peers> = Vec::new();
            for (of, result) in all {
                result.unwrap();
                peers.push(of);
            }
            let of_two = pairs.iter().filter(|(a, b)| *a > 0 && *b > 0 && a != b);
            let expected: BTreeSet<_> = of_two.map(|(a, b)| (*a.min(b), *a.max(b))).collect();
            for a in 1..ranks {
                for b in a + 1..ranks {
                    let has = |of: u32, to| peers[of as usize].iter().any(|c| c.peer() == to);
                    let (a_has, b_has) = (has(a, Rank::new(b)), has(b, Rank::new(a)));
                    let is_expected = expected.contains(&(a, b));
                    assert_eq!((a_has, b_has), (is_expected, is_expected), "{a} {b}");
                }
            }
            for (a, b) in expected {
                let mut low = take(&mut peers, a, b);
                let mut high = take(&mut peers, b, a);
                check(&mut low, &mut high);
                let own = Some(rustix::process::getpid());
                let (kind, pid) = match via {
                    Via::Tcp => (SocketKind::Tcp, None),
                    _ => (SocketKind::Unix, own),
                };
                for end in [&low, &high] {
                    assert_eq!((end.socket_kind(), end.peer_pid()), (kind, pid));
                }
            }
            // The channels to rank 0 are as they were.
            let mut zero = take(&mut peers, 0, 1);
            check(&mut zero, &mut take(&mut peers, 1, 0));
        }
    }
}

/// As where rank 0 is on another host than two ranks that share one.
#[test]
fn ranks_of_one_host_take_a_unix_socket_wherever_rank_0_is() {
    let mut job = Job::new(3, Via::Tcp);
    let zero = job.start(0);
    job.via = Via::Auto;
    let others = [job.start(1), job.start(2)];
    let met = [zero].into_iter().chain(others);
    let met = met.map(|rank| rank.join().unwrap().unwrap()).collect();
    let all = introduced(&job, met, &[(1, 2)], later());
    let mut peers: Vec<Peers> = all
        .into_iter()
        .map(|(peers, result)| {
            result.unwrap();
            peers
        })
        .collect();
    assert_eq!(take(&mut peers, 1, 0).socket_kind(), SocketKind::Tcp);
    let (low, mut high) = (take(&mut peers, 1, 2), take(&mut peers, 2, 1));
    assert_eq!(low.socket_kind(), SocketKind::Unix);
    let file = std::fs::File::open("/dev/null").unwrap();
    low.sender().send_fds(&[file.as_fd()], later()).unwrap();
    loop {
        match high.receiver().try_recv_any(later()).unwrap() {
            Some(Received::Descriptors(fds)) => return assert_eq!(fds.len(), 1),
            Some(Received::Message(other)) => panic!("{other:?}"),
            None => std::thread::yield_now(),
        }
    }
}

#[test]
fn a_rank_that_dies_is_named_at_once_to_those_that_wait_for_it() {
    for via in [Via::Unix, Via::Tcp] {
        for dead in [1, 2] {
            let job = Job::new(4, via);
            let mut peers = job.meet();
            drop(peers.remove(dead));
            let started = Instant::now();
            for (peers, result) in introduced(&job, peers, &[(1, 2), (2, 3)], later()) {
                let fault = result.unwrap_err();
                let (kind, rank) = (FaultKind::PeerDied, Rank::new(dead as u32));
                assert_eq!((fault.kind, fault.rank), (kind, rank), "{fault}");
                drop(peers);
            }
            assert!(started.elapsed() < Duration::from_secs(20));
        }
    }
}

#[test]
fn a_rank_that_never_comes_is_named_to_all_when_the_time_is_over() {
    for silent in [1, 2] {
        let job = Job::new(3, Via::Tcp);
        let mut peers = job.meet();
        let held = peers.remove(silent);
        let within = Instant::now() + Duration::from_secs(2);
        for (_, result) in introduced(&job, peers, &[(1, 2)], within) {
            let fault = result.unwrap_err();
            let (kind, rank) = (FaultKind::TimedOut, Rank::new(silent as u32));
            assert_eq!((fault.kind, fault.rank), (kind, rank), "{fault}");
        }
        drop(held);
    }
}

#[test]
fn a_rank_outside_the_world_is_refused() {
    let job = Job::new(2, Via::Unix);
    for (_, result) in introduced(&job, job.meet(), &[(1, 2)], later()) {
        let fault = result.unwrap_err();
        let why = "rank 2 is not of a world of 2";
        assert!(fault.to_string().contains(why), "{fault}");
    }
}

/// Says words of an introduction, where the test speaks for a rank.
fn say(from: &mut Peers, to: Rank, words: &[u8]) {
    let to = from.get_mut(to).unwrap().sender();
    to.send(&Message::Introduce(words), later()).unwrap();
}

fn hear(to: &mut Peers, from: Rank) -> Vec<u8> {
    let from = to.get_mut(from).unwrap().receiver();
    match from.recv_deadline(later()).unwrap() {
        Message::Introduce(words) => words.to_vec(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_rank_that_ends_in_the_middle_is_named_with_its_reason() {
    for (dead, kind) in [1, 2]
        .map(|rank| [FaultKind::PeerDied, FaultKind::Plugin].map(|kind| (rank, kind)))
        .concat()
    {
        let job = Job::new(3, Via::Unix);
        let mut peers = job.meet();
        let mut gone = peers.remove(dead);
        let others = start(&job, peers, &[(1, 2)], later());
        hear(&mut gone, ZERO);
        if dead == 1 {
            // Its door is open, it says, so rank 2 calls there.
            say(&mut gone, ZERO, &[1, 0]);
        }
        let rank = Rank::new(dead as u32);
        if kind == FaultKind::Plugin {
            let reason = Fault::new(kind, rank, "set up", "out of cheese");
            let to_zero = gone.get_mut(ZERO).unwrap().sender();
            to_zero.send(&Message::Abort(reason), later()).unwrap();
        }
        drop(gone);
        for (_, result) in joined(others) {
            let fault = result.unwrap_err();
            assert_eq!((fault.kind, fault.rank), (kind, rank), "{fault}");
        }
    }
}

/// Ranks 1 and 2, which the test introduces in place of rank 0: `at_the_door` is told rank 1's port before rank 2 calls
/// there. Each of the two has a secret.
fn introduced_by_hand(
    job: &Job,
    at_the_door: &mut dyn FnMut(u16),
    [of_one, of_two]: [[u8; 32]; 2],
    deadline: Instant,
) -> Vec<Introduced> {
    let mut peers = job.meet();
    let mut zero = peers.remove(0);
    let ranks = start(job, peers, &[(1, 2)], deadline);
    say(&mut zero, ONE, &[&[0, 2], &of_one[..]].concat());
    let open = hear(&mut zero, ONE);
    let [1, 1, low, high, last] = *open else {
        panic!("{open:?}");
    };
    at_the_door(u16::from(low & 127) | u16::from(high & 127) << 7 | u16::from(last) << 14);
    let call = [&[2, 1], &of_two[..], &[0], &open[1..]].concat();
    say(&mut zero, TWO, &call);
    if of_one == of_two {
        for rank in [ONE, TWO] {
            assert_eq!(hear(&mut zero, rank), [3]);
        }
        for rank in [ONE, TWO] {
            say(&mut zero, rank, &[3]);
        }
    }
    joined(ranks)
}

#[test]
fn strangers_at_the_door_of_a_rank_keep_nobody_out() {
    let job = Job::new(3, Via::Tcp);
    let mut strangers = Vec::new();
    let mut call = |port| {
        for says in [
            &b""[..],
            b"GET / HTTP/1.1\r\n\r\n",
            &[0xff; 200],
            &[38, 0, 0, 0],
        ] {
            let mut stranger = TcpStream::connect(("127.0.0.1", port)).unwrap();
            stranger.write_all(says).unwrap();
            strangers.push(stranger);
        }
    };
    let all = introduced_by_hand(&job, &mut call, [[7; 32]; 2], later());
    let [mut one, mut two] = all.try_into().unwrap();
    one.1.unwrap();
    two.1.unwrap();
    check(&mut one.0.take(TWO).unwrap(), &mut two.0.take(ONE).unwrap());
    assert_eq!(strangers.len(), 4);
}

#[test]
fn a_rank_with_a_wrong_secret_is_turned_away_and_named() {
    let job = Job::new(3, Via::Tcp);
    let within = Instant::now() + Duration::from_secs(3);
    let all = introduced_by_hand(&job, &mut |_| {}, [[7; 32], [8; 32]], within);
    let [one, two] = [0, 1].map(|at: usize| all[at].1.clone().unwrap_err());
    assert_eq!((one.kind, one.rank), (FaultKind::TimedOut, TWO), "{one}");
    assert!(one.to_string().contains("without the secret"), "{one}");
    let kind = FaultKind::HandshakeMismatch;
    assert_eq!((two.kind, two.rank), (kind, TWO), "{two}");
    assert!(two.to_string().contains("the secret"), "{two}");
}
