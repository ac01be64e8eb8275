//! The measures as a few lines for a person.

use std::io::{self, Write};

use super::Measures;

/// Writes the summary, five short lines, and a sixth when the times look like a scheduling fault.
///
/// # Errors
/// Whatever `out` returns.
pub fn write_text(out: &mut impl Write, m: &Measures) -> io::Result<()> {
    writeln!(
        out,
        "chunks       {} in {:.2} s ({} frames, {:.1} frames/s), {} measured after {} of warm-up, {} dropped",
        m.chunks,
        m.wall_ms / 1e3,
        m.frames,
        m.frames_per_second,
        m.measured,
        m.warm_up,
        m.dropped
    )?;
    if m.measured == 0 {
        return writeln!(
            out,
            "             too few chunks for periods and overlap; smaller chunks or a longer video give more"
        );
    }
    writeln!(
        out,
        "period       {} (mean {}, p10 {}, p90 {}, max {})",
        Millis(m.period_ms),
        Millis(m.period_mean_ms),
        Millis(m.period_p10_ms),
        Millis(m.period_p90_ms),
        Millis(m.period_max_ms)
    )?;
    writeln!(
        out,
        "stages       front {} (encode {} + decode {}), phase B {}",
        Millis(m.stage0_ms),
        Millis(m.build_ms),
        Millis(m.decode_ms),
        Millis(m.stage1_ms)
    )?;
    write!(out, "overlap      efficiency {}, ", Share(m.efficiency))?;
    // What can be hidden at most is the shorter stage; below the scatter of the periods it cannot be seen.
    let shorter = m.stage0_ms.min(m.stage1_ms);
    if shorter < m.period_p90_ms - m.period_p10_ms {
        let scatter = "the shorter stage is below the scatter of the periods";
        writeln!(out, "score n/a ({scatter})")?;
    } else {
        let (score, hidden) = (Share(m.overlap_score), Millis(m.hidden_ms));
        writeln!(out, "score {score}, hidden {hidden} a chunk")?;
    }
    writeln!(
        out,
        "pipeline     phase B idle {} a chunk ({:.1} %), in flight at most {}, queues source {:.1} (max {}) sink {:.1} (max {})",
        Millis(m.phase_b_idle_ms),
        100.0 * m.phase_b_idle_share,
        m.max_in_flight,
        m.source_queue_mean,
        m.source_queue_max,
        m.sink_queue_mean,
        m.sink_queue_max
    )?;
    if m.looks_serial() {
        writeln!(
            out,
            "warning      phase B waits as long as a decode takes: each chunk was sent only after the decode of the one before"
        )?;
    }
    Ok(())
}

/// Milliseconds with as many digits as the size of the value deserves.
struct Millis(f64);

impl std::fmt::Display for Millis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ms = self.0;
        match ms {
            _ if ms >= 100.0 => write!(f, "{ms:.0} ms"),
            _ if ms >= 1.0 => write!(f, "{ms:.2} ms"),
            _ => write!(f, "{:.1} µs", ms * 1e3),
        }
    }
}

/// A share that may be unknown.
struct Share(Option<f64>);

impl std::fmt::Display for Share {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(share) => write!(f, "{share:.3}"),
            None => f.write_str("n/a"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(m: &Measures) -> String {
        let mut out = Vec::new();
        write_text(&mut out, m).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn the_summary_reads_as_written_here() {
        let m = Measures {
            chunks: 100,
            dropped: 1,
            frames: 396,
            measured: 82,
            warm_up: 16,
            wall_ms: 2_010.0,
            frames_per_second: 197.01,
            period_ms: 20.04,
            period_mean_ms: 20.15,
            period_p10_ms: 19.99,
            period_p90_ms: 20.3,
            period_max_ms: 120.6,
            build_ms: 0.9996,
            decode_ms: 4.0,
            stage0_ms: 5.0,
            stage1_ms: 20.0,
            hidden_ms: 4.96,
            overlap_score: Some(0.992),
            efficiency: Some(0.998),
            phase_b_idle_ms: 0.0123,
            phase_b_idle_share: 0.0006,
            max_in_flight: 4,
            source_queue_mean: 3.5,
            source_queue_max: 4,
            ..Measures::default()
        };
        assert_eq!(
            text(&m),
            "chunks       100 in 2.01 s (396 frames, 197.0 frames/s), 82 measured after 16 of warm-up, 1 dropped\n\
             period       20.04 ms (mean 20.15 ms, p10 19.99 ms, p90 20.30 ms, max 121 ms)\n\
             stages       front 5.00 ms (encode 999.6 µs + decode 4.00 ms), phase B 20.00 ms\n\
             overlap      efficiency 0.998, score 0.992, hidden 4.96 ms a chunk\n\
             pipeline     phase B idle 12.3 µs a chunk (0.1 %), in flight at most 4, queues source 3.5 (max 4) sink 0.0 (max 0)\n"
        );
    }

    #[test]
    fn what_is_not_known_says_so_and_a_serial_schedule_warns() {
        assert!(text(&Measures::default()).contains("too few chunks"));
        let unknown = Measures {
            measured: 1,
            ..Measures::default()
        };
        assert!(text(&unknown).contains("efficiency n/a, score n/a"));
        let scattered = Measures {
            measured: 9,
            stage0_ms: 1.0,
            stage1_ms: 60.0,
            period_p10_ms: 55.0,
            period_p90_ms: 66.0,
            overlap_score: Some(7.6),
            ..Measures::default()
        };
        assert!(text(&scattered).contains("score n/a (the shorter stage is below"));
        let serial = Measures {
            measured: 10,
            decode_ms: 4.0,
            phase_b_idle_ms: 4.1,
            overlap_score: Some(0.01),
            ..Measures::default()
        };
        assert!(text(&serial).contains("warning"));
    }
}
