//! What every thread of a rank may say to its driver: drain, or a fault.
//!
//! Hazard: a fault seen by a thread that can do nothing about it, while the one that can sleeps.
//! Guarantee: the first fault wins and is never lost, and the thread that raises a fault rings the
//! bell. No thread waits for a lock here but the one that says vital signs: a fault is moved into its place, which another thread may be
//! at for as long as that takes; a bell is a word and a wake-up; an alarm is a write that does not wait.
//!
//! Choices: all that other threads ask of the driver's end is one atomic word: an [`Ending`], the signal that asked for a
//! drain, and whether the source is done. [`Ending::after`] is the one table of its changes, so a loss and the last need of
//! another rank cannot both win. The ranks that have left and the newest cut are no part of the end, and words of their own.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pp_contract::{CacheEpoch, Fault, FaultKind, Rank};
use pp_transport::backend::{Abort, Waits};
use pp_transport::bell::Bell;
use pp_transport::control::Vitals;
use pp_transport::flight::Activity;
use rustix::event::{EventfdFlags, eventfd};

use crate::core::{EndEvent, Ending};
use crate::progress::DriverState;
use crate::times::VERDICT_WITHIN;

/// The rank of the source.
pub(crate) const SOURCE: Rank = Rank::new(0);

/// What a thread that polls sleeps on: readable once it has sounded.
#[derive(Debug)]
pub(crate) struct Alarm(OwnedFd);

impl Alarm {
    pub(crate) fn new() -> std::io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(eventfd(0, flags)?))
    }

    /// Wakes the thread.
    pub(crate) fn sound(&self) {
        // Fails only when the counter is full, and then the alarm sounds already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Makes the alarm silent until the next time.
    pub(crate) fn quiet(&self) {
        // Fails only when it is silent.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A handle to the switches of one rank; clones are handles to the same ones.
#[derive(Clone)]
pub struct Switch(Arc<Inner>);

struct Inner {
    rank: Rank,
    bell: Bell,
    /// For what the watchdog must see.
    alarm: Alarm,
    /// An [`Asked`].
    asked: AtomicU64,
    /// A bit for each rank that has left.
    left: AtomicU64,
    /// The oldest epoch that is worked on.
    oldest: AtomicU64,
    /// Called once the driver of this rank needs nothing more of other ranks.
    when_served: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Somebody looks at the job.
    is_watched: AtomicBool,
    /// What this rank says next of itself. Held for assignments alone, and the watchdog does not wait for it.
    vitals: Mutex<Option<Vitals>>,
    fault: OnceLock<Fault>,
    progress: DriverState,
    /// What the members of this rank wait in.
    waits: OnceLock<Vec<Waits>>,
    /// What ends its groups, with the ranks of each.
    aborts: OnceLock<Vec<(Vec<Rank>, Arc<Abort>)>>,
}

/// What is asked of the end of a driver, packed into a word.
#[derive(Clone, Copy)]
struct Asked {
    ending: Ending,
    /// The signal that asked for a drain; 0 where none has.
    signal: u8,
    /// Says that the source needs no other rank. It may have become true after a fault here.
    is_source_done: bool,
}

impl Asked {
    fn unpack(word: u64) -> Self {
        let [ending, signal, is_source_done, ..] = word.to_le_bytes();
        Self {
            ending: Ending::from_number(ending),
            signal,
            is_source_done: is_source_done != 0,
        }
    }

    fn pack(self) -> u64 {
        let is_source_done = self.is_source_done.into();
        u64::from_le_bytes([
            self.ending as u8,
            self.signal,
            is_source_done,
            0,
            0,
            0,
            0,
            0,
        ])
    }
}

impl fmt::Debug for Switch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Switch").field(&self.0.rank).finish()
    }
}

impl Switch {
    /// The switches of this rank, whose driver sleeps on `bell`.
    ///
    /// # Errors
    /// The kernel has no descriptor left.
    pub fn new(rank: Rank, bell: Bell) -> std::io::Result<Self> {
        Ok(Self(Arc::new(Inner {
            rank,
            bell,
            alarm: Alarm::new()?,
            asked: AtomicU64::new(0),
            left: AtomicU64::new(0),
            oldest: AtomicU64::new(0),
            when_served: OnceLock::new(),
            is_watched: AtomicBool::new(false),
            vitals: Mutex::default(),
            fault: OnceLock::new(),
            progress: DriverState::default(),
            waits: OnceLock::new(),
            aborts: OnceLock::new(),
        })))
    }

    /// The rank these belong to.
    pub fn rank(&self) -> Rank {
        self.0.rank
    }

    /// Returns the operation that the driver is in; `None` before it has begun.
    pub fn activity(&self) -> Option<Activity> {
        self.0.progress.activity()
    }

    /// Returns how many chunks wait for the stages of this rank. Never waits.
    pub fn queued(&self) -> u64 {
        self.0.progress.queued()
    }

    /// On the rank of the source: from now on somebody looks at the job, or nobody does. The watchdog asks the other ranks
    /// for their vital signs, or for no more of them.
    pub fn set_watched(&self, is_watched: bool) {
        self.0.is_watched.store(is_watched, Ordering::Release);
        self.0.alarm.sound();
    }

    /// Says whether somebody looks at the job, on the rank of the source.
    pub(crate) fn is_watched_here(&self) -> Option<bool> {
        (self.0.rank == SOURCE).then(|| self.0.is_watched.load(Ordering::Acquire))
    }

    /// Says these vital signs to rank 0, in the place of those that were not said yet. Nobody waits for them: where the
    /// channel takes nothing now, they are dropped.
    pub fn say(&self, vitals: Vitals) {
        *(self.0.vitals.lock()).unwrap_or_else(PoisonError::into_inner) = Some(vitals);
        self.0.alarm.sound();
    }

    /// The vital signs that are to be said.
    pub(crate) fn take_vitals(&self) -> Option<Vitals> {
        self.0.vitals.try_lock().ok()?.take()
    }

    /// What the driver is doing.
    pub(crate) fn progress(&self) -> &DriverState {
        &self.0.progress
    }

    /// From now on the watchdog asks these in which call of a group the driver waits, and a group of these ranks is aborted
    /// when one of them is lost. The first call counts.
    pub fn watch_groups(&self, waits: Vec<Waits>, aborts: Vec<(Vec<Rank>, Arc<Abort>)>) {
        let _ = self.0.waits.set(waits);
        let _ = self.0.aborts.set(aborts);
    }

    /// Frees a driver that waits for this rank in a call of a group, whether the loss is a fault or not.
    fn abort_groups_of(&self, lost: Rank) {
        let aborts = self.0.aborts.get().into_iter().flatten();
        for (_, abort) in aborts.filter(|(ranks, _)| ranks.contains(&lost)) {
            // Begun here, and waited for by whoever leaves the group. So an abort that is not over is no error.
            let _ = abort(&format!("rank {lost} is lost"), Instant::now());
        }
    }

    /// The call of a group in which the driver waits for another member, and that member.
    pub(crate) fn group_wait(&self) -> Option<(String, Rank)> {
        self.0.waits.get()?.iter().find_map(|waits| waits())
    }

    /// The bell of the driver.
    pub fn bell(&self) -> &Bell {
        &self.0.bell
    }

    /// Take nothing new and finish what is in flight, because this signal (SIGINT is 2) came to a rank of the job. The
    /// watchdog tells the other ranks. The first signal stays.
    pub fn request_drain(&self, signal: u8) {
        let before = self.change(|asked| {
            if asked.signal == 0 {
                asked.signal = signal;
            }
            asked.ending = asked.ending.after(EndEvent::Drain);
        });
        if before.signal == 0 {
            self.0.bell.ring();
            self.0.alarm.sound();
            tracing::debug!(signal, "drain requested");
        }
    }

    /// The signal that asked for a drain, if one has.
    pub fn drain_signal(&self) -> Option<u8> {
        Some(self.asked().signal).filter(|signal| *signal != 0)
    }

    /// How far other threads ask the driver to go toward its end.
    pub(crate) fn ending(&self) -> Ending {
        match self.asked().ending {
            // The fault is on its way to its place.
            Ending::Lost if self.fault().is_none() => Ending::Running,
            ending => ending,
        }
    }

    fn asked(&self) -> Asked {
        Asked::unpack(self.0.asked.load(Ordering::Acquire))
    }

    /// Changes what is asked, and gives what was asked before.
    fn change(&self, change: impl Fn(&mut Asked)) -> Asked {
        let changed = |word| {
            let mut asked = Asked::unpack(word);
            change(&mut asked);
            Some(asked.pack())
        };
        let word = &self.0.asked;
        let before = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, changed);
        Asked::unpack(before.unwrap_or_else(|word| word))
    }

    /// Moves the driver toward its end, and gives the state before.
    fn end(&self, event: EndEvent) -> Ending {
        self.change(|asked| asked.ending = asked.ending.after(event))
            .ending
    }

    /// Says whether a drain was asked for.
    pub fn is_draining(&self) -> bool {
        self.drain_signal().is_some()
    }

    /// Ends the run with this fault, unless another came first; true if this one counts.
    pub fn raise(&self, fault: Fault) -> bool {
        let first = self.0.fault.set(fault).is_ok();
        self.end(EndEvent::Fault);
        self.0.bell.ring();
        self.0.alarm.sound();
        first
    }

    /// What the watchdog sleeps on, beside its sockets.
    pub(crate) fn alarm(&self) -> &Alarm {
        &self.0.alarm
    }

    /// Gives up what is in flight, on the user's word.
    pub fn abort(&self) {
        self.raise(Fault::new(
            FaultKind::Interrupted,
            self.0.rank,
            "run",
            "aborted by a second interrupt; what was in flight is lost",
        ));
    }

    /// The fault that ends the run, if there is one.
    pub fn fault(&self) -> Option<&Fault> {
        self.0.fault.get()
    }

    /// The fault that ends the run, once an edge has failed: the watchdog has a moment to say that its peer is gone.
    pub fn verdict(&self) -> Option<&Fault> {
        self.verdict_within(VERDICT_WITHIN)
    }

    /// Waits for the [`Switch::verdict`] until `within` is over.
    pub(crate) fn verdict_within(&self, within: Duration) -> Option<&Fault> {
        self.wait_until(within, || self.fault().is_some());
        self.fault()
    }

    /// Waits until this is true, at most `within`. It becomes so where somebody rings the bell.
    fn wait_until(&self, within: Duration, is_true: impl Fn() -> bool) {
        let deadline = Instant::now() + within;
        loop {
            let listener = self.bell().listen();
            if is_true() || Instant::now() >= deadline {
                return;
            }
            listener.wait(deadline);
        }
    }

    /// The rank `rank` has closed its side in good order, or was lost.
    pub(crate) fn set_left(&self, rank: Rank) {
        self.0.left.fetch_or(bit(rank), Ordering::AcqRel);
        self.0.bell.ring();
    }

    /// Sets what is called once the driver needs no other rank. It must not block. Only the first call counts.
    pub fn when_served(&self, act: impl Fn() + Send + Sync + 'static) {
        let _ = self.0.when_served.set(Box::new(act));
    }

    /// The driver of the source needs nothing more of other ranks: from now on the loss of one is no fault. The
    /// watchdog tells the others. False if there is a fault already.
    pub(crate) fn set_served(&self) -> bool {
        let is_served = !self.end(EndEvent::Serve).is_stopped();
        if is_served {
            self.say_served();
        }
        is_served
    }

    /// The driver of the source has all it needs, whatever was lost. The watchdog tells the others.
    pub(crate) fn say_served(&self) {
        self.change(|asked| asked.is_source_done = true);
        self.0.alarm.sound();
        if let Some(act) = self.0.when_served.get() {
            act();
        }
    }

    /// The source needs nothing more of any other rank: from now on the loss of one is no fault.
    pub fn hear_served(&self) {
        self.change(|asked| {
            asked.ending = asked.ending.after(EndEvent::Serve);
            asked.is_source_done = true;
        });
        self.0.bell.ring();
    }

    /// After a loss, on a rank without the source: whether the source needs no other rank any more, so that the ranks will
    /// not meet again. Waits until the rank of the source has said so or has left, at most `within`.
    pub fn is_source_done(&self, within: Duration) -> bool {
        self.wait_until(within, || {
            self.asked().is_source_done || self.has_left(SOURCE)
        });
        // It says so before it leaves.
        self.asked().is_source_done
    }

    /// Says whether the source stands on this rank, and its driver needs nothing more of other ranks.
    pub(crate) fn is_served_here(&self) -> bool {
        self.0.rank == SOURCE && self.asked().is_source_done
    }

    /// Says whether the driver needs nothing more of other ranks.
    pub fn is_served(&self) -> bool {
        self.asked().ending.is_served()
    }

    /// A peer is lost, which ends the run with this fault if the driver still needs other ranks.
    pub fn lose_peer(&self, fault: Fault) {
        let rank = fault.rank;
        let is_needed = self.end(EndEvent::Lose) < Ending::Served;
        if is_needed {
            self.raise(fault);
        }
        // Behind the fault: who sees that it has left, or that a group has ended, sees why.
        self.set_left(rank);
        self.abort_groups_of(rank);
    }

    /// The source, on this rank, has begun this epoch with a hard cut: what is older is dropped. The watchdog tells the
    /// other ranks.
    pub(crate) fn cut(&self, epoch: CacheEpoch) {
        self.hear_cut(epoch);
        self.0.alarm.sound();
    }

    /// The source has begun this epoch with a hard cut.
    pub(crate) fn hear_cut(&self, epoch: CacheEpoch) {
        self.0.oldest.fetch_max(epoch.get(), Ordering::AcqRel);
        self.0.bell.ring();
    }

    /// The epoch of the newest hard cut of a source on this rank, if there is one.
    pub(crate) fn cut_here(&self) -> Option<CacheEpoch> {
        let epoch = self.oldest_epoch();
        (self.0.rank == SOURCE && epoch.get() > 0).then_some(epoch)
    }

    /// The oldest epoch that is worked on.
    pub(crate) fn oldest_epoch(&self) -> CacheEpoch {
        CacheEpoch::new(self.0.oldest.load(Ordering::Acquire))
    }

    /// Says whether the rank `rank` has closed its side in good order, or was lost.
    pub(crate) fn has_left(&self, rank: Rank) -> bool {
        self.0.left.load(Ordering::Acquire) & bit(rank) != 0
    }
}

/// The place of a rank in a word; a job has at most 64 ranks.
fn bit(rank: Rank) -> u64 {
    1 << (rank.get() % u64::BITS)
}

#[cfg(test)]
mod tests {
    use pp_transport::host::HostGroup;

    use super::*;

    fn fault(detail: &str) -> Fault {
        Fault::new(FaultKind::Io, Rank::new(1), "write", detail)
    }

    #[test]
    fn the_first_fault_counts_and_rings() {
        let switch = Switch::new(Rank::new(0), Bell::new().unwrap()).unwrap();
        let bell = switch.bell().clone();
        let ear = bell.listen();
        assert!(switch.raise(fault("first")));
        assert!(!switch.raise(fault("second")));
        assert_eq!(switch.fault(), Some(&fault("first")));
        assert!(ear.was_rung());
    }

    #[test]
    fn a_peer_that_is_lost_ends_the_run_unless_it_is_needed_no_more() {
        let [needed, served] =
            [(); 2].map(|()| Switch::new(Rank::new(0), Bell::new().unwrap()).unwrap());
        needed.lose_peer(fault("lost"));
        assert!(!needed.set_served() && !needed.is_served());
        assert_eq!(needed.fault(), Some(&fault("lost")));
        assert!(served.set_served());
        served.lose_peer(fault("lost"));
        assert!(served.fault().is_none() && served.has_left(Rank::new(1)));
    }

    /// A driver that is blocked in a collective hears nothing else.
    #[test]
    fn a_loss_ends_the_groups_of_the_rank_also_where_it_is_no_fault() {
        for is_served in [false, true] {
            let switch = Switch::new(Rank::new(0), Bell::new().unwrap()).unwrap();
            let groups = [1, 2].map(|other| {
                let ranks = [0, other].map(Rank::new);
                let mut group = HostGroup::of_threads("pair", &ranks).unwrap();
                let abort = group[0].abort_handle();
                let abort: Abort = Box::new(move |why, _| {
                    abort.abort(why);
                    Ok(())
                });
                (
                    group.remove(1),
                    group.remove(0),
                    (ranks.to_vec(), Arc::new(abort)),
                )
            });
            let [(_other, mut blocked, first), (mut third, mut own, second)] = groups;
            switch.watch_groups(Vec::new(), vec![first, second]);
            if is_served {
                switch.hear_served();
            }
            let error = std::thread::scope(|scope| {
                let call = scope.spawn(move || blocked.barrier().unwrap_err().to_string());
                switch.lose_peer(fault("lost"));
                call.join().unwrap()
            });
            assert!(error.contains("rank 1 is lost"), "{error}");
            assert_eq!(switch.fault().is_some(), !is_served);
            std::thread::scope(|scope| {
                scope.spawn(move || third.barrier().unwrap());
                own.barrier().unwrap();
            });
        }
    }

    #[test]
    fn a_rank_that_lost_another_hears_whether_the_source_goes_on() {
        let switch = || Switch::new(Rank::new(2), Bell::new().unwrap()).unwrap();
        let [done, gone, silent] = [switch(), switch(), switch()];
        let of_source = Fault::new(FaultKind::PeerDied, SOURCE, "watch", "gone");
        for switch in [&done, &gone, &silent] {
            switch.lose_peer(fault("lost"));
        }
        done.hear_served();
        for switch in [&done, &gone] {
            switch.lose_peer(of_source.clone());
        }
        let long = Duration::from_secs(600);
        assert!(done.is_source_done(long) && !gone.is_source_done(long));
        assert!(!silent.is_source_done(Duration::ZERO));
        assert!(!done.is_served() && done.fault() == Some(&fault("lost")));
    }

    #[test]
    fn a_drain_is_seen_by_every_handle() {
        let switch = Switch::new(Rank::new(0), Bell::new().unwrap()).unwrap();
        let other = switch.clone();
        assert!(!other.is_draining());
        switch.request_drain(15);
        switch.request_drain(2);
        assert_eq!(other.drain_signal(), Some(15));
    }
}
