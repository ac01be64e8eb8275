//! The command line.

use std::error::Error as _;
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{ArgAction, Args, CommandFactory, FromArgMatches, Subcommand, ValueEnum};
use pp_bench::{BenchCommand, PlanArgs};
use pp_command::{KernelChoices, TransportChoice, plugin_arg, print, whole};
use pp_contract::pipeline::{MAX_DEPTH, MAX_RANKS};
use pp_contract::{DeviceName, Pipeline};
use pp_job::Error;
use pp_job::output::stdout;
use pp_kernels::denoise::settings::DEFAULT_STEPS;
use pp_runtime::drift::Verify;

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
    /// Processes, 1 to 64; by default one for each of --devices, or as many as a launcher started, else 1 where this
    /// machine has one GPU for the kernels and 2 elsewhere. With 1 all stages stand on rank 0; with N encode and decode stand
    /// on rank 0, and phase_b in N-1 parts on the others.
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_RANKS))]
    pub(crate) ranks: Option<u32>,
    /// Kernels: cpu and ptx are built in (host memory, GPU memory), FILE.so is a plugin; auto takes ptx where the rank is
    /// on a GPU, else cpu. One value for all stages, or one for each stage that is named, as
    /// "encode=cpu,phase_b=./model.so"; the others have auto.
    #[arg(
        long,
        value_name = "auto|cpu|ptx|FILE.so|STAGE=...",
        default_value = "auto"
    )]
    pub kernels: KernelChoices,
    /// An argument for each plugin, or STAGE.KEY=VALUE for that of one stage; may be given several times, each key once.
    #[arg(long = "plugin-arg", value_name = "KEY=VALUE", value_parser = plugin_arg)]
    pub(crate) plugin_args: Vec<(String, String)>,
    /// How payloads travel between the ranks.
    #[arg(long, value_enum, default_value = "auto")]
    pub transport: TransportChoice,
    /// The device of each rank: cpu, cuda:N for the visible GPU N, which ranks that name it share, or cuda for the next
    /// GPU of the host. By default the GPUs that there are, first for ranks with stages between source and sink; the other
    /// ranks are CPUs.
    #[arg(long, value_name = "cpu|cuda|cuda:N,...", value_delimiter = ',', action = ArgAction::Set)]
    pub devices: Vec<DeviceName>,
    /// Denoising steps, 0 to 1024; 0 copies the input, bit for bit.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_STEPS, value_parser = whole(0..=1024_u32))]
    pub(crate) denoise_steps: u32,
    /// Standard deviation of the noise to remove, 0 to 255; auto estimates it from the clip.
    #[arg(long, value_name = "auto|S", default_value = "auto")]
    pub(crate) strength: Strength,
    /// Frames that travel together, 1 to 256.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = whole(1..=256_u32))]
    pub(crate) frames_per_chunk: u32,
    /// Most chunks in flight, 1 to 256: the slots of each edge; by default 2, and 1 more for each edge between ranks
    /// and for each group.
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_DEPTH))]
    pub(crate) depth: Option<u32>,
    /// Stop after so many chunks, 1 to 18446744073709551615; by default at the end of the input.
    #[arg(long, value_name = "N", value_parser = whole(1..=u64::MAX))]
    pub(crate) chunks: Option<u64>,
    /// Start lost ranks again up to so many times, 0 to 1000000, when one dies, falls silent or loses its GPU (under MPS
    /// the job ends then); the output stays the same, bit for bit. Those of the source and of the sink are never started again.
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
    /// The number of ranks of `--ranks`, or else of `--devices`.
    pub(crate) fn ranks_named(&self) -> Option<u32> {
        let devices = self.devices.len() as u32;
        self.ranks.or((devices > 0).then_some(devices))
    }

    /// The number of ranks.
    pub(crate) fn world(&self) -> u32 {
        let given = self.pipeline.as_ref();
        let given = given.map(|pipeline| pipeline.world_size().get());
        given.or(self.ranks_named()).unwrap_or(2)
    }
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
