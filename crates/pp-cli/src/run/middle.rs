//! The stages of `pp run` between source and sink: tensors to tensors, from slot to slot.

use pp_contract::{
    FaultKind, Manifest, Plan as _, Rank, StageSpec, VideoPlan, pass_range, with_source,
};
use pp_kernels::{ChunkShape, Layout};
use pp_runtime::drift::{Check, Digester, Verifier};
use pp_runtime::stage::{Chunk, Done, Progress, Stage, StageError, StageResult, Taken};

use super::kernels::{Generated, Generator, Kernels};
use super::notes;

/// The tensors of a chunk.
struct Known {
    shape: ChunkShape,
    layout: Layout,
    /// What the stage makes, with digests, if some chunks have digests.
    sealed: Option<Manifest>,
}

type Ticket<G> = <<G as Kernels>::Digester as Digester>::Ticket;

/// A chunk under way: in the kernels, or in the digests behind them.
pub(super) struct Computing<G: Generator> {
    work: Progress<Generated, G::Computing>,
    tensors: Manifest,
    first_frame: u64,
    /// The calls that the kernels must report.
    planned: u32,
    /// The calls that the plan counts for this stage.
    calls: u32,
    check: Option<Check<Ticket<G>>>,
}

pub(super) struct VideoStage<G: Generator> {
    /// What faults call it.
    name: &'static str,
    spec: StageSpec,
    generator: G,
    max_frames: u32,
    source: Rank,
    verifier: Verifier,
    layouts: Vec<Known>,
}

impl<G: Generator> VideoStage<G> {
    pub(super) fn new(
        name: &'static str,
        spec: StageSpec,
        generator: G,
        max_frames: u32,
        source: Rank,
        verifier: Verifier,
    ) -> Self {
        Self {
            name,
            spec,
            generator,
            max_frames,
            source,
            verifier,
            layouts: Vec::new(),
        }
    }

    /// The place in `layouts` of the layout for a chunk like this.
    fn layout(&mut self, shape: ChunkShape) -> StageResult<usize> {
        if let Some(at) = self.layouts.iter().position(|known| known.shape == shape) {
            return Ok(at);
        }
        let layout = self.generator.layout(shape);
        let layout =
            layout.map_err(|e| StageError::new(FaultKind::Plugin, "layout", with_source(&e)))?;
        self.layouts.push(Known {
            shape,
            sealed: self.verifier.sealed(&layout.outputs)?,
            layout,
        });
        Ok(self.layouts.len() - 1)
    }

    /// What goes on, once the kernels are done, and the digests that were issued behind them.
    fn conclude(
        &mut self,
        mut computing: Computing<G>,
    ) -> StageResult<Progress<Done, Computing<G>>> {
        let Progress::Done(generated) = computing.work else {
            return Ok(Progress::UnderWay(computing));
        };
        if generated.calls != computing.planned {
            let detail = format!(
                "the kernels made {} generator calls, {} were planned",
                generated.calls, computing.planned
            );
            return Err(StageError::new(FaultKind::Plugin, self.name, detail));
        }
        let (verifier, digester) = (&self.verifier, self.generator.digester());
        let seal = match computing.check.take() {
            Some(check) if !verifier.is_there(digester, &check)? => {
                computing.check = Some(check);
                return Ok(Progress::UnderWay(computing));
            }
            Some(check) => Some(verifier.conclude(digester, check)?),
            None => None,
        };
        Ok(Progress::Done(Done {
            tensors: computing.tensors,
            report: Taken {
                calls: computing.calls,
                start_frame: computing.first_frame,
                seal,
                worked: generated.worked,
                note: Vec::new(),
            },
        }))
    }
}

impl<G: Generator> Stage<G::Tx, G::Rx> for VideoStage<G> {
    type Plan = VideoPlan;
    type Kept = Computing<G>;

    fn run(
        &mut self,
        chunk: Chunk<'_, VideoPlan>,
        input: Option<&G::Rx>,
        output: &mut G::Tx,
    ) -> StageResult<Progress<Done, Computing<G>>> {
        let (message, index) = (chunk.message, chunk.place.chunk);
        let plan = message.plan().parts();
        let digester = self.generator.digester();
        let mut check = self.verifier.begin(digester, chunk, input)?;
        let inputs = message.tensors().unsealed();
        let context = inputs.get("context_frames");
        let context = context.and_then(|(_, spec)| spec.shape().dims().first().copied());
        let known = self.layout(ChunkShape {
            frames: notes::frames(message.note(), self.max_frames, self.source)?,
            steps: plan.num_denoise_steps,
            // More than 32 bits hold are more than any kernels take.
            context_frames: context.map_or(0, |frames| frames.try_into().unwrap_or(u32::MAX)),
        })?;
        let Known { layout, sealed, .. } = &self.layouts[known];
        if layout.inputs != inputs {
            let (wanted, got) = (list(&layout.inputs), list(&inputs));
            let detail = format!("chunk {index}: the kernels take {wanted}; {got} came");
            return Err(StageError::new(FaultKind::Plugin, self.name, detail));
        }
        let work = self
            .generator
            .generate(plan, &inputs, input, &layout.outputs, output)
            .map_err(|mut error| {
                error.detail = format!("chunk {index}: {}", error.detail);
                error
            })?;
        let tensors = match (&mut check, sealed) {
            (Some(check), Some(sealed)) => {
                let (digester, made) = (self.generator.digester(), Some((sealed, output)));
                self.verifier.end(digester, check, input, made)?;
                sealed
            }
            _ => &layout.outputs,
        };
        let tensors = tensors.clone();
        let passes = pass_range(plan.num_denoise_steps, self.spec.part, self.spec.parts);
        self.conclude(Computing {
            work,
            tensors,
            first_frame: plan.current_start_frame,
            planned: passes.len() as u32 + u32::from(plan.do_kv_recompute),
            calls: message.plan().calls(&self.spec),
            check,
        })
    }

    fn poll(&mut self, mut oldest: Computing<G>) -> StageResult<Progress<Done, Computing<G>>> {
        if let Progress::UnderWay(work) = oldest.work {
            oldest.work = self.generator.poll_generated(work)?;
        }
        self.conclude(oldest)
    }
}

fn list(tensors: &Manifest) -> String {
    let specs: Vec<_> = tensors.iter().map(|(_, spec)| spec.to_string()).collect();
    specs.join(", ")
}
