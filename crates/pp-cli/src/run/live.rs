//! What the source of `pp run` knows of real time: which chunks count, in what steps, and whether the run keeps up.

use std::fmt::{Display, Formatter};
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use pp_contract::{FaultKind, Pipeline};
use pp_job::Error;
use pp_kernels::Description;
use pp_runtime::clock::now_ns;
use pp_runtime::core::{Cut, Late};
use pp_runtime::stage::{StageError, StageResult};
use pp_video::header::Header;
use pp_video::origin::Origin;
use pp_video::played::Played;
use pp_video::source::Chunk;
use serde::Deserialize;

use super::placement;
use crate::args::{CutChoice, RunArgs, name_of};

/// Real time, at the source.
pub(super) struct Live {
    pub(super) played: Played,
    /// What is left of the run that is played again.
    replay: Option<(Played, Option<Origin>)>,
    /// What decides the bytes of this run.
    pub(super) origin: Origin,
    /// When frame 0 was there, where frames come at the header's rate.
    start_ns: Option<u64>,
    comes_at_rate: bool,
    most_steps: u32,
    pub(super) kept_up: KeptUp,
}

/// How the run keeps up so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KeptUp {
    /// Chunks later than `--max-latency`.
    pub(super) late: u64,
    /// Frames that were dropped.
    pub(super) dropped: u64,
    pub(super) steps_saved: u64,
    pub(super) held_ns: u64,
    /// By how much later than at the header's rate the newest chunk was begun.
    pub(super) behind_ns: u64,
}

/// What is not as it should be, each behind a comma.
impl Display for KeptUp {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let counts = [
            (self.late, "late chunks"),
            (self.dropped, "frames dropped"),
            (self.steps_saved, "steps saved"),
        ];
        let mut counts = counts.into_iter().filter(|(count, _)| *count > 0);
        counts.try_for_each(|(count, what)| write!(f, ", {count} {what}"))?;
        let times = [
            ("held back", self.held_ns),
            ("behind the rate of the input by", self.behind_ns),
        ];
        // Less than a tenth of a second is not seen.
        let mut times = times.into_iter().filter(|(_, ns)| *ns >= 100_000_000);
        times.try_for_each(|(what, ns)| write!(f, ", {what} {:.1} s", ns as f64 / 1e9))
    }
}

/// What of a report is played again.
#[derive(Deserialize)]
struct ReplayedReport {
    run: ReplayedRun,
}

#[derive(Deserialize)]
struct ReplayedRun {
    frames_per_chunk: u32,
    cuts: String,
    played: Played,
    /// None in a report of an older pp.
    origin: Option<Origin>,
}

/// Reads what a report says was played.
fn read(path: &Path, args: &RunArgs) -> Result<(Played, Option<Origin>), Error> {
    let refuse = |what: String| Error::Usage(format!("--replay {}: {what}", path.display()));
    let file = File::open(path).map_err(|e| StageError::file("read report", path, &e))?;
    let report = serde_json::from_reader::<_, ReplayedReport>(BufReader::new(file));
    let ReplayedReport { run } = report.map_err(|e| refuse(format!("no report of pp run: {e}")))?;
    if !run.played.is_whole() {
        return Err(refuse("its lists were full before the run ended".into()));
    }
    if run.frames_per_chunk != args.frames_per_chunk || run.cuts != name_of(&args.cuts) {
        let (frames, cuts) = (run.frames_per_chunk, run.cuts);
        return Err(refuse(format!(
            "the run had --frames-per-chunk {frames} --cuts {cuts}; give the same"
        )));
    }
    let most = run.played.steps().max().unwrap_or(0);
    if most > args.denoise_steps {
        return Err(refuse(format!(
            "the run made {most} steps; give --denoise-steps {most} or more"
        )));
    }
    Ok((run.played, run.origin))
}

impl Live {
    /// For frames that come at the header's rate, or as fast as they are read.
    pub(super) fn open(
        args: &RunArgs,
        origin: &Origin,
        comes_at_rate: bool,
    ) -> Result<Self, Error> {
        let replay = args.live.replay.as_deref();
        let replay = replay.map(|path| read(path, args)).transpose()?;
        if let Some((_, Some(of_run))) = &replay {
            // The list says how many steps each chunk had.
            let [own, of_run] = [origin, of_run].map(|of| of.clone().without("denoise_steps"));
            if let Some(what) = own.differs(&of_run) {
                let told = format!("--replay: {what}; give the options of the run");
                return Err(Error::Usage(told));
            }
        }
        Ok(Self {
            played: Played::default(),
            replay,
            origin: origin.clone(),
            start_ns: None,
            comes_at_rate,
            most_steps: args.denoise_steps,
            kept_up: KeptUp::default(),
        })
    }

    /// Whether all that is to be played again was.
    pub(super) fn is_over(&self) -> bool {
        self.replay
            .as_ref()
            .is_some_and(|(left, _)| left.chunks() == 0)
    }

    /// How long a live chunk was held back; what is read from a file waits for nobody.
    pub(super) fn held_ns(&self, chunk: &Chunk) -> u64 {
        if self.comes_at_rate { chunk.held_ns } else { 0 }
    }

    /// The input has ended.
    pub(super) fn end(&self) -> StageResult<()> {
        let left = self.replay.as_ref().map_or(0, |(left, _)| left.chunks());
        match left {
            0 => Ok(()),
            _ => Err(refuse(format!(
                "the input ends, and the run has {left} more chunks"
            ))),
        }
    }

    /// Whether a chunk was played, and in how many steps, where the run is played again.
    pub(super) fn replayed(&mut self, chunk: &Chunk) -> StageResult<(bool, Option<u32>)> {
        if self.origin.input().is_none() {
            self.origin = std::mem::take(&mut self.origin).of_input(chunk.input);
        }
        let Some((left, origin)) = &mut self.replay else {
            return Ok((true, None));
        };
        let of_run = origin.as_ref().and_then(Origin::input);
        if of_run.is_some() && of_run != self.origin.input() {
            return Err(refuse("the input begins with other frames".into()));
        }
        let steps = left.take(chunk).map_err(refuse)?;
        Ok((steps.is_some(), steps))
    }

    /// A chunk is built, with so many steps. Gives by how much later that is than at the header's rate.
    pub(super) fn built(&mut self, chunk: &Chunk, header: &Header, steps: u32) -> Option<u64> {
        self.played.note(chunk, steps);
        let held_ns = self.held_ns(chunk);
        let kept_up = &mut self.kept_up;
        kept_up.dropped += chunk.skipped;
        kept_up.steps_saved += u64::from(self.most_steps.saturating_sub(steps));
        kept_up.held_ns += held_ns;
        let due_ns = header
            .due_ns(chunk.first_frame)
            .filter(|_| self.comes_at_rate)?;
        let start_ns = chunk.read_ns.0.saturating_sub(due_ns);
        let start_ns = *self.start_ns.get_or_insert(start_ns);
        let behind_ns = now_ns().saturating_sub(start_ns.saturating_add(due_ns));
        kept_up.behind_ns = behind_ns;
        Some(behind_ns)
    }
}

fn refuse(what: String) -> StageError {
    let detail = format!(
        "--replay: {what}; give the input and the options of the run, or a report of this one"
    );
    StageError::new(FaultKind::BadInput, "read input", detail)
}

/// What a chunk begins with. Where stages remember and cannot be told of a gap, it begins with a cut.
#[derive(Clone, Copy)]
pub(super) struct Cuts {
    pub(super) choice: CutChoice,
    pub(super) is_gap_a_cut: bool,
    /// No chunk came before.
    pub(super) is_first: bool,
}

impl Cuts {
    pub(super) fn of(self, chunk: &Chunk) -> Cut {
        match self.choice {
            _ if self.is_first => Cut::None,
            CutChoice::Hard if chunk.cut => Cut::Hard,
            CutChoice::Flush if chunk.cut => Cut::Flush,
            _ if self.is_gap_a_cut && chunk.skipped > 0 => Cut::Flush,
            _ => Cut::None,
        }
    }
}

/// Refuses `--min-steps` where steps cannot vary.
pub(super) fn check_steps(
    args: &RunArgs,
    pipeline: &Pipeline,
    kernels: &[Description],
) -> Result<(), Error> {
    let Some(least) = args.live.min_steps else {
        return Ok(());
    };
    let refuse = |what: String| Err(Error::Usage(format!("--min-steps {least}: {what}")));
    if args.live.late == Late::Block {
        return refuse("with --late block all chunks have all steps; give --late drop".into());
    }
    if least > args.denoise_steps {
        let most = args.denoise_steps;
        return refuse(format!("--denoise-steps is {most}; name fewer"));
    }
    placement::check_least(pipeline, least as u16).or_else(refuse)?;
    let mut stages = pipeline.stages().iter().zip(kernels);
    match stages.find(|(stage, of)| !of.takes_steps([&*stage.name])) {
        None => Ok(()),
        Some((stage, of)) => refuse(format!(
            "the kernels {} of {} do not say that steps may differ from chunk to chunk; leave --min-steps out",
            of.name, stage.name
        )),
    }
}

/// Refuses an input that does not come as the options say.
pub(super) fn check_input(args: &RunArgs) -> Result<(), Error> {
    let live = &args.live;
    let refuse = |what: &str| Err(Error::Usage(what.into()));
    if let Some(path) = &live.replay {
        if args.cuts == CutChoice::Hard {
            return refuse(
                "--replay: which chunks --cuts hard drops depends on time; it takes --cuts flush or off",
            );
        }
        read(path, args)?;
    }
    let path = match args.input.as_os_str() == "-" {
        true => Path::new("/dev/stdin"),
        false => &args.input,
    };
    match std::fs::metadata(path).map(|about| about.is_file()) {
        Ok(true) if live.late == Late::Drop && !live.pace => refuse(
            "--late drop: the input is a file, which has all its frames at once; give --pace, or a pipe",
        ),
        Ok(false) if live.pace => refuse(
            "--pace reads a file, and the input is a pipe, which has a pace of its own; leave --pace out",
        ),
        // One that cannot be opened is refused when it is.
        _ => Ok(()),
    }
}
