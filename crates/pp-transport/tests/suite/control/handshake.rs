//! All ranks agree before the first transfer, or all hear the same reason why not.

use pp_testing::assert_has;
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Hello, HelloParts, Rank, Settings, Text};
use pp_transport::control::{Message, Peers, agree};
use pp_transport::launch::Via;

use crate::control_support::{Job, later, world};

const RANKS: u32 = 3;

fn parts(rank: u32) -> HelloParts {
    let mut settings = Settings::new();
    settings.set("depth", 4).unwrap();
    settings.set("frames_per_chunk", 8).unwrap();
    HelloParts {
        job: 7,
        rank: Rank::new(rank),
        world_size: world(RANKS),
        plan_name: Text::new("video").unwrap(),
        plan_version: 1,
        settings,
        device_settings: Settings::new(),
        chunks: Some(10),
        host: Text::new("host").unwrap(),
        device: Some(Text::new(format!("GPU-{rank}")).unwrap()),
        device_given: None,
        device_named: false,
    }
}

/// Each rank says hello with its parts; what each got, in order of rank.
fn hold(change: impl Fn(&mut HelloParts)) -> Vec<Result<Vec<Hello>, Fault>> {
    let peers = Job::new(RANKS, Via::Unix).meet();
    let ranks: Vec<_> = peers
        .into_iter()
        .map(|mut peers| {
            let mut parts = parts(peers.rank().get());
            change(&mut parts);
            let hello = Hello::new(parts).unwrap();
            std::thread::spawn(move || {
                let result = agree(&mut peers, &hello, later());
                // The channels live on until all have heard.
                (peers, result)
            })
        })
        .collect();
    let results: Vec<(Peers, _)> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    results.into_iter().map(|(_, result)| result).collect()
}

/// What all ranks are told, the same to each.
fn refusal(change: impl Fn(&mut HelloParts)) -> Fault {
    let results = hold(change);
    let faults: Vec<Fault> = results.into_iter().map(Result::unwrap_err).collect();
    assert!(faults.iter().all(|fault| *fault == faults[0]), "{faults:?}");
    faults[0].clone()
}

#[test]
fn ranks_started_alike_agree_and_know_each_other() {
    for hellos in hold(|_| {}) {
        let hellos = hellos.unwrap();
        let ranks: Vec<u32> = hellos.iter().map(|hello| hello.rank().get()).collect();
        assert_eq!(ranks, [0, 1, 2]);
        assert_eq!(hellos[2], Hello::new(parts(2)).unwrap());
    }
}

#[test]
fn differing_setting_is_named_with_both_values_and_both_ranks_to_all() {
    for rank in [1, 2].map(Rank::new) {
        let fault = refusal(|parts| {
            if parts.rank == rank {
                parts.settings.set("depth", 5).unwrap();
            }
        });
        assert_eq!(
            (fault.kind, fault.rank),
            (FaultKind::HandshakeMismatch, rank)
        );
        let text = fault.to_string();
        assert_has(
            &text,
            &["depth", "4", "5", "rank 0", &format!("rank {rank}")],
        );
    }
}

#[test]
fn two_ranks_on_one_device_are_refused_with_the_map() {
    let fault = refusal(|parts| {
        if parts.rank == Rank::new(2) {
            parts.device = Some(Text::new("GPU-1").unwrap());
        }
    });
    let text = fault.to_string();
    assert!(text.contains("ranks 1 and 2 are both on GPU-1"), "{text}");
    assert_has(&text, &["GPU-0"]);
}

#[test]
fn rank_that_says_nothing_is_named_to_the_others() {
    let mut peers = Job::new(RANKS, Via::Unix).meet().into_iter();
    let mut zero = peers.next().unwrap();
    let mut one = peers.next().unwrap();
    let _silent = peers.next().unwrap();
    let deadline = Instant::now() + Duration::from_secs(3);
    let one = std::thread::spawn(move || {
        agree(&mut one, &Hello::new(parts(1)).unwrap(), deadline).unwrap_err()
    });
    let fault = agree(&mut zero, &Hello::new(parts(0)).unwrap(), deadline).unwrap_err();
    assert_eq!(
        (fault.kind, fault.rank),
        (FaultKind::TimedOut, Rank::new(2))
    );
    assert_eq!(one.join().unwrap(), fault);
}

#[test]
fn reason_of_a_rank_that_ends_behind_its_hello_reaches_the_others() {
    let mut peers = Job::new(RANKS, Via::Tcp).meet().into_iter();
    let [mut zero, mut one, two] = [(); 3].map(|()| peers.next().unwrap());
    let reason = Fault::new(FaultKind::Plugin, Rank::new(2), "set up", "out of cheese");
    let hello = Hello::new(parts(2)).unwrap().encode().unwrap();
    for message in [Message::Hello(&hello), Message::Abort(reason.clone())] {
        let to_zero = two.iter().next().unwrap().sender();
        to_zero.send(&message, later()).unwrap();
    }
    drop(two);
    let one = std::thread::spawn(move || {
        agree(&mut one, &Hello::new(parts(1)).unwrap(), later())?;
        // Rank 0 found out when all had agreed.
        match one
            .get_mut(Rank::new(0))
            .unwrap()
            .receiver()
            .recv_deadline(later())
        {
            Ok(Message::Abort(why)) => Err(why),
            other => panic!("{other:?}"),
        }
    });
    let fault = agree(&mut zero, &Hello::new(parts(0)).unwrap(), later()).unwrap_err();
    assert_eq!(
        (fault, one.join().unwrap()),
        (reason.clone(), Err::<(), _>(reason))
    );
}

#[test]
fn rank_that_dies_before_its_hello_is_named_to_the_others() {
    let mut peers = Job::new(RANKS, Via::Tcp).meet().into_iter();
    let mut zero = peers.next().unwrap();
    let mut one = peers.next().unwrap();
    drop(peers.next().unwrap());
    let one = std::thread::spawn(move || {
        agree(&mut one, &Hello::new(parts(1)).unwrap(), later()).unwrap_err()
    });
    let fault = agree(&mut zero, &Hello::new(parts(0)).unwrap(), later()).unwrap_err();
    assert_eq!(
        (fault.kind, fault.rank),
        (FaultKind::PeerDied, Rank::new(2))
    );
    assert_eq!(one.join().unwrap(), fault);
}

#[test]
fn rank_that_dies_behind_its_hello_is_named_to_the_others() {
    let mut peers = Job::new(RANKS, Via::Unix).meet().into_iter();
    let (mut zero, mut one) = (peers.next().unwrap(), peers.next().unwrap());
    let mut two = peers.next().unwrap();
    let hello = Hello::new(parts(1)).unwrap().encode().unwrap();
    let channel = one.get_mut(Rank::new(0)).unwrap();
    let said = channel.sender().send(&Message::Hello(&hello), later());
    said.unwrap();
    drop(one);
    let two = std::thread::spawn(move || {
        agree(&mut two, &Hello::new(parts(2)).unwrap(), later()).unwrap_err()
    });
    let fault = agree(&mut zero, &Hello::new(parts(0)).unwrap(), later()).unwrap_err();
    assert_eq!(
        (fault.kind, fault.rank),
        (FaultKind::PeerDied, Rank::new(1))
    );
    assert_eq!(two.join().unwrap(), fault);
}

#[test]
fn end_of_rank_0_ends_the_handshake() {
    let mut peers = Job::new(2, Via::Unix).meet().into_iter();
    drop(peers.next().unwrap());
    let mut one = peers.next().unwrap();
    let fault = agree(&mut one, &Hello::new(parts(1)).unwrap(), later()).unwrap_err();
    assert_eq!(
        (fault.kind, fault.rank),
        (FaultKind::PeerDied, Rank::new(0))
    );
}

/// What rank 0 says of a rank 1 that sends this in place of its hello.
fn verdict_on(message: &Message<'_>) -> Fault {
    let mut peers = Job::new(2, Via::Unix).meet().into_iter();
    let (mut zero, mut one) = (peers.next().unwrap(), peers.next().unwrap());
    let channel = one.get_mut(Rank::new(0)).unwrap();
    channel.sender().send(message, later()).unwrap();
    let mut own = parts(0);
    own.world_size = world(2);
    agree(&mut zero, &Hello::new(own).unwrap(), later()).unwrap_err()
}

#[test]
fn anything_but_a_hello_is_refused() {
    let foreign = Hello::new(parts(2)).unwrap().encode().unwrap();
    let fault = verdict_on(&Message::Hello(&foreign));
    assert_eq!(fault.kind, FaultKind::PeerMisbehaved);
    assert!(
        fault.to_string().contains("rank 1 says hello as rank 2"),
        "{fault}"
    );

    let fault = verdict_on(&Message::Hello(b"nonsense"));
    assert!(
        fault.to_string().contains("the hello of rank 1 is refused"),
        "{fault}"
    );
    assert_eq!(
        verdict_on(&Message::Heartbeat).kind,
        FaultKind::PeerMisbehaved
    );

    let abort = Fault::new(FaultKind::BadInput, Rank::new(1), "start", "no such file");
    assert_eq!(verdict_on(&Message::Abort(abort.clone())), abort);
}

#[test]
fn early_or_broken_verdict_is_not_an_agreement() {
    for body in [&b""[..], b"\xff\xff"] {
        let mut peers = Job::new(2, Via::Unix).meet().into_iter();
        let (mut zero, mut one) = (peers.next().unwrap(), peers.next().unwrap());
        let channel = zero.get_mut(Rank::new(1)).unwrap();
        channel
            .sender()
            .send(&Message::Verdict(body), later())
            .unwrap();
        let fault = agree(&mut one, &Hello::new(parts(1)).unwrap(), later()).unwrap_err();
        assert_eq!(
            (fault.kind, fault.rank),
            (FaultKind::PeerMisbehaved, Rank::new(0))
        );
    }
}

#[test]
fn rank_that_dies_is_noticed_while_another_is_awaited() {
    let mut peers = Job::new(RANKS, Via::Unix).meet().into_iter();
    let mut zero = peers.next().unwrap();
    let _silent = peers.next().unwrap();
    drop(peers.next().unwrap());
    let fault = agree(&mut zero, &Hello::new(parts(0)).unwrap(), later()).unwrap_err();
    assert_eq!(
        (fault.kind, fault.rank),
        (FaultKind::PeerDied, Rank::new(2))
    );
}
