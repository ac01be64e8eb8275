//! Links and receives that fail where a test wants it.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pp_contract::{Matched, Prepared, Stamp};
use pp_transport::bell::Bell;
use pp_transport::error::TransportError;
use pp_transport::host::{HostLink, RxLease, TxLease};
use pp_transport::in_flight::{Completion, InFlight, Rejected, Submission};
use pp_transport::link::{Capabilities, Link, Sent};

/// A receive that is done when it is looked at for the third time, if its link still lives then.
#[derive(Debug)]
pub(crate) struct Late {
    lease: RxLease,
    looks: Cell<u32>,
    /// Rung when it is worth looking again.
    bell: Bell,
    is_dead: Arc<AtomicBool>,
}

impl Submission for Late {
    type Buffer = RxLease;

    fn is_done(&self) -> Result<bool, TransportError> {
        if self.is_dead.load(Ordering::Relaxed) {
            return Err(broken());
        }
        self.looks.set(self.looks.get() + 1);
        self.bell.ring();
        Ok(self.looks.get() >= 3)
    }
    fn into_buffer(self) -> RxLease {
        self.lease
    }
    fn orphan(self) {}
    fn quarantine(self) {
        std::mem::forget(self.lease);
    }
}

/// A link that fails at one of its operations, after it was done or instead. What it shares with
/// the peer stays as it is, as when a process is killed.
pub(crate) struct Fails {
    link: ManuallyDrop<HostLink>,
    is_dead: Arc<AtomicBool>,
    /// Operations that are still done.
    left: usize,
    /// Operations that were done.
    pub(crate) done: Arc<AtomicUsize>,
    /// What happens when it fails.
    at_the_end: Box<dyn Fn() -> TransportError + Send>,
}

impl Drop for Fails {
    fn drop(&mut self) {
        self.is_dead.store(true, Ordering::Relaxed);
    }
}

impl Fails {
    pub(crate) fn new(
        link: HostLink,
        left: usize,
        at_the_end: impl Fn() -> TransportError + Send + 'static,
    ) -> Self {
        Self {
            link: ManuallyDrop::new(link),
            is_dead: Arc::default(),
            left,
            done: Arc::default(),
            at_the_end: Box::new(at_the_end),
        }
    }

    fn step(&mut self) -> Result<(), TransportError> {
        if self.left == 0 {
            return Err((self.at_the_end)());
        }
        self.left -= 1;
        self.done.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl Link for Fails {
    type Tx = TxLease;
    type Rx = RxLease;
    type Sending = <HostLink as Link>::Sending;
    type Receiving = Late;

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            payload_moves: true,
            ..self.link.capabilities()
        }
    }
    fn bell(&self) -> &Bell {
        self.link.bell()
    }
    fn peer_is_gone(&mut self) {
        self.link.peer_is_gone();
    }
    fn try_lease(&mut self) -> Result<Option<TxLease>, TransportError> {
        let lease = self.link.try_lease()?;
        // Looking in vain is no operation: how often that happens is chance.
        if lease.is_some() {
            self.step()?;
        }
        Ok(lease)
    }
    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<TxLease>,
    ) -> Result<Sent<Self::Sending>, Rejected<TxLease>> {
        if let Err(error) = self.step() {
            let buffer = payload;
            return Err(Rejected { buffer, error });
        }
        self.link.send(message, stamp, payload)
    }
    fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError> {
        let polled = self.link.poll_frame(inbox)?;
        if polled {
            self.step()?;
        }
        Ok(polled)
    }
    fn receive(
        &mut self,
        header: &Matched<'_>,
    ) -> Result<InFlight<Self::Receiving>, TransportError> {
        let receive = self.link.receive(header)?;
        self.step()?;
        let Ok(Completion::Done(lease)) = receive.complete() else {
            unreachable!("on this backend it is there with its header");
        };
        Ok(InFlight::new(Late {
            lease,
            looks: Cell::new(0),
            bell: self.bell().clone(),
            is_dead: Arc::clone(&self.is_dead),
        }))
    }
}

pub(crate) fn broken() -> TransportError {
    TransportError::Aborted {
        what: "the link".into(),
        why: "this test wants it".into(),
    }
}
