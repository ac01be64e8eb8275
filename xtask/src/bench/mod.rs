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
mod figures;
mod overlap;
mod peers;
mod quality;
mod touch;

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
