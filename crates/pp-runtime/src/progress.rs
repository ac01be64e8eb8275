//! What a driver is doing, so that another thread can tell when it does not come back from it.
//!
//! Hazard: a call that never returns (a library that waits for a peer, a stage that loops), while
//! the rank's heartbeats go on and everybody believes it well. Guarantee: an operation that lasts
//! longer than its limit is noticed and can be named, and a thread that asks learns since when it
//! goes on. The driver pays two stores for each operation, and a look at the clock for a stage's,
//! which take long; nothing here waits or locks.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use pp_contract::{Rank, Text};
use pp_transport::flight::Activity;

use crate::clock::now_ns;

/// What a driver can be inside of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Doing {
    /// Between operations, or asleep for a short time.
    Looking = 0,
    Lease = 1,
    Send = 2,
    Receive = 3,
    Source = 4,
    Build = 5,
    /// The work of a stage behind the source.
    Work = 6,
}

impl Doing {
    /// Each with its name in a fault. A stage that works has its own.
    const ALL: [(Self, &str); 7] = [
        (Self::Looking, "look for work"),
        (Self::Lease, "lease a slot"),
        (Self::Send, "send"),
        (Self::Receive, "receive"),
        (Self::Source, "ask the source"),
        (Self::Build, "build"),
        (Self::Work, "work"),
    ];

    /// Says whether a stage is at work, which may take its time, rather than the transport.
    fn is_stage(self) -> bool {
        matches!(self, Self::Source | Self::Build | Self::Work)
    }
}

/// How long an operation may last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StuckLimits {
    /// A call of the transport: it issues work and returns.
    pub transport: Duration,
    /// A call of a stage, which on a processor does the work, and the wait for this rank's device. The
    /// wait for another rank may last twice as long.
    pub stage: Duration,
    /// The same until a chunk has gone through the whole pipeline, if it is longer: the first calls may compile. It holds again
    /// after a restart.
    pub first: Duration,
}

/// How many times as long a wait may last: a peer whose stage is stuck notices that itself, and says
/// so first.
const PEER_FIRST: u32 = 2;

impl StuckLimits {
    /// The limits of a driver that has been through a chunk, or has not.
    fn now(self, is_warm: bool) -> Self {
        let stage = if is_warm {
            self.stage
        } else {
            self.stage.max(self.first)
        };
        Self { stage, ..self }
    }

    /// How long a member of a group may wait for another: that one says first that it is stuck, and a rank that waits for
    /// the chunk of both speaks last.
    fn of_member(self) -> Duration {
        self.stage * (1 + PEER_FIRST) / 2
    }

    /// Time between two looks at the driver: short against both, so that of two ranks the one whose
    /// limit passed first is the one that says so.
    pub(crate) fn look_every(self) -> Duration {
        (self.stage.min(self.transport) / 8).max(Duration::from_millis(1))
    }
}

/// What a driver waits for that can do nothing itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Awaited {
    Nothing,
    /// Work that a stage gave to this rank's device.
    Device,
    /// Work that a stage of a group gave to this rank's device: the devices of the members wait for each other.
    Devices,
    /// The sink alone: its device, or whoever keeps its chunks.
    Sink,
    /// This rank alone: a chunk is in flight or offered, and no stage works.
    Own,
    /// A payload, a report or an acceptance of this rank.
    Peer(Rank),
}

impl Awaited {
    /// The bits of a wait's word that say what is awaited; those above count the waits.
    const BITS: u32 = 40;

    fn code(self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Device => 1,
            Self::Devices => 2,
            Self::Sink => 3,
            Self::Own => 4,
            Self::Peer(rank) => 5 + u64::from(rank.get()),
        }
    }

    fn of(wait: u64) -> Self {
        match wait & ((1 << Self::BITS) - 1) {
            0 => Self::Nothing,
            1 => Self::Device,
            2 => Self::Devices,
            3 => Self::Sink,
            4 => Self::Own,
            rank => Self::Peer(Rank::new((rank - 5) as u32)),
        }
    }
}

/// What has lasted too long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stalled {
    pub(crate) operation: String,
    /// The rank that was awaited, if it was another one.
    pub(crate) peer: Option<Rank>,
    /// How long it lasted, and the remedy.
    pub(crate) text: String,
    lasts: Duration,
}

impl Stalled {
    /// Blames the member that rank `own` waits for in a call of a group. That member gets the time to report first that it
    /// is stuck.
    pub(crate) fn in_group(
        self,
        wait: Option<(String, Rank)>,
        own: Rank,
        limits: StuckLimits,
    ) -> Option<Self> {
        let Some((call, member)) = wait.filter(|_| self.peer.is_none()) else {
            return Some(self);
        };
        let is_due = self.lasts >= limits.of_member();
        is_due.then(|| Self {
            peer: Some(member),
            text: format!(
                "rank {own} waits for it in {call}: no progress for {} ms; look at this rank, or raise PP_STUCK_MS \
                 if its stage needs longer",
                self.lasts.as_millis()
            ),
            ..self
        })
    }
}

/// A driver's side: what it does now.
#[derive(Debug, Default)]
pub(crate) struct DriverState {
    /// The names of this rank's stages, once its driver has begun.
    stages: OnceLock<Vec<String>>,
    /// What is done, in the lowest byte; which stage works, or which rank is sent to, in the next; and above the number of
    /// operations so far.
    operation: AtomicU64,
    /// When it began; 0 if the driver did not read the clock.
    began_ns: AtomicU64,
    /// What is awaited, and the number of waits so far.
    wait: AtomicU64,
    /// When it began.
    waits_since_ns: AtomicU64,
    /// Chunks that a stage of this rank has done.
    done: AtomicU64,
    /// A chunk has gone through the whole pipeline.
    is_warm: AtomicBool,
    /// Chunks that wait for the stages of this rank.
    queued: AtomicU64,
}

impl DriverState {
    /// The stages of this rank have these names.
    pub(crate) fn name_stages(&self, names: Vec<String>) {
        let _ = self.stages.set(names);
    }

    /// A stage is done with a chunk. The source admits chunk `depth` once the sink has accepted the first one.
    pub(crate) fn concludes(&self, depth: u32) {
        // One writer: the driver.
        let done = self.done.load(Ordering::Relaxed) + 1;
        self.done.store(done, Ordering::Relaxed);
        if done > u64::from(depth) {
            self.is_warm.store(true, Ordering::Relaxed);
        }
    }

    /// So many chunks wait for the stages of this rank.
    pub(crate) fn queues(&self, chunks: usize) {
        self.queued.store(chunks as u64, Ordering::Relaxed);
    }

    /// How many chunks waited for the stages of this rank when the driver last looked.
    pub(crate) fn queued(&self) -> u64 {
        self.queued.load(Ordering::Relaxed)
    }

    /// An operation begins. Never waits.
    pub(crate) fn at(&self, doing: Doing) {
        self.begin(doing, 0);
    }

    /// A message is sent to this rank. Never waits.
    pub(crate) fn sends(&self, to: Rank) {
        self.begin(Doing::Send, to.get() as usize);
    }

    /// A stage behind the source begins to work, by its place among those of this rank. Never waits.
    pub(crate) fn works(&self, stage: usize) {
        self.begin(Doing::Work, stage);
    }

    fn begin(&self, doing: Doing, of: usize) {
        // One writer: the driver. The number above the operation tells two of a kind apart.
        let count = (self.operation.load(Ordering::Relaxed) >> 16).wrapping_add(1);
        let now = count << 16 | (of as u64 & 0xFF) << 8 | doing as u64;
        let is_work = doing.is_stage() && doing != Doing::Source;
        let began_ns = if is_work { now_ns() } else { 0 };
        self.began_ns.store(began_ns, Ordering::Relaxed);
        self.operation.store(now, Ordering::Release);
    }

    /// What a driver's word says, and its name; 0 says that no driver has begun yet.
    fn of(&self, operation: u64) -> Option<(Doing, &str)> {
        let mut all = Doing::ALL.into_iter();
        let found = all.find(|(doing, _)| operation > 0 && *doing as u64 == operation & 0xFF);
        let (doing, name) = found?;
        let stage = (operation >> 8 & 0xFF) as usize;
        let stages = self.stages.get().filter(|_| doing == Doing::Work);
        let own = stages.and_then(|names| names.get(stage));
        Some((doing, own.map_or(name, String::as_str)))
    }

    /// What has to do its part before this driver can do anything. A wait counts from the first time
    /// that this is said.
    pub(crate) fn awaits(&self, awaited: Awaited) {
        let wait = self.wait.load(Ordering::Relaxed);
        if Awaited::of(wait) != awaited {
            if awaited != Awaited::Nothing {
                self.waits_since_ns.store(now_ns(), Ordering::Relaxed);
            }
            let count = (wait >> Awaited::BITS).wrapping_add(1);
            let now = count << Awaited::BITS | awaited.code();
            self.wait.store(now, Ordering::Release);
        }
    }

    /// What the driver is inside of now; `None` before it has begun. Never waits.
    pub(crate) fn activity(&self) -> Option<Activity> {
        let operation = self.operation.load(Ordering::Acquire);
        let began_ns = self.began_ns.load(Ordering::Acquire);
        let wait = self.wait.load(Ordering::Acquire);
        let waits_since_ns = self.waits_since_ns.load(Ordering::Acquire);
        // A time is that of this operation if no other has begun since.
        let is_same = self.operation.load(Ordering::Relaxed) == operation;
        let (doing, name) = self.of(operation)?;
        Some(Activity {
            operation: Text::truncated(name),
            is_stage: doing.is_stage(),
            since_ns: (is_same && began_ns > 0).then_some(began_ns),
            waiting_since_ns: (Awaited::of(wait) != Awaited::Nothing).then_some(waits_since_ns),
        })
    }
}

/// A number that ought to change, and since when it has not.
#[derive(Debug)]
struct Still {
    seen: u64,
    since: Instant,
}

impl Still {
    /// How long it has been this number.
    fn lasts(&mut self, found: u64, now: Instant) -> Duration {
        if found != self.seen {
            self.seen = found;
            self.since = now;
        }
        now.saturating_duration_since(self.since)
    }
}

/// The watching side: what the driver was doing when last looked at, and since when.
#[derive(Debug)]
pub(crate) struct Stall {
    operation: Still,
    wait: Still,
}

impl Stall {
    pub(crate) fn new(now: Instant) -> Self {
        let still = || Still {
            seen: 0,
            since: now,
        };
        Self {
            operation: still(),
            wait: still(),
        }
    }

    /// Looks; gives what has lasted too long.
    pub(crate) fn look(
        &mut self,
        progress: &DriverState,
        limits: StuckLimits,
        now: Instant,
    ) -> Option<Stalled> {
        let limits = limits.now(progress.is_warm.load(Ordering::Relaxed));
        let operation = progress.operation.load(Ordering::Relaxed);
        let wait = progress.wait.load(Ordering::Relaxed);
        let lasts = self.operation.lasts(operation, now);
        let waits = self.wait.lasts(wait, now);
        let doing = progress.of(operation);
        let to = match doing {
            Some((Doing::Send, _)) => format!(" on the way to rank {}", operation >> 8 & 0xFF),
            _ => String::new(),
        };
        let call = doing.map(|(doing, name)| match doing.is_stage() {
            true => (
                name,
                limits.stage,
                "raise PP_STUCK_MS if the stage needs longer",
            ),
            false => (
                name,
                limits.transport,
                "such a call only issues work: look at the other ranks, the driver and the network",
            ),
        });
        let (peer, wait) = match Awaited::of(wait) {
            Awaited::Nothing => (None, None),
            Awaited::Device => {
                let remedy = "look at the device, or raise PP_STUCK_MS if the stage needs longer";
                (None, Some(("wait for the device", limits.stage, remedy)))
            }
            Awaited::Devices => {
                let remedy = "look at the devices of the group, or raise PP_STUCK_MS if its stage needs longer";
                (
                    None,
                    Some(("wait for the group's devices", limits.of_member(), remedy)),
                )
            }
            Awaited::Sink => {
                let remedy = "look at its device, or for a chunk that is kept and not released, or raise PP_STUCK_MS if the sink \
                              needs longer";
                (None, Some(("wait for the sink", limits.stage, remedy)))
            }
            Awaited::Own => {
                let remedy = "no stage works, and no other rank can go on: see whether a stage keeps a slot, and whether \
                              the depth and the slots allow the order of the work";
                (
                    None,
                    Some(("wait for a chunk in flight", limits.stage, remedy)),
                )
            }
            Awaited::Peer(rank) => {
                let remedy = "look at this rank, or raise PP_STUCK_MS, which is half of that time";
                let limit = PEER_FIRST * limits.stage;
                (
                    Some(rank),
                    Some(("wait for a chunk in flight", limit, remedy)),
                )
            }
        };
        let both = [(None, lasts, call, to), (peer, waits, wait, String::new())].into_iter();
        both.filter_map(|(peer, lasts, of, to)| Some((peer, lasts, of?, to)))
            .find(|(_, lasts, (_, limit, _), _)| lasts >= limit)
            .map(|(peer, lasts, (operation, _, remedy), to)| Stalled {
                operation: operation.to_owned(),
                peer,
                lasts,
                text: format!("no progress for {} ms{to}; {remedy}", lasts.as_millis()),
            })
    }

    /// The looking thread itself was away: what the driver did meanwhile is not known.
    pub(crate) fn forgive(&mut self, now: Instant) {
        self.operation.since = now;
        self.wait.since = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: StuckLimits = StuckLimits {
        transport: Duration::from_secs(10),
        stage: Duration::from_secs(100),
        first: Duration::from_secs(100),
    };

    #[test]
    fn what_lasts_too_long_is_named_and_each_kind_has_its_limit() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let progress = DriverState::default();
        let mut stall = Stall::new(start);
        progress.sends(Rank::new(63));
        assert_eq!(stall.look(&progress, LIMITS, at(0)), None);
        assert_eq!(stall.look(&progress, LIMITS, at(9)), None);
        let seen = stall.look(&progress, LIMITS, at(10)).unwrap();
        assert_eq!((seen.operation.as_str(), seen.peer), ("send", None));
        let words = "for 10000 ms on the way to rank 63; such a call";
        assert!(seen.text.contains(words), "{seen:?}");
        progress.name_stages(["mix", "master"].map(str::to_owned).into());
        progress.works(1);
        assert_eq!(stall.look(&progress, LIMITS, at(11)), None);
        assert_eq!(stall.look(&progress, LIMITS, at(100)), None);
        let seen = stall.look(&progress, LIMITS, at(111)).unwrap();
        assert_eq!(seen.operation, "master");
        assert!(seen.text.contains("if the stage needs longer"), "{seen:?}");
    }

    #[test]
    fn the_same_operation_begun_again_is_progress() {
        let start = Instant::now();
        let progress = DriverState::default();
        let mut stall = Stall::new(start);
        for second in 0..100 {
            progress.at(Doing::Send);
            let now = start + Duration::from_secs(second);
            assert_eq!(stall.look(&progress, LIMITS, now), None);
        }
    }

    #[test]
    fn a_wait_counts_from_its_beginning_however_busy_the_driver_looks() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let progress = DriverState::default();
        let peer = Rank::new(1);
        // The rank whose device is stuck says so before the rank that waits for it.
        for (awaited, limit, blamed) in [
            (Awaited::Peer(peer), 200, Some(peer)),
            (Awaited::Device, 100, None),
            (Awaited::Devices, 150, None),
            (Awaited::Sink, 100, None),
            (Awaited::Own, 100, None),
        ] {
            let mut stall = Stall::new(start);
            for second in 0..limit {
                progress.at(Doing::Lease);
                progress.awaits(awaited);
                assert_eq!(stall.look(&progress, LIMITS, at(second)), None);
            }
            let seen = stall.look(&progress, LIMITS, at(limit)).unwrap();
            assert_eq!(seen.peer, blamed);
            assert!(seen.operation.starts_with("wait for"), "{seen:?}");
            progress.at(Doing::Lease);
            progress.awaits(Awaited::Nothing);
            progress.awaits(awaited);
            assert_eq!(stall.look(&progress, LIMITS, at(limit + 1)), None);
        }
    }

    #[test]
    fn a_member_that_waits_in_a_group_blames_the_other_and_lets_it_speak_first() {
        let start = Instant::now();
        let (own, other) = (Rank::new(1), Rank::new(2));
        let progress = DriverState::default();
        progress.name_stages(vec!["mix".to_owned()]);
        let mut stall = Stall::new(start);
        progress.works(0);
        stall.look(&progress, LIMITS, start);
        let wait = || Some(("a barrier, in mix of ranks 1+2".to_owned(), other));
        let mut told = |seconds, wait| {
            let seen = stall.look(&progress, LIMITS, start + Duration::from_secs(seconds));
            seen.unwrap().in_group(wait, own, LIMITS)
        };
        assert_eq!(told(149, wait()), None);
        let late = told(150, wait()).unwrap();
        assert_eq!((late.operation.as_str(), late.peer), ("mix", Some(other)));
        let words = "rank 1 waits for it in a barrier, in mix of ranks 1+2: ";
        assert!(late.text.starts_with(words), "{late:?}");
        // Its own work is its own.
        assert_eq!(told(151, None).unwrap().peer, None);
    }

    #[test]
    fn the_current_operation_is_shown_with_its_start() {
        let progress = DriverState::default();
        assert_eq!(progress.activity(), None);
        progress.at(Doing::Send);
        let sending = progress.activity().unwrap();
        assert_eq!((&*sending.operation, sending.is_stage), ("send", false));
        assert_eq!((sending.since_ns, sending.waiting_since_ns), (None, None));
        let before = now_ns();
        progress.name_stages(vec!["mix".to_owned()]);
        progress.works(0);
        progress.awaits(Awaited::Device);
        let computing = progress.activity().unwrap();
        assert_eq!((&*computing.operation, computing.is_stage), ("mix", true));
        let until = before..=now_ns();
        assert!(until.contains(&computing.since_ns.unwrap()));
        assert!(until.contains(&computing.waiting_since_ns.unwrap()));
        progress.awaits(Awaited::Nothing);
        assert_eq!(progress.activity().unwrap().waiting_since_ns, None);
    }

    #[test]
    fn a_driver_that_has_not_begun_is_not_late() {
        let start = Instant::now();
        let progress = DriverState::default();
        let mut stall = Stall::new(start);
        for hour in 0..3 {
            let now = start + Duration::from_secs(3600 * hour);
            assert_eq!(stall.look(&progress, LIMITS, now), None);
        }
    }

    #[test]
    fn a_time_nobody_looked_does_not_count() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let progress = DriverState::default();
        let mut stall = Stall::new(start);
        progress.at(Doing::Receive);
        stall.look(&progress, LIMITS, at(0));
        stall.forgive(at(50));
        assert_eq!(stall.look(&progress, LIMITS, at(51)), None);
        assert!(stall.look(&progress, LIMITS, at(60)).is_some());
    }

    #[test]
    fn the_first_calls_may_take_longer_until_a_chunk_has_gone_through_the_pipeline() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let limits = StuckLimits {
            first: Duration::from_secs(300),
            ..LIMITS
        };
        let progress = DriverState::default();
        for chunk in 0..4 {
            progress.works(0);
            let mut stall = Stall::new(start);
            assert_eq!(stall.look(&progress, limits, start), None);
            let is_stuck =
                |seconds, stall: &mut Stall| stall.look(&progress, limits, at(seconds)).is_some();
            // The depth is 2: the source has admitted the third chunk once the first one was accepted.
            assert_eq!(is_stuck(101, &mut stall), chunk == 3);
            assert!(is_stuck(301, &mut stall));
            progress.concludes(2);
        }
    }
}
