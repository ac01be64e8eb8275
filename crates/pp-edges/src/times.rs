//! How long this crate waits, and how often it looks.
//!
//! Here stands each bound on a wait for a peer, another thread or a library: what it bounds, and why it is that long. One
//! that must be longer than another is written as that other and something. Not here: what the caller sets, and times
//! that shape one algorithm alone, as spinning before a sleep or the pauses between two attempts.

use std::time::Duration;

/// The peer's host may refuse a few hundred bytes before the lane counts as broken: a network recovers from less.
pub(crate) const LANE_SEND_WITHIN: Duration = Duration::from_secs(10);
/// The longest sleep of a member of a group: it hears of an abort within this, where nobody could ring its bell.
pub(crate) const MEMBER_SLEEPS: Duration = Duration::from_millis(50);
