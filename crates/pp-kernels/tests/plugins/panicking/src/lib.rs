//! Test plugin: panics where the tests tell it to. The frame width chooses the entry.

use pp_kernels::{
    Bits, Chroma, ChunkShape, Collectives, DType, Description, Failure, FrameView, FrameViewMut,
    Kernels, Layout, Manifest, Payload, PayloadMut, Session, SessionConfig, StageInfo, StageKind,
    TensorSpec, VideoPlanParts,
};

enum Panicking {}

pp_kernels::export_kernels!(Panicking);

struct Stream {
    stage: StageKind,
    width: u32,
}

struct PanicsWhenDropped;

impl Drop for PanicsWhenDropped {
    fn drop(&mut self) {
        panic!("a payload that panics when it is dropped");
    }
}

impl Kernels for Panicking {
    type Session = Stream;

    fn describe() -> Description {
        Description {
            name: "panicking".into(),
            version: "1.0".into(),
            host: true,
            cuda: false,
            chroma: vec![Chroma::Mono],
            bits: Bits::Eight,
            context_frames: 0,
            digest: 1,
            stages: vec![
                StageInfo::new("encode", StageKind::Source),
                StageInfo::new("phase_b", StageKind::Middle),
                StageInfo::new("decode", StageKind::Sink),
            ],
        }
    }

    fn create(
        stage: &StageInfo,
        config: &SessionConfig,
        _: &[(&str, &str)],
    ) -> Result<Stream, Failure> {
        assert!(config.width != 20, "no session of width {}", config.width);
        Ok(Stream {
            stage: stage.kind,
            width: config.width,
        })
    }
}

impl Session for Stream {
    fn layout(&self, _: ChunkShape, _: u32) -> Result<Layout, Failure> {
        let one = Manifest::new(&[TensorSpec::new("latents_in", DType::U8, &[1])?])?;
        let (inputs, outputs) = match self.stage {
            StageKind::Source => (Manifest::empty(), one),
            StageKind::Middle => (one.clone(), one),
            StageKind::Sink => (one, Manifest::empty()),
        };
        Ok(Layout { inputs, outputs })
    }

    fn encode(
        &mut self,
        _: &[FrameView<'_>],
        _: &VideoPlanParts,
        _: &mut PayloadMut<'_>,
    ) -> Result<(), Failure> {
        match self.width {
            21 => std::panic::panic_any(PanicsWhenDropped),
            _ => Ok(()),
        }
    }

    fn run(
        &mut self,
        _: &VideoPlanParts,
        _: u32,
        _: &Payload<'_>,
        _: &mut PayloadMut<'_>,
        _: Option<&mut dyn Collectives>,
    ) -> Result<u32, Failure> {
        match self.width {
            22 => panic!("{}", "long ".repeat(1000)),
            _ => Ok(0),
        }
    }

    fn decode(
        &mut self,
        _: &VideoPlanParts,
        _: &Payload<'_>,
        _: &mut [FrameViewMut<'_>],
    ) -> Result<(), Failure> {
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        assert!(self.width != 23, "a session that panics when it is dropped");
    }
}
