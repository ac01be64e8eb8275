//! How long this crate waits, and how often it looks.
//!
//! Here stands each bound on a wait for a peer, another thread or a library: what it bounds, and why it is that long. One
//! that must be longer than another is written as that other and something. Not here: what the caller sets, and times
//! that shape one algorithm alone, as spinning before a sleep or the pauses between two attempts.

use std::time::Duration;

pub(crate) use pp_meet::times::WANTED_LOOK_EVERY;

/// Time between two looks at whether a thread is done with NCCL, or the last credits are back: they take microseconds.
pub(crate) const LOOK_EVERY: Duration = Duration::from_micros(50);
/// Time between two looks at a communicator that is made or ended, which takes milliseconds.
pub(crate) const COMMUNICATOR_LOOK_EVERY: Duration = Duration::from_micros(100);
/// Time between two looks at threads that an earlier generation left behind, which end when their abort does.
pub(crate) const LEFT_BEHIND_LOOK_EVERY: Duration = Duration::from_millis(1);
/// While a way between two GPUs is tried: a payload of any size and its number come within this, or they never do.
pub(crate) const TRIED_WITHIN: Duration = Duration::from_secs(5);
/// A call of NCCL that should come back at once counts after this as one that hangs, and its communicator is aborted.
pub(crate) const RETURNS_WITHIN: Duration = Duration::from_millis(100);
/// The end of the edges with a peer waits for the last credits and completions: microseconds where both ends have done
/// their work.
pub(crate) const SETTLED_WITHIN: Duration = Duration::from_millis(50);
/// The drop of the last edge with a peer waits for communicators that end in order: NCCL waits for the peer to do the same.
pub(crate) const DESTROYED_WITHIN: Duration = Duration::from_secs(2);
/// The drop of edges or of a communicator waits for an abort at the most; measured: half a second.
pub const ENDED_WITHIN: Duration = DESTROYED_WITHIN.saturating_add(Duration::from_secs(1));
