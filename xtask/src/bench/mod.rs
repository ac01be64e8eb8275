//! `cargo xtask bench`: our figures with a peer beside each, interleaved in one session.
//!
//! Two virtual cores may or may not share a cache, and a neighbour may take one of them for a while, so an absolute figure
//! says little. Every round runs every contender once, the table shows medians over the rounds and the ratio to the limit
//! that was hand-written for this machine, and the distance of the cores stands next to it.

use std::fs;

use anyhow::{Result, bail};

mod clips;
mod denoise;
mod door;
// The rule of the program that is measured.
#[path = "../../../crates/pp-runtime/src/report/far.rs"]
#[allow(unreachable_pub, reason = "it is public there")]
mod far;
mod overlap;
mod peers;
mod quality;
mod touch;

const ROUNDS: usize = 5;

/// Runs the named benchmark.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let what = args.first().map_or("all", String::as_str);
    if !["overlap", "touch", "denoise", "door", "all"].contains(&what) {
        bail!("no benchmark {what:?}: overlap, touch, denoise, door or all");
    }
    let contenders = peers::Contenders::build()?;
    print_conditions(&contenders)?;
    if what == "door" {
        door::run()?;
    }
    if matches!(what, "overlap" | "all") {
        overlap::run(&contenders)?;
    }
    if matches!(what, "touch" | "all") {
        touch::run(&contenders)?;
    }
    if matches!(what, "denoise" | "all") {
        denoise::run(&contenders.pp)?;
    }
    print_conditions(&contenders)
}

/// What a reader needs to judge the figures; printed before and after.
fn print_conditions(contenders: &peers::Contenders) -> Result<()> {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load
        .split(' ')
        .next()
        .and_then(|first| first.parse::<f64>().ok())
        .unwrap_or(0.0);
    let model = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = model
        .lines()
        .find_map(|line| line.strip_prefix("model name"))
        .unwrap_or("unknown");
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let hop_us = contenders.hop_us()?;
    println!(
        "\n{cores} cores, {}, cache-line hop {hop_us:.3} us ({}), load {load:.2}",
        model.trim_start_matches([' ', '\t', ':']),
        if hop_us < 0.1 {
            "near: they share a cache"
        } else {
            "far: they share none"
        },
    );
    Ok(())
}

/// The middle one of the rounds that gave a value; NaN where none did.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n => (values[(n - 1) / 2] + values[n / 2]) / 2.0,
    }
}

/// Median and half the distance of the quartiles, as text; `n/a` where no round gave a value.
fn spread(values: &mut [f64], digits: usize) -> String {
    if values.is_empty() {
        return "n/a".into();
    }
    let middle = median(values);
    let quartile = |share: f64| values[(share * values.len() as f64) as usize];
    format!(
        "{middle:.digits$} ±{:.digits$}",
        (quartile(0.75) - quartile(0.25)) / 2.0
    )
}

/// `!` behind a median that is far from the mean beside it: no ratio of medians can be trusted.
fn mark(median: f64, mean: f64) -> &'static str {
    match far::are_far_apart(median, mean) {
        true => "!",
        false => "",
    }
}

/// What the mark means, below a table.
fn print_mark() {
    println!(
        "{:>14}  ! median and mean differ by more than {:.0} %: chunks came in bursts",
        "",
        100.0 * far::FAR
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_quartiles() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0]), 2.5);
        assert!(median(&mut []).is_nan());
        assert_eq!(spread(&mut [], 1), "n/a");
        assert_eq!([mark(10.0, 10.4), mark(10.0, 9.4)], ["", "!"]);
        assert_eq!(spread(&mut [5.0, 1.0, 2.0, 3.0, 4.0], 1), "3.0 ±1.0");
    }
}
