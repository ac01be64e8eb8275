//! A training schedule as an SVG picture: what each rank does, over simulated time.
//!
//! A lane for each rank, with a row for each of its stages. A computation is a bar with its microbatch's number, an
//! overlapped pair is two bars, and the time in which the rank waits is hatched.

use std::io::{self, Write};

use super::frame::{LANE_GAP, TOP, write_axis, write_head, write_legend};
use super::lane::{Bar, Lane, Row};
use super::scale::{Scale, Unit};
use crate::schedule::{Op, Schedule, Timeline};

/// The classes of a picture's style, and what they mean here.
const LEGEND: [(Op, &str, &str); 4] = [
    (Op::Forward, "source", "forward (F)"),
    (Op::Backward, "stage0", "backward (B)"),
    (Op::BackwardInput, "stage3", "backward for the input (I)"),
    (Op::BackwardWeight, "sink", "backward for the weights (W)"),
];

/// Draws `timeline`, which is that of `schedule`, with times in [ticks](crate::schedule::TICKS). Sends and receives are not
/// drawn.
///
/// # Errors
/// Whatever `out` returns.
pub fn write_schedule_svg(
    out: &mut impl Write,
    schedule: &Schedule,
    timeline: &Timeline,
    title: &str,
) -> io::Result<()> {
    let scale = Scale {
        from: 0,
        to: timeline.makespan.max(1),
        unit: Unit::Tick,
    };
    let lanes: Vec<Lane> = (0..schedule.ranks().len())
        .map(|rank| lane(schedule, timeline, rank))
        .collect();
    let lanes_height: f64 = lanes.iter().map(|lane| lane.height() + LANE_GAP).sum();
    let idle = timeline.idle.iter();
    let (least, most) = (idle.clone().min(), idle.max());
    let [least, most] = [least, most].map(|idle| Unit::Tick.mark(idle.copied().unwrap_or(0)));
    let of_ranks = match least == most {
        true => format!("{least}"),
        false => format!("{least} to {most}"),
    };
    let lines = [
        format!(
            "{} ranks · {} stages · {} microbatches · slots per edge {}",
            schedule.ranks().len(),
            schedule.stages(),
            schedule.microbatches(),
            timeline.report.slots_per_edge
        ),
        format!(
            "makespan {} with {} · idle {of_ranks} on each rank",
            Unit::Tick.mark(timeline.makespan),
            timeline.limits
        ),
    ];
    write_head(out, TOP + lanes_height + 40.0, title, &lines)?;
    let actions = || {
        schedule
            .ranks()
            .iter()
            .flatten()
            .flat_map(|step| step.actions())
    };
    let mut legend: Vec<_> = LEGEND
        .iter()
        .filter(|(op, ..)| actions().any(|action| action.op == *op))
        .map(|&(_, class, label)| (class, label))
        .collect();
    legend.push(("idle", "idle"));
    write_legend(out, &legend, "numbers are microbatches")?;
    write_axis(out, &scale, TOP + lanes_height)?;
    let mut y = TOP;
    for lane in &lanes {
        lane.draw(out, &scale, y)?;
        y += lane.height() + LANE_GAP;
    }
    writeln!(out, "</svg>")
}

/// The stages of a rank, a row for each.
fn lane(schedule: &Schedule, timeline: &Timeline, rank: usize) -> Lane {
    let stages: Vec<u32> = (0..schedule.stages())
        .filter(|&stage| schedule.stage_to_rank()[stage as usize] as usize == rank)
        .collect();
    let idle = 100.0 * timeline.bubble(rank as u32);
    let mut names: Vec<Row> = stages
        .iter()
        .map(|stage| Row {
            name: format!("stage {stage}"),
            note: format!("rank {rank}, idle {idle:.0} %"),
        })
        .collect();
    if names.is_empty() {
        names.push(Row {
            name: format!("rank {rank}"),
            note: "no stage".into(),
        });
    }
    let mut bars = Vec::new();
    for (step, span) in schedule.ranks()[rank].iter().zip(&timeline.spans[rank]) {
        for action in step.actions() {
            let class = LEGEND.iter().find(|(op, ..)| *op == action.op);
            let row = stages.iter().position(|&stage| stage == action.stage);
            let (Some(&(_, class, _)), Some(row)) = (class, row) else {
                continue;
            };
            bars.push(Bar {
                class,
                row,
                from: span.start,
                to: span.end,
                number: action.microbatch.into(),
                title: step.to_string(),
            });
        }
    }
    Lane {
        names,
        bars,
        rows: 0,
    }
}
