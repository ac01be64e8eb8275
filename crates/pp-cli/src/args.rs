//! The command line.

use std::error::Error as _;
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory, FromArgMatches, Subcommand, ValueEnum};
use pp_contract::Pipeline;
use pp_contract::pipeline::{MAX_DEPTH, MAX_RANKS};
use pp_job::Error;
use pp_job::output::stdout;
use pp_kernels::denoise::settings::DEFAULT_STEPS;
use pp_runtime::drift::Verify;

use pp_command::{KernelChoice, TransportChoice, plugin_arg, print, whole};

mod plugin;
mod schedule;

pub(crate) use self::plugin::check_plugin_args;
pub use self::plugin::{PluginArgs, PluginCommand};
pub use self::schedule::ScheduleCommand;
pub(crate) use self::schedule::{
    CheckArgs, CompareArgs, MemoryArgs, PlotArgs, ShowArgs, SimulateArgs, SimulationArgs, SizeArgs,
    Subject, SubjectArgs,
};

/// A pipeline-parallel runtime for real-time generative models.
///
/// Without a launcher `pp run` and `pp bench` start their own ranks on this machine. Under
/// torchrun, srun or mpirun each process is the rank its environment names; the ranks share a
/// secret in PP_JOB_SECRET or PP_JOB_SECRET_FILE.
#[derive(Debug, clap::Parser)]
#[command(name = "pp", version, propagate_version = true)]
#[command(after_long_help = pp_command::env::help())]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Reads the command line of this process. `--help` and `--version`, and what no command takes, end the process.
///
/// # Errors
/// A value that an option does not take, or standard output that takes no text.
pub(crate) fn parse<C: CommandFactory + FromArgMatches>() -> Result<C, Error> {
    let command = C::command();
    let name = command.get_name().to_owned();
    let parsed = prepare(command, &name).try_get_matches();
    let parsed = parsed.and_then(|matches| C::from_arg_matches(&matches));
    parsed.or_else(|error| {
        if let Some(refusal) = refusal(&error) {
            return Err(Error::Usage(refusal));
        }
        if !error.use_stderr() {
            let text = error.render();
            match rustix::termios::isatty(stdout()) {
                true => print(&text.ansi().to_string())?,
                false => print(&text.to_string())?,
            }
            std::process::exit(0)
        }
        error.exit()
    })
}

/// Lets a command and those below it show the version as that of the program, and each option refuse negative numbers by
/// itself.
fn prepare(command: clap::Command, name: &str) -> clap::Command {
    let with_negative = |arg: clap::Arg| {
        let takes_value = arg.get_action().takes_values() && !arg.is_positional();
        arg.allow_negative_numbers(takes_value)
    };
    let command = command.display_name(name).mut_args(with_negative);
    command.mut_subcommands(|below| prepare(below, name))
}

/// One line for a value that its option does not take.
fn refusal(error: &clap::Error) -> Option<String> {
    let text = |kind| match error.get(kind)? {
        ContextValue::String(text) => Some(text.as_str()),
        _ => None,
    };
    let is_stray = error.kind() == ErrorKind::UnknownArgument
        && text(ContextKind::InvalidArg) == Some("-")
        && std::env::args_os().any(|arg| arg == "--pipeline");
    if is_stray {
        return Some("--pipeline: a '-' stands alone; quote the text: the shell took the >".into());
    }
    if error.kind() != ErrorKind::ValueValidation {
        return None;
    }
    // As in the usage: `--depth <N>`.
    let flag = text(ContextKind::InvalidArg)?.split(' ').next()?;
    let value = text(ContextKind::InvalidValue)?;
    let is_plain =
        !value.is_empty() && !value.contains(|c: char| c.is_whitespace() || c.is_control());
    let why = error.source()?;
    Some(if is_plain {
        format!("{flag} {value}: {why}")
    } else {
        format!("{flag} {value:?}: {why}")
    })
}

/// The commands of `pp`.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Denoise a video through the stages encode, phase_b and decode, on any ranks.
    Run(Box<RunArgs>),
    /// Measure.
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Measure the stages on this machine, propose ranks for them, and run the proposal.
    Plan(Box<PlanArgs>),
    /// Training schedules in PyTorch's notation: build, check, simulate and draw them.
    #[command(subcommand)]
    Schedule(ScheduleCommand),
    /// Read what the ranks of a job did last: who waited for whom, and who never came.
    Flight(FlightArgs),
    /// Say what this machine has and lacks, and what to do about it.
    Doctor,
    /// Compare the digests in the reports of two runs with --verify: the first chunk and tensor that differ.
    ///
    /// Exit code 0: both verified the same chunks, and all are alike. 11: a chunk differs. 3: one run
    /// verified chunks that the other did not, or a file is no report with digests. 4: a file cannot
    /// be read.
    Verify {
        /// The report of one run.
        first: PathBuf,
        /// The report of the other.
        second: PathBuf,
    },
    /// Kernel plugins.
    #[command(subcommand)]
    Plugin(PluginCommand),
}

/// The commands of `pp bench`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// How well stages overlap.
    Overlap(OverlapArgs),
    /// What the edges carry: one way and round trip, by size.
    Link(LinkArgs),
    /// What the CUDA kernels reach on this machine's first GPU.
    Kernels(KernelsArgs),
    /// How fast a clip is read and written, without stages between.
    Video(VideoArgs),
}

/// What a scene cut does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CutChoice {
    /// Begin a new epoch; what is in flight is written: every frame counts.
    Flush,
    /// Begin a new epoch at once and drop what is in flight: the newest picture counts.
    Hard,
    /// Do not look for cuts.
    Off,
}

/// How strongly to denoise.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Strength {
    Auto,
    Sigma(f32),
}

impl FromStr for Strength {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        let refuse = |_| "it takes 'auto', or the noise's standard deviation from 0 to 255".into();
        sigma(text).map(Self::Sigma).map_err(refuse)
    }
}

impl Display for Strength {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Sigma(sigma) => sigma.fmt(f),
        }
    }
}

fn sigma(text: &str) -> Result<f32, String> {
    let sigma = text.parse().ok().filter(|s| (0.0..=255.0).contains(s));
    sigma.ok_or_else(|| "it takes a standard deviation from 0 to 255".into())
}

fn milliseconds(text: &str) -> Result<f64, String> {
    let ms = text.parse().ok().filter(|ms| (0.0..=60_000.0).contains(ms));
    ms.ok_or_else(|| "it takes milliseconds from 0 to 60000".into())
}

/// The arguments of `pp run`.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// Y4M video to read; "-" is standard input. 8 bits, 4:2:0, 4:2:2, 4:4:4 or mono, frames of 16x16 to 16384x16384.
    #[arg(long, value_name = "FILE.y4m|-", default_value = "-")]
    pub(crate) input: PathBuf,
    /// Where to write the result as Y4M; "-" is standard output. Without it nothing is written.
    #[arg(long, value_name = "FILE.y4m|-")]
    pub(crate) output: Option<PathBuf>,
    /// Stages on ranks, such as "encode@0 -> phase_b@1 -> phase_b@2 -> decode@0", in quotes; the parts of a stage share
    /// its passes. By default what --ranks says.
    #[arg(long, value_name = "TEXT")]
    pub(crate) pipeline: Option<Pipeline>,
    /// Processes, 1 to 64; by default as many as a launcher started, else 2. With 1 all stages stand on rank 0; with N
    /// encode and decode stand on rank 0, and phase_b in N-1 parts on the others.
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_RANKS))]
    pub(crate) ranks: Option<u32>,
    /// Kernels: cpu and ptx are built in (host memory, GPU memory), FILE.so is a plugin; auto takes ptx where the
    /// payloads are on GPUs, else cpu.
    #[arg(long, value_name = "auto|cpu|ptx|FILE.so", default_value = "auto")]
    pub kernels: KernelChoice,
    /// An argument for the plugin; may be given several times, each key once.
    #[arg(long = "plugin-arg", value_name = "KEY=VALUE", value_parser = plugin_arg)]
    pub(crate) plugin_args: Vec<(String, String)>,
    /// How payloads travel between the ranks.
    #[arg(long, value_enum, default_value = "auto")]
    pub transport: TransportChoice,
    /// Denoising steps, 0 to 1024; 0 copies the input, bit for bit.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_STEPS, value_parser = whole(0..=1024_u32))]
    pub(crate) denoise_steps: u32,
    /// Standard deviation of the noise to remove, 0 to 255; auto estimates it from the clip.
    #[arg(long, value_name = "auto|S", default_value = "auto")]
    pub(crate) strength: Strength,
    /// Frames that travel together, 1 to 256.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = whole(1..=256_u32))]
    pub(crate) frames_per_chunk: u32,
    /// Most chunks in flight, 1 to 64: the slots of each edge; by default 2, and 1 more for each edge between ranks
    /// and for each group.
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_DEPTH))]
    pub(crate) depth: Option<u32>,
    /// Stop after so many chunks, 1 to 18446744073709551615; by default at the end of the input.
    #[arg(long, value_name = "N", value_parser = whole(1..=u64::MAX))]
    pub(crate) chunks: Option<u64>,
    /// Start lost ranks again up to so many times, 0 to 1000000, when one dies, falls silent or loses its GPU; the output
    /// stays the same, bit for bit. Those of the source and of the sink are never started again.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole(0..=1_000_000_u32))]
    pub restarts: u32,
    /// Send the frames before each chunk again instead of keeping them at the stages.
    #[arg(long)]
    pub recompute: bool,
    /// What a scene cut does.
    #[arg(long, value_enum, default_value = "flush")]
    pub cuts: CutChoice,
    /// Add Gaussian noise of this standard deviation, 0 to 255, first, and report PSNR against the clean clip; by
    /// default none.
    #[arg(long, value_name = "SIGMA", value_parser = sigma)]
    pub(crate) add_noise: Option<f32>,
    /// Seed of the noise, 0 to 18446744073709551615.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole(0..=u64::MAX))]
    pub(crate) seed: u64,
    /// Threads for each stage between source and sink, 0 to 1024; 0 takes one for each core.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole(0..=1024_u32))]
    pub(crate) threads: u32,
    /// Compare digests of all tensors between the stages, in one chunk of N (1 to 18446744073709551615); the report has
    /// them.
    #[arg(long, value_name = "every=N|off", default_value = "off")]
    pub(crate) verify: Verify,
    /// Write the run, its measures and every chunk as JSON.
    #[arg(long, value_name = "FILE.json")]
    pub(crate) report: Option<PathBuf>,
    /// Write a Chrome/Perfetto trace with all ranks on one clock.
    #[arg(long, value_name = "FILE.json")]
    pub(crate) trace: Option<PathBuf>,
    /// Draw the last chunks as a picture.
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) timeline: Option<PathBuf>,
}

impl RunArgs {
    /// The number of ranks.
    pub(crate) fn world(&self) -> u32 {
        let given = self.pipeline.as_ref();
        let given = given.map(|pipeline| pipeline.world_size().get());
        given.or(self.ranks).unwrap_or(2)
    }
}

/// What a simulated stage does with its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Simulate {
    /// Sleep, then spin the rest to the mark: a stage that leaves its core to others.
    Sleep,
    /// Compute for so much time of a core: a stage that needs its core.
    Spin,
    /// A GPU kernel that spins on the GPU's clock (with --transport p2p or nccl).
    GpuSpin,
    /// bf16 matrix products on the GPU.
    Gemm,
    /// Reads and writes of GPU memory.
    Hbm,
}

/// The arguments of `pp bench overlap`.
#[derive(Args, Clone, Debug)]
pub struct OverlapArgs {
    /// Duration of each stage in milliseconds, 0 to 60000: that of the source first, that of the sink last. Each stands
    /// on a rank of its own, unless --pipeline says where; by default 0, --phase-b-ms and --decode-ms, on two ranks.
    #[arg(long, value_name = "F,F,…", value_delimiter = ',', value_parser = milliseconds)]
    #[arg(conflicts_with_all = ["decode_ms", "phase_b_ms"])]
    pub(crate) stages: Option<Vec<f64>>,
    /// Where the stages stand, with the names s0 for the source, s1 and so on, as in "s0@0 -> s1@1 -> s2@0".
    #[arg(long, value_name = "TEXT")]
    pub(crate) pipeline: Option<String>,
    /// Without --stages: duration of s2, the only work of rank 0, in milliseconds, 0 to 60000.
    #[arg(long, value_name = "F", default_value = "5", value_parser = milliseconds)]
    pub(crate) decode_ms: f64,
    /// Without --stages: duration of s1, which stands on rank 1, in milliseconds, 0 to 60000.
    #[arg(long, value_name = "F", default_value = "5", value_parser = milliseconds)]
    pub(crate) phase_b_ms: f64,
    /// Payload bytes over each edge, 0 to 18446744073709551615, as far as there is memory.
    #[arg(long, value_name = "N", default_value_t = 22_118_400, value_parser = whole(0..=u64::MAX))]
    pub(crate) bytes: u64,
    /// Chunks to run, 2 to 18446744073709551615, the first of them to warm up; by default about two seconds' worth.
    #[arg(long, value_name = "N", value_parser = whole(2..=u64::MAX))]
    pub(crate) chunks: Option<u64>,
    /// Most chunks in flight, 1 to 64: the slots of each edge; by default two, and one more for each edge with payloads
    /// and for each group.
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_DEPTH))]
    pub(crate) depth: Option<u32>,
    /// What the stages do with their time; without it they sleep, and on GPUs spin there.
    #[arg(long, value_enum)]
    pub(crate) simulate: Option<Simulate>,
    /// How payloads travel between the ranks.
    #[arg(long, value_enum, default_value = "host")]
    pub(crate) transport: TransportChoice,
    /// Say what payloads of --bytes cost beside payloads of N bytes, 1 to 18446744073709551615: blocks of 48 chunks
    /// have N and --bytes in turn, and the first pair of blocks warms up. 37 pairs unless --chunks says otherwise,
    /// which must be 192 or more; by default all payloads have --bytes.
    #[arg(long, value_name = "N", value_parser = whole(1..=u64::MAX), conflicts_with = "sync")]
    pub(crate) against: Option<u64>,
    /// One chunk at a time: what it costs without overlap.
    #[arg(long)]
    pub(crate) sync: bool,
    /// Producers write fresh bytes into every payload and consumers read every byte; else payloads
    /// are handed over untouched.
    #[arg(long)]
    pub(crate) touch: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a Chrome/Perfetto trace.
    #[arg(long, value_name = "FILE.json")]
    pub(crate) trace: Option<PathBuf>,
    /// Draw the last chunks as a picture.
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) timeline: Option<PathBuf>,
}

/// The arguments of `pp bench link`.
#[derive(Args, Clone, Debug)]
pub struct LinkArgs {
    /// How payloads travel between the ranks.
    #[arg(long, value_enum, default_value = "host")]
    pub(crate) transport: TransportChoice,
    /// Largest payload in bytes, 4 to 1073741824; each edge has slots of this size.
    #[arg(long, value_name = "N", default_value_t = 64 << 20, value_parser = whole(4..=1_u64 << 30))]
    pub(crate) max_bytes: u64,
    /// Slots of each edge, 1 to 64.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = whole(1..=MAX_DEPTH))]
    pub(crate) depth: u32,
    /// NCCL communicators that return at once and are asked until they are done.
    #[arg(long)]
    pub(crate) non_blocking: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The arguments of `pp bench kernels`.
#[derive(Args, Clone, Debug)]
pub struct KernelsArgs {
    /// Width of the frames, 16 to 16384.
    #[arg(long, value_name = "N", default_value_t = 1280, value_parser = whole(16..=16384_u32))]
    pub(crate) width: u32,
    /// Height of the frames, 16 to 16384.
    #[arg(long, value_name = "N", default_value_t = 720, value_parser = whole(16..=16384_u32))]
    pub(crate) height: u32,
    /// Frames in a chunk, 1 to 256.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = whole(1..=256_u32))]
    pub(crate) frames_per_chunk: u32,
    /// Denoising steps, 0 to 1024.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_STEPS, value_parser = whole(0..=1024_u32))]
    pub(crate) denoise_steps: u32,
    /// Runs, 1 to 10000, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = whole(1..=10000_u32))]
    pub(crate) runs: u32,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The arguments of `pp bench video`.
#[derive(Args, Clone, Debug)]
pub struct VideoArgs {
    /// Y4M video to read, a file.
    #[arg(long, value_name = "FILE.y4m")]
    pub(crate) input: PathBuf,
    /// Where to write as many frames as Y4M; without it only reading is measured.
    #[arg(long, value_name = "FILE.y4m")]
    pub(crate) output: Option<PathBuf>,
    /// Frames that travel together, from 1 to 256.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = whole(1..=256_u32))]
    pub(crate) frames_per_chunk: u32,
    /// Runs, of which the median counts, from 1 to 1000.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = whole(1..=1000_u32))]
    pub(crate) runs: u32,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The arguments of `pp plan`.
#[derive(Args, Clone, Debug)]
pub struct PlanArgs {
    /// Most ranks that the stages may stand on, 1 to 64.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = whole(1..=MAX_RANKS))]
    pub(crate) ranks: u32,
    /// Place stages that compute for so many milliseconds, 0 to 60000, that of the source first; by default the stages of
    /// pp run are placed.
    #[arg(long, value_name = "F,F,…", value_delimiter = ',', value_parser = milliseconds)]
    #[arg(conflicts_with_all = ["input", "width", "height", "denoise_steps", "frames_per_chunk"])]
    #[arg(conflicts_with_all = ["kernels", "plugin_args", "transport", "threads"])]
    pub(crate) stages: Option<Vec<f64>>,
    /// With --stages: payload bytes over each edge, 0 to 18446744073709551615, as far as there is memory.
    #[arg(long, value_name = "N", default_value_t = 22_118_400, value_parser = whole(0..=u64::MAX))]
    pub(crate) bytes: u64,
    /// Y4M video to measure with, a file; without it noise is made.
    #[arg(long, value_name = "FILE.y4m", conflicts_with_all = ["width", "height"])]
    pub(crate) input: Option<PathBuf>,
    /// Width of the noise, 16 to 16384.
    #[arg(long, value_name = "N", default_value_t = 1280, value_parser = whole(16..=16384_u32))]
    pub(crate) width: u32,
    /// Height of the noise, 16 to 16384.
    #[arg(long, value_name = "N", default_value_t = 720, value_parser = whole(16..=16384_u32))]
    pub(crate) height: u32,
    /// Kernels, as for pp run.
    #[arg(long, value_name = "auto|cpu|ptx|FILE.so", default_value = "auto")]
    pub(crate) kernels: String,
    /// An argument for the plugin; may be given several times, each key once.
    #[arg(long = "plugin-arg", value_name = "KEY=VALUE", value_parser = plugin_arg)]
    pub(crate) plugin_args: Vec<(String, String)>,
    /// How payloads travel between the ranks.
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) transport: TransportChoice,
    /// Denoising steps, 0 to 1024.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_STEPS, value_parser = whole(0..=1024_u32))]
    pub(crate) denoise_steps: u32,
    /// Frames that travel together, 1 to 256.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = whole(1..=256_u32))]
    pub(crate) frames_per_chunk: u32,
    /// Threads for each stage between source and sink, 0 to 1024; 0 takes one for each core.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = whole(0..=1024_u32))]
    pub(crate) threads: u32,
    /// Chunks of each run, 2 to 1000000, the first of them to warm up; by default 24, and with --stages 200.
    #[arg(long, value_name = "N", value_parser = whole(2..=1_000_000_u64))]
    pub(crate) chunks: Option<u64>,
    /// Runs of each pipeline, 1 to 100, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = whole(1..=100_u32))]
    pub(crate) rounds: u32,
    /// Run every placement, and say which is the best.
    #[arg(long)]
    pub(crate) all: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The arguments of `pp flight`.
#[derive(Args, Clone, Debug)]
pub struct FlightArgs {
    /// The recordings of one job, one of each rank that left one. A fault, a panic and SIGUSR1 write
    /// them to the folder PP_FLIGHT_DIR; without it to pp-flight-UID in the folder for temporary files.
    #[arg(required = true, value_name = "FILES")]
    pub(crate) files: Vec<PathBuf>,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,
    /// Write a Chrome/Perfetto trace with all ranks on one clock.
    #[arg(long, value_name = "FILE.json")]
    pub(crate) trace: Option<PathBuf>,
}

#[cfg(test)]
mod tests;
