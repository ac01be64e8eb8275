//! What a plugin must do, tested from outside: the library behind `pp plugin check FILE`.
//!
//! Every test gets a session of its own and runs through the same table as production. Slots are embedded in guard
//! bytes on both sides, as are the planes that decode writes.

mod again;

use std::fmt;
use std::path::Path;

use crate::config::{Chroma, ChunkShape, SessionConfig};
use crate::error::KernelError;
use crate::frame::{FrameView, FrameViewMut};
use crate::guard::{self, GUARD_BYTES};
use crate::payload::{Payload, PayloadMut};
use crate::plan::Plan;
use crate::plugin::{KernelSession, KernelSet};
use crate::tensor::{DType, Layout, TensorList};

/// One test and what came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    /// What is claimed.
    pub name: &'static str,
    /// Why the claim is false.
    pub outcome: Result<(), String>,
}

/// All tests, in the order in which they ran.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// The tests.
    pub checks: Vec<Check>,
}

impl Report {
    /// Whether every test passed, and there was one.
    #[must_use]
    pub fn passed(&self) -> bool {
        !self.checks.is_empty() && self.checks.iter().all(|check| check.outcome.is_ok())
    }

    fn add(&mut self, name: &'static str, outcome: Result<(), String>) {
        self.checks.push(Check { name, outcome });
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for check in &self.checks {
            match &check.outcome {
                Ok(()) => writeln!(f, "ok    {}", check.name)?,
                Err(reason) => writeln!(f, "FAIL  {}: {reason}", check.name)?,
            }
        }
        Ok(())
    }
}

/// Loads a file and tests it; a file that does not load gives one failed test.
#[must_use]
pub fn check(path: &Path) -> Report {
    let mut report = Report::default();
    match KernelSet::load_untested(path) {
        Err(error) => report.add("load", Err(chain(&error))),
        Ok(set) => {
            report.add("load", Ok(()));
            run_checks(&set, &mut report);
        }
    }
    report
}

/// Tests kernels that are already loaded, or built in.
#[must_use]
pub fn check_set(set: &KernelSet) -> Report {
    let mut report = Report::default();
    run_checks(set, &mut report);
    report
}

fn run_checks(set: &KernelSet, report: &mut Report) {
    let checks: [(&'static str, Test); 11] = [
        ("self test passes", |b| Ok(b.set.self_test()?)),
        (
            "description is complete and does not change",
            describes_itself,
        ),
        ("layout fits the session and does not change", lays_out),
        (
            "zero steps is the identity, bit for bit, at every size",
            zero_steps_is_identity,
        ),
        (
            "one and two steps make the calls that the plan expects",
            makes_planned_calls,
        ),
        ("the same calls give the same bytes", is_deterministic),
        ("sessions do not disturb each other", sessions_are_apart),
        ("a second chunk and a recompute work", continues),
        (
            "context_frames are the frames that were sent before",
            again::context_is_what_was_sent,
        ),
        (
            "a Phase B that is started anew goes on as the old one",
            again::begins_anywhere,
        ),
        (
            "bad arguments give an error and leave the session usable",
            refuses,
        ),
    ];
    let bench = Bench { set };
    for (name, test) in checks {
        report.add(name, test(&bench).map_err(|Why(reason)| reason));
    }
}

type Test = fn(&Bench<'_>) -> Outcome;

/// A reason that anything readable turns into.
struct Why(String);

impl<E: std::error::Error> From<E> for Why {
    fn from(error: E) -> Why {
        Why(chain(&error))
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}

type Outcome<T = ()> = Result<T, Why>;

fn fail<T>(reason: impl Into<String>) -> Outcome<T> {
    Err(Why(reason.into()))
}

struct Bench<'a> {
    set: &'a KernelSet,
}

/// A slot: guard bytes, a payload that starts at a multiple of 256 bytes, guard bytes.
struct Slot {
    bytes: Vec<u8>,
    start: usize,
}

impl Slot {
    fn new(list: &TensorList) -> Slot {
        let mut bytes = vec![0; list.payload_bytes() + 3 * GUARD_BYTES];
        let start = GUARD_BYTES + bytes.as_ptr().addr().wrapping_neg() % GUARD_BYTES;
        guard::arm(&mut bytes[..start]);
        Slot { bytes, start }
    }

    fn payload<'a>(&'a self, list: &'a TensorList) -> Outcome<Payload<'a>> {
        Ok(Payload::new(list, &self.bytes[self.start..])?)
    }

    fn payload_mut<'a>(&'a mut self, list: &'a TensorList) -> Outcome<PayloadMut<'a>> {
        Ok(PayloadMut::new(list, &mut self.bytes[self.start..])?)
    }

    fn check_front(&self, what: &str) -> Outcome {
        match guard::check(&self.bytes[..self.start]) {
            Ok(()) => Ok(()),
            Err(at) => fail(format!(
                "{what} wrote {} bytes in front of the payload",
                self.start - at
            )),
        }
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
    crate::cpu::add_gaussian(&mut bytes, 8.0, seed, frame as u64, 0);
    bytes
}

/// One stream through one session, or through one for the front and one for Phase B.
struct Stream {
    front: KernelSession,
    phase_b: KernelSession,
    seen: u64,
}

impl Stream {
    fn open(set: &KernelSet, config: &SessionConfig) -> Outcome<Stream> {
        Ok(Stream {
            front: set.open(config)?,
            phase_b: set.open(config)?,
            seen: 0,
        })
    }

    /// Runs one chunk; gives the frames and the bytes that travelled.
    fn chunk(
        &mut self,
        frames: &[Vec<u8>],
        steps: u32,
        context: u32,
    ) -> Outcome<(Vec<Vec<u8>>, Vec<u8>)> {
        let config = *self.front.config();
        let shape = ChunkShape {
            frames: frames.len() as u32,
            steps,
            context_frames: context,
        };
        let layout = self.front.layout(shape)?;
        let plan = match self.seen {
            0 => Plan::first(config.width, config.height, steps),
            seen => Plan::first(config.width, config.height, steps).following(seen, context > 0),
        };
        self.seen += frames.len() as u64;
        self.run(frames, &plan, &layout)
    }

    fn run(
        &mut self,
        frames: &[Vec<u8>],
        plan: &Plan,
        layout: &Layout,
    ) -> Outcome<(Vec<Vec<u8>>, Vec<u8>)> {
        let config = *self.front.config();
        let (width, height, chroma) = (config.width, config.height, config.chroma);
        let mut input = Slot::new(&layout.inputs);
        let mut output = Slot::new(&layout.outputs);

        let views: Vec<_> = frames
            .iter()
            .filter_map(|f| FrameView::packed(f, width, height, chroma))
            .collect();
        self.front
            .encode(&views, plan, &mut input.payload_mut(&layout.inputs)?)?;
        input.check_front("encode")?;

        let sent = input.bytes.clone();
        let calls = self.phase_b.phase_b(
            plan,
            &input.payload(&layout.inputs)?,
            &mut output.payload_mut(&layout.outputs)?,
        )?;
        output.check_front("phase_b")?;
        if input.bytes != sent {
            return fail("phase_b wrote into its input");
        }
        if calls != plan.expected_generator_calls {
            return fail(format!(
                "phase_b made {calls} generator calls, the plan expects {}",
                plan.expected_generator_calls
            ));
        }

        let size = chroma.packed_frame_bytes(width, height);
        let mut decoded = vec![vec![0; size + 2 * GUARD_BYTES]; frames.len()];
        for frame in &mut decoded {
            guard::arm(&mut frame[..GUARD_BYTES]);
            guard::arm(&mut frame[GUARD_BYTES + size..]);
        }
        let mut views: Vec<_> = decoded
            .iter_mut()
            .filter_map(|f| {
                FrameViewMut::packed(&mut f[GUARD_BYTES..][..size], width, height, chroma)
            })
            .collect();
        let received = output.bytes.clone();
        self.front
            .decode(plan, &output.payload(&layout.outputs)?, &mut views)?;
        if output.bytes != received {
            return fail("decode wrote into its input");
        }
        for frame in &decoded {
            let guards = [&frame[..GUARD_BYTES], &frame[GUARD_BYTES + size..]];
            if guards.into_iter().any(|g| guard::check(g).is_err()) {
                return fail("decode wrote outside the frame's planes");
            }
        }
        let frames = decoded
            .into_iter()
            .map(|f| f[GUARD_BYTES..][..size].to_vec())
            .collect();
        let travelled = [
            &input.bytes[input.start..][..layout.inputs.payload_bytes()],
            &output.bytes[output.start..][..layout.outputs.payload_bytes()],
        ];
        Ok((frames, travelled.concat()))
    }
}

impl Bench<'_> {
    /// A small session in the first chroma format that the kernels serve.
    fn config(&self) -> SessionConfig {
        self.config_of(40, 24, self.set.describe().chroma[0])
    }

    fn config_of(&self, width: u32, height: u32, chroma: Chroma) -> SessionConfig {
        SessionConfig {
            threads: 2,
            ..SessionConfig::host(width, height, chroma, 3)
        }
    }

    fn pictures(&self, config: &SessionConfig, first: usize, count: usize) -> Vec<Vec<u8>> {
        (first..first + count)
            .map(|frame| picture(config, frame, 1))
            .collect()
    }

    /// Two chunks of two steps, and with recompute if the kernels have a context.
    fn two_chunks(&self, stream: &mut Stream) -> Outcome<(Vec<Vec<u8>>, Vec<u8>)> {
        let config = *stream.front.config();
        let context = self.set.describe().context_frames.min(3);
        let (mut frames, mut bytes) = stream.chunk(&self.pictures(&config, 0, 3), 2, 0)?;
        let (more_frames, more_bytes) = stream.chunk(&self.pictures(&config, 3, 2), 2, context)?;
        frames.extend(more_frames);
        bytes.extend(more_bytes);
        Ok((frames, bytes))
    }
}

fn describes_itself(bench: &Bench<'_>) -> Outcome {
    let description = bench.set.describe();
    if !description.host {
        return fail("it does not serve host memory, so it cannot be tested here");
    }
    if description.version.is_empty() {
        return fail("its version is empty");
    }
    if bench.set.describe_again()? != *description {
        return fail("a second description differs from the first");
    }
    Ok(())
}

fn lays_out(bench: &Bench<'_>) -> Outcome {
    let mut session = bench.set.open(&bench.config())?;
    let context = bench.set.describe().context_frames.min(3);
    for (frames, steps, context_frames) in [(1, 0, 0), (3, 2, 0), (3, 2, context)] {
        let shape = ChunkShape {
            frames,
            steps,
            context_frames,
        };
        let layout = session.layout(shape)?;
        let wanted = [
            ("latents_in", DType::Bf16),
            ("conditioning_embeds", DType::Bf16),
            ("denoising_step_list", DType::I64),
            ("context_frames", DType::Bf16),
        ];
        let count = if context_frames > 0 { 4 } else { 3 };
        let found: Vec<_> = layout
            .inputs
            .as_slice()
            .iter()
            .map(|t| (t.name(), t.dtype()))
            .collect();
        if found != wanted[..count] {
            return fail(format!(
                "the input tensors are {found:?}, must be {:?} for {shape:?}",
                &wanted[..count]
            ));
        }
        let [latents, _, list, context @ ..] = layout.inputs.as_slice() else {
            return fail("three input tensors are needed");
        };
        let [out] = layout.outputs.as_slice() else {
            return fail("one output tensor is needed");
        };
        if out.name() != "latents_out" || out.dtype() != DType::Bf16 || out.dims() != latents.dims()
        {
            return fail(format!("{out:?} must be latents_out and like {latents:?}"));
        }
        let leading = [(Some(latents), frames), (context.first(), context_frames)];
        let bad = leading
            .into_iter()
            .find(|(t, dim)| t.is_some_and(|t| t.dims().first() != Some(&u64::from(*dim))));
        if let Some((Some(tensor), dim)) = bad {
            return fail(format!("{tensor:?} must start with the dimension {dim}"));
        }
        if list.dims() != [u64::from(steps)] {
            return fail(format!("{list:?} must have {steps} elements"));
        }
        if session.layout(shape)? != layout {
            return fail("a second layout of the same chunk differs");
        }
    }
    Ok(())
}

fn zero_steps_is_identity(bench: &Bench<'_>) -> Outcome {
    for chroma in &bench.set.describe().chroma {
        for (width, height) in [(16, 16), (17, 16), (16, 19), (37, 23), (64, 48)] {
            let config = bench.config_of(width, height, *chroma);
            let mut stream = Stream::open(bench.set, &config)?;
            let mut frames = bench.pictures(&config, 0, 3);
            // Every value of a sample occurs.
            for (value, sample) in frames[0].iter_mut().enumerate() {
                *sample = value as u8;
            }
            let (result, _) = stream.chunk(&frames, 0, 0)?;
            if result != frames {
                return fail(format!("{width}x{height} {chroma:?} comes back changed"));
            }
        }
    }
    Ok(())
}

fn makes_planned_calls(bench: &Bench<'_>) -> Outcome {
    let config = bench.config();
    for steps in [1, 2] {
        Stream::open(bench.set, &config)?.chunk(&bench.pictures(&config, 0, 2), steps, 0)?;
    }
    Ok(())
}

fn is_deterministic(bench: &Bench<'_>) -> Outcome {
    let config = bench.config();
    let mut expected = None;
    for threads in [2, 1, 3] {
        let mut stream = Stream::open(bench.set, &SessionConfig { threads, ..config })?;
        let result = bench.two_chunks(&mut stream)?;
        if expected.get_or_insert_with(|| result.clone()) != &result {
            return fail(format!("{threads} threads give another result than 2"));
        }
    }
    Ok(())
}

fn sessions_are_apart(bench: &Bench<'_>) -> Outcome {
    let config = bench.config();
    let alone = bench.two_chunks(&mut Stream::open(bench.set, &config)?)?;
    let other = bench.config_of(56, 32, config.chroma);
    let mut stream = Stream::open(bench.set, &config)?;
    let mut disturbance = Stream::open(bench.set, &other)?;
    disturbance.chunk(&bench.pictures(&other, 9, 3), 2, 0)?;
    let (mut frames, mut bytes) = stream.chunk(&bench.pictures(&config, 0, 3), 2, 0)?;
    disturbance.chunk(&bench.pictures(&other, 5, 2), 1, 0)?;
    drop(disturbance);
    let context = bench.set.describe().context_frames.min(3);
    let (more_frames, more_bytes) = stream.chunk(&bench.pictures(&config, 3, 2), 2, context)?;
    frames.extend(more_frames);
    bytes.extend(more_bytes);
    if (frames, bytes) != alone {
        return fail("a session gives another result while another one is at work");
    }
    Ok(())
}

fn continues(bench: &Bench<'_>) -> Outcome {
    let config = bench.config();
    let context = bench.set.describe().context_frames.min(3);
    let mut kept = Stream::open(bench.set, &config)?;
    let mut rebuilt = Stream::open(bench.set, &config)?;
    let frames = bench.pictures(&config, 0, 6);
    for start in [0, 3] {
        let context = if start == 0 { 0 } else { context };
        let (one, _) = kept.chunk(&frames[start..start + 3], 1, 0)?;
        let (other, _) = rebuilt.chunk(&frames[start..start + 3], 1, context)?;
        if one != other {
            return fail("a chunk with recompute differs from one with the cache kept");
        }
    }
    Ok(())
}

fn refuses(bench: &Bench<'_>) -> Outcome {
    let config = bench.config();
    let mut session = bench.set.open(&config)?;
    let plan = Plan::first(config.width, config.height, 1);
    let layout = session.layout(ChunkShape {
        frames: 2,
        steps: 1,
        context_frames: 0,
    })?;
    let mut input = Slot::new(&layout.inputs);
    let mut output = Slot::new(&layout.outputs);
    let frames = bench.pictures(&config, 0, 2);
    let view = |f| FrameView::packed(f, config.width, config.height, config.chroma);
    let views: Vec<_> = frames.iter().filter_map(|f| view(f)).collect();
    session.encode(&views, &plan, &mut input.payload_mut(&layout.inputs)?)?;

    let empty = TensorList::default();
    let asks_too_much = plan.following(2, true);
    let attempts = [
        (
            "phase_b without an input",
            session.phase_b(
                &plan,
                &Payload::new(&empty, &[])?,
                &mut output.payload_mut(&layout.outputs)?,
            ),
        ),
        (
            "phase_b with recompute and no context_frames",
            session.phase_b(
                &asks_too_much,
                &input.payload(&layout.inputs)?,
                &mut output.payload_mut(&layout.outputs)?,
            ),
        ),
        (
            "encode into nothing",
            session
                .encode(&views, &plan, &mut PayloadMut::new(&empty, &mut [])?)
                .map(|()| 0),
        ),
        (
            "decode from nothing",
            session
                .decode(
                    &plan,
                    &Payload::new(&empty, &[])?,
                    &mut decode_target(&config, &mut frames.clone()),
                )
                .map(|()| 0),
        ),
    ];
    for (what, result) in attempts {
        match result {
            Err(KernelError::Failed { message, .. }) if !message.starts_with("status ") => {}
            Err(KernelError::Failed { .. }) => {
                return fail(format!("{what} is refused without a text"));
            }
            Err(other) => return Err(other.into()),
            Ok(_) => return fail(format!("{what} is not refused")),
        }
    }
    session.phase_b(
        &plan,
        &input.payload(&layout.inputs)?,
        &mut output.payload_mut(&layout.outputs)?,
    )?;
    Ok(())
}

fn decode_target<'a>(config: &SessionConfig, frames: &'a mut [Vec<u8>]) -> Vec<FrameViewMut<'a>> {
    frames
        .iter_mut()
        .filter_map(|f| FrameViewMut::packed(f, config.width, config.height, config.chroma))
        .collect()
}
