//! `pp schedule check` and `simulate`: what a schedule needs, and how long it takes.

use std::fmt;

use pp_command::print_result;
use pp_job::Error;
use pp_runtime::schedule::{Crossing, Limits, Timeline};
use serde::Serialize;

use crate::args::{CheckArgs, SimulateArgs};
use crate::subject::{Decimal, Loaded, PeakMemory};

/// Most notes of `check`.
const NOTES: usize = 8;

/// What a schedule needs, as `check` prints it. Lists are by rank.
#[derive(Serialize)]
struct Needs {
    ranks: usize,
    stages: u32,
    microbatches: u32,
    lowered: bool,
    slots_per_edge: u32,
    activation_slots: Vec<u32>,
    undone_weights: Vec<u32>,
    outstanding_sends: Vec<u32>,
    #[serde(flatten)]
    memory: PeakMemory,
    edges: Vec<Edge>,
    crossings: Vec<Crossed>,
    #[serde(skip)]
    name: String,
    #[serde(skip)]
    actions: usize,
}

/// The most messages at once between two stages, one way.
#[derive(Serialize)]
struct Edge {
    from_stage: u32,
    to_stage: u32,
    peak: u32,
}

/// Messages from one rank to another that are received in another order than they are sent.
#[derive(Serialize)]
struct Crossed {
    from_rank: u32,
    to_rank: u32,
    sends: [String; 2],
    receives: [String; 2],
    #[serde(skip)]
    note: String,
}

impl From<&Crossing> for Crossed {
    fn from(crossing: &Crossing) -> Self {
        let Crossing { sends, receives } = crossing;
        Self {
            from_rank: sends[0].rank,
            to_rank: receives[0].rank,
            sends: sends.map(|place| place.step.to_string()),
            receives: receives.map(|place| place.step.to_string()),
            note: crossing.to_string(),
        }
    }
}

/// How long a schedule takes, as `simulate` prints it. Lists are by rank.
#[derive(Serialize)]
struct Times {
    makespan: Decimal,
    idle: Vec<Decimal>,
    slots: Option<u32>,
    activation_slots: Vec<u32>,
    slots_per_edge: u32,
    undone_weights: Vec<u32>,
    #[serde(flatten)]
    memory: PeakMemory,
    #[serde(skip)]
    size: String,
}

/// Checks a schedule, and prints what it needs.
pub(super) fn check(args: &CheckArgs) -> Result<(), Error> {
    let loaded = args.subject.load()?;
    let report = loaded.check(args.slots)?;
    let schedule = &loaded.schedule;
    let edges = report.edges.iter().map(|edge| Edge {
        from_stage: edge.from,
        to_stage: edge.to,
        peak: edge.peak,
    });
    let needs = Needs {
        ranks: schedule.ranks().len(),
        stages: schedule.stages(),
        microbatches: schedule.microbatches(),
        lowered: schedule.is_lowered(),
        slots_per_edge: report.slots_per_edge,
        activation_slots: report.activation_slots,
        undone_weights: report.undone_weights,
        memory: loaded.memory(&args.memory)?,
        edges: edges.collect(),
        crossings: report.crossings.iter().map(Crossed::from).collect(),
        outstanding_sends: report.outstanding_sends,
        name: size(&loaded),
        actions: schedule.ranks().iter().map(Vec::len).sum(),
    };
    print_result(&needs, args.json)
}

/// Simulates a schedule, and prints how long it takes.
pub(super) fn simulate(args: &SimulateArgs) -> Result<(), Error> {
    let loaded = args.subject.load()?;
    let Timeline {
        makespan,
        idle,
        limits,
        report,
        ..
    } = loaded.simulate(&args.simulation)?;
    let times = Times {
        makespan: Decimal(makespan),
        idle: idle.into_iter().map(Decimal).collect(),
        slots: limits.slots,
        activation_slots: report.activation_slots,
        slots_per_edge: report.slots_per_edge,
        undone_weights: report.undone_weights,
        memory: loaded.memory(&args.memory)?,
        size: size(&loaded),
    };
    print_result(&times, args.json)
}

/// The name of a schedule and its size.
pub(super) fn size(loaded: &Loaded) -> String {
    let Loaded { name, schedule } = loaded;
    let (ranks, stages) = (schedule.ranks().len(), schedule.stages());
    let microbatches = schedule.microbatches();
    format!("{name}: ranks {ranks}, stages {stages}, microbatches {microbatches}")
}

impl fmt::Display for Needs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = if self.lowered {
            "with sends"
        } else {
            "computations alone"
        };
        writeln!(f, "{}, steps {} ({level})", self.name, self.actions)?;
        writeln!(f, "accepted; slots per edge {}", self.slots_per_edge)?;
        writeln!(
            f,
            "rank  activations  pending W  sends   (the most at once)"
        )?;
        for rank in 0..self.ranks {
            let (activations, weights) = (self.activation_slots[rank], self.undone_weights[rank]);
            let sends = self.outstanding_sends[rank];
            writeln!(f, "{rank:4}  {activations:11}  {weights:9}  {sends:5}")?;
        }
        write!(f, "{}", self.memory)?;
        let (shown, more) = self.crossings.split_at(NOTES.min(self.crossings.len()));
        for crossed in shown {
            writeln!(f, "note: {}", crossed.note)?;
        }
        match more.len() {
            0 => Ok(()),
            more => writeln!(f, "note: and {more} more pairs of ranks; --json has all"),
        }
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (slots, needed) = (self.slots, Limits::slots(self.slots_per_edge));
        let (makespan, with) = (self.makespan, Limits { slots });
        let idlest = self.idle.iter().map(|idle| idle.0).min().unwrap_or(0);
        let busiest = makespan.0 - idlest;
        write!(f, "{}\nmakespan {makespan} with {with}", self.size)?;
        if busiest > 0 {
            let over = makespan.0 as f64 / busiest as f64;
            write!(f, ", {over:.3} times the work of the busiest rank")?;
        }
        writeln!(f, "; it needs {needed}")?;
        writeln!(f, "rank        idle   bubble  activations  pending W")?;
        for (rank, idle) in self.idle.iter().enumerate() {
            let bubble = 100.0 * idle.0 as f64 / makespan.0.max(1) as f64;
            let (activations, weights) = (self.activation_slots[rank], self.undone_weights[rank]);
            writeln!(
                f,
                "{rank:4}  {idle:10}  {bubble:5.1} %  {activations:11}  {weights:9}"
            )?;
        }
        write!(f, "{}", self.memory)
    }
}
