//! The watchdog: one thread that listens to the peers from the handshake to the goodbye.
//!
//! Hazard: a peer dies or stops while this rank loads kernels, waits for a word or is inside a stage, and no thread
//! notices for ten minutes; or the rank itself never comes back. Guarantee: a peer's end is a fault as soon as its
//! socket says so, its silence after three heartbeats; every fault is told to the other peers; and if neither the caller
//! nor the driver has reacted within the grace after a fault, `on_stuck` ends the process.
//!
//! Choices: the thread sleeps in `poll`, and carries out what a pure core decides. While the ranks are
//! set up ([`SetUp`]) it takes in whatever comes, so that a heartbeat is never behind a message that no caller has asked
//! for yet; then the same thread goes on beside the driver ([`Watch`]). Silence counts only while this thread itself ran
//! on time, so a machine that was suspended is no dead peer. What it does not do: touch a payload, a device, or the
//! order of frames.
//!
//! Nothing that is stuck holds this thread up. It was looked at, call by call:
//! - sockets: every wait has a deadline; a sender that another thread uses just now is waited for no longer. Its lock is
//!   held to take or give back a value, never while writing. Descriptors that were announced are waited for shortly;
//! - the lock around the core is held while it decides, which takes microseconds;
//! - the fault, the bell and the alarm of [`Switch`] wait for a lock at most that the driver holds for an assignment;
//!   reading the driver's progress, and what it waits in, waits for nothing;
//! - `on_frame` puts a header into a queue that refuses when it is full;
//! - standard error, and with it `tracing`, can be held for ever by a thread that writes into a full
//!   pipe, and a disk can be away: so `Aside` logs, and writes what `on_fault` writes;
//! - `on_sign` stores what came where nobody else is at it, and wakes a thread of low priority;
//! - no call goes to CUDA or NCCL;
//! - memory is allocated: the allocator's locks are held inside it alone.

mod aside;
mod core;

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Rank};
use pp_transport::backend::OnFrame;
use pp_transport::control::{
    ControlChannel, ControlError, ControlReceiver, ControlSender, Message, Received, SocketKind,
    Tell, Vitals,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use self::aside::Aside;
pub use self::aside::OnFault;
use self::core::{Core, Effect, Event, misbehaved};
use crate::progress::{Stall, Stalled, StuckLimits};
use crate::switch::{Alarm, Switch};

/// Messages taken in from one peer before the others, and the clock, get their turn.
const AT_ONCE: u32 = 64;

/// How the watchdog behaves.
pub struct WatchOptions {
    /// The rank that watches.
    pub rank: Rank,
    /// Time between two heartbeats; `None` sends and expects none.
    pub heartbeat: Option<Duration>,
    /// Time to react after a fault: the caller takes it, or the driver ends.
    pub grace: Duration,
    /// Time that one operation of the driver may take; `None` lets it take for ever. Looked at
    /// several times within it, heartbeats or none.
    pub limits: Option<StuckLimits>,
    /// Called on the watch thread when neither the caller nor the driver reacted within the grace; must end the process,
    /// and wait neither for standard error nor for a disk.
    pub on_stuck: OnStuck,
    /// Called once, on a thread of its own, when there is a fault: to write down what happened. The
    /// grace is all the time it has.
    pub on_fault: Option<OnFault>,
    /// Called on the watch thread with what ranks say to each other while somebody looks at the job. Must not wait.
    pub on_sign: Option<OnSign>,
}

/// What a rank is told while somebody looks at the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// Rank 0 asks this rank for its vital signs, once a second, or for no more of them.
    Asked(bool),
    /// The vital signs of another rank, which this one asked.
    Of(Rank, Vitals),
}

/// What is done about it.
pub type OnSign = Box<dyn FnMut(Sign) + Send>;

/// What is done when nothing reacts to a fault.
pub type OnStuck = Box<dyn FnOnce(&Fault) + Send>;

/// What came of a peer for the caller.
enum Item {
    Frame(Vec<u8>),
    Descriptors(Vec<OwnedFd>),
}

/// What the watch thread and the caller share.
struct Shared {
    state: Mutex<State>,
    /// There may be something to take.
    changed: Condvar,
    /// Wakes the thread.
    alarm: Alarm,
}

struct State {
    core: Core<Item>,
    /// What the thread has still to do.
    todo: Vec<Effect<Item>>,
    limits: Option<StuckLimits>,
    /// The driver beside which the thread goes on.
    next: Option<Running>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The core decides, and is not left in the middle.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says what happened here; the thread does what follows.
    fn tell(&self, event: Event<'_, Item>) {
        let mut state = self.lock();
        let effects = state.core.handle(event, Instant::now());
        state.todo.extend(effects);
        drop(state);
        self.alarm.sound();
    }
}

/// The thread, as its owner sees it.
struct Handle {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Handle {
    fn end(&mut self, event: Event<'_, Item>) {
        if let Some(thread) = self.thread.take() {
            self.shared.tell(event);
            let _ = thread.join();
        }
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").finish_non_exhaustive()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.end(Event::Drop);
    }
}

/// The watchdog of a rank that is being set up.
///
/// # If dropped
/// The thread ends, and the channels with it. The peers are told the fault if there is one; otherwise this rank has died
/// to them.
#[derive(Debug)]
pub struct SetUp {
    handle: Handle,
    peers: Vec<(ControlSender, SocketKind)>,
    tell: Option<Tell>,
}

impl SetUp {
    /// Starts watching the peers at the other ends.
    ///
    /// # Errors
    /// The kernel refuses a descriptor or a thread.
    pub fn start(channels: Vec<ControlChannel>, options: WatchOptions) -> std::io::Result<Self> {
        let end = |channel: &ControlChannel| (channel.sender().clone(), channel.socket_kind());
        let peers: Vec<_> = channels.iter().map(end).collect();
        let ranks = channels.iter().map(ControlChannel::peer);
        let (heartbeat, grace) = (options.heartbeat, options.grace);
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                core: Core::new(ranks, heartbeat, grace, Instant::now()),
                todo: Vec::new(),
                limits: options.limits,
                next: None,
            }),
            changed: Condvar::new(),
            alarm: Alarm::new()?,
        });
        let (senders, receivers) = channels.into_iter().map(ControlChannel::split).unzip();
        let watcher = Watcher {
            shared: Arc::clone(&shared),
            senders,
            aside: Aside::start(options.rank, options.on_fault)?,
            on_stuck: Some(options.on_stuck),
            on_sign: options.on_sign,
            running: None,
        };
        let thread = std::thread::Builder::new().name("pp-set-up".into());
        let thread = Some(thread.spawn(move || watcher.run(receivers))?);
        Ok(Self {
            handle: Handle { shared, thread },
            peers,
            tell: None,
        })
    }

    /// From now on a line says, again and again, what this rank waits for and from which peer.
    pub fn tell(&mut self, tell: Option<Tell>) {
        self.tell = tell;
    }

    /// What sends to this peer.
    ///
    /// # Panics
    /// If this rank is none of the peers, as each method that takes one.
    pub fn sender(&self, peer: Rank) -> &ControlSender {
        &self.peers[self.place(peer)].0
    }

    /// The kind of socket between this rank and that peer.
    pub fn socket_kind(&self, peer: Rank) -> SocketKind {
        self.peers[self.place(peer)].1
    }

    fn place(&self, peer: Rank) -> usize {
        let place = self.peers.iter().position(|(s, _)| s.peer() == peer);
        place.expect("a peer of this rank")
    }

    /// From now on the loss of a peer does not end the process: the caller hears of it when it asks next.
    pub fn live_on(&self) {
        self.handle.shared.tell(Event::LiveOn);
    }

    /// The next message of this peer, which must be a frame; waits for it as long as the peer is there.
    ///
    /// # Errors
    /// The fault that ended the wait.
    pub fn frame(&self, peer: Rank, operation: &str) -> Result<Vec<u8>, Fault> {
        match self.next(peer, operation)? {
            Item::Frame(body) => Ok(body),
            Item::Descriptors(_) => Err(misbehaved(peer, operation, "descriptors came instead")),
        }
    }

    /// The next message of this peer, which must be descriptors; waits for them as long as the peer is there.
    ///
    /// # Errors
    /// The fault that ended the wait.
    pub fn descriptors(&self, peer: Rank, operation: &str) -> Result<Vec<OwnedFd>, Fault> {
        match self.next(peer, operation)? {
            Item::Descriptors(fds) => Ok(fds),
            Item::Frame(_) => Err(misbehaved(peer, operation, "a frame came instead")),
        }
    }

    /// Sends this peer something.
    ///
    /// # Errors
    /// It was not sent. If the peer is gone, the fault is why it ended, as far as it said so.
    pub fn send(
        &self,
        peer: Rank,
        operation: &str,
        send: impl FnOnce(&ControlSender) -> Result<(), ControlError>,
    ) -> Result<(), Fault> {
        send(self.sender(peer)).map_err(|error| match error {
            ControlError::PeerLost { .. } => self.wait(peer, operation, Core::why_lost),
            error => self.fault().unwrap_or(error.fault(operation)),
        })
    }

    fn next(&self, peer: Rank, operation: &str) -> Result<Item, Fault> {
        let at = self.place(peer);
        self.wait(peer, operation, |core| core.take(at))
    }

    /// Waits until the core has this of the peer.
    fn wait<T>(
        &self,
        peer: Rank,
        operation: &str,
        mut take: impl FnMut(&mut Core<Item>) -> Option<T>,
    ) -> T {
        let shared = &self.handle.shared;
        let mut state = shared.lock();
        loop {
            if let Some(taken) = take(&mut state.core) {
                return taken;
            }
            let every = self.tell.map_or(Duration::MAX, |tell| tell.every);
            let waited = shared.changed.wait_timeout(state, every);
            let (woken, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state = woken;
            if let Some(tell) = self.tell.filter(|_| timeout.timed_out()) {
                drop(state);
                (tell.take)(format!("waiting for rank {peer}: {operation}"));
                state = shared.lock();
            }
        }
    }

    /// The fault, if there is one; the caller that gets it ends this rank.
    pub fn fault(&self) -> Option<Fault> {
        self.handle.shared.lock().core.take_fault()
    }

    /// The caller ends this rank because of this fault, unless another came first: the peers are told.
    pub fn raise(&self, fault: Fault) {
        self.handle.shared.tell(Event::Raised(fault));
    }

    /// Goes on beside the driver of this switch, which is told if a peer has asked for a drain. `on_frame` takes the
    /// headers that come over the control channel, where ranks have no other lane; without it they are a fault. From now
    /// on `on_stuck` is called, if given, in the place of [`WatchOptions::on_stuck`].
    ///
    /// # Errors
    /// A peer is lost, or ahead of this rank.
    pub fn run(
        self,
        switch: Switch,
        on_frame: Option<OnFrame>,
        on_stuck: Option<OnStuck>,
    ) -> Result<Watch, Fault> {
        let handle = self.handle;
        let mut state = handle.shared.lock();
        let limits = state.limits;
        let drain = state.core.hand_over(limits.map(StuckLimits::look_every))?;
        state.next = Some(Running {
            switch: switch.clone(),
            stall: Stall::new(Instant::now()),
            limits,
            on_frame,
            on_stuck,
        });
        drop(state);
        if let Some(signal) = drain {
            switch.request_drain(signal);
        }
        handle.shared.alarm.sound();
        Ok(Watch { handle, switch })
    }
}

/// The watchdog of a rank whose driver runs.
///
/// # If dropped
/// Stops the thread without saying goodbye. The peers are told the fault of the switch if there is one; otherwise this
/// rank has died to them.
#[derive(Debug)]
pub struct Watch {
    handle: Handle,
    switch: Switch,
}

impl Watch {
    /// The driver is done. Says goodbye and waits, for a bounded time, until the peers have too;
    /// after a fault tells them its name instead.
    pub fn close(mut self) {
        self.follow_switch();
        self.handle.end(Event::Close);
    }

    /// The driver may have ended before the thread has seen why.
    fn follow_switch(&self) {
        for event in said_by(&self.switch) {
            self.handle.shared.tell(event);
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.follow_switch();
    }
}

/// What the switch says.
fn said_by(switch: &Switch) -> impl Iterator<Item = Event<'static, Item>> + use<> {
    let drain = switch.drain_signal().map(Event::Draining);
    let cut = switch.cut_here().map(Event::Cut);
    let fault = switch.fault().cloned().map(Event::Raised);
    let served = switch.is_served_here().then_some(Event::Served);
    let watched = switch.is_watched_here().map(Event::Watched);
    let vitals = switch.take_vitals().map(Event::Vitals);
    let all = [drain, cut, served, watched, vitals, fault];
    all.into_iter().flatten()
}

/// The driver beside which the thread runs.
struct Running {
    switch: Switch,
    stall: Stall,
    limits: Option<StuckLimits>,
    on_frame: Option<OnFrame>,
    on_stuck: Option<OnStuck>,
}

impl Running {
    /// Gives what came to the edges.
    fn deliver(&mut self, at: usize, rank: Rank, item: Item) -> Option<Event<'static, Item>> {
        let fault = match (item, &mut self.on_frame) {
            (Item::Frame(body), Some(take)) => {
                misbehaved(rank, "receive header", take(rank, &body).err()?)
            }
            _ => misbehaved(rank, "watch", "it sent what has no place here"),
        };
        Some(Event::Lost(at, fault))
    }

    /// A driver that does not come back from an operation has failed.
    fn look(&mut self, was_away: bool) {
        let Some(limits) = self.limits else {
            return;
        };
        let now = Instant::now();
        if was_away {
            self.stall.forgive(now);
        }
        let (own, progress) = (self.switch.rank(), self.switch.progress());
        let stalled = self.stall.look(progress, limits, now);
        let in_group = |stalled: Stalled| stalled.in_group(self.switch.group_wait(), own, limits);
        if let Some(stalled) = stalled.and_then(in_group) {
            let rank = stalled.peer.unwrap_or(own);
            let kind = FaultKind::TimedOut;
            self.switch
                .raise(Fault::new(kind, rank, &stalled.operation, stalled.text));
        }
    }
}

struct Watcher {
    shared: Arc<Shared>,
    senders: Vec<ControlSender>,
    aside: Aside,
    on_stuck: Option<OnStuck>,
    on_sign: Option<OnSign>,
    running: Option<Running>,
}

impl Watcher {
    fn run(mut self, mut receivers: Vec<ControlReceiver>) {
        loop {
            let switch = self.running.as_ref().map(|running| &running.switch);
            for event in switch.map(said_by).into_iter().flatten() {
                self.handle(event);
            }
            self.handle(Event::Tick);
            let (due, heard) = {
                let state = self.shared.lock();
                match (state.todo.is_empty(), state.core.is_over()) {
                    (false, _) => continue,
                    (true, true) => break,
                    (true, false) => (state.core.due(), state.core.heard().collect::<Vec<_>>()),
                }
            };
            let listened = heard.iter().map(|at| receivers[*at].as_fd());
            self.sleep(due, listened);
            for at in heard {
                self.listen(at, &mut receivers[at]);
            }
        }
        let grace_over = self.shared.lock().core.grace_over();
        if let Some(deadline) = grace_over {
            self.aside.finish(deadline);
        }
    }

    /// Takes in what happened, and does what follows.
    fn handle(&mut self, event: Event<'_, Item>) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            let (effects, next) = {
                let mut state = self.shared.lock();
                let mut effects = std::mem::take(&mut state.todo);
                effects.extend(state.core.handle(event, Instant::now()));
                (effects, state.next.take())
            };
            if let Some(mut running) = next {
                // Seen in a list of threads.
                let _ = rustix::thread::set_name(c"pp-watch");
                self.on_stuck = running.on_stuck.take().or(self.on_stuck.take());
                self.running = Some(running);
            }
            events.extend(effects.into_iter().filter_map(|effect| self.act(effect)));
        }
    }

    /// Does this; gives what happened by that.
    fn act(&mut self, effect: Effect<Item>) -> Option<Event<'static, Item>> {
        match effect {
            Effect::Send(at, message, by) => {
                let sent = self.senders[at].send(&message, by);
                return sent.err().map(|_| Event::Unsent(at, message));
            }
            Effect::Wake => self.shared.changed.notify_all(),
            Effect::Record(fault) => self.aside.begin(fault),
            Effect::End(fault) => {
                if let Some(end) = self.on_stuck.take() {
                    end(&fault);
                }
            }
            Effect::Deliver(at, item) => {
                let rank = self.senders[at].peer();
                return self.running.as_mut()?.deliver(at, rank, item);
            }
            Effect::RequestDrain(signal) => self.running.as_ref()?.switch.request_drain(signal),
            Effect::PeerLeft(rank) => self.running.as_ref()?.switch.set_left(rank),
            Effect::Cut(epoch) => self.running.as_ref()?.switch.hear_cut(epoch),
            Effect::Served => self.running.as_ref()?.switch.hear_served(),
            Effect::Ask(is_on) => self.on_sign.as_mut()?(Sign::Asked(is_on)),
            Effect::Vitals(at, vitals) => {
                let rank = self.senders[at].peer();
                self.on_sign.as_mut()?(Sign::Of(rank, vitals));
            }
            Effect::LosePeer(fault) => {
                let switch = &self.running.as_ref()?.switch;
                switch.lose_peer(fault);
                return switch.fault().cloned().map(Event::Raised);
            }
            Effect::Look { was_away } => self.running.as_mut()?.look(was_away),
        }
        None
    }

    /// Sleeps until a peer says something, another thread wakes this one, or the time is up.
    fn sleep<'a>(&'a self, until: Option<Instant>, peers: impl Iterator<Item = BorrowedFd<'a>>) {
        let switch = self.running.as_ref().map(|running| running.switch.alarm());
        let alarms = [Some(&self.shared.alarm), switch];
        let fds = alarms.into_iter().flatten().map(Alarm::as_fd).chain(peers);
        let mut fds: Vec<_> = fds
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        let timeout = until.map(|at| {
            let left = at.saturating_duration_since(Instant::now());
            Timespec {
                tv_sec: left.as_secs().cast_signed(),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        // An interrupted or failed poll is a look without a reason.
        let _ = poll(&mut fds, timeout.as_ref());
        alarms.into_iter().flatten().for_each(Alarm::quiet);
    }

    /// Takes in what a peer has said.
    fn listen(&mut self, at: usize, receiver: &mut ControlReceiver) {
        for _ in 0..AT_ONCE {
            let event = match receiver.try_recv_any(Instant::now() + crate::times::FOLLOWS_WITHIN) {
                Ok(None) => return,
                Ok(Some(Received::Message(Message::Frame(body)))) => {
                    Event::Item(at, Item::Frame(body.to_vec()))
                }
                Ok(Some(Received::Descriptors(fds))) => Event::Item(at, Item::Descriptors(fds)),
                Ok(Some(Received::Message(message))) => Event::Said(at, message),
                Err(error) => {
                    let is_running = self.running.is_some();
                    let operation = if is_running { "watch" } else { "set up" };
                    return self.handle(Event::Lost(at, error.fault(operation)));
                }
            };
            self.handle(event);
        }
    }
}

#[cfg(test)]
mod tests;
