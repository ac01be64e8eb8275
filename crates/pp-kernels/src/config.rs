//! What a session is made for: size, chroma format, memory, threads, and its share of the work.

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

    /// Samples of all planes of one frame.
    #[must_use]
    pub fn frame_samples(self, width: u32, height: u32) -> usize {
        (0..self.planes())
            .map(|index| {
                let (w, h) = self.plane_size(index, width, height);
                w as usize * h as usize
            })
            .sum()
    }
}

/// How many bits a sample has.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[repr(u32)]
pub enum Bits {
    /// A byte, 0 to 255.
    #[default]
    Eight = 8,
    /// Two bytes, the lower one first: 0 to 1023.
    Ten = 10,
}

impl Bits {
    /// All of them, the fewest first.
    pub const ALL: [Bits; 2] = [Bits::Eight, Bits::Ten];

    /// The bits of a code of the ABI; 0 is 8, as versions before 2.4 have it.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Bits> {
        match code {
            0 => Some(Bits::Eight),
            code => Bits::ALL.into_iter().find(|bits| *bits as u32 == code),
        }
    }

    pub(crate) fn code(self) -> u32 {
        match self {
            Bits::Eight => 0,
            bits => bits as u32,
        }
    }

    /// Bytes of a sample.
    #[must_use]
    pub fn bytes(self) -> usize {
        (self as usize).div_ceil(8)
    }

    /// The largest sample.
    #[must_use]
    pub fn peak(self) -> u16 {
        (1 << self as u32) - 1
    }

    /// Steps of a sample in one step of 8 bits: what noise is measured in.
    #[must_use]
    pub fn scale(self) -> u16 {
        1 << (self as u32 - 8)
    }

    /// What ffmpeg calls such samples in this chroma format.
    #[must_use]
    pub fn ffmpeg_name(self, chroma: Chroma) -> &'static str {
        match (chroma, self) {
            (Chroma::Mono, Bits::Eight) => "gray",
            (Chroma::Mono, Bits::Ten) => "gray10le",
            (Chroma::C420, Bits::Eight) => "yuv420p",
            (Chroma::C420, Bits::Ten) => "yuv420p10le",
            (Chroma::C422, Bits::Eight) => "yuv422p",
            (Chroma::C422, Bits::Ten) => "yuv422p10le",
            (Chroma::C444, Bits::Eight) => "yuv444p",
            (Chroma::C444, Bits::Ten) => "yuv444p10le",
        }
    }
}

/// Where payloads lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// Ordinary memory.
    Host,
    /// Memory of a CUDA device; the work is ordered by `stream`. These are numbers here; what must be true of them is
    /// said where they are used ([`crate::KernelSet::open_stage_on_device`]).
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
    /// Width of the luma plane of the source's frames, at least 16.
    pub width: u32,
    /// Height of the luma plane of the source's frames, at least 16.
    pub height: u32,
    /// Chroma format of the source's frames.
    pub chroma: Chroma,
    /// Bits of a sample of the source's frames.
    pub bits: Bits,
    /// Most of the source's frames in one chunk, at least 1.
    pub max_frames: u32,
    /// Most threads that a call may use; 0 means as many as the machine has.
    pub threads: u32,
    /// Standard deviation of the clip's noise in 8-bit sample values (0 to 255), whatever `bits` is; `None` estimates it from
    /// the frames.
    pub noise_sigma: Option<f32>,
    /// Where payloads lie.
    pub space: Space,
    /// Which part of its stage the session runs, from 0 on.
    pub part: u32,
    /// How many parts there are; 1: the session runs the whole stage.
    pub parts: u32,
    /// How often a chunk comes by; 1 where the stage stands in no ring.
    pub laps: u32,
    /// Which member of its group the session is, from 0 on.
    pub member: u32,
    /// How many members the group has; 1: the session runs alone.
    pub members: u32,
}

impl SessionConfig {
    /// Smallest width and height.
    pub const MIN_SIDE: u32 = 16;
    /// Largest width and height.
    pub const MAX_SIDE: u32 = 32_768;
    /// Most parts, members and laps.
    pub const MOST_PARTS: u32 = 4096;

    /// A session on host memory and 8 bits a sample that estimates the noise and uses every core.
    #[must_use]
    pub fn host(width: u32, height: u32, chroma: Chroma, max_frames: u32) -> SessionConfig {
        SessionConfig {
            width,
            height,
            chroma,
            bits: Bits::Eight,
            max_frames,
            threads: 0,
            noise_sigma: None,
            space: Space::Host,
            part: 0,
            parts: 1,
            laps: 1,
            member: 0,
            members: 1,
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
        for (what, at, of) in [
            ("part", self.part, self.parts),
            ("member", self.member, self.members),
        ] {
            if at >= of {
                return Err(Failure::invalid(format!(
                    "{what} {at} of {of}: {what}s are counted from 0"
                )));
            }
        }
        let most = Self::MOST_PARTS;
        if self.parts > most || self.members > most || !(1..=most).contains(&self.laps) {
            return Err(Failure::invalid(format!(
                "{} parts, {} members, {} laps: each must lie within 1 and {most}",
                self.parts, self.members, self.laps
            )));
        }
        match self.noise_sigma {
            Some(sigma) if !(0.0..=255.0).contains(&sigma) => Err(Failure::invalid(format!(
                "a noise of {sigma}: must lie within 0 and 255"
            ))),
            _ => Ok(()),
        }
    }

    /// For the stage of this number; the pairs of `args` live as long as the result is used.
    pub(crate) fn to_abi(self, stage: u32, args: &[abi::PpArg]) -> abi::PpSessionConfig {
        let (space, device, stream) = match self.space {
            Space::Host => (abi::SPACE_HOST, 0, 0),
            Space::Cuda { context, stream } => (abi::SPACE_CUDA, context, stream),
        };
        abi::PpSessionConfig {
            struct_size: abi::size::<abi::PpSessionConfig>(),
            space,
            width: self.width,
            height: self.height,
            chroma: self.chroma as u32,
            max_frames: self.max_frames,
            threads: self.threads,
            noise_sigma: self.noise_sigma.unwrap_or(-1.0),
            device,
            stream,
            stage,
            part: self.part,
            parts: self.parts,
            laps: self.laps,
            member: self.member,
            members: self.members,
            arg_count: args.len() as u32,
            bits: self.bits.code(),
            args: args.as_ptr(),
        }
    }

    pub(crate) fn from_abi(raw: &abi::PpSessionConfig) -> Result<SessionConfig, Failure> {
        let chroma = Chroma::from_code(raw.chroma)
            .ok_or_else(|| Failure::unsupported(format!("unknown chroma format {}", raw.chroma)))?;
        let bits = Bits::from_code(raw.bits)
            .ok_or_else(|| Failure::unsupported(format!("samples of {} bits", raw.bits)))?;
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
            bits,
            max_frames: raw.max_frames,
            threads: raw.threads,
            noise_sigma: (raw.noise_sigma >= 0.0).then_some(raw.noise_sigma),
            space,
            part: raw.part,
            parts: raw.parts,
            laps: raw.laps,
            member: raw.member,
            members: raw.members,
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
    /// [`Description::context_frames`](crate::Description::context_frames) and at most the frames seen since the last
    /// hard cut.
    pub context_frames: u32,
}

/// The tensors of a chunk at one stage. What a stage, a part and a lap gives is what the next one gets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layout {
    /// What it reads; none of a source.
    pub inputs: Manifest,
    /// What it writes; none of a sink.
    pub outputs: Manifest,
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
