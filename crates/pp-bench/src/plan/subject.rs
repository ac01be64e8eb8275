//! What `pp plan` places: the stages of `pp run` with some kernels, or stages of given lengths. Each of its runs is a job
//! that it starts.

use std::fmt;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::Context as _;
use pp_command::{KernelChoice, KernelChoices, TransportChoice, backend};
use pp_contract::FaultKind;
use pp_contract::pipeline::MAX_STAGES;
use pp_job::Error;
use pp_kernels::{Chroma, Description, KernelSet, StageInfo, StageKind};
use pp_transport::host::memory::available_bytes;
use pp_video::y4m::Reader;
use rustix::fs::{MemfdFlags, memfd_create};
use serde::Serialize;
use serde_json::Value;

use crate::args::PlanArgs;

/// Parts of a stage that are tried, unless there are more ranks.
const PARTS: u32 = 8;
/// Frames of noise, over and over.
const FRAMES: usize = 8;

/// What is placed.
pub(super) struct Subject<'a> {
    args: &'a PlanArgs,
    stages: StageSource<'a>,
}

enum StageSource<'a> {
    Film(Vec<StageInfo>, Clip),
    Given(&'a [f64]),
}

/// A pipeline to run.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Candidate {
    pub(super) pipeline: String,
    /// As `--devices` takes them; none where `pp run` finds them.
    pub(super) devices: Option<String>,
    /// The period. That of a group is not predicted.
    pub(super) predicted_ms: Option<f64>,
    /// May be proposed; the others are run for comparison.
    #[serde(skip)]
    pub(super) is_proposable: bool,
}

impl Candidate {
    /// One whose devices `pp run` finds, and whose period is not predicted.
    pub(super) fn of(pipeline: String) -> Self {
        Self {
            pipeline,
            devices: None,
            predicted_ms: None,
            is_proposable: true,
        }
    }
}

/// The pipeline, and its options.
impl fmt::Display for Candidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.pipeline)?;
        match &self.devices {
            Some(devices) => write!(f, ", --devices {devices}"),
            None => Ok(()),
        }
    }
}

/// What a run came to.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) period_ms: f64,
    /// Of each stage.
    pub(super) work_ms: Vec<f64>,
    /// The payload of the source.
    pub(super) bytes: u64,
    /// Payloads lie in host memory, and stages need cores.
    pub(super) is_on_host: bool,
}

impl<'a> Subject<'a> {
    /// # Errors
    /// There is nothing that can be run.
    pub(super) fn open(
        args: &'a PlanArgs,
        describe: impl Fn(&Path) -> Result<Description, Error>,
    ) -> Result<Self, Error> {
        let stages = match &args.stages {
            Some(ms) if ms.len() < 2 => {
                let what = "a pipeline has a source and a sink; give two lengths or more";
                return Err(Error::Usage(format!("--stages {}: {what}", ms[0])));
            }
            Some(ms) if ms.len() > MAX_STAGES => {
                return Err(Error::Usage(format!(
                    "--stages: {} lengths, and a pipeline has {MAX_STAGES} stages at most; give fewer",
                    ms.len()
                )));
            }
            Some(ms) if ms.iter().sum::<f64>() == 0.0 => {
                let what = "--stages: no stage takes any time; give one a length";
                return Err(Error::Usage(what.into()));
            }
            Some(ms) => StageSource::Given(ms),
            None => StageSource::Film(stages_of(&args.kernels, describe)?, Clip::open(args)?),
        };
        Ok(Self { args, stages })
    }

    /// The most parts that are tried of each stage that can be cut.
    pub(super) fn most_parts(&self) -> u32 {
        match &self.stages {
            StageSource::Film(stages, _) if stages.iter().any(|stage| stage.in_parts) => {
                let most = self.args.denoise_steps.max(1);
                most.min(self.args.ranks.max(PARTS))
            }
            _ => 1,
        }
    }

    /// The names of all stages, each part counted.
    fn names(&self, parts: u32) -> Vec<String> {
        match &self.stages {
            StageSource::Given(ms) => (0..ms.len()).map(|at| format!("s{at}")).collect(),
            StageSource::Film(stages, _) => {
                let times = |stage: &StageInfo| if stage.in_parts { parts as usize } else { 1 };
                let names = stages
                    .iter()
                    .map(|stage| vec![stage.name.clone(); times(stage)]);
                names.flatten().collect()
            }
        }
    }

    /// How many stages there are with so many parts of each that can be cut.
    pub(super) fn count(&self, parts: u32) -> usize {
        self.names(parts).len()
    }

    /// The text of the pipeline with its stages on these ranks.
    pub(super) fn text(&self, parts: u32, ranks: &[u32]) -> String {
        let names = self.names(parts);
        let stages = names.iter().zip(ranks);
        let stages: Vec<String> = stages
            .map(|(name, rank)| format!("{name}@{rank}"))
            .collect();
        stages.join(" -> ")
    }

    /// Pipelines with a group: each stage that a group can run, on all ranks, and where there are three or more, on all but
    /// that of the other stages.
    pub(super) fn groups(&self) -> Vec<String> {
        let (ranks, mut texts) = (self.args.ranks, Vec::new());
        let StageSource::Film(stages, _) = &self.stages else {
            return texts;
        };
        let first_ranks = (0..2).filter(|first| first + 2 <= ranks);
        for first in first_ranks {
            let members: Vec<String> = (first..ranks).map(|rank| rank.to_string()).collect();
            for grouped in stages.iter().filter(|stage| stage.in_group) {
                let place = |stage: &StageInfo| match stage == grouped {
                    true => format!("{}@{}", stage.name, members.join("+")),
                    false => format!("{}@0", stage.name),
                };
                let stages: Vec<String> = stages.iter().map(place).collect();
                texts.push(stages.join(" -> "));
            }
        }
        texts
    }

    /// How many cores each stage keeps busy, of those that there are.
    pub(super) fn cores(&self, parts: u32, all: u32) -> Vec<u32> {
        let StageSource::Film(stages, _) = &self.stages else {
            return vec![1; self.count(parts)];
        };
        let between = match self.args.threads {
            0 => all,
            threads => threads.min(all),
        };
        let cores = |name: &String| {
            let is_between =
                |stage: &StageInfo| stage.kind == StageKind::Middle && stage.name == *name;
            if stages.iter().any(is_between) {
                between
            } else {
                1
            }
        };
        self.names(parts).iter().map(cores).collect()
    }

    /// How many GPUs of this machine the ranks may use, if `pp run` finds their devices.
    pub(super) fn gpus(&self) -> u32 {
        let is_film = matches!(self.stages, StageSource::Film(..));
        match is_film && self.args.transport == TransportChoice::Auto {
            true => backend::gpus(),
            false => 0,
        }
    }

    /// Runs this pipeline.
    ///
    /// # Errors
    /// The job measures too little, or prints no report. The inner error is that of a job that fails.
    pub(super) fn run(&self, candidate: &Candidate) -> Result<Result<Seen, Failed>, Error> {
        let pipeline = &candidate.pipeline;
        let args = self.args;
        let mut command = Command::new("/proc/self/exe");
        let chunks = args.chunks.unwrap_or(match self.stages {
            StageSource::Film(..) => 24,
            StageSource::Given(_) => 200,
        });
        match &self.stages {
            StageSource::Film(_, clip) => {
                command
                    .args(["run", "--report", "/dev/stdout", "--input"])
                    .arg(&clip.path);
                command.args([
                    "--kernels",
                    &args.kernels.to_string(),
                    "--transport",
                    &args.transport.to_string(),
                ]);
                for (flag, number) in [
                    ("--denoise-steps", args.denoise_steps),
                    ("--frames-per-chunk", args.frames_per_chunk),
                    ("--threads", args.threads),
                ] {
                    command.args([flag, &number.to_string()]);
                }
                for (key, value) in &args.plugin_args {
                    command.args(["--plugin-arg", &format!("{key}={value}")]);
                }
            }
            StageSource::Given(ms) => {
                let ms: Vec<String> = ms.iter().map(f64::to_string).collect();
                command.args(["bench", "overlap", "--json", "--simulate", "spin"]);
                command.args([
                    "--stages",
                    &ms.join(","),
                    "--bytes",
                    &args.bytes.to_string(),
                ]);
            }
        }
        command.args(["--chunks", &chunks.to_string(), "--pipeline", pipeline]);
        if let Some(devices) = &candidate.devices {
            command.args(["--devices", devices]);
        }
        let report = match job(&mut command)? {
            Ok(report) => report,
            Err(failed) => return Ok(Err(failed)),
        };
        let (measures, transport) = match self.stages {
            StageSource::Film(..) => (&report["measures"], &report["run"]["transport"]),
            StageSource::Given(_) => (&report, &report["transport"]),
        };
        let stages = measures["stages"].as_array();
        let work_ms = stages.map(|stages| stages.iter().map(|of| of["work_ms"].as_f64()).collect());
        let (Some(period_ms), Some(Some(work_ms))) = (measures["period_mean_ms"].as_f64(), work_ms)
        else {
            let what = format!(
                "too few chunks were measured of {pipeline}; raise --chunks, or give a longer --input"
            );
            return Err(Error::local(FaultKind::BadInput, "plan", what));
        };
        Ok(Ok(Seen {
            period_ms,
            work_ms,
            bytes: measures["source_bytes"].as_u64().unwrap_or(args.bytes),
            is_on_host: transport
                .as_str()
                .is_some_and(|name| name.starts_with("host")),
        }))
    }

    /// What an edge between ranks on these two devices, or where they find themselves, costs each of them for a chunk with such
    /// a payload, and how long it is on its way, in milliseconds.
    ///
    /// # Errors
    /// The job prints no report. The inner error is that of a job that fails.
    pub(super) fn edge_ms(
        &self,
        bytes: u64,
        devices: Option<&str>,
    ) -> Result<Result<[f64; 2], Failed>, Error> {
        let mut command = Command::new("/proc/self/exe");
        command.args(["bench", "overlap", "--json", "--stages", "0,0,0"]);
        command.args(["--pipeline", "s0@0 -> s1@1 -> s2@0", "--chunks", "5000"]);
        command.args(["--bytes", &bytes.to_string()]);
        match devices {
            Some(devices) => command.args(["--transport", "auto", "--devices", devices]),
            None => command.args(["--transport", &self.args.transport.to_string()]),
        };
        let report = match job(&mut command)? {
            Ok(report) => report,
            Err(failed) => return Ok(Err(failed)),
        };
        let figure = |value: &Value| value.as_f64().unwrap_or(0.0);
        // Rank 1 has two edges. On GPUs the copies run beside the stages.
        let driver_ms = figure(&report["driver_us"][1]) / 1e3;
        Ok(Ok([driver_ms / 2.0, figure(&report["period_mean_ms"])]))
    }
}

/// A job that failed.
pub(super) struct Failed(Output);

impl Failed {
    /// Why, in a line.
    pub(super) fn why(&self) -> String {
        let said = String::from_utf8_lossy(&self.0.stderr);
        let mut lines = said.lines().filter_map(|line| line.split_once("error: "));
        let ended = || format!("it ended with {}", self.0.status);
        lines.next().map_or_else(ended, |(_, why)| why.to_owned())
    }

    /// Prints what it said, for a command that ends with it.
    pub(super) fn into_error(self) -> Error {
        let status = self.0.status;
        // If standard error is closed, the line is lost.
        let _ = std::io::stderr().write_all(&self.0.stderr);
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        let killed = || anyhow::anyhow!("a job that was measured ended with {status}").into();
        code.map_or_else(killed, Error::Told)
    }
}

/// Runs a job to its end; what it printed.
fn job(command: &mut Command) -> Result<Result<Value, Failed>, Error> {
    let ended = command
        .stdin(Stdio::null())
        .output()
        .context("cannot start a job")?;
    if !ended.status.success() {
        return Ok(Err(Failed(ended)));
    }
    let report = serde_json::from_slice(&ended.stdout);
    Ok(Ok(
        report.context("a job that was measured printed no JSON")?
    ))
}

/// The stages of these kernels.
fn stages_of(
    kernels: &KernelChoices,
    describe: impl Fn(&Path) -> Result<Description, Error>,
) -> Result<Vec<StageInfo>, Error> {
    let stages_of = |choice: &KernelChoice| {
        backend::find_plugin(choice)?;
        let about = match choice {
            // All that are built in have the same stages.
            KernelChoice::Auto => KernelSet::for_host().describe().clone(),
            KernelChoice::BuiltIn(set) => set.describe().clone(),
            KernelChoice::File(path) => describe(path)?,
        };
        Ok::<_, Error>(about.stages)
    };
    let others = kernels.iter().next().map(stages_of).transpose()?;
    let mut stages = others.unwrap_or_default();
    for name in kernels.names() {
        let refuse = |what| Err(Error::Usage(format!("--kernels {kernels}: {what}")));
        let given = stages_of(kernels.of(name))?;
        let Some(given) = given.into_iter().find(|stage| stage.name == name) else {
            return refuse(format!(
                "its kernels have no stage {name}; name others for it"
            ));
        };
        let Some(at) = stages.iter().position(|stage| stage.name == name) else {
            let names: Vec<&str> = stages.iter().map(|stage| &*stage.name).collect();
            let names = names.join(", ");
            return refuse(format!("there is no stage {name}; name one of {names}"));
        };
        stages[at] = given;
    }
    Ok(stages)
}

/// The video that is measured with.
struct Clip {
    path: PathBuf,
    /// The noise, where no video was given.
    _memory: Option<File>,
}

impl Clip {
    fn open(args: &PlanArgs) -> Result<Self, Error> {
        match args.input.given() {
            Some(path) if path == Path::new("-") => Err(Error::Usage(
                "pp plan reads its input several times; name a file with --input".into(),
            )),
            Some(path) => {
                // Found out before anything is measured.
                Reader::open(path)?;
                Ok(Self {
                    path: path.into(),
                    _memory: None,
                })
            }
            None => Self::noise(args),
        }
    }

    /// Grey frames with noise, in memory that goes with this process.
    fn noise(args: &PlanArgs) -> Result<Self, Error> {
        let (width, height) = (args.width, args.height);
        let frames = args
            .chunks
            .unwrap_or(24)
            .saturating_mul(args.frames_per_chunk.into());
        let frame_bytes = Chroma::C420.frame_samples(width, height);
        let bytes = frames.saturating_mul(frame_bytes as u64);
        if let Some(available) = available_bytes().filter(|available| bytes > available / 2) {
            return Err(Error::Usage(format!(
                "{frames} frames of {width}x{height} take {} MB, and {} MB are available; lower --chunks or \
                 --frames-per-chunk, or give an --input",
                bytes / 1_000_000,
                available / 1_000_000
            )));
        }
        let memory =
            memfd_create("pp-plan", MemfdFlags::CLOEXEC).context("no memory for a clip")?;
        let memory = File::from(memory);
        let mut word: u32 = 1;
        let mut sample = || {
            word = word.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            112 + (word >> 27) as u8
        };
        let kinds: Vec<Vec<u8>> = (0..FRAMES)
            .map(|_| (0..frame_bytes).map(|_| sample()).collect())
            .collect();
        let mut out = BufWriter::new(&memory);
        let mut write = || {
            writeln!(out, "YUV4MPEG2 W{width} H{height} F25:1 Ip C420jpeg")?;
            for frame in 0..frames {
                out.write_all(b"FRAME\n")?;
                out.write_all(&kinds[frame as usize % FRAMES])?;
            }
            out.flush()
        };
        write().context("no memory for a clip")?;
        drop(out);
        // The jobs are other processes.
        let path = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
        Ok(Self {
            path: path.into(),
            _memory: Some(memory),
        })
    }
}
