//! What a session is made for: size, chroma format, memory, threads; and what kernels say about themselves.

use pp_contract::Manifest;
use serde::{Deserialize, Serialize};

use crate::abi;
use crate::error::Failure;

/// How the chroma planes are subsampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[repr(u32)]
pub enum Chroma {
    /// Luma only.
    Mono = abi::CHROMA_MONO,
    /// Half width, half height.
    C420 = abi::CHROMA_420,
    /// Half width.
    C422 = abi::CHROMA_422,
    /// Full size.
    C444 = abi::CHROMA_444,
}

impl Chroma {
    /// All of them.
    pub const ALL: [Chroma; 4] = [Chroma::Mono, Chroma::C420, Chroma::C422, Chroma::C444];

    /// The format of a code of the ABI.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Chroma> {
        Chroma::ALL.into_iter().find(|c| *c as u32 == code)
    }

    /// Number of planes: 1 or 3.
    #[must_use]
    pub fn planes(self) -> usize {
        if self == Chroma::Mono { 1 } else { 3 }
    }

    /// Width and height of plane `index` of a frame; odd sizes round up.
    #[must_use]
    pub fn plane_size(self, index: usize, width: u32, height: u32) -> (u32, u32) {
        match (index, self) {
            (0, _) | (_, Chroma::C444) => (width, height),
            (_, Chroma::C422) => (width.div_ceil(2), height),
            (_, Chroma::C420) => (width.div_ceil(2), height.div_ceil(2)),
            (_, Chroma::Mono) => (0, 0),
        }
    }
}

/// Where payloads lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// Ordinary memory.
    Host,
    /// Memory of a CUDA device; the work is ordered by `stream`. These are numbers here; what must be true of them is
    /// said where they are used ([`crate::KernelSet::open_on_device`]).
    Cuda {
        /// The `CUcontext`.
        context: u64,
        /// The `CUstream`; 0 is the context's default stream.
        stream: u64,
    },
}

/// What a session is made for.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SessionConfig {
    /// Width of the luma plane, at least 16.
    pub width: u32,
    /// Height of the luma plane, at least 16.
    pub height: u32,
    /// Chroma format.
    pub chroma: Chroma,
    /// Most frames in one chunk, at least 1.
    pub max_frames: u32,
    /// Most threads that a call may use; 0 means as many as the machine has.
    pub threads: u32,
    /// Standard deviation of the clip's noise in 8-bit sample values (0 to 255); `None` estimates it from the frames.
    pub noise_sigma: Option<f32>,
    /// Where payloads lie.
    pub space: Space,
}

impl SessionConfig {
    /// Smallest width and height.
    pub const MIN_SIDE: u32 = 16;
    /// Largest width and height.
    pub const MAX_SIDE: u32 = 32_768;

    /// A session on host memory that estimates the noise and uses every core.
    #[must_use]
    pub fn host(width: u32, height: u32, chroma: Chroma, max_frames: u32) -> SessionConfig {
        SessionConfig {
            width,
            height,
            chroma,
            max_frames,
            threads: 0,
            noise_sigma: None,
            space: Space::Host,
        }
    }

    /// A session in the memory of a CUDA device that estimates the noise: `context` is a `CUcontext`, `stream` a
    /// `CUstream` of it.
    #[must_use]
    pub fn cuda(
        width: u32,
        height: u32,
        chroma: Chroma,
        max_frames: u32,
        context: u64,
        stream: u64,
    ) -> SessionConfig {
        SessionConfig {
            space: Space::Cuda { context, stream },
            ..SessionConfig::host(width, height, chroma, max_frames)
        }
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// The first number that is out of its range, and the range.
    pub fn validate(&self) -> Result<(), Failure> {
        let sides = Self::MIN_SIDE..=Self::MAX_SIDE;
        if !sides.contains(&self.width) || !sides.contains(&self.height) {
            return Err(Failure::invalid(format!(
                "frames of {}x{}: each side must lie within {} and {}",
                self.width,
                self.height,
                Self::MIN_SIDE,
                Self::MAX_SIDE
            )));
        }
        if self.max_frames == 0 || self.max_frames > 1024 {
            return Err(Failure::invalid(format!(
                "{} frames in a chunk: must lie within 1 and 1024",
                self.max_frames
            )));
        }
        match self.noise_sigma {
            Some(sigma) if !(0.0..=255.0).contains(&sigma) => Err(Failure::invalid(format!(
                "a noise of {sigma}: must lie within 0 and 255"
            ))),
            _ => Ok(()),
        }
    }

    pub(crate) fn to_abi(self) -> abi::SessionConfig {
        let (space, device, stream) = match self.space {
            Space::Host => (abi::SPACE_HOST, 0, 0),
            Space::Cuda { context, stream } => (abi::SPACE_CUDA, context, stream),
        };
        abi::SessionConfig {
            struct_size: abi::size::<abi::SessionConfig>(),
            space,
            width: self.width,
            height: self.height,
            chroma: self.chroma as u32,
            max_frames: self.max_frames,
            threads: self.threads,
            noise_sigma: self.noise_sigma.unwrap_or(-1.0),
            device,
            stream,
        }
    }

    pub(crate) fn from_abi(raw: &abi::SessionConfig) -> Result<SessionConfig, Failure> {
        let chroma = Chroma::from_code(raw.chroma)
            .ok_or_else(|| Failure::unsupported(format!("unknown chroma format {}", raw.chroma)))?;
        let space = match raw.space {
            abi::SPACE_HOST => Space::Host,
            abi::SPACE_CUDA => Space::Cuda {
                context: raw.device,
                stream: raw.stream,
            },
            other => {
                return Err(Failure::unsupported(format!(
                    "unknown memory space {other}"
                )));
            }
        };
        let config = SessionConfig {
            width: raw.width,
            height: raw.height,
            chroma,
            max_frames: raw.max_frames,
            threads: raw.threads,
            noise_sigma: (raw.noise_sigma >= 0.0).then_some(raw.noise_sigma),
            space,
        };
        config.validate()?;
        Ok(config)
    }
}

/// What the tensors of one chunk depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkShape {
    /// Frames in the chunk.
    pub frames: u32,
    /// `num_denoise_steps` of the plan.
    pub steps: u32,
    /// Frames in the tensor `context_frames`: 0 exactly when the plan has no recompute; otherwise at most
    /// [`Description::context_frames`] and at most the frames seen since the last hard cut.
    pub context_frames: u32,
}

/// The tensors that travel to `phase_b` and those that come back.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layout {
    /// Written by `encode`, read by `phase_b`.
    pub inputs: Manifest,
    /// Written by `phase_b`, read by `decode`.
    pub outputs: Manifest,
}

/// What a set of kernels says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Description {
    /// Name, for people and reports.
    pub name: String,
    /// Version of the kernels, not of the ABI.
    pub version: String,
    /// Whether payloads may lie in host memory.
    pub host: bool,
    /// Whether payloads may lie in CUDA device memory.
    pub cuda: bool,
    /// Chroma formats they take.
    pub chroma: Vec<Chroma>,
    /// Most frames of earlier chunks that `phase_b` looks at.
    pub context_frames: u32,
    /// Changes when results may change; two ranks must agree on it.
    pub digest: u64,
}

impl Description {
    pub(crate) fn to_abi(&self, out: &mut abi::Description) {
        out.spaces =
            u32::from(self.host) << abi::SPACE_HOST | u32::from(self.cuda) << abi::SPACE_CUDA;
        out.chroma_formats = self.chroma.iter().fold(0, |bits, c| bits | 1 << *c as u32);
        out.context_frames = self.context_frames;
        out.digest = self.digest;
        write_text(&mut out.name, &self.name);
        write_text(&mut out.version, &self.version);
    }

    pub(crate) fn from_abi(raw: &abi::Description) -> Result<Description, String> {
        let name = read_text(&raw.name).ok_or("its name is not a text that ends with a NUL")?;
        let version =
            read_text(&raw.version).ok_or("its version is not a text that ends with a NUL")?;
        if name.is_empty() || name.chars().any(char::is_control) {
            return Err("its name is empty or holds control characters".into());
        }
        let description = Description {
            name: name.into(),
            version: version.into(),
            host: raw.spaces & 1 << abi::SPACE_HOST != 0,
            cuda: raw.spaces & 1 << abi::SPACE_CUDA != 0,
            chroma: Chroma::ALL
                .into_iter()
                .filter(|c| raw.chroma_formats & 1 << *c as u32 != 0)
                .collect(),
            context_frames: raw.context_frames,
            digest: raw.digest,
        };
        if !description.host && !description.cuda {
            return Err("it supports no memory space".into());
        }
        if description.chroma.is_empty() {
            return Err("it supports no chroma format".into());
        }
        Ok(description)
    }
}

/// Copies as much of `text` as fits in front of a NUL, cut at a character.
pub(crate) fn write_text(out: &mut [u8], text: &str) {
    out.fill(0);
    let mut end = text.len().min(out.len() - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    out[..end].copy_from_slice(&text.as_bytes()[..end]);
}

/// The text in front of the NUL; `None` where there is no NUL or it is not UTF-8.
pub(crate) fn read_text(raw: &[u8]) -> Option<&str> {
    let end = raw.iter().position(|b| *b == 0)?;
    std::str::from_utf8(&raw[..end]).ok()
}
