//! `pp schedule compare`: schedules side by side, with the same work for each rank.

use std::fmt;

use pp_command::print_result;
use pp_job::Error;
use pp_runtime::schedule::{Costs, Kind, Limits, PerStage, TICKS, Timeline};
use serde::Serialize;

use crate::args::{CompareArgs, SizeArgs, Subject};
use crate::plot::draw;
use crate::subject::{Decimal, Loaded};

/// Schedules side by side, as `compare` prints them.
#[derive(Serialize)]
struct Comparison {
    slots: Option<u32>,
    schedules: Vec<Compared>,
    /// Why the others are left out.
    left_out: Vec<String>,
}

/// A schedule beside others, with the most of any rank.
#[derive(Serialize)]
struct Compared {
    name: String,
    stages: u32,
    makespan: Decimal,
    idle: Decimal,
    activations: Decimal,
    undone_weights: Decimal,
    slots_per_edge: u32,
}

/// Prints schedules side by side, or draws them.
pub(super) fn compare(args: &CompareArgs) -> Result<(), Error> {
    let is_default = args.subjects.is_empty();
    let subjects = match is_default {
        true => &Kind::ALL.map(Subject::Built)[..],
        false => &args.subjects,
    };
    let (mut all, mut left_out) = (Vec::new(), Vec::new());
    for subject in subjects {
        match simulate(args, subject) {
            Ok(simulated) => all.push(simulated),
            Err(why) if is_default => left_out.push(why),
            Err(why) => return Err(why),
        }
    }
    if all.is_empty() {
        return Err(left_out.swap_remove(0));
    }
    if let Some(output) = &args.output {
        return draw(subjects, output, "the same work for each rank", &all);
    }
    let comparison = Comparison {
        slots: args.simulation.slots,
        schedules: all.iter().map(compared).collect(),
        left_out: left_out.iter().map(Error::to_string).collect(),
    };
    print_result(&comparison, args.json)
}

/// Simulates a schedule in which the stages of a rank have equal shares of its work.
fn simulate(args: &CompareArgs, subject: &Subject) -> Result<(Loaded, Timeline), Error> {
    let mut size = args.size;
    match subject {
        Subject::File(_) => size = SizeArgs::default(),
        Subject::Built(kind) => {
            let any = size.stages_per_rank.or(Some(2));
            size.stages_per_rank = kind.stages_per_rank().or(any);
        }
    }
    let loaded = size.load(subject)?;
    let ranks = loaded.schedule.ranks().len();
    let costs = args.simulation.costs(ranks, "ranks")?;
    let rank_of = loaded.schedule.stage_to_rank().iter();
    let costs = Costs {
        forward: share(&loaded, &costs.forward),
        input: share(&loaded, &costs.input),
        weight: share(&loaded, &costs.weight),
        transfer: PerStage(rank_of.map(|rank| costs.transfer.of(*rank)).collect()),
    };
    let timeline = loaded.simulate_at(&costs, args.simulation.slots)?;
    Ok((loaded, timeline))
}

/// By stage: its share of what its rank has.
fn share(loaded: &Loaded, of_rank: &PerStage) -> PerStage {
    let rank_of = loaded.schedule.stage_to_rank();
    let mut stages = vec![0; loaded.schedule.ranks().len()];
    rank_of.iter().for_each(|rank| stages[*rank as usize] += 1);
    let share = |rank: &u32| of_rank.of(*rank) / stages[*rank as usize];
    PerStage(rank_of.iter().map(share).collect())
}

fn compared((loaded, timeline): &(Loaded, Timeline)) -> Compared {
    let (schedule, part) = (&loaded.schedule, share(loaded, &TICKS.into()));
    let most = |by_rank: &[u64]| Decimal(by_rank.iter().max().copied().unwrap_or(0));
    Compared {
        name: loaded.name.clone(),
        stages: schedule.stages(),
        makespan: Decimal(timeline.makespan),
        idle: most(&timeline.idle),
        activations: most(&schedule.activations(|stage| part.of(stage))),
        undone_weights: most(&schedule.undone_weights(|stage| part.of(stage))),
        slots_per_edge: timeline.report.slots_per_edge,
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slots = self.slots;
        let with = Limits { slots };
        writeln!(
            f,
            "the same work for each rank, {with}; the most of any rank"
        )?;
        let heads = "stages    makespan        idle  activations  pending W  slots";
        writeln!(f, "{heads}  schedule")?;
        for of in &self.schedules {
            let (makespan, idle, slots) = (of.makespan, of.idle, of.slots_per_edge);
            let (kept, late) = (of.activations, of.undone_weights);
            write!(f, "{:6}  {makespan:10}  {idle:10}", of.stages)?;
            writeln!(f, "  {kept:11}  {late:9}  {slots:5}  {}", of.name)?;
        }
        let mut left_out = self.left_out.iter();
        left_out.try_for_each(|why| writeln!(f, "left out: {why}"))
    }
}
