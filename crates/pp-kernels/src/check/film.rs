//! A film through sessions of all stages: a script says how long each chunk is and how it begins, and the bytes that each
//! stage made come out. The checks compare such bytes.

use pp_contract::{Manifest, VideoPlanParts, pass_range};

use super::group::members;
use super::outcome::{Outcome, fail};
use super::session::CheckedSession;
use super::subject::{MOST_FRAMES, Setup, Subject};
use crate::config::{Bits, ChunkShape, Layout, SessionConfig};
use crate::stage::StageKind;

/// A chunk of a script.
#[derive(Clone, Copy)]
pub(super) struct ScriptedChunk {
    pub(super) frames: u32,
    pub(super) steps: u32,
    /// Frames that are missing in front of it, of a chunk that is not the first.
    pub(super) skipped: u32,
    pub(super) begins: Begins,
}

/// Says how a chunk begins that is not the first.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Begins {
    Following,
    /// With as much context as there is.
    Recomputing,
    /// Behind a hard cut.
    AfterCut,
}

/// The payload that a stage made.
pub(super) struct StageOutput {
    pub(super) stage: String,
    pub(super) tensors: Manifest,
    pub(super) bytes: Vec<u8>,
}

impl StageOutput {
    pub(super) fn tensor(&self, name: &str) -> Outcome<&[u8]> {
        match self.tensors.range(name) {
            Some(range) => Ok(&self.bytes[range]),
            None => fail(format!("there is no tensor {name}")),
        }
    }

    /// Gives name, bytes and first dimension of the first tensor.
    pub(super) fn first(&self) -> Outcome<(&str, &[u8], u64)> {
        let Some((_, tensor)) = self.tensors.iter().next() else {
            return fail(format!("{} gives no tensor", self.stage));
        };
        let count = tensor.shape().dims().first().copied().unwrap_or(0);
        Ok((tensor.name(), self.tensor(tensor.name())?, count))
    }
}

/// A chunk that went through all stages.
pub(super) struct Passed {
    pub(super) plan: VideoPlanParts,
    /// Of each stage but the sink, in the order of the pipeline.
    pub(super) made: Vec<StageOutput>,
    /// Of the sink.
    pub(super) frames: Vec<Vec<u8>>,
}

impl Passed {
    /// Keeps what the sink made and got, and what the source made if `with_first`.
    pub(super) fn ends(mut self, with_first: bool) -> Passed {
        let last = self.made.len() - 1;
        self.made.drain(last.min(with_first.into())..last);
        self
    }

    /// Lists tensors and frames by name.
    fn pieces(&self) -> impl Iterator<Item = (String, &[u8])> {
        let tensors = self.made.iter().flat_map(|made| {
            made.tensors.iter().map(|(start, tensor)| {
                let name = format!("tensor {} of {}", tensor.name(), made.stage);
                (
                    name,
                    &made.bytes[start as usize..][..tensor.bytes() as usize],
                )
            })
        });
        let frames = self.frames.iter().enumerate();
        tensors.chain(frames.map(|(at, frame)| (format!("frame {at} of the sink"), &frame[..])))
    }
}

/// Names the first byte in which chunks differ.
pub(super) fn difference(these: &[Passed], others: &[Passed]) -> Option<String> {
    for (chunk, (one, other)) in these.iter().zip(others).enumerate() {
        for ((name, one), (other_name, other)) in one.pieces().zip(other.pieces()) {
            let at = one.iter().zip(other).position(|(one, other)| one != other);
            if name != other_name || one.len() != other.len() || at.is_some() {
                return Some(format!(
                    "byte {} of {name} in chunk {chunk}",
                    at.unwrap_or(0)
                ));
            }
        }
    }
    None
}

/// Makes the plan of the first chunk of sessions, which begins with frame `at`.
pub(super) fn plan(config: &SessionConfig, steps: u32, at: u64) -> VideoPlanParts {
    VideoPlanParts {
        current_start_frame: at,
        ..VideoPlanParts::first(config.width, config.height, steps)
    }
}

/// Draws frames that look a little like pictures: gradients, an edge, a texture, and noise.
pub(super) fn pictures(config: &SessionConfig, first: u64, count: u32) -> Vec<Vec<u8>> {
    let (width, height) = (config.width as usize, config.height as usize);
    let samples = (config.chroma).frame_samples(config.width, config.height);
    let picture = |frame: u64| {
        let sample = |at: usize| {
            let (x, y) = (at % width + frame as usize, at / width % height);
            let edge = if x > width / 2 { 60 } else { 0 };
            ((x * 3 + y * 2) % 120 + edge + (x / 3 + y / 5) % 2 * 20) as u8
        };
        let mut samples: Vec<u8> = (0..samples).map(sample).collect();
        crate::denoise::cpu::add_gaussian(&mut samples, 8.0, 1, frame, 0);
        let finer = |(at, sample): (usize, u8)| u16::from(sample) * 4 + at as u16 % 4;
        match config.bits {
            Bits::Eight => samples,
            Bits::Ten => {
                let samples = samples.into_iter().enumerate().map(finer);
                samples.flat_map(u16::to_le_bytes).collect()
            }
        }
    };
    (first..first + u64::from(count)).map(picture).collect()
}

/// Fails unless a stage gets what the one before it gives.
fn follows(name: &str, gets: &Manifest, given: &Manifest) -> Outcome {
    if gets == given {
        return Ok(());
    }
    let [gets, given] = [gets, given].map(|tensors| {
        let tensors = tensors.iter().map(|(_, tensor)| tensor.to_string());
        tensors.collect::<Vec<_>>().join(", ")
    });
    fail(format!(
        "{name} gets [{gets}], what comes before it gives [{given}]"
    ))
}

/// The middle stages of a film, each with sessions of its own.
pub(super) struct Middle<'a> {
    /// The members of each part of each stage.
    pub(super) sessions: Vec<Vec<CheckedSession<'a>>>,
    /// Where a chunk comes by: sessions and lap.
    visits: Vec<(usize, u32)>,
}

impl<'a> Middle<'a> {
    pub(super) fn open(subject: &Subject<'a>, setup: &Setup<'_>) -> Outcome<Middle<'a>> {
        let (mut sessions, mut visits) = (Vec::new(), Vec::new());
        let stages = subject.set.stages().iter();
        for stage in stages.filter(|stage| stage.kind == StageKind::Middle) {
            let sharing = setup.sharing.filter(|(name, _)| *name == stage.name);
            let (_, [parts, laps, members]) = sharing.unwrap_or(("", [1; 3]));
            let first = sessions.len();
            for part in 0..parts {
                let open = |member| {
                    let mut setup = *setup;
                    (setup.config.part, setup.config.parts) = (part, parts);
                    (setup.config.member, setup.config.members) = (member, members);
                    setup.config.laps = laps;
                    subject.open(&stage.name, &setup, subject.args)
                };
                sessions.push((0..members).map(open).collect::<Outcome<Vec<_>>>()?);
            }
            for lap in 0..laps {
                visits.extend((first..sessions.len()).map(|at| (at, lap)));
            }
        }
        Ok(Middle { sessions, visits })
    }

    /// Sends a chunk through all of them; gives what each made.
    pub(super) fn run(
        &mut self,
        shape: ChunkShape,
        plan: &VideoPlanParts,
        chunk: StageOutput,
    ) -> Outcome<Vec<StageOutput>> {
        let mut made = vec![chunk];
        for &(at, lap) in &self.visits {
            let members = &mut self.sessions[at][..];
            let config = *members[0].raw.config();
            let Layout { inputs, outputs } = members[0].layout(shape, lap)?;
            let stage = members[0].raw.stage().name.clone();
            let input = &made[made.len() - 1];
            follows(&stage, &inputs, &input.tensors)?;
            let tensors = [&inputs, &outputs];
            let (bytes, calls) = run_members(members, plan, lap, tensors, &input.bytes)?;
            let (part, parts) = (lap * config.parts + config.part, config.laps * config.parts);
            let passes = pass_range(plan.num_denoise_steps, part as usize, parts as usize).len();
            let expected = passes as u32 + u32::from(plan.do_kv_recompute);
            if calls != expected {
                return fail(format!(
                    "{stage} made {calls} generator calls, the plan expects {expected}"
                ));
            }
            let tensors = outputs;
            made.push(StageOutput {
                stage,
                tensors,
                bytes,
            });
        }
        Ok(made)
    }
}

/// Makes one call of all members, each on a thread of its own if there are several.
fn run_members(
    sessions: &mut [CheckedSession<'_>],
    plan: &VideoPlanParts,
    lap: u32,
    tensors: [&Manifest; 2],
    input: &[u8],
) -> Outcome<(Vec<u8>, u32)> {
    if let [alone] = sessions {
        return alone.run(plan, lap, tensors, input, None);
    }
    std::thread::scope(|scope| {
        let members = members(sessions.len() as u32).into_iter().zip(sessions);
        let calls = members.map(|(mut member, session)| {
            scope.spawn(move || {
                session.join(&mut member)?;
                session.run(plan, lap, tensors, input, Some(&mut member))
            })
        });
        let calls: Vec<_> = calls.collect();
        // The leader comes last: it fails, too, if it waits for a member that failed.
        let results = calls.into_iter().rev().map(|call| {
            let panicked = |_| fail("a member of the group panicked");
            call.join().unwrap_or_else(panicked)
        });
        let first_error = |before: Outcome<_>, result| before.and(result);
        let result = results.reduce(first_error);
        result.unwrap_or_else(|| fail("the group has no member"))
    })
}

/// One stream of frames through sessions of all stages.
pub(super) struct Film<'a> {
    pub(super) source: CheckedSession<'a>,
    pub(super) middle: Middle<'a>,
    pub(super) sink: CheckedSession<'a>,
    most_context: u32,
    /// The number of the next frame, and how many went through since the last cut.
    pub(super) frames: u64,
    since_cut: u32,
    /// The plan of the chunk before, and its frames.
    last: Option<(VideoPlanParts, u32)>,
}

impl<'a> Film<'a> {
    /// Opens a film that begins with this frame.
    pub(super) fn open(subject: &Subject<'a>, setup: &Setup<'_>, frame: u64) -> Outcome<Film<'a>> {
        let [source, .., sink] = subject.set.stages() else {
            return fail("there is no source or no sink");
        };
        Ok(Film {
            source: subject.open(&source.name, setup, subject.args)?,
            middle: Middle::open(subject, setup)?,
            sink: subject.open(&sink.name, setup, subject.args)?,
            most_context: subject.set.describe().context_frames,
            frames: frame,
            since_cut: 0,
            last: None,
        })
    }

    /// Sends chunks of pictures through all stages.
    pub(super) fn play(&mut self, script: &[ScriptedChunk]) -> Outcome<Vec<Passed>> {
        let config = *self.source.raw.config();
        let play = |chunk: &ScriptedChunk| {
            let first = self.frames + u64::from(chunk.skipped);
            let frames = pictures(&config, first, chunk.frames);
            self.chunk(*chunk, &frames)
        };
        script.iter().map(play).collect()
    }

    /// Gives the tensors of the source for a chunk. Fails unless they fit the chunk and what the other stages get.
    pub(super) fn lay_out(&mut self, shape: ChunkShape) -> Outcome<Manifest> {
        let tensors = self.source.layout(shape, 0)?.outputs;
        let first = tensors.iter().next().map(|(_, tensor)| tensor);
        let context = tensors.get("context_frames").map(|(_, tensor)| tensor);
        if context.is_some() != (shape.context_frames > 0) {
            return fail(format!("context_frames do not fit {shape:?}"));
        }
        for (tensor, count) in [(first, shape.frames), (context, shape.context_frames)] {
            if let Some(tensor) = tensor
                && tensor.shape().dims().first() != Some(&count.into())
            {
                return fail(format!("{tensor} must start with the dimension {count}"));
            }
        }
        let mut given = tensors.clone();
        let middle = self.middle.sessions.iter_mut().flatten();
        for session in middle.chain([&mut self.sink]) {
            let layout = session.layout(shape, 0)?;
            follows(&session.raw.stage().name, &layout.inputs, &given)?;
            given = layout.outputs;
        }
        Ok(tensors)
    }

    /// Sends one chunk of these frames through all stages.
    pub(super) fn chunk(&mut self, chunk: ScriptedChunk, frames: &[Vec<u8>]) -> Outcome<Passed> {
        let is_cut = chunk.begins == Begins::AfterCut;
        if is_cut {
            self.since_cut = 0;
        }
        let context_frames = match chunk.begins {
            Begins::Recomputing => self.most_context.min(self.since_cut),
            _ => 0,
        };
        let shape = ChunkShape {
            frames: chunk.frames,
            steps: chunk.steps,
            context_frames,
        };
        let next = |(last, frames)| {
            let last = VideoPlanParts {
                num_denoise_steps: chunk.steps,
                ..last
            };
            VideoPlanParts {
                reset_kv_cache: is_cut,
                reset_crossattn_cache: is_cut,
                ..last.behind(frames, chunk.skipped, context_frames > 0)
            }
        };
        let first = || plan(self.source.raw.config(), chunk.steps, self.frames);
        let plan = self.last.map_or_else(first, next);
        self.frames = plan.current_start_frame + u64::from(chunk.frames);
        self.since_cut += chunk.frames;
        self.last = Some((plan, chunk.frames));

        let tensors = self.source.layout(shape, 0)?.outputs;
        let sent = StageOutput {
            stage: self.source.raw.stage().name.clone(),
            bytes: self.source.encode(frames, &plan, &tensors)?,
            tensors,
        };
        let made = self.middle.run(shape, &plan, sent)?;
        let inputs = self.sink.layout(shape, 0)?.inputs;
        let last = &made[made.len() - 1];
        follows(&self.sink.raw.stage().name, &inputs, &last.tensors)?;
        let count = frames.len() * self.sink.raw.frames().frames_per_frame as usize;
        let frames = self.sink.decode(&plan, &inputs, &last.bytes, count)?;
        Ok(Passed { plan, made, frames })
    }
}

/// Sends the chunks of a script through new sessions.
pub(super) fn play(
    subject: &Subject<'_>,
    setup: &Setup<'_>,
    script: &[ScriptedChunk],
) -> Outcome<Vec<Passed>> {
    Film::open(subject, setup, 0)?.play(script)
}

/// Makes a script of so many chunks of three, two and one frames. Every fourth recomputes, and some follow a cut.
pub(super) fn script(chunks: usize, steps: u32) -> Vec<ScriptedChunk> {
    let chunk = |at: usize| ScriptedChunk {
        frames: MOST_FRAMES - at as u32 % MOST_FRAMES,
        steps,
        skipped: 0,
        begins: match at % 16 {
            9 => Begins::AfterCut,
            at if at % 4 == 3 => Begins::Recomputing,
            _ => Begins::Following,
        },
    };
    (0..chunks).map(chunk).collect()
}

/// Makes every chunk of a script begin like this.
pub(super) fn all(mut script: Vec<ScriptedChunk>, begins: Begins) -> Vec<ScriptedChunk> {
    script.iter_mut().for_each(|chunk| chunk.begins = begins);
    script
}

pub(super) fn must_equal(found: &[Passed], expected: &[Passed], what: &str) -> Outcome {
    match difference(found, expected) {
        None => Ok(()),
        Some(place) => fail(format!("{what} gives another result: {place}")),
    }
}
