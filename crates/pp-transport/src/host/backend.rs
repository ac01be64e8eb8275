//! Two ranks of one host, connected by memory that both map.

use pp_contract::{Fault, FaultKind};

use super::HostLink;
use crate::backend::{Backend, Connect, Edges, OnFrame, Peer, share_memory};
use crate::bell::Bell;
use crate::error::TransportError;

/// Payloads in host memory, handed over between processes of one host.
#[derive(Clone, Copy, Debug, Default)]
pub struct Host;

impl Backend for Host {
    type Link = HostLink;
    type Agreed = HostLink;

    fn settings(&self) -> Vec<(String, String)> {
        vec![("transport".into(), "host".into())]
    }

    fn agree(
        &mut self,
        peer: &mut dyn Peer,
        edges: Edges,
        bell: &Bell,
    ) -> Result<(HostLink, Option<OnFrame>), Fault> {
        if !peer.shares_host() {
            return Err(Fault::new(
                FaultKind::HandshakeMismatch,
                peer.rank(),
                "map edges",
                "the ranks met over TCP and share no memory; the host transport needs both on one \
                 machine and in one network namespace, and PP_RENDEZVOUS unset; between machines use NCCL",
            ));
        }
        let end = share_memory(peer, edges, bell)?;
        Ok((HostLink::new(end), None))
    }

    fn connect(&mut self, link: HostLink, _: Connect<'_>) -> Result<HostLink, TransportError> {
        Ok(link)
    }
}
