//! What ranks leave behind when a job ends badly, and what is read in it.

use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use pp_fakes::Fakes;
use pp_testing::{
    Folder, assert_has,
    process::{
        Ended, HANG, as_rank, finish, free_port, ranks, run, signal, spawn, spawn_with_input, wait,
        wait_until_it_runs,
    },
    video, words,
};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::{folder, pp};

/// `pp` that leaves its recordings in the folder.
fn pp_in(folder: &Folder, args: &[&str]) -> Command {
    let mut command = pp(args);
    command.env("PP_FLIGHT_DIR", folder.file("rec"));
    command
}

fn recordings(folder: &Folder) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder.file("rec")).into_iter().flatten();
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// What `pp flight` says of all recordings in the folder.
fn told(folder: &Folder) -> Value {
    told_by(&recordings(folder))
}

/// What it says of these.
fn told_by(recordings: &[PathBuf]) -> Value {
    let mut command = pp(&["flight", "--json"]);
    let ended = run(command.args(recordings), None).succeeded();
    serde_json::from_slice(&ended.stdout).unwrap()
}

/// The line that ends a job, and no other but those of its hook.
#[track_caller]
fn ended_with(mut ended: Ended, code: i32, words: &[&str]) -> String {
    let is_other = |line: &&str| !line.starts_with("pp: fault hook") && line.starts_with("pp: ");
    let lines: Vec<_> = ended.stderr.lines().filter(is_other).collect();
    let text = lines.join("\n");
    ended.stderr.clone_from(&text);
    ended.failed(code, words);
    text
}

/// A run of two ranks over a clip.
fn job(folder: &Folder) -> Command {
    let input = folder.write("in.y4m", &video(48, 32, "420jpeg", 24));
    let args = ["run", "--kernels", "cpu", "--input", text(&input)];
    pp_in(folder, &args)
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn endless(folder: &Folder) -> Child {
    let mut command = pp_in(folder, &["bench", "overlap", "--chunks", "10000000"]);
    spawn(command.args(["--bytes", "100000", "--decode-ms", "1", "--phase-b-ms", "1"]))
}

/// Waits until there are so many recordings.
fn wait_for(folder: &Folder, count: usize) -> Vec<PathBuf> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let files = recordings(folder);
        // One with a dot is being written.
        let is_hidden = |file: &PathBuf| text(file.file_name().unwrap().as_ref()).starts_with('.');
        if files.len() == count && !files.iter().any(is_hidden) {
            return files;
        }
        assert!(Instant::now() < deadline, "{files:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_stage_that_does_not_come_back_is_named_with_its_chunk() {
    let folder = folder("flight_stuck");
    let mut command = job(&folder);
    command
        .env("PP_FAULT", "stall@1:chunk=2:ms=60000")
        .env("PP_STUCK_MS", "1000");
    let words = ["rank 1", "phase_b", "pp flight", text(folder.path())];
    ended_with(run(&mut command, None), 9, &words);
    wait_for(&folder, 2);
    let told = told(&folder);
    let verdict = told["verdict"].as_str().unwrap();
    assert_has(verdict, &["at rank 1", "phase_b", "chunk 2"]);
    assert_eq!(told["disagreement"], Value::Null);
    let because = told["ranks"][0]["written_because"].as_str().unwrap();
    assert!(because.contains("no progress"), "{because}");
}

#[test]
fn of_a_killed_rank_the_other_tells() {
    let folder = folder("flight_killed");
    let child = endless(&folder);
    let pids = ranks(child.id());
    wait_until_it_runs(pids[0]);
    signal(pids[1], Signal::KILL);
    ended_with(finish(child), 7, &["rank 1", "SIGKILL", "rec"]);
    wait_for(&folder, 1);
    assert_eq!(told(&folder)["missing"], serde_json::json!([1]));
}

#[test]
fn a_job_that_is_asked_goes_on_and_its_output_is_the_same() {
    let folder = folder("flight_asked");
    let film = video(48, 32, "420jpeg", 32);
    let job = |output: &Path| {
        let args = words("run --kernels cpu --frames-per-chunk 2 --strength 10");
        let mut command = pp_in(&folder, &args);
        command.args(["--input", "-", "--output", text(output)]);
        command
    };
    let undisturbed = folder.file("undisturbed.y4m");
    run(&mut job(&undisturbed), Some(film.clone())).succeeded();
    assert!(recordings(&folder).is_empty());

    let asked = folder.file("asked.y4m");
    let mut child = spawn_with_input(&mut job(&asked));
    let mut input = child.stdin.take().unwrap();
    // The job cannot end before it has the rest.
    let (first, rest) = film.split_at(film.len() / 2);
    input.write_all(first).unwrap();
    let pids = ranks(child.id());
    pids.iter().for_each(|pid| wait_until_it_runs(*pid));
    let deadline = Instant::now() + Duration::from_secs(60);
    let told = loop {
        // The supervisor passes it on.
        signal(child.id(), Signal::USR1);
        // The next ones may be on their way by now.
        let told = told_by(&wait_for(&folder, 2));
        let ever = |rank: usize| told["ranks"][rank]["operations_ever"].as_u64().unwrap();
        if ever(0) > 0 && ever(1) > 0 {
            break told;
        }
        assert!(Instant::now() < deadline, "{told}");
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!(told["ranks"][0]["written_because"], "asked for");
    let verdict = told["verdict"].as_str().unwrap();
    assert!(
        verdict.starts_with("the job was running when it was asked"),
        "{verdict}"
    );
    assert_eq!(told["disagreement"], Value::Null);
    // A rank takes it by itself as well.
    signal(pids[1], Signal::USR1);
    input.write_all(rest).unwrap();
    drop(input);
    let ended = finish(child).succeeded();
    assert_has(&ended.stderr, &["rank 0: flight recording: "]);
    let same = std::fs::read(undisturbed).unwrap() == std::fs::read(asked).unwrap();
    assert!(same, "asking changed the output");
}

#[test]
fn a_panic_in_a_stage_leaves_its_words() {
    let folder = folder("flight_panic");
    let ended = run(job(&folder).env("PP_FAULT", "panic@1:chunk=1"), None);
    assert_ne!(ended.code, Some(0), "{}", ended.stderr);
    wait_for(&folder, 2);
    let told = told(&folder);
    let verdict = told["verdict"].as_str().unwrap();
    let begins = "rank 1 panicked: asked for by PP_FAULT";
    assert!(verdict.starts_with(begins), "{verdict}");
    let inside = told["ranks"][1]["inside"].as_str().unwrap();
    assert!(inside.starts_with("phase_b"), "{inside}");
}

#[test]
fn a_call_of_nccl_that_does_not_come_back_is_found_in_the_recording() {
    let fakes = Fakes::newest();
    let folder = folder("flight_nccl");
    let input = folder.write("in.y4m", &video(48, 32, "420jpeg", 24));
    std::fs::create_dir_all(folder.file("meet")).unwrap();
    let args = words("run --transport nccl --kernels ptx --denoise-steps 0");
    let mut command = pp_in(&folder, &args);
    fakes.give_to(&mut command);
    command
        .args(["--frames-per-chunk", "2", "--input", text(&input)])
        .env("PP_FAKE_NCCL_DIR", folder.file("meet"))
        .env("PP_FAKE_FAULTS", "ncclRecv:5:hang")
        .env("PP_STUCK_MS", "1000");
    ended_with(run(&mut command, None), 9, &["no progress", "pp flight"]);
    wait_for(&folder, 2);
    let told = told(&folder);
    let verdict = told["verdict"].as_str().unwrap();
    assert_has(verdict, &["inside the call that receives"]);
}

#[test]
fn a_ring_that_has_turned_says_so() {
    const OPERATIONS: u64 = 16;
    let folder = folder("flight_turned");
    let film = video(16, 16, "mono", 300);
    let args = ["run", "--kernels", "cpu", "--denoise-steps", "0"];
    let mut child = spawn_with_input(
        pp_in(&folder, &args)
            .args(["--frames-per-chunk", "1", "--input", "-", "--output", "-"])
            .env("PP_FLIGHT_OPS", OPERATIONS.to_string()),
    );
    let (mut input, mut output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let bytes = film.len();
    let (all_out, is_all_out) = mpsc::channel();
    let reader = std::thread::spawn(move || {
        output.read_exact(&mut vec![0; bytes]).unwrap();
        all_out.send(()).unwrap();
        output
    });
    // The input stays open: once every frame is out, the ranks wait and their rings stand still.
    input.write_all(&film).unwrap();
    is_all_out.recv_timeout(HANG).unwrap();
    let deadline = Instant::now() + HANG;
    loop {
        signal(child.id(), Signal::USR1);
        // The next ones may be on their way by now.
        let told = told_by(&wait_for(&folder, 2));
        let of = |rank: usize, what: &str| told["ranks"][rank][what].as_u64().unwrap();
        // The last operation of a rank may end a moment after the frame that it brought.
        if (0..2).all(|rank| of(rank, "operations") == OPERATIONS) {
            assert!((0..2).all(|rank| of(rank, "operations_ever") >= 300));
            assert_eq!(told["disagreement"], Value::Null, "{told}");
            break;
        }
        assert!(Instant::now() < deadline, "{told}");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(input);
    drop(reader.join().unwrap());
    finish(child).succeeded();
}

#[test]
fn files_that_are_cut_off_or_not_there_or_no_recordings_are_named() {
    let folder = folder("flight_files");
    run(job(&folder).env("PP_FAULT", "panic@1:chunk=1"), None);
    let input = folder.file("in.y4m");
    let file = wait_for(&folder, 2).remove(0);
    let whole = std::fs::read(&file).unwrap();
    let cut = folder.write("cut", &whole[..whole.len() - 7]);
    let mut damaged = whole.clone();
    damaged[40] ^= 4;
    let damaged = folder.write("damaged", &damaged);
    let mut newer = whole;
    newer[8] = 9;
    let newer = folder.write("newer", &newer);
    let missing = folder.file("missing");
    for (bad, words) in [
        (&cut, "cut off"),
        (&damaged, "damaged"),
        (&newer, "version 9"),
        (&input, "no flight recording"),
    ] {
        let mut command = pp(&["flight"]);
        let ended = run(command.arg(&file).arg(bad), None);
        // Who reads a file is no rank.
        ended.failed(3, &["bad input: read recording: ", words, text(bad)]);
    }
    run(pp(&["flight"]).arg(&file).arg(&missing), None).failed(
        4,
        &["i/o: read recording: ", "No such file", text(&missing)],
    );
    let mut twice = pp(&["flight"]);
    run(twice.arg(&file).arg(&file), None).failed(3, &["the same process"]);
}

#[test]
fn nothing_is_recorded_where_nobody_wants_it() {
    let folder = folder("flight_off");
    let mut command = job(&folder);
    command
        .env("PP_FLIGHT_OPS", "0")
        .env("PP_FAULT", "kill@1:chunk=1");
    let line = ended_with(run(&mut command, None), 7, &["SIGKILL"]);
    assert!(!line.contains("pp flight"), "{line}");
    assert!(recordings(&folder).is_empty());
    let mut command = job(&folder);
    run(command.env("PP_FLIGHT_OPS", "many"), None).failed(2, &["PP_FLIGHT_OPS", "many"]);
}

/// Nor does such a fault look for a folder: the default one is not there and cannot be made.
#[test]
fn a_fault_before_the_first_operation_leaves_no_recording_and_gives_no_hint() {
    let folder = folder("flight_early");
    let input = folder.file("missing.y4m");
    let cut = folder.write("cut.y4m", &video(48, 32, "420jpeg", 1)[..200]);
    let temporary = folder.file("temporary");
    for (input, code) in [(&input, 4), (&cut, 3)] {
        let args = ["run", "--kernels", "cpu", "--input", text(input)];
        let ended = run(&mut pp_in(&folder, &args), None).ended(code, &[]);
        assert!(!ended.stderr.contains("pp flight"), "{}", ended.stderr);
        assert_eq!(recordings(&folder), Vec::<PathBuf>::new());
        let mut command = pp(&args);
        command
            .env_remove("PP_FLIGHT_DIR")
            .env("TMPDIR", &temporary);
        let ended = run(&mut command, None);
        assert!(!ended.stderr.contains("recording"), "{}", ended.stderr);
        assert!(!temporary.exists());
    }
}

#[test]
fn the_default_folder_is_not_made_where_its_parent_is_not_there() {
    let folder = folder("flight_parent");
    let temporary = folder.file("temporary");
    let job = || {
        let mut command = job(&folder);
        command
            .env_remove("PP_FLIGHT_DIR")
            .env("TMPDIR", &temporary)
            .env("PP_FAULT", "swapped");
        run(&mut command, None)
    };
    ended_with(job(), 8, &["(no recording: ", text(&temporary)]);
    assert!(!temporary.exists());
    std::fs::create_dir(&temporary).unwrap();
    ended_with(job(), 8, &["pp flight ", text(&temporary)]);
}

#[test]
fn a_recording_is_named_behind_the_fault_and_so_is_why_it_cannot_be_written() {
    let folder = folder("flight_refused");
    let ended_in = |place: &Path, words| {
        let mut command = job(&folder);
        command
            .env("PP_FLIGHT_DIR", place)
            .env("PP_FAULT", "swapped");
        ended_with(run(&mut command, None), 8, &[words])
    };
    let nowhere = Path::new("/dev/null/recordings");
    ended_in(nowhere, "(no recording: /dev/null/recordings");
    // A path with a blank can be called as it stands there.
    let line = ended_in(&folder.file("my rec"), "my rec'/");
    let (_, call) = line.split_once("pp flight ").unwrap();
    let call = format!("\"$0\" flight {}", call.trim_end_matches(')'));
    let mut shell = Command::new("sh");
    let shell = shell.args(["-c", &call, env!("CARGO_BIN_EXE_pp-trials")]);
    let told = run(shell, None).succeeded();
    let told = String::from_utf8(told.stdout).unwrap();
    assert!(told.contains(": peer misbehaved: rank "), "{told}");
}

/// The log of a job's life is written by no thread that the job needs.
#[test]
fn a_log_that_is_not_read_holds_up_no_process() {
    let folder = folder("flight_log");
    let (_from, into) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
    let mut into = std::fs::File::from(into);
    while std::io::Write::write(&mut into, &[b'x'; 4096]).is_ok() {}
    rustix::fs::fcntl_setfl(&into, rustix::fs::OFlags::empty()).unwrap();
    let mut job = pp_in(&folder, &["bench", "overlap", "--chunks", "9"])
        .env("PP_LOG", "info")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(into)
        .spawn()
        .unwrap();
    assert_eq!(wait(&mut job), Some(0));
}

/// The driver logs into a pipe that no program empties, and holds standard error for ever.
#[test]
fn a_standard_error_that_is_stuck_keeps_no_rank_from_ending_nor_from_recording() {
    let folder = folder("flight_stderr");
    let port = free_port();
    let start = |rank| {
        let args = ["bench", "overlap", "--decode-ms", "0", "--phase-b-ms", "0"];
        as_rank(pp_in(&folder, &args), rank, port)
            .args(["--bytes", "64", "--chunks", "10000000"])
            .env("PP_LOG", "debug")
            .env("PP_STUCK_MS", "1000")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut ranks = [1, 0].map(start);
    for rank in &mut ranks {
        // Its standard error is kept open, and not read.
        assert_ne!(wait(rank), Some(0));
    }
    assert_eq!(wait_for(&folder, 2).len(), 2);
}
