//! The timeline as an SVG picture: what each rank did, what was under way between them, and where somebody waited.
//!
//! Lanes on one time axis: the stages of each rank, a row for each, also as a member of a group, and below them the edges that
//! leave the rank. A work is a bar with its chunk's number, and what a rank waits is hatched, so a pipeline that overlaps shows a longest
//! rank without gaps. On an edge the dark part is the transfer and the pale part the time that the payload then lay in its
//! slot. A band over all lanes is the time from the loss of a rank until the sink had a chunk again. Colours follow the
//! viewer's light or dark preference; the file has no script and refers to nothing outside itself.

use std::io::{self, Write};

use pp_contract::{Pipeline, Rank};

use super::text::{Latency, Period, Ratio};
use super::{ChunkRecord, Measures, Recorder, Restart, View};
use frame::{LANE_GAP, TOP, escape, write_axis, write_head, write_legend};
use lane::Lane;
use scale::{Scale, millis};

mod frame;
mod lane;
mod scale;
mod schedule;

pub use schedule::write_schedules_svg;
pub(super) use schedule::write_step_svg;

const LEGEND: [(&str, &str); 4] = [
    ("transfer", "transfer"),
    ("slot", "waits in its slot"),
    ("idle", "idle"),
    ("lost", "rank lost"),
];

/// Draws the last `view.chunks` chunks that `recorder` holds, with what overlaps them.
///
/// # Errors
/// Whatever `out` returns.
pub fn write_svg(
    out: &mut impl Write,
    recorder: &Recorder,
    measures: &Measures,
    view: &View,
) -> io::Result<()> {
    let records: Vec<&ChunkRecord> = recorder.records().collect();
    let shown = &records[records.len().saturating_sub(view.chunks.max(1))..];
    let scale = Scale::over(shown);
    let lanes = lanes(&records, &scale, recorder.pipeline());
    let lanes_height: f64 = lanes.iter().map(|lane| lane.height() + LANE_GAP).sum();
    let height = TOP + lanes_height + 40.0;

    let lines = [headline(measures), format!("latency {}", Latency(measures))];
    write_head(out, height, &view.title, &lines)?;
    let lost = view.restarts.iter().filter(|r| is_shown(r, &scale));
    let lost: Vec<_> = lost.collect();
    let with_lost = LEGEND.len() - usize::from(lost.is_empty());
    write_legend(out, &LEGEND[..with_lost], "numbers are chunks")?;
    write_axis(out, &scale, TOP + lanes_height)?;
    let mut y = TOP;
    for lane in &lanes {
        lane.draw(out, &scale, y)?;
        y += lane.height() + LANE_GAP;
    }
    for restart in lost {
        draw_lost(out, restart, &scale, lanes_height)?;
    }
    writeln!(
        out,
        "<text class=\"small\" x=\"20\" y=\"{}\">{}</text>",
        TOP + lanes_height + 33.0,
        measures.missing_ratios().join(" · ")
    )?;
    writeln!(out, "</svg>")
}

/// The stages of each rank, and the edges that leave it.
fn lanes(records: &[&ChunkRecord], scale: &Scale, pipeline: &Pipeline) -> Vec<Lane> {
    let stages = pipeline.stages();
    let mut lanes = Vec::new();
    for rank in (0..pipeline.world_size().get()).map(Rank::new) {
        lanes.push(Lane::rank(records, scale, pipeline, rank));
        for to in 1..stages.len() {
            if stages[to - 1].leader() == rank && stages[to].leader() != rank {
                lanes.push(Lane::edge(records, scale, pipeline, to));
            }
        }
    }
    lanes
}

fn is_shown(restart: &Restart, scale: &Scale) -> bool {
    restart.lost_ns < scale.to && restart.served_ns.is_none_or(|at| at > scale.from)
}

fn draw_lost(
    out: &mut impl Write,
    restart: &Restart,
    scale: &Scale,
    height: f64,
) -> io::Result<()> {
    let served_ns = restart.served_ns.unwrap_or(u64::MAX);
    let (x0, x1) = (scale.x(restart.lost_ns), scale.x(served_ns));
    let served = restart.served_ns.map_or_else(String::new, |served_ns| {
        let took_ns = served_ns.saturating_sub(restart.lost_ns);
        format!(", served again after {}", millis(took_ns))
    });
    writeln!(
        out,
        "<rect class=\"lost\" x=\"{x0:.1}\" y=\"{TOP}\" width=\"{:.1}\" height=\"{:.1}\"><title>rank {} lost{served}: {}</title></rect>",
        (x1 - x0).max(2.0),
        height - LANE_GAP,
        restart.fault.rank,
        escape(&restart.fault.to_string())
    )
}

fn headline(m: &Measures) -> String {
    format!(
        "period {} · efficiency {} ({} by the mean) · overlap score {} · at most {} in flight",
        Period(m),
        Ratio(m.efficiency),
        Ratio(m.efficiency_by_mean),
        Ratio(m.overlap_score),
        m.max_in_flight
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::testing::{self, THREE, TWO, empty};
    use crate::report::{StageRecord, StageTimes};

    fn svg(recorder: &Recorder, view: &View) -> String {
        let mut out = Vec::new();
        write_svg(
            &mut out,
            recorder,
            &Measures::of(recorder, 2, &view.restarts),
            view,
        )
        .unwrap();
        String::from_utf8(out).unwrap()
    }

    fn count(svg: &str, what: &str) -> usize {
        svg.matches(what).count()
    }

    #[test]
    fn the_last_chunks_are_drawn_and_no_others_numbered_to_their_right() {
        let svg = svg(
            &testing::overlapped(40),
            &View {
                chunks: 6,
                ..View::default()
            },
        );
        for chunk in 34..40 {
            assert_eq!(count(&svg, &format!("<title>encode {chunk},")), 1);
            assert_eq!(count(&svg, &format!("<title>phase_b {chunk},")), 1);
            assert_eq!(count(&svg, &format!("<title>transfer {chunk},")), 2);
        }
        assert_eq!(count(&svg, "<title>encode 33,"), 0);
    }

    #[test]
    fn a_serial_run_shows_the_longest_rank_idle_and_an_overlapped_one_does_not() {
        let waits = |recorder| {
            let all = svg(&recorder, &View::default());
            let lane = all.split(">phase_b</text>").nth(1).unwrap();
            count(lane.split("1 → 0").next().unwrap(), "<title>idle")
        };
        assert!(waits(testing::serial(40)) >= 11);
        // The lead-in of the window and the drain at the end of the run only.
        assert!(waits(testing::overlapped(40)) <= 2);
    }

    #[test]
    fn an_edge_has_as_many_rows_as_chunks_lay_on_it_at_once() {
        let rows = |recorder: &Recorder, to| {
            let records: Vec<_> = recorder.records().collect();
            Lane::edge(&records, &Scale::over(&records), recorder.pipeline(), to).rows
        };
        let overlapped = rows(&testing::overlapped(40), 1);
        assert!(
            (2..=4).contains(&overlapped),
            "{overlapped} rows at depth 4"
        );
        assert_eq!(rows(&testing::serial(40), 1), 1);
    }

    #[test]
    fn a_rank_has_a_row_for_each_stage_and_a_lane_for_each_edge_that_leaves_it() {
        let names = |recorder: &Recorder| {
            let svg = svg(recorder, &View::default());
            let lines = svg.lines().filter_map(|line| {
                let named = line.strip_prefix("<text class=\"end\"")?;
                Some(named.split(['<', '>']).nth(1)?.to_owned())
            });
            lines.collect::<Vec<_>>()
        };
        assert_eq!(
            names(&testing::overlapped(20)),
            ["encode", "decode", "0 → 1", "phase_b", "1 → 0"]
        );
        let three = [
            "encode",
            "decode",
            "0 → 1",
            "phase_b 1/2",
            "1 → 2",
            "phase_b 2/2",
            "2 → 0",
        ];
        assert_eq!(names(&testing::three_ranks(20)), three);
        // The notes beside them have the ranks.
        assert_eq!(
            names(&testing::group(20)),
            ["encode", "decode", "0 → 1", "phase_b", "1 → 0", "phase_b"]
        );
        assert_eq!(
            names(&testing::one_rank(20)),
            ["encode", "phase_b", "decode"]
        );
        assert_eq!(names(&empty(THREE, 1)), three);
    }

    #[test]
    fn a_member_of_a_group_is_drawn_as_long_as_it_worked() {
        let svg = svg(&testing::group(20), &View::default());
        let busy = ["rank 1, busy ", "rank 2, busy "].map(|row| {
            let note = svg.split(row).nth(1).unwrap();
            let percent = note.split(' ').next().unwrap();
            percent.parse::<u32>().unwrap()
        });
        assert!(
            busy[1] > 80 && busy[1].abs_diff(2 * busy[0]) <= 3,
            "{busy:?}"
        );
        assert_eq!(count(&svg, "<title>phase_b 18,"), 2);
    }

    #[test]
    fn nothing_recorded_and_nonsense_times_still_draw() {
        assert!(svg(&empty(TWO, 1), &View::default()).ends_with("</svg>\n"));
        let mut recorder = empty(TWO, 4);
        recorder.push(ChunkRecord {
            build_start_ns: u64::MAX,
            accepted_ns: 1,
            ..ChunkRecord::default()
        });
        recorder.push(ChunkRecord {
            build_end_ns: u64::MAX,
            stages: vec![StageRecord {
                times: Some(StageTimes {
                    arrived_ns: 3,
                    start_ns: 9,
                    end_ns: u64::MAX,
                }),
                ..StageRecord::default()
            }],
            ..ChunkRecord::default()
        });
        let view = View {
            title: "a<b & \"c\"\u{1}".into(),
            ..View::default()
        };
        assert!(svg(&recorder, &view).contains("a&lt;b &amp; &quot;c&quot; </title>"));
    }

    #[test]
    fn a_restart_is_a_band_with_a_legend_where_it_is_shown() {
        let recorder = testing::overlapped(40);
        let with = |chunks, restarts| {
            let view = View {
                chunks,
                restarts,
                ..View::default()
            };
            svg(&recorder, &view)
        };
        let bands = |svg: &str| [count(svg, "class=\"lost\""), count(svg, "rank lost</text>")];
        let all = with(40, vec![testing::restart()]);
        // The band, and the legend's.
        assert_eq!(bands(&all), [2, 1]);
        let title = "<title>rank 1 lost, served again after 2.00 ms: ";
        assert_eq!(count(&all, title), 1);
        assert!(all.contains(
            "efficiency, efficiency by the mean, overlap score n/a: the measured chunks span"
        ));
        assert_eq!(bands(&with(40, Vec::new())), [0, 0]);
        // It was over long before the last chunks.
        assert_eq!(bands(&with(4, vec![testing::restart()])), [0, 0]);
    }
}
