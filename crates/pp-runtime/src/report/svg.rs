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
use lane::Lane;
use scale::{LEFT, RIGHT, Scale, WIDTH, millis};

mod lane;
mod scale;

const TOP: f64 = 110.0;
const LEGEND: f64 = 95.0;
const LANE_GAP: f64 = 14.0;

const STYLE: &str = "\
text{font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;font-size:12px;fill:#1f2328}\
.bg{fill:#ffffff}.lane{fill:#f3f4f6}.grid{stroke:#d8dce1;stroke-width:1}\
.title{font-size:17px;font-weight:600}.dim,.small{fill:#59636e}.small{font-size:11px}\
.num{fill:#ffffff;font-size:11px;font-weight:600;text-anchor:middle}.mid{text-anchor:middle}.end{text-anchor:end}\
.source{fill:#2f6fb5}.sink{fill:#2c8a5b}.dropped{fill:#8a929c}\
.stage0{fill:#c2621b}.stage1{fill:#a8327e}.stage2{fill:#7a7420}.stage3{fill:#1b8089}\
.transfer{fill:#6b4fa3}.slot{fill:#cfc5e6}.lost{fill:#c0392b;fill-opacity:.3}\
.hatch{stroke:#c0392b;stroke-width:1.4;opacity:.55}.idle{fill:url(#idle)}\
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.bg{fill:#0d1117}.lane{fill:#171c24}.grid{stroke:#2b323b}\
.dim,.small{fill:#9198a1}.num{fill:#ffffff}.slot{fill:#413566}.transfer{fill:#9a7fd6}}";

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

    writeln!(
        out,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" role=\"img\">\n\
         <title>{title}</title>\n<style>{STYLE}</style>\n\
         <defs><pattern id=\"idle\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
         <line class=\"hatch\" x1=\"0\" y1=\"0\" x2=\"0\" y2=\"6\"/></pattern></defs>\n\
         <rect class=\"bg\" width=\"{WIDTH}\" height=\"{height}\" rx=\"6\"/>\n\
         <text class=\"title\" x=\"20\" y=\"32\">{title}</text>\n\
         <text class=\"dim\" x=\"20\" y=\"53\">{}</text>\n\
         <text class=\"dim\" x=\"20\" y=\"71\">latency {}</text>",
        headline(measures),
        Latency(measures),
        title = escape(&view.title),
    )?;
    let lost: Vec<_> = view
        .restarts
        .iter()
        .filter(|r| is_shown(r, &scale))
        .collect();
    legend(out, !lost.is_empty())?;
    axis(out, &scale, TOP + lanes_height)?;
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
    restart.lost_ns < scale.to_ns && restart.served_ns.is_none_or(|at| at > scale.from_ns)
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

fn legend(out: &mut impl Write, with_lost: bool) -> io::Result<()> {
    let entries = [
        ("transfer", "transfer"),
        ("slot", "waits in its slot"),
        ("idle", "idle"),
        ("lost", "rank lost"),
    ];
    let mut x = LEFT;
    for (class, label) in &entries[..entries.len() - usize::from(!with_lost)] {
        writeln!(
            out,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{}\" width=\"16\" height=\"11\" rx=\"2\"/>\
             <text class=\"small\" x=\"{}\" y=\"{LEGEND}\">{label}</text>",
            LEGEND - 10.0,
            x + 22.0
        )?;
        x += 46.0 + 6.4 * label.len() as f64;
    }
    writeln!(
        out,
        "<text class=\"small end\" x=\"{}\" y=\"{LEGEND}\">numbers are chunks</text>",
        WIDTH - RIGHT
    )
}

fn axis(out: &mut impl Write, scale: &Scale, bottom: f64) -> io::Result<()> {
    let step_ns = tick_ns(scale.length_ns());
    for at_ns in (0..=scale.length_ns() / step_ns).map(|tick| tick * step_ns) {
        let x = scale.x(scale.from_ns + at_ns);
        writeln!(
            out,
            "<line class=\"grid\" x1=\"{x:.1}\" y1=\"{}\" x2=\"{x:.1}\" y2=\"{bottom}\"/>\
             <text class=\"small mid\" x=\"{x:.1}\" y=\"{}\">{}</text>",
            TOP - 6.0,
            bottom + 16.0,
            at_ns as f64 / 1e6
        )?;
    }
    writeln!(
        out,
        "<text class=\"small end\" x=\"{}\" y=\"{}\">ms</text>",
        LEFT - 10.0,
        bottom + 16.0
    )
}

/// Distance of the ticks: 1, 2 or 5 times a power of ten, so that there are between 5 and 13 of them.
fn tick_ns(length_ns: u64) -> u64 {
    let least = (length_ns / 12).max(1);
    let power = 10u64.pow(least.ilog10());
    [1, 2, 5]
        .map(|factor| power.saturating_mul(factor))
        .into_iter()
        .find(|&step| step >= least)
        .unwrap_or_else(|| power.saturating_mul(10))
}

fn escape(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            '<' => "&lt;".into(),
            '>' => "&gt;".into(),
            '&' => "&amp;".into(),
            '"' => "&quot;".into(),
            c if c.is_control() => " ".into(),
            c => c.to_string(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::synthetic::{self, THREE, TWO, empty};
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
            &synthetic::overlapped(40),
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
        assert!(waits(synthetic::serial(40)) >= 11);
        // The lead-in of the window and the drain at the end of the run only.
        assert!(waits(synthetic::overlapped(40)) <= 2);
    }

    #[test]
    fn an_edge_has_as_many_rows_as_chunks_lay_on_it_at_once() {
        let rows = |recorder: &Recorder, to| {
            let records: Vec<_> = recorder.records().collect();
            Lane::edge(&records, &Scale::over(&records), recorder.pipeline(), to).rows
        };
        let overlapped = rows(&synthetic::overlapped(40), 1);
        assert!(
            (2..=4).contains(&overlapped),
            "{overlapped} rows at depth 4"
        );
        assert_eq!(rows(&synthetic::serial(40), 1), 1);
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
            names(&synthetic::overlapped(20)),
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
        assert_eq!(names(&synthetic::three_ranks(20)), three);
        // The notes beside them have the ranks.
        assert_eq!(
            names(&synthetic::group(20)),
            ["encode", "decode", "0 → 1", "phase_b", "1 → 0", "phase_b"]
        );
        assert_eq!(
            names(&synthetic::one_rank(20)),
            ["encode", "phase_b", "decode"]
        );
        assert_eq!(names(&empty(THREE, 1)), three);
    }

    #[test]
    fn a_member_of_a_group_is_drawn_as_long_as_it_worked() {
        let svg = svg(&synthetic::group(20), &View::default());
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
        let recorder = synthetic::overlapped(40);
        let with = |chunks, restarts| {
            let view = View {
                chunks,
                restarts,
                ..View::default()
            };
            svg(&recorder, &view)
        };
        let bands = |svg: &str| [count(svg, "class=\"lost\""), count(svg, "rank lost</text>")];
        let all = with(40, vec![synthetic::restart()]);
        // The band, and the legend's.
        assert_eq!(bands(&all), [2, 1]);
        let title = "<title>rank 1 lost, served again after 2.00 ms: ";
        assert_eq!(count(&all, title), 1);
        assert!(all.contains(
            "efficiency, efficiency by the mean, overlap score n/a: the measured chunks span"
        ));
        assert_eq!(bands(&with(40, Vec::new())), [0, 0]);
        // It was over long before the last chunks.
        assert_eq!(bands(&with(4, vec![synthetic::restart()])), [0, 0]);
    }

    #[test]
    fn ticks_are_round_and_few() {
        assert_eq!(tick_ns(1_000_000), 100_000);
        assert_eq!(tick_ns(50_000_000), 5_000_000);
        assert_eq!(tick_ns(100_000_000), 10_000_000);
        for length in [1, 999, 123_456_789, u64::MAX] {
            let ticks = length / tick_ns(length) + 1;
            assert!((2..=13).contains(&ticks), "{ticks} ticks over {length} ns");
        }
    }
}
