//! Every rule of the protocol, broken on purpose in a real job: `pp-trials faults` in shared memory, by copy engine and over NCCL.

use pp_fakes::Fakes;
use pp_testing::{assert_has, process::run, video};
use std::collections::BTreeSet;

use crate::common::{LATE, assert_all_behave, folder, pp};

/// The rules of the protocol. OM-02 is broken with OM-01, OM-05 with OM-04, and OM-12 with OM-11.
const RULES: [&str; 18] = [
    "OM-01", "OM-02", "OM-03", "OM-04", "OM-05", "OM-06", "OM-07", "OM-08", "OM-09", "OM-10",
    "OM-11", "OM-12", "OM-13", "size", "order", "devices", "counts", "log",
];

/// The sink on a rank of its own.
const CHAIN: [&str; 2] = ["--pipeline", "encode@0 -> phase_b@1 -> decode@2"];

/// A group of two ranks.
const GROUP: [&str; 2] = ["--pipeline", "encode@0 -> phase_b@1+2 -> decode@0"];

/// Why a fault is not made: it is one of another transport, or of another pipeline.
const NOT_HERE: &[&str] = &["not a fault of this transport", "it takes a pipeline with"];

#[test]
fn every_fault_ends_as_it_must_on_the_host() {
    assert_all_behave(&mut pp(&["faults"]), 48, NOT_HERE);
}

#[test]
fn every_fault_ends_as_it_must_on_three_ranks() {
    assert_all_behave(pp(&["faults"]).args(CHAIN), 53, NOT_HERE);
}

#[test]
fn every_fault_ends_as_it_must_in_a_group() {
    assert_all_behave(pp(&["faults"]).args(GROUP), 59, NOT_HERE);
}

#[test]
fn a_pipeline_whose_roles_are_one_rank_is_refused() {
    for pipeline in [
        "encode@0,phase_b@0+1,decode@0",
        "encode@0,phase_b@1+0,decode@0",
    ] {
        let ended = run(&mut pp(&["faults", "--pipeline", pipeline]), None);
        ended.failed(
            2,
            &["phase_b stands on rank 0", "encode@0,phase_b@1+2,decode@0"],
        );
    }
}

#[test]
fn every_fault_ends_as_it_must_by_copy_engine() {
    every_fault_ends_as_it_must_on_gpus("p2p");
}

#[test]
fn every_fault_ends_as_it_must_over_nccl() {
    every_fault_ends_as_it_must_on_gpus("nccl");
}

fn every_fault_ends_as_it_must_on_gpus(transport: &str) {
    let fakes = Fakes::newest();
    let folder = folder(&format!("faults_{transport}"));
    for pipeline in [&[][..], &CHAIN, &GROUP] {
        let mut command = pp(&["faults", "--transport", transport]);
        fakes.give_to(command.args(pipeline));
        command.env("PP_FAKE_NCCL_DIR", folder.file(""));
        command.env("PP_FAKE_DEVICES", "3");
        assert_all_behave(&mut command, 55, NOT_HERE);
    }
}

#[test]
fn every_fault_ends_as_it_must_on_one_gpu() {
    let mut command = pp(&["faults", "--transport", "p2p"]);
    Fakes::newest().give_to(&mut command);
    command.env("PP_FAKE_DEVICES", "1");
    let reasons = [NOT_HERE, &["the ranks share a GPU"]].concat();
    assert_all_behave(&mut command, 50, &reasons);
}

#[test]
fn every_rule_is_broken_somewhere() {
    let list = run(&mut pp(&["faults", "--list"]), None).succeeded();
    let list = String::from_utf8(list.stdout).unwrap();
    let id = |line: &'_ str| line.split(' ').next().unwrap().to_owned();
    let ids: BTreeSet<String> = list.lines().map(id).collect();
    for rule in RULES {
        let breaks = |id: &String| id.split('.').next() == Some(rule);
        assert!(ids.iter().any(breaks), "nothing breaks {rule}");
    }
    assert_eq!(ids.len(), list.lines().count(), "an id stands there twice");
    assert!(list.contains("PP_FAULT=truncated-frame@1: Received: the first half of a frame"));
}

#[test]
fn a_fault_that_the_run_cannot_make_is_refused_by_name() {
    let folder = folder("faults_refused");
    let input = folder.write("in.y4m", &video(32, 32, "mono", 2));
    let input = input.to_str().unwrap();
    for (fault, more, words) in [
        ("kill@7", &[][..], ["PP_FAULT", "rank 7"]),
        ("huge-note@1", &[], ["PP_FAULT", "only the source"]),
        ("late-result", &CHAIN, ["PP_FAULT", "one rank"]),
        ("no-such-fault", &[], ["PP_FAULT", "no-such-fault"]),
        ("kill@1:chunk=x", &[], ["PP_FAULT", "\"x\""]),
        ("kill@1", &["--ranks", "1"], ["PP_FAULT", "no such rank"]),
        (
            "no-such-fault",
            &[],
            ["NAME[@RANK]", "pp-trials faults --hooks"],
        ),
        // What cannot strike in this run is not waited for.
        (
            "second-thread",
            &["--transport", "host"],
            ["second-thread", "--transport nccl"],
        ),
        ("missing-context", &[], ["missing-context", "--recompute"]),
        ("late-result", &[], ["late-result", "--cuts hard"]),
    ] {
        let args = [&["run", "--input", input][..], more].concat();
        let mut command = pp(&args);
        run(command.env("PP_FAULT", fault), None).failed(2, &words);
    }
    run(&mut pp(&["faults", "--only", "OM-99"]), None).failed(2, &["OM-99", "--list"]);
}

#[test]
fn hooks_are_named_and_one_that_did_not_strike_says_so() {
    let ended = run(&mut pp(&["faults", "--hooks"]), None).succeeded();
    let text = String::from_utf8(ended.stdout).unwrap();
    assert_has(
        &text,
        &[
            "kill ",
            "The rank kills itself",
            "second-thread",
            "needs --recompute",
        ],
    );
    let folder = folder("faults_vain");
    let input = folder.write("in.y4m", &video(32, 32, "mono", 8));
    let args = [
        "run",
        "--kernels",
        "cpu",
        "--input",
        input.to_str().unwrap(),
    ];
    for (fault, strikes) in [("swapped:chunk=1000", false), ("stall:chunk=1:ms=1", true)] {
        let ended = run(pp(&args).env("PP_FAULT", fault), None).succeeded();
        let in_vain = ended
            .stderr
            .contains("pp: fault hook: swapped did not strike");
        assert_eq!(in_vain, !strikes, "{}", ended.stderr);
        let said = ended.stderr.matches("pp: fault hook: ").count();
        assert_eq!(said, 1, "{}", ended.stderr);
    }
}

/// Each job would say so again.
#[test]
fn without_gpus_nothing_is_begun() {
    for command in [
        &["faults", "--transport", "nccl"][..],
        &["shutdown", "--transport", "nccl"],
    ] {
        let mut command = pp(command);
        let ended = run(command.env("CUDA_VISIBLE_DEVICES", ""), None);
        assert!(ended.stdout.is_empty(), "{:?}", ended.stdout);
        ended.failed(10, &["look for GPUs", "pp doctor"]);
    }
}

#[test]
fn the_summary_of_one_fault_names_it_and_its_outcome() {
    let ended = run(&mut pp(&["faults", "--only", "size.truncated"]), None);
    assert!(matches!(ended.code, Some(0 | LATE)), "{}", ended.stderr);
    let text = String::from_utf8(ended.stdout).unwrap();
    assert_has(
        &text,
        &[
            "size.truncated",
            "rank 1 (exit 8): peer misbehaved: rank 0: receive header",
            " of 1000 ms",
            "1 faults on host: 1 run, 0 did not end as they must, ",
        ],
    );
}
