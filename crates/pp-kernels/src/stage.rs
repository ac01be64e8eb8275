//! What kernels say about themselves: their name and memory, their stages, and what the frames of a stage look like.

use pp_contract::MAX_CONTEXT_GAPS;
use serde::{Deserialize, Serialize};

use crate::abi;
use crate::config::{Bits, Chroma, SessionConfig, read_text, write_text};

/// What a stage takes and gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[repr(u32)]
pub enum StageKind {
    /// Frames to tensors.
    Source = abi::STAGE_SOURCE,
    /// Tensors to tensors.
    Middle = abi::STAGE_MIDDLE,
    /// Tensors to frames.
    Sink = abi::STAGE_SINK,
}

/// A stage of a set of kernels.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageInfo {
    /// Its name in a pipeline: a to z, 0 to 9, `_` and `-`.
    pub name: String,
    /// What it takes and gives.
    pub kind: StageKind,
    /// Whether its passes can be cut into parts.
    pub in_parts: bool,
    /// Whether the members of a group can run it together.
    pub in_group: bool,
    /// Whether a chunk can come by several times.
    pub in_ring: bool,
    /// Whether the result of a chunk depends on that chunk alone.
    pub no_memory: bool,
    /// Whether it gives the same bytes in host memory and in CUDA device memory.
    pub same_bytes: bool,
    /// Whether it gives what it should behind frames that are missing.
    pub in_gaps: bool,
    /// Whether the number of denoising steps may differ from chunk to chunk.
    pub any_steps: bool,
}

impl StageInfo {
    /// A stage that runs whole, alone and once, and may have a memory.
    #[must_use]
    pub fn new(name: &str, kind: StageKind) -> StageInfo {
        StageInfo {
            name: name.into(),
            kind,
            in_parts: false,
            in_group: false,
            in_ring: false,
            no_memory: false,
            same_bytes: false,
            in_gaps: false,
            any_steps: false,
        }
    }

    /// Whether chunks behind a gap need no cut: it has the flag, or no memory.
    #[must_use]
    pub fn takes_gaps(&self) -> bool {
        self.in_gaps || self.no_memory
    }

    pub(crate) const EMPTY: abi::PpStage = abi::PpStage {
        name: [0; 48],
        kind: 0,
        flags: 0,
    };

    pub(crate) fn to_abi(&self) -> abi::PpStage {
        let flags = [
            (self.in_parts, abi::STAGE_PARTS),
            (self.in_group, abi::STAGE_GROUP),
            (self.in_ring, abi::STAGE_RING),
            (self.no_memory, abi::STAGE_NO_MEMORY),
            (self.same_bytes, abi::STAGE_SAME_BYTES),
            (self.in_gaps, abi::STAGE_GAPS),
            (self.any_steps, abi::STAGE_STEPS),
        ];
        let mut raw = Self::EMPTY;
        write_text(&mut raw.name, &self.name);
        raw.kind = self.kind as u32;
        raw.flags = (flags.iter()).fold(0, |bits, (is, flag)| if *is { bits | flag } else { bits });
        raw
    }

    fn from_abi(raw: &abi::PpStage) -> Result<StageInfo, String> {
        let name =
            read_text(&raw.name).ok_or("a stage's name is not a text that ends with a NUL")?;
        let is_plain = |c: char| matches!(c, 'a'..='z' | '0'..='9' | '_' | '-');
        if name.is_empty() || !name.chars().all(is_plain) {
            return Err(format!(
                "the stage name {name:?} is not of a to z, 0 to 9, _ and -"
            ));
        }
        let kinds = [StageKind::Source, StageKind::Middle, StageKind::Sink];
        let kind = (kinds.into_iter().find(|kind| *kind as u32 == raw.kind))
            .ok_or_else(|| format!("the stage {name} is of the unknown kind {}", raw.kind))?;
        let of_middle =
            abi::STAGE_PARTS | abi::STAGE_GROUP | abi::STAGE_RING | abi::STAGE_NO_MEMORY;
        let of_any = abi::STAGE_SAME_BYTES | abi::STAGE_GAPS | abi::STAGE_STEPS;
        let allowed = match kind {
            StageKind::Middle => of_middle | of_any,
            _ => of_any,
        };
        if raw.flags & !allowed != 0 {
            return Err(format!(
                "the stage {name} has the flags {:#x}, of which its kind allows {allowed:#x}",
                raw.flags
            ));
        }
        Ok(StageInfo {
            name: name.into(),
            kind,
            in_parts: raw.flags & abi::STAGE_PARTS != 0,
            in_group: raw.flags & abi::STAGE_GROUP != 0,
            in_ring: raw.flags & abi::STAGE_RING != 0,
            no_memory: raw.flags & abi::STAGE_NO_MEMORY != 0,
            same_bytes: raw.flags & abi::STAGE_SAME_BYTES != 0,
            in_gaps: raw.flags & abi::STAGE_GAPS != 0,
            any_steps: raw.flags & abi::STAGE_STEPS != 0,
        })
    }

    /// The stages of a set: a source, middle stages, a sink, each with a name of its own.
    pub(crate) fn all_from_abi(raw: &[abi::PpStage]) -> Result<Vec<StageInfo>, String> {
        let stages: Vec<StageInfo> = raw.iter().map(Self::from_abi).collect::<Result<_, _>>()?;
        let last = stages.len().saturating_sub(1);
        if last == 0 {
            return Err(format!(
                "it has {} stages, at least a source and a sink must be there",
                stages.len()
            ));
        }
        for (at, stage) in stages.iter().enumerate() {
            let must = match at {
                0 => StageKind::Source,
                at if at == last => StageKind::Sink,
                _ => StageKind::Middle,
            };
            if stage.kind != must {
                return Err(format!(
                    "stage {at}, {}, is a {:?} and must be a {must:?}: the first is the source, the last is the sink",
                    stage.name, stage.kind
                ));
            }
            if stages[..at].iter().any(|other| other.name == stage.name) {
                return Err(format!("two stages are named {}", stage.name));
            }
        }
        Ok(stages)
    }
}

/// What a set of kernels says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Description {
    /// Name, for people and reports.
    pub name: String,
    /// Version of the kernels, not of the ABI.
    pub version: String,
    /// Whether payloads may lie in host memory.
    pub host: bool,
    /// Whether payloads may lie in CUDA device memory.
    pub cuda: bool,
    /// Chroma formats that the source takes.
    pub chroma: Vec<Chroma>,
    /// Most bits of a sample that the stages take; all take 8.
    pub bits: Bits,
    /// Most frames of earlier chunks that a middle stage looks at.
    pub context_frames: u32,
    /// Changes when results may change; all ranks must agree on it.
    pub digest: u64,
    /// The stages in the order of the pipeline: a source, middle stages, a sink.
    pub stages: Vec<StageInfo>,
}

impl Description {
    /// Whether the stages of these names take frames that are missing, without a cut. A plan tells of the gaps between so many
    /// frames of context alone.
    #[must_use]
    pub fn takes_gaps<'a>(&self, stages: impl IntoIterator<Item = &'a str>) -> bool {
        self.context_frames as usize <= MAX_CONTEXT_GAPS + 1
            && self.have(stages, StageInfo::takes_gaps)
    }

    /// Whether the stages of these names take chunks of different numbers of denoising steps.
    #[must_use]
    pub fn takes_steps<'a>(&self, stages: impl IntoIterator<Item = &'a str>) -> bool {
        self.have(stages, |stage| stage.any_steps)
    }

    fn have<'a>(
        &self,
        names: impl IntoIterator<Item = &'a str>,
        is: impl Fn(&StageInfo) -> bool,
    ) -> bool {
        let has = |name| (self.stages.iter()).any(|stage| stage.name == name && is(stage));
        names.into_iter().all(has)
    }

    /// Writes all but the stages.
    pub(crate) fn to_abi(&self, out: &mut abi::PpDescription) {
        out.spaces =
            u32::from(self.host) << abi::SPACE_HOST | u32::from(self.cuda) << abi::SPACE_CUDA;
        out.chroma_formats = self.chroma.iter().fold(0, |bits, c| bits | 1 << *c as u32);
        out.bits = self.bits.code();
        out.context_frames = self.context_frames;
        out.digest = self.digest;
        write_text(&mut out.name, &self.name);
        write_text(&mut out.version, &self.version);
    }

    pub(crate) fn from_abi(
        raw: &abi::PpDescription,
        stages: &[abi::PpStage],
    ) -> Result<Description, String> {
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
            bits: Bits::from_code(raw.bits)
                .ok_or_else(|| format!("it takes samples of {} bits", raw.bits))?,
            context_frames: raw.context_frames,
            digest: raw.digest,
            stages: StageInfo::all_from_abi(stages)?,
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

/// The frames that a stage takes or gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameGeometry {
    /// Width of the luma plane.
    pub width: u32,
    /// Height of the luma plane.
    pub height: u32,
    /// Chroma format.
    pub chroma: Chroma,
    /// Bits of a sample.
    pub bits: Bits,
    /// How many of them there are for each frame of the source: 1, and more where a sink interpolates.
    pub frames_per_frame: u32,
}

impl FrameGeometry {
    /// The frames that the source takes.
    #[must_use]
    pub fn of(config: &SessionConfig) -> FrameGeometry {
        FrameGeometry {
            width: config.width,
            height: config.height,
            chroma: config.chroma,
            bits: config.bits,
            frames_per_frame: 1,
        }
    }

    /// Width and height of plane `index`; odd sizes round up, and a plane that is not there has 0.
    #[must_use]
    pub fn plane_size(&self, index: usize) -> (u32, u32) {
        self.chroma.plane_size(index, self.width, self.height)
    }

    /// Bytes of one frame whose planes lie without gaps.
    #[must_use]
    pub fn frame_bytes(&self) -> usize {
        self.chroma.frame_samples(self.width, self.height) * self.bits.bytes()
    }

    pub(crate) fn to_abi(self) -> abi::PpGeometry {
        abi::PpGeometry {
            struct_size: abi::size::<abi::PpGeometry>(),
            width: self.width,
            height: self.height,
            chroma: self.chroma as u32,
            frames_per_frame: self.frames_per_frame,
            bits: self.bits.code(),
        }
    }

    /// Most frames for one frame of the source.
    const MOST_FRAMES: u32 = 16;

    pub(crate) fn from_abi(raw: &abi::PpGeometry) -> Result<FrameGeometry, String> {
        let chroma = Chroma::from_code(raw.chroma)
            .ok_or_else(|| format!("unknown chroma format {}", raw.chroma))?;
        let bits =
            Bits::from_code(raw.bits).ok_or_else(|| format!("samples of {} bits", raw.bits))?;
        let sides = 1..=SessionConfig::MAX_SIDE;
        if !sides.contains(&raw.width) || !sides.contains(&raw.height) {
            return Err(format!(
                "frames of {}x{}: each side must lie within 1 and {}",
                raw.width,
                raw.height,
                SessionConfig::MAX_SIDE
            ));
        }
        if !(1..=Self::MOST_FRAMES).contains(&raw.frames_per_frame) {
            return Err(format!(
                "{} frames for each of the source: must lie within 1 and {}",
                raw.frames_per_frame,
                Self::MOST_FRAMES
            ));
        }
        Ok(FrameGeometry {
            width: raw.width,
            height: raw.height,
            chroma,
            bits,
            frames_per_frame: raw.frames_per_frame,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_that_make_no_pipeline_are_refused_with_the_reason() {
        let stage = |name: &str, kind| StageInfo::new(name, kind).to_abi();
        let (source, sink) = (stage("a", StageKind::Source), stage("b", StageKind::Sink));
        let alike = StageInfo {
            same_bytes: true,
            ..StageInfo::new("a", StageKind::Source)
        };
        let middle = StageInfo {
            in_group: true,
            no_memory: true,
            same_bytes: true,
            in_gaps: true,
            any_steps: true,
            ..StageInfo::new("m-1", StageKind::Middle)
        };
        let read = StageInfo::all_from_abi(&[alike.to_abi(), middle.to_abi(), sink]).unwrap();
        assert_eq!(read[..2], [alike, middle.clone()]);
        let flagged = |mut stage: abi::PpStage, flags| {
            stage.flags = flags;
            stage
        };
        let cases: [(&[abi::PpStage], &str); 9] = [
            (&[], "it has 0 stages"),
            (&[source], "it has 1 stages"),
            (
                &[source, source],
                "stage 1, a, is a Source and must be a Sink",
            ),
            (
                &[sink, source],
                "stage 0, b, is a Sink and must be a Source",
            ),
            (
                &[source, middle.to_abi(), middle.to_abi(), sink],
                "two stages are named m-1",
            ),
            (
                &[stage("A", StageKind::Source), sink],
                "stage name \"A\" is not of",
            ),
            (
                &[stage("", StageKind::Source), sink],
                "stage name \"\" is not of",
            ),
            (&[flagged(source, abi::STAGE_PARTS), sink], "allows 0x70"),
            (
                &[source, flagged(middle.to_abi(), 128), sink],
                "has the flags 0x80",
            ),
        ];
        for (stages, words) in cases {
            let error = StageInfo::all_from_abi(stages).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
