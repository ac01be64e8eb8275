//! Edges and receives that fail where a test wants it.

use std::cell::Cell;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pp_contract::{Matched, Prepared, Stamp};
use pp_transport::backend::End;
use pp_transport::bell::Bell;
use pp_transport::edge::{EdgeRx, EdgeTx, Edges, Sent};
use pp_transport::error::TransportError;
use pp_transport::host::{Host, HostGroup, HostLocal, HostRx, HostTx, RxLease, Sending, TxLease};
use pp_transport::in_flight::{Completion, InFlight, Rejected, Submission};

/// A receive that is done when it is looked at for the third time, if its rank still lives then.
#[derive(Debug)]
pub(crate) struct Late {
    lease: RxLease,
    looks: Cell<u32>,
    fuse: Arc<Fuse>,
}

impl Submission for Late {
    type Buffer = RxLease;

    fn is_done(&self) -> Result<bool, TransportError> {
        if self.fuse.is_dead.load(Ordering::Relaxed) {
            return Err(broken());
        }
        self.looks.set(self.looks.get() + 1);
        // It is worth looking again.
        self.fuse.bell.ring();
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

/// What all edges of a rank have in common: they fail at one of their operations, after it was done or instead.
pub(crate) struct Fuse {
    bell: Bell,
    is_dead: AtomicBool,
    /// Operations that are still done.
    left: AtomicUsize,
    /// Operations that were done.
    done: AtomicUsize,
    /// One has failed.
    is_blown: AtomicBool,
    /// The ends of a rank that is gone. What they share with others stays as it is, as when a process is killed.
    left_behind: Mutex<Vec<Box<dyn Send>>>,
    /// What happens when it fails.
    at_the_end: Box<dyn Fn() -> TransportError + Send + Sync>,
}

impl fmt::Debug for Fuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Fuse").finish_non_exhaustive()
    }
}

impl Fuse {
    /// For a rank with this bell.
    pub(crate) fn new(
        bell: Bell,
        left: usize,
        at_the_end: impl Fn() -> TransportError + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            bell,
            is_dead: AtomicBool::new(false),
            left: left.into(),
            done: AtomicUsize::new(0),
            is_blown: AtomicBool::new(false),
            left_behind: Mutex::default(),
            at_the_end: Box::new(at_the_end),
        })
    }

    /// How many operations were done.
    pub(crate) fn done(&self) -> usize {
        self.done.load(Ordering::Relaxed)
    }

    /// Says whether one has failed.
    pub(crate) fn is_blown(&self) -> bool {
        self.is_blown.load(Ordering::Relaxed)
    }

    /// An end of an edge that fails with the others.
    pub(crate) fn end(self: &Arc<Self>, end: End<Host>) -> End<Failing> {
        match end {
            End::Out(end) => End::Out(Fails::new(end, self)),
            End::In(end) => End::In(Fails::new(end, self)),
        }
    }

    fn step(&self) -> Result<(), TransportError> {
        match self.left.load(Ordering::Relaxed) {
            0 => {
                self.is_blown.store(true, Ordering::Relaxed);
                Err((self.at_the_end)())
            }
            left => {
                self.left.store(left - 1, Ordering::Relaxed);
                self.done.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
        }
    }
}

/// Edges over shared memory that fail.
pub(crate) struct Failing;

impl Edges for Failing {
    type Tx = TxLease;
    type Rx = RxLease;
    type Sending = Sending;
    type Receiving = Late;
    type Out = Fails<HostTx>;
    type In = Fails<HostRx>;
    type Local = HostLocal;
    type Group = HostGroup;
}

/// An end.
pub(crate) struct Fails<E: Send + 'static> {
    end: Option<E>,
    fuse: Arc<Fuse>,
}

impl<E: Send> Fails<E> {
    fn new(end: E, fuse: &Arc<Fuse>) -> Self {
        Self {
            end: Some(end),
            fuse: Arc::clone(fuse),
        }
    }

    fn end(&mut self) -> &mut E {
        self.end.as_mut().expect("it is taken out at the end")
    }
}

impl<E: Send + 'static> Drop for Fails<E> {
    fn drop(&mut self) {
        self.fuse.is_dead.store(true, Ordering::Relaxed);
        if let Some(end) = self.end.take() {
            self.fuse.left_behind.lock().unwrap().push(Box::new(end));
        }
    }
}

impl EdgeTx for Fails<HostTx> {
    type Tx = TxLease;
    type Sending = Sending;

    fn peer_is_gone(&mut self) {
        self.end().peer_is_gone();
    }
    fn advance(&mut self) -> Result<bool, TransportError> {
        self.end().advance()
    }
    fn try_lease(&mut self) -> Result<Option<TxLease>, TransportError> {
        let lease = self.end().try_lease()?;
        // Looking in vain is no operation: how often that happens is chance.
        if lease.is_some() {
            self.fuse.step()?;
        }
        Ok(lease)
    }
    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<TxLease>,
    ) -> Result<Sent<Sending>, Rejected<TxLease>> {
        if let Err(error) = self.fuse.step() {
            let buffer = payload;
            return Err(Rejected { buffer, error });
        }
        self.end().send(message, stamp, payload)
    }
}

impl EdgeRx for Fails<HostRx> {
    type Rx = RxLease;
    type Receiving = Late;

    fn peer_is_gone(&mut self) {
        self.end().peer_is_gone();
    }
    fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError> {
        let polled = self.end().poll_frame(inbox)?;
        if polled {
            self.fuse.step()?;
        }
        Ok(polled)
    }
    fn receive(&mut self, header: &Matched<'_>) -> Result<InFlight<Late>, TransportError> {
        let receive = self.end().receive(header)?;
        self.fuse.step()?;
        let Ok(Completion::Done(lease)) = receive.complete() else {
            unreachable!("on this backend it is there with its header");
        };
        Ok(InFlight::new(Late {
            lease,
            looks: Cell::new(0),
            fuse: Arc::clone(&self.fuse),
        }))
    }
}

pub(crate) fn broken() -> TransportError {
    TransportError::Aborted {
        what: "the edge".into(),
        why: "this test wants it".into(),
    }
}

/// What a call says that waits for a peer in vain.
pub(crate) fn late() -> TransportError {
    TransportError::NotInTime {
        what: "the edge".into(),
        step: "poll",
        after: Duration::from_secs(1),
    }
}
