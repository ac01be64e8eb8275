//! Both edges between this rank's device and that of one peer.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Instant;

use pp_contract::{Generation, Matched, Prepared, Sequencer, Stamp};

use super::connect::{self, Edge, Stop};
use super::id::UniqueId;
use super::issuer::{Issuer, Patience, Tenant};
use super::lease::{DeviceRx, DeviceTx, Receiving, Sending};
use super::life::{AbortHandle, How, Life};
use super::slots::{Pool, RxPool, TxPool};
use crate::bell::Bell;
use crate::error::TransportError;
use crate::host::EdgeShape;
use crate::host::layout::Layout;
use crate::host::slots::SlotWords;
use crate::in_flight::{InFlight, Rejected};
use crate::lane::Lane;
use crate::link::{Capabilities, Link, Sent, check_payload};
use crate::times::{DESTROYED_WITHIN, ENDED_WITHIN, FLUSHED_WITHIN, LOOK_EVERY, SETTLED_WITHIN};
use pp_device::Stream;

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
    /// Makes it `!Sync`.
    tenant: Tenant,
}

impl NcclLink {
    /// Makes both edges, and moves a byte over each; the peer does the same at the same time. Goes on for as
    /// long as it is wanted, which is asked every few milliseconds: a caller that hears that the peer is
    /// gone need not wait for it until the deadline.
    ///
    /// A communicator that blocks cannot be given up while it is created, since NCCL has given no
    /// handle to abort: if the peer does not join, the thread that waits for it stays behind, and no
    /// other link of this device can be made.
    ///
    /// # Errors
    /// [`TransportError::NotInTime`] when the peer did not do its part by the deadline, or it is not wanted
    /// any more: a thread that waits inside NCCL is left behind then. The device has no memory for the
    /// slots; NCCL refuses; the lane has other slots than the shapes.
    pub fn connect(
        options: NcclOptions,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Self, TransportError> {
        let NcclOptions { up, down, ids, .. } = options;
        let (is_lower, blocking) = (options.is_lower, options.blocking);
        Layout::new(up, down)?;
        let (out_shape, in_shape) = if is_lower { (up, down) } else { (down, up) };
        let out_depth = options.lane.out.words().depth();
        let in_depth = options.lane.incoming.slots.depth();
        for (lane, edge) in [(out_depth, out_shape.depth), (in_depth, in_shape.depth)] {
            if lane != edge {
                return Err(TransportError::OtherDepth { lane, edge });
            }
        }
        check_queues();
        let tenant = Tenant::new(&options.issuer);
        let lane = options.lane;
        let peer = lane.peer();
        let patience = Patience {
            deadline: options.deadline,
            is_wanted,
        };
        let started = Instant::now();
        let what = format!("the link to rank {peer}");
        let made = connect::by(&options.issuer, what, &patience, move |life, progress| {
            connect::edges(life, progress, is_lower, [up, down], &ids, blocking)
        });
        let (life, ((out, tx), (incoming, rx))) = made?;
        tracing::debug!(
            peer = peer.get(),
            generation = options.generation.get(),
            blocking,
            ms = started.elapsed().as_millis() as u64,
            "NCCL link connected"
        );
        Ok(Self {
            tx: Arc::new(Pool {
                lane: Arc::clone(&lane.out),
                slots: tx,
            }),
            rx: Arc::new(RxPool::new(Pool {
                lane: Arc::clone(&lane.incoming),
                slots: rx,
            })),
            life,
            lane,
            out,
            incoming,
            sequencer: Sequencer::new(),
            is_closed: false,
            tenant,
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
        AbortHandle(Arc::clone(&self.life))
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
        !self.lane.incoming.has_untaken()
            && self.lane.out.are_all_back()
            && self.tx.is_still()
            && self.rx.pool.is_still()
    }

    fn failed(&self, what: &str, stop: Stop) -> TransportError {
        match stop {
            Stop::Cuda(error) => error.into(),
            Stop::GivenUp => self.life.aborted(),
            Stop::Nccl(source) => self.life.explain(TransportError::Nccl {
                doing: format!("{what} rank {}", self.lane.peer()),
                source,
            }),
        }
    }

    /// That the message, its payload, the lane and the device are all fit to go, and that the send
    /// is ordered behind what writes the slot: all that can fail before the header leaves.
    fn ready(&mut self, bytes: u64, lease: Option<&DeviceTx>) -> Result<(), TransportError> {
        self.life.check()?;
        check_payload(
            bytes,
            lease.map(|lease| (Arc::ptr_eq(&lease.pool, &self.tx), lease.capacity())),
        )?;
        self.lane.check_room()?;
        let Some(lease) = lease else {
            return Ok(());
        };
        self.tx.slot(lease.slot).check()?;
        let is_other = |writer: &&Stream| !writer.is_same(&self.out.stream);
        if lease.writer.as_ref().filter(is_other).is_some() {
            let ready = &self.tx.slot(lease.slot).work;
            self.out.stream.wait(ready)?;
        }
        Ok(())
    }
}

/// Streams that share a hardware queue wait for each other.
fn check_queues() {
    if std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").is_ok_and(|value| value.trim() == "1") {
        tracing::warn!(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams of a device into one queue: a large \
             payload in one direction may wait for ever for one in the other; unset it, or set 8"
        );
    }
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
        let slot = self.lane.out.lease_if(|slot| {
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
        let slot = sending.as_ref().map(|sending| sending.slot);
        let committed = message.commit(&mut self.sequencer, stamp);
        let mut left = self.lane.push(slot, committed.frame());
        if let (Ok(()), Some(slot)) = (&left, slot) {
            // The slot has room for it, so it fits.
            // SAFETY: in the turn of the thread that issues. The slot has room for the bytes (checked), is
            // not written (its lease was moved in), and is neither leased again nor freed before.
            let sent = unsafe { self.out.issue(&life, self.tx.slot(slot), bytes as usize) };
            left = sent.map_err(|stop| self.failed("send to", stop));
        }
        drop(turn);
        match left {
            Ok(()) => Ok(Sent {
                header: *committed.header(),
                payload: sending.map(InFlight::new),
            }),
            Err(error) => {
                self.life.kill(&error.to_string());
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
        let (slot, len) = self.lane.take_announced(header, self.rx.pool.capacity)?;
        let pool = Arc::clone(&self.rx);
        let receiving = Receiving { pool, slot, len };
        // SAFETY: in the turn of the thread that issues. The slot has room for the bytes (checked); its
        // last reader was done, as the device said, before it went back to the peer; it is neither
        // read nor freed before.
        match unsafe { self.incoming.issue(&life, self.rx.pool.slot(slot), len) } {
            Ok(()) => Ok(InFlight::new(receiving)),
            Err(stop) => {
                let error = self.failed("receive from", stop);
                self.life.kill(&error.to_string());
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
        if let Err(error) = self.end(now + DESTROYED_WITHIN, now + ENDED_WITHIN) {
            tracing::warn!(%error, "a link did not end as it should");
        }
    }
}
