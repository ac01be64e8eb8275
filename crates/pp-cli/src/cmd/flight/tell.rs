//! The same in plain words.

use std::fmt;

use pp_transport::flight::Reason;

use super::clocks::By;
use super::{Ranked, Told};

/// Why a recording was written.
pub(super) fn reason(reason: &Reason) -> String {
    match reason {
        Reason::Asked => "asked for".into(),
        Reason::Fault(fault) => fault.to_string(),
        Reason::Panic(text) => format!("panic: {text}"),
        _ => "unknown".into(),
    }
}

/// What the driver was inside of.
pub(super) fn activity(own: &Ranked) -> Option<String> {
    let activity = own.recording.activity.as_ref()?;
    let since = activity.since_ns.map(|ns| own.before_ns(ns));
    Some(format!("{}{}", activity.operation, lasting(since)))
}

/// ` for 2.013 s`, or nothing.
pub(super) fn lasting(ns: Option<u64>) -> String {
    ns.map_or_else(String::new, |ns| format!(" for {}", duration(ns)))
}

fn duration(ns: u64) -> String {
    match ns {
        0..1_000_000 => format!("{:.1} µs", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.3} s", ns as f64 / 1e9),
    }
}

/// `rank 1`, or `ranks 1 and 2`.
pub(super) fn ranks(ranks: &[u32]) -> String {
    let mut names: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    match names.pop() {
        Some(last) if names.is_empty() => format!("rank {last}"),
        Some(last) => format!("ranks {} and {last}", names.join(", ")),
        None => "no rank".into(),
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            job,
            ranks: all,
            missing,
            left_out,
            findings,
            under_way,
            running: _,
            verdict,
        } = self;
        writeln!(f, "job {job}: {verdict}")?;
        for file in left_out {
            let file = file.display();
            writeln!(
                f,
                "left out: {file}: of an earlier launch under the same job id"
            )?;
        }
        for rank in all {
            writeln!(
                f,
                "\nrank {} (process {} on {})",
                rank.rank, rank.pid, rank.host
            )?;
            writeln!(f, "  written    {}", rank.written_because)?;
            writeln!(
                f,
                "  kept       the last {} of {} operations",
                rank.operations, rank.operations_ever
            )?;
            if let Some(inside) = &rank.inside {
                writeln!(f, "  inside     {inside}")?;
            }
            let wait = &rank.wait;
            writeln!(f, "  wait       {}{}", wait.what, lasting(wait.for_ns))?;
            if !wait.on.is_empty() && !wait.is_idle {
                writeln!(f, "  on         {}", ranks(&wait.on))?;
            }
            let within = rank.clock.within_ns.unwrap_or(0);
            match rank.clock.by {
                By::SameClock => {}
                By::Messages => writeln!(
                    f,
                    "  clock      placed by messages both ways, right to {}",
                    duration(within)
                )?,
                By::OneWay => writeln!(f, "  clock      placed by messages one way: a guess")?,
                By::WallClock => {
                    writeln!(
                        f,
                        "  clock      placed by the wall clocks: may be seconds off"
                    )?;
                }
            }
        }
        writeln!(f)?;
        if !missing.is_empty() {
            writeln!(f, "no recording of {}", ranks(missing))?;
        }
        for what in &findings.never_came {
            writeln!(f, "never came: {what}")?;
        }
        for what in under_way {
            writeln!(f, "under way: {what}")?;
        }
        match &findings.disagreement {
            Some(what) => writeln!(f, "first disagreement: {what}"),
            None => writeln!(
                f,
                "no disagreement on the {} operations of which two ranks have their half",
                findings.matched
            ),
        }
    }
}
