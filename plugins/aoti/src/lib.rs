//! A `.pt2` without Python: `phase_b` is a package that PyTorch's `AOTInductor` compiled and `pp_pipeline.export` wrote;
//! `encode` and `decode` are the built-in ones.
//! `--kernels libpp_aoti.so --plugin-arg phase_b=model.pt2` gives both to `pp run` and `pp plugin check`.
//!
//! PyTorch's library is opened at run time (`torch`). A package is read and checked (`package`), its code is loaded once in a
//! process (`model`), and a session runs the parts that are its share (`stage`): straight from the slot that was received into
//! the slot that is sent. On a GPU a call only enqueues on the host's stream.

mod model;
mod package;
mod stage;
mod torch;

use std::path::Path;

use pp_kernels::denoise::cpu::{Cpu, CpuSession};
use pp_kernels::denoise::cuda::{Ptx, PtxSession};
use pp_kernels::{
    Chroma, ChunkShape, Collectives, Description, Failure, FrameView, FrameViewMut, Kernels,
    Layout, Payload, PayloadMut, Session, SessionConfig, Space, StageInfo, StageKind,
    VideoPlanParts,
};

use stage::Stage;

/// The kernels of this plugin.
#[derive(Debug)]
pub enum Aoti {}

pp_kernels::export_kernels!(Aoti);

/// One stage of one stream.
pub struct Stream(Work);

enum Work {
    OnHost(CpuSession),
    OnDevice(PtxSession<pp_device::Stream>),
    Package(Box<Stage>),
}

/// The middle stage, whose package the argument of the same name gives.
const MIDDLE: &str = "phase_b";

impl Kernels for Aoti {
    type Session = Stream;

    fn describe() -> Description {
        let alike = |name, kind| StageInfo {
            same_bytes: true,
            ..StageInfo::new(name, kind)
        };
        Description {
            name: "aoti".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            host: true,
            cuda: true,
            chroma: Chroma::ALL.into(),
            context_frames: 0,
            digest: 0x616f_7469_0000_0001,
            stages: vec![
                alike("encode", StageKind::Source),
                StageInfo {
                    in_parts: true,
                    no_memory: true,
                    ..StageInfo::new(MIDDLE, StageKind::Middle)
                },
                alike("decode", StageKind::Sink),
            ],
        }
    }

    fn create(
        stage: &StageInfo,
        config: &SessionConfig,
        args: &[(&str, &str)],
    ) -> Result<Stream, Failure> {
        if let Some((key, _)) = args.iter().find(|(key, _)| *key != MIDDLE) {
            return Err(Failure::invalid(format!(
                "unknown argument {key}: this plugin takes --plugin-arg {MIDDLE}=FILE.pt2"
            )));
        }
        Ok(Stream(match (stage.kind, config.space) {
            (StageKind::Middle, _) => {
                let (_, path) = args.first().ok_or_else(|| {
                    Failure::invalid(format!(
                        "{MIDDLE} has no package: name one with --plugin-arg {MIDDLE}=FILE.pt2"
                    ))
                })?;
                Work::Package(Box::new(Stage::open(Path::new(path), config)?))
            }
            (_, Space::Host) => Work::OnHost(Cpu::create(stage, config, &[])?),
            (_, Space::Cuda { .. }) => Work::OnDevice(Ptx::create(stage, config, &[])?),
        }))
    }
}

impl Stream {
    fn session(&self) -> &dyn Session {
        match &self.0 {
            Work::OnHost(session) => session,
            Work::OnDevice(session) => session,
            Work::Package(session) => &**session,
        }
    }

    fn session_mut(&mut self) -> &mut dyn Session {
        match &mut self.0 {
            Work::OnHost(session) => session,
            Work::OnDevice(session) => session,
            Work::Package(session) => &mut **session,
        }
    }
}

impl Session for Stream {
    fn layout(&self, shape: ChunkShape, lap: u32) -> Result<Layout, Failure> {
        self.session().layout(shape, lap)
    }

    fn encode(
        &mut self,
        frames: &[FrameView<'_>],
        plan: &VideoPlanParts,
        output: &mut PayloadMut<'_>,
    ) -> Result<(), Failure> {
        self.session_mut().encode(frames, plan, output)
    }

    fn run(
        &mut self,
        plan: &VideoPlanParts,
        lap: u32,
        input: &Payload<'_>,
        output: &mut PayloadMut<'_>,
        group: Option<&mut dyn Collectives>,
    ) -> Result<u32, Failure> {
        self.session_mut().run(plan, lap, input, output, group)
    }

    fn decode(
        &mut self,
        plan: &VideoPlanParts,
        input: &Payload<'_>,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), Failure> {
        self.session_mut().decode(plan, input, frames)
    }
}
