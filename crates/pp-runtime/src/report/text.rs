//! The measures as a few lines for a person.

use std::fmt;
use std::io::{self, Write};

use super::{Measures, RankMeasures, StageMeasures};

/// Writes the summary: six short lines, one more for a training and for each group, and more where a ratio is not given or the times look like
/// a scheduling fault.
///
/// # Errors
/// Whatever `out` returns.
pub fn write_text(out: &mut impl Write, m: &Measures) -> io::Result<()> {
    if let Some(training) = &m.training {
        writeln!(out, "training     {training}")?;
    }
    writeln!(
        out,
        "chunks       {} ({}), {:.1} frames/s from the first build to the last frame out in {:.2} s, \
         {} measured after {} of warm-up{}",
        m.chunks,
        Count(m.frames, "frame"),
        m.frames_per_second,
        m.wall_ms / 1e3,
        m.measured,
        m.warm_up,
        match m.dropped {
            0 => String::new(),
            dropped => format!(", {dropped} overtaken by cuts"),
        }
    )?;
    if m.measured == 0 {
        writeln!(
            out,
            "             too few chunks for periods and overlap; smaller chunks or a longer video give more"
        )?;
        write_latency(out, m)?;
        return write_late(out, m);
    }
    writeln!(
        out,
        "period       {} (p10 {}, p90 {}, max {})",
        Period(m),
        Millis(m.period_p10_ms),
        Millis(m.period_p90_ms),
        Millis(m.period_max_ms)
    )?;
    let ranks: Vec<String> = m.ranks.iter().map(|rank| works(m, rank)).collect();
    let between = match ranks.len() {
        ..=2 => ", ",
        _ => "\n             ",
    };
    writeln!(out, "stages       {}", ranks.join(between))?;
    for group in m.stages.iter().filter(|stage| !stage.members.is_empty()) {
        let works = group.members.iter();
        let works = works.map(|member| format!("rank {} {}", member.rank, Millis(member.work_ms)));
        let works: Vec<String> = works.collect();
        writeln!(out, "group        {}: {}", group.stage, works.join(", "))?;
    }
    writeln!(
        out,
        "overlap      efficiency {} ({} by the mean), score {}, hidden {} a chunk",
        Ratio(m.efficiency),
        Ratio(m.efficiency_by_mean),
        Ratio(m.overlap_score),
        Millis(m.hidden_ms)
    )?;
    for missing in m.missing_ratios() {
        writeln!(out, "             {missing}")?;
    }
    write_latency(out, m)?;
    write_late(out, m)?;
    writeln!(
        out,
        "pipeline     {}in flight at most {}, queues source {:.1} (max {}) sink {:.1} (max {})",
        Waits(m),
        m.max_in_flight,
        m.source_queue_mean.unwrap_or(0.0),
        m.source_queue_max.unwrap_or(0),
        m.sink_queue_mean.unwrap_or(0.0),
        m.sink_queue_max.unwrap_or(0)
    )?;
    if m.looks_serial() {
        writeln!(
            out,
            "warning      a stage waits as long as {sink} takes: each chunk was sent only after the {sink} of the one before",
            sink = m.stages.last().map_or("the sink", |sink| &sink.stage)
        )?;
    }
    Ok(())
}

/// The work of a rank and of its stages: `rank 0 5.00 ms (encode 1.00 ms + decode 4.00 ms)`, `rank 1 phase_b 20.00 ms`,
/// `rank 1 phase_b on ranks 1+2 10.00 ms`.
fn works(m: &Measures, rank: &RankMeasures) -> String {
    let stages = m.stages.iter().filter(|stage| stage.rank == rank.rank);
    let works = stages.map(|stage| {
        let ranks = stage.members.iter().map(|member| member.rank.to_string());
        let ranks: Vec<String> = ranks.collect();
        let on = match &*ranks {
            [] => String::new(),
            ranks => format!(" on ranks {}", ranks.join("+")),
        };
        format!("{}{on} {}", stage.stage, Millis(stage.work_ms))
    });
    let works: Vec<String> = works.collect();
    match &*works {
        [one] => format!("rank {} {one}", rank.rank),
        all => {
            let (work, all) = (Millis(rank.work_ms), all.join(" + "));
            format!("rank {} {work} ({all})", rank.rank)
        }
    }
}

/// How long each rank but 0 is idle that has one stage, each with `, ` behind it. Of more stages only the waits are known.
struct Waits<'a>(&'a Measures);

impl fmt::Display for Waits<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(m) = self;
        let stages_of = |rank| m.stages.iter().filter(move |stage| stage.rank == rank);
        let idle = |stage: &&StageMeasures| stage.rank != 0 && stages_of(stage.rank).count() == 1;
        for stage in m.stages.iter().filter(idle) {
            let share = stage
                .idle_share
                .map(|share| format!("{:.1} %", 100.0 * share));
            let share = share.unwrap_or_else(|| "n/a".into());
            let idle = Millis(stage.idle_ms);
            write!(f, "{} idle {idle} a chunk ({share}), ", stage.stage)?;
        }
        Ok(())
    }
}

fn write_latency(out: &mut impl Write, m: &Measures) -> io::Result<()> {
    match m.latency_ms {
        Some(_) => writeln!(out, "latency      {}", Latency(m)),
        None => Ok(()),
    }
}

/// How well the job kept up, if it had to do something for that or did not.
fn write_late(out: &mut impl Write, m: &Measures) -> io::Result<()> {
    let is_behind = m.behind_max_ms >= 100.0;
    if m.late + m.skipped_frames + m.steps_saved == 0 && !is_behind {
        return Ok(());
    }
    write!(
        out,
        "late         {}, {} dropped, {} saved, reader held back for {}",
        Count(m.late, "chunk"),
        Count(m.skipped_frames, "frame"),
        Count(m.steps_saved, "step"),
        Millis(Some(m.held_back_ms)),
    )?;
    if is_behind {
        let (last, most) = (Millis(Some(m.behind_ms)), Millis(Some(m.behind_max_ms)));
        write!(
            out,
            ", behind the rate of the source by {most} at most, {last} at the end"
        )?;
    }
    writeln!(out)
}

/// Median and mean of the period, and whether they are far apart.
pub(super) struct Period<'a>(pub(super) &'a Measures);

impl fmt::Display for Period<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(m) = self;
        let (median, mean) = (Millis(m.period_ms), Millis(m.period_mean_ms));
        let mark = if m.is_uneven() { ", far apart" } else { "" };
        write!(f, "{median} median, {mean} mean{mark}")
    }
}

/// Both latencies.
pub(super) struct Latency<'a>(pub(super) &'a Measures);

impl fmt::Display for Latency<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(m) = self;
        write!(
            f,
            "first frame in to chunk out {} (p99 {}, worst {}), of it after its last frame {} (p99 {}, worst {})",
            Millis(m.latency_ms),
            Millis(m.latency_p99_ms),
            Millis(m.latency_max_ms),
            Millis(m.added_latency_ms),
            Millis(m.added_latency_p99_ms),
            Millis(m.added_latency_max_ms)
        )
    }
}

/// A number of things, for a person: `1 chunk`, `2 chunks`.
#[derive(Clone, Copy, Debug)]
pub struct Count<'a>(pub u64, pub &'a str);

impl fmt::Display for Count<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(count, what) = self;
        write!(f, "{count} {what}{}", if *count == 1 { "" } else { "s" })
    }
}

/// Milliseconds, if known, with as many digits as the size of the value deserves.
struct Millis(Option<f64>);

impl fmt::Display for Millis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(ms) if ms >= 100.0 => write!(f, "{ms:.0} ms"),
            Some(ms) if ms >= 1.0 => write!(f, "{ms:.2} ms"),
            Some(ms) => write!(f, "{:.1} µs", ms * 1e3),
            None => f.write_str("n/a"),
        }
    }
}

/// A ratio, if it means something.
pub(super) struct Ratio(pub(super) Option<f64>);

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(ratio) => write!(f, "{ratio:.3}"),
            None => f.write_str("n/a"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{WhyNull, testing};
    use super::*;

    fn stage(stage: &str, rank: u32, work_ms: f64, idle: Option<[f64; 2]>) -> StageMeasures {
        StageMeasures {
            stage: stage.into(),
            rank,
            members: Vec::new(),
            work_ms: Some(work_ms),
            idle_ms: idle.map(|[ms, _]| ms),
            idle_share: idle.map(|[_, share]| share),
        }
    }

    fn rank(rank: u32, work_ms: f64) -> RankMeasures {
        RankMeasures {
            rank,
            work_ms: Some(work_ms),
            ..RankMeasures::default()
        }
    }

    fn text(m: &Measures) -> String {
        let mut out = Vec::new();
        write_text(&mut out, m).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn the_summary_reads_as_written_here() {
        let mut m = Measures {
            chunks: 100,
            dropped: 1,
            frames: 396,
            measured: 82,
            warm_up: 16,
            wall_ms: 2_010.0,
            frames_per_second: 197.01,
            period_ms: Some(20.04),
            period_mean_ms: Some(20.15),
            period_p10_ms: Some(19.99),
            period_p90_ms: Some(20.3),
            period_max_ms: Some(120.6),
            stages: vec![
                stage("encode", 0, 0.9996, None),
                stage("phase_b", 1, 20.0, Some([0.0123, 0.0006])),
                stage("decode", 0, 4.0, Some([15.0, 0.75])),
            ],
            ranks: vec![rank(0, 5.0), rank(1, 20.0)],
            hidden_ms: Some(4.96),
            overlap_score: Some(0.992),
            efficiency: Some(0.998),
            efficiency_by_mean: Some(0.993),
            latency_ms: Some(98.4),
            latency_p99_ms: Some(149.2),
            latency_max_ms: Some(160.0),
            added_latency_ms: Some(25.1),
            added_latency_p99_ms: Some(29.0),
            added_latency_max_ms: Some(125.0),
            max_in_flight: 4,
            source_queue_mean: Some(3.5),
            source_queue_max: Some(4),
            sink_queue_mean: Some(0.0),
            sink_queue_max: Some(0),
            ..Measures::default()
        };
        assert_eq!(
            text(&m),
            "chunks       100 (396 frames), 197.0 frames/s from the first build to the last frame out in 2.01 s, 82 measured after 16 of warm-up, 1 overtaken by cuts\n\
             period       20.04 ms median, 20.15 ms mean (p10 19.99 ms, p90 20.30 ms, max 121 ms)\n\
             stages       rank 0 5.00 ms (encode 999.6 µs + decode 4.00 ms), rank 1 phase_b 20.00 ms\n\
             overlap      efficiency 0.998 (0.993 by the mean), score 0.992, hidden 4.96 ms a chunk\n\
             latency      first frame in to chunk out 98.40 ms (p99 149 ms, worst 160 ms), of it after its last frame 25.10 ms (p99 29.00 ms, worst 125 ms)\n\
             pipeline     phase_b idle 12.3 µs a chunk (0.1 %), in flight at most 4, queues source 3.5 (max 4) sink 0.0 (max 0)\n"
        );

        m = Measures {
            late: 3,
            skipped_frames: 1,
            held_back_ms: 20.0,
            behind_ms: 150.0,
            behind_max_ms: 250.0,
            ..m
        };
        let late = "\nlate         3 chunks, 1 frame dropped, 0 steps saved, reader held back for 20.00 ms, behind the rate of \
                    the source by 250 ms at most, 150 ms at the end\n";
        assert!(text(&m).contains(late), "{}", text(&m));

        m.period_mean_ms = Some(25.0);
        (m.efficiency, m.efficiency_why_null) = (None, Some(WhyNull::Bursts));
        (m.overlap_score, m.overlap_score_why_null) = (None, Some(WhyNull::Bursts));
        m.efficiency_by_mean = Some(0.8);
        m.hidden_ms = None;
        let text = text(&m);
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[1].starts_with("period       20.04 ms median, 25.00 ms mean, far apart ("));
        assert_eq!(
            lines[3..5],
            [
                "overlap      efficiency n/a (0.800 by the mean), score n/a, hidden n/a a chunk",
                "             efficiency, overlap score n/a: chunks came in bursts: median and mean of the period differ by more than 5 %",
            ]
        );
    }

    #[test]
    fn the_summary_says_what_is_not_known_and_warns_of_a_serial_schedule() {
        let short = Measures {
            chunks: 1,
            frames: 1,
            latency_ms: Some(7.0),
            ..Measures::default()
        };
        let short = text(&short);
        assert!(short.starts_with("chunks       1 (1 frame), "), "{short}");
        assert!(short.contains("too few chunks") && short.contains("chunk out 7.00 ms (p99 n/a"));
        assert!(!text(&Measures::default()).contains("latency"));
        let serial = Measures {
            measured: 10,
            stages: vec![
                stage("encode", 0, 1.0, None),
                stage("phase_b", 1, 5.0, Some([4.1, 0.4])),
                stage("decode", 0, 4.0, Some([5.0, 0.5])),
            ],
            overlap_score: Some(0.01),
            source_queue_mean: Some(0.0),
            sink_queue_mean: Some(0.0),
            ..Measures::default()
        };
        let serial = text(&serial);
        assert!(
            serial.contains("phase_b idle 4.10 ms a chunk (40.0 %), "),
            "{serial}"
        );
        assert!(serial.contains("warning      a stage waits as long as decode takes"));
    }

    #[test]
    fn many_ranks_have_a_line_each_and_one_rank_no_score() {
        let text = |recorder| text(&Measures::of(&recorder, 8, &[]));
        let three = text(testing::three_ranks(60));
        let lines: Vec<_> = three.lines().collect();
        assert!(lines[2].starts_with("stages       rank 0 2."), "{three}");
        assert!(lines[3].starts_with("             rank 1 phase_b 1/2 3."));
        assert!(lines[4].starts_with("             rank 2 phase_b 2/2 4."));
        let pipeline = lines.last().unwrap();
        assert!(pipeline.starts_with("pipeline     phase_b 1/2 idle "));
        assert!(pipeline.contains(" %), phase_b 2/2 idle "), "{pipeline}");
        let group = text(testing::group(60));
        assert!(
            group.contains(", rank 1 phase_b on ranks 1+2 4."),
            "{group}"
        );
        let members = group.lines().find(|line| line.starts_with("group "));
        let members = members.unwrap();
        assert!(
            members.starts_with("group        phase_b: rank 1 2."),
            "{members}"
        );
        assert!(members.contains(" ms, rank 2 4."), "{members}");
        let twice = testing::run("a@0 -> b@1 -> c@2 -> d@1", 60, 4, &[900, 700, 800, 600]);
        let twice = text(twice);
        assert!(twice.contains("pipeline     c idle "), "{twice}");
        assert!(!twice.contains("b idle") && !twice.contains("d idle"));
        let one = text(testing::one_rank(60));
        assert!(one.contains("overlap score n/a: one rank leads all stages\n"));
        assert!(
            one.contains("\npipeline     in flight at most 1, "),
            "{one}"
        );
    }
}
