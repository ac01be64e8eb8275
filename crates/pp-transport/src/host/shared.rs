//! The memory that two ranks of one host share for their edges, as one of them has it.

use std::sync::Arc;

use pp_contract::Rank;

use super::layout::{Direction, EdgeShape, Layout};
use super::region::Region;
use crate::bell::Bell;
use crate::error::TransportError;

/// The name of the memory in the kernel's tables.
pub(crate) const NAME: &str = "pp-edges";

/// One rank's end of the memory. A region has one such end for each rank.
#[derive(Clone, Debug)]
pub(crate) struct SharedEnd {
    pub(crate) region: Arc<Region>,
    pub(crate) outgoing: Direction,
    pub(crate) incoming: Direction,
    /// The rank at the other end.
    pub(crate) peer: Rank,
    pub(crate) bell: Bell,
    pub(crate) peer_bell: Bell,
}

impl SharedEnd {
    /// Both ends in one process: rank 0, whose driver sleeps on `low`, then rank 1.
    pub(crate) fn pair(
        up: EdgeShape,
        down: EdgeShape,
        low: Bell,
    ) -> Result<(Self, Self), TransportError> {
        let high = Bell::new()?;
        let Layout { up, down, len } = Layout::new(up, down)?;
        let region = Arc::new(Region::create(NAME, len)?);
        let lower = Self {
            region: Arc::clone(&region),
            outgoing: up,
            incoming: down,
            peer: Rank::new(1),
            bell: low.clone(),
            peer_bell: high.clone(),
        };
        let higher = Self {
            region,
            outgoing: down,
            incoming: up,
            peer: Rank::new(0),
            bell: high,
            peer_bell: low,
        };
        Ok((lower, higher))
    }
}
