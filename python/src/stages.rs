//! Source, stages and sink that are Python objects.

use pp_contract::{FaultKind, Manifest, Message, Plan, PlanError, StageSpec};
use pp_runtime::stage::{
    Built, Chunk, Done, Offer, Place as At, Progress, Sink, Source, Stage, StageError, StageResult,
    Taken,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::{Deserialize, Serialize};

use crate::error::Raised;
use crate::feed::Feed;
use crate::medium::{Medium, Place};
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

/// A Python object that works in one kind of memory, and what it knows of slots.
pub(crate) struct Adapter<M> {
    call: Py<PyAny>,
    finish: Option<Py<PyAny>>,
    known: Known,
    medium: M,
    raised: Raised,
}

#[derive(Default)]
struct Known {
    inputs: Slots,
    outputs: Slots,
    layouts: Layouts,
}

/// What a call gets: what was received and its layout, the slot that is sent, where the chunk stands, and its note.
type Given<'py> = (
    Option<Py<Memory>>,
    Py<Layout>,
    Option<Py<Memory>>,
    (u64, u16, bool),
    Option<Bound<'py, PyBytes>>,
);

impl<M: Medium> Adapter<M> {
    /// `object` has a method `call`, and perhaps one named `finish`.
    pub(crate) fn new(object: &Bound<'_, PyAny>, medium: M, raised: &Raised) -> PyResult<Self> {
        Ok(Self {
            call: object.getattr("call")?.unbind(),
            finish: object.getattr_opt("finish")?.map(Bound::unbind),
            known: Known::default(),
            medium,
            raised: raised.clone(),
        })
    }

    /// Calls the object on a chunk, with Python's lock. An exception is a fault of this rank.
    fn work<T>(
        &mut self,
        operation: &'static str,
        (message, at): (&Message<Numbered>, At),
        (input, output): (Option<&M::Rx>, Option<&mut M::Tx>),
        take: impl FnOnce(Python<'_>, Py<PyAny>) -> PyResult<T>,
    ) -> StageResult<T> {
        let Self {
            call,
            known,
            medium,
            raised,
            ..
        } = self;
        medium.work(input, output, |input, output| {
            Python::attach(|py| {
                let made = known.given(py, (message, at), (input, output));
                let made = made.and_then(|given| call.call1(py, given));
                made.and_then(|made| take(py, made))
                    .map_err(|error| raised.fault(py, operation, error))
            })
        })
    }

    fn finish(&mut self) -> StageResult<()> {
        let Some(finish) = &self.finish else {
            return Ok(());
        };
        Python::attach(|py| {
            let finished = finish.call0(py).map(drop);
            finished.map_err(|error| self.raised.fault(py, "finish", error))
        })
    }
}

impl Known {
    fn given<'py>(
        &mut self,
        py: Python<'py>,
        (message, at): (&Message<Numbered>, At),
        (input, output): (Option<Place>, Option<Place>),
    ) -> PyResult<Given<'py>> {
        let layout = self.layouts.get(py, message.tensors())?;
        let input = input.map(|place| self.inputs.get(py, place)).transpose()?;
        let output = output
            .map(|place| self.outputs.get(py, place))
            .transpose()?;
        let note = message.note();
        let note = (!note.is_empty()).then(|| PyBytes::new(py, note));
        let at = (at.chunk.get(), at.lap, at.starts_epoch);
        Ok((input, layout, output, at, note))
    }
}

/// The layout that a call has returned.
fn manifest(py: Python<'_>, made: &Py<PyAny>) -> PyResult<Manifest> {
    let made: Py<Layout> = made.extract(py)?;
    Ok(made.get().manifest.clone())
}

/// The source: it writes what the feed has into slots.
pub(crate) struct PySource<M> {
    pub(crate) feed: Feed,
    pub(crate) adapter: Adapter<M>,
}

impl<M: Medium> Source<M::Tx> for PySource<M> {
    type Plan = Numbered;
    type Carry = M::Mark;

    fn poll(&mut self) -> StageResult<Offer> {
        let raised = &self.adapter.raised;
        self.feed
            .offer()
            .map_err(|error| Python::attach(|py| raised.fault(py, "read", error)))
    }

    fn build(&mut self, at: At, slot: &mut M::Tx) -> StageResult<Built<Numbered, M::Mark>> {
        let number = at.chunk.get();
        let item = self.feed.take();
        let Adapter {
            call,
            known,
            medium,
            raised,
            ..
        } = &mut self.adapter;
        let (layout, note) = medium.work(None, Some(&mut *slot), |_, output| {
            Python::attach(|py| {
                let memory = output.map(|place| known.outputs.get(py, place)).transpose();
                let made = memory.and_then(|memory| call.call1(py, (item, memory, number)));
                let made = made.and_then(|made| {
                    let (layout, note): (Py<PyAny>, Vec<u8>) = made.extract(py)?;
                    Ok((manifest(py, &layout)?, note))
                });
                made.map_err(|error| raised.fault(py, "read", error))
            })
        })?;
        let mark = medium.mark(Some((slot, layout.payload_bytes())))?;
        Ok(Built {
            note,
            ..Built::new(Numbered(number), layout, mark)
        })
    }

    fn is_built(&mut self, mark: &mut M::Mark) -> StageResult<bool> {
        self.adapter.medium.is_done(mark)
    }

    fn queued(&self) -> u32 {
        self.feed.queued()
    }
}

impl<M> Drop for PySource<M> {
    fn drop(&mut self) {
        self.feed.close();
    }
}

/// A stage between source and sink.
pub(crate) struct PyStage<M>(pub(crate) Adapter<M>);

impl<M: Medium> Stage<M::Tx, M::Rx> for PyStage<M> {
    type Plan = Numbered;
    type Kept = (M::Mark, Done);

    fn run(
        &mut self,
        chunk: Chunk<'_, Numbered>,
        input: Option<&M::Rx>,
        output: &mut M::Tx,
    ) -> StageResult<Progress<Done, Self::Kept>> {
        let message = chunk.message;
        let slots = (input, Some(&mut *output));
        let tensors = self
            .0
            .work("run", (message, chunk.place), slots, |py, made| {
                manifest(py, &made)
            })?;
        let mark = self
            .0
            .medium
            .mark(Some((output, tensors.payload_bytes())))?;
        let report = Taken::of(message.plan(), 1);
        self.poll((mark, Done { tensors, report }))
    }

    fn poll(&mut self, (mark, done): Self::Kept) -> StageResult<Progress<Done, Self::Kept>> {
        Ok(match self.0.medium.is_done(&mark)? {
            true => Progress::Done(done),
            false => Progress::UnderWay((mark, done)),
        })
    }

    fn finish(&mut self) -> StageResult<()> {
        self.0.finish()
    }
}

/// The sink: it calls, or it lends the chunk to the caller.
pub(crate) struct PySink<M> {
    pub(crate) adapter: Adapter<M>,
    /// Takes chunks where the caller does.
    pub(crate) results: Option<Results>,
}

impl<M: Medium> Sink<M::Rx> for PySink<M> {
    type Plan = Numbered;
    /// The number of the result that the caller has not given back, and the work on it.
    type Kept = (Option<u64>, M::Mark, Taken);

    fn take(
        &mut self,
        chunk: Chunk<'_, Numbered>,
        input: Option<&M::Rx>,
    ) -> StageResult<Progress<Taken, Self::Kept>> {
        let made = self.adapter.work(
            "write",
            (chunk.message, chunk.place),
            (input, None),
            |_, made| Ok(made),
        )?;
        let mark = self.adapter.medium.mark(None)?;
        let number = self.results.as_ref().map(|results| results.add(made));
        self.poll((number, mark, Taken::of(chunk.message.plan(), 1)))
    }

    fn poll(
        &mut self,
        (number, mark, taken): Self::Kept,
    ) -> StageResult<Progress<Taken, Self::Kept>> {
        let is_back = match (number, &self.results) {
            (None, _) => true,
            (Some(number), Some(results)) => results.is_back(number),
            (Some(_), None) => {
                let what = "a sink that calls keeps no chunk";
                return Err(StageError::new(FaultKind::Internal, "write", what));
            }
        };
        Ok(match is_back && self.adapter.medium.is_done(&mark)? {
            true => Progress::Done(taken),
            false => Progress::UnderWay((number, mark, taken)),
        })
    }

    fn finish(&mut self) -> StageResult<()> {
        self.adapter.finish()
    }
}
