//! Making communicators, on a thread that may be left behind.
//!
//! Hazard: creating a communicator, and the first operation with each peer, wait for that peer inside NCCL. If it never
//! comes, they wait for ever. Guarantee: the caller waits until its deadline and learns how far the connection came.
//! Every edge moves a byte before the first payload, so no first use is left for the steady state. A thread that
//! returns too late ends what it made. A thread that does not return soon is freed by aborting what it has made so far,
//! so the device can be connected again. One case remains: ncclCommInitRankConfig of a blocking communicator waits for
//! the peer and has given no handle yet, so there is nothing to abort. Its thread, and the device, are lost until the
//! peer comes.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use nccl_sys::{NcclError, ncclDataType_t, ncclRedOp_t};

use super::calls::{Comm, Operation};
use super::id::UniqueId;
use super::issuer::{ConnectWait, Issuer, SecondThread};
use super::life::{AT_WORK, How, Life};
use crate::gpu::{DeviceSlots, EdgesLife, PendingFree, Slot, lock};
use crate::times::{LOOK_EVERY, RETURNS_WITHIN};
use pp_device::{CudaError, DeviceBuffer, DevicePtr, Stream};
use pp_edges::error::TransportError;
use pp_edges::host::EdgeShape;

/// The step that connecting has reached.
#[derive(Debug)]
pub(super) struct ConnectProgress {
    life: Arc<Life>,
    step: Mutex<&'static str>,
}

impl ConnectProgress {
    pub(super) fn new(life: &Arc<Life>) -> Self {
        Self {
            life: Arc::clone(life),
            step: Mutex::new("start a thread"),
        }
    }

    fn step(&self) -> &'static str {
        *lock(&self.step)
    }

    /// Begins a step, unless the connection was given up.
    pub(super) fn at(&self, step: &'static str) -> Result<(), Stop> {
        *lock(&self.step) = step;
        if self.life.is_dead() {
            return Err(Stop::GivenUp);
        }
        Ok(())
    }
}

/// Why connecting stopped.
#[derive(Debug, thiserror::Error)]
pub(super) enum Stop {
    #[error("it was given up")]
    GivenUp,
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(transparent)]
    Nccl(#[from] NcclError),
}

/// Communicators without an owner yet. The drop ends them, also during a panic.
pub(super) struct Unmade {
    pub(super) life: Arc<Life>,
    /// `None` once an owner has taken them over.
    second: Option<SecondThread>,
}

impl Unmade {
    pub(super) fn new(life: Arc<Life>, second: SecondThread) -> Self {
        AT_WORK.fetch_add(1, Ordering::SeqCst);
        Self {
            life,
            second: Some(second),
        }
    }

    /// Hands the communicators to their owner. From then on the thread that issues may call again.
    pub(super) fn taken(mut self) {
        self.second = None;
    }
}

impl Drop for Unmade {
    fn drop(&mut self) {
        if let Some(second) = self.second.take() {
            self.life.kill("it was not made");
            self.life.run_end(How::Abort, second);
        }
    }
}

/// Makes a life, runs `make` on a thread of its own, and waits for that thread. If `make` fails or is too late,
/// everything that it added to the life is aborted.
///
/// # Errors
/// [`TransportError::NotInTime`] at the deadline, or when the connection is not wanted any more; the error that stopped
/// `make`.
pub(super) fn by<T: Send + 'static>(
    issuer: &Issuer,
    what: String,
    wait: &ConnectWait<'_>,
    make: impl FnOnce(&Arc<Life>, &ConnectProgress) -> Result<T, Stop> + Send + 'static,
) -> Result<(Arc<Life>, T), TransportError> {
    let life = Arc::new(Life::new(&issuer.core, what));
    let second = issuer.core.enter_to_connect(&life.what, wait)?;
    let started = Instant::now();
    let progress = Arc::new(ConnectProgress::new(&life));
    // The channel buffers nothing: the result is either taken, or stays with its thread, which ends it.
    let (sender, receiver) = sync_channel(0);
    let (own_life, own_progress) = (Arc::clone(&life), Arc::clone(&progress));
    let work = move || {
        let unmade = Unmade::new(own_life, second);
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
        what: life.what.clone(),
        step,
        after: started.elapsed(),
    };
    if started_thread.is_err() {
        return Err(late("start a thread"));
    }
    let made = loop {
        match receiver.recv_timeout(wait.nap()) {
            Err(RecvTimeoutError::Timeout) if !wait.is_over() => {}
            other => break other,
        }
    };
    match made {
        Ok(Ok((unmade, made))) => {
            unmade.taken();
            Ok((life, made))
        }
        Ok(Err(Stop::GivenUp)) => Err(late(progress.step())),
        Ok(Err(Stop::Cuda(error))) => Err(TransportError::Cuda(error)),
        Ok(Err(Stop::Nccl(source))) => Err(TransportError::Nccl {
            doing: format!("{}: {}", life.what, progress.step()),
            source,
        }),
        Err(RecvTimeoutError::Disconnected) => Err(late("run to its end")),
        Err(RecvTimeoutError::Timeout) => {
            let step = progress.step();
            life.kill("it was not made in time");
            call_back(&life, receiver);
            Err(late(step))
        }
    }
}

/// Makes sure that a thread whose connection was given up returns: by itself, or because its communicators are aborted.
/// Drops what it returns, which ends that too.
fn call_back<T: Send + 'static>(life: &Arc<Life>, made: Receiver<T>) {
    let (life, second) = (Arc::clone(life), life.core.enter_to_end());
    let thread = std::thread::Builder::new().name("pp-nccl-back".into());
    // If no thread can be started, the thread that connects may be lost.
    let _ = thread.spawn(move || {
        if let Err(RecvTimeoutError::Timeout) = made.recv_timeout(RETURNS_WITHIN) {
            // The thread that made the communicators answers for their end, and reports how it went.
            let _ = life.end_all(How::Abort);
        }
        drop(second);
    });
}

/// Joins independent communicators and adds them to `life`. Non-blocking ones join at the same time.
pub(super) fn join(
    life: &Life,
    ids: &[UniqueId],
    (rank, ranks): (u32, u32),
    blocking: bool,
) -> Result<Vec<Comm>, Stop> {
    life.call(|call| {
        let mut comms = Vec::with_capacity(ids.len());
        for id in ids {
            // SAFETY: no other thread issues on this device while this one has a `SecondThread`; the context
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
        Ok(comms)
    })
}

/// One directed edge: its communicator, its stream, and its operation for payloads.
#[derive(Debug)]
pub(super) struct Edge {
    pub(super) comm: Comm,
    pub(super) stream: Stream,
    pub(super) operation: Operation,
}

impl Edge {
    /// Issues the transfer of the first `bytes` of a slot, and records the event behind it. After an error NCCL may
    /// still have accepted the transfer and may launch it later, so the slot and its stream stay until the communicator
    /// is gone.
    ///
    /// # Safety
    /// This thread is the one that issues on the device. The slot has room for the bytes, and is neither
    /// used nor freed before its event `moved` is done.
    pub(super) unsafe fn issue(&self, life: &Life, slot: &Slot, bytes: usize) -> Result<(), Stop> {
        let payload = (slot.ptr(), ncclDataType_t::ncclUint8, bytes);
        slot.begin_move();
        let issued = life.call(|call| {
            // SAFETY: the caller's promise, and the call passes the gate.
            unsafe { call.issue(self.comm, self.operation, payload, &self.stream) }
        });
        issued
            .map_err(Stop::from)
            .and_then(|()| Ok(slot.moved.record(&self.stream)?))
            .inspect_err(|_| slot.give_up())
    }
}

/// An edge and its slots.
pub(super) type Half = (Edge, Arc<DeviceSlots>);

/// Makes this rank's ends of these edges, and moves a byte over each. `ends` has the shape of each edge, and whether
/// this rank sends. Both ranks do the same in the same order.
pub(super) fn edges(
    life: &Arc<Life>,
    progress: &ConnectProgress,
    is_lower: bool,
    ends: &[(EdgeShape, bool)],
    ids: &[UniqueId],
    blocking: bool,
) -> Result<Vec<Half>, Stop> {
    let device = &life.core.device;
    let (rank, peer) = if is_lower { (0, 1) } else { (1, 0) };
    progress.at("take device memory for the slots")?;
    device.bind()?;
    let slots = ends.iter().map(|(shape, _)| {
        let life: Arc<dyn EdgesLife> = Arc::<Life>::clone(life);
        DeviceSlots::new(device, Some(life), *shape)
    });
    let slots = slots.collect::<Result<Vec<_>, _>>()?;
    progress.at("create the communicators of the edges")?;
    let comms = join(life, ids, (rank, 2), blocking)?;
    let half = |(((_, is_sender), slots), comm): ((&(EdgeShape, bool), DeviceSlots), Comm)| {
        let operation = if *is_sender {
            Operation::Send { to: peer }
        } else {
            Operation::Recv { from: peer }
        };
        let stream = slots.stream.clone();
        let edge = Edge {
            comm,
            stream,
            operation,
        };
        (edge, Arc::new(slots))
    };
    let halves: Vec<Half> = ends.iter().zip(slots).zip(comms).map(half).collect();
    for (edge, slots) in &halves {
        progress.at("connect the edges")?;
        // SAFETY: the communicator was just made, this thread is the only one that calls for the
        // device (see `join`), and the slot has no owner yet and at least a byte.
        let issued = unsafe { edge.issue(life, slots.slot(0), 1) };
        // The kill comes before the slots are dropped: no slot is freed while a kernel of another edge may wait for
        // ever.
        issued.inspect_err(|_| life.kill("an edge could not be connected"))?;
    }
    for (_, slots) in &halves {
        progress.at("move a byte over each edge")?;
        while !slots.slot(0).has_moved()? {
            progress.at("move a byte over each edge")?;
            std::thread::sleep(LOOK_EVERY);
        }
    }
    Ok(halves)
}

/// Moves a byte between this member and each other one, both ways, in one group, and reduces one byte. NCCL chooses
/// other algorithms for larger reductions, and those may still connect at their first use.
pub(super) fn all_pairs(
    life: &Life,
    progress: &ConnectProgress,
    comm: Comm,
    place: u32,
    ranks: u32,
) -> Result<(), Stop> {
    progress.at("connect the members")?;
    let device = &life.core.device;
    let stream = Stream::urgent(device)?;
    let scratch = DeviceBuffer::new(device, 2 * ranks as usize + 1)?;
    let exchanged = exchange(life, progress, (comm, place, ranks), &stream, &scratch);
    // Both stay until the communicator is gone. NCCL may launch an accepted operation even after an error, and freeing
    // memory then would stop the device, which has other work by that time.
    life.free_later(PendingFree {
        buffer: scratch,
        events: Vec::new(),
        stream: Some(stream),
    });
    exchanged
}

/// Issues the transfers of [`all_pairs`] and waits for them. Each byte has its own place in `scratch`.
fn exchange(
    life: &Life,
    progress: &ConnectProgress,
    (comm, place, ranks): (Comm, u32, u32),
    stream: &Stream,
    scratch: &DeviceBuffer,
) -> Result<(), Stop> {
    let at = |byte: u32| {
        let address = scratch.address() + u64::from(byte);
        (DevicePtr { address, len: 1 }, ncclDataType_t::ncclUint8, 1)
    };
    life.call(|call| {
        let mut peers = (0..ranks).filter(|peer| *peer != place);
        // SAFETY: the communicator was just made, this thread is the only one that calls for the
        // device (see `join`); each byte is used once, and the caller frees the scratch only after the
        // stream has passed.
        let issued = unsafe {
            call.group(comm, |call| {
                peers.try_for_each(|peer| {
                    call.issue(comm, Operation::Send { to: peer }, at(2 * peer), stream)?;
                    call.issue(
                        comm,
                        Operation::Recv { from: peer },
                        at(2 * peer + 1),
                        stream,
                    )
                })
            })
        };
        issued?.ok_or(Stop::GivenUp)?;
        let (reduce, last) = (Operation::AllReduce(ncclRedOp_t::ncclMax), at(2 * ranks));
        // SAFETY: as above.
        unsafe { call.issue(comm, reduce, last, stream) }.map_err(Stop::from)
    })?;
    scratch.used_by(stream)?;
    progress.at("move a byte between the members")?;
    while !scratch.is_idle()? {
        progress.at("move a byte between the members")?;
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}
