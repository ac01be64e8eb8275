//! Training schedules as an SVG picture: what each rank does, over simulated time or as a run measured it.
//!
//! A lane for each rank, with a row for each of its stages. A computation is a bar with its microbatch's number, an
//! overlapped pair is two bars. The time in which the rank waits is hatched, or empty beside a run.

use std::io::{self, Write};

use super::frame::{LANE_GAP, TOP, escape, write_axis, write_head, write_legend};
use super::lane::{Bar, Lane, Row};
use super::scale::{Scale, Unit};
use crate::schedule::{Limits, Op, Schedule, Step, Timeline};

/// The classes of a picture's style, and what they mean here.
const LEGEND: [(Op, &str, &str); 4] = [
    (Op::Forward, "source", "forward (F)"),
    (Op::Backward, "stage0", "backward (B)"),
    (Op::BackwardInput, "stage3", "backward for the input (I)"),
    (Op::BackwardWeight, "sink", "backward for the weights (W)"),
];

/// Height of the line above the lanes of a schedule.
const CAPTION: f64 = 26.0;

/// Draws simulated schedules one below the other, each with its name and its timeline, with times in
/// [ticks](crate::schedule::TICKS). Sends and receives are not drawn.
///
/// # Errors
/// Whatever `out` returns.
pub fn write_schedules_svg(
    out: &mut impl Write,
    title: &str,
    all: &[(&str, &Schedule, &Timeline)],
) -> io::Result<()> {
    let time = "time in the unit of the costs";
    write(out, title, time, Unit::Tick, all)
}

/// Draws a step as it was run, and its simulation below it, with times in nanoseconds. What is idle stays empty.
pub(in crate::report) fn write_step_svg(
    out: &mut impl Write,
    (title, line): (&str, &str),
    schedule: &Schedule,
    [run, simulated]: &[Timeline; 2],
) -> io::Result<()> {
    let all = [
        ("measured", schedule, run),
        ("simulated", schedule, simulated),
    ];
    write(out, title, line, Unit::Nanosecond, &all)
}

fn write(
    out: &mut impl Write,
    title: &str,
    line: &str,
    unit: Unit,
    all: &[(&str, &Schedule, &Timeline)],
) -> io::Result<()> {
    let is_simulated = matches!(unit, Unit::Tick);
    let longest = all.iter().map(|(_, _, timeline)| timeline.makespan).max();
    let scale = Scale {
        from: 0,
        to: longest.unwrap_or(0).max(1),
        unit,
    };
    let lanes = |(_, schedule, timeline): &(&str, &Schedule, &Timeline)| -> Vec<Lane> {
        let ranks = 0..schedule.ranks().len();
        let until = is_simulated.then_some(timeline.makespan);
        let lane = |rank| lane(schedule, timeline, rank, until);
        ranks.map(lane).collect()
    };
    let pictures: Vec<Vec<Lane>> = all.iter().map(lanes).collect();
    let lanes = pictures.iter().flatten();
    let height =
        lanes.map(|lane| lane.height() + LANE_GAP).sum::<f64>() + CAPTION * all.len() as f64;
    let lines = [
        "a lane for each rank, a row for each stage".into(),
        escape(line),
    ];
    write_head(out, TOP + height + 40.0, title, &lines)?;
    let mut legend: Vec<_> = LEGEND
        .iter()
        .filter(|(op, ..)| {
            let steps = all
                .iter()
                .flat_map(|(_, schedule, _)| schedule.ranks().iter().flatten());
            let mut actions = steps.flat_map(Step::actions);
            actions.any(|action| action.op == *op)
        })
        .map(|&(_, class, label)| (class, label))
        .collect();
    legend.extend(is_simulated.then_some(("idle", "idle")));
    write_legend(out, &legend, "numbers are microbatches")?;
    write_axis(out, &scale, TOP + height)?;
    let mut y = TOP;
    for (drawn, lanes) in all.iter().zip(&pictures) {
        let (text, at) = (escape(&caption(drawn, unit)), y + CAPTION - 10.0);
        writeln!(out, "<text x=\"20\" y=\"{at}\">{text}</text>")?;
        y += CAPTION;
        for lane in lanes {
            lane.draw(out, &scale, y)?;
            y += lane.height() + LANE_GAP;
        }
    }
    writeln!(out, "</svg>")
}

/// The figures of a schedule.
fn caption((name, schedule, timeline): &(&str, &Schedule, &Timeline), unit: Unit) -> String {
    let idle = timeline.idle.iter();
    let [least, most] = [idle.clone().min(), idle.max()];
    let [least, most] = [least, most].map(|idle| unit.length(idle.copied().unwrap_or(0)));
    let idle = match least == most {
        true => least,
        false => format!("{least} to {most}"),
    };
    let [with, needs] = match unit {
        Unit::Tick => [
            format!(" with {}", timeline.limits),
            format!(" · needs {}", Limits::slots(timeline.report.slots_per_edge)),
        ],
        Unit::Nanosecond => Default::default(),
    };
    format!(
        "{name} · {} ranks · {} stages · {} microbatches · makespan {}{with} · idle {idle} on each rank{needs}",
        schedule.ranks().len(),
        schedule.stages(),
        schedule.microbatches(),
        unit.length(timeline.makespan)
    )
}

/// The stages of a rank, a row for each.
fn lane(schedule: &Schedule, timeline: &Timeline, rank: usize, until: Option<u64>) -> Lane {
    let stages: Vec<u32> = (0..schedule.stages())
        .filter(|&stage| schedule.stage_to_rank()[stage as usize] as usize == rank)
        .collect();
    let idle = 100.0 * timeline.bubble(rank as u32);
    let row = |stage: &u32| Row {
        name: format!("stage {stage}"),
        note: format!("rank {rank}, idle {idle:.0} %"),
    };
    let mut names: Vec<Row> = stages.iter().map(row).collect();
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
        until,
    }
}
