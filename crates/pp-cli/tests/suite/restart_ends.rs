//! How a job that may start a rank again ends all the same: with rank 0 stopped, by interrupts, by
//! a plugin that ends its process; and what it says meanwhile.

use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;
use std::time::{Duration, Instant};

use pp_testing::{
    process::{
        Ended, HANG, Held, KILL, Output, Process, all_gone, as_rank, children, finish, free_port,
        is_alive, ranks, run, signal, spawn,
    },
    video, words,
};
use rustix::process::Signal;

use crate::common::pp;
use crate::restart_support::host;

/// How long another rank 1 is waited for: who waits for one that does not come hangs.
const WITHIN_MS: &str = "3600000";

fn through(more: &[&str]) -> Command {
    let mut command = host(more);
    command.env("PP_RESTART_WITHIN_MS", WITHIN_MS);
    command
}

fn clip() -> Vec<u8> {
    video(64, 48, "mono", 400)
}

/// The silence of a member of a group tells, although the leader waits for it in a collective.
#[test]
fn a_stopped_rank_that_may_not_be_replaced_ends_the_job_by_its_name() {
    let group = ["--pipeline", "encode@0,phase_b@1+2,decode@0"];
    for (args, rank) in [(["--restarts", "3"], 0), (group, 2)] {
        let mut command = through(&args);
        command.env("PP_HEARTBEAT_MS", "1000");
        let held = Held::start(&mut command, clip());
        held.wait_for(60_000);
        let ranks = children(held.id());
        signal(held.rank(rank), Signal::STOP);
        let words = ["timed out", &format!("rank {rank}: heartbeat")];
        held.finish().ended(9, &words);
        all_gone(&ranks);
    }
}

/// No process notices that rank 0 is stopped, so nothing but the interrupt ends the job.
#[test]
fn a_second_interrupt_ends_a_job_whose_ranks_are_stopped() {
    for (restarts, is_killed) in [("0", false), ("3", false), ("3", true)] {
        let mut command = through(&["--restarts", restarts]);
        command.env("PP_HEARTBEAT_MS", "0");
        let mut held = Held::start(&mut command, clip());
        held.wait_for(60_000);
        let ranks = [held.rank(0), held.rank(1)];
        signal(ranks[0], Signal::STOP);
        if is_killed {
            held.strike(KILL);
            all_gone(&ranks[1..]);
        } else {
            signal(ranks[1], Signal::STOP);
        }
        held.aborted().ended(130, &["second interrupt"]);
        all_gone(&ranks);
    }
}

/// A rank that takes no signals yet would die of it, and so would a supervisor.
#[test]
fn asking_for_recordings_during_the_start_ends_no_rank() {
    for _ in 0..5 {
        let held = Held::start(&mut through(&["--restarts", "9"]), clip());
        let supervisor = held.id();
        // Its own start is not of interest: it takes signals once it has a rank.
        let hung = Instant::now() + HANG;
        while children(supervisor).is_empty() {
            assert!(Instant::now() < hung, "it starts no rank");
            std::thread::sleep(Duration::from_micros(500));
        }
        let until = Instant::now() + Duration::from_millis(300);
        while Instant::now() < until {
            signal(supervisor, Signal::USR1);
            std::thread::sleep(Duration::from_micros(500));
        }
        held.wait_for(1);
        let ended = held
            .finish()
            .ended(0, &["rank 0: flight", "rank 1: flight"]);
        assert!(!ended.stderr.contains(" times"), "{}", ended.stderr);
    }
}

/// A rank that could read what the others report would take the reports away from the supervisor.
#[test]
fn ranks_have_one_end_of_the_pipe_on_which_they_report() {
    let held = Held::start(&mut through(&[]), clip());
    held.wait_for(60_000);
    for rank in [0, 1] {
        let pid = held.rank(rank);
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
        let environment = String::from_utf8_lossy(&environment).into_owned();
        let number = environment
            .split('\0')
            .find_map(|entry| entry.strip_prefix("PP_REPORT_FD="))
            .unwrap();
        let folder = format!("/proc/{pid}/fd");
        let pipe = std::fs::read_link(format!("{folder}/{number}")).unwrap();
        let ends = std::fs::read_dir(&folder).unwrap().flatten();
        let ends = ends.filter(|fd| std::fs::read_link(fd.path()).is_ok_and(|to| to == pipe));
        // The mode of the link says what the descriptor is open for.
        let modes = ends.map(|fd| std::fs::symlink_metadata(fd.path()).unwrap().mode() & 0o700);
        assert!(
            modes.eq([0o300; 2]),
            "rank {rank}: the inherited one, and the rank's own"
        );
    }
    assert_eq!(held.finish().code, Some(0));
}

#[test]
fn a_time_that_cannot_be_none_is_not_offered() {
    let mut command = through(&["--restarts", "1"]);
    command.env("PP_RESTART_WITHIN_MS", "0");
    let ended = run(&mut command, Some(Vec::new())).failed(2, &["from 100 to"]);
    assert!(!ended.stderr.contains("for none"), "{}", ended.stderr);
}

/// The ranks start as under a launcher: only rank 0 can say that it waits.
#[test]
fn a_rank_0_that_waits_says_so_and_ends_at_a_second_interrupt() {
    let port = free_port();
    let start = |rank| as_rank(through(&["--restarts", "2"]), rank, port);
    let held = Held::start(&mut start(0), clip());
    let mut rank_1 = spawn(&mut start(1));
    held.wait_for(60_000);
    rank_1.kill().unwrap();
    finish(rank_1);
    held.wait_until_it_says("rank 1 is gone");
    let rank_0 = held.id();
    signal(rank_0, Signal::INT);
    std::thread::sleep(Duration::from_millis(500));
    assert!(is_alive(rank_0), "the first interrupt waits for rank 1");
    held.aborted()
        .ended(130, &["up to 3600 s", "second interrupt"]);
}

/// The reader of the output is slow, and rank 1 dies when its last result is at rank 0.
#[test]
fn a_rank_that_is_needed_no_more_may_die() {
    const FRAMES: usize = 400;
    const STRIDE: usize = 6 + 64 * 48;
    let whole = clip();
    let args =
        "run --denoise-steps 0 --input - --output - --depth 64 --frames-per-chunk 4 --chunks 20";
    for restarts in ["0", "1"] {
        let mut command = pp(&words(&format!("{args} --restarts {restarts}")));
        let child = Process::start(command.env("PP_LOG", "debug"), Output::Kept).unwrap();
        // Without the rest no rank ends.
        let (first, rest) = whole.split_at(10 * STRIDE);
        let (first, rest) = (first.to_vec(), rest.to_vec());
        child.give(false, move |pipe| pipe.write_all(&first));
        let rank_1 = ranks(child.id())[1];
        child.give(true, move |pipe| pipe.write_all(&rest));
        let said = child.says(
            &["rank 0", "nothing more is needed of other ranks"],
            Instant::now() + HANG,
        );
        assert!(said.is_some(), "it ended");
        signal(rank_1, Signal::KILL);
        all_gone(&[rank_1]);
        let ended = Ended::of(&child);
        let told = &ended.stderr;
        assert_eq!(ended.code, Some(0), "{told}");
        assert!(!told.contains("starts again"), "{told}");
        let header = whole.len() - FRAMES * STRIDE;
        assert!(ended.stdout == whole[..header + 80 * STRIDE], "{told}");
    }
}
