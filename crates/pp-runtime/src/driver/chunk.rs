//! What a driver knows of a chunk on its way through the stages of its rank.

use pp_contract::{Message, Stamp};
use pp_transport::edge::Edges;

use super::payload::Payload;
use super::retained::Admitted;
use crate::core::RankCore;
use crate::stage::{Done, Source};

/// A chunk that waits before a stage.
pub(super) struct Waiting<E: Edges, S: Source<E::Tx>> {
    pub(super) stamp: Stamp,
    pub(super) message: Message<S::Plan>,
    pub(super) payload: Payload<E::Receiving>,
    pub(super) arrived_ns: u64,
}

/// A chunk that a device works on, or whose group has not reported, and the slot that goes on.
pub(super) struct Working<E: Edges, S: Source<E::Tx>> {
    pub(super) stamp: Stamp,
    pub(super) message: Message<S::Plan>,
    pub(super) slot: Option<E::Tx>,
    /// What a sink has received, which may look at it until it is done. Another stage orders its reads by the lease.
    pub(super) payload: Option<E::Rx>,
    pub(super) start_ns: u64,
    /// How long it waited for other members of its group since.
    pub(super) waited_ns: u64,
    /// What the stage says, once it is done, and when that was.
    pub(super) done: Option<(Done, u64)>,
}

/// The core of a rank with the driver's records.
pub(super) type CoreOf<E, S> = RankCore<Admitted<E, S>, Waiting<E, S>, Working<E, S>>;
