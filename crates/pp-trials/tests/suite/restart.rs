//! A job that may start a rank again, whose ranks end by themselves.

use std::process::Command;
use std::time::{Duration, Instant};

use pp_fakes::Fakes;
use pp_testing::assert_has;
use pp_testing::process::{Ended, Output, Process, run};
use pp_testing::video;

use crate::common::{folder, pp, runs_all};

/// A command that reads and writes a video through this process.
fn through(more: &[&str]) -> Command {
    let mut command = pp(&["run", "--input", "-", "--output", "-"]);
    command.args(["--frames-per-chunk", "2", "--transport", "host"]);
    command.args(["--denoise-steps", "2"]).args(more);
    command
}

fn clip() -> Vec<u8> {
    video(64, 48, "mono", 400)
}

/// As a plugin does it that calls `exit`: the process of the stage ends well, long before its time. Or a
/// library of ours panics.
#[test]
fn a_rank_that_ends_without_a_word_is_missed() {
    let wanted = run(&mut through(&[]), Some(clip())).succeeded().stdout;
    // The first 16 chunks warm up: a restart among them leaves the measures what they are.
    for (restarts, hook, is_measured) in [
        ("2", "leave@1:chunk=50", true),
        ("1", "leave@1:chunk=0", false),
        ("1", "panic@1", false),
        ("3", "kill@1:chunk=2", false),
    ] {
        let mut command = through(&["--restarts", restarts]);
        command.env("PP_FAULT", hook);
        let ended = run(&mut command, Some(clip())).succeeded();
        assert!(ended.stdout == wanted, "the output is another");
        assert_has(&ended.stderr, &["1 of "]);
        let spans = ended.stderr.contains("span a restart");
        assert_eq!(spans, is_measured, "{}", ended.stderr);
        // Said when it happens, and not only at the end.
        let why = match hook.split('@').next() {
            Some("leave") => "ended with exit code 0",
            Some("kill") => "killed by signal 9 (SIGKILL)",
            _ => "asked for by PP_FAULT",
        };
        let mut lines = ended.stderr.lines();
        let line = lines.find(|line| line.starts_with("pp: rank 1 is gone: "));
        let line = line.unwrap_or_else(|| panic!("{}", ended.stderr));
        // Rank 0 may notice the end first, and then it says why; and what a rank reports of its panic is read by another
        // thread than its end.
        let whys = [why, "its control channel ended", "ended with exit code 1"];
        assert!(whys.iter().any(|why| line.contains(why)), "{line}");
        assert!(
            line.ends_with(&format!("; restart 1 of {restarts}")),
            "{line}"
        );
    }
}

/// Its peer may be quicker to say that it died than it is to say why.
#[test]
fn a_panic_is_named_by_the_rank_that_panicked() {
    for (rank, restarts) in [("0", "0"), ("0", "1"), ("1", "0")] {
        let mut command = through(&["--restarts", restarts]);
        command.env("PP_FAULT", format!("panic@{rank}:chunk=3"));
        let ended = run(&mut command, Some(clip())).ended(1, &[]);
        let last = ended.stderr.lines().last().unwrap_or_default();
        assert_has(last, &["pp: error", &format!("rank {rank}"), "panicked: "]);
    }
}

#[test]
fn each_kill_is_made_up_for_and_timed_beside_a_bare_start_and_rank_0_does_not_grow() {
    // The others take minutes.
    let (kills, transports) = match runs_all() {
        true => (200, &["host", "p2p", "nccl"][..]),
        false => (4, &["host"][..]),
    };
    for transport in transports {
        let folder = folder(&format!("kills_{transport}"));
        let mut command = pp(&["kills", "--starts", "3", "--json", "--transport", transport]);
        command.args(["--kills", &kills.to_string()]);
        if *transport != "host" {
            Fakes::newest().give_to(&mut command);
            command.env("PP_FAKE_NCCL_DIR", folder.file(""));
        }
        let job = Process::start(&mut command, Output::Kept).unwrap();
        job.ends(Instant::now() + Duration::from_secs(1800));
        let report = Ended::of(&job).succeeded().json();
        let times = ["back_in_service", "bare_start"].map(|key| &report[key]);
        assert_eq!(times.map(|times| &times["count"]), [kills, 3], "{report}");
        for times in times {
            let ms = |key: &str| times[key].as_f64().unwrap();
            assert!(0.0 < ms("median_ms") && ms("median_ms") <= ms("worst_ms"));
        }
        let median = |at: usize| times[at]["median_ms"].as_f64().unwrap();
        let over = report["over_median_ms"].as_f64().unwrap();
        assert!((over - (median(0) - median(1))).abs() < 1e-6, "{report}");
    }
}
