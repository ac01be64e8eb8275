//! How far a run is, while it runs: a bar on a terminal, elsewhere a line a minute.

use std::fmt;
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use pp_runtime::report::Count;

use pp_job::command_line::{is_quiet, say_aside};

use super::live::KeptUp;

/// Time between two lines.
const EVERY: Duration = Duration::from_secs(60);

/// Shows how many frames are done.
pub(super) struct FrameProgress {
    bar: ProgressBar,
    /// Where there is no terminal.
    lines: Option<Lines>,
    start: Instant,
}

impl FrameProgress {
    /// Of so many frames, where that is known.
    pub(super) fn new(total: Option<u64>) -> Self {
        let (bar, template) = match total {
            Some(total) => (
                ProgressBar::new(total),
                "{bar:20} {pos} of {len} frames, {per_sec}, {elapsed}, {left}{msg}",
            ),
            None => (
                ProgressBar::new_spinner(),
                "{spinner} {pos} frames, {per_sec}, {elapsed}{msg}",
            ),
        };
        // Drawn on a terminal only; indicatif sees to that.
        let style = ProgressStyle::with_template(template);
        let style = style.expect("the template is a constant that parses");
        bar.set_style(
            style.with_key("left", |state: &ProgressState, to: &mut dyn fmt::Write| {
                // What it is written to is a text.
                let _ = to.write_str(&left(state.eta()));
            }),
        );
        if is_quiet() {
            bar.set_draw_target(ProgressDrawTarget::hidden());
        }
        Self {
            bar,
            lines: (!std::io::stderr().is_terminal()).then(|| Lines::new(total)),
            start: Instant::now(),
        }
    }

    /// So many more frames are done, and the run keeps up like this.
    pub(super) fn add(&mut self, frames: u64, kept_up: KeptUp) {
        self.bar.inc(frames);
        match &mut self.lines {
            None => self.bar.set_message(kept_up.to_string()),
            Some(lines) => {
                if let Some(line) = lines.add(frames, self.start.elapsed(), kept_up) {
                    say_aside(line);
                }
            }
        }
    }

    pub(super) fn end(&self) {
        self.bar.finish_and_clear();
    }
}

/// When there is a line to be said, and which.
struct Lines {
    total: Option<u64>,
    frames: u64,
    /// When the last line was said, and of how many frames.
    said: (Duration, u64),
}

impl Lines {
    fn new(total: Option<u64>) -> Self {
        Self {
            total,
            frames: 0,
            said: (Duration::ZERO, 0),
        }
    }

    /// So many more frames are done, at this time since the start.
    fn add(&mut self, frames: u64, now: Duration, kept_up: KeptUp) -> Option<String> {
        self.frames += frames;
        let (at, before) = self.said;
        let since = now.saturating_sub(at);
        if since < EVERY {
            return None;
        }
        self.said = (now, self.frames);
        let of = self
            .total
            .map_or_else(String::new, |total| format!(" of {total}"));
        let rate = (self.frames - before) as f64 / since.as_secs_f64();
        let frames = self.frames;
        let rest = self.total.map(|total| total.saturating_sub(frames));
        // So slow that it may never end, it says nothing.
        let rest = rest.map(|rest| Duration::try_from_secs_f64(rest as f64 / rate));
        let rest = rest.and_then(Result::ok);
        let left = rest.map_or_else(String::new, |rest| format!(", {}", left(rest)));
        Some(format!(
            "pp: {frames}{of} frames done, {rate:.1} frames/s{left}{kept_up}"
        ))
    }
}

/// An estimate of the time left, in words.
fn left(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    let about = |unit_seconds: f64, unit| {
        let count = (seconds / unit_seconds).round().max(1.0) as u64;
        format!("about {} left", Count(count, unit))
    };
    match seconds {
        ..10.0 => "a few seconds left".into(),
        ..55.0 => format!("about {} seconds left", (seconds / 10.0).round() * 10.0),
        ..3570.0 => about(60.0, "minute"),
        ..172_800.0 => about(3600.0, "hour"),
        _ => about(86_400.0, "day"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_line_a_minute_with_the_rate_since_the_last() {
        let mut lines = Lines::new(Some(7200));
        for (frames, at, said) in [
            (4, 1, None),
            (1196, 59, None),
            (
                0,
                60,
                Some("pp: 1200 of 7200 frames done, 20.0 frames/s, about 5 minutes left"),
            ),
            (600, 61, None),
            (0, 119, None),
            (
                0,
                120,
                Some("pp: 1800 of 7200 frames done, 10.0 frames/s, about 9 minutes left"),
            ),
            // Nothing came for a while.
            (
                30,
                420,
                Some("pp: 1830 of 7200 frames done, 0.1 frames/s, about 15 hours left"),
            ),
            (30, 479, None),
            // Nothing came at all.
            (
                0,
                481,
                Some("pp: 1860 of 7200 frames done, 0.5 frames/s, about 3 hours left"),
            ),
            (0, 542, Some("pp: 1860 of 7200 frames done, 0.0 frames/s")),
        ] {
            let line = lines.add(frames, Duration::from_secs(at), KeptUp::default());
            assert_eq!(line.as_deref(), said, "at {at} s");
        }
        let line = Lines::new(None).add(60, EVERY, KeptUp::default());
        assert_eq!(line.as_deref(), Some("pp: 60 frames done, 1.0 frames/s"));
    }

    #[test]
    fn the_time_left_is_said_in_words() {
        for (seconds, said) in [
            (0.0, "a few seconds left"),
            (9.9, "a few seconds left"),
            (10.0, "about 10 seconds left"),
            (54.9, "about 50 seconds left"),
            (55.0, "about 1 minute left"),
            (89.0, "about 1 minute left"),
            (170.0, "about 3 minutes left"),
            (3569.0, "about 59 minutes left"),
            (3570.0, "about 1 hour left"),
            (90_000.0, "about 25 hours left"),
            (172_800.0, "about 2 days left"),
        ] {
            assert_eq!(left(Duration::from_secs_f64(seconds)), said, "{seconds} s");
        }
    }

    #[test]
    fn a_line_says_how_the_run_keeps_up() {
        let kept_up = KeptUp {
            late: 2,
            dropped: 8,
            steps_saved: 3,
            held_ns: 1_230_000_000,
            behind_ns: 10_600_000_000,
        };
        let line = Lines::new(None).add(60, EVERY, kept_up).unwrap();
        let said = ", 2 late chunks, 8 frames dropped, 3 steps saved, held back 1.2 s, behind the rate of the input by 10.6 s";
        assert!(line.ends_with(said), "{line}");
    }
}
