//! Ranks of one host, connected by memory that they map, and stages of one process.

use pp_contract::{Fault, FaultKind, Rank};

use super::layout::{EdgeShape, Holds};
use super::shared::SharedEnd;
use super::{HostLocal, HostRx, HostTx, Receiving, RxLease, Sending, TxLease};
use crate::backend::{
    Backend, Connect, Connected, EdgeEnd, End, OnFrame, Peer, in_order, share_memory,
};
use crate::bell::Bell;
use crate::edge::{Capabilities, Edges};
use crate::error::TransportError;

/// Payloads in host memory, handed over between processes of one host.
#[derive(Clone, Copy, Debug, Default)]
pub struct Host;

impl Host {
    /// Both ends of an edge in one process: each rank with the bell that its driver sleeps on.
    ///
    /// # Errors
    /// The shape cannot be laid out, or the kernel has no memory.
    pub fn pair(
        shape: EdgeShape,
        sender: (Rank, &Bell),
        receiver: (Rank, &Bell),
    ) -> Result<(HostTx, HostRx), TransportError> {
        let (tx, rx) = SharedEnd::pair(shape, Holds::All, sender, receiver)?;
        Ok((HostTx::new(tx), HostRx::new(rx)))
    }
}

impl Edges for Host {
    type Tx = TxLease;
    type Rx = RxLease;
    type Sending = Sending;
    type Receiving = Receiving;
    type Out = HostTx;
    type In = HostRx;
    type Local = HostLocal;
}

impl Backend for Host {
    type Agreed = Vec<(u32, End<Self>)>;

    fn settings(&self) -> Vec<(String, String)> {
        vec![("transport".into(), "host".into())]
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "host",
            payload_moves: false,
            completions_ring: true,
        }
    }

    fn agree(
        &mut self,
        peer: &mut dyn Peer,
        edges: &[EdgeEnd],
        bell: &Bell,
    ) -> Result<(Self::Agreed, Option<OnFrame>), Fault> {
        if !peer.shares_host() {
            return Err(Fault::new(
                FaultKind::HandshakeMismatch,
                peer.rank(),
                "map edges",
                "the ranks met over TCP and share no memory; the host transport needs both on one \
                 machine and in one network namespace, and PP_RENDEZVOUS unset; between machines use NCCL",
            ));
        }
        let edges = in_order(edges);
        let shared = share_memory(peer, &edges, Holds::All, bell)?;
        let ends = edges.iter().zip(shared).map(|(end, shared)| {
            let made = if end.is_sender {
                End::Out(HostTx::new(shared))
            } else {
                End::In(HostRx::new(shared))
            };
            (end.edge, made)
        });
        Ok((ends.collect(), None))
    }

    fn connect(
        &mut self,
        ends: Self::Agreed,
        _: Connect<'_>,
    ) -> Result<Connected<Self>, TransportError> {
        Ok(Connected { ends, abort: None })
    }

    fn local(&mut self, shape: EdgeShape) -> Result<HostLocal, TransportError> {
        HostLocal::new(shape)
    }
}
