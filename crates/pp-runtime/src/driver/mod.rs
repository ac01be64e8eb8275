//! The driver: the one loop that moves chunks, on the thread that owns the edges of a rank.
//!
//! It takes in frames, asks the core what to do, does it, and sleeps on the bell when there is
//! nothing. Stages run inline: handing a chunk to the backend costs no thread switch, and the
//! backend moves payloads while a stage computes. What must go on meanwhile (listening for the
//! death of a peer) is the watchdog's. Where a device does the work, the stages only issue it,
//! and the loop looks after what is under way.

mod awaited;
mod drive;
mod idle;
mod ports;
mod rank;
mod retained;
mod send;
mod session;
mod turns;
mod work;

use pp_contract::{Fault, FaultKind, Header, Matched, Rank, with_source};
use pp_transport::edge::EdgeRx;
use pp_transport::error::TransportError;
use pp_transport::flight::{Record, State};
use pp_transport::in_flight::{Completion, InFlight, Submission};

pub use self::drive::Driven;
pub use self::rank::{RankOptions, RankRun, Summary};
pub use self::work::{BoxedStage, NoSource, Stages};

/// A payload that was announced: not all backends have it there with its header.
#[derive(Debug)]
enum Payload<S: Submission> {
    None,
    Arriving(InFlight<S>),
    Here(S::Buffer),
    /// It was announced, and given up: it never comes.
    Lost,
}

impl<S: Submission> Payload<S> {
    /// True once it can be read.
    fn settle(&mut self) -> Result<bool, TransportError> {
        let flight = match self {
            Self::None | Self::Here(_) => return Ok(true),
            Self::Lost => return Err(lost()),
            Self::Arriving(flight) => flight,
        };
        if !flight.is_done()? {
            return Ok(false);
        }
        let Self::Arriving(flight) = std::mem::replace(self, Self::Lost) else {
            unreachable!("just seen");
        };
        match flight.complete() {
            Ok(Completion::Done(buffer)) => {
                *self = Self::Here(buffer);
                Ok(true)
            }
            Ok(Completion::Pending(flight)) => {
                *self = Self::Arriving(flight);
                Ok(false)
            }
            // Given up between the two looks.
            Err(failed) => Err(failed.error),
        }
    }

    /// It never comes, unless it is here.
    fn give_up_if_arriving(&mut self) {
        if let Self::Arriving(_) = self
            && let Self::Arriving(receive) = std::mem::replace(self, Self::Lost)
        {
            drop(receive.abort());
        }
    }

    fn take(&mut self) -> Option<S::Buffer> {
        match std::mem::replace(self, Self::None) {
            Self::Here(buffer) => Some(buffer),
            _ => None,
        }
    }
}

fn lost() -> TransportError {
    TransportError::Aborted {
        what: "a payload".into(),
        why: "its receive failed before".into(),
    }
}

/// What turns errors into faults that name a rank and an operation.
#[derive(Clone, Copy, Debug)]
struct Blame {
    rank: Rank,
    /// The rank at the other end of the edge; this one, where there is none.
    peer: Rank,
}

impl Blame {
    /// The same for an edge to this rank.
    const fn on(self, peer: Rank) -> Self {
        Self { peer, ..self }
    }

    fn transport(self, operation: &str, error: TransportError) -> Fault {
        let rank = match &error {
            TransportError::PeerMisbehaved { rank, .. } => *rank,
            TransportError::Lane { peer, .. } => *peer,
            _ => self.rank,
        };
        Fault::new(error.fault_kind(), rank, operation, with_source(&error))
    }

    fn body(self, operation: &str, error: &(dyn std::error::Error + 'static)) -> Fault {
        let detail = with_source(error);
        Fault::new(FaultKind::PeerMisbehaved, self.peer, operation, detail)
    }

    fn left_early(self) -> Fault {
        let detail = "it left before the job was done";
        Fault::new(FaultKind::PeerDied, self.peer, "receive header", detail)
    }
}

/// Posts the receive that a header announces, if it announces one.
fn post_receive<E: EdgeRx>(
    edge: &mut E,
    matched: &Matched<'_>,
    blame: Blame,
    (record, payload_moves): (Record, bool),
) -> Result<Payload<E::Receiving>, Fault> {
    let header = matched.header();
    if header.payload_bytes() == 0 {
        return Ok(Payload::None);
    }
    // Where the payload is there with its header, nothing is called that may not come back.
    if payload_moves {
        record.reached(State::Committed);
    }
    let receive = edge.receive(matched).map_err(|e| {
        record.reached(State::Poisoned);
        blame.transport("post receive", e)
    })?;
    match payload_moves {
        true => record.reached(State::Started),
        false => record.started(),
    }
    log_commitment("receive posted", header, blame.peer);
    Ok(Payload::Arriving(receive.recorded(record)))
}

/// One record for each commitment point, as every rank logs it.
fn log_commitment(what: &'static str, header: &Header, peer: Rank) {
    tracing::debug!(
        call_id = header.call_id().get(),
        chunk_index = header.chunk_index().get(),
        cache_epoch = header.cache_epoch().get(),
        group = "pp",
        peer = peer.get(),
        bytes = header.payload_bytes(),
        "{what}"
    );
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Done at the first look, and given up at any later one.
    struct GivenUp(Cell<bool>);

    impl Submission for GivenUp {
        type Buffer = ();
        fn is_done(&self) -> Result<bool, TransportError> {
            match self.0.replace(true) {
                false => Ok(true),
                true => Err(lost()),
            }
        }
        fn into_buffer(self) {}
        fn orphan(self) {}
        fn quarantine(self) {}
    }

    #[test]
    fn a_payload_that_was_given_up_never_counts_as_arrived() {
        let mut payload = Payload::Arriving(InFlight::new(GivenUp(Cell::default())));
        for _ in 0..3 {
            payload.settle().unwrap_err();
        }
        assert_eq!(payload.take(), None);
    }
}
