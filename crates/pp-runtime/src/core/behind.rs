//! When a job says that it does not keep up.

const SECOND: u64 = 1_000_000_000;
/// Between two lines.
const EVERY: u64 = 60 * SECOND;
/// Before the first line about frames that were dropped: a job that begins has to catch up.
const FIRST: u64 = 10 * SECOND;

/// Finds out whether a job falls behind, and says so at most once a minute.
#[derive(Clone, Copy, Debug, Default)]
pub struct Behind {
    /// Since when frames are counted; `None` before the first chunk.
    since_ns: Option<u64>,
    has_said: bool,
    /// By how much it was behind when it said so.
    said_ns: u64,
    frames: u64,
    skipped: u64,
}

impl Behind {
    /// The sink has a chunk of so many frames, before which so many were dropped, and whose first frame was built by
    /// `behind_ns` later than the source's rate has it. Gives the line to say, if there is one.
    pub fn tell(
        &mut self,
        now_ns: u64,
        (frames, skipped): (u32, u32),
        behind_ns: Option<u64>,
    ) -> Option<String> {
        let since_ns = *self.since_ns.get_or_insert(now_ns);
        self.frames += u64::from(frames) + u64::from(skipped);
        self.skipped += u64::from(skipped);
        let passed_ns = now_ns.saturating_sub(since_ns);
        let is_time = passed_ns >= EVERY || !self.has_said;
        let behind_ns = behind_ns.unwrap_or(0);
        let seconds = |ns: u64| ns as f64 / SECOND as f64;
        if is_time && behind_ns > self.said_ns + SECOND {
            self.said_ns = behind_ns;
            self.begin(now_ns);
            return Some(format!(
                "pp: the job falls behind: a frame is {:.1} s later than the rate of the source has it, and what comes out is as \
                 much older; let chunks that are late be dropped, or give the stages less work",
                seconds(behind_ns)
            ));
        }
        if passed_ns >= EVERY || !self.has_said && passed_ns >= FIRST {
            let (frames, skipped) = (self.frames, self.skipped);
            let had_said = self.has_said;
            self.begin(now_ns);
            if skipped == 0 {
                self.has_said = had_said && self.said_ns > 0;
                return None;
            }
            return Some(format!(
                "pp: the job does not keep up: {skipped} of {frames} frames of the last {:.0} s were dropped",
                seconds(passed_ns)
            ));
        }
        None
    }

    fn begin(&mut self, now_ns: u64) {
        (self.since_ns, self.has_said) = (Some(now_ns), true);
        (self.frames, self.skipped) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The seconds at which a line comes, of chunks of one frame, ten a second.
    fn said(seconds: u64, chunk: impl Fn(u64) -> (u32, Option<u64>)) -> Vec<u64> {
        let mut behind = Behind::default();
        let chunks = (0..10 * seconds).filter_map(|at| {
            let (skipped, behind_ns) = chunk(at);
            let line = behind.tell(at * SECOND / 10, (1, skipped), behind_ns)?;
            assert!(line.starts_with("pp: the job "), "{line}");
            Some(at / 10)
        });
        chunks.collect()
    }

    #[test]
    fn a_job_that_falls_behind_says_so_once_a_minute() {
        // 0.8 s more each second, as when 4.6 of 25 frames are worked on.
        let growing = |at: u64| (0, Some(at * SECOND / 10 * 8 / 10));
        assert_eq!(said(200, growing), [1, 61, 121, 181]);
        // Late, but not later and later.
        assert_eq!(said(200, |_| (0, Some(5 * SECOND))), [0]);
        assert_eq!(said(200, |_| (0, None)), [0; 0]);
    }

    #[test]
    fn dropped_frames_are_counted_over_a_minute() {
        assert_eq!(said(200, |_| (2, None)), [10, 70, 130, 190]);
        assert_eq!(said(200, |at| (u32::from(at == 900), None)).len(), 1);
    }
}
