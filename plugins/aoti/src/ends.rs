//! A session of `encode` or `decode` with a package: what the built-in stage makes of the frames goes through the package, or the
//! package makes what the built-in one makes frames of.
//!
//! So a package needs no code for planes, strides or copies to a device. With zero steps the built-in stage works alone.

use std::path::Path;

use pp_kernels::{
    ChunkShape, DType, Failure, FrameView, FrameViewMut, Layout, Manifest, Payload, PayloadMut,
    Session, SessionConfig, Space, TensorSpec, VideoPlanParts,
};

use crate::film::{BESIDE, FRAMES, Film, LATENTS, RESULT};
use crate::package::Sizes;
use crate::parts::Parts;

/// Most steps that a plan has.
const MOST_STEPS: u32 = 1024;
const ALIGNMENT: usize = 256;

/// A session. Its parts are dropped first, which waits for the stream.
pub(crate) struct End {
    parts: Parts,
    /// What lies between the two.
    between: Between,
    built_in: Box<dyn Session>,
}

/// Memory of the session.
enum Between {
    Host(Vec<u8>),
    /// Which its parts keep.
    Device {
        address: u64,
        bytes: usize,
    },
}

impl Between {
    fn given(&self, tensors: &Manifest) -> Result<Payload<'_>, Failure> {
        match self {
            Between::Host(bytes) => {
                Payload::new(tensors, &bytes[bytes.as_ptr().align_offset(ALIGNMENT)..])
            }
            Between::Device { address, bytes } => Payload::on_device(tensors, *address, *bytes),
        }
    }

    fn taken(&mut self, tensors: &Manifest) -> Result<PayloadMut<'_>, Failure> {
        match self {
            Between::Host(bytes) => {
                let at = bytes.as_ptr().align_offset(ALIGNMENT);
                PayloadMut::new(tensors, &mut bytes[at..])
            }
            Between::Device { address, bytes } => PayloadMut::on_device(tensors, *address, *bytes),
        }
    }
}

impl End {
    /// Opens the package, and computes its example.
    ///
    /// # Errors
    /// Those of [`Parts::open`].
    pub(crate) fn open(
        path: &Path,
        film: Film,
        config: &SessionConfig,
        built_in: Box<dyn Session>,
    ) -> Result<End, Failure> {
        let mut parts = Parts::open(path, film, config)?;
        let most = Sizes {
            frames: config.max_frames,
            steps: MOST_STEPS,
        };
        let specs = parts.film.specs(&[FRAMES, BESIDE[0], BESIDE[1]], most)?;
        let bytes = Manifest::new(&specs)?.payload_bytes() as usize;
        let between = match config.space {
            Space::Host => Between::Host(vec![0; bytes + ALIGNMENT]),
            Space::Cuda { .. } => Between::Device {
                address: parts.allocate((DType::U8, &[bytes as u64]))?,
                bytes,
            },
        };
        Ok(End {
            parts,
            between,
            built_in,
        })
    }

    /// The tensors in front of the built-in stage or behind it: under its own name for them, and under that of a package.
    fn named(&self, name: &str, sizes: Sizes, beside: &[&str]) -> Result<[Manifest; 2], Failure> {
        let film = &self.parts.film;
        let mut specs = film.specs(&[&[FRAMES], beside].concat(), sizes)?;
        let of_package = Manifest::new(&specs)?;
        specs[0] = TensorSpec::new(name, specs[0].dtype(), specs[0].shape().dims())?;
        Ok([Manifest::new(&specs)?, of_package])
    }
}

impl Session for End {
    fn layout(&self, shape: ChunkShape, lap: u32) -> Result<Layout, Failure> {
        let built_in = self.built_in.layout(shape, lap)?;
        if shape.steps == 0 {
            return Ok(built_in);
        }
        let sizes = Sizes {
            frames: shape.frames,
            steps: shape.steps,
        };
        self.parts.made(sizes)?;
        let film = &self.parts.film;
        Ok(match built_in.inputs.is_empty() {
            true => Layout {
                inputs: Manifest::empty(),
                outputs: Manifest::new(&film.specs(&[LATENTS, BESIDE[0], BESIDE[1]], sizes)?)?,
            },
            false => Layout {
                inputs: Manifest::new(&film.specs(&[RESULT], sizes)?)?,
                outputs: Manifest::empty(),
            },
        })
    }

    fn encode(
        &mut self,
        frames: &[FrameView<'_>],
        plan: &VideoPlanParts,
        output: &mut PayloadMut<'_>,
    ) -> Result<(), Failure> {
        let sizes = Sizes {
            frames: frames.len() as u32,
            steps: plan.num_denoise_steps,
        };
        if sizes.steps == 0 {
            return self.built_in.encode(frames, plan, output);
        }
        let [own, of_package] = self.named(LATENTS, sizes, &BESIDE)?;
        let mut tokens = self.between.taken(&own)?;
        self.built_in.encode(frames, plan, &mut tokens)?;
        let tokens = self.between.given(&of_package)?;
        for spec in self.parts.film.specs(&BESIDE, sizes)? {
            self.parts.copy(&tokens, &spec, output, spec.name())?;
        }
        self.parts.compute(&tokens, output, sizes)
    }

    fn decode(
        &mut self,
        plan: &VideoPlanParts,
        input: &Payload<'_>,
        frames: &mut [FrameViewMut<'_>],
    ) -> Result<(), Failure> {
        let sizes = Sizes {
            frames: frames.len() as u32,
            steps: plan.num_denoise_steps,
        };
        if sizes.steps == 0 {
            return self.built_in.decode(plan, input, frames);
        }
        let [own, of_package] = self.named(RESULT, sizes, &[])?;
        let mut tokens = self.between.taken(&of_package)?;
        self.parts.compute(input, &mut tokens, sizes)?;
        self.built_in
            .decode(plan, &self.between.given(&own)?, frames)
    }
}
