//! One run that loses its rank 1 hundreds of times: the output is the same, bit for bit, and
//! rank 0 grows in nothing. Too long for every day:
//!
//! `PP_TEST_KILLS=200 cargo test -p pp-cli --test suite -- --ignored restart_long --nocapture`

use std::process::Command;

use pp_fakes::Fakes;
use pp_testing::{
    Random,
    process::{Footprint, Held, all_gone, children, run},
    video,
};

use crate::common::folder;
use crate::restart_support::{host, report, through};

/// Kills before rank 0 is measured for the first time.
const WARM_UP: usize = 20;
/// What rank 0 may grow by, from then on: noise of the allocator, not one slot a restart.
const GROWS_KIB: u64 = 16 * 1024;

fn kills() -> u64 {
    let text = std::env::var("PP_TEST_KILLS").unwrap_or_else(|_| "200".into());
    text.parse().expect("PP_TEST_KILLS is a number")
}

/// The value below which so many of a hundred lie.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    sorted[(sorted.len() - 1) * percent / 100]
}

fn survive(name: &str, mut command: Command, input: Vec<u8>, wanted: &[u8]) {
    let folder = folder(&format!("restart_long_{name}"));
    let json = folder.file("report.json");
    command
        .args(["--restarts", "1000000", "--report"])
        .arg(&json);
    let kills = kills();
    let strikes =
        crate::restart_support::kills(&mut Random::new(kills), kills, input.len() as u64 * 9 / 10);
    let mut held = Held::start(&mut command, input);
    let rank_0 = held.rank(0);
    let mut before = None;
    for (count, strike) in strikes.iter().enumerate() {
        held.strike(*strike);
        if count == WARM_UP.min(strikes.len() / 2) {
            before = Footprint::of(rank_0);
        }
        if count % 100 == 99 {
            println!(
                "{name}: after {} kills {:?}",
                count + 1,
                Footprint::of(rank_0)
            );
        }
    }
    // Until the last one is made up for.
    held.wait_for(wanted.len() as u64 * 19 / 20);
    let (before, after) = (before.unwrap(), Footprint::of(rank_0).unwrap());
    let ranks = children(held.id());
    let ended = held.finish();
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    all_gone(&ranks);
    let report = report(&json);
    let recoveries = report["recoveries"].as_array().unwrap();
    let served = recoveries.iter().filter_map(|r| r["ms_to_served"].as_f64());
    let mut served: Vec<f64> = served.collect();
    served.sort_by(f64::total_cmp);
    println!(
        "{name}: {kills} kills, {} losses of a link, {} served again: median {:.1} ms, p99 {:.1} ms, \
         max {:.1} ms; rank 0 {before:?} -> {after:?}",
        recoveries.len(),
        served.len(),
        percentile(&served, 50),
        percentile(&served, 99),
        percentile(&served, 100),
    );
    assert!(ended.stdout == wanted, "the output is another");
    assert!(after.rss_kib <= before.rss_kib + GROWS_KIB);
    // One generation of a link is there at either moment, or none.
    assert!(after.threads <= before.threads + 6, "threads grow");
    assert!(
        after.descriptors <= before.descriptors + 12,
        "descriptors grow"
    );
    assert!(after.mappings <= before.mappings + 60, "mappings grow");
}

#[test]
#[ignore = "minutes long; PP_TEST_KILLS says how many kills"]
fn on_the_host() {
    let input = video(64, 48, "mono", 120 + 60 * kills() as usize);
    let wanted = run(&mut host(&[]), Some(input.clone())).succeeded();
    survive("host", host(&[]), input, &wanted.stdout);
}

#[test]
#[ignore = "minutes long; PP_TEST_KILLS says how many kills"]
fn on_the_fakes_of_two_gpus_by_copy_engine() {
    on_the_fakes_of_two_gpus("p2p");
}

#[test]
#[ignore = "minutes long; PP_TEST_KILLS says how many kills"]
fn on_the_fakes_of_two_gpus_over_nccl() {
    on_the_fakes_of_two_gpus("nccl");
}

fn on_the_fakes_of_two_gpus(transport: &str) {
    let fakes = Fakes::newest();
    let folder = folder("restart_long_meet");
    let input = video(64, 48, "mono", 120 + 20 * kills() as usize);
    let args = [
        "--transport",
        transport,
        "--kernels",
        "ptx",
        "--denoise-steps",
        "0",
    ];
    let mut command = through(&args);
    fakes.give_to(&mut command);
    command.env("PP_FAKE_NCCL_DIR", folder.file(""));
    let wanted = input.clone();
    survive("fakes", command, input, &wanted);
}
