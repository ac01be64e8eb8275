//! When a median and a mean tell different stories. `cargo xtask bench` includes this file.

/// The share of the median by which the mean may differ from it.
pub const FAR: f64 = 0.05;

/// Says whether the mean of a period is so far from the median that chunks came in bursts.
pub fn are_far_apart(median: f64, mean: f64) -> bool {
    (mean - median).abs() > FAR * median
}
