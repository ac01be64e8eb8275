//! Edges between this rank's device and that of a peer.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use pp_contract::{Generation, Matched, Prepared, Rank, Sequencer, Stamp};

use super::connect::{self, Edge, Stop};
use super::id::UniqueId;
use super::issuer::{Issuer, Patience, Tenant};
use super::life::{AbortHandle, How, Life};
use crate::edge::{EdgeRx, EdgeTx, Sent, check_payload};
use crate::error::TransportError;
use crate::gpu::{DeviceRx, DeviceTx, EdgesLife as _, Pool, Receiving, RxPool, Sending, TxPool};
use crate::host::EdgeShape;
use crate::host::slots::SlotWords;
use crate::in_flight::{InFlight, Rejected};
use crate::lane::{LaneEnd, LaneRx, LaneTx};
use crate::times::{DESTROYED_WITHIN, ENDED_WITHIN, LOOK_EVERY, SETTLED_WITHIN};
use pp_device::Stream;

/// What all edges with one peer are made of. Both ranks give the same shapes, ids and settings.
#[derive(Debug)]
pub struct NcclOptions {
    /// Who issues on this rank's device.
    pub issuer: Issuer,
    /// Whether this rank is the lower of the two.
    pub is_lower: bool,
    /// The edges in the order of their numbers.
    pub edges: Vec<NcclEdge>,
    /// When to give up.
    pub deadline: Instant,
    /// Which generation of communicators between the two this is.
    pub generation: Generation,
    /// Whether NCCL's calls return when they are done. Those of a non-blocking communicator return
    /// at once and are asked after, which costs about 50 µs for each operation.
    pub blocking: bool,
}

/// What an edge is made of.
#[derive(Debug)]
pub struct NcclEdge {
    /// Its lane, with as many slots as its shape says.
    pub lane: LaneEnd,
    /// Its shape, and the id of its communicator, made by one rank for both. None where it carries
    /// headers alone.
    pub payloads: Option<(EdgeShape, UniqueId)>,
}

/// One end of an edge with a peer.
#[derive(Debug)]
pub enum NcclEnd {
    /// This rank sends.
    Out(NcclTx),
    /// This rank receives.
    In(NcclRx),
}

impl NcclEnd {
    /// What gives up the communicators of all edges with the peer, from any thread. None where all
    /// of them carry headers alone.
    #[must_use]
    pub fn abort_handle(&self) -> Option<AbortHandle> {
        let life = self.shared().life.as_ref();
        life.map(|life| AbortHandle(Arc::clone(life)))
    }

    fn shared(&self) -> &Arc<Shared> {
        match self {
            Self::Out(end) => &end.shared,
            Self::In(end) => &end.shared,
        }
    }
}

/// What all edges with one peer have in common.
///
/// # If dropped
/// Ends the communicators, as [`NcclTx`] says.
#[derive(Debug)]
struct Shared {
    /// None where all edges carry headers alone.
    life: Option<Arc<Life>>,
    out: Vec<Arc<TxPool>>,
    incoming: Vec<Arc<RxPool>>,
    is_closed: AtomicBool,
}

/// An edge that has payloads.
#[derive(Debug)]
struct Payloads<P> {
    edge: Edge,
    pool: Arc<P>,
    life: Arc<Life>,
    /// Makes it `!Sync`.
    _tenant: Tenant,
}

/// The sending end of an edge from this rank's device, in the hands of one thread.
///
/// # If dropped
/// Nothing more is sent; leases stay valid. With the last end of all edges with the peer, their
/// communicators end on a thread of their own: in order when everything that was sent has come back
/// and everything announced has arrived, else by an abort. The drop waits for that, 2 or 3 seconds at
/// most.
#[derive(Debug)]
pub struct NcclTx {
    // First: the communicators end before their issuer is left.
    shared: Arc<Shared>,
    lane: LaneTx,
    payloads: Option<Payloads<TxPool>>,
    sequencer: Sequencer,
}

/// The receiving end of an edge to this rank's device, in the hands of one thread.
///
/// # If dropped
/// As [`NcclTx`].
#[derive(Debug)]
pub struct NcclRx {
    // First, as in `NcclTx`.
    shared: Arc<Shared>,
    lane: LaneRx,
    payloads: Option<Payloads<RxPool>>,
}

/// Makes all edges with a peer, and moves a byte over each that has payloads; the peer does the same at the same
/// time. Gives their ends in the same order. Goes on for as long as it is wanted, which is asked every few
/// milliseconds: a caller that hears that the peer is gone need not wait for it until the deadline.
///
/// A communicator that blocks cannot be given up while it is created, since NCCL has given no
/// handle to abort: if the peer does not join, the thread that waits for it stays behind, and no
/// other edge of this device can be made.
///
/// # Errors
/// [`TransportError::NotInTime`] when the peer did not do its part by the deadline, or it is not wanted
/// any more: a thread that waits inside NCCL is left behind then. The device has no memory for the
/// slots; NCCL refuses; a lane has other slots than its shape.
pub fn connect(
    options: NcclOptions,
    is_wanted: &dyn Fn() -> bool,
) -> Result<Vec<NcclEnd>, TransportError> {
    let (mut ends, mut ids) = (Vec::new(), Vec::new());
    for NcclEdge { lane, payloads } in &options.edges {
        let (slots, is_sender) = match lane {
            LaneEnd::Out(lane) => (lane.slots.words().depth(), true),
            LaneEnd::In(lane) => (lane.slots.slots.depth(), false),
        };
        let edge = payloads.map_or(0, |(shape, _)| shape.slots());
        if slots != edge {
            return Err(TransportError::OtherDepth { lane: slots, edge });
        }
        if let Some((shape, id)) = payloads {
            shape.capacity()?;
            ends.push((*shape, is_sender));
            ids.push(*id);
        }
    }
    let lanes = options.edges.into_iter();
    let lanes: Vec<_> = lanes
        .map(|edge| (edge.lane, edge.payloads.is_some()))
        .collect();
    if ends.is_empty() {
        return Ok(headers_alone(
            lanes.into_iter().map(|(lane, _)| lane).collect(),
        ));
    }
    check_queues();
    // Until the ends are tenants: the thread that issues stays the same.
    let tenant = Tenant::new(&options.issuer);
    let patience = Patience {
        deadline: options.deadline,
        is_wanted,
    };
    let started = Instant::now();
    let peer = lanes.first().map_or(0, |(lane, _)| lane.peer().get());
    let (is_lower, blocking) = (options.is_lower, options.blocking);
    let what = format!("the connection to rank {peer}");
    let made = connect::by(&options.issuer, what, &patience, move |life, progress| {
        connect::edges(life, progress, is_lower, &ends, &ids, blocking)
    });
    let (life, halves) = made?;
    tracing::debug!(
        peer,
        generation = options.generation.get(),
        blocking,
        edges = halves.len(),
        ms = started.elapsed().as_millis() as u64,
        "NCCL edges connected"
    );
    let mut halves = halves.into_iter();
    let sides = lanes.into_iter().map(|(lane, has_payloads)| {
        let half = has_payloads.then(|| halves.next()).flatten();
        let half = half.map(|half| (half, Arc::clone(&life), Tenant::new(&options.issuer)));
        Side::new(lane, half)
    });
    let ends = join(sides.collect(), Some(&life));
    drop(tenant);
    Ok(ends)
}

/// Ends of edges with a peer that all carry headers alone: there is nothing to connect, and NCCL is
/// not called.
#[must_use]
pub fn headers_alone(lanes: Vec<LaneEnd>) -> Vec<NcclEnd> {
    let sides = lanes.into_iter().map(|lane| Side::new(lane, None));
    join(sides.collect(), None)
}

/// An end before it knows the others.
enum Side {
    Out(LaneTx, Option<Payloads<TxPool>>),
    In(LaneRx, Option<Payloads<RxPool>>),
}

impl Side {
    fn new(lane: LaneEnd, half: Option<(connect::Half, Arc<Life>, Tenant)>) -> Self {
        fn payloads<S, P>(
            half: Option<(connect::Half, Arc<Life>, Tenant)>,
            lane: &Arc<S>,
            pool: impl FnOnce(Pool<S>) -> P,
        ) -> Option<Payloads<P>> {
            let ((edge, slots), life, tenant) = half?;
            let lane = Arc::clone(lane);
            Some(Payloads {
                edge,
                pool: Arc::new(pool(Pool { lane, slots })),
                life,
                _tenant: tenant,
            })
        }
        match lane {
            LaneEnd::Out(lane) => {
                let payloads = payloads(half, &lane.slots, |pool| pool);
                Self::Out(lane, payloads)
            }
            LaneEnd::In(lane) => {
                let payloads = payloads(half, &lane.slots, RxPool::new);
                Self::In(lane, payloads)
            }
        }
    }
}

/// Gives all ends what they have in common.
fn join(sides: Vec<Side>, life: Option<&Arc<Life>>) -> Vec<NcclEnd> {
    let mut shared = Shared {
        life: life.map(Arc::clone),
        out: Vec::new(),
        incoming: Vec::new(),
        is_closed: AtomicBool::new(false),
    };
    for side in &sides {
        match side {
            Side::Out(_, payloads) => {
                let pool = payloads.iter().map(|payloads| Arc::clone(&payloads.pool));
                shared.out.extend(pool);
            }
            Side::In(_, payloads) => {
                let pool = payloads.iter().map(|payloads| Arc::clone(&payloads.pool));
                shared.incoming.extend(pool);
            }
        }
    }
    let shared = Arc::new(shared);
    let end = |side| {
        let shared = Arc::clone(&shared);
        match side {
            Side::Out(lane, payloads) => NcclEnd::Out(NcclTx {
                shared,
                lane,
                payloads,
                sequencer: Sequencer::new(),
            }),
            Side::In(lane, payloads) => NcclEnd::In(NcclRx {
                shared,
                lane,
                payloads,
            }),
        }
    };
    sides.into_iter().map(end).collect()
}

/// Ends the communicators of all edges with a peer as the drop of their last end does, with a bound of the
/// caller's. `ends` are all that there are.
///
/// # Errors
/// They did not end by the deadline, or not as they should.
pub fn close(ends: Vec<NcclEnd>, deadline: Instant) -> Result<(), TransportError> {
    let Some(end) = ends.first() else {
        return Ok(());
    };
    let shared = end.shared();
    shared.is_closed.store(true, Ordering::Release);
    shared.end(deadline, deadline)
}

impl Shared {
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

    fn end(&self, destroyed: Instant, aborted: Instant) -> Result<(), TransportError> {
        let Some(life) = &self.life else {
            return Ok(());
        };
        let settled = Instant::now() + SETTLED_WITHIN;
        let is_clean = loop {
            self.sweep();
            let is_over = life.is_dead() || Instant::now() > settled;
            if self.is_clean() || is_over {
                break self.is_clean() && !life.is_dead();
            }
            std::thread::sleep(LOOK_EVERY);
        };
        self.incoming.iter().for_each(|pool| pool.close());
        if !is_clean {
            life.kill("it was dropped with payloads in flight");
            return life.finish(How::Abort, aborted);
        }
        life.finish(How::Destroy, destroyed)
    }

    /// Whether nothing is in flight, on this side or on its way from or to the peer.
    fn is_clean(&self) -> bool {
        let is_back = |pool: &Arc<TxPool>| pool.lane.are_all_back() && pool.is_still();
        let is_taken = |pool: &Arc<RxPool>| !pool.pool.lane.has_untaken() && pool.pool.is_still();
        self.out.iter().all(is_back) && self.incoming.iter().all(is_taken)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if *self.is_closed.get_mut() {
            return;
        }
        let now = Instant::now();
        if let Err(error) = self.end(now + DESTROYED_WITHIN, now + ENDED_WITHIN) {
            tracing::warn!(%error, "edges did not end as they should");
        }
    }
}

impl<P> Payloads<P> {
    fn failed(&self, what: &str, peer: Rank, stop: Stop) -> TransportError {
        match stop {
            Stop::Cuda(error) => error.into(),
            Stop::GivenUp => self.life.aborted(),
            Stop::Nccl(source) => self.life.explain(TransportError::Nccl {
                doing: format!("{what} rank {peer}"),
                source,
            }),
        }
    }
}

impl NcclTx {
    /// That the message, its payload, the lane and the device are all fit to go, and that the send
    /// is ordered behind what writes the slot: all that can fail before the header leaves.
    fn ready(&mut self, bytes: u64, lease: Option<&DeviceTx>) -> Result<(), TransportError> {
        self.shared.check()?;
        let pool = self.payloads.as_ref().map(|payloads| &payloads.pool);
        let is_own = |lease: &DeviceTx| pool.is_some_and(|pool| Arc::ptr_eq(&lease.pool, pool));
        check_payload(bytes, lease.map(|lease| (is_own(lease), lease.capacity())))?;
        self.lane.check_room()?;
        let (Some(lease), Some(Payloads { edge, pool, .. })) = (lease, &self.payloads) else {
            return Ok(());
        };
        let slot = pool.slot(lease.slot);
        slot.check()?;
        let is_other = |writer: &&Stream| !writer.is_same(&edge.stream);
        if lease.writer.as_ref().filter(is_other).is_some() {
            edge.stream.wait(&slot.work)?;
        }
        Ok(())
    }
}

/// Streams that share a hardware queue wait for each other.
pub(super) fn check_queues() {
    if std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").is_ok_and(|value| value.trim() == "1") {
        tracing::warn!(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams of a device into one queue: a large \
             payload in one direction may wait for ever for one in the other, or for a group; unset it, or set 8"
        );
    }
}

impl EdgeTx for NcclTx {
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
        payload: Option<DeviceTx>,
    ) -> Result<Sent<Sending>, Rejected<DeviceTx>> {
        let life = self.shared.life.clone();
        let bytes = message.payload_bytes();
        self.shared.sweep();
        let issues = life.as_ref().filter(|_| self.payloads.is_some());
        let ready = issues
            .map(|life| life.enter())
            .transpose()
            .and_then(|turn| self.ready(bytes, payload.as_ref()).map(|()| turn));
        let turn = match ready {
            Ok(turn) => turn,
            Err(error) => {
                let buffer = payload;
                return Err(Rejected { buffer, error });
            }
        };
        // From here on nothing may fail: the header is a commitment. What fails all the same ends
        // the generation, since the peer waits for what cannot come.
        let sending = payload.map(DeviceTx::into_sending);
        let slot = sending.as_ref().map(|sending| sending.slot);
        let committed = message.commit(&mut self.sequencer, stamp);
        let mut left = self.lane.push(slot, committed.frame());
        if let (Ok(()), Some(slot), Some(payloads)) = (&left, slot, &self.payloads) {
            // The slot has room for it, so it fits.
            let (slot, bytes) = (payloads.pool.slot(slot), bytes as usize);
            // SAFETY: in the turn of the thread that issues. The slot has room for the bytes (checked), is
            // not written (its lease was moved in), and is neither leased again nor freed before.
            let sent = unsafe { payloads.edge.issue(&payloads.life, slot, bytes) };
            left = sent.map_err(|stop| payloads.failed("send to", self.lane.peer(), stop));
        }
        drop(turn);
        match left {
            Ok(()) => Ok(Sent {
                header: *committed.header(),
                payload: sending.map(InFlight::new),
            }),
            Err(error) => {
                self.shared.kill(&error.to_string());
                // The next generation may send it.
                let buffer = sending.map(Sending::recall);
                Err(Rejected { buffer, error })
            }
        }
    }
}

impl EdgeRx for NcclRx {
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
        self.shared.sweep();
        let Some(payloads) = &self.payloads else {
            // There is no slot, so this is the peer's fault.
            let (slot, len) = self.lane.take_announced(header, 0)?;
            unreachable!("slot {slot} with {len} bytes was taken, and there is none");
        };
        let _turn = payloads.life.enter()?;
        let (edge, pool) = (&payloads.edge, Arc::clone(&payloads.pool));
        let (slot, len) = self.lane.take_announced(header, pool.pool.capacity)?;
        let receiving = Receiving { pool, slot, len };
        // SAFETY: in the turn of the thread that issues. The slot has room for the bytes (checked); its
        // last reader was done, as the device said, before it went back to the peer; it is neither
        // read nor freed before.
        match unsafe { edge.issue(&payloads.life, receiving.pool.pool.slot(slot), len) } {
            Ok(()) => Ok(InFlight::new(receiving)),
            Err(stop) => {
                let error = payloads.failed("receive from", self.lane.peer(), stop);
                payloads.life.kill(&error.to_string());
                drop(InFlight::new(receiving).abort());
                Err(error)
            }
        }
    }
}
