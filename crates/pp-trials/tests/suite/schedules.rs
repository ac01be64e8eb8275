//! `pp-trials schedules`: a run keeps to its schedule, and each action begins when its input is there.

use pp_runtime::schedule::{Limits, Schedule};
use pp_testing::process::run;
use pp_testing::rows;
use pp_testing::words;
use serde_json::Value;

use crate::common::{folder, pp};

/// Forward and backward of two ranks meet head on: rank 0 sends the second activation while rank 1 sends the first gradient.
const HEAD_ON: &str = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n";
/// It shows what the checker says of that.
const PAGE: &str = include_str!("../../../../docs/1f1b.md");
/// All forwards, then all backwards: no two sends meet.
const ONE_WAY: &str = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n";

#[test]
fn runs_are_whole_in_order_and_behind_their_inputs() {
    // Which the command refuses otherwise. Its times are the machine's, so they are not looked at.
    let mut command = pp(&["schedules", "--forward-us", "200", "--ranks", "2", "--json"]);
    let ended = run(&mut command, None);
    let report: Value = serde_json::from_slice(&ended.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", ended.stderr));
    let names: Vec<&str> = report["cases"]
        .as_array()
        .unwrap()
        .iter()
        .map(|case| case["schedule"].as_str().unwrap())
        .collect();
    let all = words(
        "naive gpipe 1f1b interleaved interleaved-zb zb-h1 looped-bfs zbv \
         dualpipe-v",
    );
    assert_eq!(names, all);
}

/// Runs a schedule of two ranks; with sends that wait if asked for.
fn job(name: &str, csv: &str, more: &[&str]) -> pp_testing::process::Ended {
    let folder = folder(name);
    let file = folder.file("schedule.csv");
    std::fs::write(&file, csv).unwrap();
    let mut command = pp(&["schedule-job"]);
    command.arg(&file).args(["--forward-us", "100"]).args(more);
    run(command.env("PP_STUCK_MS", "1000"), None)
}

#[test]
fn sends_that_wait_for_each_other_end_by_a_fault_that_names_both_ranks() {
    let parse = |csv| Schedule::parse_csv(csv).unwrap();
    let check = |csv, slots| parse(csv).check(Limits::slots(slots));
    let flaw = check(HEAD_ON, 0).unwrap_err().to_string();
    let page: Vec<&str> = PAGE.split_whitespace().collect();
    assert!(page.join(" ").contains(&flaw), "the page shows: {flaw}");
    let ended = job("head_on", HEAD_ON, &["--rendezvous"]);
    ended.failed(9, &["send: no progress for", "rank 0", "rank 1"]);
    assert!(check(HEAD_ON, 1).is_ok() && check(ONE_WAY, 0).is_ok());
    // The same order with sends that do not wait, and the same sends where none meets another.
    job("asynchronous", HEAD_ON, &[]).succeeded();
    job("one_way", ONE_WAY, &["--rendezvous"]).succeeded();
}

#[test]
fn what_cannot_be_run_is_refused_before_a_rank_starts() {
    for [name, csv, why] in rows("
        sends | 0F0,0SEND_F0,0RECV_B0,0B0/1RECV_F0,1F0,1B0,1SEND_B0/ | 0SEND_F0: a run takes F, I, W and B
        twice | 0F0,0F0,0B0/1F0,1B0/ | the actions of rank 0 make no fixed order
    ") {
        job(name, &csv.replace('/', "\n"), &[]).failed(2, &[why]);
    }
}
