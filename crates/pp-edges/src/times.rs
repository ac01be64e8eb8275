//! Durations of this crate: how long it waits, and how often it polls.
//!
//! This module holds each bound on a wait for a peer, another thread or a library. Each comment says what the constant
//! bounds and why it is that long. A bound that must exceed another one is written as that constant plus a margin.
//! Durations that the caller sets are not here. Neither are durations inside a single algorithm, such as spinning
//! before a sleep or the pause between two attempts.

use std::time::Duration;

/// Timeout for sending a few hundred bytes to the peer's host, after which the lane counts as broken. A network
/// recovers from most disturbances in less time.
pub(crate) const LANE_SEND_WITHIN: Duration = Duration::from_secs(10);
/// The longest sleep of a group's member. It notices an abort within this time even if no thread could ring its bell.
pub(crate) const MEMBER_SLEEPS: Duration = Duration::from_millis(50);
