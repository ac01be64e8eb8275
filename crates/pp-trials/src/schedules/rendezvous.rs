//! Edges whose sends wait, as a blocking send does: a send returns when the receiver has used the payload.

use std::time::Duration;

use pp_contract::{Fault, Prepared, Stamp};
use pp_transport::backend::{
    Backend, Connect, Connected, EdgeEnd, End, Joined, MemoryProbe, Neighbours, OnFrame, Peer,
};
use pp_transport::bell::Bell;
use pp_transport::edge::{Capabilities, EdgeTx, Edges, Sent};
use pp_transport::error::TransportError;
use pp_transport::group::Members;
use pp_transport::host::EdgeShape;
use pp_transport::in_flight::Rejected;

/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// A backend with such edges.
pub(super) struct Rendezvous<B>(pub(super) B);

/// The sending end of one.
pub(super) struct Waiting<O>(O);

impl<O: EdgeTx> EdgeTx for Waiting<O> {
    type Tx = O::Tx;
    type Sending = O::Sending;

    fn advance(&mut self) -> Result<bool, TransportError> {
        self.0.advance()
    }

    fn try_lease(&mut self) -> Result<Option<O::Tx>, TransportError> {
        self.0.try_lease()
    }

    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<O::Tx>,
    ) -> Result<Sent<O::Sending>, Rejected<O::Tx>> {
        let sent = self.0.send(message, stamp, payload)?;
        // What fails here fails where the driver asks for it.
        while let Some(payload) = &sent.payload
            && let Ok(_) = self.0.advance()
            && let Ok(false) = payload.is_done()
        {
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(sent)
    }

    fn peer_is_gone(&mut self) {
        self.0.peer_is_gone();
    }
}

impl<B: Backend> Edges for Rendezvous<B> {
    type Tx = B::Tx;
    type Rx = B::Rx;
    type Sending = B::Sending;
    type Receiving = B::Receiving;
    type Out = Waiting<B::Out>;
    type In = B::In;
    type Local = B::Local;
    type Group = B::Group;
}

impl<B: Backend> Backend for Rendezvous<B> {
    type Agreed = B::Agreed;
    type AgreedGroup = B::AgreedGroup;

    fn device_settings(&self) -> Vec<(String, String)> {
        self.0.device_settings()
    }

    fn free_memory(&self) -> u64 {
        self.0.free_memory()
    }

    fn memory_probe(&self) -> Option<MemoryProbe> {
        self.0.memory_probe()
    }

    fn has_failed_for_all() -> bool {
        B::has_failed_for_all()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn agree(
        &mut self,
        peer: &mut dyn Peer,
        edges: &[EdgeEnd],
        bell: &Bell,
    ) -> Result<(B::Agreed, Option<OnFrame>), Fault> {
        self.0.agree(peer, edges, bell)
    }

    fn connect(
        &mut self,
        agreed: B::Agreed,
        how: Connect<'_>,
    ) -> Result<Connected<Self>, TransportError> {
        let connected = self.0.connect(agreed, how)?;
        let waits = |end| match end {
            End::Out(end) => End::Out(Waiting(end)),
            End::In(end) => End::In(end),
        };
        let ends = connected.ends.into_iter();
        Ok(Connected {
            ends: ends.map(|(edge, end)| (edge, waits(end))).collect(),
            abort: connected.abort,
        })
    }

    fn agree_on_group(
        &mut self,
        members: &Members,
        neighbours: &mut dyn Neighbours,
    ) -> Result<B::AgreedGroup, Fault> {
        self.0.agree_on_group(members, neighbours)
    }

    fn connect_group(
        &mut self,
        agreed: B::AgreedGroup,
        how: Connect<'_>,
    ) -> Result<Joined<B::Group>, TransportError> {
        self.0.connect_group(agreed, how)
    }

    fn local(&mut self, shape: EdgeShape) -> Result<B::Local, TransportError> {
        self.0.local(shape)
    }
}
