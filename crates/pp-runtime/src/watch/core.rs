//! What a watchdog does when peers speak, leave or fall silent, and when its own rank fails.
//!
//! Hazard: a peer dies while this rank loads, computes or closes, and each of these has its own idea of what to do about
//! it. Guarantee: one state machine from the handshake to the goodbye. The first fault stays, is given to the caller or
//! the driver, and is told to every peer; where neither reacts within the grace, the process is ended.
//!
//! Choices: nothing here sleeps, sends or starts a thread, and the time is an argument, so that a test walks every order
//! of small cases. [`super`] carries out what [`Core::handle`] wants. While the ranks are set up the first fault is kept
//! here; from then on the switch keeps it, because the driver raises faults without this thread.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pp_contract::{CacheEpoch, Fault, FaultKind, Rank};
use pp_transport::control::{Message, Vitals};

use crate::switch::SOURCE;
use crate::times::{GOODBYE_WITHIN, MISSED_HEARTBEATS, SEND_WITHIN};

/// Messages that a peer may send before the caller takes them.
const AHEAD: usize = 8;

/// What has happened. Peers are numbered in the order in which they were given.
#[derive(Clone, Debug)]
pub(super) enum Event<'a, T> {
    /// A peer said this.
    Said(usize, Message<'a>),
    /// A frame or descriptors came from a peer.
    Item(usize, T),
    /// The channel to a peer ended with this, or what it carried was refused.
    Lost(usize, Fault),
    /// A peer did not take this message.
    Unsent(usize, Message<'static>),
    /// The driver, or the caller while the ranks are set up, ends the run with this.
    Raised(Fault),
    /// The driver is to drain because of this signal.
    Draining(u8),
    /// The source of this rank has begun this epoch with a hard cut.
    Cut(CacheEpoch),
    /// This rank, which has the source, needs nothing more of the others.
    Served,
    /// Somebody looks at the job on this rank, which has the source, or nobody does any more.
    Watched(bool),
    /// The vital signs of this rank, which was asked.
    Vitals(Vitals),
    /// From now on the loss of a peer does not end the process while the ranks are set up.
    LiveOn,
    /// The driver is done.
    Close,
    /// The watch ends without a goodbye; a fault is told before.
    Drop,
    /// Time has passed.
    Tick,
}

/// Tells the watchdog what to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Effect<T> {
    /// Send this to a peer by then; say so if that fails.
    Send(usize, Message<'static>, Instant),
    /// There is something for the caller to take.
    Wake,
    /// Give this item of a peer to the edges.
    Deliver(usize, T),
    /// Have the driver drain because of this signal.
    RequestDrain(u8),
    /// Have the driver drop what is older than this epoch.
    Cut(CacheEpoch),
    /// Tell the switch that the loss of a peer is no fault any more.
    Served,
    /// Begin to send vital signs, or send no more.
    Ask(bool),
    /// Show the vital signs of this peer.
    Vitals(usize, Vitals),
    /// Tell the driver that this peer has left in good order.
    PeerLeft(Rank),
    /// Tell the switch that a peer is lost.
    LosePeer(Fault),
    /// See whether the driver makes progress; nothing is known of the time before if the thread was away.
    Look { was_away: bool },
    /// Write down what happened before this fault.
    Record(Fault),
    /// End the process: nothing reacted to this fault within the grace.
    End(Fault),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    SetUp,
    /// The driver runs, and is looked at this often.
    Running(Option<Duration>),
    /// Goodbye was said; that of the peers is waited for until then.
    Closing(Instant),
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    There,
    /// Nothing was heard for too long.
    Silent,
    /// It said goodbye, or its channel ended.
    Gone,
}

#[derive(Clone, Debug)]
struct Peer<T> {
    rank: Rank,
    heard: Instant,
    presence: Presence,
    /// It knows of the fault.
    is_told: bool,
    /// It knows of the drain.
    drains: bool,
    /// The epoch of the newest hard cut that it knows of.
    cut: CacheEpoch,
    /// It knows that nothing more is needed of it.
    is_served: bool,
    /// It was asked for vital signs.
    is_asked: bool,
    /// What came of it and was not taken yet.
    items: VecDeque<T>,
}

/// What a watchdog knows of its rank and its peers.
#[derive(Clone, Debug)]
pub(super) struct Core<T> {
    peers: Vec<Peer<T>>,
    heartbeat: Option<Duration>,
    grace: Duration,
    phase: Phase,
    next_beat: Instant,
    next_look: Instant,
    /// The first fault, and when it was known here.
    fault: Option<(Fault, Instant)>,
    /// The process is not ended while the ranks are set up: the caller has the fault, or the rank lives on.
    is_spared: bool,
    has_ended: bool,
    /// The signal because of which a rank of the job was asked to drain.
    drain: Option<u8>,
    /// The epoch of the newest hard cut of this rank's source.
    cut: CacheEpoch,
    /// This rank has the source, and needs nothing more of the others.
    is_served: bool,
    /// Somebody looks at the job, on this rank.
    is_watched: bool,
    effects: Vec<Effect<T>>,
    /// What peers told while this rank was set up. Its driver hears it first: no rank waits until all others are set up.
    early: Vec<Effect<T>>,
}

impl<T> Core<T> {
    /// The watch over these peers, with which this rank is being set up.
    pub(super) fn new(
        peers: impl IntoIterator<Item = Rank>,
        heartbeat: Option<Duration>,
        grace: Duration,
        now: Instant,
    ) -> Self {
        let peer = |rank| Peer {
            rank,
            heard: now,
            presence: Presence::There,
            is_told: false,
            drains: false,
            cut: CacheEpoch::new(0),
            is_served: false,
            is_asked: false,
            items: VecDeque::new(),
        };
        Self {
            peers: peers.into_iter().map(peer).collect(),
            heartbeat,
            grace,
            phase: Phase::SetUp,
            next_beat: now,
            next_look: now,
            fault: None,
            is_spared: false,
            has_ended: false,
            drain: None,
            cut: CacheEpoch::new(0),
            is_served: false,
            is_watched: false,
            effects: Vec::new(),
            early: Vec::new(),
        }
    }

    /// Takes in what happened, and gives what is to be done, in that order.
    pub(super) fn handle(&mut self, event: Event<'_, T>, now: Instant) -> Vec<Effect<T>> {
        match event {
            Event::Said(at, message) if self.hears(at, now) => self.said(at, message, now),
            Event::Item(at, item) if self.hears(at, now) => self.item(at, item, now),
            Event::Lost(at, fault) if self.hears(at, now) => {
                self.lose(at, Presence::Gone, fault, now);
            }
            // Of a peer that has left, or was lost before.
            Event::Said(..) | Event::Item(..) | Event::Lost(..) => {}
            Event::Unsent(at, message) => {
                let peer = &mut self.peers[at];
                match message {
                    Message::Abort(_) => peer.is_told = peer.presence != Presence::There,
                    Message::Drain(_) => peer.drains = false,
                    Message::Cut(_) => peer.cut = CacheEpoch::new(0),
                    Message::Served => peer.is_served = false,
                    Message::Ask(is_on) => peer.is_asked = !is_on,
                    // A peer that does not read falls silent; what one that is gone said last may lie unread.
                    _ => {}
                }
                // It is told at the next look.
                return Vec::new();
            }
            Event::Raised(fault) => {
                self.is_spared |= self.phase == Phase::SetUp;
                self.note(fault, now);
            }
            Event::Draining(signal) => _ = self.drain.get_or_insert(signal),
            Event::Cut(epoch) => self.cut = self.cut.max(epoch),
            Event::Served => self.is_served = true,
            Event::Watched(is_watched) => self.is_watched = is_watched,
            Event::Vitals(vitals) => self.say(vitals, now),
            Event::LiveOn => self.is_spared = true,
            Event::Close => self.close(now),
            Event::Drop => {
                self.tell(now);
                self.phase = Phase::Over;
            }
            Event::Tick => self.tick(now),
        }
        self.tell(now);
        std::mem::take(&mut self.effects)
    }

    /// The next item of this peer for the caller, or the fault after which none comes; none if there is neither yet.
    pub(super) fn take(&mut self, at: usize) -> Option<Result<T, Fault>> {
        // What was said before the end counts.
        let item = self.peers[at].items.pop_front();
        item.map(Ok).or_else(|| self.take_fault().map(Err))
    }

    /// Why a peer that takes nothing any more is lost; none until its channel was read to the end, where its reason stands.
    pub(super) fn why_lost(&mut self) -> Option<Fault> {
        self.take_fault()
    }

    /// The fault, if there is one; the caller that gets it ends this rank.
    pub(super) fn take_fault(&mut self) -> Option<Fault> {
        let (fault, _) = self.fault.as_ref()?;
        self.is_spared = true;
        Some(fault.clone())
    }

    /// The driver begins, and is looked at this often. The signal, if a peer has asked for a drain.
    ///
    /// # Errors
    /// A peer is lost, or ahead of this rank.
    pub(super) fn hand_over(&mut self, look_every: Option<Duration>) -> Result<Option<u8>, Fault> {
        if let Some(fault) = self.take_fault() {
            return Err(fault);
        }
        if let Some(peer) = self.peers.iter().find(|peer| !peer.items.is_empty()) {
            return Err(misbehaved(peer.rank, "set up", "it sent more than was due"));
        }
        self.phase = Phase::Running(look_every);
        self.effects.append(&mut self.early);
        Ok(self.drain)
    }

    /// The peers that are listened to.
    pub(super) fn heard(&self) -> impl Iterator<Item = usize> {
        let peers = self.peers.iter().enumerate();
        let there = peers.filter(|(_, peer)| peer.presence == Presence::There);
        there.map(|(at, _)| at)
    }

    /// When [`Event::Tick`] has something to do.
    pub(super) fn due(&self) -> Option<Instant> {
        let look = match self.phase {
            Phase::Over => return None,
            Phase::Closing(until) => return Some(until),
            Phase::Running(look_every) => look_every.map(|_| self.next_look),
            Phase::SetUp => None,
        };
        let beat = self.heartbeat.map(|_| self.next_beat);
        let silences = self.heard().filter_map(|at| {
            let limit = self.heartbeat? * MISSED_HEARTBEATS;
            Some(self.peers[at].heard + limit)
        });
        let times = [look, beat, self.ends_at()];
        times.into_iter().flatten().chain(silences).min()
    }

    /// There is nothing to watch any more.
    pub(super) fn is_over(&self) -> bool {
        match self.phase {
            Phase::Over => true,
            Phase::Closing(_) => self.fault.is_some() || self.heard().next().is_none(),
            Phase::SetUp | Phase::Running(_) => false,
        }
    }

    /// When the grace after the fault is over.
    pub(super) fn grace_over(&self) -> Option<Instant> {
        let (_, since) = self.fault.as_ref()?;
        Some(*since + self.grace)
    }

    /// Says whether this peer, of which something came, is listened to.
    fn hears(&mut self, at: usize, now: Instant) -> bool {
        self.peers[at].heard = now;
        self.peers[at].presence == Presence::There
    }

    fn said(&mut self, at: usize, message: Message<'_>, now: Instant) {
        match (message, self.phase) {
            (Message::Heartbeat, _) => {}
            (Message::Drain(signal), Phase::SetUp) => _ = self.drain.get_or_insert(signal),
            (Message::Drain(signal), _) => self.effects.push(Effect::RequestDrain(signal)),
            (Message::Cut(epoch), Phase::SetUp | Phase::Running(_)) => {
                self.for_driver(Effect::Cut(epoch));
            }
            (Message::Served, Phase::SetUp | Phase::Running(_)) => {
                self.for_driver(Effect::Served);
            }
            (Message::Ask(is_on), Phase::SetUp | Phase::Running(_)) => {
                // The latest counts.
                self.early.retain(|early| !matches!(early, Effect::Ask(_)));
                self.for_driver(Effect::Ask(is_on));
            }
            (Message::Vitals(vitals), Phase::Running(_)) => {
                self.effects.push(Effect::Vitals(at, vitals));
            }
            (
                Message::Cut(_) | Message::Served | Message::Ask(_) | Message::Vitals(_),
                Phase::Closing(_) | Phase::Over,
            ) => {}
            (Message::Abort(fault), _) => {
                self.peers[at].is_told = true;
                self.fail(fault, now);
            }
            // A source that has finished does not wait for a rank that is still set up.
            (Message::Bye, phase)
                if matches!(phase, Phase::Running(_) | Phase::Closing(_))
                    || self.early.iter().any(|e| matches!(e, Effect::Served)) =>
            {
                self.peers[at].presence = Presence::Gone;
                let rank = self.peers[at].rank;
                self.for_driver(Effect::PeerLeft(rank));
            }
            (other, _) => {
                let what = format!("it sent {other:?}, which has no place here");
                let operation = match self.phase {
                    Phase::SetUp => "set up",
                    _ => "watch",
                };
                let fault = misbehaved(self.peers[at].rank, operation, what);
                self.lose(at, Presence::Gone, fault, now);
            }
        }
    }

    /// Has the driver hear of this, at once or when it begins.
    fn for_driver(&mut self, effect: Effect<T>) {
        match self.phase {
            Phase::SetUp => self.early.push(effect),
            _ => self.effects.push(effect),
        }
    }

    fn item(&mut self, at: usize, item: T, now: Instant) {
        match self.phase {
            Phase::SetUp if self.fault.is_some() => {}
            Phase::SetUp if self.peers[at].items.len() == AHEAD => {
                let what = format!("it is more than {AHEAD} messages ahead");
                let fault = misbehaved(self.peers[at].rank, "set up", what);
                self.lose(at, Presence::Gone, fault, now);
            }
            Phase::SetUp => {
                self.peers[at].items.push_back(item);
                self.effects.push(Effect::Wake);
            }
            Phase::Running(_) => self.effects.push(Effect::Deliver(at, item)),
            Phase::Closing(_) | Phase::Over => {}
        }
    }

    fn lose(&mut self, at: usize, presence: Presence, fault: Fault, now: Instant) {
        self.peers[at].presence = presence;
        self.fail(fault, now);
    }

    /// A peer is lost, or has ended the job.
    fn fail(&mut self, fault: Fault, now: Instant) {
        match self.phase {
            Phase::SetUp => self.note(fault, now),
            Phase::Running(_) => self.effects.push(Effect::LosePeer(fault)),
            // The driver is done.
            Phase::Closing(_) | Phase::Over => {}
        }
    }

    /// Keeps the first fault.
    fn note(&mut self, fault: Fault, now: Instant) {
        if self.fault.is_some() {
            return;
        }
        // While the ranks are set up, what is not taken is written down.
        if self.phase != Phase::SetUp || !self.is_spared {
            self.effects.push(Effect::Record(fault.clone()));
        }
        self.fault = Some((fault, now));
        self.effects.push(Effect::Wake);
    }

    fn tick(&mut self, now: Instant) {
        match self.phase {
            Phase::Over => return,
            Phase::Closing(until) => {
                if now >= until {
                    self.phase = Phase::Over;
                }
                return;
            }
            Phase::SetUp | Phase::Running(_) => {}
        }
        let was_away = self.beat(now);
        self.count_silence(now);
        if let Phase::Running(Some(every)) = self.phase {
            self.next_look = now + every;
            self.effects.push(Effect::Look { was_away });
        }
        if self.ends_at().is_some_and(|at| now >= at)
            && let Some((fault, _)) = &self.fault
        {
            self.has_ended = true;
            self.effects.push(Effect::End(fault.clone()));
        }
    }

    /// Sends each peer a heartbeat that is due; true if this thread was away, and cannot say that others were silent.
    fn beat(&mut self, now: Instant) -> bool {
        let Some(interval) = self.heartbeat.filter(|_| now >= self.next_beat) else {
            return false;
        };
        // This thread was to run then, and did not get the CPU.
        let late = now.saturating_duration_since(self.next_beat);
        let was_away = late >= interval;
        self.next_beat = now + interval;
        for at in 0..self.peers.len() {
            let peer = &mut self.peers[at];
            if peer.presence == Presence::There {
                // The rank's own sleep explains as much silence.
                peer.heard = match was_away {
                    true => now,
                    false => now.min(peer.heard + late),
                };
                self.send(at, Message::Heartbeat, now + SEND_WITHIN);
            }
        }
        was_away
    }

    /// Says vital signs to rank 0 if its channel takes them at once: heartbeats must not wait behind them.
    fn say(&mut self, vitals: Vitals, now: Instant) {
        let is_running = matches!(self.phase, Phase::Running(_));
        let zero = self.heard().find(|at| self.peers[*at].rank == SOURCE);
        if let Some(at) = zero.filter(|_| is_running) {
            self.send(at, Message::Vitals(vitals), now);
        }
    }

    /// A peer that was silent for too long is lost.
    fn count_silence(&mut self, now: Instant) {
        let Some(interval) = self.heartbeat else {
            return;
        };
        let when = match self.phase {
            Phase::SetUp => " while the ranks were set up",
            _ => "",
        };
        for at in 0..self.peers.len() {
            let peer = &self.peers[at];
            let silence = now.saturating_duration_since(peer.heard);
            if peer.presence == Presence::There && silence >= interval * MISSED_HEARTBEATS {
                let what = format!(
                    "nothing heard for {} ms{when}; is it stopped, its host or network gone, or a machine overloaded? Then \
                     raise PP_HEARTBEAT_MS",
                    silence.as_millis()
                );
                let fault = Fault::new(FaultKind::TimedOut, peer.rank, "heartbeat", what);
                self.lose(at, Presence::Silent, fault, now);
            }
        }
    }

    /// When the process is ended, unless something reacts to the fault before.
    fn ends_at(&self) -> Option<Instant> {
        let is_left = match self.phase {
            Phase::SetUp => !self.is_spared,
            Phase::Running(_) => true,
            Phase::Closing(_) | Phase::Over => false,
        };
        self.grace_over().filter(|_| is_left && !self.has_ended)
    }

    /// Tells the peers what they do not know yet: that the job drains (a launcher may have asked this rank alone), a hard
    /// cut, that they are needed no more, whether somebody looks, and the fault. A peer that is silent learns, when it goes on, why the others
    /// have left.
    fn tell(&mut self, now: Instant) {
        let is_set_up = match self.phase {
            Phase::SetUp => true,
            Phase::Running(_) => false,
            Phase::Closing(_) | Phase::Over => return,
        };
        for at in 0..self.peers.len() {
            let peer = &mut self.peers[at];
            // A peer that has said goodbye listens until it has heard ours.
            let drain = self.drain.filter(|_| !is_set_up && !peer.drains);
            peer.drains |= drain.is_some();
            let is_reached = is_set_up || peer.presence != Presence::Gone;
            let cut = Some(self.cut).filter(|cut| !is_set_up && *cut > peer.cut);
            peer.cut = cut.unwrap_or(peer.cut);
            let served =
                (self.is_served && !is_set_up && !peer.is_served).then_some(Message::Served);
            peer.is_served |= served.is_some();
            let is_asked = peer.is_asked;
            if !is_set_up && peer.presence == Presence::There {
                peer.is_asked = self.is_watched;
            }
            let ask = (is_asked != peer.is_asked).then_some(Message::Ask(peer.is_asked));
            let fault = self.fault.as_ref().filter(|_| is_reached && !peer.is_told);
            let fault = fault.map(|(fault, _)| fault.clone());
            peer.is_told |= fault.is_some();
            let told = [
                drain.map(Message::Drain),
                cut.map(Message::Cut),
                served,
                ask,
                fault.map(Message::Abort),
            ];
            for message in told.into_iter().flatten() {
                self.send(at, message, now + SEND_WITHIN);
            }
        }
    }

    fn close(&mut self, now: Instant) {
        self.tell(now);
        let until = now + GOODBYE_WITHIN;
        for at in 0..self.peers.len() {
            // One that is gone takes nothing, and has nothing to wait for.
            self.send(at, Message::Bye, until);
        }
        self.phase = Phase::Closing(until);
    }

    fn send(&mut self, at: usize, message: Message<'static>, by: Instant) {
        self.effects.push(Effect::Send(at, message, by));
    }
}

/// The fault of a peer that sent what it must not.
pub(super) fn misbehaved(rank: Rank, operation: &str, what: impl std::fmt::Display) -> Fault {
    Fault::new(FaultKind::PeerMisbehaved, rank, operation, what)
}
