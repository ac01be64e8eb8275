//! The stages of a rank, as the driver holds them: in one list, whatever their types.

use std::collections::VecDeque;
use std::fmt;

use pp_contract::{ChunkIndex, Manifest, Plan};

use crate::stage::{
    Chunk, Done, GroupStage, Progress, Sink, Source, Stage, StageResult, Taken, puts_nothing_off,
};

/// Runs a stage behind the source. The trait hides the type of what the stage keeps of a chunk.
pub(super) trait Work<Tx, Rx, G, P: Plan> {
    /// Tells whether the stage would take a chunk now.
    fn is_ready(&mut self) -> StageResult<bool> {
        Ok(true)
    }

    /// Works on a chunk. Returns `None` if a device still works on it.
    fn run(
        &mut self,
        chunk: Chunk<'_, P>,
        input: Option<&Rx>,
        output: Option<&mut Tx>,
        group: Option<&mut G>,
    ) -> StageResult<Option<Done>>;

    /// Returns the result of the oldest work that is under way; `None` if a device still works on it, or if there is no
    /// work.
    fn poll(&mut self) -> StageResult<Option<Done>>;

    /// Asks for work whose result went on before a device was done with it, as [`Stage::ahead`] does.
    fn ahead(&mut self) -> Option<(ChunkIndex, StageResult<bool>)> {
        None
    }

    /// Does the part of a chunk's work that the stage has put off.
    fn later(&mut self, chunk: ChunkIndex) -> StageResult<()> {
        Err(puts_nothing_off(chunk))
    }

    /// Finishes the stage: nothing more comes.
    fn finish(&mut self) -> StageResult<()>;

    /// Returns the number of chunks that wait in the sink's queue.
    fn queued(&self) -> u32 {
        0
    }
}

/// Holds a stage, and its data for each chunk that a device works on, the oldest first.
struct Middle<S, K>(S, VecDeque<K>);

/// Holds a member of a group in the same way as [`Middle`].
struct Together<S, K>(S, VecDeque<K>);

/// Holds the sink in the same way as [`Middle`].
struct Last<S, K>(S, VecDeque<K>);

/// Returns the result of work that is done, or appends work that is under way to `kept`.
fn begun<K>(progress: Progress<Done, K>, kept: &mut VecDeque<K>) -> Option<Done> {
    match progress {
        Progress::Done(done) => Some(done),
        Progress::UnderWay(work) => {
            kept.push_back(work);
            None
        }
    }
}

/// Polls the oldest work that is under way.
fn polled<K>(
    kept: &mut VecDeque<K>,
    poll: impl FnOnce(K) -> StageResult<Progress<Done, K>>,
) -> StageResult<Option<Done>> {
    let Some(oldest) = kept.pop_front() else {
        return Ok(None);
    };
    match poll(oldest)? {
        Progress::Done(done) => Ok(Some(done)),
        Progress::UnderWay(work) => {
            kept.push_front(work);
            Ok(None)
        }
    }
}

/// Turns a report of the sink into a result without tensors.
fn taken<K>(progress: Progress<Taken, K>) -> Progress<Done, K> {
    let done = |report| Done {
        tensors: Manifest::empty(),
        report,
    };
    progress.map(done, |kept| kept)
}

impl<Tx, Rx, G, P, S> Work<Tx, Rx, G, P> for Middle<S, S::Kept>
where
    P: Plan,
    S: Stage<Tx, Rx, Plan = P>,
{
    fn run(
        &mut self,
        chunk: Chunk<'_, P>,
        input: Option<&Rx>,
        output: Option<&mut Tx>,
        _: Option<&mut G>,
    ) -> StageResult<Option<Done>> {
        let output = output.expect("a stage runs only with a slot");
        Ok(begun(self.0.run(chunk, input, output)?, &mut self.1))
    }

    fn poll(&mut self) -> StageResult<Option<Done>> {
        polled(&mut self.1, |oldest| self.0.poll(oldest))
    }

    fn ahead(&mut self) -> Option<(ChunkIndex, StageResult<bool>)> {
        self.0.ahead()
    }

    fn later(&mut self, chunk: ChunkIndex) -> StageResult<()> {
        self.0.later(chunk)
    }

    fn finish(&mut self) -> StageResult<()> {
        self.0.finish()
    }
}

impl<Tx, Rx, G, P, S> Work<Tx, Rx, G, P> for Together<S, S::Kept>
where
    P: Plan,
    S: GroupStage<Tx, Rx, G, Plan = P>,
{
    fn run(
        &mut self,
        chunk: Chunk<'_, P>,
        input: Option<&Rx>,
        output: Option<&mut Tx>,
        group: Option<&mut G>,
    ) -> StageResult<Option<Done>> {
        let group = group.expect("a group is connected before it runs");
        let progress = self.0.run(chunk, input, output, group)?;
        Ok(begun(progress, &mut self.1))
    }

    fn poll(&mut self) -> StageResult<Option<Done>> {
        polled(&mut self.1, |oldest| self.0.poll(oldest))
    }

    fn finish(&mut self) -> StageResult<()> {
        self.0.finish()
    }
}

impl<Tx, Rx, G, P, S> Work<Tx, Rx, G, P> for Last<S, S::Kept>
where
    P: Plan,
    S: Sink<Rx, Plan = P>,
{
    fn is_ready(&mut self) -> StageResult<bool> {
        self.0.is_ready(self.1.len())
    }

    fn run(
        &mut self,
        chunk: Chunk<'_, P>,
        input: Option<&Rx>,
        _: Option<&mut Tx>,
        _: Option<&mut G>,
    ) -> StageResult<Option<Done>> {
        Ok(begun(taken(self.0.take(chunk, input)?), &mut self.1))
    }

    fn poll(&mut self) -> StageResult<Option<Done>> {
        polled(&mut self.1, |oldest| Ok(taken(self.0.poll(oldest)?)))
    }

    fn finish(&mut self) -> StageResult<()> {
        self.0.finish()
    }

    fn queued(&self) -> u32 {
        self.0.queued()
    }
}

/// Holds a stage behind the source, of any type.
pub struct BoxedStage<'s, Tx, Rx, G, P> {
    work: Box<dyn Work<Tx, Rx, G, P> + 's>,
    is_finished: bool,
}

impl<'s, Tx, Rx, G, P: Plan + 's> BoxedStage<'s, Tx, Rx, G, P> {
    /// Boxes a stage between source and sink.
    pub fn new(stage: impl Stage<Tx, Rx, Plan = P, Kept: 's> + 's) -> Self {
        Self::of(Middle(stage, VecDeque::new()))
    }

    /// Boxes one member of a group that runs a stage between source and sink.
    pub fn member(stage: impl GroupStage<Tx, Rx, G, Plan = P, Kept: 's> + 's) -> Self {
        Self::of(Together(stage, VecDeque::new()))
    }

    /// Boxes the sink.
    pub fn sink(sink: impl Sink<Rx, Plan = P, Kept: 's> + 's) -> Self {
        Self::of(Last(sink, VecDeque::new()))
    }

    fn of(work: impl Work<Tx, Rx, G, P> + 's) -> Self {
        Self {
            work: Box::new(work),
            is_finished: false,
        }
    }
}

impl<'s, Tx, Rx, G, P: Plan> BoxedStage<'s, Tx, Rx, G, P> {
    pub(super) fn work(&mut self) -> &mut (dyn Work<Tx, Rx, G, P> + 's) {
        &mut *self.work
    }

    /// Finishes the stage: nothing more comes. A second call does nothing.
    pub(super) fn finish(&mut self) -> StageResult<()> {
        if std::mem::replace(&mut self.is_finished, true) {
            return Ok(());
        }
        self.work.finish()
    }

    pub(super) fn queued(&self) -> u32 {
        self.work.queued()
    }
}

impl<Tx, Rx, G, P> fmt::Debug for BoxedStage<'_, Tx, Rx, G, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BoxedStage").finish_non_exhaustive()
    }
}

/// Holds the stages that a rank runs, in the order of the pipeline.
#[derive(Debug)]
pub struct Stages<'s, Tx, Rx, G, S: Source<Tx>> {
    pub(super) source: Option<S>,
    pub(super) work: Vec<BoxedStage<'s, Tx, Rx, G, S::Plan>>,
}

impl<'s, Tx, Rx, G, S: Source<Tx>> Stages<'s, Tx, Rx, G, S> {
    /// Makes the list of stages of a rank. Rank 0 begins with the source.
    pub fn new(source: Option<S>) -> Self {
        Self {
            source,
            work: Vec::new(),
        }
    }

    /// Adds the next stage of this rank.
    pub fn push(&mut self, stage: BoxedStage<'s, Tx, Rx, G, S::Plan>) {
        self.work.push(stage);
    }
}
