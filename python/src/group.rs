//! The group of a stage that several ranks run together, as Python calls it.
//!
//! Hazard: a group is lent to the driver for one call of the stage, and Python keeps what it gets; and NumPy's and PyTorch's
//! memory is known by its address alone. Guarantee: a member has the group only while its stage runs, and only on the thread
//! that runs it; the addresses are those of arrays that the caller holds meanwhile, and do not overlap. Not guaranteed: that no
//! other thread writes into them meanwhile, which the caller of a collective promises.

use std::mem;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use pp_contract::DType;
use pp_device::DevicePtr;
use pp_transport::error::TransportError;
use pp_transport::host::HostGroup;
use pp_transport::nccl::Communicator;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::medium::{OnGpu, OnHost};
use crate::memory::dtype;

/// A range of this rank's memory: its address and its bytes.
type Range = (usize, usize);

/// What the members of a group do together. Members are named by their places.
#[derive(Debug)]
pub(crate) enum Collective {
    AllReduceSum(Range, DType),
    Broadcast(Range, u32),
    /// From the root's whole to the part of each, whose bytes are given.
    Scatter(Range, Vec<u64>, Range, u32),
    /// From the part of each to the root's whole.
    Gather(Range, Vec<u64>, Range, u32),
    Send(Range, u32),
    Receive(Range, u32),
    Barrier,
}

impl Collective {
    /// # Errors
    /// The memory that it reads and the memory that it writes overlap.
    fn check(&self) -> PyResult<()> {
        let (Self::Scatter(whole, _, part, _) | Self::Gather(part, _, whole, _)) = self else {
            return Ok(());
        };
        let is_before = |a: &Range, b: &Range| b.0.checked_sub(a.0).is_some_and(|gap| gap >= a.1);
        let are_apart = is_before(whole, part) || is_before(part, whole);
        match whole.1 == 0 || part.1 == 0 || are_apart {
            true => Ok(()),
            false => Err(PyValueError::new_err(
                "`whole` and `part` share memory, and one is read while the other is written: copy the part, or make an array \
                 of its own for it",
            )),
        }
    }
}

/// A kind of memory whose groups have collectives.
pub(crate) trait Together {
    type Group;

    /// Does it, or issues it to the stream of the rank.
    ///
    /// # Safety
    /// The ranges are memory of this kind that belongs to this process, and do not overlap. Nothing else uses them until this
    /// has returned, or until the stream has passed it; a range that is only read may be read.
    unsafe fn call(&self, group: &mut Self::Group, what: &Collective)
    -> Result<(), TransportError>;
}

/// # Safety
/// As [`Together::call`].
unsafe fn bytes<'a>((address, len): Range) -> &'a [u8] {
    match len {
        0 => &[],
        // SAFETY: the caller's promise.
        _ => unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(address), len) },
    }
}

/// # Safety
/// As [`Together::call`].
unsafe fn bytes_mut<'a>((address, len): Range) -> &'a mut [u8] {
    match len {
        0 => &mut [],
        // SAFETY: the caller's promise.
        _ => unsafe {
            std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(address), len)
        },
    }
}

impl Together for OnHost {
    type Group = HostGroup;

    unsafe fn call(&self, group: &mut HostGroup, what: &Collective) -> Result<(), TransportError> {
        // SAFETY: the caller's promise.
        unsafe {
            match what {
                Collective::AllReduceSum(data, dtype) => {
                    group.all_reduce_sum(bytes_mut(*data), *dtype)
                }
                Collective::Broadcast(data, root) => group.broadcast(bytes_mut(*data), *root),
                Collective::Scatter(whole, parts, part, root) => {
                    group.scatter(bytes(*whole), parts, bytes_mut(*part), *root)
                }
                Collective::Gather(part, parts, whole, root) => {
                    group.gather(bytes(*part), parts, bytes_mut(*whole), *root)
                }
                Collective::Send(data, to) => group.send(bytes(*data), *to),
                Collective::Receive(data, from) => group.receive(bytes_mut(*data), *from),
                Collective::Barrier => group.barrier(),
            }
        }
    }
}

fn range((address, len): Range) -> DevicePtr {
    DevicePtr {
        address: address as u64,
        len,
    }
}

impl Together for OnGpu {
    type Group = Communicator;

    unsafe fn call(
        &self,
        group: &mut Communicator,
        what: &Collective,
    ) -> Result<(), TransportError> {
        let stream = &self.stream;
        // SAFETY: the caller's promise. PyTorch, which made the tensors, knows that this stream uses their memory, gives it to
        // later work of the same stream or once the stream has passed this work, and back to the device only once the device is
        // done with it, as after an abort.
        unsafe {
            match what {
                Collective::AllReduceSum(data, dtype) => {
                    group.all_reduce_sum(range(*data), *dtype, stream)
                }
                Collective::Broadcast(data, root) => group.broadcast(range(*data), *root, stream),
                Collective::Scatter(whole, parts, part, root) => {
                    group.scatter(range(*whole), parts, range(*part), *root, stream)
                }
                Collective::Gather(part, parts, whole, root) => {
                    group.gather(range(*part), parts, range(*whole), *root, stream)
                }
                Collective::Send(data, to) => group.send(range(*data), *to, stream),
                Collective::Receive(data, from) => group.receive(range(*data), *from, stream),
                Collective::Barrier => group.barrier(stream),
            }
        }
    }
}

/// Calls the group that is lent.
type Act<'a> = dyn FnMut(&Collective) -> Result<(), TransportError> + 'a;

/// A group, for the time of a call of its stage.
struct Loan {
    act: NonNull<Act<'static>>,
    by: ThreadId,
    /// Why a collective failed. Python gets only the text.
    failed: Option<TransportError>,
}

// SAFETY: the pointer is used only on the thread that has lent the group.
unsafe impl Send for Loan {}

/// One member of a group, with the group while the stage runs.
#[pyclass(frozen, module = "pp_pipeline._native")]
#[derive(Default)]
pub(crate) struct Member(Mutex<Option<Loan>>);

/// Takes the group back, also from a call that panics.
struct Back<'a>(&'a Member);

impl Drop for Back<'_> {
    fn drop(&mut self) {
        self.0.lent().take();
    }
}

impl Member {
    fn lent(&self) -> MutexGuard<'_, Option<Loan>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lends the group for the time of `run`. Gives why a collective failed, if one did.
    pub(crate) fn lend<M: Together, T>(
        &self,
        (medium, group): (&M, &mut M::Group),
        run: impl FnOnce() -> T,
    ) -> (T, Option<TransportError>) {
        // SAFETY: the arrays are held by the caller of the collective, which waits for it, and promises that nothing else writes
        // into them meanwhile (see `Group` in Python); on a GPU PyTorch keeps the memory until the stream has passed the work.
        // `Member::call` has checked that they do not overlap.
        let mut act = |what: &Collective| unsafe { medium.call(group, what) };
        let act: NonNull<Act<'_>> = NonNull::from(&mut act);
        // SAFETY: only the lifetime differs. `back` takes the pointer away before the closure ends, and it is used on this thread
        // alone, which is in `run` until then.
        let act = unsafe { mem::transmute::<NonNull<Act<'_>>, NonNull<Act<'static>>>(act) };
        let by = std::thread::current().id();
        *self.lent() = Some(Loan {
            act,
            by,
            failed: None,
        });
        let back = Back(self);
        let result = run();
        let failed = self.lent().take().and_then(|lent| lent.failed);
        drop(back);
        (result, failed)
    }

    fn call(&self, py: Python<'_>, what: &Collective) -> PyResult<()> {
        what.check()?;
        let is_here = |lent: &mut Loan| lent.by == std::thread::current().id();
        let Some(mut lent) = self.lent().take_if(is_here) else {
            return Err(PyRuntimeError::new_err(
                "the members of a group meet in run alone: call it there, on the thread that runs the stage",
            ));
        };
        let done = py.detach(|| {
            let lent = &mut lent;
            // SAFETY: `lend` has lent it on this thread, and waits in `run` for what this thread does.
            unsafe { lent.act.as_mut()(what) }
        });
        let done = done.map_err(|error| {
            let text = pp_contract::with_source(&error);
            if matches!(error, TransportError::WrongGroup { .. }) {
                return PyValueError::new_err(text);
            }
            lent.failed = Some(error);
            PyRuntimeError::new_err(text)
        });
        *self.lent() = Some(lent);
        done
    }
}

#[pymethods]
impl Member {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn all_reduce(&self, py: Python<'_>, data: Range, dtype: &str) -> PyResult<()> {
        self.call(py, &Collective::AllReduceSum(data, self::dtype(dtype)?))
    }

    fn broadcast(&self, py: Python<'_>, data: Range, root: u32) -> PyResult<()> {
        self.call(py, &Collective::Broadcast(data, root))
    }

    fn scatter(
        &self,
        py: Python<'_>,
        whole: Range,
        parts: Vec<u64>,
        part: Range,
        root: u32,
    ) -> PyResult<()> {
        self.call(py, &Collective::Scatter(whole, parts, part, root))
    }

    fn gather(
        &self,
        py: Python<'_>,
        part: Range,
        parts: Vec<u64>,
        whole: Range,
        root: u32,
    ) -> PyResult<()> {
        self.call(py, &Collective::Gather(part, parts, whole, root))
    }

    fn send(&self, py: Python<'_>, data: Range, to: u32) -> PyResult<()> {
        self.call(py, &Collective::Send(data, to))
    }

    fn receive(&self, py: Python<'_>, data: Range, source: u32) -> PyResult<()> {
        self.call(py, &Collective::Receive(data, source))
    }

    fn barrier(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, &Collective::Barrier)
    }
}
