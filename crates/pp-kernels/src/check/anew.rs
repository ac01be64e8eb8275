//! What stages remember: a state that was kept and one that is rebuilt from context give the same bytes, also where frames are
//! missing between chunks, and whatever the steps of the chunks before were.

use pp_contract::{MAX_CONTEXT_GAPS, Manifest, VideoPlanParts};

use super::film::{
    Begins, Film, Middle, Passed, ScriptedChunk, StageOutput, all, must_equal, play, script,
};
use super::outcome::{Outcome, Why, fail, skip};
use super::subject::{Setup, Sharing, Subject};
use crate::config::ChunkShape;

/// Gives the last frames, at most so many, that the source made of chunks, and their number.
pub(super) fn tail(passed: &[Passed], most: u32) -> Outcome<(u32, Vec<u8>)> {
    let (mut sent, mut frames) = (Vec::new(), 0);
    for chunk in passed {
        let (_, bytes, count) = chunk.made[0].first()?;
        sent.extend_from_slice(bytes);
        frames += count;
    }
    let count = frames.min(most.into());
    let tail = sent.len() as u64 / frames.max(1) * count;
    Ok((count as u32, sent.split_off(sent.len() - tail as usize)))
}

/// Tests what a restart builds on: a session that begins in the middle of a stream gives what the old one would have given,
/// if it gets the frames before its first chunk, taken from what was sent. Sessions that saw other chunks begin anew, too.
pub(super) fn begins_anywhere(subject: &Subject<'_>) -> Outcome {
    let setup = subject.setup()?;
    let groups = sharings(subject, &setup, &[[1, 1, 2]])?;
    let script = all(script(5, 2), Begins::Following);
    begins_anywhere_in(subject, &setup, &script, &groups)
}

/// A stage in two parts, in two laps, and with two members.
const IN_TWO: [[u32; 3]; 3] = [[2, 1, 1], [1, 2, 1], [1, 1, 2]];

/// No stage shared out, and then each in these ways, as far as it has their flags and its sessions take them.
pub(super) fn sharings<'a>(
    subject: &Subject<'a>,
    setup: &Setup<'_>,
    ways: &[[u32; 3]],
) -> Outcome<Vec<Sharing<'a>>> {
    let mut taken = vec![None];
    for stage in subject.set.stages() {
        let has = [stage.in_parts, stage.in_ring, stage.in_group];
        let allowed = |way: &&[u32; 3]| way.iter().zip(has).all(|(of, has)| *of == 1 || has);
        for way in ways.iter().filter(allowed) {
            let sharing = Some((&stage.name[..], *way));
            match Middle::open(subject, &Setup { sharing, ..*setup }) {
                Ok(_) => taken.push(sharing),
                Err(why) => {
                    let [parts, laps, members] = way;
                    let name = &stage.name;
                    let what =
                        format!("{name} in {parts} parts, {laps} laps and {members} members");
                    subject.skip(&what, why)?;
                }
            }
        }
    }
    Ok(taken)
}

fn begins_anywhere_in(
    subject: &Subject<'_>,
    setup: &Setup<'_>,
    script: &[ScriptedChunk],
    sharings: &[Sharing<'_>],
) -> Outcome {
    let mut film = Film::open(subject, setup, 0)?;
    let passed = film.play(script)?;
    for (number, chunk) in script.iter().enumerate() {
        let (context_frames, context) =
            tail(&passed[..number], subject.set.describe().context_frames)?;
        let shape = ChunkShape {
            frames: chunk.frames,
            steps: chunk.steps,
            context_frames,
        };
        let (old, tensors) = (&passed[number], film.lay_out(shape)?);
        let plan = VideoPlanParts {
            init_cache: true,
            do_kv_recompute: context_frames > 0,
            expected_generator_calls: chunk.steps + u32::from(context_frames > 0),
            ..old.plan
        };
        let check = |middle: &mut Middle<'_>, who: &str| {
            let sent = again(&old.made[0], tensors.clone(), &context)?;
            let made = middle.run(shape, &plan, sent)?;
            match made[made.len() - 1].bytes == old.made[old.made.len() - 1].bytes {
                true => Ok(()),
                false => fail(format!(
                    "{who} that begins with chunk {number}, with the {context_frames} frames sent before it as context, \
                     gives another result than one that saw the chunks before"
                )),
            }
        };
        check(&mut film.middle, "a session that saw other chunks, and")?;
        for &sharing in sharings {
            let who = match sharing {
                Some((_, [1, 1, _])) => "a group",
                Some(_) => "a stage in parts or laps",
                None => "a session",
            };
            let setup = Setup { sharing, ..*setup };
            check(&mut Middle::open(subject, &setup)?, who)?;
        }
    }
    Ok(())
}

/// Tests that frames may be missing between chunks, at two sizes: a state that was kept and one that is rebuilt from context,
/// by a recompute or in a new session, give the same bytes behind gaps. So do parts, laps and groups that saw the gaps.
pub(super) fn takes_gaps(subject: &Subject<'_>) -> Outcome {
    let stages = subject.set.stages();
    if !stages.iter().any(|stage| stage.in_gaps) {
        return skip("no stage has the flag PP_STAGE_GAPS");
    }
    let mut names = stages.iter().map(|stage| &stage.name[..]);
    let about = subject.set.describe();
    if let Some(name) = names.find(|name| !about.takes_gaps([*name])) {
        return skip(format!(
            "{name} may remember frames, and has not the flag PP_STAGE_GAPS, or more than {} frames of context",
            MAX_CONTEXT_GAPS + 1
        ));
    }
    // Frames and what is missing before them: one by one, so that context has gaps, too.
    const GAPS: [(u32, u32); 10] = [
        (3, 0),
        (1, 1),
        (1, 0),
        (1, 2),
        (1, 1),
        (2, 5),
        (1, 1),
        (1, 1),
        (3, 100_000),
        (1, 0),
    ];
    let chunk = |(frames, skipped)| ScriptedChunk {
        frames,
        steps: 2,
        skipped,
        begins: Begins::Following,
    };
    let script: Vec<_> = GAPS.into_iter().map(chunk).collect();
    let main = subject.setup()?;
    let sharings = sharings(subject, &main, &IN_TWO)?;
    let other = subject.setup_of(37, 23, main.config.chroma);
    for setup in [main, other] {
        if !subject.takes(&setup)? {
            continue;
        }
        let passed = |sharing, begins| {
            let setup = Setup { sharing, ..setup };
            let passed = play(subject, &setup, &all(script.clone(), begins))?;
            let results = passed.into_iter().map(|passed| passed.ends(false));
            Ok::<_, Why>(results.collect::<Vec<_>>())
        };
        let kept = passed(None, Begins::Following)?;
        let rebuilt = passed(None, Begins::Recomputing)?;
        let what = "behind gaps, a recompute in place of the cache kept";
        must_equal(&rebuilt, &kept, what)?;
        for &sharing in &sharings[1..] {
            let found = passed(sharing, Begins::Following)?;
            must_equal(&found, &kept, "behind gaps, a stage that is shared out")?;
        }
        begins_anywhere_in(subject, &setup, &script, &sharings).map_err(|why| match why {
            Why::Fault(why) => Why::Fault(format!("behind gaps, {why}")),
            why => why,
        })?;
    }
    Ok(())
}

/// Tests that steps may differ from chunk to chunk: each chunk is what it is where all chunks have its steps. A sink may
/// remember what it got, so its frames are not compared.
pub(super) fn takes_any_steps(subject: &Subject<'_>) -> Outcome {
    let stages = subject.set.stages();
    if !stages.iter().any(|stage| stage.any_steps) {
        return skip("no stage has the flag PP_STAGE_STEPS");
    }
    if let Some(stage) = stages.iter().find(|stage| !stage.any_steps) {
        return skip(format!("{} has not the flag PP_STAGE_STEPS", stage.name));
    }
    let setup = subject.setup()?;
    let sharings = sharings(subject, &setup, &IN_TWO)?;
    for sharing in sharings {
        let setup = Setup { sharing, ..setup };
        // A part, and a lap, has one pass at least.
        let fewest = if sharing.is_some() { 2 } else { 1 };
        let steps = [2, 0, 1, 2, 0, 1].map(|more| fewest + more);
        let script = script(steps.len(), 0);
        let passed = |steps_of: &dyn Fn(usize) -> u32| {
            let chunks = script.iter().enumerate();
            let chunks = chunks.map(|(at, chunk)| ScriptedChunk {
                steps: steps_of(at),
                ..*chunk
            });
            let mut passed = play(subject, &setup, &chunks.collect::<Vec<_>>())?;
            passed.iter_mut().for_each(|chunk| chunk.frames.clear());
            Ok::<_, Why>(passed)
        };
        let found = passed(&|at| steps[at])?;
        let alike = |(at, of): (usize, &u32)| Ok(passed(&|_| *of)?.swap_remove(at));
        let expected = steps.iter().enumerate().map(alike);
        let expected = expected.collect::<Outcome<Vec<_>>>()?;
        let what = "a chunk behind chunks of other steps";
        must_equal(&found, &expected, what)?;
    }
    Ok(())
}

/// Moves what the source made of a chunk to these tensors, and adds the context.
fn again(old: &StageOutput, tensors: Manifest, context: &[u8]) -> Outcome<StageOutput> {
    let mut bytes = vec![0; tensors.payload_bytes() as usize];
    for (offset, tensor) in tensors.iter() {
        let from = match tensor.name() {
            "context_frames" => context,
            name => old.tensor(name)?,
        };
        let (name, wanted, there) = (tensor.name(), tensor.bytes(), from.len());
        if there as u64 != wanted {
            return fail(format!(
                "{name} has {wanted} bytes with context and {there} without"
            ));
        }
        bytes[offset as usize..][..there].copy_from_slice(from);
    }
    Ok(StageOutput {
        stage: old.stage.clone(),
        tensors,
        bytes,
    })
}
