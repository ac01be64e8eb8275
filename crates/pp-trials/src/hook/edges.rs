//! Edges that break the rules between ranks.
//!
//! What is sent wrongly goes through the inner edge as any message does, which has to refuse it.
//! What is received wrongly was sent right: the frame is altered where it is polled.

use std::collections::VecDeque;
use std::rc::Rc;

use pp_contract::{Bare, Composer, Matched, Prepared, Stamp};
use pp_transport::edge::{EdgeLocal as _, EdgeRx, EdgeTx, Sent};
use pp_transport::error::TransportError;
use pp_transport::in_flight::{InFlight, Rejected};

use super::breakable::Breakable;
use super::frame;
use super::{Arm, Break};

/// The sending end of an edge with a hook.
pub(crate) struct FaultyOut<B: Breakable> {
    pub(super) inner: B::Out,
    pub(super) tools: Rc<B::Tools>,
    /// Another edge, where one is asked for.
    pub(super) other: Option<B::Local>,
    pub(super) arm: Rc<Arm>,
}

impl<B: Breakable> FaultyOut<B> {
    /// What must not be sent, before the message that is due: what the inner edge says of it.
    fn send_wrongly(
        &mut self,
        stamp: Stamp,
        payload: &mut Option<B::Tx>,
    ) -> Result<(), Rejected<B::Tx>> {
        let chunk = stamp.chunk_index.get();
        let refuse = |error| Rejected {
            buffer: None,
            error,
        };
        if self.arm.strikes(Break::SideTransfer, chunk) {
            let mut composer = Composer::new();
            let noop = composer.prepare_bare(Bare::Noop);
            drop(self.inner.send(noop, stamp, payload.take())?);
            self.arm.misses("it was not refused");
        }
        if let Some(slot) = payload
            && self.arm.strikes(Break::ChangedTensor, chunk)
        {
            B::change_byte(&self.tools, slot).map_err(refuse)?;
        }
        if let Some(other) = &mut self.other
            && self.arm.strikes(Break::ForeignSlot, chunk)
        {
            *payload = other.try_lease().map_err(refuse)?;
        }
        Ok(())
    }
}

impl<B: Breakable> EdgeTx for FaultyOut<B> {
    type Tx = B::Tx;
    type Sending = B::Sending;

    fn advance(&mut self) -> Result<bool, TransportError> {
        self.inner.advance()
    }

    fn try_lease(&mut self) -> Result<Option<B::Tx>, TransportError> {
        let mut lease = self.inner.try_lease()?;
        if let Some(slot) = lease
            .as_mut()
            .filter(|_| self.arm.hook.what == Break::ChangedTensor)
        {
            B::hold_back(slot);
        }
        Ok(lease)
    }

    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        mut payload: Option<B::Tx>,
    ) -> Result<Sent<B::Sending>, Rejected<B::Tx>> {
        self.arm.sends(stamp);
        if payload.is_some() {
            self.send_wrongly(stamp, &mut payload)?;
            if self
                .arm
                .strikes(Break::SecondThread, stamp.chunk_index.get())
            {
                return B::send_elsewhere(&mut self.inner, message, stamp, payload);
            }
        }
        self.inner.send(message, stamp, payload)
    }

    fn peer_is_gone(&mut self) {
        self.inner.peer_is_gone();
    }
}

/// The receiving end of an edge with a hook.
#[derive(Debug)]
pub(crate) struct FaultyIn<I> {
    inner: I,
    arm: Rc<Arm>,
    /// Frames to be heard before any other.
    first: VecDeque<Vec<u8>>,
    /// A frame that lets the next one go first.
    held: Option<Vec<u8>>,
    /// What was heard is broken: no receive may be posted for it.
    is_broken: bool,
    /// Chunks of which something was heard.
    heard: u64,
    keeps_back: bool,
}

impl<I: EdgeRx> FaultyIn<I> {
    pub(super) fn new(inner: I, arm: &Rc<Arm>) -> Self {
        Self {
            inner,
            arm: Rc::clone(arm),
            first: VecDeque::new(),
            held: None,
            is_broken: false,
            heard: 0,
            keeps_back: false,
        }
    }

    /// Says whether results are kept back: when that of the hook's chunk is the next one due, until
    /// something of a later epoch was sent.
    fn is_deaf(&mut self) -> bool {
        let Some(is_cut) = self.arm.is_cut() else {
            return false;
        };
        let chunk = self.arm.hook.chunk;
        if self.heard == chunk {
            self.keeps_back |= self.arm.strikes(Break::LateResult, chunk);
        }
        self.keeps_back && !is_cut
    }

    /// What the peer is made to have sent in place of this frame; false where that is nothing.
    fn alter(&mut self, inbox: &mut Vec<u8>) -> bool {
        let what = self.arm.hook.what;
        let chunk = frame::chunk_of(inbox);
        if !what.is_heard() || !chunk.is_some_and(|chunk| self.arm.is_due(what, chunk)) {
            return true;
        }
        match what {
            Break::Duplicated => self.first.push_back(inbox.clone()),
            Break::Skipped => {}
            Break::Swapped => self.held = Some(std::mem::take(inbox)),
            Break::FallingAttempt => {
                let noop = frame::noop_of_next_attempt(inbox);
                self.first.push_back(std::mem::replace(inbox, noop));
            }
            other => match frame::altered(other, inbox) {
                Some(frame) => *inbox = frame,
                // There is nothing to alter in such a message.
                None => return true,
            },
        }
        self.arm.strike();
        self.is_broken = what != Break::Duplicated;
        !matches!(what, Break::Skipped | Break::Swapped)
    }
}

impl<I: EdgeRx> EdgeRx for FaultyIn<I> {
    type Rx = I::Rx;
    type Receiving = I::Receiving;

    fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError> {
        if self.is_deaf() {
            return Ok(false);
        }
        if let Some(frame) = self.first.pop_front() {
            *inbox = frame;
            return Ok(true);
        }
        while self.inner.poll_frame(inbox)? {
            self.first.extend(self.held.take());
            self.heard += u64::from(frame::chunk_of(inbox).is_some());
            if self.alter(inbox) {
                return Ok(true);
            }
        }
        self.arm.leaves_if_idle();
        Ok(false)
    }

    fn receive(&mut self, header: &Matched<'_>) -> Result<InFlight<I::Receiving>, TransportError> {
        let chunk = header.header().chunk_index().get();
        if self.is_broken && chunk >= self.arm.hook.chunk {
            let what = format!("a receive was posted for chunk {chunk}");
            self.arm.misses(&what);
        }
        self.inner.receive(header)
    }

    fn peer_is_gone(&mut self) {
        self.inner.peer_is_gone();
    }
}
