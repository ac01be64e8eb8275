//! The memory that two ranks of one host share for their edges, as seen by one of them.

use std::sync::Arc;

use pp_contract::Rank;

use crate::bell::Bell;
use crate::error::TransportError;
use crate::shm::layout::{Direction, EdgeShape, Holds, Layout};
use crate::shm::region::Region;

/// The name of the memory in the kernel's tables.
pub(crate) const NAME: &str = "pp-edges";

/// One end of an edge whose memory two ranks share. Each of the two ranks has one such end.
#[derive(Clone, Debug)]
pub struct SharedEnd {
    pub region: Arc<Region>,
    pub place: Direction,
    /// The rank at the other end.
    pub peer: Rank,
    pub peer_bell: Bell,
}

impl SharedEnd {
    /// Returns the offset of a slot in the region, for an edge whose slots lie there.
    #[must_use]
    pub fn slot_at(&self, slot: u32) -> usize {
        self.place.slot_at(slot)
    }

    /// Returns both ends in one process, the sender's first. Each rank brings the bell on which its driver sleeps.
    pub fn pair(
        shape: EdgeShape,
        holds: Holds,
        sender: (Rank, &Bell),
        receiver: (Rank, &Bell),
    ) -> Result<(Self, Self), TransportError> {
        let layout = Layout::new([shape], holds)?;
        let region = Arc::new(Region::create(NAME, layout.len)?);
        let end = |(peer, bell): (Rank, &Bell)| Self {
            region: Arc::clone(&region),
            place: layout.edges[0],
            peer,
            peer_bell: bell.clone(),
        };
        Ok((end(receiver), end(sender)))
    }
}
