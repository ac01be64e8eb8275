//! Durations of this crate: how long it waits, and how often it polls.
//!
//! This module holds each bound on a wait for a peer, another thread or a library. Each comment says what the constant
//! bounds and why it is that long. A bound that must exceed another one is written as that constant plus a margin.
//! Durations that the caller sets are not here. Neither are durations inside a single algorithm, such as spinning
//! before a sleep or the pause between two attempts.

use std::time::Duration;

pub(crate) use pp_meet::times::WANTED_LOOK_EVERY;

/// Polling interval while a thread leaves NCCL, or while the last credits return. Both take microseconds.
pub(crate) const LOOK_EVERY: Duration = Duration::from_micros(50);
/// Polling interval while a communicator is made or ended, which takes milliseconds.
pub(crate) const COMMUNICATOR_LOOK_EVERY: Duration = Duration::from_micros(100);
/// Polling interval for threads that an earlier generation left behind. They end when their abort does.
pub(crate) const LEFT_BEHIND_LOOK_EVERY: Duration = Duration::from_millis(1);
/// Timeout for a payload and its number while the copy engine between two GPUs is tried. A payload of any size arrives
/// within this time, or never.
pub(crate) const TRIED_WITHIN: Duration = Duration::from_secs(5);
/// Longest wait until the staging memory of that trial is freed, which takes less than a millisecond.
pub(crate) const FREED_WITHIN: Duration = Duration::from_secs(1);
/// Time after which a call of NCCL counts as hung, if it should return at once. Its communicator is then aborted.
pub(crate) const RETURNS_WITHIN: Duration = Duration::from_millis(100);
/// Longest wait for the last credits and completions when the edges with a peer end. It takes microseconds where both
/// ends have done their work.
pub(crate) const SETTLED_WITHIN: Duration = Duration::from_millis(50);
/// Longest wait for communicators to end in order when the last edge with a peer is dropped. NCCL waits for the peer to
/// do the same.
pub(crate) const DESTROYED_WITHIN: Duration = Duration::from_secs(2);
/// Longest wait for an abort when edges or a communicator are dropped. An abort took half a second when it was
/// measured.
pub const ENDED_WITHIN: Duration = DESTROYED_WITHIN.saturating_add(Duration::from_secs(1));
