//! A backend whose edges have a hook.

use std::rc::Rc;

use pp_contract::Fault;
use pp_transport::backend::{
    Backend, Connect, Connected, EdgeEnd, End, Joined, MemoryProbe, Neighbours, OnFrame, Peer,
};
use pp_transport::bell::Bell;
use pp_transport::edge::{Capabilities, Edges};
use pp_transport::error::TransportError;
use pp_transport::group::Members;
use pp_transport::host::EdgeShape;

use super::edges::{FaultyIn, FaultyOut};
use super::{Arm, Breakable};

/// What another edge is like whose slot is sent.
const OTHER: EdgeShape = EdgeShape {
    depth: 1,
    slot_bytes: 1 << 20,
};

/// A backend with a hook.
pub(crate) struct FaultyBackend<B> {
    pub(crate) inner: B,
    pub(crate) arm: Rc<Arm>,
}

impl<B: Breakable> Edges for FaultyBackend<B> {
    type Tx = B::Tx;
    type Rx = B::Rx;
    type Sending = B::Sending;
    type Receiving = B::Receiving;
    type Out = FaultyOut<B>;
    type In = FaultyIn<B::In>;
    type Local = B::Local;
    type Group = B::Group;
}

impl<B: Breakable> Backend for FaultyBackend<B> {
    type Agreed = B::Agreed;
    type AgreedGroup = B::AgreedGroup;

    fn device_settings(&self) -> Vec<(String, String)> {
        self.inner.device_settings()
    }

    fn device(&self) -> Option<(String, Option<String>)> {
        self.inner.device()
    }

    fn free_memory(&self) -> u64 {
        self.inner.free_memory()
    }

    fn memory_probe(&self) -> Option<MemoryProbe> {
        self.inner.memory_probe()
    }

    fn has_failed_for_all() -> bool {
        B::has_failed_for_all()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn load_ahead(&mut self) {
        self.inner.load_ahead();
    }

    fn agree(
        &mut self,
        peer: &mut dyn Peer,
        edges: &[EdgeEnd],
        bell: &Bell,
    ) -> Result<(B::Agreed, Option<OnFrame>), Fault> {
        self.inner.agree(peer, edges, bell)
    }

    fn connect(
        &mut self,
        agreed: B::Agreed,
        how: Connect<'_>,
    ) -> Result<Connected<Self>, TransportError> {
        let connected = self.inner.connect(agreed, how)?;
        let tools = Rc::new(self.inner.tools());
        self.arm.begins(how.generation);
        let mut ends = Vec::new();
        for (edge, end) in connected.ends {
            let end = match end {
                End::In(inner) => End::In(FaultyIn::new(inner, &self.arm)),
                End::Out(inner) => {
                    let other = self.arm.sends_foreign_slots();
                    let other = other.then(|| self.inner.local(OTHER)).transpose()?;
                    let (tools, arm) = (Rc::clone(&tools), Rc::clone(&self.arm));
                    End::Out(FaultyOut {
                        inner,
                        tools,
                        other,
                        arm,
                    })
                }
            };
            ends.push((edge, end));
        }
        let abort = connected.abort;
        Ok(Connected { ends, abort })
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

    fn local(&mut self, shape: EdgeShape) -> Result<B::Local, TransportError> {
        self.inner.local(shape)
    }

    fn is_at_rest() -> bool {
        B::is_at_rest()
    }
}
