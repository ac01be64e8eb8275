//! Source, stages and sink that are Python objects.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use pp_contract::pipeline::Laps;
use pp_contract::{
    ChunkIndex, List, MAX_NOTE_BYTES, Manifest, Message, Plan, PlanError, StageSpec,
};
use pp_job::flow::Outlet;
use pp_runtime::stage::{
    Chunk, Done, GroupStage, Place as At, Progress, Sink, Stage, StageError, StageResult, Taken,
};
use pp_transport::bell::Bell;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use serde::{Deserialize, Serialize};

use crate::error::Raised;
use crate::flow::{Hold, Lent, Pushed};
use crate::group::Member;
use crate::medium::{Medium, Place};
use crate::memory::{Layout, Layouts, Memory, Slots};

/// The plan of a chunk: which one it is. What else the stages must know is in its note.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Numbered {
    /// Its number in the job, from 0.
    pub(crate) chunk: u64,
    pub(crate) stream: u32,
    /// Its number in its stream, from 0.
    pub(crate) index: u64,
    /// How many chunks of its stream were dropped right before it.
    pub(crate) skipped: u64,
    /// Stages forget what they know of its stream.
    pub(crate) forgets: bool,
    /// It is the end of its stream, and has no tensors.
    pub(crate) ends: bool,
    /// How often it goes through a ring of steps.
    pub(crate) steps: u16,
    /// The notes of the chunks before that it brings along, the nearest first, each with a line end behind it.
    pub(crate) past: List<u8, MAX_NOTE_BYTES>,
}

impl Plan for Numbered {
    const NAME: &'static str = "python";
    const VERSION: u16 = 3;
    type Parts = Self;

    fn from_parts(parts: Self) -> Result<Self, PlanError> {
        Ok(parts)
    }

    fn parts(&self) -> &Self {
        self
    }

    fn steps(&self) -> u16 {
        self.steps
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
    pub(crate) call: Py<PyAny>,
    ends: Option<Py<PyAny>>,
    later: Option<Py<PyAny>>,
    finish: Option<Py<PyAny>>,
    /// What a call makes goes on once its work is issued. Whoever reads it is ordered behind that work.
    is_ahead: bool,
    pub(crate) known: Known,
    pub(crate) medium: M,
    pub(crate) raised: Raised,
    /// How often a chunk goes through the ring of the stage, if it stands in one.
    laps: Option<Laps>,
}

#[derive(Default)]
pub(crate) struct Known {
    inputs: Slots,
    pub(crate) outputs: Slots,
    layouts: Layouts,
    /// The laps and streams of which the stage has had a chunk since it was to forget all.
    begun: HashSet<(u16, u32)>,
}

/// What a call gets: what was received and its layout, the slot that is sent, where the chunk stands (its number in its stream, its
/// lap, its laps, whether the stage forgets, its stream, and how many were dropped before it), its note, and those of the chunks before that it brings along.
type Given<'py> = (
    Option<Py<Memory>>,
    Py<Layout>,
    Option<Py<Memory>>,
    (u64, u16, u16, bool, u32, u64),
    [Option<Bound<'py, PyBytes>>; 2],
);

impl<M: Medium> Adapter<M> {
    /// `object` has a method `call`, and perhaps `ends` of a stream, `later`, `finish` and `is_ahead`.
    pub(crate) fn new(object: &Bound<'_, PyAny>, medium: M, raised: &Raised) -> PyResult<Self> {
        Ok(Self {
            call: object.getattr("call")?.unbind(),
            ends: object.getattr_opt("ends")?.map(Bound::unbind),
            later: object.getattr_opt("later")?.map(Bound::unbind),
            finish: object.getattr_opt("finish")?.map(Bound::unbind),
            is_ahead: matches!(object.getattr_opt("is_ahead")?, Some(is) if is.extract()?),
            known: Known::default(),
            medium,
            raised: raised.clone(),
            laps: None,
        })
    }

    /// The adapter of a stage of a ring.
    pub(crate) fn in_ring(mut self, laps: Option<Laps>) -> Self {
        self.laps = laps;
        self
    }

    /// Calls the object on a chunk, with Python's lock. An exception is a fault of this rank.
    fn work<T>(
        &mut self,
        operation: &'static str,
        (message, at): (&Message<Numbered>, At),
        (input, output): (Option<&M::Rx>, Option<&mut M::Tx>),
        take: impl FnOnce(Python<'_>, Py<PyAny>) -> PyResult<T>,
    ) -> StageResult<T> {
        let laps = self.laps_of(message.plan());
        let Self {
            call,
            known,
            medium,
            raised,
            ..
        } = self;
        medium.work(input, output, |input, output| {
            Python::attach(|py| {
                let made = known.given(py, (message, at, laps), (input, output));
                let made = made.and_then(|given| call.call1(py, given));
                made.and_then(|made| take(py, made))
                    .map_err(|error| raised.fault(py, operation, error))
            })
        })
    }

    /// Lets a stage work on a chunk, or hear that its stream has ended. Gives what it made.
    fn run(
        &mut self,
        (message, at): (&Message<Numbered>, At),
        slots: (Option<&M::Rx>, Option<&mut M::Tx>),
    ) -> StageResult<Manifest> {
        if message.plan().ends {
            return self
                .ends(message.plan(), at.lap)
                .map(|()| Manifest::empty());
        }
        self.work("run", (message, at), slots, |py, made| manifest(py, &made))
    }

    /// How often a chunk goes through the stage.
    fn laps_of(&self, plan: &Numbered) -> u16 {
        match self.laps {
            None => 1,
            Some(Laps::Fixed(laps)) => laps,
            Some(Laps::Steps) => plan.steps.max(1),
        }
    }

    /// Says that the stream of this chunk has ended, once it comes for the last time.
    fn ends(&mut self, plan: &Numbered, lap: u16) -> StageResult<()> {
        let of = |known: &(u16, u32)| *known != (lap, plan.stream);
        self.known.begun.retain(of);
        let Some(ends) = &self.ends else {
            return Ok(());
        };
        if lap + 1 < self.laps_of(plan) {
            return Ok(());
        }
        Python::attach(|py| {
            let ended = ends.call1(py, (plan.stream,)).map(drop);
            ended.map_err(|error| self.raised.fault(py, "end_stream", error))
        })
    }

    /// Does what was put off of a chunk.
    fn later(&mut self, chunk: ChunkIndex) -> StageResult<()> {
        Python::attach(|py| {
            let later = self
                .later
                .as_ref()
                .map(|later| later.call1(py, (chunk.get(),)));
            let done = later.transpose().map(drop);
            done.map_err(|error| self.raised.fault(py, "run", error))
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
        (message, at, laps): (&Message<Numbered>, At, u16),
        (input, output): (Option<Place>, Option<Place>),
    ) -> PyResult<Given<'py>> {
        let layout = self.layouts.get(py, message.tensors())?;
        let input = input.map(|place| self.inputs.get(py, place)).transpose()?;
        let output = output
            .map(|place| self.outputs.get(py, place))
            .transpose()?;
        let notes = [message.note(), &message.plan().past];
        let notes = notes.map(|note| (!note.is_empty()).then(|| PyBytes::new(py, note)));
        let plan = message.plan();
        let at = (
            plan.index,
            at.lap,
            laps,
            self.forgets(at, plan),
            plan.stream,
            plan.skipped,
        );
        Ok((input, layout, output, at, notes))
    }

    /// Says whether the stage is to forget what it knows of the stream of this chunk.
    fn forgets(&mut self, at: At, plan: &Numbered) -> bool {
        if at.starts_epoch {
            self.begun.retain(|(lap, _)| *lap != at.lap);
        }
        self.begun.insert((at.lap, plan.stream)) || plan.forgets
    }
}

/// The layout that a call has returned.
pub(crate) fn manifest(py: Python<'_>, made: &Py<PyAny>) -> PyResult<Manifest> {
    let made: Py<Layout> = made.extract(py)?;
    Ok(made.get().manifest.clone())
}

/// A stage between source and sink.
pub(crate) struct PyStage<M: Medium> {
    pub(crate) adapter: Adapter<M>,
    /// The work on results that have gone on, the oldest first.
    pub(crate) ahead: VecDeque<(ChunkIndex, M::Mark)>,
}

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
        let tensors = self.adapter.run((message, chunk.place), slots)?;
        let report = Taken::of(message.plan(), 1);
        let done = Done { tensors, report };
        if self.adapter.is_ahead && M::may_lead(output) {
            let mark = self.adapter.medium.mark(None)?;
            self.ahead.push_back((chunk.place.chunk, mark));
            return Ok(Progress::Done(done));
        }
        let bytes = done.tensors.payload_bytes();
        let mark = self.adapter.medium.mark(Some((output, bytes)))?;
        self.poll((mark, done))
    }

    fn poll(&mut self, oldest: Self::Kept) -> StageResult<Progress<Done, Self::Kept>> {
        self.adapter.medium.ask(oldest)
    }

    fn ahead(&mut self) -> Option<(ChunkIndex, StageResult<bool>)> {
        let (chunk, mark) = self.ahead.front()?;
        let said = (*chunk, self.adapter.medium.is_done(mark));
        if let (_, Ok(true)) = said {
            self.ahead.pop_front();
        }
        Some(said)
    }

    fn later(&mut self, chunk: ChunkIndex) -> StageResult<()> {
        self.adapter.later(chunk)
    }

    fn finish(&mut self) -> StageResult<()> {
        self.adapter.finish()
    }
}

/// One member of a group that runs a stage. Its leader alone has slots.
pub(crate) struct PyMember<M> {
    pub(crate) adapter: Adapter<M>,
    pub(crate) member: Py<Member>,
}

impl<M: Medium> GroupStage<M::Tx, M::Rx, M::Group> for PyMember<M> {
    type Plan = Numbered;
    type Kept = (M::Mark, Done);

    fn run(
        &mut self,
        chunk: Chunk<'_, Numbered>,
        input: Option<&M::Rx>,
        mut output: Option<&mut M::Tx>,
        group: &mut M::Group,
    ) -> StageResult<Progress<Done, Self::Kept>> {
        let message = chunk.message;
        let medium = self.adapter.medium.clone();
        let (made, failed) = self.member.get().lend((&medium, group), || {
            let slots = (input, output.as_deref_mut());
            let at = (message, chunk.place);
            self.adapter.run(at, slots)
        });
        // Python has only the text of it, and may have caught that: another rank may be the cause.
        let tensors = failed.map_or(made, |error| Err(StageError::from(error)))?;
        let slot = output.map(|output| (output, tensors.payload_bytes()));
        let mark = medium.mark(slot)?;
        let report = Taken::of(message.plan(), 1);
        self.poll((mark, Done { tensors, report }))
    }

    fn poll(&mut self, oldest: Self::Kept) -> StageResult<Progress<Done, Self::Kept>> {
        self.adapter.medium.ask(oldest)
    }

    fn finish(&mut self) -> StageResult<()> {
        self.adapter.finish()
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
    /// Rings when a chunk that is kept is released.
    pub(crate) bell: Bell,
}

/// Who has a chunk that the sink has taken.
pub(crate) enum Holder {
    Nobody,
    /// The caller has the result with this number.
    Caller(u64),
    /// The program has kept it.
    Program(Py<Hold>),
}

impl<M: Medium> Sink<M::Rx> for PySink<M> {
    type Plan = Numbered;
    /// Who has the chunk, and the work on it.
    type Kept = (Holder, M::Mark, Taken);

    fn take(
        &mut self,
        chunk: Chunk<'_, Numbered>,
        input: Option<&M::Rx>,
    ) -> StageResult<Progress<Taken, Self::Kept>> {
        let plan = chunk.message.plan();
        let mut holder = Holder::Nobody;
        let mut result = None;
        if plan.ends {
            self.adapter.ends(plan, 0)?;
        } else {
            let at = (chunk.message, chunk.place);
            let (bell, is_pulled) = (&self.bell, self.results.is_some());
            let made = self.adapter.work("write", at, (input, None), |py, made| {
                if !is_pulled && !made.is_none(py) {
                    let hold: Py<Hold> = made.extract(py)?;
                    hold.get().rings(bell.clone());
                    holder = Holder::Program(hold);
                }
                Ok(made)
            })?;
            result = Some(made);
        }
        let mark = self.adapter.medium.mark(None)?;
        if self.lent.is_some() && result.is_some() {
            self.lent_so_far += 1;
            holder = Holder::Caller(self.lent_so_far);
        }
        if let Some(results) = &self.results {
            results.give(plan.stream, result);
        }
        self.poll((holder, mark, Taken::of(plan, 1)))
    }

    fn poll(
        &mut self,
        (holder, mark, taken): Self::Kept,
    ) -> StageResult<Progress<Taken, Self::Kept>> {
        let is_back = match (&holder, &self.lent) {
            (Holder::Caller(number), Some(lent)) => lent.is_back(*number),
            (Holder::Program(hold), _) => hold.get().is_released(),
            (Holder::Caller(_), None) | (Holder::Nobody, _) => true,
        };
        Ok(match is_back && self.adapter.medium.is_done(&mark)? {
            true => Progress::Done(taken),
            false => Progress::UnderWay((holder, mark, taken)),
        })
    }

    fn finish(&mut self) -> StageResult<()> {
        self.adapter.finish()
    }
}
