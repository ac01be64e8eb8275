//! How long this crate waits, and how often it looks.
//!
//! Here stands each bound on a wait for a peer, another thread or a library: what it bounds, and why it is that long. One
//! that must be longer than another is written as that other and something. Not here: what the caller sets, and times
//! that shape one algorithm alone, as spinning before a sleep or the pauses between two attempts.

use std::time::Duration;

/// Ranks wait for each other, unless the user says otherwise: launchers start processes many seconds apart.
pub const MEET_WITHIN: Duration = Duration::from_secs(60);
/// A rank that cannot take part looks for the others to tell them: they may be as early as it is.
pub const DECLINE_WITHIN: Duration = Duration::from_secs(2);
/// A caller that has not proved who it is may hold a place for this long; an honest one needs two round trips.
pub(crate) const STRANGER_WITHIN: Duration = Duration::from_secs(2);
/// One attempt of a rank to reach rank 0 and be answered: rank 0, to which the rank is a stranger, gives up first.
pub(crate) const ATTEMPT_WITHIN: Duration = STRANGER_WITHIN.saturating_add(Duration::from_secs(3));
/// A rank that has joined waits this much longer than rank 0, which knows better who did not come.
pub(crate) const WORD_LATER: Duration = Duration::from_secs(2);
/// A verdict on the handshake may come this long after the deadline, since it was decided just before that.
pub(crate) const VERDICT_LATER: Duration = Duration::from_secs(1);
/// A small message into a socket whose buffer is empty, or whose owner is gone: it takes microseconds or for ever.
pub(crate) const SMALL_WRITE_WITHIN: Duration = Duration::from_millis(200);
/// The rest after `accept` found no descriptor or memory: short for a caller, and no busy loop.
pub(crate) const ACCEPT_REST: Duration = Duration::from_millis(10);
/// Time between two looks at whether a connection is still wanted: a recovery is not slower for it.
pub const WANTED_LOOK_EVERY: Duration = Duration::from_millis(5);
