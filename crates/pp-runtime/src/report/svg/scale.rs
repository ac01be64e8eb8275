//! Where a time lies in the picture, and how long it was in words.

use crate::report::ChunkRecord;

pub(super) const WIDTH: f64 = 1200.0;
pub(super) const LEFT: f64 = 130.0;
pub(super) const RIGHT: f64 = 20.0;

/// Maps the window of time that is shown to the width of the lanes.
pub(super) struct Scale {
    pub(super) from_ns: u64,
    pub(super) to_ns: u64,
}

impl Scale {
    pub(super) fn over(shown: &[&ChunkRecord]) -> Self {
        let from_ns = shown.iter().map(|r| r.build_start_ns).min().unwrap_or(0);
        let ends = |r: &&ChunkRecord| {
            r.stages
                .iter()
                .filter_map(|s| s.times)
                .map(|t| t.end_ns)
                .max()
        };
        let last = |r: &&ChunkRecord| r.accepted_ns.max(ends(r).unwrap_or(0));
        let to_ns = shown.iter().map(last).max().unwrap_or(0);
        Self {
            from_ns,
            to_ns: to_ns.max(from_ns.saturating_add(1_000)),
        }
    }

    pub(super) fn length_ns(&self) -> u64 {
        self.to_ns - self.from_ns
    }

    pub(super) fn x(&self, at_ns: u64) -> f64 {
        let inside = at_ns.clamp(self.from_ns, self.to_ns) - self.from_ns;
        LEFT + (WIDTH - LEFT - RIGHT) * inside as f64 / self.length_ns() as f64
    }

    pub(super) fn shows(&self, from_ns: u64, to_ns: u64) -> bool {
        from_ns < to_ns && from_ns < self.to_ns && to_ns > self.from_ns
    }
}

/// Three digits that count.
pub(super) fn millis(ns: u64) -> String {
    let ms = ns as f64 / 1e6;
    match ms {
        _ if ms >= 100.0 => format!("{ms:.0} ms"),
        _ if ms >= 10.0 => format!("{ms:.1} ms"),
        _ => format!("{ms:.2} ms"),
    }
}
