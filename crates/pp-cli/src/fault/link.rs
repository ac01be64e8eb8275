//! A link that breaks the rules between two ranks.

use std::rc::Rc;

use pp_contract::{Matched, Prepared, Stamp};
use pp_transport::bell::Bell;
use pp_transport::error::TransportError;
use pp_transport::in_flight::{InFlight, Rejected};
use pp_transport::link::{Capabilities, Link, Sent};

use super::Arm;

/// A link with a hook.
#[derive(Debug)]
pub(crate) struct Faulty<L> {
    inner: L,
    #[expect(dead_code, reason = "no fault of a link is made yet")]
    arm: Rc<Arm>,
}

impl<L: Link> Faulty<L> {
    pub(crate) fn new(inner: L, arm: &Rc<Arm>) -> Self {
        let arm = Rc::clone(arm);
        Self { inner, arm }
    }
}

impl<L: Link> Link for Faulty<L> {
    type Tx = L::Tx;
    type Rx = L::Rx;
    type Sending = L::Sending;
    type Receiving = L::Receiving;

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn bell(&self) -> &Bell {
        self.inner.bell()
    }

    fn try_lease(&mut self) -> Result<Option<L::Tx>, TransportError> {
        self.inner.try_lease()
    }

    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<L::Tx>,
    ) -> Result<Sent<L::Sending>, Rejected<L::Tx>> {
        self.inner.send(message, stamp, payload)
    }

    fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError> {
        self.inner.poll_frame(inbox)
    }

    fn receive(&mut self, header: &Matched<'_>) -> Result<InFlight<L::Receiving>, TransportError> {
        self.inner.receive(header)
    }
}
