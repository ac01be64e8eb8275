//! Source, stages and sink that are Python objects.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use pp_contract::{ChunkIndex, Manifest, Message, Plan, PlanError, StageSpec};
use pp_job::flow::{Inlet, Outlet};
use pp_runtime::stage::{
    Built, Chunk, Done, Offer, Place as At, Progress, Sink, Source, Stage, StageResult, Taken,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::{Deserialize, Serialize};

use crate::error::Raised;
use crate::flow::{Lent, Pushed};
use crate::medium::{Medium, Place};
use crate::memory::{Layout, Layouts, Memory, Slots};

/// The plan of a chunk: which one it is. What else the stages must know is in the note.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Numbered {
    /// Its number in the job, from 0.
    chunk: u64,
    stream: u32,
    /// Its number in its stream, from 0.
    index: u64,
    /// Stages forget what they know of its stream.
    forgets: bool,
    /// It is the end of its stream, and has no tensors.
    ends: bool,
}

impl Plan for Numbered {
    const NAME: &'static str = "python";
    const VERSION: u16 = 2;
    type Parts = Self;

    fn from_parts(parts: Self) -> Result<Self, PlanError> {
        Ok(parts)
    }

    fn parts(&self) -> &Self {
        self
    }

    fn start_frame(&self) -> u64 {
        self.chunk
    }

    /// What a stage makes is for its own `outputs` to say.
    fn check(&self, _: &StageSpec, _: bool, _: &Manifest) -> Result<(), PlanError> {
        Ok(())
    }
}

/// A Python object that works in one kind of memory, and what it knows of slots.
pub(crate) struct Adapter<M> {
    call: Py<PyAny>,
    ends: Option<Py<PyAny>>,
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
    /// The laps and streams of which the stage has had a chunk since it was to forget all.
    begun: HashSet<(u16, u32)>,
}

/// What a call gets: what was received and its layout, the slot that is sent, where the chunk stands (its number in its stream, its
/// lap, whether the stage forgets, its stream), and its note.
type Given<'py> = (
    Option<Py<Memory>>,
    Py<Layout>,
    Option<Py<Memory>>,
    (u64, u16, bool, u32),
    Option<Bound<'py, PyBytes>>,
);

impl<M: Medium> Adapter<M> {
    /// `object` has a method `call`, and perhaps `ends` of a stream and `finish`.
    pub(crate) fn new(object: &Bound<'_, PyAny>, medium: M, raised: &Raised) -> PyResult<Self> {
        Ok(Self {
            call: object.getattr("call")?.unbind(),
            ends: object.getattr_opt("ends")?.map(Bound::unbind),
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

    /// Says that the stream of this chunk has ended.
    fn ends(&mut self, plan: &Numbered) -> StageResult<()> {
        self.known
            .begun
            .retain(|(_, stream)| *stream != plan.stream);
        let Some(ends) = &self.ends else {
            return Ok(());
        };
        Python::attach(|py| {
            let ended = ends.call1(py, (plan.stream,)).map(drop);
            ended.map_err(|error| self.raised.fault(py, "end_stream", error))
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
        let plan = message.plan();
        let at = (plan.index, at.lap, self.forgets(at, plan), plan.stream);
        Ok((input, layout, output, at, note))
    }
}

impl Known {
    /// Says whether the stage is to forget what it knows of the stream of this chunk.
    fn forgets(&mut self, at: At, plan: &Numbered) -> bool {
        let Numbered {
            stream, forgets, ..
        } = *plan;
        if at.starts_epoch {
            self.begun.retain(|(lap, _)| *lap != at.lap);
        }
        self.begun.insert((at.lap, stream)) || forgets
    }
}

/// The layout that a call has returned.
fn manifest(py: Python<'_>, made: &Py<PyAny>) -> PyResult<Manifest> {
    let made: Py<Layout> = made.extract(py)?;
    Ok(made.get().manifest.clone())
}

/// The source: it writes what was pushed into slots.
pub(crate) struct PySource<M> {
    inlet: Inlet<Pushed, Py<PyAny>>,
    adapter: Adapter<M>,
    /// How many chunks each stream has had.
    counts: HashMap<u32, u64>,
}

impl<M> PySource<M> {
    pub(crate) fn new(inlet: Inlet<Pushed, Py<PyAny>>, adapter: Adapter<M>) -> Self {
        Self {
            inlet,
            adapter,
            counts: HashMap::new(),
        }
    }
}

impl<M: Medium> Source<M::Tx> for PySource<M> {
    type Plan = Numbered;
    /// The work on the chunk, and its stream.
    type Carry = (M::Mark, u32);

    fn poll(&mut self) -> StageResult<Offer> {
        Ok(self.inlet.offer())
    }

    fn build(&mut self, at: At, slot: &mut M::Tx) -> StageResult<Built<Numbered, Self::Carry>> {
        let (stream, pushed) = self.inlet.take().expect("it was offered");
        let Adapter {
            call,
            known,
            medium,
            raised,
            ..
        } = &mut self.adapter;
        let count = self.counts.entry(stream).or_default();
        let mut plan = Numbered {
            chunk: at.chunk.get(),
            stream,
            index: *count,
            forgets: false,
            ends: false,
        };
        *count += 1;
        let (item, forgets) = match pushed {
            Pushed::Chunk(item, forgets) => (item, forgets),
            Pushed::Raised(error) => {
                return Err(Python::attach(|py| raised.fault(py, "read", error)));
            }
            Pushed::End => {
                self.counts.remove(&stream);
                plan.ends = true;
                let mark = medium.mark(Some((slot, 0)))?;
                return Ok(Built::new(plan, Manifest::empty(), (mark, stream)));
            }
        };
        plan.forgets = forgets;
        let (layout, note) = medium.work(None, Some(&mut *slot), |_, output| {
            Python::attach(|py| {
                let memory = output.map(|place| known.outputs.get(py, place)).transpose();
                let made = memory.and_then(|memory| call.call1(py, (item, memory, plan.index)));
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
            ..Built::new(plan, layout, (mark, stream))
        })
    }

    fn is_built(&mut self, (mark, _): &mut Self::Carry) -> StageResult<bool> {
        self.adapter.medium.is_done(mark)
    }

    fn accepted(
        &mut self,
        _: ChunkIndex,
        (_, stream): Self::Carry,
        note: Option<&[u8]>,
    ) -> StageResult<Option<u64>> {
        if note.is_none() {
            self.inlet.is_overtaken(stream);
        }
        Ok(None)
    }

    fn queued(&self) -> u32 {
        self.inlet.queued()
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
        let tensors = if message.plan().ends {
            self.0.ends(message.plan())?;
            Manifest::empty()
        } else {
            let slots = (input, Some(&mut *output));
            let take = |py: Python<'_>, made| manifest(py, &made);
            self.0.work("run", (message, chunk.place), slots, take)?
        };
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

/// The sink: it calls, or the caller pulls.
pub(crate) struct PySink<M> {
    pub(crate) adapter: Adapter<M>,
    /// Where results go that the caller pulls.
    pub(crate) results: Option<Outlet<Pushed, Py<PyAny>>>,
    /// Where the caller is lent each result.
    pub(crate) lent: Option<Arc<Lent>>,
    pub(crate) lent_so_far: u64,
}

impl<M: Medium> Sink<M::Rx> for PySink<M> {
    type Plan = Numbered;
    /// The number of the result that the caller has not given back, and the work on it.
    type Kept = (u64, M::Mark, Taken);

    fn take(
        &mut self,
        chunk: Chunk<'_, Numbered>,
        input: Option<&M::Rx>,
    ) -> StageResult<Progress<Taken, Self::Kept>> {
        let plan = *chunk.message.plan();
        let result = if plan.ends {
            self.adapter.ends(&plan)?;
            None
        } else {
            let message = (chunk.message, chunk.place);
            let slots = (input, None);
            Some(
                self.adapter
                    .work("write", message, slots, |_, made| Ok(made))?,
            )
        };
        let mark = self.adapter.medium.mark(None)?;
        self.lent_so_far += u64::from(result.is_some());
        if let Some(results) = &self.results {
            results.give(plan.stream, result);
        }
        self.poll((self.lent_so_far, mark, Taken::of(&plan, 1)))
    }

    fn poll(
        &mut self,
        (number, mark, taken): Self::Kept,
    ) -> StageResult<Progress<Taken, Self::Kept>> {
        let mut lent = self.lent.iter();
        let is_back = lent.all(|lent| lent.is_back(number));
        Ok(match is_back && self.adapter.medium.is_done(&mark)? {
            true => Progress::Done(taken),
            false => Progress::UnderWay((number, mark, taken)),
        })
    }

    fn finish(&mut self) -> StageResult<()> {
        self.adapter.finish()
    }
}
