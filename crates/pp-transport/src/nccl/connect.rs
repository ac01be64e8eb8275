//! Making communicators, on a thread that may be left behind.
//!
//! Hazard: creating a communicator, and the first operation with each peer, wait for that peer
//! inside NCCL, for ever if it never comes. Guarantee: whoever connects waits until its deadline
//! and learns how far it came; both edges are tried out before the first payload, so no first use
//! is left for the steady state. A thread that comes back after all, too late, ends what it made.
//! One that does not come back at once is freed by an abort of what it has made so far, so that the
//! device can be connected again. Nothing can be aborted while ncclCommInitRankConfig of a blocking
//! communicator waits for the peer: it has given no handle yet, so that thread, and the device,
//! are lost until the peer comes.

use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nccl_sys::{NcclError, ncclDataType_t, ncclRedOp_t};

use super::calls::Comm;
use super::id::UniqueId;
use super::issuer::{Beside, Patience};
use super::life::{How, Life, Remains};
use super::slots::{DeviceSlots, Slot};
use crate::cuda::{CudaError, DeviceBuffer, DevicePtr, Stream};
use crate::error::TransportError;
use crate::host::EdgeShape;

/// Time between two looks at an event while edges are tried out.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// How long a thread whose connection was given up may take to come back before what it has made is
/// aborted under it.
const COMES_BACK_WITHIN: Duration = Duration::from_millis(100);

/// How far it came.
#[derive(Debug)]
pub(super) struct Progress {
    life: Arc<Life>,
    step: Mutex<&'static str>,
}

impl Progress {
    pub(super) fn new(life: &Arc<Life>) -> Self {
        Self {
            life: Arc::clone(life),
            step: Mutex::new("start a thread"),
        }
    }

    fn step(&self) -> &'static str {
        *self.step.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a step, unless it was given up.
    pub(super) fn at(&self, step: &'static str) -> Result<(), Stop> {
        *self.step.lock().unwrap_or_else(PoisonError::into_inner) = step;
        if self.life.is_dead() {
            return Err(Stop::GivenUp);
        }
        Ok(())
    }
}

/// Why connecting stopped.
#[derive(Debug)]
pub(super) enum Stop {
    GivenUp,
    Cuda(CudaError),
    Nccl(NcclError),
}

impl From<CudaError> for Stop {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}

impl From<NcclError> for Stop {
    fn from(error: NcclError) -> Self {
        Self::Nccl(error)
    }
}

/// Communicators that nobody has taken over yet. Whoever drops it ends them, at a panic too.
pub(super) struct Unmade {
    life: Arc<Life>,
    /// `None` only once they were taken over.
    beside: Option<Beside>,
}

impl Unmade {
    pub(super) fn new(life: Arc<Life>, beside: Beside) -> Self {
        life.begin();
        Self {
            life,
            beside: Some(beside),
        }
    }

    pub(super) fn life(&self) -> &Arc<Life> {
        &self.life
    }

    /// They are whole, and somebody has them: the thread that issues may call again.
    pub(super) fn taken(mut self) {
        self.beside = None;
    }
}

impl Drop for Unmade {
    fn drop(&mut self) {
        if let Some(beside) = self.beside.take() {
            self.life.kill("it was not made");
            self.life.run_end(How::Abort, beside);
        }
    }
}

/// Runs `make` on a thread of its own and waits for it as long as there is patience. What it adds
/// to `life` is aborted when it fails, or comes too late.
///
/// # Errors
/// [`TransportError::NotInTime`] at the deadline, or when it is not wanted; what stopped it.
pub(super) fn by<T: Send + 'static>(
    patience: &Patience<'_>,
    life: &Arc<Life>,
    beside: Beside,
    make: impl FnOnce(&Arc<Life>, &Progress) -> Result<T, Stop> + Send + 'static,
) -> Result<T, TransportError> {
    let started = Instant::now();
    let progress = Arc::new(Progress::new(life));
    // It holds nothing: either it is taken, or it stays with the maker, and is ended there.
    let (sender, receiver) = sync_channel(0);
    let (own_life, own_progress) = (Arc::clone(life), Arc::clone(&progress));
    let work = move || {
        let unmade = Unmade::new(own_life, beside);
        let result = match make(&unmade.life, &own_progress) {
            Ok(made) => Ok((unmade, made)),
            Err(stop) => {
                drop(unmade);
                Err(stop)
            }
        };
        let _ = sender.send(result);
    };
    let thread = std::thread::Builder::new().name("pp-nccl-connect".into());
    let started_thread = thread.spawn(work);
    let late = |step| TransportError::NotInTime {
        what: life.what().to_owned(),
        step,
        after: started.elapsed(),
    };
    if started_thread.is_err() {
        return Err(late("start a thread"));
    }
    let made = loop {
        match receiver.recv_timeout(patience.nap()) {
            Err(RecvTimeoutError::Timeout) if !patience.is_over() => {}
            other => break other,
        }
    };
    match made {
        Ok(Ok((unmade, made))) => {
            unmade.taken();
            Ok(made)
        }
        Ok(Err(Stop::GivenUp)) => Err(late(progress.step())),
        Ok(Err(Stop::Cuda(error))) => Err(TransportError::Cuda(error)),
        Ok(Err(Stop::Nccl(source))) => Err(TransportError::Nccl {
            doing: format!("{}: {}", life.what(), progress.step()),
            source,
        }),
        Err(RecvTimeoutError::Disconnected) => Err(late("run to its end")),
        Err(RecvTimeoutError::Timeout) => {
            let step = progress.step();
            life.kill("it was not made in time");
            call_back(life, receiver);
            Err(late(step))
        }
    }
}

/// Sees to it that a thread whose connection was given up comes back: by itself, or because what
/// it has made so far is aborted. What it brings is dropped here, and so ended.
fn call_back<T: Send + 'static>(life: &Arc<Life>, made: Receiver<T>) {
    let (life, beside) = (Arc::clone(life), life.core.enter_to_end());
    let thread = std::thread::Builder::new().name("pp-nccl-back".into());
    // Without a thread the other may be lost.
    let _ = thread.spawn(move || {
        if let Err(RecvTimeoutError::Timeout) = made.recv_timeout(COMES_BACK_WITHIN) {
            // The thread that makes them answers for their end, and says how it went.
            let _ = life.end_all(How::Abort);
        }
        drop(beside);
    });
}

/// Joins communicators that are independent of each other, at once where they do not block, and
/// gives them to `life`.
pub(super) fn join<const N: usize>(
    life: &Life,
    ids: [&UniqueId; N],
    (rank, ranks): (u32, u32),
    blocking: bool,
) -> Result<[Comm; N], Stop> {
    life.call(|call| {
        let mut comms = Vec::with_capacity(N);
        for id in ids {
            // SAFETY: no other thread issues on this device while this one is `Beside` it; the context
            // is current.
            let comm = unsafe { call.begin_to_join(id, rank, ranks, blocking) }?;
            let comm = comm.ok_or(Stop::GivenUp)?;
            life.add(comm);
            comms.push(comm);
        }
        for comm in &comms {
            // SAFETY: as above; it was just made.
            unsafe { call.joined(*comm) }?;
        }
        comms.try_into().map_err(|_| Stop::GivenUp)
    })
}

/// What a link needs of its two edges.
#[derive(Debug)]
pub(super) struct Edges {
    pub(super) out: Edge,
    pub(super) incoming: Edge,
    pub(super) tx: DeviceSlots,
    pub(super) rx: DeviceSlots,
}

/// One directed edge: its communicator and its stream.
#[derive(Debug)]
pub(super) struct Edge {
    pub(super) comm: Comm,
    pub(super) stream: Stream,
    /// The other rank of the communicator.
    pub(super) peer: u32,
}

/// What the two edges of a link are to be.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) is_lower: bool,
    pub(super) up: EdgeShape,
    pub(super) down: EdgeShape,
    pub(super) ids: [UniqueId; 2],
    pub(super) blocking: bool,
}

/// Makes both edges and moves a byte over each. Both ranks do the same in the same order: first
/// the edge from the lower rank to the higher, then the other.
pub(super) fn edges(life: &Arc<Life>, progress: &Progress, wanted: &Wanted) -> Result<Edges, Stop> {
    let device = &life.core.device;
    let (rank, peer) = if wanted.is_lower { (0, 1) } else { (1, 0) };
    progress.at("take device memory for the slots")?;
    device.bind()?;
    let (up_stream, down_stream) = (Stream::urgent(device)?, Stream::urgent(device)?);
    let (up_slots, down_slots) = (
        DeviceSlots::new(life, &up_stream, wanted.up)?,
        DeviceSlots::new(life, &down_stream, wanted.down)?,
    );
    progress.at("create the communicators of both edges")?;
    let ids = wanted.ids.each_ref();
    let [up, down] = join(life, ids, (rank, 2), wanted.blocking)?;

    let edge = |comm, stream| Edge { comm, stream, peer };
    let (up, down) = (edge(up, up_stream), edge(down, down_stream));
    progress.at("connect the edge up")?;
    try_out(life, &up, up_slots.first(), wanted.is_lower)?;
    progress.at("connect the edge down")?;
    try_out(life, &down, down_slots.first(), !wanted.is_lower)?;
    progress.at("move a byte over each edge")?;
    for slot in [up_slots.first(), down_slots.first()] {
        while !slot.has_moved()? {
            progress.at("move a byte over each edge")?;
            std::thread::sleep(LOOK_EVERY);
        }
    }
    Ok(if wanted.is_lower {
        Edges {
            out: up,
            incoming: down,
            tx: up_slots,
            rx: down_slots,
        }
    } else {
        Edges {
            out: down,
            incoming: up,
            tx: down_slots,
            rx: up_slots,
        }
    })
}

/// Moves a byte between this member and each other one, both ways, in one group, and reduces one.
/// Other algorithms, which NCCL chooses for larger reductions, may still connect at their first use.
pub(super) fn all_pairs(
    life: &Life,
    progress: &Progress,
    comm: Comm,
    place: u32,
    ranks: u32,
) -> Result<(), Stop> {
    progress.at("connect the members")?;
    let device = &life.core.device;
    let stream = Stream::urgent(device)?;
    let scratch = DeviceBuffer::new(device, 2 * ranks as usize + 1)?;
    let exchanged = exchange(life, progress, (comm, place, ranks), &stream, &scratch);
    // Both stay until the communicator is gone: what was accepted may be launched after an error, and memory that is
    // freed stops the device, which has other work by then.
    life.bury(Remains {
        buffer: scratch,
        events: Vec::new(),
        stream: Some(stream),
    });
    exchanged
}

/// Issues what [`all_pairs`] moves, each byte with a place of its own in `scratch`, and waits for it.
fn exchange(
    life: &Life,
    progress: &Progress,
    (comm, place, ranks): (Comm, u32, u32),
    stream: &Stream,
    scratch: &DeviceBuffer,
) -> Result<(), Stop> {
    let at = |byte: u32| DevicePtr {
        address: scratch.address() + u64::from(byte),
        len: 1,
    };
    let kind = ncclDataType_t::ncclUint8;
    life.call(|call| {
        let group = call.begin_group()?.ok_or(Stop::GivenUp)?;
        let mut peers = (0..ranks).filter(|peer| *peer != place);
        let added = group.add(|call| {
            peers.try_for_each(|peer| {
                // SAFETY: the communicator was just made, this thread is the only one that calls for
                // the device (see `join`); each byte is used once, and the scratch is freed only after
                // the stream has passed, by whoever called.
                unsafe {
                    call.send(comm, at(2 * peer), kind, 1, peer, stream)?;
                    call.recv(comm, at(2 * peer + 1), kind, 1, peer, stream)
                }
            })
        });
        // SAFETY: as above.
        let ended = unsafe { call.end_group(group, &[comm]) };
        added.and(ended)?;
        let last = at(2 * ranks);
        // SAFETY: as above.
        let reduced = unsafe { call.all_reduce(comm, last, kind, 1, ncclRedOp_t::ncclMax, stream) };
        reduced.map_err(Stop::from)
    })?;
    scratch.used_by(stream)?;
    progress.at("move a byte between the members")?;
    while !scratch.is_idle()? {
        progress.at("move a byte between the members")?;
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}

/// Issues the first operation of an edge, which connects the ranks.
fn try_out(life: &Life, edge: &Edge, slot: &Slot, sends: bool) -> Result<(), Stop> {
    let (kind, place) = (ncclDataType_t::ncclUint8, slot.ptr());
    slot.begin_move();
    let issued = life.call(|call| {
        // SAFETY: the communicator was just made, this thread is the only one that calls for the
        // device (see `join`), and the slot belongs to nobody yet. It has a byte even where the edge
        // carries none, since the driver allocates no less, and it is not freed before the event is
        // done.
        unsafe {
            if sends {
                call.send(edge.comm, place, kind, 1, edge.peer, &edge.stream)
            } else {
                call.recv(edge.comm, place, kind, 1, edge.peer, &edge.stream)
            }
        }
    });
    let issued = issued.map_err(Stop::from);
    let recorded = issued.and_then(|()| Ok(slot.moved.record(&edge.stream)?));
    // It may have been accepted and be launched later: the slot and its stream stay until the
    // communicator is gone.
    recorded.inspect_err(|_| slot.give_up())
}
