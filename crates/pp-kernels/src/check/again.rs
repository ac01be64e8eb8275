//! What a restart of a middle stage builds on: a session that begins in the middle of a stream gives what the old one would
//! have given, if it gets the frames before its first chunk, taken from what was sent.

use pp_contract::{Manifest, VideoPlanParts};

use super::bench::{Bench, Middle, Passed, Sharing, Stream, Travelling};
use super::outcome::{Outcome, fail};
use crate::config::ChunkShape;

/// Frames of each chunk; a context may span two.
const FRAMES: u32 = 2;
const CHUNKS: usize = 4;
const STEPS: u32 = 2;

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
    (0..CHUNKS)
        .map(|chunk| {
            let start = chunk * FRAMES as usize;
            let frames = bench.pictures(&config, start, FRAMES as usize);
            stream.chunk(&frames, STEPS, context.min(start as u32))
        })
        .collect()
}

/// The first tensor of the source, which is that of the frames.
fn frames_of(chunk: &Travelling) -> Outcome<(&str, &[u8])> {
    match chunk.tensors.iter().next() {
        Some((_, tensor)) => {
            let bytes = bytes_of(&chunk.tensors, &chunk.bytes, tensor.name())?;
            Ok((tensor.name(), bytes))
        }
        None => fail("the source gives no tensor"),
    }
}

/// The last frames that the source gave of the chunks before `chunk`.
fn tail(passed: &[Passed], chunk: usize, context: u32) -> Outcome<Vec<u8>> {
    let mut sent = Vec::new();
    let mut frame = 0;
    for before in &passed[..chunk] {
        let (_, bytes) = frames_of(&before.first)?;
        frame = bytes.len() / FRAMES as usize;
        sent.extend_from_slice(bytes);
    }
    Ok(sent.split_off(sent.len() - context as usize * frame))
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
        let found = bytes_of(&now.first.tensors, &now.first.bytes, "context_frames")?;
        if found != tail(&passed, chunk, context)? {
            let (name, _) = frames_of(&now.first)?;
            return fail(format!(
                "context_frames of chunk {chunk} are not the last {context} frames of {name} that were sent before it"
            ));
        }
    }
    Ok(())
}

pub(super) fn begins_anywhere(bench: &Bench<'_>) -> Outcome {
    let config = bench.config();
    let most = bench.set.describe().context_frames.min(config.max_frames);
    let mut source = Stream::open(bench, &config)?.source;
    let passed = pass(bench, 0)?;
    for (chunk, old) in passed.iter().enumerate() {
        let start = chunk as u32 * FRAMES;
        let context = most.min(start);
        let tensors = source.layout(shape(context), 0)?.outputs;
        let mut bytes = vec![0; tensors.payload_bytes() as usize];
        for (offset, tensor) in tensors.iter() {
            let tail_bytes;
            let from = match tensor.name() {
                "context_frames" => {
                    tail_bytes = tail(&passed, chunk, context)?;
                    &tail_bytes[..]
                }
                name => bytes_of(&old.first.tensors, &old.first.bytes, name)?,
            };
            if from.len() as u64 != tensor.bytes() {
                return fail(format!(
                    "{} has {} bytes with context and {} without",
                    tensor.name(),
                    tensor.bytes(),
                    from.len()
                ));
            }
            bytes[offset as usize..][..from.len()].copy_from_slice(from);
        }
        let plan = VideoPlanParts {
            init_cache: true,
            ..VideoPlanParts::first(config.width, config.height, STEPS)
                .following(start.into(), context > 0)
        };
        let grouped = bench.set.stages().iter().filter(|stage| stage.in_group);
        let grouped = grouped.map(|stage| Some(Sharing::group(&stage.name, 2)));
        for cut in std::iter::once(None).chain(grouped) {
            let mut middle = Middle::open(bench, &config, cut)?;
            let input = Travelling {
                tensors: tensors.clone(),
                bytes: bytes.clone(),
            };
            let last = middle.run(shape(context), &plan, input)?;
            if last.bytes != old.last.bytes {
                let who = if cut.is_some() {
                    "a group"
                } else {
                    "a session"
                };
                return fail(format!(
                    "{who} that begins with chunk {chunk}, with the {context} frames sent before it as context, gives \
                     another result than one that saw the chunks before"
                ));
            }
        }
    }
    Ok(())
}
