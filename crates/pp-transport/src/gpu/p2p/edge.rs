//! Edges between this rank's device and that of a peer, whose payloads the copy engine moves.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use pp_contract::{Matched, Prepared, Sequencer, Stamp};

use super::numbers::FarSlot;
use crate::backend::{Abort, End};
use crate::edge::{EdgeRx, EdgeTx, Edges, Sent, check_payload};
use crate::error::TransportError;
use crate::gpu::{
    DeviceRx, DeviceSlots, DeviceTx, EdgesLife, Far as _, Pool, Receiving, Remains, RxPool,
    Sending, Slot, TxPool,
};
use crate::in_flight::{InFlight, Rejected};
use crate::lane::{LaneEnd, LaneRx, LaneTx};
use crate::times::{LOOK_EVERY, SETTLED_WITHIN};
use pp_device::{SharedMemory, Stream};

/// The life of all edges with one peer.
#[derive(Debug)]
pub(super) struct Life {
    /// What they are, for errors: `the edges with rank 1`.
    pub(super) what: String,
    dead: AtomicBool,
    why: OnceLock<String>,
}

impl Life {
    pub(super) fn new(what: String) -> Self {
        Self {
            what,
            dead: AtomicBool::new(false),
            why: OnceLock::new(),
        }
    }

    /// Nothing is issued any more, and nothing in flight is believed. The first reason stays.
    fn kill(&self, why: &str) {
        let _ = self.why.set(why.to_owned());
        self.dead.store(true, Ordering::Release);
    }
}

impl EdgesLife for Life {
    #[inline]
    fn check(&self) -> Result<(), TransportError> {
        if !self.is_dead() {
            return Ok(());
        }
        Err(TransportError::Aborted {
            what: self.what.clone(),
            why: self.why.get().cloned().unwrap_or_default(),
        })
    }

    #[inline]
    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// A device that fails says so to whoever issues next; a peer that is gone is noticed elsewhere.
    fn poll(&self) -> Result<(), TransportError> {
        Ok(())
    }

    fn bury(&self, remains: Remains) {
        remains.free();
    }
}

/// The slots of an edge, as one rank has them, and what the other one does with each.
#[derive(Debug)]
pub(super) struct Path {
    pub(super) slots: Arc<DeviceSlots>,
    pub(super) far: Vec<Arc<FarSlot>>,
    /// Where the slots of the receiver lie. Of a dead peer, no longer than the edge.
    pub(super) _there: Arc<SharedMemory>,
}

impl Path {
    /// Notes that a payload comes in a slot.
    pub(super) fn expect(&self, slot: u32) {
        self.far[slot as usize].next();
        self.slots.slot(slot).begin_move();
    }
}

/// What all edges with one peer have in common.
///
/// # If dropped
/// Waits up to 50 ms until what was sent has come back and what was announced has arrived. What is still in flight then
/// is given up.
#[derive(Debug)]
struct Shared {
    life: Arc<Life>,
    out: Vec<Arc<TxPool>>,
    incoming: Vec<Arc<RxPool>>,
}

impl Shared {
    /// Gives back what was received and dropped before it had arrived, on any edge.
    #[inline]
    fn sweep(&self) {
        self.incoming.iter().for_each(|pool| pool.sweep());
    }

    /// Whether nothing is in flight, on this side or on its way from or to the peer.
    fn is_clean(&self) -> bool {
        let is_back = |pool: &Arc<TxPool>| pool.lane.are_all_back() && pool.is_still();
        let is_told = |stream: &Stream| matches!(stream.is_idle(), Ok(true));
        let is_taken = |pool: &Arc<RxPool>| {
            let slots = &pool.pool;
            !slots.lane.has_untaken() && slots.is_still() && is_told(&slots.stream)
        };
        self.out.iter().all(is_back) && self.incoming.iter().all(is_taken)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let settled = Instant::now() + SETTLED_WITHIN;
        loop {
            self.sweep();
            if self.life.is_dead() || self.is_clean() {
                break;
            }
            if Instant::now() > settled {
                self.life.kill("it was dropped with payloads in flight");
                break;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        self.incoming.iter().for_each(|pool| pool.close());
    }
}

/// The sending end of an edge from this rank's device, in the hands of one thread.
///
/// # If dropped
/// Nothing more is sent; leases stay valid. The drop of the last end of all edges with the peer waits up to 50 ms for what
/// is in flight.
#[derive(Debug)]
pub struct P2pTx {
    shared: Arc<Shared>,
    lane: LaneTx,
    payloads: Option<(Arc<TxPool>, Path)>,
    sequencer: Sequencer,
}

/// The receiving end of an edge to this rank's device, in the hands of one thread.
///
/// # If dropped
/// As [`P2pTx`].
#[derive(Debug)]
pub struct P2pRx {
    shared: Arc<Shared>,
    lane: LaneRx,
    payloads: Option<(Arc<RxPool>, Path)>,
}

/// Gives the edges with a peer, each with its lane and, where it has payloads, its slots, what they have in common; and
/// what gives them up.
pub(super) fn join<E>(edges: Vec<(LaneEnd, Option<Path>)>, life: Arc<Life>) -> (Vec<End<E>>, Abort)
where
    E: Edges<Out: From<P2pTx>, In: From<P2pRx>> + ?Sized,
{
    let (mut out, mut incoming) = (Vec::new(), Vec::new());
    for (lane, path) in &edges {
        let Some(slots) = path.as_ref().map(|path| Arc::clone(&path.slots)) else {
            continue;
        };
        match lane {
            LaneEnd::Out(lane) => {
                let lane = Arc::clone(&lane.slots);
                out.push(Arc::new(Pool { lane, slots }));
            }
            LaneEnd::In(lane) => {
                let lane = Arc::clone(&lane.slots);
                incoming.push(Arc::new(RxPool::new(Pool { lane, slots })));
            }
        }
    }
    let (mut outs, mut ins) = (out.clone().into_iter(), incoming.clone().into_iter());
    let of_abort = Arc::clone(&life);
    let shared = Arc::new(Shared {
        life,
        out,
        incoming,
    });
    let end = |(lane, path): (LaneEnd, Option<Path>)| {
        let shared = Arc::clone(&shared);
        match lane {
            LaneEnd::Out(lane) => End::Out(E::Out::from(P2pTx {
                shared,
                lane,
                payloads: path.and_then(|path| Some((outs.next()?, path))),
                sequencer: Sequencer::new(),
            })),
            LaneEnd::In(lane) => End::In(E::In::from(P2pRx {
                shared,
                lane,
                payloads: path.and_then(|path| Some((ins.next()?, path))),
            })),
        }
    };
    let abort = move |why: &str, _: Instant| {
        of_abort.kill(why);
        Ok(())
    };
    (edges.into_iter().map(end).collect(), Box::new(abort))
}

impl P2pTx {
    /// All that can fail before the copy: that the message, its payload and the lane are fit to go.
    fn ready(&mut self, bytes: u64, lease: Option<&DeviceTx>) -> Result<(), TransportError> {
        self.shared.life.check()?;
        let pool = self.payloads.as_ref().map(|(pool, _)| pool);
        let is_own = |lease: &DeviceTx| pool.is_some_and(|pool| Arc::ptr_eq(&lease.pool, pool));
        check_payload(bytes, lease.map(|lease| (is_own(lease), lease.capacity())))?;
        self.lane.check_room()?;
        let (Some(lease), Some(pool)) = (lease, pool) else {
            return Ok(());
        };
        match lease.ahead {
            Some(ahead) if ahead as u64 != bytes => Err(TransportError::PayloadMismatch {
                payload_bytes: bytes,
                with: format!("a slot of which {ahead} bytes were sent ahead"),
            }),
            _ => pool.slot(lease.slot).check(),
        }
    }
}

impl EdgeTx for P2pTx {
    type Tx = DeviceTx;
    type Sending = Sending;

    fn peer_is_gone(&mut self) {
        self.shared.life.kill("its peer is gone");
    }

    fn try_lease(&mut self) -> Result<Option<DeviceTx>, TransportError> {
        self.shared.life.check()?;
        self.shared.sweep();
        let Some((pool, _)) = &self.payloads else {
            return Ok(None);
        };
        let is_done = |slot: &Slot| !slot.is_lost() && matches!(slot.has_moved(), Ok(true));
        let slot = pool.lane.lease_if(|slot| is_done(pool.slot(slot)));
        Ok(slot.map(|slot| DeviceTx::new(pool, slot)))
    }

    /// The copy is issued before the header is pushed, so that it runs while the receiver takes the header in.
    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        mut payload: Option<DeviceTx>,
    ) -> Result<Sent<Sending>, Rejected<DeviceTx>> {
        let bytes = message.payload_bytes();
        self.shared.sweep();
        let mut ready = self.ready(bytes, payload.as_ref());
        if let Some(lease) = payload.as_mut().filter(|lease| lease.ahead.is_none()) {
            ready = ready.and_then(|()| match lease.put(bytes as usize)? {
                true => Ok(()),
                false => Err(TransportError::Unrecorded),
            });
        }
        if let Err(error) = ready {
            let buffer = payload;
            return Err(Rejected { buffer, error });
        }
        // From here on nothing may fail. What fails all the same ends the generation: a number of the edge is used up.
        let sending = payload.map(DeviceTx::into_sending);
        let slot = sending.as_ref().map(|sending| sending.slot);
        let committed = message.commit(&mut self.sequencer, stamp);
        match self.lane.push(slot, committed.frame()) {
            Ok(()) => Ok(Sent {
                header: *committed.header(),
                payload: sending.map(InFlight::new),
            }),
            Err(error) => {
                self.shared.life.kill(&error.to_string());
                // The next generation may send it, from a copy: this one still reads it.
                let buffer = sending.map(|sending| {
                    sending.give_up();
                    sending.recall()
                });
                Err(Rejected { buffer, error })
            }
        }
    }
}

impl EdgeRx for P2pRx {
    type Rx = DeviceRx;
    type Receiving = Receiving;

    fn peer_is_gone(&mut self) {
        self.shared.life.kill("its peer is gone");
    }

    fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError> {
        self.shared.life.check()?;
        self.shared.sweep();
        self.lane.poll(inbox)
    }

    fn receive(&mut self, header: &Matched<'_>) -> Result<InFlight<Receiving>, TransportError> {
        self.shared.life.check()?;
        let Some((pool, path)) = &self.payloads else {
            // There is no slot, so this is the peer's fault.
            let (slot, len) = self.lane.take_announced(header, 0)?;
            unreachable!("slot {slot} with {len} bytes was taken, and there is none");
        };
        let pool = Arc::clone(pool);
        let (slot, len) = self.lane.take_announced(header, pool.pool.capacity)?;
        path.expect(slot);
        Ok(InFlight::new(Receiving { pool, slot, len }))
    }
}
