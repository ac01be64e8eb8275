//! The signals that a job takes, and their names.

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};

/// The signals that this process does something about.
pub(crate) fn heard() -> Vec<i32> {
    let mut heard = asking();
    heard.push(SIGUSR1);
    heard
}

/// Returns the signals that ask for an end and were not ignored when this process began.
pub fn asking() -> Vec<i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let mut asking = vec![SIGINT, SIGTERM, SIGHUP];
    asking.retain(|signal| ignored.unwrap_or(0) & (1 << (signal - 1)) == 0);
    asking
}

/// As it is written everywhere: `SIGTERM`.
pub fn name(signal: u8) -> String {
    let name = signal_hook::low_level::signal_name(signal.into());
    name.map_or_else(|| format!("signal {signal}"), str::to_owned)
}
