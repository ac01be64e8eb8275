//! Both edges between this rank's device and that of one peer.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nccl_sys::ncclDataType_t;
use pp_contract::{Generation, Matched, Prepared, Rank, Sequencer, Stamp};

use super::connect::{self, Edge, Edges, Wanted};
use super::id::UniqueId;
use super::issuer::{Issuer, Patience, Tenant};
use super::lease::{DeviceRx, DeviceTx, Receiving, Sending};
use super::life::{AbortHandle, How, Life};
use super::slots::{Pool, RxPool, TxPool};
use crate::bell::Bell;
use crate::cuda::{DevicePtr, Stream};
use crate::error::TransportError;
use crate::host::EdgeShape;
use crate::host::layout::Layout;
use crate::host::slots::SlotWords;
use crate::in_flight::{InFlight, Rejected};
use crate::lane::Lane;
use crate::link::{Capabilities, Link, Sent, check_payload};

/// How long a link that ends waits for the last credits and completions, which come within
/// microseconds where both ends have done their work.
const SETTLED_WITHIN: Duration = Duration::from_millis(50);
/// Time between two looks at them.
const LOOK_EVERY: Duration = Duration::from_micros(50);
/// How long a link that ends waits until its last words were written.
const FLUSHED_WITHIN: Duration = Duration::from_millis(200);
/// How long the drop of a link waits for communicators that end in order.
const DESTROYED_WITHIN: Duration = Duration::from_secs(2);
/// How long it waits for those that are aborted; measured: half a second.
const ABORTED_WITHIN: Duration = Duration::from_secs(3);

/// What a link is made of. Both ranks give the same shapes, ids and settings.
#[derive(Debug)]
pub struct NcclOptions {
    /// Who issues on this rank's device.
    pub issuer: Issuer,
    /// The lane to the peer, with as many slots as the shapes say.
    pub lane: Lane,
    /// Whether this rank is the lower of the two.
    pub is_lower: bool,
    /// The edge from the lower rank to the higher.
    pub up: EdgeShape,
    /// The edge from the higher rank to the lower.
    pub down: EdgeShape,
    /// The ids of the two communicators, up and down, made by one rank for both.
    pub ids: [UniqueId; 2],
    /// When to give up.
    pub deadline: Instant,
    /// Which generation of communicators between the two this is.
    pub generation: Generation,
    /// Whether NCCL's calls return when they are done. Those of a non-blocking communicator return
    /// at once and are asked after, which costs about 50 µs for each operation.
    pub blocking: bool,
}

/// Both edges between this rank's device and that of one peer, in the hands of one thread.
///
/// # If dropped
/// The communicators end on a thread of their own: in order when everything that was sent has come
/// back and everything announced has arrived, else by an abort. Waits for that, 2 or 3 seconds at
/// most. Leases stay valid.
#[derive(Debug)]
pub struct NcclLink {
    life: Arc<Life>,
    lane: Lane,
    out: Edge,
    incoming: Edge,
    tx: Arc<TxPool>,
    rx: Arc<RxPool>,
    sequencer: Sequencer,
    is_closed: bool,
    tenant: Tenant,
    /// Makes it `!Sync`.
    one_thread: PhantomData<Cell<()>>,
}

impl NcclLink {
    /// Makes both edges, and moves a byte over each; the peer does the same at the same time.
    ///
    /// # Errors
    /// [`TransportError::NotInTime`] when the peer did not do its part by the deadline: a thread
    /// that waits inside NCCL is left behind then. The device has no memory for the slots; NCCL
    /// refuses; the lane has other slots than the shapes.
    pub fn connect(options: NcclOptions) -> Result<Self, TransportError> {
        Self::connect_while(options, &|| true)
    }

    /// The same for as long as it is wanted, which is asked every few milliseconds: whoever hears
    /// that the peer is gone need not wait for it until the deadline.
    ///
    /// A communicator that blocks cannot be given up while it is created, since NCCL has given no
    /// handle to abort: if the peer does not join, the thread that waits for it stays behind, and no
    /// other link of this device can be made.
    ///
    /// # Errors
    /// As [`NcclLink::connect`]; [`TransportError::NotInTime`] also when it is not wanted any more.
    pub fn connect_while(
        options: NcclOptions,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Self, TransportError> {
        let NcclOptions {
            issuer,
            lane,
            is_lower,
            up,
            down,
            ids,
            deadline,
            generation,
            blocking,
        } = options;
        Layout::new(up, down)?;
        let (out_shape, in_shape) = if is_lower { (up, down) } else { (down, up) };
        check_depth(lane.out().words().depth(), out_shape)?;
        check_depth(lane.incoming().depth(), in_shape)?;
        check_queues();
        let core = issuer.core();
        let tenant = Tenant::new(&issuer);
        let peer = lane.peer();
        let life = Arc::new(Life::new(core, format!("the link to rank {peer}")));
        let wanted = Wanted {
            is_lower,
            up,
            down,
            ids,
            blocking,
        };
        let patience = Patience {
            deadline,
            is_wanted,
        };
        let beside = core.enter_to_connect(life.what(), &patience)?;
        let started = Instant::now();
        let made = connect::by(&patience, &life, beside, move |life, progress| {
            connect::edges(life, progress, &wanted)
        });
        let Edges {
            out,
            incoming,
            tx,
            rx,
        } = made?;
        tracing::debug!(
            peer = peer.get(),
            generation = generation.get(),
            blocking,
            ms = started.elapsed().as_millis() as u64,
            "NCCL link connected"
        );
        Ok(Self {
            tx: Arc::new(Pool::new(&life, lane.out(), tx)),
            rx: Arc::new(RxPool::new(Pool::new(&life, lane.incoming(), rx))),
            life,
            lane,
            out,
            incoming,
            sequencer: Sequencer::new(),
            is_closed: false,
            tenant,
            one_thread: PhantomData,
        })
    }

    /// Another handle of its issuer, for a group that is made later.
    #[must_use]
    pub fn issuer(&self) -> Issuer {
        self.tenant.issuer()
    }

    /// What gives this link's communicators up, from any thread.
    #[must_use]
    pub fn abort_handle(&self) -> AbortHandle {
        AbortHandle::new(&self.life)
    }

    /// Ends the communicators as a drop does, with a bound of the caller's.
    ///
    /// # Errors
    /// They did not end by the deadline, or not as they should.
    pub fn close(mut self, deadline: Instant) -> Result<(), TransportError> {
        self.is_closed = true;
        self.end(deadline, deadline)
    }

    fn end(&self, destroyed: Instant, aborted: Instant) -> Result<(), TransportError> {
        let settled = Instant::now() + SETTLED_WITHIN;
        let is_clean = loop {
            self.rx.sweep();
            let is_over = self.life.is_dead() || Instant::now() > settled;
            if self.is_clean() || is_over {
                break self.is_clean() && !self.life.is_dead();
            }
            std::thread::sleep(LOOK_EVERY);
        };
        self.rx.close();
        if !is_clean {
            self.life.kill("it was dropped with payloads in flight");
            return self.life.finish(How::Abort, aborted);
        }
        self.lane
            .flush(destroyed.min(Instant::now() + FLUSHED_WITHIN));
        self.life.finish(How::Destroy, destroyed)
    }

    /// Whether nothing is in flight, on this side or on its way from or to the peer.
    fn is_clean(&self) -> bool {
        !self.lane.incoming().has_untaken()
            && self.lane.out().are_all_back()
            && self.tx.is_still()
            && self.rx.pool.is_still()
    }

    /// Issues the send of a slot whose header has left.
    fn issue_send(&self, slot: u32, bytes: usize) -> Result<(), TransportError> {
        let Edge { comm, stream, peer } = &self.out;
        let slot = self.tx.slot(slot);
        let payload = DevicePtr {
            len: bytes,
            ..slot.ptr()
        };
        slot.begin_move();
        let sent = self.life.call(|call| {
            // SAFETY: in the turn of the thread that issues, and the call passes the gate. The slot
            // has room for the bytes (checked), is not written (its lease was moved in), and
            // is neither leased again nor freed before `moved`, recorded below, is done.
            unsafe { call.send(*comm, payload, BYTES, bytes, *peer, stream) }
        });
        let sent = sent.map_err(|source| self.failed("send to", source));
        sent.and_then(|()| Ok(slot.moved.record(stream)?))
            .inspect_err(|_| slot.give_up())
    }

    /// Issues the receive into a slot whose header was matched.
    fn issue_receive(&self, slot: u32, bytes: usize) -> Result<(), TransportError> {
        let Edge { comm, stream, peer } = &self.incoming;
        let slot = self.rx.slot(slot);
        let payload = DevicePtr {
            len: bytes,
            ..slot.ptr()
        };
        slot.begin_move();
        let posted = self.life.call(|call| {
            // SAFETY: in the turn of the thread that issues, and the call passes the gate. The slot
            // has room for the bytes (checked); its last reader was done, as the device said,
            // before it went back to the peer; it is neither read nor freed before `moved`,
            // recorded below, is done.
            unsafe { call.recv(*comm, payload, BYTES, bytes, *peer, stream) }
        });
        let posted = posted.map_err(|source| self.failed("receive from", source));
        posted
            .and_then(|()| Ok(slot.moved.record(stream)?))
            .inspect_err(|_| slot.give_up())
    }

    fn failed(&self, what: &str, source: nccl_sys::NcclError) -> TransportError {
        self.life.explain(TransportError::Nccl {
            doing: format!("{what} rank {}", self.peer()),
            source,
        })
    }

    fn peer(&self) -> Rank {
        self.lane.peer()
    }

    /// That the message, its payload, the lane and the device are all fit to go, and that the send
    /// is ordered behind what writes the slot: all that can fail before the header leaves.
    fn ready(&mut self, bytes: u64, lease: Option<&DeviceTx>) -> Result<(), TransportError> {
        self.life.check()?;
        check_payload(
            bytes,
            lease.map(|lease| (lease.is_of(&self.tx), lease.capacity())),
        )?;
        self.lane.check_room()?;
        let Some(lease) = lease else {
            return Ok(());
        };
        self.tx.slot(lease.slot()).check()?;
        let is_other = |writer: &&Stream| !writer.is_same(&self.out.stream);
        if lease.writer().filter(is_other).is_some() {
            let ready = &self.tx.slot(lease.slot()).work;
            self.out.stream.wait(ready)?;
        }
        Ok(())
    }
}

const BYTES: ncclDataType_t = ncclDataType_t::ncclUint8;

/// Streams that share a hardware queue wait for each other.
fn check_queues() {
    if std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").is_ok_and(|value| value.trim() == "1") {
        tracing::warn!(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams of a device into one queue: a large \
             payload in one direction may wait for ever for one in the other; unset it, or set 8"
        );
    }
}

fn check_depth(lane: u32, shape: EdgeShape) -> Result<(), TransportError> {
    if lane == shape.depth {
        return Ok(());
    }
    let edge = shape.depth;
    Err(TransportError::OtherDepth { lane, edge })
}

impl Link for NcclLink {
    type Tx = DeviceTx;
    type Rx = DeviceRx;
    type Sending = Sending;
    type Receiving = Receiving;

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "nccl",
            payload_moves: true,
            completions_ring: false,
        }
    }

    /// NCCL ends communicators in order together with the peer, and waits for it.
    fn peer_is_gone(&mut self) {
        self.life.kill("its peer is gone");
    }

    fn bell(&self) -> &Bell {
        self.lane.bell()
    }

    fn try_lease(&mut self) -> Result<Option<DeviceTx>, TransportError> {
        self.life.check()?;
        self.rx.sweep();
        let failed = Cell::new(None);
        let slot = self.lane.out().lease_if(|slot| {
            let slot = self.tx.slot(slot);
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
            None => Ok(slot.map(|slot| DeviceTx::new(&self.tx, slot))),
        }
    }

    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<DeviceTx>,
    ) -> Result<Sent<Sending>, Rejected<DeviceTx>> {
        let life = Arc::clone(&self.life);
        let bytes = message.payload_bytes();
        self.rx.sweep();
        let ready = life
            .enter()
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
        let slot = sending.as_ref().map(Sending::slot);
        let committed = message.commit(&mut self.sequencer, stamp);
        let mut left = self.lane.push(slot, committed.frame());
        if let (Ok(()), Some(slot)) = (&left, slot) {
            // The slot has room for it, so it fits.
            left = self.issue_send(slot, bytes as usize);
        }
        drop(turn);
        match left {
            Ok(()) => Ok(Sent {
                header: *committed.header(),
                payload: sending.map(InFlight::new),
            }),
            Err(error) => {
                self.life.break_off(&error);
                // The next generation may send it.
                let buffer = sending.map(Sending::recall);
                Err(Rejected { buffer, error })
            }
        }
    }

    fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError> {
        self.life.check()?;
        self.rx.sweep();
        self.lane.poll(inbox)
    }

    fn receive(&mut self, header: &Matched<'_>) -> Result<InFlight<Receiving>, TransportError> {
        let life = Arc::clone(&self.life);
        self.rx.sweep();
        let _turn = life.enter()?;
        let (slot, len) = self.lane.take_announced(header, self.rx.pool.capacity())?;
        let receiving = Receiving::new(&self.rx, slot, len);
        match self.issue_receive(slot, len) {
            Ok(()) => Ok(InFlight::new(receiving)),
            Err(error) => {
                self.life.break_off(&error);
                drop(InFlight::new(receiving).abort());
                Err(error)
            }
        }
    }
}

impl Drop for NcclLink {
    fn drop(&mut self) {
        if self.is_closed {
            return;
        }
        let now = Instant::now();
        if let Err(error) = self.end(now + DESTROYED_WITHIN, now + ABORTED_WITHIN) {
            tracing::warn!(%error, "a link did not end as it should");
        }
    }
}
