//! `pp schedule show`: who does what, over time.

use std::fmt;

use pp_command::{print, print_result};
use pp_job::Error;
use pp_runtime::schedule::{Costs, Limits, Schedule, Step};
use serde::Serialize;

use crate::args::ShowArgs;
use crate::need::size;
use crate::subject::{Loaded, PeakMemory};

/// A schedule as `show` prints it.
#[derive(Serialize)]
struct Shown {
    ranks: usize,
    stages: u32,
    microbatches: u32,
    stage_to_rank: Vec<u32>,
    /// By rank.
    actions: Vec<Vec<String>>,
    #[serde(flatten)]
    memory: PeakMemory,
    #[serde(skip)]
    size: String,
    #[serde(skip)]
    table: String,
}

/// Prints a schedule, lowered on request.
pub(super) fn show(args: &ShowArgs) -> Result<(), Error> {
    let mut loaded = args.subject.load()?;
    if args.lowered {
        let lowered = loaded.schedule.lower(!args.no_waits);
        loaded.schedule = lowered.map_err(|error| loaded.refused("lower schedule", error))?;
    }
    let Loaded { schedule, .. } = &loaded;
    if args.csv {
        return print(&schedule.to_csv());
    }
    let ranks = schedule.ranks();
    let cells = |steps: &Vec<Step>| steps.iter().map(Step::to_string).collect();
    let shown = Shown {
        ranks: ranks.len(),
        stages: schedule.stages(),
        microbatches: schedule.microbatches(),
        stage_to_rank: schedule.stage_to_rank().to_vec(),
        actions: ranks.iter().map(cells).collect(),
        memory: loaded.memory(&args.memory)?,
        size: size(&loaded),
        table: if args.json {
            String::new()
        } else {
            table(schedule)
        },
    };
    print_result(&shown, args.json)
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n{}", self.size, self.table)?;
        write!(f, "{}", self.memory)
    }
}

/// The table of a schedule: one column is one unit of time, in which a forward or a half of a backward fits. A schedule
/// with steps that take no time, and one that cannot be simulated, is a list for each rank.
fn table(schedule: &Schedule) -> String {
    let mut actions = schedule.ranks().iter().flatten().flat_map(Step::actions);
    let timeline = match actions.all(|action| action.op.is_compute()) {
        true => schedule.simulate(&Costs::default(), Limits::default()).ok(),
        false => None,
    };
    let label = |step: &Step| match step {
        Step::One(action) => action.to_string(),
        Step::Overlapped { forward, backward } => format!("{forward};{backward}"),
    };
    let ranks = schedule.ranks().iter().enumerate();
    let Some(timeline) = timeline else {
        let lines = ranks.map(|(rank, steps)| {
            let labels: Vec<_> = steps.iter().map(label).collect();
            format!("rank {rank:<3} {}", labels.join(" "))
        });
        return lines.collect::<Vec<_>>().join("\n");
    };
    let singles = schedule.ranks().iter().flatten().flat_map(Step::actions);
    let width = 1 + singles
        .map(|action| action.to_string().len())
        .max()
        .unwrap_or(1);
    let lines = ranks.map(|(rank, steps)| {
        let mut line = format!("rank {rank:<3}");
        let mut free_from = 0;
        for (step, span) in steps.iter().zip(&timeline.spans[rank]) {
            for _ in free_from..span.start {
                line.push_str(&format!(" {:^1$}", "·", width - 1));
            }
            // What takes longer than a column is drawn out.
            let columns = (span.end - span.start) as usize;
            line.push_str(&format!(" {:─<1$}", label(step), columns * width - 1));
            free_from = span.end;
        }
        line
    });
    lines.collect::<Vec<_>>().join("\n")
}
