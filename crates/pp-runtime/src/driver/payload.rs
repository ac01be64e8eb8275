//! A payload on its way to this rank.

use pp_contract::{Fault, Matched};
use pp_transport::edge::EdgeRx;
use pp_transport::error::TransportError;
use pp_transport::flight::{Record, State};
use pp_transport::in_flight::{Completion, InFlight, Submission};

use super::blame::{Blame, log_commitment};

/// A payload that was announced: not all backends have it there with its header.
#[derive(Debug)]
pub(super) enum Payload<S: Submission> {
    None,
    Arriving(InFlight<S>),
    Here(S::Buffer),
    /// It was announced, and given up: it never comes.
    Lost,
}

impl<S: Submission> Payload<S> {
    /// True once it can be read.
    pub(super) fn settle(&mut self) -> Result<bool, TransportError> {
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
    pub(super) fn give_up_if_arriving(&mut self) {
        if let Self::Arriving(_) = self
            && let Self::Arriving(receive) = std::mem::replace(self, Self::Lost)
        {
            drop(receive.abort());
        }
    }

    pub(super) fn take(&mut self) -> Option<S::Buffer> {
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

/// Posts the receive that a header announces, if it announces one.
pub(super) fn post_receive<E: EdgeRx>(
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
