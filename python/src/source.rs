//! The source as a Python object, and what it sends after a rank was started again.
//!
//! Hazard: what a stage remembers of earlier chunks is lost with its rank. Guarantee: the first chunk that is sent then brings as
//! many chunks before it as all stages together must know, as they were sent. Each stage works on them first, the oldest first,
//! and hands on what it makes of them, so that its memory and those behind it are as they were.

use std::collections::{HashMap, VecDeque};

use pp_contract::{ChunkIndex, FaultKind, List, Manifest, Message, TensorSpec};
use pp_job::flow::Inlet;
use pp_runtime::stage::{
    Built, Offer, Place as At, RetainedPayloads, Source, StageError, StageResult, send_as_it_was,
};
use pp_transport::in_flight::Part;
use pyo3::prelude::*;

use crate::flow::Pushed;
use crate::medium::Medium;
use crate::stages::{Adapter, Numbered, manifest};

/// In front of the names of the tensors of a chunk before: with how many before, and a dot, it makes their names.
const PAST: &str = "past.";

/// The source: it writes what was pushed into slots.
pub(crate) struct PySource<M> {
    inlet: Inlet<Pushed, Py<PyAny>>,
    adapter: Adapter<M>,
    /// How many chunks each stream has had.
    counts: HashMap<u32, u64>,
    /// How often the end of a stream goes through a ring of steps.
    steps: u16,
    /// How many chunks before a chunk the stages must know.
    context: usize,
    /// The notes of the chunks that may be sent again, and of those before them. Empty if no stage must know any.
    notes: VecDeque<(u64, Vec<u8>)>,
}

/// What was written: the plan, the layout of the slot, and the note.
struct Written {
    plan: Numbered,
    layout: Manifest,
    note: Vec<u8>,
    /// When it was pushed.
    pushed_ns: u64,
}

impl<M: Medium> PySource<M> {
    /// A source of `(steps, context)`.
    pub(crate) fn new(
        inlet: Inlet<Pushed, Py<PyAny>>,
        adapter: Adapter<M>,
        (steps, context): (u16, u32),
    ) -> Self {
        Self {
            inlet,
            adapter,
            counts: HashMap::new(),
            steps,
            context: context as usize,
            notes: VecDeque::new(),
        }
    }

    /// Writes the chunk that is offered into the slot.
    fn write(&mut self, number: u64, slot: &mut M::Tx) -> StageResult<Written> {
        let taken = self.inlet.take().expect("it was offered");
        let (stream, pushed_ns) = (taken.stream, taken.pushed_ns);
        let Adapter {
            call,
            known,
            medium,
            raised,
            ..
        } = &mut self.adapter;
        let count = self.counts.entry(stream).or_default();
        let mut plan = Numbered {
            chunk: number,
            stream,
            index: *count,
            skipped: taken.skipped,
            ..Numbered::default()
        };
        *count += 1;
        let item = match taken.chunk {
            Pushed::Chunk(item, forgets) => {
                plan.forgets = forgets;
                item
            }
            Pushed::Raised(error) => {
                return Err(Python::attach(|py| raised.fault(py, "read", error)));
            }
            Pushed::End => {
                self.counts.remove(&stream);
                plan.ends = true;
                plan.steps = self.steps;
                return Ok(Written {
                    plan,
                    layout: Manifest::empty(),
                    note: Vec::new(),
                    pushed_ns,
                });
            }
        };
        let index = plan.index;
        let (layout, note, steps) = medium.work(None, Some(&mut *slot), |_, output| {
            Python::attach(|py| {
                let memory = output.map(|place| known.outputs.get(py, place)).transpose();
                let made = memory.and_then(|memory| call.call1(py, (item, memory, index)));
                let made = made.and_then(|made| {
                    let (layout, note, steps): (Py<PyAny>, Vec<u8>, u16) = made.extract(py)?;
                    Ok((manifest(py, &layout)?, note, steps))
                });
                made.map_err(|error| raised.fault(py, "read", error))
            })
        })?;
        plan.steps = steps;
        if self.context > 0 {
            self.notes.push_back((number, note.clone()));
        }
        Ok(Written {
            plan,
            layout,
            note,
            pushed_ns,
        })
    }

    /// Puts the chunks before this one behind its own tensors. Gives what lies in the slot then, and their notes.
    fn bring_past(
        &self,
        at: At,
        own: &Manifest,
        kept: &dyn RetainedPayloads<M::Tx>,
        slot: &mut M::Tx,
    ) -> StageResult<(Manifest, Vec<u8>)> {
        let (mut specs, mut notes) = (of_itself(own), Vec::new());
        let first = specs.len();
        let mut places = Vec::new();
        // Nothing from before its epoch may influence it.
        let most = if at.starts_epoch { 0 } else { self.context };
        for back in 1..=most {
            let Some(before) = kept.inputs(back) else {
                break;
            };
            for (from, spec) in before.iter().filter(|(_, spec)| is_own(spec)) {
                let name = format!("{PAST}{back}.{}", spec.name());
                specs.push(TensorSpec::new(&name, spec.dtype(), spec.shape().dims())?);
                places.push((back, from));
            }
            let number = at.chunk.get() - back as u64;
            let note = self.notes.iter().find(|(of, _)| *of == number);
            notes.extend(note.map_or(&[][..], |(_, note)| note));
            notes.push(b'\n');
        }
        let all = Manifest::new(&specs)?;
        for ((back, from), (to, spec)) in places.into_iter().zip(all.iter().skip(first)) {
            let bytes = spec.bytes();
            if bytes > 0 {
                kept.copy(back, &[Part { from, to, bytes }], slot)?;
            }
        }
        Ok((all, notes))
    }

    fn built(
        &self,
        written: Written,
        slot: &mut M::Tx,
    ) -> StageResult<Built<Numbered, (M::Mark, u32)>> {
        let Written {
            plan,
            layout,
            note,
            pushed_ns,
        } = written;
        let mark = (self.adapter.medium).mark(Some((slot, layout.payload_bytes())))?;
        let stream = plan.stream;
        Ok(Built {
            note,
            read_ns: Some((pushed_ns, pushed_ns)),
            skipped_frames: u32::try_from(plan.skipped).unwrap_or(u32::MAX),
            ..Built::new(plan, layout, (mark, stream))
        })
    }
}

/// Says whether it is a tensor of the chunk itself.
fn is_own(spec: &TensorSpec) -> bool {
    !spec.name().starts_with(PAST)
}

/// The tensors of the chunk itself, which lie in front.
fn of_itself(tensors: &Manifest) -> Vec<TensorSpec> {
    let own = tensors.iter().map(|(_, spec)| *spec);
    own.filter(is_own).collect()
}

/// The plan of a chunk that brings the notes of the chunks before.
fn bringing(plan: Numbered, past: Vec<u8>) -> StageResult<Numbered> {
    let past = List::new(past).map_err(|error| {
        let what = format!(
            "the notes of the chunks before chunk {}: {error}",
            plan.chunk
        );
        StageError::new(FaultKind::Internal, "read", what)
    })?;
    Ok(Numbered { past, ..plan })
}

impl<M: Medium> Source<M::Tx> for PySource<M> {
    type Plan = Numbered;
    /// The work on the chunk, and its stream.
    type Carry = (M::Mark, u32);

    fn poll(&mut self) -> StageResult<Offer> {
        Ok(self.inlet.offer())
    }

    fn build(&mut self, at: At, slot: &mut M::Tx) -> StageResult<Built<Numbered, Self::Carry>> {
        let written = self.write(at.chunk.get(), slot)?;
        self.built(written, slot)
    }

    fn build_anew(
        &mut self,
        at: At,
        kept: &dyn RetainedPayloads<M::Tx>,
        slot: &mut M::Tx,
    ) -> StageResult<Built<Numbered, Self::Carry>> {
        let mut written = self.write(at.chunk.get(), slot)?;
        let (layout, past) = self.bring_past(at, &written.layout, kept, slot)?;
        written.layout = layout;
        written.plan = bringing(written.plan, past)?;
        self.built(written, slot)
    }

    fn is_built(&mut self, (mark, _): &mut Self::Carry) -> StageResult<bool> {
        self.adapter.medium.is_done(mark)
    }

    fn rebuild(
        &mut self,
        at: At,
        sent: &Message<Numbered>,
        kept: &dyn RetainedPayloads<M::Tx>,
        slot: &mut M::Tx,
    ) -> StageResult<(Numbered, Manifest)> {
        let (plan, tensors) = send_as_it_was(sent, kept, slot)?;
        let (tensors, past) = self.bring_past(at, &tensors, kept, slot)?;
        Ok((bringing(plan, past)?, tensors))
    }

    fn accepted(
        &mut self,
        chunk: ChunkIndex,
        (_, stream): Self::Carry,
        note: Option<&[u8]>,
    ) -> StageResult<Option<u64>> {
        if note.is_none() {
            self.inlet.is_overtaken(stream);
        }
        let context = self.context as u64;
        let is_old = |(of, _): &mut (u64, Vec<u8>)| *of + context <= chunk.get();
        while self.notes.pop_front_if(is_old).is_some() {}
        Ok(None)
    }

    fn queued(&self) -> u32 {
        self.inlet.queued()
    }

    fn drop_late(&mut self, before_ns: u64) -> StageResult<u64> {
        Ok(self.inlet.drop_late(before_ns))
    }

    fn oldest_ns(&self) -> Option<u64> {
        self.inlet.oldest_ns()
    }
}
