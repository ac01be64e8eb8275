//! Stages with a hook.

use std::rc::Rc;

use pp_contract::{
    ChunkIndex, DType, Manifest, Message, Plan as _, StageSpec, TensorSpec, VideoPlan,
};
use pp_runtime::stage::{
    Built, Chunk, Done, GroupStage, Offer, Place, Progress, RetainedPayloads, Sink, Source, Stage,
    StageResult, Taken,
};

use super::frame::{edited, longer, without_context, without_recompute};
use super::{Arm, Break, Collective};

/// How many times too long a tensor is that no slot holds.
const TOO_LONG: u64 = 1000;

/// A source, a stage or a sink with a hook.
#[derive(Debug)]
pub(crate) struct Faulty<S> {
    pub(crate) inner: S,
    arm: Rc<Arm>,
    /// Its place in the pipeline.
    at: usize,
    /// The stage before it, which made its tensors; of the source itself.
    maker: StageSpec,
}

impl<S> Faulty<S> {
    /// The stage in this place of the pipeline.
    pub(crate) fn new(inner: S, arm: &Rc<Arm>, at: usize) -> Self {
        let maker = arm.pipeline.stages()[at.saturating_sub(1)].clone();
        let arm = Rc::clone(arm);
        Self {
            inner,
            arm,
            at,
            maker,
        }
    }

    /// What any stage may do in place of its work.
    fn begins(&self, place: Place) {
        let chunk = place.chunk.get();
        self.arm.sees(self.at, chunk);
        self.arm.happen_to_process(chunk);
    }

    /// The tensors that the source names in place of those that it made.
    fn named(&self, chunk: u64, tensors: Manifest) -> Manifest {
        let first = |alter: fn(&TensorSpec) -> TensorSpec| {
            edited(&tensors, |specs| specs[0] = alter(&specs[0]))
        };
        if self.arm.strikes(Break::UnsupportedDtype, chunk) {
            return first(|spec| {
                let dims = spec.shape().dims();
                TensorSpec::new(spec.name(), DType::I16, dims).expect("a tensor of another type")
            });
        }
        if self.arm.strikes(Break::OversizeTensor, chunk) {
            return first(|spec| longer(spec, TOO_LONG));
        }
        if let Some(without) = without_context(&tensors)
            && self.arm.strikes(Break::MissingContext, chunk)
        {
            return without;
        }
        tensors
    }

    /// The work as a stage sees it that thinks its cache is good.
    fn without_recompute(&self, message: &Message<VideoPlan>) -> Option<Message<VideoPlan>> {
        // The context lies behind all other tensors of a source: without it they lie where they were.
        let tensors = without_context(&message.tensors().unsealed())?;
        let plan = without_recompute(message.plan().parts());
        let seen = Message::new(plan, &self.maker, tensors).ok()?;
        seen.with_note(message.note().to_vec()).ok()
    }
}

impl<Tx, S: Source<Tx, Plan = VideoPlan>> Source<Tx> for Faulty<S> {
    type Plan = VideoPlan;
    type Carry = S::Carry;

    fn poll(&mut self) -> StageResult<Offer> {
        self.inner.poll()
    }

    fn build(&mut self, place: Place, slot: &mut Tx) -> StageResult<Built<VideoPlan, S::Carry>> {
        self.begins(place);
        let mut built = self.inner.build(place, slot)?;
        let chunk = place.chunk.get();
        built.tensors = self.named(chunk, built.tensors);
        if self.arm.strikes(Break::HugeNote, chunk) {
            built.note = vec![0; pp_contract::MAX_NOTE_BYTES + 1];
        }
        Ok(built)
    }

    fn is_built(&mut self, carry: &mut S::Carry) -> StageResult<bool> {
        self.inner.is_built(carry)
    }

    fn rebuild(
        &mut self,
        place: Place,
        sent: &Message<VideoPlan>,
        kept: &dyn RetainedPayloads<Tx>,
        slot: &mut Tx,
    ) -> StageResult<(VideoPlan, Manifest)> {
        self.inner.rebuild(place, sent, kept, slot)
    }

    fn accepted(
        &mut self,
        chunk: ChunkIndex,
        carry: S::Carry,
        note: Option<&[u8]>,
    ) -> StageResult<Option<u64>> {
        self.inner.accepted(chunk, carry, note)
    }

    fn queued(&self) -> u32 {
        self.inner.queued()
    }

    fn drop_late(&mut self, before_ns: u64) -> StageResult<u64> {
        self.inner.drop_late(before_ns)
    }

    fn oldest_ns(&self) -> Option<u64> {
        self.inner.oldest_ns()
    }
}

impl<S> Faulty<S> {
    /// Runs the stage with a chunk as it sees that chunk.
    fn run_with<T>(
        &mut self,
        chunk: Chunk<'_, VideoPlan>,
        run: impl FnOnce(&mut S, Chunk<'_, VideoPlan>) -> T,
    ) -> T {
        self.begins(chunk.place);
        if let Some(message) = self.without_recompute(chunk.message)
            && self
                .arm
                .strikes(Break::SkippedRecompute, chunk.place.chunk.get())
        {
            let message = &message;
            return run(&mut self.inner, Chunk { message, ..chunk });
        }
        run(&mut self.inner, chunk)
    }
}

impl<Tx, Rx, G, S> GroupStage<Tx, Rx, G> for Faulty<S>
where
    G: Collective,
    S: GroupStage<Tx, Rx, G, Plan = VideoPlan>,
{
    type Plan = VideoPlan;
    type Kept = S::Kept;

    fn run(
        &mut self,
        chunk: Chunk<'_, VideoPlan>,
        input: Option<&Rx>,
        output: Option<&mut Tx>,
        group: &mut G,
    ) -> StageResult<Progress<Done, S::Kept>> {
        if self.arm.strikes(Break::Stranger, chunk.place.chunk.get()) {
            group.broadcast_from_nobody()?;
            self.arm.misses("it was not refused");
        }
        self.run_with(chunk, |inner, chunk| inner.run(chunk, input, output, group))
    }

    fn poll(&mut self, oldest: S::Kept) -> StageResult<Progress<Done, S::Kept>> {
        self.inner.poll(oldest)
    }

    fn finish(&mut self) -> StageResult<()> {
        self.inner.finish()
    }
}

impl<Tx, Rx, S: Stage<Tx, Rx, Plan = VideoPlan>> Stage<Tx, Rx> for Faulty<S> {
    type Plan = VideoPlan;
    type Kept = S::Kept;

    fn run(
        &mut self,
        chunk: Chunk<'_, VideoPlan>,
        input: Option<&Rx>,
        output: &mut Tx,
    ) -> StageResult<Progress<Done, S::Kept>> {
        self.run_with(chunk, |inner, chunk| inner.run(chunk, input, output))
    }

    fn poll(&mut self, oldest: S::Kept) -> StageResult<Progress<Done, S::Kept>> {
        self.inner.poll(oldest)
    }

    fn finish(&mut self) -> StageResult<()> {
        self.inner.finish()
    }
}

impl<Rx, S: Sink<Rx, Plan = VideoPlan>> Sink<Rx> for Faulty<S> {
    type Plan = VideoPlan;
    type Kept = S::Kept;

    fn is_ready(&mut self, under_way: usize) -> StageResult<bool> {
        self.inner.is_ready(under_way)
    }

    fn take(
        &mut self,
        chunk: Chunk<'_, VideoPlan>,
        input: Option<&Rx>,
    ) -> StageResult<Progress<Taken, S::Kept>> {
        self.begins(chunk.place);
        self.inner.take(chunk, input)
    }

    fn poll(&mut self, oldest: S::Kept) -> StageResult<Progress<Taken, S::Kept>> {
        self.inner.poll(oldest)
    }

    fn finish(&mut self) -> StageResult<()> {
        self.inner.finish()
    }

    fn queued(&self) -> u32 {
        self.inner.queued()
    }
}
