//! What a plugin must do, tested from outside: the library behind `pp plugin check FILE`.
//!
//! Each check opens sessions of its own, through the same table as production, on host memory or on a device. Payloads
//! lie between guard bytes in either memory, and so do the frames that decode writes.
//!
//! A check runs in the process and on the thread of its caller: a plugin that crashes ends that process, and a plugin
//! that hangs holds that thread. `pp plugin check` therefore runs the checks in a child process.

mod again;
mod bench;
mod group;
mod memory;
mod outcome;
mod session;

pub use bench::Bench;

use pp_contract::{Manifest, VideoPlanParts};

use crate::config::{ChunkShape, SessionConfig};
use crate::stage::{StageInfo, StageKind};
use bench::{Middle, Sharing, Stream, follows};
use outcome::{Outcome, Why, fail};

/// One claim about a set of kernels.
#[derive(Debug)]
pub struct Check {
    name: &'static str,
    test: Test,
}

impl Check {
    /// What is claimed.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Tests the claim, for as long as the kernels take.
    ///
    /// # Errors
    /// Why the claim is false.
    pub fn run(&self, bench: &Bench<'_>) -> Result<(), String> {
        (self.test)(bench).map_err(|why: Why| why.to_string())
    }
}

/// All checks, in their order. None depends on another one.
pub static CHECKS: [Check; 13] = [
    Check {
        name: "self test passes",
        test: |bench| Ok(bench.set.self_test()?),
    },
    Check {
        name: "description is complete and does not change",
        test: describes_itself,
    },
    Check {
        name: "layout fits the session and does not change",
        test: lays_out,
    },
    Check {
        name: "zero steps is the identity, bit for bit, at every size",
        test: zero_steps_is_identity,
    },
    Check {
        name: "one and two steps make the calls that the plan expects",
        test: makes_planned_calls,
    },
    Check {
        name: "the same calls give the same bytes",
        test: is_deterministic,
    },
    Check {
        name: "sessions do not disturb each other",
        test: sessions_are_apart,
    },
    Check {
        name: "a second chunk and a recompute work",
        test: continues,
    },
    Check {
        name: "parts and laps give what the whole stage gives",
        test: is_cut,
    },
    Check {
        name: "a group gives what one member gives",
        test: is_grouped,
    },
    Check {
        name: "context_frames are the frames that were sent before",
        test: again::context_is_what_was_sent,
    },
    Check {
        name: "a middle stage that is started anew goes on as the old one",
        test: again::begins_anywhere,
    },
    Check {
        name: "bad arguments give an error and leave the session usable",
        test: refuses,
    },
];

type Test = fn(&Bench<'_>) -> Outcome;

fn describes_itself(bench: &Bench<'_>) -> Outcome {
    let description = bench.set.describe();
    if description.version.is_empty() {
        return fail("its version is empty");
    }
    if bench.set.describe_again()? != *description {
        return fail("a second description differs from the first");
    }
    Ok(())
}

fn lays_out(bench: &Bench<'_>) -> Outcome {
    let config = bench.config();
    let mut sessions = Vec::new();
    for stage in bench.set.stages() {
        sessions.push(bench.open(&stage.name, &config)?);
    }
    let context = bench.set.describe().context_frames.min(3);
    for (frames, steps, context_frames) in [(1, 0, 0), (3, 2, 0), (3, 2, context)] {
        let shape = ChunkShape {
            frames,
            steps,
            context_frames,
        };
        let mut given = Manifest::empty();
        for session in &mut sessions {
            let layout = session.layout(shape, 0)?;
            follows(&session.raw.stage().name, &layout.inputs, &given)?;
            given = layout.outputs;
            if session.raw.stage().kind == StageKind::Source {
                let first = given.iter().next().map(|(_, tensor)| tensor);
                let context = given.get("context_frames").map(|(_, tensor)| tensor);
                if context.is_some() != (context_frames > 0) {
                    return fail(format!("context_frames do not fit {shape:?}"));
                }
                for (tensor, count) in [(first, frames), (context, context_frames)] {
                    if let Some(tensor) = tensor
                        && tensor.shape().dims().first() != Some(&count.into())
                    {
                        return fail(format!("{tensor} must start with the dimension {count}"));
                    }
                }
            }
        }
    }
    Ok(())
}

fn zero_steps_is_identity(bench: &Bench<'_>) -> Outcome {
    for chroma in &bench.set.describe().chroma {
        for (width, height) in [(16, 16), (17, 16), (16, 19), (37, 23), (64, 48)] {
            let config = bench.config_of(width, height, *chroma);
            let mut stream = Stream::open(bench, &config)?;
            let mut frames = bench.pictures(&config, 0, 3);
            // Every value of a sample occurs.
            for (value, sample) in frames[0].iter_mut().enumerate() {
                *sample = value as u8;
            }
            let result = stream.chunk(&frames, 0, 0)?.frames;
            if stream.keeps_frames() && result != frames {
                return fail(format!("{width}x{height} {chroma:?} comes back changed"));
            }
        }
    }
    Ok(())
}

fn makes_planned_calls(bench: &Bench<'_>) -> Outcome {
    let config = bench.config();
    for steps in [1, 2] {
        Stream::open(bench, &config)?.chunk(&bench.pictures(&config, 0, 2), steps, 0)?;
    }
    Ok(())
}

fn is_deterministic(bench: &Bench<'_>) -> Outcome {
    let config = bench.config();
    let mut expected = None;
    for threads in [2, 1, 3] {
        let mut stream = Stream::open(bench, &SessionConfig { threads, ..config })?;
        let result = bench.two_chunks(&mut stream, 2, || Ok(()))?;
        if expected.get_or_insert_with(|| result.clone()) != &result {
            return fail(format!("{threads} threads give another result than 2"));
        }
    }
    Ok(())
}

fn sessions_are_apart(bench: &Bench<'_>) -> Outcome {
    let config = bench.config();
    let alone = bench.two_chunks(&mut Stream::open(bench, &config)?, 2, || Ok(()))?;
    let other = bench.config_of(56, 32, config.chroma);
    let mut stream = Stream::open(bench, &config)?;
    let mut disturbance = Stream::open(bench, &other)?;
    disturbance.chunk(&bench.pictures(&other, 9, 3), 2, 0)?;
    let beside = bench.two_chunks(&mut stream, 2, move || {
        disturbance.chunk(&bench.pictures(&other, 5, 2), 1, 0)?;
        Ok(())
    })?;
    if beside != alone {
        return fail("a session gives another result while another one is at work");
    }
    Ok(())
}

fn continues(bench: &Bench<'_>) -> Outcome {
    let config = bench.config();
    let context = bench.set.describe().context_frames.min(3);
    let mut kept = Stream::open(bench, &config)?;
    let mut rebuilt = Stream::open(bench, &config)?;
    let frames = bench.pictures(&config, 0, 6);
    for start in [0, 3] {
        let context = if start == 0 { 0 } else { context };
        let one = kept.chunk(&frames[start..start + 3], 1, 0)?;
        let other = rebuilt.chunk(&frames[start..start + 3], 1, context)?;
        if one.frames != other.frames {
            return fail("a chunk with recompute differs from one with the cache kept");
        }
    }
    Ok(())
}

/// Every stage that has a flag, shared out in these ways, gives what it gives whole.
fn shared_out(
    bench: &Bench<'_>,
    config: &SessionConfig,
    has_flag: fn(&StageInfo) -> bool,
    ways: &[[u32; 3]],
    steps: u32,
) -> Outcome {
    let whole = bench.two_chunks(&mut Stream::open(bench, config)?, steps, || Ok(()))?;
    for stage in bench.set.stages().iter().filter(|stage| has_flag(stage)) {
        for &[parts, laps, members] in ways {
            let cut = Sharing {
                stage: &stage.name,
                parts,
                laps,
                members,
            };
            let mut stream = Stream::open_cut(bench, config, Some(cut))?;
            if bench.two_chunks(&mut stream, steps, || Ok(()))? != whole {
                return fail(format!(
                    "{} in {parts} parts, {laps} laps and {members} members gives another result",
                    stage.name
                ));
            }
        }
    }
    Ok(())
}

fn is_cut(bench: &Bench<'_>) -> Outcome {
    let (config, parts): (_, fn(&StageInfo) -> bool) = (bench.config(), |stage| stage.in_parts);
    shared_out(bench, &config, parts, &[[2, 1, 1], [3, 1, 1]], 3)?;
    let laps = [[1, 2, 1], [1, 3, 1]];
    shared_out(bench, &config, |stage| stage.in_ring, &laps, 3)?;
    shared_out(
        bench,
        &config,
        |stage| stage.in_parts && stage.in_ring,
        &[[2, 2, 1]],
        4,
    )
}

/// In every format; and with frames so high that members of a group may begin at other places than the whole does.
fn is_grouped(bench: &Bench<'_>) -> Outcome {
    let has_flag: fn(&StageInfo) -> bool = |stage| stage.in_group;
    if !bench.set.stages().iter().any(has_flag) {
        return Ok(());
    }
    for chroma in &bench.set.describe().chroma {
        let config = bench.config_of(37, 43, *chroma);
        shared_out(bench, &config, has_flag, &[[1, 1, 2], [1, 1, 3]], 2)?;
    }
    let high = bench.config_of(24, 8 * 51 - 3, bench.set.describe().chroma[0]);
    shared_out(bench, &high, has_flag, &[[1, 1, 2], [1, 1, 3]], 2)?;
    let has_both: fn(&StageInfo) -> bool = |stage| stage.in_group && stage.in_parts;
    shared_out(bench, &bench.config(), has_both, &[[2, 1, 2]], 3)
}

fn refuses(bench: &Bench<'_>) -> Outcome {
    let config = bench.config();
    let plan = VideoPlanParts::first(config.width, config.height, 1);
    let shape = ChunkShape {
        frames: 2,
        steps: 1,
        context_frames: 0,
    };
    let frames = bench.pictures(&config, 0, 2);
    let nothing = Manifest::empty();
    let mut stream = Stream::open(bench, &config)?;
    let (source, sink) = (&mut stream.source, &mut stream.sink);
    let written = source.encode(&frames, &plan, &nothing);
    is_refused("a source that writes into nothing", written)?;
    let count = frames.len() * sink.raw.frames().frames_per_frame as usize;
    let read = sink.decode(&plan, &nothing, &[], count);
    is_refused("a sink that reads from nothing", read)?;

    let mut middle = Middle::open(bench, &config, None)?;
    let tensors = source.layout(shape, 0)?.outputs;
    let mut input = source.encode(&frames, &plan, &tensors)?;
    let stages = bench.set.stages().iter();
    let count = stages
        .filter(|stage| stage.kind == StageKind::Middle)
        .count();
    for at in 0..count {
        let session = middle.only(at);
        let layout = session.layout(shape, 0)?;
        let (tensors, stage) = (
            [&layout.inputs, &layout.outputs],
            session.raw.stage().clone(),
        );
        let made = session.run(&plan, 0, [&nothing, &layout.outputs], &[], None);
        is_refused(&format!("{} without an input", stage.name), made)?;
        if !stage.no_memory {
            let what = format!("{} with recompute and no context_frames", stage.name);
            let recompute = plan.following(2, true);
            is_refused(&what, session.run(&recompute, 0, tensors, &input, None))?;
        }
        (input, _) = session.run(&plan, 0, tensors, &input, None)?;
    }
    Ok(())
}

/// Fails unless the kernels refused the call and said why.
fn is_refused<T>(what: &str, result: Outcome<T>) -> Outcome {
    let Err(why) = result else {
        return fail(format!("{what} is not refused"));
    };
    match why.refusal() {
        Some((.., text)) if !text.starts_with("status ") => Ok(()),
        Some(_) => fail(format!("{what} is refused without a text")),
        None => Err(why),
    }
}
