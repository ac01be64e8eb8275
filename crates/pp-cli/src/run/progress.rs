//! How far a run is, while it runs: a bar on a terminal, elsewhere a line a minute.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use pp_job::command_line::say_aside;

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
                "{bar:20} {pos} of {len} frames, {per_sec}, {elapsed}, {eta} left",
            ),
            None => (
                ProgressBar::new_spinner(),
                "{spinner} {pos} frames, {per_sec}, {elapsed}",
            ),
        };
        // Drawn on a terminal only; indicatif sees to that.
        let style = ProgressStyle::with_template(template);
        bar.set_style(style.expect("the template is a constant that parses"));
        Self {
            bar,
            lines: (!std::io::stderr().is_terminal()).then(|| Lines::new(total)),
            start: Instant::now(),
        }
    }

    /// So many more frames are done.
    pub(super) fn add(&mut self, frames: u64) {
        self.bar.inc(frames);
        if let Some(lines) = &mut self.lines
            && let Some(line) = lines.add(frames, self.start.elapsed())
        {
            say_aside(line);
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
    fn add(&mut self, frames: u64, now: Duration) -> Option<String> {
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
        Some(format!(
            "pp: {}{of} frames done, {rate:.1} frames/s",
            self.frames
        ))
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
            (0, 60, Some("pp: 1200 of 7200 frames done, 20.0 frames/s")),
            (600, 61, None),
            (0, 119, None),
            (0, 120, Some("pp: 1800 of 7200 frames done, 10.0 frames/s")),
            // Nothing came for a while.
            (30, 420, Some("pp: 1830 of 7200 frames done, 0.1 frames/s")),
            (30, 479, None),
        ] {
            let line = lines.add(frames, Duration::from_secs(at));
            assert_eq!(line.as_deref(), said, "at {at} s");
        }
        let line = Lines::new(None).add(60, EVERY);
        assert_eq!(line.as_deref(), Some("pp: 60 frames done, 1.0 frames/s"));
    }
}
