//! The command line.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::str::FromStr;

use crate::cmd::shutdown::ShutdownArgs;
use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};

use crate::cmd::faults::Transport;

/// The most chunks in flight.
const MAX_DEPTH: u32 = 64;

/// A pipeline-parallel runtime for real-time generative models.
///
/// Without a launcher `pp run` and `pp bench` start their own two ranks on this machine. Under
/// torchrun, srun or mpirun each process is the rank its environment names; the ranks share a
/// secret in PP_JOB_SECRET or PP_JOB_SECRET_FILE.
#[derive(Debug, Parser)]
#[command(name = "pp", version, propagate_version = true)]
#[command(after_long_help = crate::env::help())]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Denoise a video through the pipeline encode@0 → phase_b@1 → decode@0.
    Run(RunArgs),
    /// Measure.
    #[command(subcommand)]
    Bench(BenchCommand),
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
    /// End real jobs in every state, while the peer works, leaves, dies, stops or is cut off.
    Shutdown(ShutdownArgs),
    /// Break each rule of the protocol on purpose, in real jobs, and see what the ranks do.
    ///
    /// PP_FAULT=NAME makes one such fault in any `pp run`: --hooks has the names.
    Faults(FaultsArgs),
}

#[derive(Debug, Subcommand)]
pub(crate) enum PluginCommand {
    /// Test a plugin against the ABI, in host memory and in GPU memory, as far as the plugin works there.
    ///
    /// Prints each check when it begins and when it ends. A child process loads the plugin and runs the
    /// checks; what the plugin prints goes to standard error. A check fails if the plugin crashes in it,
    /// calls exit, or takes longer than PP_STUCK_MS (120000; 0 for ever); the next check then begins in
    /// a new process. GPU memory is that of the first GPU (CUDA_VISIBLE_DEVICES). Without a GPU a plugin
    /// for both is checked in host memory alone, and the report says why.
    ///
    /// Exit code 0: every check passed. 5: a check failed. 10: the plugin works in GPU memory alone, and
    /// there is no GPU.
    Check {
        /// The shared library.
        file: PathBuf,
        /// Be the child process, from this check on.
        #[arg(long, value_name = "N", hide = true)]
        worker_from: Option<usize>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    /// How well two stages overlap.
    Overlap(OverlapArgs),
    /// What the edges carry: one way and round trip, by size.
    Link(LinkArgs),
    /// What the CUDA kernels reach on this machine's first GPU.
    Kernels(KernelsArgs),
}

/// Where stages get their kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KernelChoice {
    /// Those that go with the transport.
    Auto,
    Cpu,
    /// The built-in CUDA kernels.
    Ptx,
    File(PathBuf),
}

impl FromStr for KernelChoice {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "auto" => Self::Auto,
            "cpu" => Self::Cpu,
            "ptx" => Self::Ptx,
            path => Self::File(path.into()),
        })
    }
}

/// How payloads travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TransportChoice {
    /// The best there is here; prints which.
    Auto,
    /// Memory that the ranks of one machine share.
    Host,
    /// GPU memory over NCCL, on one machine or several.
    Nccl,
}

/// What a scene cut does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CutChoice {
    /// Begin a new epoch once everything before it is written: every frame counts.
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
        match text.parse::<f32>() {
            Ok(sigma) if (0.0..=255.0).contains(&sigma) => Ok(Self::Sigma(sigma)),
            _ => Err("it takes 'auto', or the noise's standard deviation from 0 to 255".into()),
        }
    }
}

/// How often chunks are verified by digests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verify {
    Off,
    /// One chunk in so many, the first among them.
    Every(NonZeroU64),
}

impl Verify {
    pub(crate) fn is_due(self, chunk: u64) -> bool {
        matches!(self, Self::Every(every) if chunk % every == 0)
    }
}

impl std::fmt::Display for Verify {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Every(every) => write!(f, "every={every}"),
        }
    }
}

impl FromStr for Verify {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self::Off);
        }
        let every = text.strip_prefix("every=").and_then(|n| n.parse().ok());
        every
            .map(Self::Every)
            .ok_or_else(|| "it takes 'off', or 'every=N' for one chunk in N".into())
    }
}

fn sigma(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(sigma) if (0.0..=255.0).contains(&sigma) => Ok(sigma),
        _ => Err("it takes a standard deviation from 0 to 255".into()),
    }
}

fn milliseconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(ms) if (0.0..=60_000.0).contains(&ms) => Ok(ms),
        _ => Err("it takes milliseconds from 0 to 60000".into()),
    }
}

#[derive(Args, Clone, Debug)]
pub(crate) struct RunArgs {
    /// Y4M video to read; "-" is standard input.
    #[arg(long, value_name = "FILE.y4m|-", default_value = "-")]
    pub(crate) input: PathBuf,
    /// Where to write the result as Y4M; "-" is standard output. Without it nothing is written.
    #[arg(long, value_name = "FILE.y4m|-")]
    pub(crate) output: Option<PathBuf>,
    /// Processes: 2 for the pipeline, 1 to run every stage in one.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=2))]
    pub(crate) ranks: u32,
    /// Kernels: built in for the processor or for GPUs, or a plugin; auto goes with the transport.
    #[arg(long, value_name = "auto|cpu|ptx|FILE.so", default_value = "auto")]
    pub(crate) kernels: KernelChoice,
    /// How payloads travel between the ranks.
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) transport: TransportChoice,
    /// Denoising passes; 0 copies the input, bit for bit.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub(crate) denoise_steps: Option<u32>,
    /// Standard deviation of the noise to remove; auto estimates it from the clip.
    #[arg(
        long,
        value_name = "auto|S",
        default_value = "auto",
        allow_negative_numbers = true
    )]
    pub(crate) strength: Strength,
    /// Frames that travel together.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) frames_per_chunk: u32,
    /// Slots of each edge, which is the most chunks in flight.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_DEPTH)))]
    pub(crate) depth: u32,
    /// Stop after so many chunks.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) chunks: Option<u64>,
    /// Start Phase B again up to so many times when it dies, falls silent or loses its GPU; the
    /// output stays the same, bit for bit.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub(crate) restarts: u32,
    /// Send the frames before each chunk again instead of keeping them at Phase B.
    #[arg(long)]
    pub(crate) recompute: bool,
    /// What a scene cut does.
    #[arg(long, value_enum, default_value = "flush")]
    pub(crate) cuts: CutChoice,
    /// Add Gaussian noise of this standard deviation first, and report PSNR against the clean clip.
    #[arg(long, value_name = "SIGMA", value_parser = sigma, allow_negative_numbers = true)]
    pub(crate) add_noise: Option<f32>,
    /// Seed of the noise.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Threads for Phase B; 0 takes all cores.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub(crate) threads: u32,
    /// Compare digests of all tensors between the ranks, in one chunk of N; the report has them.
    #[arg(long, value_name = "every=N|off", default_value = "off")]
    pub(crate) verify: Verify,
    /// Write the run, its measures and every chunk as JSON.
    #[arg(long, value_name = "FILE.json")]
    pub(crate) report: Option<PathBuf>,
    /// Write a Chrome/Perfetto trace with both ranks on one clock.
    #[arg(long, value_name = "FILE.json")]
    pub(crate) trace: Option<PathBuf>,
    /// Draw the last chunks as a picture.
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) timeline: Option<PathBuf>,
}

/// What a simulated stage does with its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Simulate {
    /// Sleep, then spin the rest to the mark: a stage that leaves its core to others.
    Sleep,
    /// Spin all the time: a stage that needs its core.
    Spin,
    /// A GPU kernel that spins on the GPU's clock (with --transport nccl).
    GpuSpin,
    /// bf16 matrix products on the GPU.
    Gemm,
    /// Reads and writes of GPU memory.
    Hbm,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct OverlapArgs {
    /// Duration of the front's stage.
    #[arg(long, value_name = "F", default_value = "5", value_parser = milliseconds, allow_negative_numbers = true)]
    pub(crate) decode_ms: f64,
    /// Duration of Phase B.
    #[arg(long, value_name = "F", default_value = "5", value_parser = milliseconds, allow_negative_numbers = true)]
    pub(crate) phase_b_ms: f64,
    /// Payload bytes, each way.
    #[arg(long, value_name = "N", default_value_t = 22_118_400)]
    pub(crate) bytes: u64,
    /// Chunks to run; the first ones warm up. Without it, about two seconds' worth.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(2..))]
    pub(crate) chunks: Option<u64>,
    /// Slots of each edge, which is the most chunks in flight.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_DEPTH)))]
    pub(crate) depth: u32,
    /// What the stages do with their time; without it they sleep, and on GPUs spin there.
    #[arg(long, value_enum)]
    pub(crate) simulate: Option<Simulate>,
    /// How payloads travel between the ranks.
    #[arg(long, value_enum, default_value = "host")]
    pub(crate) transport: TransportChoice,
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

#[derive(Args, Clone, Debug)]
pub(crate) struct LinkArgs {
    /// How payloads travel between the ranks.
    #[arg(long, value_enum, default_value = "host")]
    pub(crate) transport: TransportChoice,
    /// Largest payload; each edge has slots of this size.
    #[arg(long, value_name = "N", default_value_t = 64 << 20, value_parser = clap::value_parser!(u64).range(4..=1 << 30))]
    pub(crate) max_bytes: u64,
    /// Slots of each edge.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_DEPTH)))]
    pub(crate) depth: u32,
    /// NCCL communicators that return at once and are asked until they are done.
    #[arg(long)]
    pub(crate) non_blocking: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Clone, Debug)]
#[group(skip)]
#[command(group = ArgGroup::new("what").required(true).args(["list", "hooks", "run", "all"]))]
pub(crate) struct FaultsArgs {
    /// Say what there is, and do nothing.
    #[arg(long)]
    pub(crate) list: bool,
    /// Name the hooks of PP_FAULT, with their ranks and what each needs.
    #[arg(long)]
    pub(crate) hooks: bool,
    /// Make this fault; may be given more than once.
    #[arg(long, value_name = "ID")]
    pub(crate) run: Vec<String>,
    /// Make all of them.
    #[arg(long)]
    pub(crate) all: bool,
    /// What carries the payloads of the jobs.
    #[arg(long, value_enum, default_value = "host")]
    pub(crate) transport: Transport,
    /// Print JSON instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct KernelsArgs {
    /// Width of the frames.
    #[arg(long, value_name = "N", default_value_t = 1280, value_parser = clap::value_parser!(u32).range(16..=16384))]
    pub(crate) width: u32,
    /// Height of the frames.
    #[arg(long, value_name = "N", default_value_t = 720, value_parser = clap::value_parser!(u32).range(16..=16384))]
    pub(crate) height: u32,
    /// Frames in a chunk.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) frames_per_chunk: u32,
    /// Denoising passes.
    #[arg(long, value_name = "N", default_value_t = pp_kernels::cpu::settings::DEFAULT_STEPS, value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub(crate) denoise_steps: u32,
    /// Runs, of which the median counts.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10000))]
    pub(crate) runs: u32,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct FlightArgs {
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
