//! `pp schedule compare`: schedules side by side, with the same work for each rank.

use std::fmt;

use pp_command::print_result;
use pp_job::Error;
use pp_runtime::schedule::{Costs, Kind, Limits, PerStage, TICKS, Timeline};
use serde::Serialize;

use crate::args::{CompareArgs, SizeArgs, Subject};
use crate::model::Model;
use crate::plot::draw;
use crate::subject::{Decimal, Loaded};

/// Schedules side by side, as `compare` prints them.
#[derive(Serialize)]
struct Comparison {
    slots: Option<u32>,
    schedules: Vec<Compared>,
    /// The name of the one that takes least, for a model that was trained.
    #[serde(skip_serializing_if = "Option::is_none")]
    fastest: Option<String>,
    /// What is compared.
    #[serde(skip)]
    about: String,
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
    /// What was not measured of its costs, for a model that was trained.
    #[serde(skip_serializing_if = "Option::is_none")]
    estimated: Option<Vec<&'static str>>,
}

/// A schedule, its run, and what was not measured of its costs.
struct Simulated {
    loaded: Loaded,
    timeline: Timeline,
    estimated: Option<Vec<&'static str>>,
}

/// Prints schedules side by side, or draws them.
pub(super) fn compare(args: &CompareArgs) -> Result<(), Error> {
    let is_default = args.subjects.is_empty();
    let subjects = match is_default {
        true => &Kind::ALL.map(Subject::Built)[..],
        false => &args.subjects,
    };
    let model = args.from.as_deref().map(Model::read).transpose()?;
    let (mut all, mut left_out) = (Vec::new(), Vec::new());
    for subject in subjects {
        let simulated = simulate(args, model.as_ref(), subject);
        match simulated.and_then(|simulated| fits(args, simulated)) {
            Ok(simulated) => all.push(simulated),
            Err(why) if is_default => left_out.push(why),
            Err(why) => return Err(why),
        }
    }
    if all.is_empty() {
        return Err(left_out.swap_remove(0));
    }
    let about = model.as_ref().map_or_else(
        || "the same work for each rank".into(),
        |model| format!("{}, times in ms", model.about()),
    );
    if let Some(output) = &args.output {
        let all = all.into_iter().map(|of| (of.loaded, of.timeline));
        return draw(subjects, output, &about, &all.collect::<Vec<_>>());
    }
    let fastest = all.iter().min_by_key(|of| of.timeline.makespan);
    let fastest = fastest.filter(|_| model.is_some());
    let comparison = Comparison {
        slots: args.simulation.slots,
        fastest: fastest.map(|of| of.loaded.name.clone()),
        about,
        schedules: all.iter().map(compared).collect(),
        left_out: left_out.iter().map(Error::to_string).collect(),
    };
    print_result(&comparison, args.json)
}

/// Simulates a schedule in which the stages of a rank have equal shares of its work, or those of the model.
fn simulate(
    args: &CompareArgs,
    model: Option<&Model>,
    subject: &Subject,
) -> Result<Simulated, Error> {
    let mut size = args.size;
    match subject {
        Subject::File(_) => size = SizeArgs::default(),
        Subject::Built(kind) => {
            let trained = model.map(|model| &model.trained);
            size.ranks = size.ranks.or(trained.map(|of| of.ranks));
            size.microbatches = size.microbatches.or(trained.map(|of| of.microbatches));
            let measured = model.and_then(Model::stages_per_rank);
            let any = size
                .stages_per_rank
                .or(measured.filter(|stages| *stages > 1));
            size.stages_per_rank = kind.stages_per_rank().or(any).or(Some(2));
        }
    }
    let loaded = size.load(subject)?;
    let ranks = loaded.schedule.ranks().len();
    let microbatches = loaded.schedule.microbatches();
    let costs = args.simulation.costs(ranks, "ranks", microbatches)?;
    let rank_of = loaded.schedule.stage_to_rank().iter();
    let of_rank = |rank: &u32| costs.transfer.of_stage(*rank).to_vec();
    let transfer = PerStage(rank_of.map(of_rank).collect());
    let slots = args.simulation.slots;
    let (timeline, estimated) = match model {
        Some(model) => {
            let costs = model.share(&loaded.schedule, transfer);
            (loaded.simulate_at(&costs, slots)?, Some(costs.estimated))
        }
        None => {
            let costs = Costs {
                forward: share(&loaded, &costs.forward),
                input: share(&loaded, &costs.input),
                weight: share(&loaded, &costs.weight),
                transfer,
            };
            (loaded.simulate_at(&costs, slots)?, None)
        }
    };
    Ok(Simulated {
        loaded,
        timeline,
        estimated,
    })
}

/// The schedule, unless it keeps more than may be kept.
fn fits(args: &CompareArgs, simulated: Simulated) -> Result<Simulated, Error> {
    let kept = compared(&simulated).activations;
    match args.memory.map(Decimal).filter(|most| kept > *most) {
        None => Ok(simulated),
        Some(most) => Err(Error::Usage(format!(
            "{} keeps {kept} activations on a rank, and --memory allows {most}; allow more, or take another schedule",
            simulated.loaded.name
        ))),
    }
}

/// By stage: its share of what its rank has.
fn share(loaded: &Loaded, of_rank: &PerStage) -> PerStage {
    let rank_of = loaded.schedule.stage_to_rank();
    let mut stages = vec![0; loaded.schedule.ranks().len()];
    rank_of.iter().for_each(|rank| stages[*rank as usize] += 1);
    let share = |rank: &u32| {
        let numbers = of_rank.of_stage(*rank).iter();
        numbers.map(|n| n / stages[*rank as usize]).collect()
    };
    PerStage(rank_of.iter().map(share).collect())
}

fn compared(simulated: &Simulated) -> Compared {
    let (loaded, timeline) = (&simulated.loaded, &simulated.timeline);
    let (schedule, part) = (&loaded.schedule, share(loaded, &TICKS.into()));
    let most = |by_rank: &[u64]| Decimal(by_rank.iter().max().copied().unwrap_or(0));
    Compared {
        name: loaded.name.clone(),
        stages: schedule.stages(),
        makespan: Decimal(timeline.makespan),
        idle: most(&timeline.idle),
        activations: most(&schedule.activations(|stage| part.of(stage, 0))),
        undone_weights: most(&schedule.undone_weights(|stage| part.of(stage, 0))),
        slots_per_edge: timeline.report.slots_per_edge,
        estimated: simulated.estimated.clone(),
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let slots = self.slots;
        let with = Limits { slots };
        writeln!(f, "{}, {with}; the most of any rank", self.about)?;
        let heads = "stages    makespan        idle  activations  pending W  slots";
        writeln!(f, "{heads}  schedule")?;
        for of in &self.schedules {
            let (makespan, idle, slots) = (of.makespan, of.idle, of.slots_per_edge);
            let (kept, late) = (of.activations, of.undone_weights);
            write!(f, "{:6}  {makespan:10}  {idle:10}", of.stages)?;
            write!(f, "  {kept:11}  {late:9}  {slots:5}  {}", of.name)?;
            match of.estimated.as_deref() {
                None | Some([]) => writeln!(f)?,
                Some(what) => writeln!(f, " (estimated: {})", what.join(", "))?,
            }
        }
        let mut left_out = self.left_out.iter();
        left_out.try_for_each(|why| writeln!(f, "left out: {why}"))?;
        let Some(fastest) = &self.fastest else {
            return Ok(());
        };
        writeln!(f, "fastest: {fastest}")
    }
}
