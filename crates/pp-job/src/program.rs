//! What a program brings: its stages by name, and what happens at the end.

use std::convert::Infallible;
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;
use std::time::Duration;

use pp_contract::{Pipeline, Plan, StageSpec};
use pp_runtime::core::Late;
use pp_runtime::driver::{BoxedStage, Summary};
use pp_runtime::report::{
    Measures, Training, View, default_warm_up, write_chrome_trace, write_json, write_svg,
};
use pp_runtime::stage::{Built, GroupStage, Offer, Place, Sink, Source, Stage, StageResult};
use pp_transport::bell::Bell;
use pp_transport::edge::Edges;
use serde::Serialize;

use crate::error::Error;
use crate::output::{OutputError, write_file};
use crate::shared::SharedDevice;

/// Holds what rank 0 has once the source is open.
#[derive(Debug)]
pub struct Opened<S, T> {
    /// The source.
    pub source: S,
    /// How many earlier chunks a stage must know before it can begin with a chunk. If the job may restart, their
    /// payloads stay in slots behind the source.
    pub context_chunks: u32,
    /// How often a chunk goes through a ring that is walked once for each step.
    pub steps: u16,
    /// What the stages must know of the input before they are opened. Each rank is told.
    pub shape: T,
    /// What happens to chunks that come faster than they can be worked on.
    pub late: Late,
    /// The most time from when the first frame of a chunk is there until the sink has the chunk. With [`Late::Drop`] chunks
    /// that would be later are dropped before they are built; in any case the report says how many were later. A time below
    /// the latency of an empty pipeline ends the job with [`FaultKind::Usage`](pp_contract::FaultKind::Usage).
    pub max_latency: Option<Duration>,
    /// The fewest and the most denoising steps that [`Place::steps`] may ask for of a chunk; `None` where they do not vary.
    pub steps_range: Option<(u16, u16)>,
}

impl<S> Opened<S, ()> {
    /// A source whose stages must know nothing ahead, and no chunk before the one that they begin with.
    pub fn new(source: S) -> Self {
        Self {
            source,
            context_chunks: 0,
            steps: 1,
            shape: (),
            late: Late::Block,
            max_latency: None,
            steps_range: None,
        }
    }
}

/// Stands in for the source in a [`Program::between`]. There is no value of this type.
#[derive(Debug)]
pub struct Elsewhere<P>(Infallible, PhantomData<P>);

impl<P: Plan, Tx> Source<Tx> for Elsewhere<P> {
    type Plan = P;
    type Carry = ();

    fn poll(&mut self) -> StageResult<Offer> {
        match self.0 {}
    }

    fn build(&mut self, _: Place, _: &mut Tx) -> StageResult<Built<P, ()>> {
        match self.0 {}
    }
}

type OpenSource<'p, S, T> = Box<dyn FnOnce(Bell) -> Result<Opened<S, T>, Error> + 'p>;
type OpenStage<'p, B, P, T> =
    Box<dyn FnMut((&StageSpec, usize), &T, &Bell) -> Result<StageOf<'p, B, P>, Error> + 'p>;

/// How a stage behind the source is opened.
struct Named<'p, B: Edges, P, T> {
    name: String,
    /// Where several ranks run it, or where one does.
    is_of_group: bool,
    open: OpenStage<'p, B, P, T>,
}

type SlotBytes<'p, T> = Box<dyn Fn([&StageSpec; 2], &T) -> u64 + 'p>;
type Finish<'p, S> = Box<dyn FnOnce(S, Finished) -> Result<(), Error> + 'p>;

/// A stage of any type, for the leases of a backend.
pub(crate) type StageOf<'p, B, P> =
    BoxedStage<'p, <B as Edges>::Tx, <B as Edges>::Rx, <B as Edges>::Group, P>;

/// The stages of a program by name, and what it does at the end. Each closure is called on the ranks where its stage
/// stands, and on no other: no rank opens the files or loads the weights of another.
///
/// `B` makes the edges, `S` is the source, and `T` is what the source says of its input.
pub struct Program<'p, B: Edges, S: Source<B::Tx>, T> {
    first: String,
    pub(crate) source: OpenSource<'p, S, T>,
    slot_bytes: SlotBytes<'p, T>,
    stages: Vec<Named<'p, B, S::Plan, T>>,
    last: String,
    pub(crate) finish: Finish<'p, S>,
}

impl<'p, B, S, T> Program<'p, B, S, T>
where
    B: Edges,
    S: Source<B::Tx>,
    S::Plan: 'p,
{
    /// A program whose pipelines begin with this source. `open` is called once, on rank 0. Another thread rings the bell
    /// when a source that had nothing has a chunk.
    pub fn new(source: &str, open: impl FnOnce(Bell) -> Result<Opened<S, T>, Error> + 'p) -> Self {
        Self {
            first: source.to_owned(),
            source: Box::new(open),
            slot_bytes: Box::new(|_, _| 0),
            stages: Vec::new(),
            last: String::new(),
            finish: Box::new(|_, _| Ok(())),
        }
    }

    /// Gives the bytes of the largest payload that the first of two stages makes for the second one, 1 or more. The last
    /// stage of a ring makes payloads for two stages. Both ranks of an edge ask, and must get the same number.
    ///
    /// A stage whose payload is larger ends the job with [`FaultKind::Usage`](pp_contract::FaultKind::Usage) and both sizes;
    /// [`first_bytes`](pp_runtime::stage::first_bytes) says so before it is written.
    /// A rank without this, or with a number of 0, ends the job with [`Error::Usage`] before the first chunk.
    #[must_use]
    pub fn payloads(mut self, bytes: impl Fn([&StageSpec; 2], &T) -> u64 + 'p) -> Self {
        self.slot_bytes = Box::new(bytes);
        self
    }

    /// A stage. `open` is called once for each part of it that stands on this rank.
    #[must_use]
    pub fn stage<K>(
        mut self,
        name: &str,
        mut open: impl FnMut(&StageSpec, &T) -> Result<K, Error> + 'p,
    ) -> Self
    where
        K: Stage<B::Tx, B::Rx, Plan = S::Plan, Kept: 'p> + 'p,
    {
        let open = move |(part, _): (&StageSpec, usize), shape: &T, _: &Bell| {
            open(part, shape).map(BoxedStage::new)
        };
        self.push(name, false, Box::new(open));
        self
    }

    /// A stage that a group of ranks runs together. `open` is called on each member once for each part of the stage, with
    /// the member's place in [`StageSpec::ranks`]; 0 leads. A stage that is added by [`Program::stage`] too may stand on
    /// one rank or on several.
    #[must_use]
    pub fn group_stage<K>(
        mut self,
        name: &str,
        mut open: impl FnMut(&StageSpec, usize, &T) -> Result<K, Error> + 'p,
    ) -> Self
    where
        K: GroupStage<B::Tx, B::Rx, B::Group, Plan = S::Plan, Kept: 'p> + 'p,
    {
        let open = move |(part, member): (&StageSpec, usize), shape: &T, _: &Bell| {
            open(part, member, shape).map(BoxedStage::member)
        };
        self.push(name, true, Box::new(open));
        self
    }

    fn push(&mut self, name: &str, is_of_group: bool, open: OpenStage<'p, B, S::Plan, T>) {
        self.stages.push(Named {
            name: name.to_owned(),
            is_of_group,
            open,
        });
    }

    /// The sink. `open` is called once, on its rank. Another thread rings the bell when a sink that was not ready is.
    #[must_use]
    pub fn sink<K>(
        mut self,
        name: &str,
        open: impl FnOnce(&T, Bell) -> Result<K, Error> + 'p,
    ) -> Self
    where
        K: Sink<B::Rx, Plan = S::Plan, Kept: 'p> + 'p,
    {
        let mut open = Some(open);
        let open = move |_: (&StageSpec, usize), shape: &T, bell: &Bell| {
            let open = open.take().expect("a pipeline has one sink");
            open(shape, bell.clone()).map(BoxedStage::sink)
        };
        self.last = name.to_owned();
        self.push(name, false, Box::new(open));
        self
    }

    /// Sets what rank 0 does when everything was taken and stored: it stores and prints the results.
    #[must_use]
    pub fn finish(mut self, act: impl FnOnce(S, Finished) -> Result<(), Error> + 'p) -> Self {
        self.finish = Box::new(act);
        self
    }

    /// Says whether this program can run the pipeline. Call it before [`crate::Job::run`], so that a wrong pipeline is refused
    /// before any rank is started.
    ///
    /// # Errors
    /// [`Error::Usage`] names the stage that does not exist, or stands in the wrong place.
    pub fn check(&self, pipeline: &Pipeline) -> Result<(), Error> {
        let stages = pipeline.stages();
        let (first, last) = (&stages[0], &stages[stages.len() - 1]);
        let refuse = |what: String| Err(Error::Usage(format!("pipeline {pipeline}: {what}")));
        if *first.name != *self.first {
            let (has, wanted) = (&first.name, &self.first);
            return refuse(format!(
                "it begins with {has}; begin it with the source, {wanted}"
            ));
        }
        if *last.name != *self.last {
            let (has, wanted) = (&last.name, &self.last);
            return refuse(format!(
                "it ends with {has}; end it with the sink, {wanted}"
            ));
        }
        for stage in &stages[1..stages.len() - 1] {
            let name = &stage.name;
            let between = self.stages.iter().filter(|known| known.name != self.last);
            let mut ways = between.clone().filter(|known| *known.name == **name);
            if ways.clone().next().is_none() {
                let mut all: Vec<&str> = between.map(|known| known.name.as_str()).collect();
                all.dedup();
                let all = all.join(", ");
                return refuse(format!(
                    "there is no stage {name} between source and sink; there is {all}"
                ));
            }
            let is_group = stage.ranks.len() > 1;
            if ways.all(|known| known.is_of_group != is_group) {
                return refuse(match is_group {
                    true => format!("{name} cannot be run by a group of ranks; give it one rank"),
                    false => format!(
                        "{name} is run by a group of ranks; give it two or more, such as @1+2"
                    ),
                });
            }
        }
        Ok(())
    }

    /// The bytes of a slot between two stages, by their places.
    pub(crate) fn slot_bytes(&self, pipeline: &Pipeline, between: [usize; 2], shape: &T) -> u64 {
        (self.slot_bytes)(between.map(|at| &pipeline.stages()[at]), shape)
    }

    /// Opens a stage behind the source, for the member of its group with this place.
    pub(crate) fn open(
        &mut self,
        (stage, member): (&StageSpec, usize),
        shape: &T,
        bell: &Bell,
    ) -> Result<StageOf<'p, B, S::Plan>, Error> {
        let is_group = stage.ranks.len() > 1;
        let is_it = |known: &&mut Named<'p, B, S::Plan, T>| {
            *known.name == *stage.name && known.is_of_group == is_group
        };
        // What was added last counts: in a program between others it takes the place of a refusal.
        let known = self.stages.iter_mut().rev().find(is_it);
        let known = known.expect("the pipeline was checked");
        (known.open)((stage, member), shape, bell)
    }
}

impl<'p, B: Edges, P: Plan + 'p, T> Program<'p, B, Elsewhere<P>, T> {
    /// Makes a program for ranks whose kind of memory is another one than that of the source and the sink, such as ranks on GPUs
    /// beside a source on a CPU. Add each stage that works in this memory with [`Program::stage`]. `elsewhere` names the other
    /// stages between source and sink, which stand on other ranks. A rank takes its program by [`crate::ThisRank::device`]. All
    /// programs of a job have the same plan, the same `T` and the same [`Program::payloads`]. The types must be named:
    /// `Program::<_, Elsewhere<MyPlan>, ()>::between("read", &["decode"], "write")`.
    ///
    /// A rank on which the source, the sink or a stage of `elsewhere` stands ends the job with [`Error::Usage`].
    #[must_use]
    pub fn between(source: &str, elsewhere: &[&str], sink: &str) -> Self {
        let named = source.to_owned();
        let mut program = Self::new(source, move |_| Err(not_here(&named)));
        sink.clone_into(&mut program.last);
        for name in elsewhere.iter().chain([&sink]) {
            for is_of_group in [false, true] {
                let refuse = Box::new(|(stage, _): (&StageSpec, usize), _: &T, _: &Bell| {
                    Err(not_here(&stage.name))
                });
                program.push(name, is_of_group, refuse);
            }
        }
        program
    }
}

/// The error of a stage on a rank whose memory it does not work in.
fn not_here(stage: &str) -> Error {
    Error::Usage(format!(
        "the program has no stage {stage} for the device of its rank; let the pipeline put it on another rank, or name another \
         device for this one (Job::devices)"
    ))
}

impl<B: Edges, S: Source<B::Tx>, T> fmt::Debug for Program<'_, B, S, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.stages.iter().map(|known| &*known.name).collect();
        let mut program = f.debug_struct("Program");
        program.field("source", &self.first);
        program.field("stages", &names).finish()
    }
}

/// A job that came to its end, as rank 0 knows it.
#[derive(Debug)]
pub struct Finished {
    /// The pipeline that was run.
    pub pipeline: Pipeline,
    /// What the driver counted and recorded.
    pub summary: Summary,
    /// How often a rank was started again.
    pub restarts: u32,
    /// From the first connection to the end.
    pub wall: Duration,
    /// The signal that ended the run before the end of its input.
    pub interrupted: Option<u8>,
    /// The GPUs that two or more ranks of the job share; empty if none do.
    pub shared_devices: Vec<SharedDevice>,
    /// How it trained, if it did ([`Viewer::trains`](crate::seen::Viewer::trains)).
    pub training: Option<Training>,
}

impl Finished {
    /// Writes the report as JSON: the run (`restarts`, `wall_ms`, `interrupted_by`: the number of a signal or null, and
    /// `shared_devices`: each a [`SharedDevice`]), its measures, and the record of each chunk.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_report(&self, path: &Path) -> Result<(), OutputError> {
        #[derive(Serialize)]
        struct Run<'a> {
            restarts: u32,
            wall_ms: f64,
            interrupted_by: Option<u8>,
            shared_devices: &'a [SharedDevice],
        }
        let run = Run {
            restarts: self.restarts,
            wall_ms: self.wall.as_secs_f64() * 1e3,
            interrupted_by: self.interrupted,
            shared_devices: &self.shared_devices,
        };
        let recorder = &self.summary.recorder;
        write_file(path, |out| {
            write_json(out, &run, &self.measures(), recorder)
        })
    }

    /// Writes a picture of the last chunks; of a training whose actions were measured, that of a step and of its simulation.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_timeline(&self, path: &Path) -> Result<(), OutputError> {
        let view = View {
            restarts: self.summary.restarts.clone(),
            ..View::default()
        };
        write_file(path, |out| match &self.training {
            Some(training) if training.write_svg(out)? => Ok(()),
            _ => write_svg(out, &self.summary.recorder, &self.measures(), &view),
        })
    }

    fn measures(&self) -> Measures {
        let Summary {
            recorder, restarts, ..
        } = &self.summary;
        let warm_up = default_warm_up(recorder.totals().chunks);
        Measures {
            training: self.training.as_ref().map(Training::measures),
            ..Measures::of(recorder, warm_up, restarts)
        }
    }

    /// Writes the trace that Perfetto and `chrome://tracing` show.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write_trace(&self, path: &Path) -> Result<(), OutputError> {
        let view = View {
            restarts: self.summary.restarts.clone(),
            ..View::default()
        };
        write_file(path, |out| {
            write_chrome_trace(out, &self.summary.recorder, &view)
        })
    }
}
