//! What a restart of Phase B builds on: a session that begins in the middle of a stream gives what the old one would
//! have given, if it gets the frames before its first chunk, taken from what was sent.

use pp_contract::{Manifest, VideoPlanParts};

use super::bench::{Bench, Stream};
use super::outcome::{Outcome, fail};
use crate::config::{ChunkShape, Layout};

/// Frames of each chunk; a context may span two.
const FRAMES: u32 = 2;
const CHUNKS: usize = 4;
const STEPS: u32 = 2;

/// A chunk that went through a stream undisturbed.
struct Passed {
    layout: Layout,
    input: Vec<u8>,
    output: Vec<u8>,
}

fn shape(context_frames: u32) -> ChunkShape {
    ChunkShape {
        frames: FRAMES,
        steps: STEPS,
        context_frames,
    }
}

fn bytes_of<'a>(tensors: &Manifest, payload: &'a [u8], name: &str) -> Outcome<&'a [u8]> {
    match tensors.range(name) {
        Some(range) => Ok(&payload[range]),
        None => fail(format!("there is no tensor {name}")),
    }
}

/// A few chunks, each with as much context as `context` says.
fn pass(bench: &Bench<'_>, context: u32) -> Outcome<Vec<Passed>> {
    let config = bench.config();
    let mut stream = Stream::open(bench, &config)?;
    let mut passed = Vec::new();
    for chunk in 0..CHUNKS {
        let start = chunk * FRAMES as usize;
        let context = context.min(start as u32);
        let layout = stream.front.layout(shape(context))?;
        let frames = bench.pictures(&config, start, FRAMES as usize);
        let (_, mut bytes) = stream.chunk(&frames, STEPS, context)?;
        let output = bytes.split_off(layout.inputs.payload_bytes() as usize);
        passed.push(Passed {
            layout,
            input: bytes,
            output,
        });
    }
    Ok(passed)
}

/// The last frames of `latents_in` of the chunks before `chunk`.
fn tail(passed: &[Passed], chunk: usize, context: u32) -> Outcome<Vec<u8>> {
    let mut latents = Vec::new();
    let mut frame = 0;
    for before in &passed[..chunk] {
        let bytes = bytes_of(&before.layout.inputs, &before.input, "latents_in")?;
        frame = bytes.len() / FRAMES as usize;
        latents.extend_from_slice(bytes);
    }
    Ok(latents.split_off(latents.len() - context as usize * frame))
}

pub(super) fn context_is_what_was_sent(bench: &Bench<'_>) -> Outcome {
    let most = bench
        .set
        .describe()
        .context_frames
        .min(bench.config().max_frames);
    if most == 0 {
        return Ok(());
    }
    let passed = pass(bench, most)?;
    for (chunk, now) in passed.iter().enumerate().skip(1) {
        let context = most.min(chunk as u32 * FRAMES);
        let found = bytes_of(&now.layout.inputs, &now.input, "context_frames")?;
        if found != tail(&passed, chunk, context)? {
            return fail(format!(
                "context_frames of chunk {chunk} are not the last {context} frames of latents_in that were sent before it"
            ));
        }
    }
    Ok(())
}

pub(super) fn begins_anywhere(bench: &Bench<'_>) -> Outcome {
    let config = bench.config();
    let most = bench.set.describe().context_frames.min(config.max_frames);
    let passed = pass(bench, 0)?;
    for (chunk, old) in passed.iter().enumerate() {
        let start = chunk as u32 * FRAMES;
        let context = most.min(start);
        let mut session = bench.open(&config)?;
        let layout = session.layout(shape(context))?;
        let mut input = vec![0; layout.inputs.payload_bytes() as usize];
        for (offset, tensor) in layout.inputs.iter() {
            let tail_bytes;
            let from = match tensor.name() {
                "context_frames" => {
                    tail_bytes = tail(&passed, chunk, context)?;
                    &tail_bytes[..]
                }
                name => bytes_of(&old.layout.inputs, &old.input, name)?,
            };
            if from.len() as u64 != tensor.bytes() {
                return fail(format!(
                    "{} has {} bytes with context and {} without",
                    tensor.name(),
                    tensor.bytes(),
                    from.len()
                ));
            }
            input[offset as usize..][..from.len()].copy_from_slice(from);
        }
        let plan = VideoPlanParts {
            init_cache: true,
            ..VideoPlanParts::first(config.width, config.height, STEPS)
                .following(start.into(), context > 0)
        };
        let (output, _) = session.phase_b(&plan, &layout, &input)??;
        if output != old.output {
            return fail(format!(
                "a session that begins with chunk {chunk}, with the {context} frames sent before it as context, gives \
                 another result than one that saw the chunks before"
            ));
        }
    }
    Ok(())
}
