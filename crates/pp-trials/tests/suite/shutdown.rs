//! Every state of ours against everything that may become of the peer: how it ends, and that it does. `pp shutdown`
//! judges the exit codes and what is left, and beside that the times, which nothing here looks at.

use pp_testing::assert_has;
use std::process::Command;
use std::time::{Duration, Instant};

use pp_fakes::Fakes;
use pp_testing::net::can_name_hosts;
use pp_testing::process::{children, finish, is_alive, run, signal, spawn};
use rustix::process::Signal;

use crate::common::{assert_all_behave, folder, pp};

/// `pp shutdown` with the heartbeat of a machine that has other things to do. Cells mostly wait, for a silence that lasts three
/// heartbeats above all.
fn matrix(args: &[&str]) -> Command {
    matrix_of(12, args)
}

/// So many cells at a time.
fn matrix_of(jobs: u32, args: &[&str]) -> Command {
    let mut command = pp(&["shutdown", "--jobs", &jobs.to_string()]);
    command.args(args).env("PP_HEARTBEAT_MS", "500");
    command
}

#[test]
fn every_cell_ends_as_it_should_on_shared_memory() {
    assert_all_behave(&mut matrix(&[]), 127, &["no network between them"]);
}

#[test]
fn every_cell_ends_as_it_should_by_copy_engine() {
    every_cell_ends_as_it_should_on("3");
}

#[test]
fn every_cell_ends_as_it_should_on_one_gpu() {
    every_cell_ends_as_it_should_on("1");
}

fn every_cell_ends_as_it_should_on(gpus: &str) {
    // Ranks with work on a GPU keep their cores busy, and a process that was killed needs a core to end.
    let mut command = matrix_of(4, &["--transport", "p2p"]);
    Fakes::newest().give_to(&mut command);
    command.env("PP_FAKE_DEVICES", gpus);
    assert_all_behave(&mut command, 127, &["no network between them"]);
}

#[test]
fn every_cell_ends_as_it_should_over_nccl() {
    let folder = folder("shutdown_nccl");
    let mut command = matrix(&["--transport", "nccl"]);
    Fakes::newest().give_to(&mut command);
    command.env("PP_FAKE_NCCL_DIR", folder.file(""));
    command.env("PP_FAKE_DEVICES", "3");
    let must_run = std::env::var_os("PP_TESTS_MUST_RUN").is_some();
    let reason = if must_run { "nothing" } else { "network" };
    assert_all_behave(&mut command, 127, &[reason]);
}

/// NCCL refuses two ranks of one host on one GPU, so each has a host name of its own here. Those of a supervisor have not.
#[test]
fn ranks_with_host_names_of_their_own_share_a_gpu_over_nccl() {
    if !can_name_hosts() {
        assert!(
            std::env::var_os("PP_TESTS_MUST_RUN").is_none(),
            "no host can be named"
        );
        return;
    }
    let folder = folder("shutdown_nccl_shared");
    let cells = [
        "--only",
        "stage/send/killed/go-on",
        "rank-1/working/killed",
        "d-source/queued/killed/go-on",
    ];
    let faults = ["faults", "--only", "OM-13.kill-source", "devices.same-gpu"];
    for (mut command, not_run) in [
        (
            matrix(&cells),
            "on one host, where NCCL wants a GPU for each",
        ),
        (pp(&faults), "share a GPU"),
    ] {
        Fakes::newest().give_to(&mut command);
        command
            .env("PP_FAKE_NCCL_DIR", folder.file(""))
            .env("PP_FAKE_DEVICES", "1");
        let report = run(command.args(["--transport", "nccl", "--json"]), None);
        let report: serde_json::Value = serde_json::from_slice(&report.stdout).unwrap();
        let trials = report["trials"].as_array().unwrap();
        assert!(
            trials
                .iter()
                .all(|trial| trial["wrong"] == serde_json::json!([])),
            "{report}"
        );
        let left_out: Vec<_> = trials
            .iter()
            .filter_map(|trial| trial["not_run"].as_str())
            .collect();
        assert_eq!(left_out.len(), 1, "{report}");
        assert_has(left_out[0], &[not_run]);
    }
}

/// The judge sees what is wrong: here a job that goes on as if nothing had been, because nothing was.
#[test]
fn a_state_that_is_not_reached_is_no_success() {
    let folder = folder("shutdown_wrong");
    let mut command = matrix(&["--only", "source/idle/killed/go-on"]);
    // No rank accepts it, so none comes into its state.
    let ended = run(command.env("PP_STUCK_MS", "1"), None);
    let said = String::from_utf8_lossy(&ended.stdout).into_owned();
    assert_eq!(ended.code, Some(1), "{said}");
    assert_has(&said, &["the state was not reached", "PP_STUCK_MS"]);
    assert_eq!(folder.names(), Vec::<String>::new());
}

#[test]
fn an_interrupt_ends_the_ranks_and_removes_their_folder() {
    let folder = folder("shutdown_interrupted");
    for (asking, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        let mut command = matrix(&["--only", "queued/stopped/go-on"]);
        // The sockets for viewers lie elsewhere.
        command.env("XDG_RUNTIME_DIR", env!("CARGO_TARGET_TMPDIR"));
        let child = spawn(command.env("TMPDIR", folder.file("")));
        let deadline = Instant::now() + Duration::from_secs(60);
        let ranks = loop {
            // Four cells of two ranks, two of which have a supervisor.
            let ranks = children(child.id());
            if ranks.len() >= 4 {
                break ranks;
            }
            assert!(Instant::now() < deadline, "no ranks");
            std::thread::sleep(Duration::from_millis(2));
        };
        signal(child.id(), asking);
        finish(child).ended(code, &["interrupted"]);
        assert_eq!(folder.names(), Vec::<String>::new());
        let alive: Vec<_> = ranks.into_iter().filter(|pid| is_alive(*pid)).collect();
        assert_eq!(alive, Vec::<u32>::new());
    }
}

#[test]
fn cells_are_named_and_chosen() {
    let listed = |args: &[&str]| {
        let mut command = pp(&["shutdown", "--list"]);
        let output = command.args(args).output().unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stdout).unwrap().lines().count(),
        )
    };
    // Five states on shared memory, one more on NCCL; a peer that computes is met by no "go on".
    let (supervised, chain) = (14, 3 * 3 * 3);
    let more = supervised + chain;
    assert_eq!(listed(&[]), (Some(0), 2 * 5 * (3 * 5 - 1) + more));
    // There a rank that connects is also lost with --restarts.
    let nccl = ["--transport", "nccl"];
    assert_eq!(listed(&nccl), (Some(0), 2 * 6 * (3 * 5 - 1) + more + 1));
    assert_eq!(listed(&["--only", "stage/send/killed/"]), (Some(0), 3));
    assert_eq!(listed(&["--only", "nonsense"]), (Some(2), 0));
    let range = "--jobs 65: it takes a whole number from 1 to 64";
    run(&mut pp(&["shutdown", "--jobs", "65"]), None).failed(2, &[range]);
    // What cannot be run here says so.
    let list = pp(&["shutdown", "--list"]).output().unwrap().stdout;
    let list = String::from_utf8(list).unwrap();
    let not_run = list.lines().filter(|line| line.contains("not run: "));
    assert_eq!(not_run.filter(|line| line.contains("/cut/")).count(), 30);
}
