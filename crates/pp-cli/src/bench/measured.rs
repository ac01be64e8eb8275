//! NCCL for `pp bench link`: bare operations are measured as soon as two ranks are connected.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use crate::backend::GpuBackend;
use pp_contract::{Fault, Rank};
use pp_transport::backend::{
    Backend, Connect, Connected, EdgeEnd, End, Joined, Neighbours, OnFrame, Peer,
};
use pp_transport::bell::Bell;
use pp_transport::edge::{Capabilities, Edges};
use pp_transport::error::TransportError;
use pp_transport::group::Members;
use pp_transport::host::EdgeShape;
use pp_transport::nccl::{CommOptions, Communicator, UniqueId};

use super::operations::{self, Operations};

/// Group of the bare operations.
const GROUP: &str = "bench";
/// Time for a communicator to end.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);

/// NCCL, which measures bare operations over a communicator of their own once the ranks are connected.
pub(super) struct Measured<'a> {
    pub(super) inner: GpuBackend,
    pub(super) sizes: Vec<u64>,
    pub(super) operations: &'a RefCell<Vec<Operations>>,
}

impl Edges for Measured<'_> {
    type Tx = <GpuBackend as Edges>::Tx;
    type Rx = <GpuBackend as Edges>::Rx;
    type Sending = <GpuBackend as Edges>::Sending;
    type Receiving = <GpuBackend as Edges>::Receiving;
    type Out = <GpuBackend as Edges>::Out;
    type In = <GpuBackend as Edges>::In;
    type Local = <GpuBackend as Edges>::Local;
    type Group = <GpuBackend as Edges>::Group;
}

impl Backend for Measured<'_> {
    type Agreed = (UniqueId, <GpuBackend as Backend>::Agreed, Rank);
    type AgreedGroup = <GpuBackend as Backend>::AgreedGroup;

    fn settings(&self) -> Vec<(String, String)> {
        self.inner.settings()
    }

    fn device(&self) -> Option<(String, Option<String>)> {
        self.inner.device()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn agree(
        &mut self,
        peer: &mut dyn Peer,
        edges: &[EdgeEnd],
        bell: &Bell,
    ) -> Result<(Self::Agreed, Option<OnFrame>), Fault> {
        let id = self.inner.agree_on_ids(peer, 1)?.remove(0);
        let me = peer.own_rank();
        let (agreed, on_frame) = self.inner.agree(peer, edges, bell)?;
        Ok(((id, agreed, me), on_frame))
    }

    fn connect(
        &mut self,
        (id, agreed, me): Self::Agreed,
        how: Connect<'_>,
    ) -> Result<Connected<Self>, TransportError> {
        let Connected { ends, abort } = self.inner.connect(agreed, how)?;
        let mut group = Communicator::connect(CommOptions {
            issuer: self.inner.issuer(how)?,
            name: GROUP,
            members: vec![Rank::new(0), Rank::new(1)],
            me,
            id,
            gathers: None,
            deadline: how.deadline,
            blocking: self.inner.blocking,
        })?;
        group.record(how.recorder, how.generation);
        let measured = operations::measure(&mut group, &self.inner.device, &self.sizes, me)?;
        group.close(Instant::now() + CLOSE_WITHIN)?;
        self.operations.replace(measured);
        let ends = ends.into_iter().map(|(number, end)| {
            let end = match end {
                End::Out(end) => End::Out(end),
                End::In(end) => End::In(end),
            };
            (number, end)
        });
        Ok(Connected {
            ends: ends.collect(),
            abort,
        })
    }

    fn agree_on_group(
        &mut self,
        members: &Members,
        neighbours: &mut dyn Neighbours,
    ) -> Result<Self::AgreedGroup, Fault> {
        self.inner.agree_on_group(members, neighbours)
    }

    fn connect_group(
        &mut self,
        agreed: Self::AgreedGroup,
        how: Connect<'_>,
    ) -> Result<Joined<Self::Group>, TransportError> {
        self.inner.connect_group(agreed, how)
    }

    fn local(&mut self, shape: EdgeShape) -> Result<Self::Local, TransportError> {
        self.inner.local(shape)
    }

    fn is_at_rest() -> bool {
        GpuBackend::is_at_rest()
    }
}
