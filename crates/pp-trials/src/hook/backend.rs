//! A backend whose links have a hook.

use std::rc::Rc;

use pp_contract::Fault;
use pp_transport::backend::{Abort, Backend, Connect, Edges, OnFrame, Peer};
use pp_transport::bell::Bell;
use pp_transport::error::TransportError;

use super::link::Faulty;
use super::{Arm, Breakable};

/// A backend with a hook.
pub(crate) struct FaultyBackend<B> {
    pub(crate) inner: B,
    pub(crate) arm: Rc<Arm>,
}

impl<B: Backend<Link: Breakable>> Backend for FaultyBackend<B> {
    type Link = Faulty<B::Link>;
    type Agreed = B::Agreed;

    fn settings(&self) -> Vec<(String, String)> {
        self.inner.settings()
    }

    fn device(&self) -> Option<(String, Option<String>)> {
        self.inner.device()
    }

    fn load_ahead(&mut self) {
        self.inner.load_ahead();
    }

    fn agree(
        &mut self,
        peer: &mut dyn Peer,
        edges: Edges,
        bell: &Bell,
    ) -> Result<(B::Agreed, Option<OnFrame>), Fault> {
        self.inner.agree(peer, edges, bell)
    }

    fn connect(
        &mut self,
        agreed: B::Agreed,
        how: Connect<'_>,
    ) -> Result<Self::Link, TransportError> {
        let link = self.inner.connect(agreed, how)?;
        self.arm.begins(how.generation);
        Ok(Faulty::new(link, &self.arm))
    }

    fn abort(&self, link: &Self::Link) -> Option<Abort> {
        self.inner.abort(&link.inner)
    }

    fn is_at_rest() -> bool {
        B::is_at_rest()
    }
}
