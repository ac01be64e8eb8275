//! Source, stages and sink that are Python objects, on ranks whose slots lie in host memory.

use std::convert::Infallible;

use pp_contract::{FaultKind, Manifest, Plan, PlanError, StageSpec};
use pp_runtime::stage::{
    Built, Chunk, Done, Offer, Place, Progress, Sink, Source, Stage, StageError, StageResult, Taken,
};
use pp_transport::host::{RxLease, TxLease};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::{Deserialize, Serialize};

use crate::error::Raised;
use crate::feed::Feed;
use crate::memory::{Layout, Layouts, Memory, Slots};
use crate::results::Results;

/// The plan of a chunk: which one it is. What else the stages must know is in the note.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Numbered(u64);

impl Plan for Numbered {
    const NAME: &'static str = "python";
    const VERSION: u16 = 1;
    type Parts = Self;

    fn from_parts(parts: Self) -> Result<Self, PlanError> {
        Ok(parts)
    }

    fn parts(&self) -> &Self {
        self
    }

    fn start_frame(&self) -> u64 {
        self.0
    }

    /// What a stage makes is for its own `outputs` to say.
    fn check(&self, _: &StageSpec, _: bool, _: &Manifest) -> Result<(), PlanError> {
        Ok(())
    }
}

/// A Python object that works, and what it knows of slots.
pub(crate) struct Adapter {
    call: Py<PyAny>,
    finish: Option<Py<PyAny>>,
    inputs: Slots,
    outputs: Slots,
    layouts: Layouts,
    raised: Raised,
}

impl Adapter {
    /// `object` has a method `call`, and perhaps one named `finish`.
    pub(crate) fn new(object: &Bound<'_, PyAny>, raised: &Raised) -> PyResult<Self> {
        Ok(Self {
            call: object.getattr("call")?.unbind(),
            finish: object.getattr_opt("finish")?.map(Bound::unbind),
            inputs: Slots::default(),
            outputs: Slots::default(),
            layouts: Layouts::default(),
            raised: raised.clone(),
        })
    }

    /// Calls the object with Python's lock; an exception is a fault of this rank.
    fn attach<T>(
        &mut self,
        operation: &'static str,
        act: impl FnOnce(&mut Self, Python<'_>) -> PyResult<T>,
    ) -> StageResult<T> {
        Python::attach(|py| act(self, py).map_err(|error| self.raised.fault(py, operation, error)))
    }

    fn input(&mut self, py: Python<'_>, lease: Option<&RxLease>) -> PyResult<Option<Py<Memory>>> {
        let get = |lease: &RxLease| {
            let bytes = lease.bytes();
            self.inputs
                .get(py, bytes.as_ptr().addr(), bytes.len(), lease.mapping())
        };
        lease.map(get).transpose()
    }

    fn output(&mut self, py: Python<'_>, lease: &mut TxLease) -> PyResult<Py<Memory>> {
        let address = lease.bytes_mut().as_mut_ptr().addr();
        self.outputs
            .get(py, address, lease.capacity(), lease.mapping())
    }

    fn finish(&mut self) -> StageResult<()> {
        self.attach("finish", |this, py| {
            this.finish
                .as_ref()
                .map_or(Ok(()), |finish| finish.call0(py).map(drop))
        })
    }
}

/// The note of a chunk, for Python.
fn note<'py>(py: Python<'py>, note: &[u8]) -> Option<Bound<'py, PyBytes>> {
    (!note.is_empty()).then(|| PyBytes::new(py, note))
}

/// The source: it writes what the feed has into slots.
pub(crate) struct PySource {
    pub(crate) feed: Feed,
    pub(crate) adapter: Adapter,
}

impl Source<TxLease> for PySource {
    type Plan = Numbered;
    type Carry = ();

    fn poll(&mut self) -> StageResult<Offer> {
        self.feed
            .offer()
            .map_err(|error| Python::attach(|py| self.adapter.raised.fault(py, "read", error)))
    }

    fn build(&mut self, place: Place, slot: &mut TxLease) -> StageResult<Built<Numbered, ()>> {
        let number = place.chunk.get();
        let item = self.feed.take();
        let (layout, note) = self.adapter.attach("read", |this, py| {
            let memory = this.output(py, slot)?;
            let made = this.call.call1(py, (item, memory, number))?;
            let (layout, note): (Py<Layout>, Vec<u8>) = made.extract(py)?;
            Ok((layout.get().manifest.clone(), note))
        })?;
        Ok(Built {
            note,
            ..Built::new(Numbered(number), layout, ())
        })
    }

    fn queued(&self) -> u32 {
        self.feed.queued()
    }
}

impl Drop for PySource {
    fn drop(&mut self) {
        self.feed.close();
    }
}

/// A stage between source and sink.
pub(crate) struct PyStage(pub(crate) Adapter);

impl Stage<TxLease, RxLease> for PyStage {
    type Plan = Numbered;
    type Kept = Infallible;

    fn run(
        &mut self,
        chunk: Chunk<'_, Numbered>,
        input: Option<&RxLease>,
        output: &mut TxLease,
    ) -> StageResult<Progress<Done, Infallible>> {
        let (message, place) = (chunk.message, chunk.place);
        let tensors = self.0.attach("run", |this, py| {
            let layout = this.layouts.get(py, message.tensors())?;
            let memories = (this.input(py, input)?, this.output(py, output)?);
            let at = (place.chunk.get(), place.lap, place.starts_epoch);
            let note = note(py, message.note());
            let made = this
                .call
                .call1(py, (memories.0, layout, memories.1, at, note))?;
            let made: Py<Layout> = made.extract(py)?;
            Ok(made.get().manifest.clone())
        })?;
        let report = Taken::of(message.plan(), 1);
        Ok(Progress::Done(Done { tensors, report }))
    }

    fn finish(&mut self) -> StageResult<()> {
        self.0.finish()
    }
}

/// The sink: it calls, or it lends the chunk to the caller.
pub(crate) struct PySink {
    pub(crate) adapter: Adapter,
    /// Takes chunks where the caller does.
    pub(crate) results: Option<Results>,
}

impl Sink<RxLease> for PySink {
    type Plan = Numbered;
    /// The number of the result that the caller has not given back.
    type Kept = (u64, Taken);

    fn take(
        &mut self,
        chunk: Chunk<'_, Numbered>,
        input: Option<&RxLease>,
    ) -> StageResult<Progress<Taken, Self::Kept>> {
        let (message, place) = (chunk.message, chunk.place);
        let made = self.adapter.attach("write", |this, py| {
            let layout = this.layouts.get(py, message.tensors())?;
            let memory = this.input(py, input)?;
            let at = (place.chunk.get(), place.lap, place.starts_epoch);
            this.call
                .call1(py, (memory, layout, at, note(py, message.note())))
        })?;
        let taken = Taken::of(message.plan(), 1);
        Ok(match &self.results {
            Some(results) => Progress::UnderWay((results.add(made), taken)),
            None => Progress::Done(taken),
        })
    }

    fn poll(&mut self, (number, taken): Self::Kept) -> StageResult<Progress<Taken, Self::Kept>> {
        let results = self.results.as_ref().ok_or_else(|| {
            StageError::new(
                FaultKind::Internal,
                "write",
                "a sink that calls keeps no chunk",
            )
        })?;
        Ok(match results.is_back(number) {
            true => Progress::Done(taken),
            false => Progress::UnderWay((number, taken)),
        })
    }

    fn finish(&mut self) -> StageResult<()> {
        self.adapter.finish()
    }
}
