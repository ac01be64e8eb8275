//! Tests from outside that a plugin does what it must: the library behind `pp plugin check FILE`.
//!
//! Each check opens sessions of its own, through the same table as production, on host memory or on a device, and sends
//! films through them. Most checks compare the bytes that two films give. Payloads and frames lie between guard bytes.
//!
//! A check runs in the process and on the thread of its caller: a plugin that crashes ends that process, and a plugin
//! that hangs holds that thread. `pp plugin check` therefore runs the checks in a child process.

mod anew;
mod film;
mod group;
mod memory;
mod outcome;
mod session;
mod subject;

pub use subject::Subject;

use pp_contract::Manifest;

use crate::config::{Bits, ChunkShape};
use crate::stage::StageInfo;
use anew::{begins_anywhere, sharings, tail, takes_any_steps, takes_gaps};
use film::{Begins, Film, all, must_equal, pictures, plan, play, script};
use outcome::{Outcome, Why, fail, skip};
use subject::{MOST_FRAMES, Setup};

/// One claim about a set of kernels, and its test.
#[derive(Debug)]
pub struct Check(&'static str, fn(&Subject<'_>) -> Outcome);

impl Check {
    /// Names the claim.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.0
    }

    /// Tests the claim, for as long as the kernels take. Gives "ok", or what was skipped and why.
    ///
    /// # Errors
    /// Why the claim is false.
    pub fn run(&self, subject: &Subject<'_>) -> Result<String, String> {
        subject.skipped.take();
        let outcome = (self.1)(subject);
        let skipped = subject.skipped.take();
        match outcome {
            Ok(()) if skipped.is_empty() => Ok("ok".into()),
            Ok(()) => Ok(format!("ok; skipped {}", skipped.join(", "))),
            Err(Why::Skip(reason)) => Ok(format!("skipped: {reason}")),
            Err(why) => Err(why.to_string()),
        }
    }
}

macro_rules! checks {
    ($($name:literal => $test:expr,)*) => { &[$(Check($name, $test)),*] };
}

/// All checks, in their order. None depends on another one.
pub static CHECKS: &[Check] = checks! {
    "self test passes" => |subject| Ok(subject.set.self_test()?),
    "description is complete and does not change" => describes_itself,
    "layout fits the session and does not change" => lays_out,
    "zero steps is the identity, bit for bit, at every size" => zero_steps_is_identity,
    "one and two steps make the calls that the plan expects" => makes_planned_calls,
    "the same calls give the same bytes" => is_deterministic,
    "every byte of the output is written" => writes_every_byte,
    "sessions do not disturb each other" => sessions_are_apart,
    "a second chunk and a recompute work" => recomputes,
    "parts give what the whole stage gives" => |subject| shared_out(subject, &[[2, 1, 1], [3, 1, 1]]),
    "laps give what the whole stage gives" => |subject| shared_out(subject, &[[1, 2, 1], [1, 3, 1], [2, 2, 1]]),
    "a group gives what one member gives" => is_grouped,
    "context_frames are the frames that were sent before" => context_is_what_was_sent,
    "a middle stage that is started anew goes on as the old one" => begins_anywhere,
    "frames may be missing between chunks of stages that say so" => takes_gaps,
    "steps may differ between chunks of stages that say so" => takes_any_steps,
    "a stream goes on after a hard cut as a new one" => obeys_cuts,
    "bad arguments give an error and leave the session usable" => refuses_bad_arguments,
    "frames of 10 bits a sample do what those of 8 do" => does_the_same_in_10_bits,
    "stages that say so give the same bytes in both memories" => is_alike_in_both,
    "destroyed sessions leave no memory behind" => frees_memory,
};

fn describes_itself(subject: &Subject<'_>) -> Outcome {
    let description = subject.set.describe();
    if description.version.is_empty() {
        return fail("its version is empty");
    }
    if subject.set.describe_again()? != *description {
        return fail("a second description differs from the first");
    }
    Ok(())
}

fn lays_out(subject: &Subject<'_>) -> Outcome {
    let mut film = Film::open(subject, &subject.setup()?, 0)?;
    let context = subject.set.describe().context_frames;
    for (frames, steps, context_frames) in [(1, 0, 0), (3, 2, 0), (3, 2, context)] {
        film.lay_out(ChunkShape {
            frames,
            steps,
            context_frames,
        })?;
    }
    Ok(())
}

fn zero_steps_is_identity(subject: &Subject<'_>) -> Outcome {
    let main = subject.setup()?.config;
    let mut sizes = vec![(main.width, main.height)];
    sizes.extend([(16, 16), (17, 16), (16, 19), (37, 23), (64, 48)]);
    for chroma in &subject.set.describe().chroma {
        for (width, height) in &sizes {
            let setup = subject.setup_of(*width, *height, *chroma);
            if !subject.takes(&setup)? {
                continue;
            }
            let mut film = Film::open(subject, &setup, 0)?;
            let mut frames = pictures(&setup.config, 0, MOST_FRAMES);
            // Every value of a sample occurs, in frames that are large enough.
            let peak = usize::from(setup.config.bits.peak());
            let bytes = setup.config.bits.bytes();
            for (value, sample) in frames[0].chunks_exact_mut(bytes).enumerate() {
                sample.copy_from_slice(&(value & peak).to_le_bytes()[..bytes]);
            }
            let result = film.chunk(script(1, 0)[0], &frames)?.frames;
            if film.sink.raw.frames() == film.source.raw.frames() && result != frames {
                return fail(format!("{width}x{height} {chroma:?} comes back changed"));
            }
        }
    }
    Ok(())
}

/// Makes the checks again whose outcome depends on samples.
fn does_the_same_in_10_bits(subject: &Subject<'_>) -> Outcome {
    const TESTS: [fn(&Subject<'_>) -> Outcome; 9] = [
        zero_steps_is_identity,
        makes_planned_calls,
        is_deterministic,
        writes_every_byte,
        recomputes,
        is_grouped,
        context_is_what_was_sent,
        begins_anywhere,
        obeys_cuts,
    ];
    if subject.set.describe().bits < Bits::Ten {
        return skip("the description says that samples of 8 bits are taken");
    }
    subject.bits.set(Bits::Ten);
    let mut outcomes = TESTS.iter().map(|test| test(subject));
    let outcome = outcomes.find(|outcome| !matches!(outcome, Ok(()) | Err(Why::Skip(_))));
    subject.bits.set(Bits::Eight);
    outcome.unwrap_or(Ok(()))
}

fn makes_planned_calls(subject: &Subject<'_>) -> Outcome {
    let script = [script(1, 1), script(1, 2)].concat();
    play(subject, &subject.setup()?, &script).map(drop)
}

fn is_deterministic(subject: &Subject<'_>) -> Outcome {
    let (mut setup, script) = (subject.setup()?, script(4, 2));
    let expected = play(subject, &setup, &script)?;
    for threads in [2, 1, 3] {
        setup.config.threads = threads;
        let what = format!("a second run, with {threads} threads,");
        must_equal(&play(subject, &setup, &script)?, &expected, &what)?;
    }
    Ok(())
}

/// Compares a film through host memory with one whose stages are in GPU memory as far as they have the flag: those get the
/// same bytes in both, and the others make them.
fn is_alike_in_both(subject: &Subject<'_>) -> Outcome {
    let about = subject.set.describe();
    if !about.stages.iter().any(|stage| stage.same_bytes) {
        return skip("no stage has the flag PP_STAGE_SAME_BYTES");
    }
    if !about.host || !about.cuda {
        return skip("the kernels work in one kind of memory");
    }
    if subject.stream.is_none() {
        return skip("this is compared where GPU memory is checked");
    }
    let main = subject.setup()?.config;
    for chroma in &about.chroma {
        for (width, height) in [(main.width, main.height), (37, 23)] {
            let setup = subject.setup_of(width, height, *chroma);
            if !subject.takes(&setup)? {
                continue;
            }
            // What goes from part to part and from lap to lap counts, too.
            let same = |name| {
                about
                    .stages
                    .iter()
                    .any(|stage| stage.name == name && stage.same_bytes)
            };
            let ways = sharings(subject, &setup, &[[2, 1, 1], [1, 2, 1]])?.into_iter();
            for sharing in ways.filter(|way| way.is_none_or(|(name, _)| same(name))) {
                let on_host = |on_host| Setup {
                    on_host,
                    sharing,
                    ..setup
                };
                let script = script(4, 2);
                let expected = play(subject, &on_host(|_| true), &script)?;
                let found = play(subject, &on_host(|stage| !stage.same_bytes), &script)?;
                let what = format!("GPU memory, at {width}x{height} {chroma:?},");
                must_equal(&found, &expected, &what)?;
            }
        }
    }
    Ok(())
}

/// Sends many chunks through memory that held one value, and then through memory that held another.
fn writes_every_byte(subject: &Subject<'_>) -> Outcome {
    let (setup, script) = (subject.setup()?, script(40, 1));
    let expected = play(subject, &setup, &script)?;
    let fill = !setup.fill;
    let found = play(subject, &Setup { fill, ..setup }, &script)?;
    must_equal(&found, &expected, "an output that held other bytes before")
}

fn sessions_are_apart(subject: &Subject<'_>) -> Outcome {
    let (setup, script) = (subject.setup()?, script(4, 2));
    let config = setup.config;
    let alone = play(subject, &setup, &script)?;
    let mut film = Film::open(subject, &setup, 0)?;
    let larger = subject.setup_of(config.width + 16, config.height + 8, config.chroma);
    let other = if subject.takes(&larger)? {
        larger
    } else {
        setup
    };
    let mut other = Film::open(subject, &other, 9)?;
    let mut beside = Vec::new();
    for chunk in script.chunks(1) {
        other.play(chunk)?;
        beside.extend(film.play(chunk)?);
    }
    must_equal(&beside, &alone, "a session beside another one at work")
}

fn recomputes(subject: &Subject<'_>) -> Outcome {
    let setup = subject.setup()?;
    let results = |begins| {
        let passed = play(subject, &setup, &all(script(4, 1), begins))?;
        // The payload of the source has its context with it.
        let results = passed.into_iter().map(|passed| passed.ends(false));
        Ok::<_, Why>(results.collect::<Vec<_>>())
    };
    let (kept, rebuilt) = (results(Begins::Following)?, results(Begins::Recomputing)?);
    must_equal(&rebuilt, &kept, "a recompute in place of the cache kept")
}

/// Shares stages out in the sessions of the usual size.
fn shared_out(subject: &Subject<'_>, ways: &[[u32; 3]]) -> Outcome {
    shared_out_at(subject, &subject.setup()?, ways)
}

/// Fails unless each stage that has the flag for the first way gives, shared out in these ways, what it gives whole. A
/// way is left out for a stage whose flags do not allow it.
fn shared_out_at(subject: &Subject<'_>, setup: &Setup<'_>, ways: &[[u32; 3]]) -> Outcome {
    const FLAGS: [&str; 3] = ["PARTS", "RING", "GROUP"];
    let flags = |stage: &StageInfo| [stage.in_parts, stage.in_ring, stage.in_group];
    let flag = ways[0].iter().position(|of| *of > 1).unwrap_or(0);
    let stages = subject.set.stages().iter();
    let stages: Vec<_> = stages.filter(|stage| flags(stage)[flag]).collect();
    if stages.is_empty() {
        return skip(format!("no stage has the flag PP_STAGE_{}", FLAGS[flag]));
    }
    // As many passes as there are parts and laps.
    let passes = ways.iter().map(|[parts, laps, _]| parts * laps).max();
    let script = script(8, passes.unwrap_or(0).max(2));
    let ends = |setup: &Setup<'_>| {
        let passed = play(subject, setup, &[script[0], script[7]])?;
        let ends = passed.into_iter().map(|passed| passed.ends(true));
        Ok::<_, Why>(ends.collect::<Vec<_>>())
    };
    let whole = ends(setup)?;
    for stage in stages {
        let (name, has) = (&stage.name, flags(stage));
        let allowed = |way: &&[u32; 3]| way.iter().zip(has).all(|(of, has)| *of == 1 || has);
        for way in ways.iter().filter(allowed) {
            let sharing = Some((&name[..], *way));
            let [parts, laps, members] = way;
            let what = format!("{name} in {parts} parts, {laps} laps and {members} members");
            match ends(&Setup { sharing, ..*setup }) {
                Ok(found) => must_equal(&found, &whole, &what)?,
                Err(why) => subject.skip(&what, why)?,
            }
        }
    }
    Ok(())
}

/// Tests every format, and frames so high that members of a group may begin at other places than the whole does.
fn is_grouped(subject: &Subject<'_>) -> Outcome {
    shared_out(subject, &[[1, 1, 2], [2, 1, 2]])?;
    let chroma = &subject.set.describe().chroma;
    let sizes = chroma.iter().map(|chroma| (37, 43, *chroma));
    for (width, height, chroma) in sizes.chain([(24, 8 * 51 - 3, chroma[0])]) {
        let setup = subject.setup_of(width, height, chroma);
        if subject.takes(&setup)? {
            shared_out_at(subject, &setup, &[[1, 1, 2], [1, 1, 3]])?;
        }
    }
    Ok(())
}

fn context_is_what_was_sent(subject: &Subject<'_>) -> Outcome {
    let most = subject.set.describe().context_frames;
    if most == 0 {
        return skip("the description asks for no context_frames");
    }
    let script = all(script(5, 2), Begins::Recomputing);
    let passed = play(subject, &subject.setup()?, &script)?;
    for (chunk, now) in passed.iter().enumerate().skip(1) {
        let (count, sent) = tail(&passed[..chunk], most)?;
        if now.made[0].tensor("context_frames")? != sent {
            let (name, ..) = now.made[0].first()?;
            return fail(format!(
                "context_frames of chunk {chunk} are not the last {count} frames of {name} that were sent before it"
            ));
        }
    }
    Ok(())
}

fn obeys_cuts(subject: &Subject<'_>) -> Outcome {
    let (setup, script) = (subject.setup()?, script(13, 2));
    let cut = script
        .iter()
        .position(|chunk| chunk.begins == Begins::AfterCut);
    let (before, after) = script.split_at(cut.unwrap_or(0));
    let mut film = Film::open(subject, &setup, 0)?;
    film.play(before)?;
    let mut new = Film::open(subject, &setup, film.frames)?;
    let what = "a stream that goes on after a hard cut, and not one that begins there,";
    must_equal(&film.play(after)?, &new.play(after)?, what)
}

/// Fails if 32 films, again and again, leave memory behind. Memory that is kept once for all sessions does not grow each time.
fn frees_memory(subject: &Subject<'_>) -> Outcome {
    const FILMS: usize = 32;
    if subject.stream.is_some() {
        return skip("a driver allocates when it wants");
    }
    let setup = subject.setup()?;
    let mut grown = 0;
    for _ in 0..16 {
        let before = memory::allocated();
        for _ in 0..FILMS {
            play(subject, &setup, &script(1, 1))?;
        }
        grown = memory::allocated().saturating_sub(before);
        // The C library gives no fewer than 32 bytes.
        if grown < FILMS * 32 {
            return Ok(());
        }
    }
    fail(format!(
        "{grown} bytes are still allocated when {FILMS} sessions of each stage were made and destroyed"
    ))
}

fn refuses_bad_arguments(subject: &Subject<'_>) -> Outcome {
    let setup = subject.setup()?;
    let shape = ChunkShape {
        frames: 2,
        steps: 1,
        context_frames: 0,
    };
    let first = plan(&setup.config, shape.steps, 0);
    let frames = pictures(&setup.config, 0, 2);
    let nothing = Manifest::empty();
    let mut film = Film::open(subject, &setup, 0)?;
    let written = film.source.encode(&frames, &first, &nothing);
    is_refused("a source that writes into nothing", written)?;
    let count = frames.len() * film.sink.raw.frames().frames_per_frame as usize;
    let read = film.sink.decode(&first, &nothing, &[], count);
    is_refused("a sink that reads from nothing", read)?;

    let unknown = [("no-plugin-knows-this".into(), "1".into())];
    let unknown = [subject.args, &unknown].concat();
    for stage in subject.set.stages() {
        let opened = subject.open(&stage.name, &setup, &unknown);
        let what = format!(
            "{} with the unknown --plugin-arg no-plugin-knows-this=1",
            stage.name
        );
        is_refused(&what, opened)?;
    }

    let tensors = film.source.layout(shape, 0)?.outputs;
    let mut input = film.source.encode(&frames, &first, &tensors)?;
    for session in film.middle.sessions.iter_mut().flatten() {
        let layout = session.layout(shape, 0)?;
        let (tensors, stage) = (
            [&layout.inputs, &layout.outputs],
            session.raw.stage().clone(),
        );
        let made = session.run(&first, 0, [&nothing, &layout.outputs], &[], None);
        is_refused(&format!("{} without an input", stage.name), made)?;
        if !stage.no_memory {
            let what = format!("{} with recompute and no context_frames", stage.name);
            let recompute = first.following(2, true);
            is_refused(&what, session.run(&recompute, 0, tensors, &input, None))?;
        }
        (input, _) = session.run(&first, 0, tensors, &input, None)?;
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
