//! The stages of `pp run` between source and sink: tensors to tensors, from slot to slot.

use pp_contract::{FaultKind, Manifest, Plan as _, StageSpec, VideoPlan};
use pp_runtime::drift::{Check, Verifier};
use pp_runtime::stage::{Chunk, Done, GroupStage, Progress, Stage, StageError, StageResult, Taken};

use super::kernels::{Generated, Kernels, Layouts, TicketOf};
use super::notes;

/// A chunk under way: in the kernels, or in the digests behind them.
pub struct Computing<G: Kernels> {
    work: Progress<Generated, G::Computing>,
    tensors: Manifest,
    first_frame: u64,
    /// The calls that the kernels must report.
    planned: u32,
    check: Option<Check<TicketOf<G>>>,
}

pub struct VideoStage<G: Kernels> {
    /// What faults call it.
    pub(super) name: &'static str,
    pub(super) spec: StageSpec,
    /// How often a chunk comes by.
    pub(super) laps: u16,
    pub(super) generator: G,
    pub(super) max_frames: u32,
    pub(super) verifier: Verifier,
    pub(super) layouts: Layouts,
}

impl<G: Kernels> VideoStage<G> {
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
                calls: generated.calls,
                start_frame: computing.first_frame,
                seal,
                worked: generated.worked,
                note: Vec::new(),
            },
        }))
    }

    /// Begins a chunk. A member of a group that does not lead has no slots, and nothing to verify.
    fn begin(
        &mut self,
        chunk: Chunk<'_, VideoPlan>,
        input: Option<&G::Rx>,
        mut output: Option<&mut G::Tx>,
        group: Option<&mut G::Group>,
    ) -> StageResult<Progress<Done, Computing<G>>> {
        let (message, index) = (chunk.message, chunk.place.chunk);
        let plan = message.plan().parts();
        let mut check = match &output {
            Some(_) => (self.verifier).begin(self.generator.digester(), chunk, input)?,
            None => None,
        };
        let inputs = message.tensors().unsealed();
        let lap = chunk.place.lap;
        let frames = notes::frames(message.note(), self.max_frames)?;
        let came = (&chunk, frames, &inputs);
        let known =
            (self.layouts).of_chunk(&mut self.generator, &self.verifier, came, self.name)?;
        let (layout, sealed) = (&known.layout, &known.sealed);
        let work = self
            .generator
            .generate(
                (plan, lap),
                (&inputs, input),
                (&layout.outputs, output.as_deref_mut()),
                group,
            )
            .map_err(|mut error| {
                error.detail = format!("chunk {index}: {}", error.detail);
                error
            })?;
        let tensors = match (&mut check, sealed) {
            (Some(check), Some(sealed)) => {
                let digester = self.generator.digester();
                let made = output.as_deref_mut().map(|output| (sealed, output));
                self.verifier.end(digester, check, input, made)?;
                sealed
            }
            _ => &layout.outputs,
        };
        let tensors = tensors.clone();
        if let Some(output) = output {
            self.generator.send_ahead(output, tensors.payload_bytes())?;
        }
        let planned = message.plan().calls(&self.spec, lap..lap + 1, self.laps);
        self.conclude(Computing {
            work,
            tensors,
            first_frame: plan.current_start_frame,
            planned,
            check,
        })
    }

    /// How far a chunk is.
    fn go_on(&mut self, mut oldest: Computing<G>) -> StageResult<Progress<Done, Computing<G>>> {
        if let Progress::UnderWay(work) = oldest.work {
            oldest.work = self.generator.poll_generated(work)?;
        }
        self.conclude(oldest)
    }
}

impl<G: Kernels> Stage<G::Tx, G::Rx> for VideoStage<G> {
    type Plan = VideoPlan;
    type Kept = Computing<G>;

    fn run(
        &mut self,
        chunk: Chunk<'_, VideoPlan>,
        input: Option<&G::Rx>,
        output: &mut G::Tx,
    ) -> StageResult<Progress<Done, Computing<G>>> {
        self.begin(chunk, input, Some(output), None)
    }

    fn poll(&mut self, oldest: Computing<G>) -> StageResult<Progress<Done, Computing<G>>> {
        self.go_on(oldest)
    }
}

impl<G: Kernels> GroupStage<G::Tx, G::Rx, G::Group> for VideoStage<G> {
    type Plan = VideoPlan;
    type Kept = Computing<G>;

    fn run(
        &mut self,
        chunk: Chunk<'_, VideoPlan>,
        input: Option<&G::Rx>,
        output: Option<&mut G::Tx>,
        group: &mut G::Group,
    ) -> StageResult<Progress<Done, Computing<G>>> {
        self.begin(chunk, input, output, Some(group))
    }

    fn poll(&mut self, oldest: Computing<G>) -> StageResult<Progress<Done, Computing<G>>> {
        self.go_on(oldest)
    }
}
