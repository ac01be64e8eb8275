//! How ranks start, agree, and end together, whichever process is killed and whenever.

use std::process::{Child, Command};
use std::time::Duration;

use pp_testing::{
    Folder,
    process::{all_gone, as_rank, finish, free_port, ranks, run, signal, spawn},
    video, words,
};
use rustix::process::Signal;

use crate::common::{files, folder, pp};

/// With a folder of its own for temporary files: other jobs may run at the same time. The socket for viewers, which a killed
/// process leaves, lies elsewhere.
fn endless(temporary: &Folder) -> Child {
    let mut command = crate::common::endless("1000000", "1");
    command.env("XDG_RUNTIME_DIR", env!("CARGO_TARGET_TMPDIR"));
    spawn(command.env("TMPDIR", temporary.path()))
}

#[test]
fn a_killed_rank_ends_the_job_whenever_it_dies() {
    let temporary = folder("killed_rank");
    for victim in [0, 1] {
        // From before the ranks have met until well into the steady state.
        for after_ms in [0, 1, 3, 10, 30, 100, 400] {
            let child = endless(&temporary);
            let pids = ranks(child.id());
            std::thread::sleep(Duration::from_millis(after_ms));
            signal(pids[victim], Signal::KILL);
            let words = [format!("rank {victim}"), "SIGKILL".into()];
            finish(child).failed(7, &words.each_ref().map(String::as_str));
            all_gone(&pids);
        }
    }
    assert_eq!(temporary.names(), [] as [&str; 0]);
}

#[test]
fn a_killed_supervisor_takes_its_ranks_along() {
    let temporary = folder("killed_supervisor");
    for after_ms in [0, 10, 300] {
        let mut child = endless(&temporary);
        let pids = ranks(child.id());
        std::thread::sleep(Duration::from_millis(after_ms));
        child.kill().unwrap();
        child.wait().unwrap();
        all_gone(&pids);
    }
    assert_eq!(temporary.names(), [] as [&str; 0]);
}

#[test]
fn a_job_ends_well_where_the_end_of_a_child_is_ignored() {
    let program = pp::<&str>(&[]).get_program().to_owned();
    let mut env = Command::new("env");
    env.arg("--ignore-signal=CHLD")
        .arg(program)
        .args(words(BENCH));
    run(&mut env, None).succeeded();
}

/// A rank as a launcher would start it.
fn rank(rank: u32, port: u16, args: &[&str]) -> Command {
    as_rank(pp(args), rank, port)
}

const BENCH: &str = "bench overlap --decode-ms 0.1 --phase-b-ms 0.1 --chunks 50 --json";

#[test]
fn a_rank_that_cannot_load_its_kernels_tells_the_other() {
    let (_folder, input, _) = files("declined", &video(32, 32, "mono", 2));
    for bad in [0, 1] {
        let port = free_port();
        let start = |number: u32| {
            let kernels = if number == bad {
                "/no/such/plugin.so"
            } else {
                "cpu"
            };
            let mut command = rank(number, port, &["run", "--kernels", kernels, "--input"]);
            spawn(command.arg(&input))
        };
        let (rank_1, rank_0) = (start(1), start(0));
        let blamed = format!("rank {bad}");
        for ended in [finish(rank_0), finish(rank_1)] {
            ended.failed(5, &["/no/such/plugin.so", &blamed]);
        }
    }
}

#[test]
fn a_rank_without_the_secret_gets_no_seat() {
    let port = free_port();
    let mut rank_1 = rank(1, port, &words(BENCH));
    rank_1.env_remove("PP_JOB_SECRET");
    run(&mut rank_1, None).failed(2, &["PP_JOB_SECRET"]);
}

#[test]
fn a_world_of_another_size_is_refused() {
    let mut rank_0 = rank(0, free_port(), &words(BENCH));
    rank_0.env("WORLD_SIZE", "3");
    run(&mut rank_0, None).failed(2, &["3 ranks"]);
    // Nothing else need be there.
    rank_0.env("WORLD_SIZE", "1");
    rank_0.env_remove("PP_JOB_SECRET").env_remove("MASTER_ADDR");
    let words = [
        "1 rank,",
        "or unset RANK and WORLD_SIZE",
        "to let pp start its own ranks",
    ];
    run(&mut rank_0, None).failed(2, &words);
}

#[test]
fn an_unknown_way_to_meet_is_refused_without_a_launcher_too() {
    let mut job = pp(&words(BENCH));
    job.env("PP_RENDEZVOUS", "udp");
    run(&mut job, None).failed(2, &["PP_RENDEZVOUS=\"udp\"", "auto, unix or tcp"]);
}

/// As in a program that a rank has started.
#[test]
fn a_supervisor_that_did_not_start_the_process_is_named() {
    let mut command = pp(&["run", "--input", "-"]);
    command.env("PP_SUPERVISOR_PID", "1");
    run(&mut command, None).failed(2, &["PP_SUPERVISOR_PID", "unset"]);
}

#[test]
fn half_an_environment_is_named() {
    let mut rank_0 = rank(0, free_port(), &words(BENCH));
    rank_0.env_remove("WORLD_SIZE");
    run(&mut rank_0, None).failed(2, &["WORLD_SIZE"]);
}

#[test]
fn what_pp_does_not_know_in_its_environment_is_said() {
    let args = ["bench", "link", "--max-bytes", "4096"];
    let mut command = pp(&args);
    command.env("PP_LOGG", "debug").env("PP_TEST_OTHER", "1");
    let ended = run(&mut command, None).succeeded();
    let notes = ended.stderr.lines().filter(|line| line.contains("note"));
    let notes: Vec<_> = notes.collect();
    assert_eq!(notes.len(), 1, "{}", ended.stderr);
    assert!(
        notes[0].starts_with("pp: note: PP_LOGG is not a variable"),
        "{}",
        notes[0]
    );

    for wrong in ["bogus", "pp_runtime", "info,bogus", "pp_runtime=loud"] {
        let mut command = pp(&args);
        let ended = run(command.env("PP_LOG", wrong), None);
        ended.failed(2, &["PP_LOG", wrong, "debug"]);
    }
}

#[test]
fn the_log_names_the_process_of_each_line_and_tells_the_life_of_a_job() {
    let mut command = pp(&["bench", "link", "--max-bytes", "4096"]);
    let ended = run(command.env("PP_LOG", "info"), None).succeeded();
    let mut events = Vec::new();
    for line in ended
        .stderr
        .lines()
        .filter(|line| !line.starts_with("pp: "))
    {
        let (time, rest) = line.split_once(' ').unwrap();
        assert!(time.ends_with('Z'), "{line}");
        let (who, what) = rest.split_once("INFO").unwrap();
        events.push((who.trim().to_owned(), what.to_owned()));
    }
    for (who, what) in [
        ("supervisor", "a rank starts rank=1"),
        ("supervisor", "the job ends"),
        ("rank 0", "the rank starts"),
        ("rank 1", "the ranks are connected"),
        ("rank 0", "the ranks are connected"),
        ("rank 1", "the rank ends"),
    ] {
        let is_it = |(by, said): &(String, String)| by == who && said.contains(what);
        assert!(events.iter().any(is_it), "{who}: {what}: {}", ended.stderr);
    }
}
