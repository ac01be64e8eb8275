//! Ranks meeting each other, and what they say when they do not.

use pp_testing::assert_has;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Rank, WorldSize};
use pp_transport::control::{ControlSender, Message, OnMet, Peers, RendezvousError, rendezvous};
use pp_transport::launch::{LocalJob, Via};

use crate::control_support::{Job, later, world};

fn ranks(peers: &Peers) -> Vec<u32> {
    peers.iter().map(|channel| channel.peer().get()).collect()
}

#[test]
fn ranks_meet_in_a_star_around_rank_0() {
    for via in [Via::Auto, Via::Unix, Via::Tcp] {
        let peers = Job::new(4, via).meet();
        assert_eq!(ranks(&peers[0]), [1, 2, 3]);
        for (rank, peers) in (0..).zip(&peers).skip(1) {
            assert_eq!(ranks(peers), [0]);
            assert_eq!(peers.rank(), Rank::new(rank));
            assert_eq!(peers.world_size(), world(4));
        }
        for channel in peers.into_iter().next().unwrap() {
            channel.sender().send(&Message::Heartbeat, later()).unwrap();
        }
    }
}

#[test]
fn rank_0_may_come_last() {
    for via in [Via::Auto, Via::Unix, Via::Tcp] {
        let job = Job::new(2, via);
        let one = job.start(1);
        std::thread::sleep(Duration::from_millis(100));
        let zero = job.start(0);
        assert_eq!(zero.join().unwrap().unwrap().iter().count(), 1);
        assert_eq!(one.join().unwrap().unwrap().iter().count(), 1);
    }
}

#[test]
fn world_of_one_meets_nobody() {
    let launch = LocalJob::new(WorldSize::new(1).unwrap())
        .launch(Rank::new(0))
        .unwrap();
    let job = Job::new(1, Via::Unix);
    let peers = rendezvous(&launch, &job.options).unwrap();
    assert_eq!(peers.iter().count(), 0);
}

#[test]
fn listeners_are_closed_once_all_have_joined() {
    let job = Job::new(2, Via::Auto);
    let _peers = job.meet();
    TcpListener::bind(("127.0.0.1", job.port)).unwrap();
    // The name is free as well: the same job can meet again.
    assert_eq!(job.meet().len(), 2);
}

#[test]
fn missing_ranks_are_named_with_the_place_and_the_wait() {
    let mut job = Job::new(4, Via::Auto);
    job.options.timeout = Duration::from_secs(4);
    let one = job.start(1);
    std::thread::sleep(Duration::from_millis(100));
    let zero = job.start(0);
    let error = zero.join().unwrap().unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("ranks 2, 3 of 4 did not join within "),
        "{text}"
    );
    assert_has(&text, &[&format!("tcp:127.0.0.1:{}", job.port)]);
    assert!(text.contains("unix:@pp-"), "{text}");
    assert_eq!(error.fault(Rank::new(0)).kind, FaultKind::TimedOut);
    // Who has joined hears the same, whichever of the two started first.
    match one.join().unwrap().unwrap_err() {
        heard @ RendezvousError::Ended(_) => {
            assert_eq!(heard.fault(Rank::new(1)), error.fault(Rank::new(0)));
            assert!(heard.is_timeout(), "another rank did not come");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn rank_without_a_rank_0_says_where_it_looked() {
    for (via, place) in [(Via::Unix, "unix:@pp-"), (Via::Tcp, "tcp:127.0.0.1:")] {
        let mut job = Job::new(2, via);
        job.options.timeout = Duration::from_millis(200);
        let text = job.start(1).join().unwrap().unwrap_err().to_string();
        assert_has(&text, &["rank 1 did not reach rank 0", place]);
        assert!(text.contains("start rank 0"), "{text}");
    }
}

#[test]
fn duplicate_rank_is_refused_by_name() {
    let job = Job::new(3, Via::Tcp);
    let zero = job.start(0);
    let twins = [job.start(1), job.start(1)];
    // Not before one of them has been refused: then the other waits for rank 2.
    while !twins.iter().any(std::thread::JoinHandle::is_finished) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let two = job.start(2);
    let mut refused = 0;
    for twin in twins {
        if let Err(error) = twin.join().unwrap() {
            assert!(
                error.to_string().contains("rank 1 has joined already"),
                "{error}"
            );
            refused += 1;
        }
    }
    assert_eq!(refused, 1);
    assert_eq!(ranks(&zero.join().unwrap().unwrap()), [1, 2]);
    two.join().unwrap().unwrap();
}

#[test]
fn second_rank_0_is_refused_by_name() {
    let job = Job::new(2, Via::Unix);
    let name = job.unix_name();
    let first = job.start(0);
    let hang = later();
    while !std::fs::read_to_string("/proc/net/unix")
        .unwrap()
        .contains(&name)
    {
        assert!(Instant::now() < hang, "rank 0 does not listen");
        std::thread::sleep(Duration::from_millis(1));
    }
    let error = job.start(0).join().unwrap().unwrap_err();
    assert!(
        error.to_string().contains("another rank 0 of this job"),
        "{error}"
    );
    job.start(1).join().unwrap().unwrap();
    first.join().unwrap().unwrap();
}

#[test]
fn a_second_job_of_a_supervised_program_is_told_how_to_run_two() {
    let local = LocalJob::new(world(2));
    let (say, ended) = std::sync::mpsc::channel();
    let start = |rank| {
        let launch = local.launch(Rank::new(rank)).unwrap();
        let (say, options) = (say.clone(), Job::new(2, Via::Unix).options);
        std::thread::spawn(move || say.send(rendezvous(&launch, &options).map(drop)));
    };
    start(0);
    start(0);
    let error = ended.recv().unwrap().unwrap_err().to_string();
    assert!(error.contains("runs main once for each rank"), "{error}");
    start(1);
    ended.recv().unwrap().unwrap();
    ended.recv().unwrap().unwrap();
}

#[test]
fn port_in_use_names_the_remedy() {
    let job = Job::new(2, Via::Tcp);
    let _other = TcpListener::bind(("127.0.0.1", job.port)).unwrap();
    let text = job.start(0).join().unwrap().unwrap_err().to_string();
    assert_has(&text, &[&format!("tcp:127.0.0.1:{}", job.port)]);
    assert!(text.contains("PP_PORT"), "{text}");
}

#[test]
fn wrong_world_size_is_refused_by_name() {
    let job = Job::new(2, Via::Tcp);
    let zero = job.start(0);
    let other = Job {
        ranks: 3,
        ..job.clone()
    };
    for rank in [1, 2] {
        let error = other.start(rank).join().unwrap().unwrap_err();
        let text = error.to_string();
        assert_has(
            &text,
            &[&format!(
                "rank {rank} was started in a world of 3 ranks, rank 0 in one of 2"
            )],
        );
    }
    job.start(1).join().unwrap().unwrap();
    zero.join().unwrap().unwrap();
}

#[test]
fn rank_that_joins_and_leaves_ends_the_wait() {
    let mut job = Job::new(3, Via::Unix);
    let zero = job.start(0);
    job.options.timeout = Duration::from_secs(3);
    let one = job.start(1).join().unwrap().unwrap_err();
    assert!(matches!(one, RendezvousError::Incomplete { .. }), "{one}");
    let error = zero.join().unwrap().unwrap_err();
    assert!(matches!(error, RendezvousError::RankLeft { rank, .. } if rank == Rank::new(1)));
    assert_eq!(error.fault(Rank::new(0)).kind, FaultKind::PeerDied);
}

#[test]
fn end_of_rank_0_ends_the_wait_of_the_others() {
    let mut job = Job::new(3, Via::Tcp);
    let one = job.start(1);
    job.options.timeout = Duration::from_secs(3);
    // Rank 0 gives up and is gone.
    job.start(0).join().unwrap().unwrap_err();
    let error = one.join().unwrap().unwrap_err();
    assert!(matches!(error, RendezvousError::Ended(_)), "{error}");
    assert!(error.is_timeout());
}

/// Rank 3 never comes.
#[test]
fn the_reason_of_a_rank_that_ends_while_others_are_awaited_reaches_all() {
    let reason = Fault::new(FaultKind::Plugin, Rank::new(9), "set up", "out of cheese");
    let ends = |peer: &ControlSender| {
        let reason = Fault::new(FaultKind::Plugin, Rank::new(9), "set up", "out of cheese");
        peer.send(&Message::Abort(reason), later()).unwrap();
    };
    for (rank, declines) in [(0, true), (1, true), (1, false)] {
        let job = Job::new(4, Via::Auto);
        let mut ended = job.clone();
        ended.options.timeout = Duration::from_secs(2);
        match declines {
            true => ended.options.declines = Some(reason.clone()),
            false => ended.options.on_met = Some(OnMet(Arc::new(ends))),
        }
        let start = |of: u32| if of == rank { &ended } else { &job }.start(of);
        for (of, result) in (0..).zip([0, 1, 2].map(start)) {
            let error = result.join().unwrap().unwrap_err();
            assert_eq!(error.fault(Rank::new(of)), reason, "rank {rank} ended");
        }
    }
}
