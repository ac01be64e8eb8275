//! Secrets stay where they belong: not in arguments, not in an environment, not in a log, a fault
//! or a flight recording, however much of these is asked for.

use std::process::{Child, Command};

use pp_fakes::Fakes;
use pp_testing::{
    Folder, assert_has,
    process::{all_gone, as_rank, finish, free_port, ranks, signal, spawn, wait_until_it_runs},
    video,
};
use rustix::process::Signal;

use crate::common::{files, folder, pp};

/// What every id of a communicator begins with, on the library of the tests.
const ID: &[u8] = b"pp-fake-nccl-";

fn start(command: &mut Command, folder: &Folder) -> Child {
    spawn(
        command
            .env("PP_LOG", "trace")
            .env("PP_FLIGHT_DIR", folder.file("flight")),
    )
}

fn proc(pid: u32, what: &str) -> Vec<u8> {
    std::fs::read(format!("/proc/{pid}/{what}")).unwrap()
}

fn variable(environment: &[u8], name: &str) -> Option<String> {
    let prefix = format!("{name}=");
    let mut entries = environment.split(|byte| *byte == 0);
    let value = entries.find_map(|entry| entry.strip_prefix(prefix.as_bytes()))?;
    Some(String::from_utf8(value.to_vec()).unwrap())
}

/// Bytes as they are, and as what prints bytes would print them.
fn shapes(secret: &[u8]) -> [Vec<u8>; 3] {
    let list: Vec<String> = secret.iter().map(u8::to_string).collect();
    let hex: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
    [
        secret.to_vec(),
        list.join(", ").into_bytes(),
        hex.into_bytes(),
    ]
}

#[track_caller]
fn assert_absent(secret: &[u8], place: &str, bytes: &[u8]) {
    for shape in shapes(secret) {
        let found = bytes.windows(shape.len()).any(|part| part == shape);
        assert!(!found, "{place} shows a secret");
    }
}

/// Every file that was written for later.
fn recordings(folder: &Folder) -> Vec<Vec<u8>> {
    let files = std::fs::read_dir(folder.file("flight"));
    let files = files.into_iter().flatten();
    files
        .map(|entry| std::fs::read(entry.unwrap().path()).unwrap())
        .collect()
}

#[test]
fn secret_of_a_job_is_in_no_argument_environment_log_or_recording() {
    let folder = folder("secret_of_a_job");
    let args = [
        "bench", "overlap", "--bytes", "4096", "--chunks", "10000000",
    ];
    let child = start(&mut pp(&args), &folder);
    let pids = ranks(child.id());
    wait_until_it_runs(pids[0]);
    let environment = proc(pids[1], "environ");
    assert_eq!(variable(&environment, "PP_JOB_SECRET"), None);
    let file = variable(&environment, "PP_JOB_SECRET_FILE").expect("a file in its place");
    let secret = std::fs::read(&file).unwrap();
    assert_eq!(secret.len(), 64, "of which this test is about");
    for pid in [child.id(), pids[0], pids[1]] {
        for what in ["cmdline", "environ"] {
            assert_absent(&secret, what, &proc(pid, what));
        }
    }
    signal(pids[1], Signal::KILL);
    let ended = finish(child);
    all_gone(&pids);
    assert_eq!(ended.code, Some(7), "{}", ended.stderr);
    assert_has(&ended.stderr, &["joined"]);
    assert_absent(&secret, "the log", ended.stderr.as_bytes());
    for recording in recordings(&folder) {
        assert_absent(&secret, "a flight recording", &recording);
    }
}

/// A rank as a launcher would start it, with this secret.
fn rank(number: u32, port: u16, secret: &str) -> Child {
    let command = pp(&["bench", "overlap", "--chunks", "20", "--json"]);
    spawn(as_rank(command, number, port).env("PP_JOB_SECRET", secret))
}

#[test]
fn rank_with_a_wrong_secret_ends_at_once_and_the_right_one_still_gets_in() {
    let port = free_port();
    let right = "a secret of more than sixteen bytes";
    let rank_0 = rank(0, port, right);
    // Long before the minute that a rank waits for another.
    let wrong = "another secret of many bytes";
    let ended = finish(rank(1, port, wrong));
    assert!(!ended.stderr.contains(wrong));
    ended.failed(6, &["rank 1", "PP_JOB_SECRET", "PP_JOB_ID"]);
    finish(rank(1, port, right)).succeeded();
    finish(rank_0).succeeded();
}

#[test]
fn ids_of_communicators_are_in_no_argument_environment_log_or_recording() {
    let fakes = Fakes::newest();
    let (folder, input, _) = files("secret_ids", &video(64, 64, "mono", 3000));
    let mut command = pp(&["run", "--transport", "nccl", "--kernels", "ptx", "--input"]);
    fakes.give_to(&mut command);
    std::fs::create_dir_all(folder.file("meet")).unwrap();
    command
        .arg(&input)
        .env("PP_FAKE_NCCL_DIR", folder.file("meet"));
    let child = start(&mut command, &folder);
    let pids = ranks(child.id());
    wait_until_it_runs(pids[0]);
    for pid in pids {
        for what in ["cmdline", "environ"] {
            assert_absent(ID, what, &proc(pid, what));
        }
    }
    signal(pids[1], Signal::KILL);
    let ended = finish(child);
    all_gone(&pids);
    assert_has(&ended.stderr, &["joined"]);
    assert_absent(ID, "the log", ended.stderr.as_bytes());
    for recording in recordings(&folder) {
        assert_absent(ID, "a flight recording", &recording);
    }
}
