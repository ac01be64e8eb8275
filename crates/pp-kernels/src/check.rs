//! What a plugin must do, tested from outside: the library behind `pp plugin check FILE`.
//!
//! Each check opens sessions of its own, through the same table as production, on host memory or on a device. Payloads
//! lie between guard bytes in either memory, and so do the frames that decode writes.
//!
//! A check runs in the process and on the thread of its caller: a plugin that crashes ends that process, and a plugin
//! that hangs holds that thread. `pp plugin check` therefore runs the checks in a child process.

mod again;
mod bench;
mod memory;
mod outcome;

pub use bench::Bench;

use pp_contract::{Manifest, Plan as _, VideoPlan, VideoPlanParts};

use crate::config::{ChunkShape, Layout, SessionConfig};
use crate::error::KernelError;
use bench::Stream;
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
        (self.test)(bench).map_err(|Why(reason)| reason)
    }
}

/// All checks, in their order. None depends on another one.
pub static CHECKS: [Check; 11] = [
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
        name: "context_frames are the frames that were sent before",
        test: again::context_is_what_was_sent,
    },
    Check {
        name: "a Phase B that is started anew goes on as the old one",
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
    let mut session = bench.open(&config)?;
    let context = bench.set.describe().context_frames.min(3);
    for (frames, steps, context_frames) in [(1, 0, 0), (3, 2, 0), (3, 2, context)] {
        let shape = ChunkShape {
            frames,
            steps,
            context_frames,
        };
        let layout = session.layout(shape)?;
        let Layout { inputs, outputs } = &layout;
        let first = VideoPlanParts::first(config.width, config.height, steps);
        let tensors = VideoPlan::new(first.following(3, context_frames > 0)).and_then(|plan| {
            plan.check_inputs(inputs)?;
            plan.check_outputs(inputs, outputs)
        });
        if let Err(error) = tensors {
            return fail(format!("for {shape:?} {error}"));
        }
        for (name, count) in [("latents_in", frames), ("context_frames", context_frames)] {
            if let Some((_, tensor)) = inputs.get(name)
                && tensor.shape().dims().first() != Some(&count.into())
            {
                return fail(format!("{tensor} must start with the dimension {count}"));
            }
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
            let mut stream = Stream::open(bench, &config)?;
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
        Stream::open(bench, &config)?.chunk(&bench.pictures(&config, 0, 2), steps, 0)?;
    }
    Ok(())
}

fn is_deterministic(bench: &Bench<'_>) -> Outcome {
    let config = bench.config();
    let mut expected = None;
    for threads in [2, 1, 3] {
        let mut stream = Stream::open(bench, &SessionConfig { threads, ..config })?;
        let result = bench.two_chunks(&mut stream, || Ok(()))?;
        if expected.get_or_insert_with(|| result.clone()) != &result {
            return fail(format!("{threads} threads give another result than 2"));
        }
    }
    Ok(())
}

fn sessions_are_apart(bench: &Bench<'_>) -> Outcome {
    let config = bench.config();
    let alone = bench.two_chunks(&mut Stream::open(bench, &config)?, || Ok(()))?;
    let other = bench.config_of(56, 32, config.chroma);
    let mut stream = Stream::open(bench, &config)?;
    let mut disturbance = Stream::open(bench, &other)?;
    disturbance.chunk(&bench.pictures(&other, 9, 3), 2, 0)?;
    let beside = bench.two_chunks(&mut stream, move || {
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
    let mut session = bench.open(&config)?;
    let plan = VideoPlanParts::first(config.width, config.height, 1);
    let layout = session.layout(ChunkShape {
        frames: 2,
        steps: 1,
        context_frames: 0,
    })?;
    let frames = bench.pictures(&config, 0, 2);
    let input = session.encode(&frames, &plan, &layout.inputs)??;

    let nothing = Manifest::empty();
    let without_input = Layout {
        inputs: nothing.clone(),
        outputs: layout.outputs.clone(),
    };
    let asks_too_much = plan.following(2, true);
    let result = session.phase_b(&plan, &without_input, &[])?;
    is_refused("phase_b without an input", result)?;
    let result = session.phase_b(&asks_too_much, &layout, &input)?;
    is_refused("phase_b with recompute and no context_frames", result)?;
    let result = session.encode(&frames, &plan, &nothing)?;
    is_refused("encode into nothing", result)?;
    let result = session.decode(&plan, &nothing, &[], 2)?;
    is_refused("decode from nothing", result)?;
    session.phase_b(&plan, &layout, &input)??;
    Ok(())
}

/// The kernels must refuse the call, and say why.
fn is_refused<T>(what: &str, result: Result<T, KernelError>) -> Outcome {
    match result {
        Err(KernelError::Failed { message, .. }) if !message.starts_with("status ") => Ok(()),
        Err(KernelError::Failed { .. }) => fail(format!("{what} is refused without a text")),
        Err(other) => Err(other.into()),
        Ok(_) => fail(format!("{what} is not refused")),
    }
}
