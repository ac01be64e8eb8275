//! The command line.

use std::error::Error as _;
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::ArgPredicate;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{
    Arg, ArgAction, Args, CommandFactory, FromArgMatches, Subcommand, ValueEnum, value_parser,
};
use clap_complete::Shell;
use pp_bench::{BenchCommand, PlanArgs};
use pp_command::{Input, KernelChoices, LiveArgs, TransportChoice, plugin_arg, print, whole};
use pp_contract::pipeline::{MAX_DEPTH, MAX_RANKS};
use pp_contract::{DeviceName, Pipeline};
use pp_job::Error;
use pp_job::command_line::{arguments, set_arguments};
use pp_job::output::stdout;
use pp_kernels::denoise::settings::DEFAULT_STEPS;
use pp_runtime::drift::Verify;
use pp_schedule::ScheduleCommand;

mod config;
mod going_on;
mod plugin;
mod serve;

use self::config::Expanded;
pub(crate) use self::going_on::GoingOnArgs;
pub(crate) use self::plugin::check_plugin_args;
pub use self::plugin::{PluginArgs, PluginCommand};
pub use self::serve::{ServeArgs, TopArgs};

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

/// How much a command says.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Loudness {
    pub(crate) is_quiet: bool,
    /// How often `--verbose` was given.
    pub(crate) verbose: u8,
}

/// Reads the command line of this process. `--help` and `--version`, and what no command takes, end the process.
///
/// # Errors
/// A value that an option does not take, a file of `--config` that cannot be taken, or standard output that takes no text.
pub(crate) fn parse<C: CommandFactory + FromArgMatches>() -> Result<(C, Loudness), Error> {
    let command = prepared::<C>();
    let args: Vec<_> = std::env::args_os().collect();
    let expanded = config::expand(&command, &args)?;
    if let Some(expanded) = &expanded {
        set_arguments(expanded.args.clone());
    }
    let parsed = command.clone().try_get_matches_from(arguments());
    let parsed = parsed.and_then(|matches| Ok((C::from_arg_matches(&matches)?, matches)));
    let parsed = parsed.map(|(read, matches)| {
        let (.., given) = config::leaf(&command, &matches);
        let loudness = Loudness {
            is_quiet: given.get_flag(QUIET),
            verbose: given.get_count(VERBOSE),
        };
        (read, loudness)
    });
    parsed.or_else(|error| {
        if let Some(refusal) = refusal(&error) {
            let expanded = expanded.as_ref();
            let file = expanded.filter(|expanded| expanded.has_option_of(&refusal));
            return Err(Error::Usage(match file {
                Some(expanded) => format!("{}: {refusal}", expanded.file.display()),
                None => refusal,
            }));
        }
        if error.use_stderr() {
            if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
                error.exit()
            }
            let mut told = in_one_line(&error.render().to_string());
            if let Some(Expanded { file, .. }) = &expanded {
                let file = file.display();
                told.push_str(&format!(
                    "; the options of {file} are part of this command line"
                ));
            }
            return Err(Error::Usage(told));
        }
        let text = error.render();
        match rustix::termios::isatty(stdout()) {
            true => print(&text.ansi().to_string())?,
            false => print(&text.to_string())?,
        }
        std::process::exit(0)
    })
}

const QUIET: &str = "quiet";
const VERBOSE: &str = "verbose";

/// A command line as it is parsed.
pub(crate) fn prepared<C: CommandFactory>() -> clap::Command {
    let command = with_options::<C>();
    let name = command.get_name().to_owned();
    prepare(command, &name)
}

/// A command line with the options that are not of one command alone.
pub(crate) fn with_options<C: CommandFactory>() -> clap::Command {
    let quiet = Arg::new(QUIET).short('q').action(ArgAction::SetTrue);
    let quiet = quiet.help("Say nothing but errors and results; pp run leaves out its summary");
    let verbose = Arg::new(VERBOSE).short('v').action(ArgAction::Count);
    let verbose = verbose.conflicts_with(QUIET);
    let verbose = verbose
        .help("Log as with PP_LOG=info, and -vv as with PP_LOG=debug; a PP_LOG that is set wins");
    let both = [(QUIET, quiet), (VERBOSE, verbose)];
    let both = both.map(|(name, arg)| arg.long(name).global(true).display_order(LAST));
    let command = C::command().args(both);
    ["run", "plan", "bench"]
        .into_iter()
        .fold(command, |command, name| {
            match command.find_subcommand(name) {
                Some(_) => command.mut_subcommand(name, with_config),
                None => command,
            }
        })
}

/// Where options stand in the help that are not of one command alone.
const LAST: usize = 900;

/// Lets a command, or those below it, take `--config`.
fn with_config(command: clap::Command) -> clap::Command {
    if command.has_subcommands() {
        return command.mut_subcommands(with_config);
    }
    let arg = Arg::new(config::CONFIG)
        .long(config::CONFIG)
        .value_name("FILE.toml");
    let arg = arg.value_parser(value_parser!(PathBuf)).display_order(LAST);
    command.arg(arg.help(
        "Read options from a file: their long names are the keys, as in depth = 4; what stands on the command line wins",
    ))
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

/// What clap says in several lines: what is wrong, what there is instead, and where more stands.
fn in_one_line(text: &str) -> String {
    let (what, usage) = text.split_once("\nUsage: ").unwrap_or((text, ""));
    let mut told = String::new();
    for line in what.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if line.starts_with("For more information") {
            continue;
        }
        let line = line
            .trim_start_matches("error: ")
            .trim_start_matches("tip: ");
        let between = match told.chars().last() {
            None => "",
            Some(':') => " ",
            Some(_) if line.starts_with(['-', '<']) => ", ",
            Some(_) => "; ",
        };
        told.push_str(between);
        told.push_str(line.trim_matches(['[', ']']));
    }
    let command = usage.split_whitespace();
    let command: Vec<_> = command
        .take_while(|word| !word.starts_with(['[', '<', '-']))
        .collect();
    if !command.is_empty() {
        told.push_str(&format!(
            "; {} --help says what it takes",
            command.join(" ")
        ));
    }
    told
}

/// One line for a value that its option does not take.
fn refusal(error: &clap::Error) -> Option<String> {
    let text = |kind| match error.get(kind)? {
        ContextValue::String(text) => Some(text.as_str()),
        _ => None,
    };
    // As in the usage: `--depth <N>`.
    let flag = text(ContextKind::InvalidArg)?.split(' ').next()?;
    let args = arguments();
    let mut cut = args
        .windows(3)
        .filter(|args| args[0] == "--pipeline" && args[2] == "-");
    if (flag == "-" || flag == "--pipeline") && cut.next().is_some() {
        return Some("--pipeline: a '-' stands alone; quote the text: the shell took the >".into());
    }
    if error.kind() != ErrorKind::ValueValidation {
        return None;
    }
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
    /// Show the jobs of this user that run on this machine, once a second: who waits, what is late, what was lost.
    Top(TopArgs),
    /// Say what this machine has and lacks, and what to do about it.
    Doctor {
        /// Print one JSON object instead of text.
        #[arg(long)]
        json: bool,
    },
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
        /// Print one JSON object instead of text, also where the runs differ.
        #[arg(long)]
        json: bool,
    },
    /// Kernel plugins.
    #[command(subcommand)]
    Plugin(PluginCommand),
    /// Print the completions of pp for a shell.
    ///
    /// The shell reads them from a file of its own:
    /// bash ~/.local/share/bash-completion/completions/pp, zsh _pp in a folder of $fpath, fish ~/.config/fish/completions/pp.fish.
    Completions {
        /// The shell.
        shell: Shell,
    },
    /// Print the manual page of pp, or write a page for each command.
    Man {
        /// The folder for the pages pp.1, pp-run.1 and so on; by default pp.1 is printed.
        folder: Option<PathBuf>,
    },
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

/// What the command line calls a choice.
pub(crate) fn name_of(choice: &impl ValueEnum) -> String {
    let value = choice.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
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
    #[command(flatten)]
    pub(crate) input: Input,
    /// Where to write the result as Y4M; "-" is standard output. Without it nothing is written.
    #[arg(short, long, value_name = "FILE.y4m|-")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) going_on: GoingOnArgs,
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
    /// Standard deviation of the noise to remove, 0 to 255 (in 8-bit sample values, whatever the clip has); auto estimates it from the clip.
    #[arg(long, value_name = "auto|S", default_value = "auto")]
    pub(crate) strength: Strength,
    /// Frames that travel together, 1 to 256.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = whole(1..=256_u32))]
    pub(crate) frames_per_chunk: u32,
    /// Most chunks in flight, 1 to 256: the slots of each edge; by default 2, and 1 more for each edge between ranks
    /// and for each group.
    #[arg(long, value_name = "N", value_parser = whole(1..=MAX_DEPTH))]
    pub(crate) depth: Option<u32>,
    /// Stop after so many chunks of the input, 1 to 18446744073709551615; by default at its end. With --skip those that are
    /// skipped count, too.
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
    #[command(flatten)]
    pub(crate) live: LiveArgs,
    /// Write the run, its measures and every chunk as JSON.
    #[arg(long, value_name = "FILE.json|-")]
    #[arg(default_value_if("json", ArgPredicate::IsPresent, Some("-")))]
    pub(crate) report: Option<PathBuf>,
    /// Print one JSON object instead of text, as --report - does.
    #[arg(long, conflicts_with = "report")]
    pub json: bool,
    /// Write a Chrome/Perfetto trace with all ranks on one clock.
    #[arg(long, value_name = "FILE.json")]
    pub(crate) trace: Option<PathBuf>,
    /// Draw the last chunks as a picture.
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) timeline: Option<PathBuf>,
    /// How the job is shown while it runs.
    #[command(flatten)]
    pub serve: ServeArgs,
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
