//! `pp run --restarts`: rank 1 dies, falls silent or is stopped, and the output is the same, bit for
//! bit.

use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use pp_fakes::Fakes;
use pp_fakes::check::{Expect, Fresh, Recording, check};
use pp_testing::{
    Folder, Random, assert_has,
    process::{
        Held, KILL, Strike, all_gone, as_rank, children, finish, free_port, run, signal, spawn,
    },
    scenes, video, words,
};
use rustix::process::Signal;

use crate::build::{compile_c_file, median, root, rust_plugin};
use crate::common::{files, folder, pp};
use crate::restart_support::{host, kills, report, through};

/// What its supervisor knows of a rank that was killed, and rank 0 does not.
const KILLED: &str = "killed by signal 9 (SIGKILL)";

/// The clip through an undisturbed run.
fn calm(mut command: Command, input: &[u8]) -> Vec<u8> {
    run(&mut command, Some(input.to_vec())).succeeded().stdout
}

/// Strikes ranks of a run, and holds its output against that of a calm one.
#[track_caller]
fn assert_unmoved(mut command: Command, input: &[u8], wanted: &[u8], strikes: &[Strike]) {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let folder = folder(&format!(
        "unmoved_{}",
        COUNT.fetch_add(1, Ordering::Relaxed)
    ));
    let json = folder.file("report.json");
    command.args(["--restarts", "100", "--report"]).arg(&json);
    command.env("PP_LOG", "warn");
    let mut held = Held::start(&mut command, input.to_vec());
    strikes.iter().for_each(|strike| held.strike(*strike));
    let ranks = children(held.id());
    let ended = held.finish().succeeded();
    all_gone(&ranks);
    assert!(
        ended.stdout == wanted,
        "the output is another: {}",
        ended.stderr
    );
    let report = report(&json);
    let used = report["restarts"].as_u64().unwrap();
    let is_any = |is: fn(&Strike) -> bool| strikes.iter().any(is);
    // One that is struck before the ranks have met costs no restart.
    let most = strikes.len() as u64;
    let may_be = match is_any(|strike| strike.at == 0) {
        true => 0..=most,
        // A stopped process is replaced once more, and so is one that gets no core for long.
        false if is_any(|strike| strike.signal == Signal::STOP) => most.min(2)..=100,
        false => 1..=most,
    };
    assert!(may_be.contains(&used), "{report}");
    let is_struck = |cause: &str| {
        let is_it = |strike: &Strike| cause.contains(&format!("rank {}", strike.rank));
        strikes.iter().any(is_it)
    };
    let are_kills = !is_any(|strike| strike.signal != Signal::KILL);
    for recovery in report["recoveries"].as_array().unwrap() {
        let cause = recovery["cause"].as_str().unwrap();
        assert!(is_struck(cause), "{report}");
        assert!(!are_kills || cause.contains(KILLED), "{cause}");
    }
    let is_gone = |line: &&str| line.starts_with("pp: rank") && line.contains(" is gone");
    for line in ended.stderr.lines().filter(is_gone).filter(|_| are_kills) {
        assert!(line.contains(KILLED), "{line}");
    }
    let logged = ended.stderr.matches(" starts again").count();
    let said = ended.stderr.matches("; restart ").count();
    assert!(logged == said && said >= used as usize, "{}", ended.stderr);
}

#[test]
fn ranks_killed_at_random_moments_leave_the_output_unchanged() {
    let (plain, cut) = (video(64, 48, "mono", 120), scenes(64, 48, "mono", 120, 40));
    let (median, temporal) = (median(), rust_plugin("pp-plugin-temporal"));
    let [median, temporal] = [median, temporal].map(|path| format!("--kernels {}", path.display()));
    // The leader of a group, and another member.
    let groups = ["1+2", "2+1"]
        .map(|ranks| format!("--recompute --pipeline encode@0,phase_b@{ranks},decode@0"));
    let variants = [
        ("", &plain),
        ("--recompute", &plain),
        (&groups[0], &cut),
        (&groups[1], &cut),
        ("--pipeline encode@0,(phase_b@1)*2,decode@0", &cut),
        ("--cuts flush", &cut),
        (
            &format!("{temporal} --pipeline encode@0,average@1,decode@0"),
            &cut,
        ),
        (&median, &plain),
    ];
    let mut random = Random::new(7);
    for (args, input) in variants {
        let args = words(args);
        let wanted = calm(host(&args), input);
        assert!(wanted != *input, "{args:?} changes nothing");
        let strikes = kills(&mut random, 3, input.len() as u64 * 3 / 4);
        assert_unmoved(host(&args), input, &wanted, &strikes);
    }
}

#[test]
fn ranks_that_are_lost_while_others_are_being_replaced_are_replaced_too() {
    const TWO: &str = "encode@0,phase_b@1,decode@0";
    const APART: &str = "encode@0,phase_b@1,decode@2";
    const FOUR: &str = "encode@0,phase_b@1,phase_b@2,decode@3";
    let input = video(64, 48, "mono", 80);
    // So early that rank 1 has work left however late a strike comes: nobody takes the output meanwhile.
    let early = input.len() as u64 / 4;
    let kill_at = |rank, at, ms| Strike {
        rank,
        after: Duration::from_millis(ms),
        ..Strike::kill(at)
    };
    let kill = |rank, ms| kill_at(rank, early, ms);
    // Stopped before it can join: it never comes, and after a while another is asked for.
    let stop = |rank| Strike {
        signal: Signal::STOP,
        ..kill(rank, 0)
    };
    let mut rows = vec![
        (TWO, vec![kill(1, 0), stop(1)]),
        // Before they have come up.
        (
            TWO,
            [0, 0, 1, 2, 3, 5, 8, 13].map(|ms| kill(1, ms)).to_vec(),
        ),
        // Rank 0 hears of one loss alone. Of ranks that join while another does not come, none may end because of that.
        (FOUR, vec![kill(1, 0), kill(2, 0)]),
        (FOUR, vec![kill(1, 0), kill(2, 0), stop(1)]),
        (FOUR, vec![kill(1, 0), kill(2, 0), stop(2)]),
    ];
    // While all meet: the sink stands on a rank of its own, and must not end because of the other.
    let starts = [0, 2, 4, 5, 6, 7, 8, 9, 10, 12, 15];
    rows.extend(starts.map(|ms| (APART, vec![kill_at(1, 0, ms)])));
    let wanted = calm(host(&["--pipeline", TWO]), &input);
    for (pipeline, strikes) in rows {
        println!("{pipeline} {strikes:?}");
        let mut command = host(&["--pipeline", pipeline]);
        if strikes.iter().any(|strike| strike.signal == Signal::STOP) {
            command.env("PP_RESTART_WITHIN_MS", "1000");
        }
        assert_unmoved(command, &input, &wanted, &strikes);
    }
}

#[test]
fn a_fault_that_would_happen_again_starts_no_rank_again() {
    let (_folder, input, _) = files("restart_plugin", &video(48, 32, "420jpeg", 9));
    let source = root().join("crates/pp-kernels/tests/plugins/faulty.c");
    let plugin = compile_c_file(&source, &["FAULT_ERROR"]);
    let mut command = pp(&["run", "--restarts", "5", "--kernels"]);
    command.arg(&plugin).arg("--input").arg(&input);
    let ended = run(&mut command, None).failed(5, &["rank 1", "phase_b"]);
    assert!(!ended.stderr.contains("were used"), "{}", ended.stderr);
}

/// The first interrupt comes while there is no rank 1: what is in flight is finished by the next one.
#[test]
fn a_drain_asked_for_between_two_processes_of_a_rank_drains() {
    let input = video(64, 48, "mono", 400);
    let wanted = calm(host(&[]), &input);
    let mut held = Held::start(&mut host(&["--restarts", "3"]), input);
    held.strike(KILL);
    // The next one is held up before it can do anything for rank 0.
    let next = held.rank(1);
    signal(next, Signal::STOP);
    signal(held.id(), Signal::INT);
    // Most of the time rank 0 has heard it by then.
    std::thread::sleep(Duration::from_millis(100));
    signal(next, Signal::CONT);
    let ended = held.drained().ended(130, &["interrupted"]);
    assert!(ended.stdout.len() > 60_000);
    assert!(wanted.starts_with(&ended.stdout), "the output is another");
}

/// A rank as a launcher would start it.
fn rank(rank: u32, port: u16, more: &[&str]) -> Command {
    as_rank(host(more), rank, port)
}

/// The launcher starts one of its ranks again; no process tells rank 0.
#[test]
fn a_launcher_that_starts_a_rank_again_is_waited_for() {
    let input = video(64, 48, "mono", 240);
    let wanted = calm(host(&[]), &input);
    let port = free_port();
    let back = || spawn(&mut rank(1, port, &["--restarts", "5"]));
    let held = Held::start(&mut rank(0, port, &["--restarts", "5"]), input);
    let mut rank_1 = back();
    // Between them lies more than a job writes ahead into a pipe that is not read.
    for at in [40_000, 400_000] {
        held.wait_for(at);
        rank_1.kill().unwrap();
        rank_1.wait().unwrap();
        // A launcher takes its time.
        std::thread::sleep(Duration::from_millis(150));
        rank_1 = back();
    }
    let ended = held.finish().succeeded();
    assert!(ended.stdout == wanted, "the output is another");
    assert_has(&ended.stderr, &["2 of 5 times"]);
    finish(rank_1).succeeded();
}

#[test]
fn sigterm_ends_the_wait_for_a_rank_that_a_launcher_does_not_start_again() {
    left_alone("60000", |rank_0| _ = signal(rank_0, Signal::TERM))
        .ended(143, &["while a lost rank was awaited"]);
}

/// The end of a rank 0 whose launcher starts no other again.
fn left_alone(within_ms: &str, strike: impl FnOnce(u32)) -> pp_testing::process::Ended {
    let port = free_port();
    let mut rank_0 = rank(0, port, &["--restarts", "5"]);
    rank_0.env("PP_RESTART_WITHIN_MS", within_ms);
    let held = Held::start(&mut rank_0, video(64, 48, "mono", 120));
    let mut rank_1 = spawn(&mut rank(1, port, &["--restarts", "5"]));
    held.wait_for(40_000);
    rank_1.kill().unwrap();
    rank_1.wait().unwrap();
    held.wait_until_it_says("rank 1 is gone");
    strike(held.id());
    held.finish()
}

#[test]
fn a_launcher_that_starts_nobody_is_not_waited_for_for_ever() {
    let ended = left_alone("400", |_| ()).ended(7, &[]);
    // Which rank may be started again, that it is waited for, and how that ended.
    assert_eq!(ended.stderr.lines().count(), 3, "{}", ended.stderr);
    assert_has(
        &ended.stderr,
        &[
            "rank 1 may be started again; restarts in all: 5",
            "up to 1 s for rank 1",
            "no other came",
        ],
    );
}

const BETWEEN_GPUS: [&str; 2] = [
    "--transport p2p --kernels ptx",
    "--transport nccl --kernels ptx",
];
/// Rank 1, or rank 0, on the GPU.
const BESIDE_A_CPU: [&str; 2] = ["--devices cpu,cuda:0", "--devices cuda:0,cpu"];

/// On the fakes of two GPUs.
fn on_gpus(fakes: &Fakes, folder: &Folder, way: &str, args: &[&str]) -> Command {
    let mut command = through(&[words(way).as_slice(), args].concat());
    fakes.give_to(&mut command);
    command.env("PP_FAKE_NCCL_DIR", folder.file("meet"));
    std::fs::create_dir_all(folder.file("meet")).unwrap();
    command
}

/// Zero steps: every byte of every payload is in the output. More: whatever was kept at rank 1.
#[test]
fn a_gpu_job_restarted_after_kills_writes_the_same_video() {
    let fakes = Fakes::newest();
    let folder = folder("restart_nccl");
    let input = video(64, 48, "mono", 120);
    let mut random = Random::new(11);
    for (way, steps, count) in [BETWEEN_GPUS, BESIDE_A_CPU]
        .concat()
        .into_iter()
        .flat_map(|way| [(way, "0", 5), (way, "1", 3)])
    {
        let command = || on_gpus(&fakes, &folder, way, &["--denoise-steps", steps]);
        let wanted = match steps {
            "0" => input.clone(),
            _ => calm(command(), &input),
        };
        let strikes = kills(&mut random, count, input.len() as u64 * 3 / 4);
        assert_unmoved(command(), &input, &wanted, &strikes);
    }
}

#[test]
fn on_gpus_a_rank_that_is_stopped_is_replaced() {
    let fakes = Fakes::without_revoke();
    let folder = folder("restart_nccl_stopped");
    let input = video(64, 48, "mono", 80);
    let strike = Strike {
        after: Duration::from_millis(1),
        signal: Signal::STOP,
        ..Strike::kill(input.len() as u64 / 3)
    };
    for way in [BETWEEN_GPUS, BESIDE_A_CPU].concat() {
        let mut command = on_gpus(&fakes, &folder, way, &["--denoise-steps", "0"]);
        command.env("PP_HEARTBEAT_MS", "1000");
        assert_unmoved(command, &input, &input, &[strike]);
    }
}

/// What the survivor did in all its generations was ordered: copies out of slots of the dead ones too.
#[test]
fn on_gpus_what_is_sent_again_is_in_order() {
    let fakes = Fakes::newest();
    let folder = folder("restart_nccl_order");
    let input = video(64, 48, "mono", 60);
    for way in BETWEEN_GPUS {
        let records = folder.file(way);
        std::fs::create_dir_all(&records).unwrap();
        let mut command = on_gpus(&fakes, &folder, way, &["--denoise-steps", "0"]);
        command.env("PP_FAKE_RECORD", &records);
        command.env("PP_FAKE_WATCH", "1");
        let strikes = kills(&mut Random::new(5), 2, input.len() as u64 * 2 / 3);
        assert_unmoved(command, &input, &input, &strikes);
        let recordings = Recording::read_all(&records);
        let report = check(
            &recordings,
            Expect {
                // Each generation makes events, streams and slots of its own.
                warm_up: usize::MAX,
                complete: false,
                fresh: Fresh::WithGaps,
                late_events: 0,
            },
        );
        report.assert_clean();
        // 30 chunks go to rank 1 and back. A kill may find nothing in flight.
        assert!(report.transfers >= 60, "{}", report.transfers);
    }
}

/// MPS tells every client of the GPU that one failed: another process would hear that too.
#[test]
fn under_mps_a_rank_whose_device_fails_ends_the_job() {
    let fakes = Fakes::newest();
    let folder = folder("restart_mps");
    let args = ["--denoise-steps", "0", "--restarts", "2"];
    let mut command = on_gpus(&fakes, &folder, BESIDE_A_CPU[0], &args);
    command.env("PP_FAKE_MPS", "1");
    command.env("PP_FAKE_FAULTS", "cuLaunchKernel:12:719");
    let ended = run(&mut command, Some(video(64, 48, "mono", 60))).ended(12, &[]);
    let told = [
        "shared device: rank ",
        "a client of this GPU failed; MPS reports that to all clients",
    ];
    assert_has(&ended.stderr, &told);
    assert!(!ended.stderr.contains("of 2 times"), "{}", ended.stderr);
}

/// Its GPU fails, it says so and ends; another process has a GPU that does not.
#[test]
fn on_gpus_a_rank_whose_device_fails_is_replaced() {
    let fakes = Fakes::newest();
    let folder = folder("restart_nccl_device");
    let input = video(64, 48, "mono", 60);
    let port = free_port();
    let start = |number| {
        let args = ["--denoise-steps", "0", "--restarts", "2"];
        as_rank(
            on_gpus(&fakes, &folder, BETWEEN_GPUS[0], &args),
            number,
            port,
        )
    };
    let held = Held::start(&mut start(0), input.clone());
    let mut bad = start(1);
    bad.env("PP_FAKE_FAULTS", "cuLaunchKernel:12:719");
    let first = spawn(&mut bad);
    held.wait_for(1);
    finish(first).ended(10, &[]);
    let second = spawn(&mut start(1));
    let ended = held.finish().succeeded();
    assert!(ended.stdout == input, "the output is another");
    assert_has(&ended.stderr, &["1 of 2 times", "device: rank 1"]);
    finish(second).succeeded();
}
