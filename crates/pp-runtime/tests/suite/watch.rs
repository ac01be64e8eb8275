//! The watchdog against peers that die, fall silent, abort or leave.

use std::sync::{Mutex, mpsc};
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Rank};
use pp_runtime::driver::{BoxedStage, RankRun, Stages};
use pp_runtime::progress::StuckLimits;
use pp_runtime::stage::Offer;
use pp_runtime::switch::Switch;
use pp_runtime::watch::{OnSign, SetUp, Sign, Watch, WatchOptions};
use pp_testing::{HANG, Toy, ToySink, ToySource, channels, local, seats, until_some};
use pp_transport::bell::Bell;
use pp_transport::control::{ControlChannel, Message, Tell, Vitals};
use pp_transport::error::TransportError;
use pp_transport::host::Host;

fn switch(rank: u32) -> Switch {
    Switch::new(Rank::new(rank), Bell::new().unwrap()).unwrap()
}

fn watch(channel: ControlChannel, switch: &Switch, heartbeat_ms: u64) -> Watch {
    let options = WatchOptions {
        heartbeat: Some(Duration::from_millis(heartbeat_ms)),
        ..options(|_| {})
    };
    run(channel, switch, options)
}

/// A watch whose end of the process is the test's.
fn options(on_stuck: impl FnOnce(&Fault) + Send + 'static) -> WatchOptions {
    WatchOptions {
        rank: Rank::new(0),
        heartbeat: None,
        grace: HANG,
        limits: None,
        on_stuck: Box::new(on_stuck),
        on_fault: None,
        on_sign: None,
    }
}

/// A watch beside a driver.
fn run(channel: ControlChannel, switch: &Switch, options: WatchOptions) -> Watch {
    let set_up = SetUp::start(vec![channel], options).unwrap();
    set_up.run(switch.clone(), None, None).unwrap()
}

/// The watch over rank 0 that is being set up.
fn set_up(
    channel: ControlChannel,
    grace: Duration,
    on_stuck: impl FnOnce(&Fault) + Send + 'static,
) -> SetUp {
    let options = WatchOptions {
        grace,
        ..options(on_stuck)
    };
    SetUp::start(vec![channel], options).unwrap()
}

/// Sleeps on the bell, as a driver does, until there is a fault.
fn fault(switch: &Switch) -> Fault {
    let deadline = Instant::now() + HANG;
    loop {
        let ear = switch.bell().listen();
        if let Some(fault) = switch.fault() {
            return fault.clone();
        }
        assert!(Instant::now() < deadline, "no fault came");
        ear.wait(deadline);
    }
}

#[test]
fn a_silent_peer_is_a_fault_and_a_beating_one_is_not() {
    let (ours, theirs) = channels();
    let (front, back) = (switch(0), switch(1));
    // A watch that gets no core for a while is not silent yet.
    let watching = watch(ours, &front, 1000);
    let beating = watch(theirs, &back, 1000);
    std::thread::sleep(Duration::from_millis(4000));
    assert_eq!((front.fault(), back.fault()), (None, None));
    drop((watching, beating));

    let (ours, _silent) = channels();
    let switch = switch(0);
    let watch = watch(ours, &switch, 30);
    let fault = fault(&switch);
    assert_eq!(
        (fault.kind, fault.rank),
        (FaultKind::TimedOut, Rank::new(1))
    );
    assert_eq!(fault.operation.as_str(), "heartbeat");
    watch.close();
}

#[test]
fn a_fault_travels_to_the_peer_with_its_reason() {
    let (ours, theirs) = channels();
    let (front, back) = (switch(0), switch(1));
    let _watching = watch(ours, &front, 60_000);
    let _watched = watch(theirs, &back, 60_000);
    let reason = Fault::new(FaultKind::Plugin, Rank::new(1), "phase_b", "out of cheese");
    back.raise(reason.clone());
    assert_eq!(fault(&front), reason);
}

#[test]
fn a_goodbye_is_no_fault() {
    let (ours, theirs) = channels();
    let (front, back) = (switch(0), switch(1));
    let watching = watch(ours, &front, 60_000);
    let watched = watch(theirs, &back, 60_000);
    std::thread::scope(|scope| {
        scope.spawn(|| watching.close());
        scope.spawn(|| watched.close());
    });
    assert_eq!((front.fault(), back.fault()), (None, None));
}

#[test]
fn a_watch_that_is_dropped_has_died_to_its_peers() {
    let (ours, theirs) = channels();
    let (front, back) = (switch(0), switch(1));
    let _watching = watch(ours, &front, 60_000);
    drop(watch(theirs, &back, 60_000));
    assert!(died(&fault(&front)));
}

#[test]
fn frames_go_to_their_taker_and_a_bad_one_is_the_fault_of_its_sender() {
    let (ours, theirs) = channels();
    let switch = switch(0);
    let (taken, frames) = mpsc::channel();
    let on_frame = move |rank, frame: &[u8]| {
        taken.send((rank, frame.to_vec())).unwrap();
        if frame == b"bad" {
            let why = "it sent nonsense".into();
            return Err(TransportError::PeerMisbehaved { rank, why });
        }
        Ok(())
    };
    let set_up = set_up(ours, HANG, |_| {});
    let watch = set_up.run(switch.clone(), Some(Box::new(on_frame)), None);
    let watch = watch.unwrap();
    for frame in [&b"good"[..], b"bad"] {
        let deadline = Instant::now() + HANG;
        let sent = theirs.sender().send(&Message::Frame(frame), deadline);
        sent.unwrap();
    }
    let fault = fault(&switch);
    assert_eq!(fault.kind, FaultKind::PeerMisbehaved);
    assert_eq!(fault.rank, Rank::new(1));
    let both: Vec<_> = frames.try_iter().collect();
    let from = Rank::new(1);
    assert_eq!(both, [(from, b"good".to_vec()), (from, b"bad".to_vec())]);
    watch.close();
}

#[test]
fn a_driver_that_does_not_come_back_is_a_fault_that_names_the_operation() {
    // Also where no heartbeat makes the watch look.
    for heartbeat in [Some(Duration::from_secs(1)), None] {
        stick(heartbeat);
    }
}

fn stick(heartbeat: Option<Duration>) {
    let (ours, theirs) = channels();
    let job = pp_testing::options("a@0 -> b@1 -> c@0", 1);
    let seat = seats(&job, 64).swap_remove(0);
    let switch = seat.switch.clone();
    let (say, stuck) = mpsc::channel();
    let options = WatchOptions {
        heartbeat,
        grace: Duration::from_millis(20),
        limits: Some(StuckLimits {
            transport: HANG,
            stage: Duration::from_millis(200),
            first: Duration::ZERO,
        }),
        ..options(move |fault| say.send(fault.clone()).unwrap())
    };
    let watching = run(ours, &switch, options);
    let back = self::switch(1);
    // One that hears no heartbeats must expect none.
    let every = heartbeat.unwrap_or(HANG);
    let beating = watch(theirs, &back, every.as_millis() as u64);
    let (release, gate) = mpsc::channel();
    let driver = &switch;
    let fault = std::thread::scope(|scope| {
        scope.spawn(move || {
            // A source that does not come back until it is told to.
            let source = ToySource::new(
                || {
                    let _ = gate.recv();
                    Offer::End
                },
                |_, _| unreachable!("nothing is offered"),
            );
            let sink = ToySink::<Toy, _>::new(|_, _| unreachable!("nothing was built"));
            let mut stages = Stages::new(Some(source));
            stages.push(BoxedStage::sink(sink));
            let slots = |_, _| Ok(local(&job, 64));
            let run = RankRun::new(Rank::new(0), stages, job.clone(), slots);
            let mut run: RankRun<'_, Host, _> = run.unwrap();
            for (number, end) in seat.ends {
                run.attach(number, end);
            }
            run.drive(driver).unwrap_err()
        });
        let fault = stuck.recv_timeout(HANG).unwrap();
        release.send(()).unwrap();
        fault
    });
    assert_eq!(
        (fault.kind, fault.rank, fault.operation.as_str()),
        (FaultKind::TimedOut, Rank::new(0), "ask the source")
    );
    drop((watching, beating));
}

#[test]
fn a_driver_that_does_not_end_after_a_fault_is_ended_also_where_what_is_done_about_it_hangs() {
    let (ours, _theirs) = channels();
    let switch = switch(0);
    let (say, heard) = mpsc::channel();
    let (_keep, never) = mpsc::channel::<()>();
    let options = WatchOptions {
        grace: Duration::from_millis(50),
        on_fault: Some(Box::new(move |_| _ = never.recv())),
        ..options(|_| unreachable!("the driver runs"))
    };
    let set_up = SetUp::start(vec![ours], options).unwrap();
    let on_stuck = move |fault: &Fault| say.send(fault.clone()).unwrap();
    let _watch = set_up.run(switch.clone(), None, Some(Box::new(on_stuck)));
    let ended = heard.recv_timeout(Duration::from_millis(200));
    assert!(ended.is_err(), "ended without a fault");
    let reason = Fault::new(FaultKind::Io, Rank::new(0), "write", "disk full");
    switch.raise(reason.clone());
    assert_eq!(heard.recv_timeout(HANG), Ok(reason));
}

#[test]
fn a_rank_is_asked_for_vital_signs_and_what_it_says_is_shown() {
    let (ours, theirs) = channels();
    let (zero, one) = (switch(0), switch(1));
    let with = |on_sign: OnSign| WatchOptions {
        on_sign: Some(on_sign),
        ..options(|_| {})
    };
    let (ask, asked) = mpsc::channel();
    let (show, shown) = mpsc::channel();
    let _one = run(
        theirs,
        &one,
        with(Box::new(move |sign| ask.send(sign).unwrap())),
    );
    let _zero = run(
        ours,
        &zero,
        with(Box::new(move |sign| show.send(sign).unwrap())),
    );
    for is_on in [true, false] {
        zero.set_watched(is_on);
        assert_eq!(asked.recv_timeout(HANG), Ok(Sign::Asked(is_on)));
    }
    let vitals = Vitals {
        queued: 7,
        ..Vitals::default()
    };
    one.say(vitals);
    assert_eq!(shown.recv_timeout(HANG), Ok(Sign::Of(Rank::new(1), vitals)));
}

#[test]
fn the_fault_handler_has_run_when_the_watch_is_closed() {
    for late in [Duration::ZERO, Duration::from_millis(100)] {
        let (ours, theirs) = channels();
        let switch = switch(0);
        let (say, heard) = mpsc::channel();
        let on_fault = move |fault: &Fault| {
            std::thread::sleep(late);
            say.send(fault.clone()).unwrap();
        };
        let options = WatchOptions {
            on_fault: Some(Box::new(on_fault)),
            ..options(|_| {})
        };
        let watch = run(ours, &switch, options);
        // The peer that is gone raises one of its own: whichever came first counts.
        drop(theirs);
        switch.abort();
        let fault = switch.fault().cloned();
        watch.close();
        assert_eq!(heard.try_recv().ok(), fault);
        assert!(heard.try_recv().is_err(), "it was done twice");
    }
}

fn died(fault: &Fault) -> bool {
    (fault.kind, fault.rank) == (FaultKind::PeerDied, Rank::new(1))
}

#[test]
fn a_rank_that_is_set_up_takes_what_its_peer_sends_in_order() {
    let (ours, theirs) = channels();
    let set_up = set_up(ours, HANG, |_| unreachable!("no fault"));
    let (peer, deadline) = (Rank::new(1), Instant::now() + HANG);
    let bell = Bell::new().unwrap();
    for message in [Message::Frame(b"shape"), Message::Drain(15)] {
        theirs.sender().send(&message, deadline).unwrap();
    }
    theirs.sender().send_fds(&[bell.fd()], deadline).unwrap();
    assert_eq!(set_up.frame(peer, "learn").unwrap(), b"shape");
    assert_eq!(set_up.descriptors(peer, "receive").unwrap().len(), 1);
    let switch = switch(0);
    let watch = set_up.run(switch.clone(), None, None).unwrap();
    assert_eq!(switch.drain_signal(), Some(15));
    watch.close();
}

#[test]
fn a_rank_whose_caller_does_not_look_is_ended_unless_it_lives_on() {
    for lives_on in [false, true] {
        let (ours, theirs) = channels();
        let (say, ended) = mpsc::channel();
        let grace = Duration::from_millis(50);
        let set_up = set_up(ours, grace, move |fault| {
            say.send(fault.clone()).unwrap();
        });
        if lives_on {
            set_up.live_on();
        }
        drop(theirs);
        if lives_on {
            let ended = ended.recv_timeout(Duration::from_millis(300));
            assert!(ended.is_err());
            let fault = until_some("the fault", || set_up.fault());
            assert!(died(&fault));
        } else {
            assert!(died(&ended.recv_timeout(HANG).unwrap()));
        }
    }
}

#[test]
fn a_caller_that_gives_up_tells_its_peer_why() {
    let (ours, theirs) = channels();
    let [front, back] = [ours, theirs].map(|channel| set_up(channel, HANG, |_| {}));
    let reason = Fault::new(FaultKind::BadInput, Rank::new(0), "set up", "no frames");
    front.raise(reason.clone());
    drop(front);
    assert_eq!(back.frame(Rank::new(0), "learn"), Err(reason));
}

#[test]
fn a_rank_that_is_set_up_says_what_it_waits_for() {
    static TOLD: Mutex<Option<mpsc::Sender<String>>> = Mutex::new(None);
    let (ours, theirs) = channels();
    let (tell, told) = mpsc::channel();
    *TOLD.lock().unwrap() = Some(tell);
    let mut set_up = set_up(ours, HANG, |_| {});
    set_up.tell(Some(Tell {
        every: Duration::from_millis(1),
        take: |line| _ = TOLD.lock().unwrap().as_ref().unwrap().send(line),
    }));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // Only then the peer does its part.
            assert_eq!(told.recv().unwrap(), "waiting for rank 1: open stages");
            let deadline = Instant::now() + HANG;
            let sent = theirs.sender().send(&Message::Frame(b"shape"), deadline);
            sent.unwrap();
        });
        let heard = set_up.frame(Rank::new(1), "open stages");
        assert_eq!(heard.unwrap(), b"shape");
    });
}
