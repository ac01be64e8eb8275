//! Edges between this rank's device and that of a peer, whichever mover their payloads take.
//!
//! Hazard: what fails between a header and its payload leaves the peer waiting for what cannot come. Guarantee: all that can
//! be checked is checked before the header leaves, in the turn in which the payload is sent; what fails behind that ends the
//! life of all edges with the peer.

use std::cell::Cell;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use pp_contract::{Matched, Prepared, Sequencer, Stamp};

use super::EdgesLife;
use super::lease::{DeviceRx, DeviceTx, Receiving, Sending};
use super::slots::{DeviceSlots, Pool, RxPool, Slot, TxPool};
use crate::times::{DESTROYED_WITHIN, ENDED_WITHIN, LOOK_EVERY, SETTLED_WITHIN};
use pp_edges::backend::{Abort, Connected, End};
use pp_edges::edge::{EdgeRx, EdgeTx, Edges, Sent, check_payload};
use pp_edges::error::TransportError;
use pp_edges::in_flight::{InFlight, Rejected};
use pp_edges::lane::{LaneEnd, LaneRx, LaneTx};

/// Moves the payloads of one edge, in its direction.
pub(crate) trait Mover: Debug + Send {
    /// Begins the turn in which a message is sent or a payload is received.
    ///
    /// # Errors
    /// This thread may not issue.
    fn enter(&self) -> Result<Turn<'_>, TransportError>;

    /// Orders the send of a slot behind the work that wrote it, or issues it: all that can fail before the header leaves.
    /// There is room for the bytes, and the slot was not sent ahead.
    ///
    /// # Errors
    /// The driver refuses; the edge is gone.
    fn prepare(&self, lease: &mut DeviceTx, bytes: usize) -> Result<(), TransportError>;

    /// Sends a slot whose header has left, unless it is on its way.
    ///
    /// # Errors
    /// The slot may be read or not.
    ///
    /// # Safety
    /// In a turn. The slot was prepared, and is neither written nor freed before it has moved.
    unsafe fn send(&self, slot: &Slot, bytes: usize) -> Result<(), TransportError>;

    /// Receives into a slot what its header has announced.
    ///
    /// # Errors
    /// The slot may be written or not.
    ///
    /// # Safety
    /// In a turn. The slot has room for the bytes, and is neither used nor freed before they are there.
    unsafe fn receive(&self, slot: &Slot, bytes: usize) -> Result<(), TransportError>;
}

/// A call under way, which is marked as long as it lasts if others look at that.
#[derive(Debug)]
pub(crate) struct Turn<'a>(pub(crate) Option<&'a AtomicBool>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(inside) = self.0 {
            inside.store(false, Ordering::Release);
        }
    }
}

/// What all edges with one peer have in common.
///
/// # If dropped
/// Waits up to 50 ms until what was sent has come back and what was announced has arrived. What is still in flight then is
/// given up. Then ends their life.
#[derive(Debug)]
struct Shared {
    /// None where all edges carry headers alone.
    life: Option<Arc<dyn EdgesLife>>,
    out: Vec<Arc<TxPool>>,
    incoming: Vec<Arc<RxPool>>,
}

impl Shared {
    #[inline]
    fn check(&self) -> Result<(), TransportError> {
        self.life.as_ref().map_or(Ok(()), |life| life.check())
    }

    fn kill(&self, why: &str) {
        if let Some(life) = &self.life {
            life.kill(why);
        }
    }

    /// Gives back what its readers are done with, on any edge.
    #[inline]
    fn sweep(&self) {
        self.incoming.iter().for_each(|pool| pool.sweep());
    }

    /// Whether nothing is in flight, on this side or on its way from or to the peer.
    fn is_clean(&self) -> bool {
        let is_back = |pool: &Arc<TxPool>| pool.lane.are_all_back() && pool.is_still();
        let is_taken = |pool: &Arc<RxPool>| {
            let slots = &pool.pool;
            // Credits may be queued on the stream.
            let is_told = || matches!(slots.stream.is_idle(), Ok(true));
            !slots.lane.has_untaken() && slots.is_still() && is_told()
        };
        self.out.iter().all(is_back) && self.incoming.iter().all(is_taken)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let Some(life) = &self.life else {
            return;
        };
        let started = Instant::now();
        let is_clean = loop {
            self.sweep();
            let (is_clean, is_dead) = (self.is_clean(), life.is_dead());
            if is_clean || is_dead || started.elapsed() > SETTLED_WITHIN {
                break is_clean && !is_dead;
            }
            std::thread::sleep(LOOK_EVERY);
        };
        self.incoming.iter().for_each(|pool| pool.close());
        let within = if is_clean {
            DESTROYED_WITHIN
        } else {
            life.kill("it was dropped with payloads in flight");
            ENDED_WITHIN
        };
        if let Err(error) = Arc::clone(life).end(is_clean, started + within) {
            tracing::warn!(%error, "edges did not end as they should");
        }
    }
}

/// What an edge has that carries payloads.
#[derive(Debug)]
struct Payloads<P> {
    pool: Arc<P>,
    mover: Box<dyn Mover>,
}

/// The sending end of an edge from this rank's device, in the hands of one thread.
///
/// # If dropped
/// Nothing more is sent; leases stay valid. The drop of the last end of all edges with the peer waits up to 50 ms for what is
/// in flight. NCCL's communicators end then, on a thread of their own: in order when everything that was sent has come back
/// and everything announced has arrived, else by an abort. The drop waits for that, 2 or 3 seconds at most.
#[derive(Debug)]
pub struct DeviceOut {
    // First: the life ends before what its movers hold is left.
    shared: Arc<Shared>,
    lane: LaneTx,
    payloads: Option<Payloads<TxPool>>,
    sequencer: Sequencer,
}

/// The receiving end of an edge to this rank's device, in the hands of one thread.
///
/// # If dropped
/// As [`DeviceOut`].
#[derive(Debug)]
pub struct DeviceIn {
    // First, as in `DeviceOut`.
    shared: Arc<Shared>,
    lane: LaneRx,
    payloads: Option<Payloads<RxPool>>,
}

/// One end of an edge before it knows the others: its number, its lane and, where it has payloads, its slots and what moves
/// them.
pub(crate) type Lone = (u32, LaneEnd, Option<(Arc<DeviceSlots>, Box<dyn Mover>)>);

enum EdgeSide {
    Out(LaneTx, Option<Payloads<TxPool>>),
    In(LaneRx, Option<Payloads<RxPool>>),
}

/// Gives all ends of edges with a peer what they have in common; and what gives them up. Without a life none has payloads.
pub(crate) fn join<E: Edges<Out = DeviceOut, In = DeviceIn> + ?Sized>(
    ends: impl IntoIterator<Item = Lone>,
    life: Option<Arc<dyn EdgesLife>>,
) -> Connected<E> {
    let (mut out, mut incoming) = (Vec::new(), Vec::new());
    let side = |(number, lane, payloads): Lone| match lane {
        LaneEnd::Out(end) => {
            let payloads = payloads.map(|(slots, mover)| {
                let lane = Arc::clone(&end.slots);
                let pool = Arc::new(Pool { lane, slots });
                out.push(Arc::clone(&pool));
                Payloads { pool, mover }
            });
            (number, EdgeSide::Out(end, payloads))
        }
        LaneEnd::In(end) => {
            let payloads = payloads.map(|(slots, mover)| {
                let lane = Arc::clone(&end.slots);
                let pool = Arc::new(RxPool::new(Pool { lane, slots }));
                incoming.push(Arc::clone(&pool));
                Payloads { pool, mover }
            });
            (number, EdgeSide::In(end, payloads))
        }
    };
    let sides: Vec<_> = ends.into_iter().map(side).collect();
    let abort = life.clone().map(|life| -> Abort {
        Box::new(move |why, deadline| {
            life.kill(why);
            Arc::clone(&life).end(false, deadline)
        })
    });
    let shared = Arc::new(Shared {
        life,
        out,
        incoming,
    });
    let end = |(number, side)| {
        let shared = Arc::clone(&shared);
        let end = match side {
            EdgeSide::Out(lane, payloads) => End::Out(DeviceOut {
                shared,
                lane,
                payloads,
                sequencer: Sequencer::new(),
            }),
            EdgeSide::In(lane, payloads) => End::In(DeviceIn {
                shared,
                lane,
                payloads,
            }),
        };
        (number, end)
    };
    let ends = sides.into_iter().map(end).collect();
    Connected { ends, abort }
}

/// Checks that the message, its payload, the lane and the device are all fit to go, and prepares the send. Gives the turn
/// in which it is sent.
fn ready<'a>(
    shared: &Shared,
    lane: &mut LaneTx,
    payloads: Option<&'a Payloads<TxPool>>,
    bytes: u64,
    lease: Option<&mut DeviceTx>,
) -> Result<Option<Turn<'a>>, TransportError> {
    shared.check()?;
    let turn = payloads
        .map(|payloads| payloads.mover.enter())
        .transpose()?;
    let is_own = |lease: &DeviceTx| {
        payloads.is_some_and(|payloads| Arc::ptr_eq(&lease.pool, &payloads.pool))
    };
    let slot = lease.as_deref();
    check_payload(bytes, slot.map(|lease| (is_own(lease), lease.capacity())))?;
    lane.check_room()?;
    let (Some(lease), Some(Payloads { pool, mover })) = (lease, payloads) else {
        return Ok(turn);
    };
    pool.slot(lease.slot).check()?;
    match lease.ahead {
        // It fits a slot, so it fits the address space.
        None => mover.prepare(lease, bytes as usize)?,
        Some(ahead) if ahead as u64 == bytes => {}
        Some(ahead) => {
            return Err(TransportError::PayloadMismatch {
                payload_bytes: bytes,
                with: format!("a slot of which {ahead} bytes were sent ahead"),
            });
        }
    }
    Ok(turn)
}

impl EdgeTx for DeviceOut {
    type Tx = DeviceTx;
    type Sending = Sending;

    /// NCCL ends communicators in order together with the peer, and waits for it.
    fn peer_is_gone(&mut self) {
        self.shared.kill("its peer is gone");
    }

    fn try_lease(&mut self) -> Result<Option<DeviceTx>, TransportError> {
        self.shared.check()?;
        self.shared.sweep();
        let Some(Payloads { pool, .. }) = &self.payloads else {
            return Ok(None);
        };
        let failed = Cell::new(None);
        let slot = pool.lane.lease_if(|slot| {
            let slot = pool.slot(slot);
            match slot.has_moved() {
                Ok(done) => done && !slot.is_lost(),
                Err(error) => {
                    failed.set(Some(error));
                    false
                }
            }
        });
        match failed.into_inner() {
            Some(error) => Err(error.into()),
            None => Ok(slot.map(|slot| DeviceTx::new(pool, slot))),
        }
    }

    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        mut payload: Option<DeviceTx>,
    ) -> Result<Sent<Sending>, Rejected<DeviceTx>> {
        let (shared, lane, payloads) = (&self.shared, &mut self.lane, self.payloads.as_ref());
        let bytes = message.payload_bytes();
        shared.sweep();
        let turn = match ready(shared, lane, payloads, bytes, payload.as_mut()) {
            Ok(turn) => turn,
            Err(error) => {
                let buffer = payload;
                return Err(Rejected { buffer, error });
            }
        };
        // From here on nothing may fail: the header is a commitment. What fails all the same ends the generation, since the
        // peer waits for what cannot come.
        let is_ahead = payload.as_ref().is_some_and(|lease| lease.ahead.is_some());
        let sending = payload.map(DeviceTx::into_sending);
        let slot = sending.as_ref().map(|sending| sending.slot);
        let committed = message.commit(&mut self.sequencer, stamp);
        let mut left = lane.push(slot, committed.frame());
        if let (Ok(()), Some(slot), Some(Payloads { pool, mover })) = (&left, slot, payloads) {
            // SAFETY: in the turn. The slot has room for the bytes (checked) and was prepared, is not written (its lease was
            // moved in), and is neither leased again nor freed before.
            left = unsafe { mover.send(pool.slot(slot), bytes as usize) };
        }
        drop(turn);
        match left {
            Ok(()) => Ok(Sent {
                header: *committed.header(),
                payload: sending.map(InFlight::new),
            }),
            Err(error) => {
                shared.kill(&error.to_string());
                // The next generation may send it, from a copy where this one may still read it.
                let buffer = sending.map(|sending| {
                    if is_ahead {
                        sending.give_up();
                    }
                    sending.recall()
                });
                Err(Rejected { buffer, error })
            }
        }
    }
}

impl EdgeRx for DeviceIn {
    type Rx = DeviceRx;
    type Receiving = Receiving;

    /// As of the sending end.
    fn peer_is_gone(&mut self) {
        self.shared.kill("its peer is gone");
    }

    fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError> {
        self.shared.check()?;
        self.shared.sweep();
        self.lane.poll(inbox)
    }

    fn receive(&mut self, header: &Matched<'_>) -> Result<InFlight<Receiving>, TransportError> {
        self.shared.check()?;
        self.shared.sweep();
        let Some(Payloads { pool, mover }) = &self.payloads else {
            // There is no slot, so this is the peer's fault.
            let (slot, len) = self.lane.take_announced(header, 0)?;
            unreachable!("slot {slot} with {len} bytes was taken, and there is none");
        };
        let _turn = mover.enter()?;
        let pool = Arc::clone(pool);
        let (slot, len) = self.lane.take_announced(header, pool.pool.capacity)?;
        let receiving = Receiving { pool, slot, len };
        // SAFETY: in the turn. The slot has room for the bytes (checked); its last reader was done, as the device said, before
        // it went back to the peer; it is neither read nor freed before.
        match unsafe { mover.receive(receiving.pool.pool.slot(slot), len) } {
            Ok(()) => Ok(InFlight::new(receiving)),
            Err(error) => {
                self.shared.kill(&error.to_string());
                drop(InFlight::new(receiving).abort());
                Err(error)
            }
        }
    }
}
