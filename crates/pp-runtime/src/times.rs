//! How long this crate waits, and how often it looks, as `pp_transport::times` is for its crate. Heartbeats, the grace
//! and the limits of a stall are the caller's to set.

use std::time::Duration;

/// Silence of this many heartbeats is a fault: two may be late on a busy machine.
pub const MISSED_HEARTBEATS: u32 = 3;
/// A peer takes a message: one that does not within this is stopped or busy dying.
pub const SEND_WITHIN: Duration = Duration::from_millis(50);
/// The watchdog says that a peer is gone, once an edge has failed under the driver: a backend may learn it first, and
/// cannot tell it from a failure of its own.
pub(crate) const VERDICT_WITHIN: Duration = Duration::from_secs(1);
/// As that, of the leader of a group: where members make different calls no rank is lost, and the leader says so first.
pub(crate) const LEADER_SPEAKS_AFTER: Duration = Duration::from_millis(500);
/// A rank that is done waits for its peers to say so too, which they do within a round trip.
pub(crate) const GOODBYE_WITHIN: Duration = Duration::from_millis(500);
/// Descriptors that were announced are right behind, on a socket of this host.
pub(crate) const FOLLOWS_WITHIN: Duration = Duration::from_millis(500);
/// The longest sleep of a driver: each wake-up has a ring, so this only bounds a bug.
pub(crate) const LONGEST_SLEEP: Duration = Duration::from_millis(200);
/// Time between two looks at a lane that is full, which takes a peer far behind.
pub(crate) const FULL_LANE_RETRY: Duration = Duration::from_millis(1);
/// A peer that has given back everything answers the shutdown. The output is complete by then.
pub(crate) const ANSWERED_WITHIN: Duration = Duration::from_secs(1);
