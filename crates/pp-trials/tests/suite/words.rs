//! `pp-trials words`: no word is wrong, in shared memory and over NCCL, and one that is wrong is found.

use std::process::Command;

use pp_fakes::Fakes;
use pp_fakes::check::{Expect, Fresh, Recording, check};
use pp_testing::{Folder, assert_has, process::run};
use serde_json::{Value, json};

use crate::common::{folder, meet_in, pp};

const MESSAGES: &str = "300";

/// Messages of up to 100,000 bytes. A transport, or the devices of both ranks. GPUs are those of the fakes.
fn words(folder: &Folder, way: &str) -> Command {
    let mut command = pp(&["words", "--messages", MESSAGES, "--max-bytes", "100000"]);
    let named = way.contains(',');
    command.args([
        "--json",
        if named { "--devices" } else { "--transport" },
        way,
    ]);
    if named {
        command.args(["--transport", "auto"]);
    }
    if way != "host" {
        Fakes::newest().give_to(&mut command);
        meet_in(folder, &mut command);
    }
    command
}

fn report(stdout: &[u8]) -> Value {
    serde_json::from_slice(stdout).expect("one JSON object")
}

/// Runs it, and gives the report, after which no word is wrong.
fn all_right(folder: &Folder, way: &str, transport: &str) -> Value {
    let ended = run(&mut words(folder, way), None).succeeded();
    let report = report(&ended.stdout);
    assert_eq!(report["transport"], transport);
    assert_eq!(report["messages_each_way"].to_string(), MESSAGES);
    assert_eq!(report["wrong_words"], 0);
    assert_eq!(report["wrong_digests"], json!([0, 0]));
    report
}

#[test]
fn no_word_is_wrong_and_each_payload_is_in_order() {
    let folder = folder("words");
    for transport in ["host", "nccl"] {
        let report = all_right(&folder, transport, transport);
        let is_beside = report["beside"].as_array().unwrap().contains(&json!("hbm"));
        assert_eq!(is_beside, transport == "nccl");
    }
    let expect = Expect {
        // No steady state: the host reads each answer.
        warm_up: usize::MAX,
        fresh: Fresh::WithGaps,
        ..Expect::default()
    };
    let report = check(&Recording::read_all(&folder.file("rec")), expect);
    report.assert_clean();
    assert_eq!(report.transfers, 1200);
}

#[test]
fn no_word_is_wrong_between_host_memory_and_a_gpu() {
    let folder = folder("words_mixed");
    for devices in ["cpu,cuda:0", "cuda:0,cpu"] {
        all_right(&folder, devices, "host");
    }
}

#[test]
fn a_word_that_changed_on_its_way_is_counted() {
    let folder = folder("words_changed");
    for (rank, digests) in [(0, json!([1, 1])), (1, json!([1, 0]))] {
        for transport in ["host", "nccl"] {
            let mut command = words(&folder, transport);
            let fault = format!("changed-tensor@{rank}:chunk=70");
            let ended = run(command.env("PP_FAULT", fault), None).ended(1, &[]);
            let report = report(&ended.stdout);
            assert_eq!(report["wrong_messages"], 1, "{}", ended.stderr);
            assert_eq!(report["wrong_words"], 1, "{}", ended.stderr);
            assert_eq!(report["wrong_digests"], digests, "{}", ended.stderr);
            assert_has(&ended.stderr, &["message 70 of "]);
        }
    }
}
