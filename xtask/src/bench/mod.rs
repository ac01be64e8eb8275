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

use self::peers::Contenders;

type Benchmark = fn(&Contenders) -> Result<()>;

/// Runs the named benchmark.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let what = args.first().map_or("all", String::as_str);
    let benchmarks: &[Benchmark] = match what {
        "overlap" => &[overlap::run],
        "touch" => &[touch::run],
        "denoise" => &[denoise::run],
        "door" => &[door::run],
        "all" => &[overlap::run, touch::run, denoise::run],
        _ => bail!("no benchmark {what:?}: overlap, touch, denoise, door or all"),
    };
    let contenders = Contenders::build()?;
    print_conditions(&contenders)?;
    for benchmark in benchmarks {
        benchmark(&contenders)?;
    }
    print_conditions(&contenders)
}

/// What a reader needs to judge the figures; printed before and after.
fn print_conditions(contenders: &Contenders) -> Result<()> {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or_default();
    let model = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut lines = model.lines();
    let model = lines.find_map(|line| line.strip_prefix("model name"));
    let model = model.unwrap_or("unknown");
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let hop_us = contenders.hop_us()?;
    let distance = match hop_us < 0.1 {
        true => "near: they share a cache",
        false => "far: they share none",
    };
    println!(
        "\n{cores} cores, {}, cache-line hop {hop_us:.3} us ({distance}), load {load}",
        model.trim_start_matches([' ', '\t', ':']),
    );
    Ok(())
}
