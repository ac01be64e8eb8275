//! The command line of `pp schedule`.

use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::{PathBufValueParser, TypedValueParser};
use clap::{Args, Subcommand};
use pp_command::whole;
use pp_job::output::is_stdout;
use pp_runtime::schedule::{Kind, PerStage};

/// The largest cost, and the most bytes.
const MOST: u64 = 1_000_000_000_000;

/// Parses the name of a picture.
fn picture() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| {
        let is_picture = is_stdout(&path) || path.extension().is_some_and(|end| end == "svg");
        let refusal = "it takes a name that ends in .svg, or -";
        is_picture.then_some(path).ok_or(refusal)
    })
}

/// The commands of `pp schedule`.
///
/// Schedules stand in PyTorch's notation: a row for each rank, a cell for each action, such as 1F0 or 0SEND_F3.
#[derive(Debug, Subcommand)]
pub enum ScheduleCommand {
    /// Name the schedules, and say which sizes each takes.
    List {
        /// Print one JSON object instead of text.
        #[arg(long)]
        json: bool,
    },
    /// Print a schedule: who does what, over time.
    Show(ShowArgs),
    /// Prove that a schedule runs to its end and does every computation once; print the slots, activations and sends that it
    /// needs.
    ///
    /// The exit code is 0 if the schedule is accepted. It is 3 if the schedule is refused, or the file holds none: one line
    /// names the actions as the file writes them, and where they stand. It is 4 if the file cannot be read.
    Check(CheckArgs),
    /// Say how long a schedule takes and what it needs, for given costs. It is checked first, as check does.
    Simulate(SimulateArgs),
    /// Draw a schedule as an SVG picture, for given costs.
    Plot(PlotArgs),
    /// Compare schedules of one size that have the same work for each rank.
    ///
    /// Costs are those of a whole rank, and a list has one for each rank; the stages of a rank have equal shares. Activations
    /// and pending W are counted in microbatches of a whole rank.
    Compare(CompareArgs),
}

/// What is looked at.
#[derive(Clone, Debug)]
pub(crate) enum Subject {
    /// A schedule that is built.
    Built(Kind),
    /// A file, or standard input.
    File(PathBuf),
}

impl FromStr for Subject {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text.parse() {
            Ok(kind) => Self::Built(kind),
            Err(_) => Self::File(text.into()),
        })
    }
}

/// Which schedule.
#[derive(Args, Clone, Debug)]
pub(crate) struct SubjectArgs {
    /// A schedule's name, as list has them, PyTorch's name of it, or a file in PyTorch's notation; "-" is standard input. A
    /// file of a name's spelling is ./NAME.
    #[arg(value_name = "NAME|FILE.csv|-")]
    pub(crate) subject: Subject,
    #[command(flatten)]
    pub(crate) size: SizeArgs,
}

/// How large a schedule is.
#[derive(Args, Clone, Copy, Debug, Default)]
pub(crate) struct SizeArgs {
    /// Ranks, 1 to 65536; by default what the file has. A NAME needs it.
    #[arg(long, value_name = "P", value_parser = whole(1..=65_536_u32))]
    pub(crate) ranks: Option<u32>,
    /// Stages on each rank, 1 to 65536; by default what the file has, and for a NAME 1, or 2 where the stages stand in a V.
    /// By default compare takes 2 where any number goes.
    #[arg(long, value_name = "V", value_parser = whole(1..=65_536_u32))]
    pub(crate) stages_per_rank: Option<u32>,
    /// Microbatches of a step, 1 to 1048576; by default what the file has. A NAME needs it.
    #[arg(long, value_name = "M", value_parser = whole(1..=1_048_576_u32))]
    pub(crate) microbatches: Option<u32>,
}

/// What is simulated: how long things take, in one unit of the caller's choice, and with how many slots.
#[derive(Args, Clone, Debug)]
pub(crate) struct SimulationArgs {
    /// A forward of a stage (F), 0 to 1000000000000 with up to 6 decimals, in any unit of time; for all stages, or a list with
    /// one for each: 5,5,7.5,6. In place of a number, one for each microbatch: 5:6:5:8.
    #[arg(long, value_name = "N[:N...][,N...]", default_value = "1", value_parser = times)]
    pub(crate) forward: PerStage,
    /// A backward for the input (I), 0 to 1000000000000 like --forward; B takes as long as I and W.
    #[arg(long, value_name = "N[:N...][,N...]", default_value = "1", value_parser = times)]
    pub(crate) input: PerStage,
    /// A backward for the weights (W), 0 to 1000000000000 like --forward.
    #[arg(long, value_name = "N[:N...][,N...]", default_value = "1", value_parser = times)]
    pub(crate) weight: PerStage,
    /// From one rank to another, 0 to 1000000000000 like --forward, by the stage that sends, in compare by its rank; it delays
    /// the receiver alone.
    #[arg(long, value_name = "N[:N...][,N...]", default_value = "0", value_parser = times)]
    pub(crate) transfer: PerStage,
    /// Slots of each edge, 0 to 1048576. With 0 a send ends only when its receive begins; by default no action waits for a
    /// slot.
    #[arg(long, value_name = "D", value_parser = whole(0..=1_048_576_u32))]
    pub(crate) slots: Option<u32>,
}

/// Parses times, as ticks.
fn times(list: &str) -> Result<PerStage, String> {
    let of_stage = |list: &str| list.split(':').map(|text| number(text, 6)).collect();
    let all = list.split(',').map(of_stage).collect::<Option<_>>();
    all.map(PerStage).ok_or_else(|| {
        let examples =
            "5, or 5,5,7,6 for four stages, or 5:6,7:7 for two stages of two microbatches each";
        format!("it takes numbers with up to 6 decimals from 0 to {MOST}, such as {examples}")
    })
}

/// Parses a number, as millionths.
fn one_number(text: &str) -> Result<u64, String> {
    let refusal = || format!("it takes a number with up to 6 decimals from 0 to {MOST}, such as 5");
    number(text, 6).ok_or_else(refusal)
}

/// Parses whole numbers.
fn bytes(list: &str) -> Result<PerStage, String> {
    let of_stage = |text| Some(vec![number(text, 0)?]);
    let all = list.split(',').map(of_stage).collect::<Option<_>>();
    let refusal = || format!("it takes whole numbers from 0 to {MOST}, such as 5 or 5,5,7,6");
    all.map(PerStage).ok_or_else(refusal)
}

/// Parses a number, in units of the last of so many decimals.
fn number(text: &str, decimals: usize) -> Option<u64> {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let number: u64 = format!("{whole}{part:0<decimals$}").parse().ok()?;
    let fits = number <= MOST * 10_u64.pow(decimals as u32);
    (fits && !whole.is_empty() && part.len() <= decimals).then_some(number)
}

/// What activations take.
#[derive(Args, Clone, Debug)]
pub(crate) struct MemoryArgs {
    /// Bytes that a stage keeps of a microbatch from its F to its B or W, 0 to 1000000000000; for all stages, or a list with
    /// one for each. The most that each rank keeps at a time is printed; by default it is not counted.
    #[arg(long, value_name = "N[,N...]", value_parser = bytes)]
    pub(crate) activation_bytes: Option<PerStage>,
}

/// The arguments of `pp schedule show`.
#[derive(Args, Clone, Debug)]
pub struct ShowArgs {
    #[command(flatten)]
    pub(crate) subject: SubjectArgs,
    /// Add the sends, the receives, and one wait for each send.
    #[arg(long)]
    pub(crate) lowered: bool,
    /// With --lowered: no waits.
    #[arg(long, requires = "lowered")]
    pub(crate) no_waits: bool,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    /// Print PyTorch's notation instead of a table.
    #[arg(long, conflicts_with_all = ["json", "activation_bytes"])]
    pub(crate) csv: bool,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The arguments of `pp schedule check`.
#[derive(Args, Clone, Debug)]
pub struct CheckArgs {
    #[command(flatten)]
    pub(crate) subject: SubjectArgs,
    /// Slots of each edge, 0 to 1048576: a schedule that is a deadlock with so many is refused. With 0 a send ends only when
    /// its receive begins; by default the least number is found.
    #[arg(long, value_name = "D", value_parser = whole(0..=1_048_576_u32))]
    pub(crate) slots: Option<u32>,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The arguments of `pp schedule simulate`.
#[derive(Args, Clone, Debug)]
pub struct SimulateArgs {
    #[command(flatten)]
    pub(crate) subject: SubjectArgs,
    #[command(flatten)]
    pub(crate) simulation: SimulationArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    /// Print one JSON object instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The arguments of `pp schedule plot`.
#[derive(Args, Clone, Debug)]
pub struct PlotArgs {
    #[command(flatten)]
    pub(crate) subject: SubjectArgs,
    #[command(flatten)]
    pub(crate) simulation: SimulationArgs,
    /// Where to write the picture; "-" is standard output.
    #[arg(short, long, value_name = "FILE.svg|-", default_value = "-", value_parser = picture())]
    pub(crate) output: PathBuf,
}

/// The arguments of `pp schedule compare`.
#[derive(Args, Clone, Debug)]
pub struct CompareArgs {
    /// Names of schedules, as list has them, or files; by default all that list has and that can have the size.
    #[arg(value_name = "NAME|FILE.csv")]
    pub(crate) subjects: Vec<Subject>,
    #[command(flatten)]
    pub(crate) size: SizeArgs,
    #[command(flatten)]
    pub(crate) simulation: SimulationArgs,
    /// The report of a training whose actions were measured: Trainer(..., report="r.json", timing=True). Its stages are cut for
    /// each schedule, times are in milliseconds, and its ranks and microbatches are taken where others are not given.
    #[arg(long, value_name = "REPORT.json", conflicts_with_all = ["forward", "input", "weight"])]
    pub(crate) from: Option<PathBuf>,
    /// Leave out schedules that keep more activations on a rank, in microbatches of a whole rank, 0 to 1000000000000 with up to
    /// 6 decimals; by default none is left out.
    #[arg(long, value_name = "N", value_parser = one_number)]
    pub(crate) memory: Option<u64>,
    /// Draw all in one picture instead of a table.
    #[arg(short, long, value_name = "FILE.svg|-", value_parser = picture())]
    pub(crate) output: Option<PathBuf>,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}
