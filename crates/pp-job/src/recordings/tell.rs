//! Words for times and ranks.

use super::ranked::Ranked;

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

pub(super) fn duration(ns: u64) -> String {
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
