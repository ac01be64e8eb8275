//! The watch over a rank that is not running yet.
//!
//! Hazard: a peer dies, stops or is cut off while this rank opens its input, loads kernels or waits
//! for a word, which may take as long as it likes: nobody would ever notice. Guarantee: from the
//! handshake until the watchdog takes over, the peer gets heartbeats and is listened to. Its end is
//! a fault at once, its silence after three heartbeats; whoever waits for it here gets that fault,
//! and where nobody does the process ends, since what it is inside of may never come back.
//!
//! Choices: one thread owns the channel and takes in whatever comes, so that a heartbeat is never
//! behind a message that nobody has asked for yet. Nothing of the job has begun, so ending the
//! process loses nothing.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Rank};
use pp_runtime::watch::MISSED_HEARTBEATS;
use pp_transport::control::{ControlChannel, ControlSender, Message, Received, SocketKind};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::GRACE;
use super::seat::end_with;
use crate::flight;

/// A peer that does not take a message within this is busy dying or stopped.
const SEND_WITHIN: Duration = Duration::from_millis(50);
/// Descriptors that were announced are right behind.
const FOLLOWS_WITHIN: Duration = Duration::from_millis(500);
/// Messages that the peer may be ahead of us.
const AHEAD: usize = 8;

/// What came and was not taken yet.
enum Item {
    Frame(Vec<u8>),
    Descriptors(Vec<OwnedFd>),
}

#[derive(Default)]
struct State {
    items: VecDeque<Item>,
    /// The signal because of which the peer, which runs already, was asked to drain.
    drain: Option<u8>,
    fault: Option<Fault>,
    /// Somebody has been given the fault, and will end the rank.
    is_told: bool,
    is_over: bool,
    /// This rank lives on when its peer is gone.
    lives_on: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Wakes the thread.
    alarm: OwnedFd,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Every critical section is a few assignments.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // Fails only when it is awake already.
        let _ = rustix::io::write(&self.alarm, &1_u64.to_ne_bytes());
    }
}

/// The watch over a rank that is being set up.
///
/// # If dropped
/// The thread ends, and the channel with it: to the peer this rank has died.
pub(super) struct SetUp {
    shared: Arc<Shared>,
    sender: ControlSender,
    peer: Rank,
    kind: SocketKind,
    thread: Option<JoinHandle<ControlChannel>>,
}

impl SetUp {
    /// Starts to watch the peer at the other end.
    ///
    /// # Errors
    /// The kernel has no descriptor or no thread left.
    pub(super) fn start(
        channel: ControlChannel,
        heartbeat: Option<Duration>,
    ) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            changed: Condvar::new(),
            alarm: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        let (sender, peer, kind) = (
            channel.sender().clone(),
            channel.peer(),
            channel.socket_kind(),
        );
        let mut watcher = Watcher {
            shared: Arc::clone(&shared),
            channel,
            heartbeat,
            heard: Instant::now(),
        };
        let thread = std::thread::Builder::new().name("pp-set-up".into());
        let thread = thread.spawn(move || {
            watcher.run();
            watcher.channel
        })?;
        Ok(Self {
            shared,
            sender,
            peer,
            kind,
            thread: Some(thread),
        })
    }

    pub(super) fn sender(&self) -> &ControlSender {
        &self.sender
    }

    pub(super) fn socket_kind(&self) -> SocketKind {
        self.kind
    }

    /// From now on the loss of the peer does not end the process: whoever asks next hears of it.
    pub(super) fn live_on(&self) {
        self.shared.lock().lives_on = true;
    }

    /// The next message, which must be a frame; waits for it as long as the peer is there.
    ///
    /// # Errors
    /// The fault that ended the wait.
    pub(super) fn frame(&self, operation: &str) -> Result<Vec<u8>, Fault> {
        match self.next()? {
            Item::Frame(body) => Ok(body),
            Item::Descriptors(_) => Err(self.misplaced(operation, "descriptors came instead")),
        }
    }

    /// The next message, which must be descriptors; waits for them as long as the peer is there.
    ///
    /// # Errors
    /// The fault that ended the wait.
    pub(super) fn descriptors(&self, operation: &str) -> Result<Vec<OwnedFd>, Fault> {
        match self.next()? {
            Item::Descriptors(fds) => Ok(fds),
            Item::Frame(_) => Err(self.misplaced(operation, "a frame came instead")),
        }
    }

    fn next(&self) -> Result<Item, Fault> {
        let waits = |state: &mut State| state.items.is_empty() && state.fault.is_none();
        let waited = self.shared.changed.wait_while(self.shared.lock(), waits);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner);
        // What was said before the end counts.
        let item = state.items.pop_front();
        item.ok_or_else(|| tell(&mut state).expect("a fault, where nothing came"))
    }

    fn misplaced(&self, operation: &str, what: &str) -> Fault {
        Fault::new(FaultKind::PeerMisbehaved, self.peer, operation, what)
    }

    /// The fault, if there is one; whoever gets it ends this rank.
    pub(super) fn fault(&self) -> Option<Fault> {
        tell(&mut self.shared.lock())
    }

    /// Gives the channel to the watchdog, with the signal because of which the peer was asked to drain.
    ///
    /// # Errors
    /// The peer is lost, or ahead of us.
    pub(super) fn finish(mut self) -> Result<(ControlChannel, Option<u8>), Fault> {
        let channel = self.join();
        let drain = self.shared.lock().drain;
        if let Some(fault) = self.fault() {
            return Err(fault);
        }
        if !self.shared.lock().items.is_empty() {
            return Err(self.misplaced("set up", "it sent more than was due"));
        }
        let channel = channel.ok_or_else(|| {
            let what = "the thread that watches over the set-up is gone";
            Fault::new(FaultKind::Internal, self.peer, "set up", what)
        })?;
        Ok((channel, drain))
    }

    fn join(&mut self) -> Option<ControlChannel> {
        self.shared.lock().is_over = true;
        self.shared.wake();
        self.shared.changed.notify_all();
        self.thread.take()?.join().ok()
    }
}

impl Drop for SetUp {
    fn drop(&mut self) {
        self.join();
    }
}

fn tell(state: &mut State) -> Option<Fault> {
    state.is_told |= state.fault.is_some();
    state.fault.clone()
}

/// Does this on a thread of its own, and waits for it until then: a disk may be away. Whoever drops
/// the set-up waits for the watch thread, and gives what is written this time too.
fn aside(deadline: Instant, act: impl FnOnce() + Send + 'static) {
    let (say, done) = sync_channel::<()>(1);
    let thread = std::thread::Builder::new().name("pp-aside".into());
    let started = thread.spawn(move || {
        act();
        let _ = say.send(());
    });
    if started.is_ok() {
        let _ = done.recv_timeout(deadline.saturating_duration_since(Instant::now()));
    }
}

struct Watcher {
    shared: Arc<Shared>,
    channel: ControlChannel,
    heartbeat: Option<Duration>,
    heard: Instant,
}

impl Watcher {
    fn run(&mut self) {
        let mut next_beat = Instant::now();
        while !self.shared.lock().is_over {
            let now = Instant::now();
            if let Some(interval) = self.heartbeat
                && now >= next_beat
            {
                if now.saturating_duration_since(next_beat) >= interval {
                    // Whoever was not there himself cannot say that others were silent.
                    self.heard = now;
                }
                // A peer that is gone is found by listening: its last words come first.
                let _ = self.send(&Message::Heartbeat);
                next_beat = now + interval;
            }
            let fault = self.silence(now).or_else(|| self.listen().err());
            if let Some(fault) = fault {
                return self.end(fault);
            }
            let due = self
                .heartbeat
                .map(|every| next_beat.min(self.heard + every * MISSED_HEARTBEATS));
            self.sleep(due);
        }
    }

    fn send(&self, message: &Message<'_>) -> bool {
        let deadline = Instant::now() + SEND_WITHIN;
        self.channel.sender().send(message, deadline).is_ok()
    }

    fn silence(&self, now: Instant) -> Option<Fault> {
        let silence = now.saturating_duration_since(self.heard);
        let limit = self.heartbeat? * MISSED_HEARTBEATS;
        (silence >= limit).then(|| {
            Fault::new(
                FaultKind::TimedOut,
                self.channel.peer(),
                "heartbeat",
                format_args!(
                    "nothing heard for {} ms while the ranks were set up; is it stopped, or its \
                     host or network gone?",
                    silence.as_millis()
                ),
            )
        })
    }

    /// Takes in what the peer has said.
    fn listen(&mut self) -> Result<(), Fault> {
        const OPERATION: &str = "set up";
        let peer = self.channel.peer();
        loop {
            let deadline = Instant::now() + FOLLOWS_WITHIN;
            let received = self.channel.receiver().try_recv_any(deadline);
            let item = match received.map_err(|error| error.fault(OPERATION))? {
                None => return Ok(()),
                Some(Received::Message(Message::Heartbeat)) => None,
                Some(Received::Message(Message::Drain(signal))) => {
                    self.shared.lock().drain = Some(signal);
                    None
                }
                Some(Received::Message(Message::Frame(body))) => Some(Item::Frame(body.to_vec())),
                Some(Received::Descriptors(fds)) => Some(Item::Descriptors(fds)),
                Some(Received::Message(Message::Abort(fault))) => return Err(fault),
                Some(Received::Message(other)) => {
                    let what = format!("it sent {other:?}, which has no place here");
                    return Err(Fault::new(FaultKind::PeerMisbehaved, peer, OPERATION, what));
                }
            };
            self.heard = Instant::now();
            let mut state = self.shared.lock();
            state.items.extend(item);
            if state.items.len() > AHEAD {
                let what = format!("it is more than {AHEAD} messages ahead");
                return Err(Fault::new(FaultKind::PeerMisbehaved, peer, OPERATION, what));
            }
            drop(state);
            self.shared.changed.notify_all();
        }
    }

    /// Sleeps until the peer says something, somebody wakes us, or the time is up.
    fn sleep(&self, until: Option<Instant>) {
        let mut fds = [
            PollFd::from_borrowed_fd(self.shared.alarm.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(self.channel.as_fd(), PollFlags::IN),
        ];
        let timeout = until.map(|at| {
            let left = at.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: left.as_secs().cast_signed(),
                tv_nsec: i64::from(left.subsec_nanos()),
            }
        });
        // An interrupted or failed poll is a look without a reason.
        let _ = poll(&mut fds, timeout.as_ref());
    }

    /// The peer is lost, or has ended the job.
    fn end(&self, fault: Fault) {
        // One that is only stopped reads why, when it goes on.
        self.send(&Message::Abort(fault.clone()));
        let mut state = self.shared.lock();
        state.fault = Some(fault.clone());
        if state.lives_on {
            drop(state);
            self.shared.changed.notify_all();
            return;
        }
        drop(state);
        self.shared.changed.notify_all();
        let deadline = Instant::now() + GRACE;
        let recorded = fault.clone();
        aside(deadline, move || flight::write_for_fault(&recorded));
        loop {
            let state = self.shared.lock();
            if state.is_told || state.is_over || state.lives_on {
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.shared.changed.wait_timeout(state, left);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
        end_with(&fault);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_come_back_is_waited_for_no_longer_than_was_said() {
        let (begun, begins) = sync_channel(1);
        aside(Instant::now() + Duration::from_secs(30), move || {
            begun.send(()).unwrap();
        });
        begins.try_recv().expect("done before it came back");
        let (_kept, never) = sync_channel::<()>(1);
        aside(Instant::now() + GRACE, move || {
            let _ = never.recv();
        });
    }
}
