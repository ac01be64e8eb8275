//! The watchdog: one thread that listens to the peers while the driver computes.
//!
//! Hazard: a peer dies or stops while the driver is inside a stage, and nobody looks for ten
//! minutes; or the driver itself never comes back. Guarantee: a peer's end is a fault as soon as
//! its socket says so, its silence after three heartbeats; every fault is told to the other
//! peers; and if the driver has not ended within the grace after a fault, `on_stuck` ends the
//! process.
//!
//! Choices: the thread sleeps in `poll`. Silence counts only while this thread itself ran on time,
//! so a machine that was suspended is no dead peer. What it does not do: touch a payload, a device,
//! or the order of frames.
//!
//! Nothing that is stuck holds this thread up. It was looked at, call by call:
//! - sockets: every wait has a deadline of `SEND_WITHIN`; a sender that another thread uses just now
//!   is waited for no longer. Its lock is held to take or give back a value, never while writing;
//! - the fault, the bell and the alarm of [`Switch`] wait for a lock at most that the driver holds for an assignment;
//!   the driver's progress waits for nobody;
//! - `on_frame` puts a header into a queue that refuses when it is full;
//! - standard error, and with it `tracing`, can be held for ever by a thread that writes into a full
//!   pipe, and a disk can be away: so `Aside` logs, and writes what `on_fault` writes;
//! - no call goes to CUDA or NCCL;
//! - memory is allocated: the allocator's locks are held inside it alone.

use std::fmt;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Rank};
use pp_transport::control::{ControlChannel, ControlReceiver, ControlSender, Message};
use pp_transport::error::TransportError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::progress::{Limits, Stall};
use crate::switch::Switch;

/// Silence of this many heartbeats is a fault.
pub const MISSED_HEARTBEATS: u32 = 3;
/// Messages taken in from one peer before the others, and the clock, get their turn.
const AT_ONCE: u32 = 64;
/// A peer that does not take a message within this is busy dying or stopped.
const SEND_WITHIN: Duration = Duration::from_millis(50);
/// How long a rank that is done waits for its peers to say so too.
const GOODBYE_WITHIN: Duration = Duration::from_millis(500);

/// How the watchdog behaves.
pub struct WatchOptions {
    /// Time between two heartbeats; `None` sends and expects none.
    pub heartbeat: Option<Duration>,
    /// Time the driver has to end after a fault.
    pub grace: Duration,
    /// Time that one operation of the driver may take; `None` lets it take for ever. Looked at
    /// several times within it, heartbeats or none.
    pub limits: Option<Limits>,
    /// Called on the watch thread when the driver did not; must end the process, and wait neither
    /// for standard error nor for a disk.
    pub on_stuck: Box<dyn FnOnce(&Fault) + Send>,
    /// Called once, on a thread of its own, when there is a fault: to write down what happened. The
    /// grace is all the time it has.
    pub on_fault: Option<OnFault>,
    /// Takes the headers that came over the control channel, where ranks have no other lane;
    /// without it they are a fault.
    pub on_frame: Option<OnFrame>,
}

/// What is done about a fault beside ending for it.
pub type OnFault = Box<dyn FnOnce(&Fault) + Send>;

/// What is done with a header from this peer. Must not block; an error is the peer's fault.
pub type OnFrame = Box<dyn FnMut(Rank, &[u8]) -> Result<(), TransportError> + Send>;

impl fmt::Debug for WatchOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WatchOptions")
            .field("heartbeat", &self.heartbeat)
            .field("grace", &self.grace)
            .finish_non_exhaustive()
    }
}

/// The running watchdog of a rank.
///
/// # If dropped
/// Stops the thread without saying goodbye: to the peers this rank has died.
#[derive(Debug)]
pub struct Watch {
    thread: Option<JoinHandle<()>>,
    stop: Arc<Stop>,
    switch: Switch,
}

#[derive(Debug, Default)]
struct Stop {
    asked: AtomicBool,
    politely: AtomicBool,
}

impl Watch {
    /// Starts watching these peers.
    ///
    /// # Errors
    /// The kernel refuses a thread.
    pub fn start(
        channels: Vec<ControlChannel>,
        switch: Switch,
        options: WatchOptions,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(Stop::default());
        let peers = channels.into_iter().map(Peer::new).collect();
        let mut watcher = Watcher {
            aside: Aside::start(switch.rank(), options.on_fault)?,
            peers,
            switch: switch.clone(),
            stop: Arc::clone(&stop),
            heartbeat: options.heartbeat,
            grace: options.grace,
            limits: options.limits,
            stall: Stall::new(Instant::now()),
            on_frame: options.on_frame,
        };
        let thread = std::thread::Builder::new()
            .name("pp-watch".into())
            .spawn(move || watcher.run(options.on_stuck))?;
        Ok(Self {
            thread: Some(thread),
            stop,
            switch,
        })
    }

    /// The driver is done. Says goodbye and waits, for a bounded time, until the peers have too;
    /// after a fault tells them its name instead.
    pub fn close(mut self) {
        self.stop.politely.store(true, Ordering::Release);
        self.join();
    }

    fn join(&mut self) {
        self.stop.asked.store(true, Ordering::Release);
        self.switch.sound_alarm();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.join();
    }
}

struct Peer {
    sender: ControlSender,
    receiver: ControlReceiver,
    heard: Instant,
    /// False once it said goodbye or was lost.
    is_there: bool,
    /// It knows of the fault.
    told: bool,
    /// It knows of the drain.
    drains: bool,
}

impl Peer {
    fn new(channel: ControlChannel) -> Self {
        let (sender, receiver) = channel.split();
        Self {
            sender,
            receiver,
            heard: Instant::now(),
            is_there: true,
            told: false,
            drains: false,
        }
    }

    fn rank(&self) -> Rank {
        self.sender.peer()
    }
}

/// A thread that waits for the first fault, to do about it what may take as long as it likes. It is
/// there from the beginning: a machine that is in trouble may have no thread to give.
struct Aside {
    fault: Option<SyncSender<Fault>>,
    done: Receiver<()>,
}

impl Aside {
    fn start(rank: Rank, on_fault: Option<OnFault>) -> std::io::Result<Self> {
        let (fault, faults) = sync_channel::<Fault>(1);
        let (say, done) = sync_channel(1);
        std::thread::Builder::new()
            .name("pp-aside".into())
            .spawn(move || {
                // The other end is dropped where there was no fault.
                let Ok(fault) = faults.recv() else {
                    return;
                };
                if let Some(on_fault) = on_fault {
                    on_fault(&fault);
                }
                let _ = say.send(());
                tracing::error!(%rank, %fault, "the run ends");
            })?;
        Ok(Self {
            fault: Some(fault),
            done,
        })
    }

    /// Begins, unless it has.
    fn begin(&mut self, fault: &Fault) {
        if let Some(place) = self.fault.take() {
            // There is room for one, and one is sent.
            let _ = place.try_send(fault.clone());
        }
    }

    /// Waits until what was begun is done, or the time is up.
    fn finish(&self, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now());
        // A thread that panicked is done.
        let _ = self.done.recv_timeout(left);
    }
}

struct Watcher {
    aside: Aside,
    peers: Vec<Peer>,
    switch: Switch,
    stop: Arc<Stop>,
    heartbeat: Option<Duration>,
    grace: Duration,
    limits: Option<Limits>,
    stall: Stall,
    on_frame: Option<OnFrame>,
}

impl Watcher {
    fn run(&mut self, on_stuck: Box<dyn FnOnce(&Fault) + Send>) {
        let mut on_stuck = Some(on_stuck);
        let mut next_beat = Instant::now();
        // This thread may have come to run long after it was made.
        for peer in &mut self.peers {
            peer.heard = next_beat;
        }
        let mut fault_since = None;
        while !self.stop.asked.load(Ordering::Acquire) {
            let now = Instant::now();
            if let Some(interval) = self.heartbeat
                && now >= next_beat
            {
                self.beat(now, now.saturating_duration_since(next_beat), interval);
                next_beat = now + interval;
            }
            self.count_silence(now);
            self.look_at_driver(now);
            self.tell_drain();
            let next_look = self.limits.map(|limits| now + limits.look_every());
            let next_beat_due = self.heartbeat.map(|_| next_beat);
            let mut wake_at = next_look.into_iter().chain(next_beat_due).min();
            for peer in self.peers.iter().filter(|p| p.is_there) {
                // To the moment at which its silence becomes a fault.
                let due = self
                    .heartbeat
                    .map(|every| peer.heard + every * MISSED_HEARTBEATS);
                wake_at = wake_at.into_iter().chain(due).min();
            }
            if let Some(fault) = self.switch.fault() {
                let fault = fault.clone();
                self.tell(&fault);
                self.aside.begin(&fault);
                let since = *fault_since.get_or_insert(now);
                let deadline = since + self.grace;
                if now >= deadline
                    && let Some(end) = on_stuck.take()
                {
                    end(&fault);
                }
                if on_stuck.is_some() {
                    wake_at = Some(wake_at.map_or(deadline, |at| at.min(deadline)));
                }
            }
            self.sleep(wake_at.map(|at| at.saturating_duration_since(now)));
            self.listen();
        }
        if self.stop.politely.load(Ordering::Acquire) {
            self.say_goodbye();
        }
        // The driver may have ended before this thread had seen its fault.
        if let Some(fault) = self.switch.fault() {
            self.aside.begin(fault);
            let since = fault_since.unwrap_or_else(Instant::now);
            self.aside.finish(since + self.grace);
        }
    }

    /// Sleeps until a peer says something, somebody wakes us, or the time is up.
    fn sleep(&self, within: Option<Duration>) {
        let mut fds = vec![PollFd::from_borrowed_fd(self.switch.alarm(), PollFlags::IN)];
        let live = self.peers.iter().filter(|p| p.is_there);
        fds.extend(live.map(|p| PollFd::from_borrowed_fd(p.receiver.as_fd(), PollFlags::IN)));
        let timeout = within.map(|d| Timespec {
            tv_sec: d.as_secs().cast_signed(),
            tv_nsec: i64::from(d.subsec_nanos()),
        });
        // An interrupted or failed poll is a look without a reason.
        let _ = poll(&mut fds, timeout.as_ref());
        self.switch.quiet_alarm();
    }

    /// Takes in what the peers have said.
    fn listen(&mut self) {
        for i in 0..self.peers.len() {
            for _ in 0..AT_ONCE {
                if !self.peers[i].is_there {
                    break;
                }
                let peer = &mut self.peers[i];
                let rank = peer.rank();
                match peer.receiver.try_recv() {
                    Ok(None) => break,
                    Ok(Some(message)) => {
                        peer.heard = Instant::now();
                        match message {
                            Message::Heartbeat => {}
                            Message::Drain(signal) => self.switch.request_drain(signal),
                            Message::Bye => {
                                peer.is_there = false;
                                self.switch.set_peer_left();
                            }
                            Message::Abort(fault) => {
                                // It knows already.
                                peer.told = true;
                                self.switch.lose_peer(fault);
                            }
                            Message::Frame(body) => {
                                let taken = self.on_frame.as_mut().map(|take| take(rank, body));
                                match taken {
                                    Some(Ok(())) => {}
                                    Some(Err(error)) => self.lose(i, &bad_frame(rank, &error)),
                                    None => self.lose(i, &misplaced(rank)),
                                }
                            }
                            _ => self.lose(i, &misplaced(rank)),
                        }
                    }
                    Err(error) => {
                        let fault = error.fault("watch");
                        self.lose(i, &fault);
                    }
                }
            }
        }
    }

    fn lose(&mut self, peer: usize, fault: &Fault) {
        self.peers[peer].is_there = false;
        self.switch.lose_peer(fault.clone());
    }

    /// Sends a heartbeat to each peer. `late`: how much later than planned this thread came to it.
    fn beat(&mut self, now: Instant, late: Duration, interval: Duration) {
        for peer in self.peers.iter_mut().filter(|p| p.is_there) {
            // Whoever was not there himself cannot say that others were silent.
            if late >= interval {
                peer.heard = now;
                self.stall.forgive(now);
            }
            // One that cannot be sent says nothing yet: what the peer last said (why it left) may
            // still lie unread, and `listen` takes it in before a loss is believed. One that
            // stopped reading falls silent.
            let _ = peer.sender.send(&Message::Heartbeat, now + SEND_WITHIN);
        }
    }

    /// A driver that does not come back from an operation has failed.
    fn look_at_driver(&mut self, now: Instant) {
        let Some(limits) = self.limits else {
            return;
        };
        let stuck = self.stall.look(self.switch.progress(), limits, now);
        if let Some((operation, lasted)) = stuck {
            self.switch.raise(Fault::new(
                FaultKind::TimedOut,
                self.switch.rank(),
                operation,
                format_args!(
                    "no progress for {} ms; PP_STUCK_MS sets how long it may take",
                    lasted.as_millis()
                ),
            ));
        }
    }

    /// A peer that was silent for too long is lost.
    fn count_silence(&mut self, now: Instant) {
        let Some(interval) = self.heartbeat else {
            return;
        };
        for i in 0..self.peers.len() {
            let peer = &self.peers[i];
            let silence = now.saturating_duration_since(peer.heard);
            if peer.is_there && silence >= interval * MISSED_HEARTBEATS {
                let fault = Fault::new(
                    FaultKind::TimedOut,
                    peer.rank(),
                    "heartbeat",
                    format_args!(
                        "nothing heard for {} ms; is it stopped, or its host or network gone?",
                        silence.as_millis()
                    ),
                );
                self.switch.lose_peer(fault.clone());
                // One that was stopped learns, when it goes on, why the others have left.
                if let Some(first) = self.switch.fault().cloned() {
                    self.tell(&first);
                }
                self.lose(i, &fault);
            }
        }
    }

    /// Tells the fault to every peer that has not heard of it.
    fn tell(&mut self, fault: &Fault) {
        for peer in self.peers.iter_mut().filter(|p| p.is_there && !p.told) {
            let deadline = Instant::now() + SEND_WITHIN;
            // A peer that cannot be told is told at the next look, or notices by itself.
            peer.told = peer
                .sender
                .send(&Message::Abort(fault.clone()), deadline)
                .is_ok();
        }
    }

    /// Tells the peers, once, that a rank of the job was asked to drain: a launcher may have asked this one alone.
    fn tell_drain(&mut self) {
        let Some(signal) = self.switch.drain_signal() else {
            return;
        };
        // A peer that has said goodbye listens until it has heard ours.
        for peer in self.peers.iter_mut().filter(|peer| !peer.drains) {
            let deadline = Instant::now() + SEND_WITHIN;
            // A peer that is busy is told at the next look; one that is stopped or gone is noticed elsewhere.
            peer.drains = peer.sender.send(&Message::Drain(signal), deadline).is_ok();
        }
    }

    fn say_goodbye(&mut self) {
        self.tell_drain();
        if let Some(fault) = self.switch.fault() {
            let fault = fault.clone();
            self.tell(&fault);
        }
        let deadline = Instant::now() + GOODBYE_WITHIN;
        for peer in &mut self.peers {
            // A peer that is gone has nothing to wait for.
            let _ = peer.sender.bye(deadline);
        }
        if self.switch.fault().is_some() {
            return;
        }
        for peer in self.peers.iter_mut().filter(|p| p.is_there) {
            while let Ok(message) = peer.receiver.recv_deadline(deadline) {
                if let Message::Drain(signal) = message {
                    self.switch.request_drain(signal);
                }
                if matches!(message, Message::Bye) || Instant::now() > deadline {
                    break;
                }
            }
        }
    }
}

fn bad_frame(rank: Rank, error: &TransportError) -> Fault {
    let operation = "receive header";
    Fault::new(FaultKind::PeerMisbehaved, rank, operation, error)
}

fn misplaced(rank: Rank) -> Fault {
    Fault::new(
        FaultKind::PeerMisbehaved,
        rank,
        "watch",
        "a message came that has no place after the handshake",
    )
}
