//! Two ranks in a world of their own. The cores are the product's; callers, drivers and channels are as small as the
//! watchdog sees them.

mod moves;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Rank};
use pp_transport::control::Message;

pub(super) use self::moves::Harm;
use super::super::core::{Core, Effect, Event};

const BEAT: Duration = Duration::from_millis(100);
const SILENCE: Duration = Duration::from_millis(300);
const GRACE: Duration = Duration::from_millis(50);

/// What each rank does while it is set up.
const SCRIPTS: [[Step; 5]; 2] = {
    use Step::{Drives, HandsOver, Loads, Sends, Takes};
    [
        [Loads, Sends, Takes, HandsOver, Drives],
        [Loads, Takes, Sends, HandsOver, Drives],
    ]
};

/// What the thread that is watched over does next.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// It is inside its input or a library.
    Loads,
    Sends,
    /// What it sent was not taken: it waits for why the peer is gone.
    Loses,
    Takes,
    HandsOver,
    Drives,
    /// The driver is done, with this fault if there is one.
    Closes(Option<Fault>),
    /// It was given a fault, or has one, and ends the rank.
    Fails(Fault),
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
enum End {
    Well,
    Failed(Fault),
    /// By the watchdog.
    Stuck(Fault),
    Killed,
}

#[derive(Clone, Debug)]
enum Sent {
    Message(Message<'static>),
    Item(u8),
}

/// The switch of a driver.
#[derive(Clone, Debug, Default)]
struct Driver {
    drain: Option<u8>,
    fault: Option<Fault>,
    is_served: bool,
}

impl Driver {
    fn raise(&mut self, fault: Fault) {
        self.fault.get_or_insert(fault);
    }
}

#[derive(Clone, Debug)]
struct Process {
    core: Core<u8>,
    step: Step,
    driver: Option<Driver>,
    end: Option<End>,
    /// What the peer sent and was not heard yet.
    inbox: VecDeque<Sent>,
    /// The end of the channel was heard.
    has_lost_peer: bool,
    /// Its thread has something to see.
    alarm: bool,
    /// The caller, which has found nothing to take, was not woken.
    sleeps: bool,
    stopped: Option<Instant>,
    /// When it last heard its peer, or came back from sleep.
    heard: Instant,
    lives_on: bool,
    /// A peer has asked for a drain while the ranks were set up.
    was_asked: bool,
    /// The first fault that this rank knows of, and since when.
    first: Option<(Fault, Instant)>,
    /// The peer has told it a fault.
    was_told: bool,
    /// What the peer was told.
    told: Option<Fault>,
    told_drain: bool,
    has_said_bye: bool,
    /// The next message is not taken.
    is_busy: bool,
    was_busy: bool,
    /// The machine slept since the driver was looked at.
    has_slept: bool,
}

impl Process {
    fn is_set_up(&self) -> bool {
        self.driver.is_none()
    }

    fn is_served(&self) -> bool {
        self.driver.as_ref().is_some_and(|driver| driver.is_served)
    }

    fn goes_to_next(&mut self, at: usize) {
        let place = SCRIPTS[at].iter().position(|step| *step == self.step);
        self.step = SCRIPTS[at][place.expect("a step of the set-up") + 1].clone();
    }
}

#[derive(Clone, Debug)]
pub(super) struct World {
    now: Instant,
    ranks: [Process; 2],
    /// The ranks expect heartbeats.
    beats: bool,
    /// Rank 0 is declared to live on, once it has loaded.
    lives_on: bool,
    left: Vec<Harm>,
}

fn fault_of(rank: usize, kind: FaultKind) -> Fault {
    Fault::new(kind, Rank::new(rank as u32), "run", "a fault")
}

impl World {
    pub(super) fn new(now: Instant, beats: bool, lives_on: bool, left: &[Harm]) -> Self {
        let heartbeat = beats.then_some(BEAT);
        let process = |peer: u32| Process {
            core: Core::new([Rank::new(peer)], heartbeat, GRACE, now),
            step: Step::Loads,
            driver: None,
            end: None,
            inbox: VecDeque::new(),
            has_lost_peer: false,
            alarm: false,
            sleeps: false,
            stopped: None,
            heard: now,
            lives_on: false,
            was_asked: false,
            first: None,
            was_told: false,
            told: None,
            told_drain: false,
            has_said_bye: false,
            is_busy: false,
            was_busy: false,
            has_slept: false,
        };
        Self {
            now,
            ranks: [process(1), process(0)],
            beats,
            lives_on,
            left: left.to_vec(),
        }
    }

    /// This rank has this fault.
    fn knows(&mut self, at: usize, fault: &Fault) {
        let me = &self.ranks[at];
        if me.first.is_none() {
            // Silence is found by the core alone.
            if fault.operation.as_str() == "heartbeat" && !me.was_told {
                assert!(self.now - me.heard >= SILENCE, "{fault}");
                assert!(fault.rank.get() as usize == 1 - at, "{fault}");
            }
            self.ranks[at].first = Some((fault.clone(), self.now));
        }
    }

    /// The core speaks of this fault, which must be the first.
    fn is_first(&mut self, at: usize, fault: &Fault) {
        if fault.operation.as_str() == "heartbeat" {
            self.knows(at, fault);
        }
        let (first, _) = self.ranks[at].first.as_ref().expect("there is a fault");
        assert_eq!(first, fault, "another fault was the first");
    }

    fn raise(&mut self, at: usize, fault: Fault) {
        self.knows(at, &fault);
        let me = &mut self.ranks[at];
        me.alarm = true;
        me.driver.as_mut().expect("it runs").raise(fault);
    }

    fn happens(&mut self, at: usize, event: Event<'_, u8>) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            for effect in self.ranks[at].core.handle(event, self.now) {
                if self.ranks[at].end.is_none() {
                    events.extend(self.act(at, effect));
                }
            }
        }
        if let Step::Closes(fault) = &self.ranks[at].step
            && self.ranks[at].core.is_over()
        {
            let end = fault.clone().map_or(End::Well, End::Failed);
            self.ends(at, end);
        }
    }

    fn act(&mut self, at: usize, effect: Effect<u8>) -> Option<Event<'static, u8>> {
        match effect {
            Effect::Send(0, message, by) => {
                assert!(by > self.now);
                return self.sends(at, message);
            }
            Effect::Wake => self.ranks[at].sleeps = false,
            Effect::Deliver(..) => panic!("no frame is sent to a driver"),
            Effect::RequestDrain(signal) => {
                let me = &mut self.ranks[at];
                me.alarm = true;
                me.driver.as_mut()?.drain.get_or_insert(signal);
            }
            Effect::PeerLeft(_)
            | Effect::Cut(_)
            | Effect::Served
            | Effect::Ask(_)
            | Effect::Vitals(..) => {}
            Effect::LosePeer(fault) => {
                if !self.ranks[at].driver.as_ref()?.is_served {
                    self.knows(at, &fault);
                    self.ranks[at].driver.as_mut()?.raise(fault);
                }
                let fault = self.ranks[at].driver.as_ref()?.fault.clone();
                return fault.map(Event::Raised);
            }
            Effect::Look { was_away } => {
                let has_slept = std::mem::take(&mut self.ranks[at].has_slept);
                // What is late is a heartbeat.
                assert!(
                    was_away || !has_slept || !self.beats,
                    "a time of sleep counts"
                );
            }
            Effect::Record(fault) => self.is_first(at, &fault),
            Effect::End(fault) => {
                self.is_first(at, &fault);
                let me = &self.ranks[at];
                let (_, since) = me.first.as_ref().expect("there is a fault");
                assert!(self.now >= *since + GRACE, "it has its grace");
                assert!(!matches!(me.step, Step::Fails(_) | Step::Closes(_)));
                assert!(!(me.is_set_up() && me.lives_on), "it lives on");
                self.ends(at, End::Stuck(fault));
            }
            Effect::Send(..) => panic!("there is one peer"),
        }
        None
    }

    fn sends(&mut self, at: usize, message: Message<'static>) -> Option<Event<'static, u8>> {
        assert!(!self.ranks[at].has_said_bye, "nothing follows a goodbye");
        if let Message::Abort(fault) = &message {
            self.is_first(at, fault);
        }
        let is_left = self.ranks[1 - at].end.is_some();
        let me = &mut self.ranks[at];
        // A goodbye waits for its turn.
        let is_busy = message != Message::Bye && std::mem::take(&mut me.is_busy);
        me.was_busy |= is_busy;
        if message == Message::Bye {
            let asks = me.driver.as_ref()?.drain.is_some();
            assert!(
                is_left || me.was_busy || me.told_drain == asks,
                "a drain is lost"
            );
            me.has_said_bye = true;
        }
        if is_busy || is_left {
            return Some(Event::Unsent(0, message));
        }
        let me = &mut self.ranks[at];
        match &message {
            Message::Abort(fault) => me.told = Some(fault.clone()),
            Message::Drain(_) => me.told_drain = true,
            _ => {}
        }
        self.ranks[1 - at].inbox.push_back(Sent::Message(message));
        None
    }

    /// The peer has to be told the fault of this rank.
    fn is_owed_the_fault(&self, at: usize) -> bool {
        let [me, peer] = [&self.ranks[at], &self.ranks[1 - at]];
        let is_there = peer.end.is_none() && !peer.has_said_bye && !me.has_lost_peer;
        is_there && !me.was_told
    }

    /// The process is gone.
    fn ends(&mut self, at: usize, end: End) {
        let told_last = matches!(self.ranks[at].step, Step::Fails(_));
        let is_owed = self.is_owed_the_fault(at) && (told_last || !self.ranks[at].was_busy);
        if let End::Failed(why) | End::Stuck(why) = &end {
            let is_guess = why.kind == FaultKind::PeerDied && why.rank.get() as usize == 1 - at;
            let told = &self.ranks[1 - at].told;
            assert!(
                !is_guess || told.is_none(),
                "the reason lies unread: {told:?}"
            );
        }
        let me = &mut self.ranks[at];
        if let Some((fault, _)) = &me.first
            && end != End::Killed
        {
            assert!(
                !is_owed || me.told.as_ref() == Some(fault),
                "it is not told"
            );
            let is_served = me.is_served();
            match &end {
                End::Failed(why) | End::Stuck(why) => assert_eq!(why, fault),
                _ => assert!(is_served, "a fault is lost"),
            }
        }
        me.end = Some(end);
        me.stopped = None;
    }

    fn can_act(&self, at: usize) -> bool {
        let [me, peer] = [&self.ranks[at], &self.ranks[1 - at]];
        match &me.step {
            Step::Takes | Step::Loses => !me.sleeps,
            Step::Drives => {
                let driver = me.driver.as_ref().expect("it runs");
                // Rank 0 once rank 1 runs, and rank 1 once rank 0 needs it no more.
                let may_finish = peer.is_served() || (at == 0 && !peer.is_set_up());
                may_finish || driver.fault.is_some()
            }
            Step::Closes(_) => false,
            Step::Loads | Step::Sends | Step::HandsOver | Step::Fails(_) => true,
        }
    }

    /// The caller or the driver goes on.
    fn goes_on(&mut self, at: usize) {
        let peer_has_ended = self.ranks[1 - at].end.is_some();
        let me = &mut self.ranks[at];
        match me.step.clone() {
            Step::Loads => {
                me.goes_to_next(at);
                me.lives_on = at == 0 && self.lives_on;
                if me.lives_on {
                    self.happens(at, Event::LiveOn);
                }
            }
            Step::Sends if peer_has_ended => me.step = Step::Loses,
            Step::Loses => match me.core.why_lost() {
                None => me.sleeps = true,
                Some(fault) => self.fails(at, fault),
            },
            Step::Sends => {
                me.goes_to_next(at);
                self.ranks[1 - at].inbox.push_back(Sent::Item(at as u8));
            }
            Step::Takes => match me.core.take(0) {
                None => me.sleeps = true,
                Some(Ok(item)) => {
                    assert_eq!(item, 1 - at as u8);
                    me.goes_to_next(at);
                }
                Some(Err(fault)) => self.fails(at, fault),
            },
            Step::HandsOver => match me.core.hand_over(Some(4 * BEAT)) {
                Err(fault) => self.fails(at, fault),
                Ok(drain) => {
                    assert!(me.first.is_none(), "a fault is lost");
                    assert_eq!(drain.is_some(), me.was_asked, "a drain is lost");
                    (me.alarm, me.has_slept) = (true, false);
                    me.driver = Some(Driver {
                        drain,
                        ..Driver::default()
                    });
                    me.goes_to_next(at);
                }
            },
            Step::Drives => {
                let driver = me.driver.as_mut().expect("it runs");
                driver.is_served |= at == 0 && driver.fault.is_none();
                me.step = Step::Closes(driver.fault.clone());
                self.follow_driver(at);
                self.happens(at, Event::Close);
            }
            Step::Fails(fault) => {
                self.happens(at, Event::Drop);
                self.ends(at, End::Failed(fault));
            }
            Step::Closes(_) => unreachable!("its thread goes on"),
        }
    }

    /// The caller ends the rank while it is set up.
    fn fails(&mut self, at: usize, fault: Fault) {
        if fault.operation.as_str() == "heartbeat" {
            self.is_first(at, &fault);
        }
        self.knows(at, &fault);
        let (first, _) = self.ranks[at].first.clone().expect("just known");
        self.happens(at, Event::Raised(fault));
        if self.ranks[at].end.is_none() {
            self.ranks[at].step = Step::Fails(first);
        }
    }

    fn follow_driver(&mut self, at: usize) {
        let Some(driver) = self.ranks[at].driver.clone() else {
            return;
        };
        if let Some(signal) = driver.drain {
            self.happens(at, Event::Draining(signal));
        }
        if let Some(fault) = driver.fault {
            self.happens(at, Event::Raised(fault));
        }
    }

    fn ticks(&mut self, at: usize) {
        self.ranks[at].alarm = false;
        let was_busy = self.ranks[at].was_busy;
        self.follow_driver(at);
        self.happens(at, Event::Tick);
        let me = &self.ranks[at];
        let Some((fault, since)) = &me.first else {
            // A time of which it was not there does not count.
            let is_quiet = self.beats && self.now >= me.heard + SILENCE + 2 * BEAT;
            let is_left = me.core.heard().next().is_none();
            let is_done = is_left || matches!(me.step, Step::Closes(_));
            assert!(!is_quiet || is_done, "a silence is not seen");
            return;
        };
        let is_left = match me.step {
            Step::Fails(_) | Step::Closes(_) => false,
            _ => !(me.is_set_up() && me.lives_on),
        };
        let is_late = self.now >= *since + GRACE;
        assert!(me.end.is_some() || !is_left || !is_late, "it lives on");
        let was_taken = me.was_busy == was_busy && !me.has_said_bye;
        if was_taken && self.is_owed_the_fault(at) {
            assert_eq!(me.told.as_ref(), Some(fault), "it is not told");
        }
    }

    /// What lies in the inbox first, or that no more will come.
    fn hears(&mut self, at: usize) {
        let me = &self.ranks[at];
        let is_heard = me.core.heard().next().is_some();
        let counts = is_heard && !matches!(me.step, Step::Closes(_)) && !me.is_served();
        self.ranks[at].heard = self.now;
        match self.ranks[at].inbox.pop_front() {
            Some(Sent::Item(item)) => self.happens(at, Event::Item(0, item)),
            Some(Sent::Message(message)) => {
                match &message {
                    Message::Drain(_) => {
                        let me = &mut self.ranks[at];
                        me.was_asked |= me.is_set_up();
                    }
                    Message::Abort(fault) => {
                        self.ranks[at].was_told = true;
                        if counts {
                            self.knows(at, fault);
                        }
                    }
                    _ => {}
                }
                let asks = matches!(message, Message::Drain(_));
                self.happens(at, Event::Said(0, message));
                let me = &self.ranks[at];
                let drains = me.driver.as_ref().is_none_or(|d| d.drain.is_some());
                assert!(!asks || drains, "a drain is lost");
            }
            None => {
                let fault = fault_of(1 - at, FaultKind::PeerDied);
                self.ranks[at].has_lost_peer = true;
                if counts {
                    self.knows(at, &fault);
                }
                self.happens(at, Event::Lost(0, fault));
            }
        }
    }

    fn can_hear(&self, at: usize) -> bool {
        let [me, peer] = [&self.ranks[at], &self.ranks[1 - at]];
        let is_heard = me.core.heard().next().is_some();
        // The end may lie right behind a goodbye.
        let has_ended = me.inbox.is_empty() && peer.end.is_some() && !me.has_lost_peer;
        has_ended || (is_heard && !me.inbox.is_empty())
    }
}
