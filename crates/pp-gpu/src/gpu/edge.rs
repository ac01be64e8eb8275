//! Edges between this rank's device and the device of a peer, over any mover.
//!
//! Hazard: a failure between a header and its payload leaves the peer waiting for a payload that never comes.
//! Guarantee: everything that can be checked is checked before the header leaves, in the turn that sends the payload. A
//! failure after the header ends the life of all edges with the peer.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use pp_contract::{Matched, Prepared, Sequencer, Stamp};

use super::lease::{DeviceRx, DeviceTx, Receiving, Sending};
use super::slots::{DeviceSlots, Pool, RxPool, Slot, TxPool};
use super::{EdgesLife, abort_of};
use crate::times::{DESTROYED_WITHIN, ENDED_WITHIN, LOOK_EVERY, SETTLED_WITHIN};
use pp_edges::backend::{Connected, End, are_ends_left_to_process};
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

    /// Issues the send of a slot behind the work that wrote it, or orders the send stream behind that work. Everything
    /// that can fail before the header leaves happens here. The caller has checked that the bytes fit, and that the
    /// slot was not sent ahead.
    ///
    /// # Errors
    /// The driver refuses, or the edge is gone.
    fn prepare(&self, lease: &mut DeviceTx, bytes: usize) -> Result<(), TransportError>;

    /// Sends a slot whose header has left, unless the slot is already on its way.
    ///
    /// # Errors
    /// The send may have been issued: the slot may still be read.
    ///
    /// # Safety
    /// The caller holds a turn. The slot was prepared, and nothing writes or frees it before its payload has moved.
    unsafe fn send(&self, slot: &Slot, bytes: usize) -> Result<(), TransportError>;

    /// Receives the payload that a header has announced into a slot.
    ///
    /// # Errors
    /// The receive may have been issued: the slot may still be written.
    ///
    /// # Safety
    /// The caller holds a turn. The bytes fit the slot, and nothing uses or frees the slot before they have arrived.
    unsafe fn receive(&self, slot: &Slot, bytes: usize) -> Result<(), TransportError>;
}

/// A call in progress. If another thread checks for calls, the flag is set until the turn is dropped.
#[derive(Debug)]
pub(crate) struct Turn<'a>(pub(crate) Option<&'a AtomicBool>);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(inside) = self.0 {
            inside.store(false, Ordering::Release);
        }
    }
}

/// The state that all edges with one peer share.
///
/// # If dropped
/// Waits up to 50 ms until every sent payload was acknowledged and every announced payload has arrived. Gives up what
/// is still in flight after that. Then ends the life of the edges.
#[derive(Debug)]
struct Shared {
    /// `None` if all edges carry headers alone.
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

    /// Returns the slots of all edges whose readers are done.
    #[inline]
    fn sweep(&self) {
        self.incoming.iter().for_each(|pool| pool.sweep());
    }

    /// Tells whether nothing is in flight on any edge with the peer, in either direction.
    fn is_clean(&self) -> bool {
        let is_back = |pool: &Arc<TxPool>| pool.lane.are_all_back() && pool.is_still();
        let is_taken = |pool: &Arc<RxPool>| {
            let slots = &pool.pool;
            // The stream may still have credits queued.
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
        if let Err(error) = Arc::clone(life).end(is_clean, started + within)
            && !are_ends_left_to_process()
        {
            tracing::warn!(%error, "edges did not end as they should");
        }
    }
}

/// The slots and the mover of an edge that carries payloads.
#[derive(Debug)]
struct Payloads<P> {
    pool: Arc<P>,
    mover: Box<dyn Mover>,
}

/// The sending end of an edge from this rank's device. One thread at a time uses it.
///
/// # If dropped
/// Sends nothing more; leases stay valid. Waits up to 50 ms for payloads whose headers wait for them. Dropping the last
/// end of all edges with the peer waits up to 50 ms for payloads in flight. NCCL's communicators then end on a thread of
/// their own. They end in order if every sent payload was acknowledged and every announced payload has arrived, else by
/// an abort. The drop waits for that end for at most 2 to 3 seconds, or not at all where the process ends them.
#[derive(Debug)]
pub struct DeviceOut {
    // Declared first, so that the life ends before the mover is dropped.
    shared: Arc<Shared>,
    outlet: Outlet,
    payloads: Option<Payloads<TxPool>>,
    sequencer: Sequencer,
}

/// A lane, with the frames that were committed and leave when their payloads have moved.
#[derive(Debug)]
struct Outlet {
    lane: LaneTx,
    /// The slot of each, and the frame. They leave in this order.
    held: VecDeque<(Option<u32>, Vec<u8>)>,
    /// The room that they will take up in the lane.
    held_bytes: usize,
    /// Buffers of frames that have left.
    spare: Vec<Vec<u8>>,
}

impl Outlet {
    const fn new(lane: LaneTx) -> Self {
        Self {
            lane,
            held: VecDeque::new(),
            held_bytes: 0,
            spare: Vec::new(),
        }
    }

    /// Checks that a frame of any size can be pushed now.
    fn check_room(&mut self) -> Result<(), TransportError> {
        self.lane.check_room(self.held_bytes)
    }

    /// Pushes a frame, or holds it back until the payloads before it, and its own, have moved.
    fn push(
        &mut self,
        pool: Option<&TxPool>,
        slot: Option<u32>,
        frame: &[u8],
    ) -> Result<(), TransportError> {
        if self.held.is_empty() && !is_moving(pool, slot)? {
            return self.lane.push(slot, frame);
        }
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        buffer.extend_from_slice(frame);
        self.held_bytes += LaneTx::room_of(frame);
        self.held.push_back((slot, buffer));
        Ok(())
    }

    /// Pushes the frames whose payloads have moved. Returns whether none is left.
    fn advance(&mut self, pool: Option<&TxPool>) -> Result<bool, TransportError> {
        while let Some((slot, frame)) = self.held.front() {
            if is_moving(pool, *slot)? {
                return Ok(false);
            }
            self.lane.push(*slot, frame)?;
            self.held_bytes -= LaneTx::room_of(frame);
            self.spare
                .extend(self.held.pop_front().map(|(_, buffer)| buffer));
        }
        Ok(true)
    }
}

/// Tells whether the header of this slot must wait.
fn is_moving(pool: Option<&TxPool>, slot: Option<u32>) -> Result<bool, TransportError> {
    match (pool, slot) {
        (Some(pool), Some(slot)) => Ok(pool.slot(slot).holds_header()?),
        _ => Ok(false),
    }
}

impl Drop for DeviceOut {
    fn drop(&mut self) {
        let started = Instant::now();
        while let Ok(false) = self.advance() {
            if started.elapsed() > SETTLED_WITHIN {
                return self.shared.kill("it was dropped with payloads in flight");
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// The receiving end of an edge to this rank's device. One thread at a time uses it.
///
/// # If dropped
/// Behaves as [`DeviceOut`].
#[derive(Debug)]
pub struct DeviceIn {
    // Declared first, as in `DeviceOut`.
    shared: Arc<Shared>,
    lane: LaneRx,
    payloads: Option<Payloads<RxPool>>,
}

/// One end of an edge before it is joined with the others: its number, its lane and, if it has payloads, its slots and
/// mover.
pub(crate) type Lone = (u32, LaneEnd, Option<(Arc<DeviceSlots>, Box<dyn Mover>)>);

enum EdgeSide {
    Out(LaneTx, Option<Payloads<TxPool>>),
    In(LaneRx, Option<Payloads<RxPool>>),
}

/// Joins all ends of edges with a peer under one shared state, and adds the handle that aborts them. Without a life no
/// edge has payloads.
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
    let abort = life.clone().map(abort_of);
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
                outlet: Outlet::new(lane),
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

/// Checks that the message, its payload, the lane and the device are ready, and prepares the send. Returns the turn
/// that sends the payload.
fn ready<'a>(
    shared: &Shared,
    outlet: &mut Outlet,
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
    outlet.check_room()?;
    let (Some(lease), Some(Payloads { pool, mover })) = (lease, payloads) else {
        return Ok(turn);
    };
    pool.slot(lease.slot).check()?;
    match lease.ahead {
        // The payload fits a slot, so its size fits the address space.
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

    /// Aborts the edges: NCCL can end communicators in order only together with the peer, and would wait for it.
    fn peer_is_gone(&mut self) {
        self.shared.kill("its peer is gone");
    }

    fn advance(&mut self) -> Result<bool, TransportError> {
        if self.outlet.held.is_empty() {
            return Ok(true);
        }
        if let Err(error) = self.shared.check() {
            // They announce payloads that no one may use any more.
            self.outlet.held.clear();
            return Err(error);
        }
        let pool = self.payloads.as_ref().map(|payloads| &*payloads.pool);
        self.outlet
            .advance(pool)
            .inspect_err(|error| self.shared.kill(&error.to_string()))
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
        if let Err(error) = self.advance() {
            let buffer = payload;
            return Err(Rejected { buffer, error });
        }
        let (shared, payloads) = (&self.shared, self.payloads.as_ref());
        let bytes = message.payload_bytes();
        shared.sweep();
        let turn = match ready(shared, &mut self.outlet, payloads, bytes, payload.as_mut()) {
            Ok(turn) => turn,
            Err(error) => {
                let buffer = payload;
                return Err(Rejected { buffer, error });
            }
        };
        // Nothing may fail from here on, since the header is a commitment. A failure after it still ends the
        // generation, because the peer waits for a payload that cannot come.
        let is_ahead = payload.as_ref().is_some_and(|lease| lease.ahead.is_some());
        let sending = payload.map(DeviceTx::into_sending);
        let slot = sending.as_ref().map(|sending| sending.slot);
        let committed = message.commit(&mut self.sequencer, stamp);
        let pool = payloads.map(|payloads| &*payloads.pool);
        let mut left = self.outlet.push(pool, slot, committed.frame());
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
                // The next generation may send the slot. It sends a copy if this generation may still read the slot.
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

    /// Aborts the edges, as [`DeviceOut`] does.
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
            // There is no slot, so the announcement is the peer's fault.
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
