//! A `.pt2` without Python: `phase_b` is a package that PyTorch's `AOTInductor` compiled and `pp_pipeline.export` wrote;
//! `encode` and `decode` are the built-in ones, or packages behind and in front of these.
//! `--kernels libpp_aoti.so --plugin-arg phase_b=model.pt2` gives both to `pp run` and `pp plugin check`.
//!
//! PyTorch's library is opened at run time (`torch`). A package is read and checked (`package`, `film`), its code is loaded once in
//! a process (`model`), and a session runs the parts that are its share (`parts`): straight from the slot that was received
//! (`stage`), or that of a source or a sink (`ends`), into the slot that is sent. On a GPU a call only enqueues on the host's
//! stream.

mod ends;
mod film;
mod model;
mod package;
mod parts;
mod stage;
mod torch;

use std::path::Path;

use pp_kernels::denoise::cpu::Cpu;
use pp_kernels::denoise::cuda::Ptx;
use pp_kernels::{
    Bits, Chroma, ChunkShape, Collectives, Description, Failure, FrameView, FrameViewMut, Kernels,
    Layout, Payload, PayloadMut, Session, SessionConfig, Space, StageInfo, StageKind,
    VideoPlanParts,
};

use ends::End;
use film::{Film, STAGES};
use stage::Stage;

/// The kernels of this plugin.
#[derive(Debug)]
pub enum Aoti {}

pp_kernels::export_kernels!(Aoti);

/// One stage of one stream.
pub struct Stream(Box<dyn Session>);

impl Kernels for Aoti {
    type Session = Stream;

    fn describe() -> Description {
        let [encode, phase_b, decode] = STAGES;
        // A package may be for one number of steps.
        let stage = |name, kind| StageInfo {
            in_gaps: true,
            ..StageInfo::new(name, kind)
        };
        Description {
            name: "aoti".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            host: true,
            cuda: true,
            chroma: Chroma::ALL.into(),
            bits: Bits::Eight,
            context_frames: 0,
            digest: 0x616f_7469_0000_0001,
            stages: vec![
                stage(encode, StageKind::Source),
                StageInfo {
                    in_parts: true,
                    no_memory: true,
                    ..stage(phase_b, StageKind::Middle)
                },
                stage(decode, StageKind::Sink),
            ],
        }
    }

    fn create(
        stage: &StageInfo,
        config: &SessionConfig,
        args: &[(&str, &str)],
    ) -> Result<Stream, Failure> {
        if let Some((key, _)) = args.iter().find(|(key, _)| !STAGES.contains(key)) {
            return Err(Failure::invalid(format!(
                "unknown argument {key}: this plugin takes --plugin-arg STAGE=FILE.pt2, for {}",
                STAGES.join(", ")
            )));
        }
        let package = args.iter().find(|(key, _)| *key == stage.name);
        let package = package.map(|(_, path)| Path::new(path));
        let film = || Film::of(stage.kind, config, args);
        if stage.kind == StageKind::Middle {
            let path = package.ok_or_else(|| {
                Failure::invalid(
                    "phase_b has no package: name one with --plugin-arg phase_b=FILE.pt2",
                )
            })?;
            return Ok(Stream(Box::new(Stage::open(path, film()?, config)?)));
        }
        let built_in: Box<dyn Session> = match config.space {
            Space::Host => Box::new(Cpu::create(stage, config, &[])?),
            Space::Cuda { .. } => Box::new(Ptx::create(stage, config, &[])?),
        };
        Ok(Stream(match package {
            None => built_in,
            Some(path) => Box::new(End::open(path, film()?, config, built_in)?),
        }))
    }
}

impl Session for Stream {
    fn layout(&self, shape: ChunkShape, lap: u32) -> Result<Layout, Failure> {
        self.0.layout(shape, lap)
    }

    fn encode(
        &mut self,
        frames: &[FrameView<'_>],
        plan: &VideoPlanParts,
        output: &mut PayloadMut<'_>,
    ) -> Result<(), Failure> {
        self.0.encode(frames, plan, output)
    }

    fn run(
        &mut self,
        plan: &VideoPlanParts,
        lap: u32,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
        group: Option<&mut dyn Collectives>,
    ) -> Result<u32, Failure> {
        self.0.run(plan, lap, input, output, group)
    }

    fn decode(
        &mut self,
        plan: &VideoPlanParts,
        input: &Payload<'_>,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), Failure> {
        self.0.decode(plan, input, frames)
    }
}
