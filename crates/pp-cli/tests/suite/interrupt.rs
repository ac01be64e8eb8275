//! SIGINT, SIGTERM and SIGHUP: a run that is interrupted keeps what it has done, says how much that is, and does not pass
//! for one that is complete.

use std::io::Write as _;
use std::process::Command;
use std::time::{Duration, Instant};

use pp_testing::{
    assert_has,
    process::{
        Ended, HANG, Held, Output, Process, after, all_gone, as_rank, finish, free_port, ranks,
        signal, spawn, spawn_with_input, threads,
    },
    video, words,
};
use rustix::process::Signal;

use crate::common::{files, folder, pp};
use crate::restart_support::report;

const SIGNALS: [(Signal, i32, &str); 3] = [
    (Signal::INT, 130, "SIGINT"),
    (Signal::TERM, 143, "SIGTERM"),
    (Signal::HUP, 129, "SIGHUP"),
];
/// Frames of the clip.
const FRAMES: usize = 400;
/// So much of the output is there when the signal comes; more is in pipes and queues.
const BEGUN: u64 = 30_000;

fn clip() -> Vec<u8> {
    video(64, 48, "mono", FRAMES)
}

fn stride() -> usize {
    6 + 64 * 48
}

fn header(clip: &[u8]) -> usize {
    clip.len() - FRAMES * stride()
}

/// A run whose output the test holds up.
fn held(command: &mut Command) -> Held {
    let held = Held::start(command.env("PP_LOG", "debug"), Vec::new());
    held.wait_for(BEGUN);
    held
}

#[test]
fn what_is_done_is_kept_and_counted_and_the_exit_code_names_the_signal() {
    let folder = folder("interrupted");
    let whole = clip();
    let input = folder.write("in.y4m", &whole);
    let path = folder.file("report.json");
    for (how, code, name) in SIGNALS {
        for ranks in ["1", "2"] {
            let mut command = pp(&words("run --denoise-steps 0 --output - --input"));
            command
                .arg(&input)
                .args(["--ranks", ranks, "--report"])
                .arg(&path);
            let held = held(&mut command);
            signal(held.id(), how);
            held.wait_until_it_says("drain requested");
            let ended = held.finish();
            let written = (ended.stdout.len() - header(&whole)) / stride();
            assert_eq!(ended.code, Some(code), "{}", ended.stderr);
            let lines: Vec<&str> = ended.stderr.lines().collect();
            // Written by a thread that nothing waits for, so that it may come later than others.
            let said = |line: &&str| line.contains("a second signal ends at once");
            let said = lines.iter().find(|line| said(line));
            assert!(
                said.is_some_and(|line| line.starts_with(&format!("pp: {name}: "))),
                "{lines:?}"
            );
            let told =
                format!("pp: interrupted by {name}: {written} of {FRAMES} frames were written");
            assert!(
                lines.iter().any(|line| line.starts_with(&told)),
                "{told} is not in {lines:?}"
            );
            assert!(written < FRAMES && whole.starts_with(&ended.stdout));
            assert_eq!(
                (ended.stdout.len() - header(&whole)) % stride(),
                0,
                "half a frame"
            );
            assert_eq!(report(&path)["interrupted"], true);
        }
    }
}

#[test]
fn a_result_that_is_named_at_the_end_is_named() {
    let folder = folder("interrupted_file");
    let (whole, output) = (clip(), folder.file("out.y4m"));
    let child = Process::start(
        pp(&["run", "--denoise-steps", "0", "--input", "-", "--output"])
            .arg(&output)
            .env("PP_LOG", "debug"),
        Output::Kept,
    );
    let child = child.unwrap();
    // Twenty frames come, and then the source stays open and silent.
    let twenty = whole[..header(&whole) + 20 * stride()].to_vec();
    child.give(false, move |pipe| pipe.write_all(&twenty));
    // The fifth chunk is back at rank 0.
    let is_back = child.says(
        &["receive posted", "chunk_index=4", "peer=1"],
        Instant::now() + HANG,
    );
    assert!(is_back.is_some(), "it ended");
    child.signal(Signal::TERM);
    let ended = Ended::of(&child);
    assert_eq!(ended.code, Some(143));
    let told = ended.stderr;
    assert!(told.contains(": 20 frames were written to"), "{told}");
    assert!(std::fs::read(&output).unwrap() == whole[..header(&whole) + 20 * stride()]);
}

#[test]
fn a_second_signal_aborts_and_leaves_no_output() {
    let (folder, input, output) = files("abort", &video(352, 288, "420jpeg", 8));
    for (first, second, code) in [
        (Signal::INT, Signal::TERM, 130),
        (Signal::TERM, Signal::INT, 143),
    ] {
        // Far more passes than the test has time for.
        let mut command = pp(&["run", "--denoise-steps", "1024", "--input"]);
        command
            .arg(&input)
            .arg("--output")
            .arg(&output)
            .env("PP_LOG", "debug");
        let child = Process::start(&mut command, Output::Kept).unwrap();
        let pids = ranks(child.id());
        for (words, then) in [("message sent", first), ("a second signal", second)] {
            let said = child.says(&[words], Instant::now() + HANG);
            assert!(said.is_some(), "it ended");
            child.signal(then);
        }
        let ended = Ended::of(&child);
        assert_eq!(ended.code, Some(code));
        let told = ended.stderr;
        assert!(told.contains("error: interrupted"), "{told}");
        all_gone(&pids);
        assert_eq!(folder.names(), ["in.y4m"]);
    }
}

#[test]
fn a_signal_to_any_rank_of_a_launcher_ends_the_job() {
    let folder = folder("interrupt_launched");
    let whole = clip();
    let input = folder.write("in.y4m", &whole);
    for target in [0, 1] {
        let port = free_port();
        let start = |rank| {
            let mut command = pp(&["run", "--denoise-steps", "0", "--output", "-", "--input"]);
            command.arg(&input);
            as_rank(command, rank, port)
        };
        let rank_1 = spawn(&mut start(1));
        let rank_0 = held(&mut start(0));
        signal([rank_0.id(), rank_1.id()][target], Signal::TERM);
        rank_0.wait_until_it_says("drain requested");
        let rank_0 = rank_0.finish().ended(143, &[]);
        finish(rank_1).ended(143, &[]);
        assert_has(&rank_0.stderr, &["pp: interrupted by SIGTERM: "]);
        assert!(whole.starts_with(&rank_0.stdout) && rank_0.stdout.len() < whole.len());
    }
}

/// Says whether a process takes signals. A handler alone is no sign: what it is to do is noted a moment later.
fn takes_signals(pid: u32) -> bool {
    threads(pid).iter().any(|name| name == "pp-signals")
}

#[test]
fn an_interrupt_before_the_first_chunk_says_so() {
    let folder = folder("too_early");
    for count in ["1", "2"] {
        for (how, code, _) in SIGNALS {
            // Standard input stays open and silent.
            let child = spawn_with_input(
                pp(&["run", "--input", "-", "--ranks", count, "--output"])
                    .arg(folder.file("out.y4m")),
            );
            let deadline = Instant::now() + Duration::from_secs(60);
            let mut pids = vec![child.id()];
            if count == "2" {
                pids.extend(ranks(child.id()));
            }
            while !pids.iter().all(|pid| takes_signals(*pid)) {
                assert!(Instant::now() < deadline, "it never heard signals");
                std::thread::sleep(Duration::from_millis(2));
            }
            signal(child.id(), how);
            finish(child).failed(code, &["interrupted"]);
            assert_eq!(folder.names(), Vec::<String>::new());
        }
    }
}

#[test]
fn a_signal_that_was_ignored_stays_ignored_in_ranks_too() {
    let folder = folder("ignored");
    let whole = clip();
    let input = folder.write("in.y4m", &whole);
    for (how, _, name) in [SIGNALS[0], SIGNALS[2]] {
        let mut command = pp(&["run", "--denoise-steps", "0", "--output", "-", "--input"]);
        command.arg(&input);
        let held = held(&mut after(&format!("trap '' {}", &name[3..]), &command));
        for pid in [&[held.id()][..], &ranks(held.id())].concat() {
            signal(pid, how);
        }
        let ended = held.finish().succeeded();
        assert!(ended.stdout == whole, "{name} was not ignored");
        assert!(!ended.stderr.contains("interrupted"), "{}", ended.stderr);
    }
}
