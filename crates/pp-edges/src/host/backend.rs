//! The host backend, for ranks of one host that share memory, and for stages of one process.

use std::os::fd::AsFd;

use pp_contract::{Fault, FaultKind, Rank};

use super::group::{GroupMemory, HostGroup};
use super::{HostLocal, HostRx, HostTx, Receiving, RxLease, Sending, TxLease};
use crate::backend::{
    Abort, Backend, Connect, Connected, EdgeEnd, End, Joined, Neighbours, OnFrame, Peer, Waits,
    in_order, own_fault, receive_fds, share_memory,
};
use crate::bell::Bell;
use crate::edge::{Capabilities, Edges};
use crate::error::TransportError;
use crate::group::Members;
use crate::lane::shared::SharedEnd;
use crate::shm::layout::{EdgeShape, Holds};
use crate::trial;

/// Hands over payloads in host memory between processes of one host.
#[derive(Clone, Copy, Debug, Default)]
pub struct Host;

impl Host {
    /// Returns both ends of an edge in one process. Each rank brings the bell on which its driver sleeps.
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
    type Group = HostGroup;
}

impl Backend for Host {
    type Agreed = Vec<(u32, End<Self>)>;
    type AgreedGroup = GroupMemory;

    fn free_memory(&self) -> u64 {
        u64::MAX
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "host",
            payload_moves: false,
            completions_ring: true,
            is_under_mps: false,
        }
    }

    fn agree(
        &mut self,
        peer: &mut dyn Peer,
        edges: &[EdgeEnd],
        bell: &Bell,
    ) -> Result<(Self::Agreed, Option<OnFrame>), Fault> {
        check_host(peer)?;
        let edges = in_order(edges);
        let shared = share_memory(peer, &edges, Holds::All, bell)?;
        if peer.is_on_device() && edges.iter().any(|end| end.shape.has_payloads()) {
            trial::with_device(peer, &edges, &shared)?;
        }
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

    fn agree_on_group(
        &mut self,
        members: &Members,
        neighbours: &mut dyn Neighbours,
    ) -> Result<GroupMemory, Fault> {
        let own = own_fault(members.own());
        if !members.is_leader() {
            let mut leader = neighbours.neighbour(members.leader());
            check_host(&*leader)?;
            let [fd] = receive_fds(&mut *leader)?;
            return GroupMemory::open(members, fd).map_err(own);
        }
        let memory = GroupMemory::create(members).map_err(own)?;
        for rank in &members.ranks()[1..] {
            let member = neighbours.neighbour(*rank);
            check_host(&*member)?;
            member.send_fds(&[memory.as_fd()])?;
        }
        Ok(memory)
    }

    fn connect_group(
        &mut self,
        memory: GroupMemory,
        how: Connect<'_>,
    ) -> Result<Joined<Self::Group>, TransportError> {
        let group = HostGroup::new(memory, how.recorder, how.generation);
        let handle = group.abort_handle();
        let abort: Abort = Box::new(move |why, _| {
            handle.abort(why);
            Ok(())
        });
        let handle = group.abort_handle();
        let waits: Waits = Box::new(move || handle.waits());
        Ok(Joined {
            group,
            abort,
            waits: Some(waits),
        })
    }

    fn local(&mut self, shape: EdgeShape) -> Result<HostLocal, TransportError> {
        HostLocal::new(shape)
    }
}

/// Checks that the peer is on this host, since ranks on different hosts share no memory.
///
/// # Errors
/// It is on another host.
pub fn check_host(peer: &dyn Peer) -> Result<(), Fault> {
    if peer.shares_host() {
        return Ok(());
    }
    Err(Fault::new(
        FaultKind::HandshakeMismatch,
        peer.rank(),
        "map edges",
        "the ranks met over TCP and share no memory; start the ranks of both stages of an edge on one \
         machine, in one network namespace and with PP_RENDEZVOUS unset, put both stages on one rank, or put \
         both on GPUs (--transport nccl)",
    ))
}
