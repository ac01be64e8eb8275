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
    let ignored = in_mask("SigIgn:");
    let mut asking = vec![SIGINT, SIGTERM, SIGHUP];
    asking.retain(|signal| !ignored(*signal));
    asking
}

/// Tells which signals this process handles or ignores now.
pub(crate) fn handled_or_ignored() -> impl Fn(i32) -> bool {
    let (handled, ignored) = (in_mask("SigCgt:"), in_mask("SigIgn:"));
    move |signal| handled(signal) || ignored(signal)
}

/// Tells which signals are in this mask of the process now.
fn in_mask(name: &str) -> impl Fn(i32) -> bool + use<> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix(name));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    move |signal| mask.unwrap_or(0) & (1 << (signal - 1)) != 0
}

/// As it is written everywhere: `SIGTERM`.
pub fn name(signal: u8) -> String {
    let name = signal_hook::low_level::signal_name(signal.into());
    name.map_or_else(|| format!("signal {signal}"), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::handled_or_ignored;
    use signal_hook::consts::{SIGPIPE, SIGWINCH};

    #[test]
    fn a_signal_that_the_program_ignores_is_the_programs() {
        // Rust's runtime ignores it.
        assert!(handled_or_ignored()(SIGPIPE));
        assert!(!handled_or_ignored()(SIGWINCH));
    }
}
