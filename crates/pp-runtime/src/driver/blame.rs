//! The words in which a driver reports: faults that name a rank and an operation, and commitment points in the log.

use pp_contract::{Fault, FaultKind, Header, Rank, with_source};
use pp_transport::error::TransportError;

/// Turns errors into faults that name a rank and an operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blame {
    pub(super) rank: Rank,
    /// The rank at the other end of the edge; this one, where there is none.
    pub(super) peer: Rank,
}

impl Blame {
    /// Blames this rank for what happens at the other end of an edge.
    pub(super) const fn on(self, peer: Rank) -> Self {
        Self { peer, ..self }
    }

    pub(super) fn transport(self, operation: &str, error: TransportError) -> Fault {
        let rank = match &error {
            TransportError::PeerMisbehaved { rank, .. } => *rank,
            TransportError::Lane { peer, .. } => *peer,
            _ => self.rank,
        };
        Fault::new(error.fault_kind(), rank, operation, with_source(&error))
    }

    pub(super) fn body(self, operation: &str, error: &(dyn std::error::Error + 'static)) -> Fault {
        let detail = with_source(error);
        Fault::new(FaultKind::PeerMisbehaved, self.peer, operation, detail)
    }

    pub(super) fn left_early(self) -> Fault {
        let detail = "it left before the job was done";
        Fault::new(FaultKind::PeerDied, self.peer, "receive header", detail)
    }
}

/// One record for each commitment point, as every rank logs it.
pub(super) fn log_commitment(what: &'static str, header: &Header, peer: Rank) {
    tracing::debug!(
        target: "pp_runtime::driver",
        call_id = header.call_id().get(),
        chunk_index = header.chunk_index().get(),
        cache_epoch = header.cache_epoch().get(),
        group = "pp",
        peer = peer.get(),
        bytes = header.payload_bytes(),
        "{what}"
    );
}
