//! Where a time lies in the picture, and how long it was in words.

use crate::report::ChunkRecord;
use crate::schedule::TICKS;

pub(super) const WIDTH: f64 = 1200.0;
pub(super) const LEFT: f64 = 130.0;
pub(super) const RIGHT: f64 = 20.0;

/// What a time of a picture counts, and how it reads.
#[derive(Clone, Copy)]
pub(super) enum Unit {
    /// Nanoseconds, shown as milliseconds.
    Nanosecond,
    /// Ticks of the unit of a schedule's costs, whatever it is, shown in that unit.
    Tick,
}

impl Unit {
    /// What the axis counts.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Nanosecond => "ms",
            Self::Tick => "time",
        }
    }

    /// A mark on the axis.
    pub(super) fn mark(self, at: u64) -> f64 {
        match self {
            Self::Nanosecond => at as f64 / 1e6,
            Self::Tick => at as f64 / TICKS as f64,
        }
    }

    /// A length in words.
    pub(super) fn length(self, length: u64) -> String {
        match self {
            Self::Nanosecond => millis(length),
            Self::Tick => self.mark(length).to_string(),
        }
    }
}

/// Maps the window of time that is shown to the width of the lanes.
pub(super) struct Scale {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) unit: Unit,
}

impl Scale {
    pub(super) fn over(shown: &[&ChunkRecord]) -> Self {
        let from_ns = shown.iter().map(|r| r.build_start_ns).min().unwrap_or(0);
        let last = |r: &&ChunkRecord| {
            let ends = r.stages.iter().filter_map(|s| Some(s.times?.end_ns));
            ends.fold(r.accepted_ns, u64::max)
        };
        let to_ns = shown.iter().map(last).max().unwrap_or(0);
        Self {
            from: from_ns,
            to: to_ns.max(from_ns.saturating_add(1_000)),
            unit: Unit::Nanosecond,
        }
    }

    pub(super) fn length(&self) -> u64 {
        self.to - self.from
    }

    pub(super) fn x(&self, at: u64) -> f64 {
        let inside = at.clamp(self.from, self.to) - self.from;
        LEFT + (WIDTH - LEFT - RIGHT) * inside as f64 / self.length() as f64
    }

    pub(super) fn shows(&self, from: u64, to: u64) -> bool {
        from < to && from < self.to && to > self.from
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
