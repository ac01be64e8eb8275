//! The kernels under test, and a stream through sessions of all their stages.

use std::fmt;

use pp_contract::{Manifest, VideoPlanParts, pass_range};
use pp_device::{CudaError, Stream as DeviceStream};

use super::group;
use super::outcome::{Outcome, fail};
use super::session::{CheckedSession, Hears};
use crate::config::{Chroma, ChunkShape, SessionConfig, Space};
use crate::cuda::borrow;
use crate::plugin::KernelSet;
use crate::stage::StageKind;

/// Fills memory that nothing has written.
const FILL: u8 = 0xA5;

/// Kernels to check, and the memory in which their payloads are to lie.
pub struct Bench<'a> {
    pub(super) set: &'a KernelSet,
    /// Of a device.
    stream: Option<DeviceStream>,
    hears: Hears<'a>,
}

impl fmt::Debug for Bench<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bench")
            .field("set", &self.set)
            .field("stream", &self.stream)
            .finish_non_exhaustive()
    }
}

impl<'a> Bench<'a> {
    /// Sessions on host memory.
    #[must_use]
    pub fn on_host(set: &'a KernelSet) -> Self {
        Bench {
            set,
            stream: None,
            hears: None,
        }
    }

    /// Sessions in the memory of a CUDA device.
    ///
    /// # Safety
    /// `context` is a live `CUcontext` and `stream` a live `CUstream` of it. Both outlive the bench. The context is
    /// current on the calling thread, and on every thread that runs a check on the bench.
    ///
    /// # Errors
    /// No driver, one that is too old, or another context is current.
    pub unsafe fn on_device(
        set: &'a KernelSet,
        context: u64,
        stream: u64,
    ) -> Result<Self, CudaError> {
        // SAFETY: the caller's duty.
        let stream = Some(unsafe { borrow(context, stream) }?);
        Ok(Bench {
            set,
            stream,
            hears: None,
        })
    }

    /// Tells of each call before it is made: the call in which kernels crash or hang is the last that was told.
    #[must_use]
    pub fn heard_by(self, hears: &'a (dyn Fn(&str) + Sync)) -> Self {
        let hears = Some(hears);
        Bench { hears, ..self }
    }
}

/// Frames that look a little like pictures: gradients, an edge, a texture, and noise.
fn picture(config: &SessionConfig, frame: usize, seed: u64) -> Vec<u8> {
    let (width, height) = (config.width as usize, config.height as usize);
    let mut bytes = vec![
        0;
        config
            .chroma
            .packed_frame_bytes(config.width, config.height)
    ];
    for (index, byte) in bytes.iter_mut().enumerate() {
        let (x, y) = (index % width + frame, index / width % height);
        let edge = if x > width / 2 { 60 } else { 0 };
        *byte = ((x * 3 + y * 2) % 120 + edge + (x / 3 + y / 5) % 2 * 20) as u8;
    }
    crate::denoise::cpu::add_gaussian(&mut bytes, 8.0, seed, frame as u64, 0);
    bytes
}

/// How the middle stage of a name is shared out.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sharing<'a> {
    pub(super) stage: &'a str,
    pub(super) parts: u32,
    pub(super) laps: u32,
    pub(super) members: u32,
}

impl<'a> Sharing<'a> {
    /// Whole, run by so many members.
    pub(super) fn group(stage: &'a str, members: u32) -> Sharing<'a> {
        Sharing {
            stage,
            parts: 1,
            laps: 1,
            members,
        }
    }
}

/// The middle stages of one stream, each with sessions of its own.
pub(super) struct Middle<'a> {
    /// The members of each part of each stage.
    sessions: Vec<Vec<CheckedSession<'a>>>,
    /// Where a chunk comes by: sessions and lap.
    steps: Vec<(usize, u32)>,
}

/// A chunk between two stages.
pub(super) struct Travelling {
    pub(super) tensors: Manifest,
    pub(super) bytes: Vec<u8>,
}

impl<'a> Middle<'a> {
    pub(super) fn open(
        bench: &Bench<'a>,
        config: &SessionConfig,
        cut: Option<Sharing<'_>>,
    ) -> Outcome<Middle<'a>> {
        let (mut sessions, mut steps) = (Vec::new(), Vec::new());
        let stages = bench.set.stages().iter();
        for stage in stages.filter(|stage| stage.kind == StageKind::Middle) {
            let cut = cut.filter(|cut| cut.stage == stage.name);
            let cut = cut.unwrap_or(Sharing::group(&stage.name, 1));
            let first = sessions.len();
            for part in 0..cut.parts {
                let member = |member| SessionConfig {
                    part,
                    parts: cut.parts,
                    laps: cut.laps,
                    member,
                    members: cut.members,
                    ..*config
                };
                let members = (0..cut.members).map(|at| bench.open(&stage.name, &member(at)));
                sessions.push(members.collect::<Outcome<Vec<_>>>()?);
            }
            for lap in 0..cut.laps {
                steps.extend((first..sessions.len()).map(|at| (at, lap)));
            }
        }
        Ok(Middle { sessions, steps })
    }

    /// The session of a stage that is not shared out, by its place among the middle stages.
    pub(super) fn only(&mut self, at: usize) -> &mut CheckedSession<'a> {
        &mut self.sessions[at][0]
    }

    /// A chunk through all of them.
    pub(super) fn run(
        &mut self,
        shape: ChunkShape,
        plan: &VideoPlanParts,
        mut chunk: Travelling,
    ) -> Outcome<Travelling> {
        for &(at, lap) in &self.steps {
            let members = &mut self.sessions[at][..];
            let config = *members[0].raw.config();
            let layout = members[0].layout(shape, lap)?;
            let name = members[0].raw.stage().name.clone();
            follows(&name, &layout.inputs, &chunk.tensors)?;
            let tensors = [&layout.inputs, &layout.outputs];
            let (bytes, calls) = run_members(members, plan, lap, tensors, &chunk.bytes)?;
            let (part, parts) = (lap * config.parts + config.part, config.laps * config.parts);
            let passes =
                pass_range(plan.num_denoise_steps, part as usize, parts as usize).len() as u32;
            let expected = passes + u32::from(plan.do_kv_recompute);
            if calls != expected {
                return fail(format!(
                    "{name} made {calls} generator calls, the plan expects {expected}"
                ));
            }
            chunk = Travelling {
                tensors: layout.outputs,
                bytes,
            };
        }
        Ok(chunk)
    }
}

/// What a stage gets must be what the one before it gives.
pub(super) fn follows(name: &str, gets: &Manifest, given: &Manifest) -> Outcome {
    if gets == given {
        return Ok(());
    }
    let list = |tensors: &Manifest| {
        let tensors: Vec<String> = tensors
            .iter()
            .map(|(_, tensor)| tensor.to_string())
            .collect();
        tensors.join(", ")
    };
    fail(format!(
        "{name} gets [{}], what comes before it gives [{}]",
        list(gets),
        list(given)
    ))
}

/// One call of all members, each on a thread of its own if there are several.
fn run_members(
    members: &mut [CheckedSession<'_>],
    plan: &VideoPlanParts,
    lap: u32,
    tensors: [&Manifest; 2],
    input: &[u8],
) -> Outcome<(Vec<u8>, u32)> {
    if let [alone] = members {
        return alone.run(plan, lap, tensors, input, None);
    }
    std::thread::scope(|scope| {
        let joined = group::members(members.len() as u32)
            .into_iter()
            .zip(members);
        let calls: Vec<_> = joined
            .map(|(mut member, session)| {
                scope.spawn(move || {
                    session.join(&mut member)?;
                    session.run(plan, lap, tensors, input, Some(&mut member))
                })
            })
            .collect();
        let mut results = calls.into_iter().map(|call| match call.join() {
            Ok(result) => result,
            Err(_) => fail("a member of the group panicked"),
        });
        let leader = results
            .next()
            .unwrap_or_else(|| fail("the group has no member"));
        for result in results {
            result?;
        }
        leader
    })
}

/// One stream through sessions of all stages.
pub(super) struct Stream<'a> {
    pub(super) source: CheckedSession<'a>,
    pub(super) middle: Middle<'a>,
    pub(super) sink: CheckedSession<'a>,
    seen: u64,
}

/// A chunk that went through all stages.
pub(super) struct Passed {
    pub(super) frames: Vec<Vec<u8>>,
    /// What the source gave, and what the sink got.
    pub(super) first: Travelling,
    pub(super) last: Travelling,
}

impl<'a> Stream<'a> {
    pub(super) fn open(bench: &Bench<'a>, config: &SessionConfig) -> Outcome<Stream<'a>> {
        Self::open_cut(bench, config, None)
    }

    pub(super) fn open_cut(
        bench: &Bench<'a>,
        config: &SessionConfig,
        cut: Option<Sharing<'_>>,
    ) -> Outcome<Stream<'a>> {
        let [source, .., sink] = bench.set.stages() else {
            return fail("there is no source or no sink");
        };
        Ok(Stream {
            source: bench.open(&source.name, config)?,
            middle: Middle::open(bench, config, cut)?,
            sink: bench.open(&sink.name, config)?,
            seen: 0,
        })
    }

    /// Whether the sink gives frames like those that the source takes.
    pub(super) fn keeps_frames(&self) -> bool {
        self.sink.raw.frames() == self.source.raw.frames()
    }

    /// Runs one chunk.
    pub(super) fn chunk(
        &mut self,
        frames: &[Vec<u8>],
        steps: u32,
        context: u32,
    ) -> Outcome<Passed> {
        let config = *self.source.raw.config();
        let shape = ChunkShape {
            frames: frames.len() as u32,
            steps,
            context_frames: context,
        };
        let first = VideoPlanParts::first(config.width, config.height, steps);
        let plan = match self.seen {
            0 => first,
            seen => first.following(seen, context > 0),
        };
        self.seen += frames.len() as u64;

        let tensors = self.source.layout(shape, 0)?.outputs;
        let bytes = self.source.encode(frames, &plan, &tensors)?;
        let again = Travelling {
            tensors: tensors.clone(),
            bytes: bytes.clone(),
        };
        let last = self.middle.run(shape, &plan, again)?;
        let inputs = self.sink.layout(shape, 0)?.inputs;
        follows(&self.sink.raw.stage().name, &inputs, &last.tensors)?;
        let count = frames.len() * self.sink.raw.frames().frames_per_frame as usize;
        let frames = self.sink.decode(&plan, &inputs, &last.bytes, count)?;
        Ok(Passed {
            frames,
            first: Travelling { tensors, bytes },
            last,
        })
    }
}

impl<'a> Bench<'a> {
    /// Opens a session of a stage. On a device each member of a group but the first has a stream of its own.
    pub(super) fn open(&self, stage: &str, config: &SessionConfig) -> Outcome<CheckedSession<'a>> {
        let stream = match &self.stream {
            Some(stream) if config.member > 0 => Some(DeviceStream::new(stream.device())?),
            stream => stream.clone(),
        };
        let space = stream.as_ref().map_or(Space::Host, |stream| Space::Cuda {
            context: stream.device().raw_context(),
            stream: stream.raw(),
        });
        let config = SessionConfig { space, ..*config };
        if let Some(hears) = self.hears {
            hears(&format!("create of {stage}"));
        }
        // SAFETY: what `on_device` asks of its caller; a stream of its own is kept beside the session and dropped behind it.
        let raw = unsafe { self.set.open_raw(stage, &config, &[]) }?;
        Ok(CheckedSession {
            raw,
            stream,
            hears: self.hears,
            fill: FILL,
        })
    }

    /// A small session in the first chroma format that the kernels serve.
    pub(super) fn config(&self) -> SessionConfig {
        self.config_of(40, 24, self.set.describe().chroma[0])
    }

    pub(super) fn config_of(&self, width: u32, height: u32, chroma: Chroma) -> SessionConfig {
        SessionConfig {
            threads: 2,
            ..SessionConfig::host(width, height, chroma, 3)
        }
    }

    pub(super) fn pictures(
        &self,
        config: &SessionConfig,
        first: usize,
        count: usize,
    ) -> Vec<Vec<u8>> {
        (first..first + count)
            .map(|frame| picture(config, frame, 1))
            .collect()
    }

    /// Two chunks of so many steps, and with recompute if the kernels have a context; `between` runs between them.
    pub(super) fn two_chunks(
        &self,
        stream: &mut Stream<'_>,
        steps: u32,
        between: impl FnOnce() -> Outcome,
    ) -> Outcome<(Vec<Vec<u8>>, Vec<u8>)> {
        let config = *stream.source.raw.config();
        let context = self.set.describe().context_frames.min(3);
        let one = stream.chunk(&self.pictures(&config, 0, 3), steps, 0)?;
        between()?;
        let two = stream.chunk(&self.pictures(&config, 3, 2), steps, context)?;
        let bytes = [
            one.first.bytes,
            one.last.bytes,
            two.first.bytes,
            two.last.bytes,
        ];
        Ok(([one.frames, two.frames].concat(), bytes.concat()))
    }
}
