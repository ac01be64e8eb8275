//! Commands of tests, with a guard against hangs.

use std::ffi::OsStr;
use std::io::Write as _;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{HANG, Output, Process};
use crate::assert_has;

/// A program of this project. Its recordings go to a folder below `folder`.
pub fn program<S: AsRef<OsStr>>(program: &str, folder: &str, args: &[S]) -> Command {
    let mut command = Command::new(program);
    command.args(args).env_remove("PP_LOG");
    // Not among the files of the user who runs the tests, and not where tests look for leftovers.
    command.env("PP_FLIGHT_DIR", Path::new(folder).join("flight"));
    // Tests run side by side on few cores: a rank that gets none for a while is not silent.
    command.env("PP_HEARTBEAT_MS", "3000");
    heed_signals(&mut command);
    command
}

/// Gives the signals that tests send their default effect: a test run in the background of a shell ignores SIGINT, and
/// what it starts would, too.
fn heed_signals(command: &mut Command) {
    let heed = || {
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
            // SAFETY: the call changes nothing but a disposition, and may be made between fork and exec.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        Ok(())
    };
    // SAFETY: the closure makes system calls only, allocates nothing and takes no lock.
    unsafe { command.pre_exec(heed) };
}

/// The command, started by a shell with these words before it: `ulimit -n 10`, `trap '' INT`.
pub fn after(shell_words: &str, command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{shell_words}; exec \"$0\" \"$@\"")]);
    shell.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    if let Some(folder) = command.get_current_dir() {
        shell.current_dir(folder);
    }
    heed_signals(&mut shell);
    shell
}

/// The command as a rank that a launcher starts.
pub fn as_rank(mut command: Command, rank: u32, port: u16) -> Command {
    let (rank, port) = (rank.to_string(), port.to_string());
    command
        .envs([
            ("RANK", &rank),
            ("LOCAL_RANK", &rank),
            ("MASTER_PORT", &port),
        ])
        .envs([("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")])
        .env("PP_JOB_SECRET", "a secret of more than sixteen bytes");
    command
}

/// A TCP port that is free.
pub fn free_port() -> u16 {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    socket.local_addr().unwrap().port()
}

/// How a command ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit code; `None` where a signal ended it.
    pub code: Option<i32>,
    /// What it wrote.
    pub stdout: Vec<u8>,
    /// What it said.
    pub stderr: String,
}

impl Ended {
    /// Waits for the end of a process, and fails when it hangs: it neither ends nor writes.
    #[track_caller]
    pub fn of(process: &Process) -> Self {
        let ended = loop {
            let written = process.written();
            let ended = process.ends_silent(Instant::now() + HANG);
            if ended.is_some() || process.written() == written {
                break ended;
            }
        };
        let (_, code) = ended.unwrap_or_else(|| panic!("hung: {}", process.log()));
        Self {
            code: (code >= 0).then_some(code),
            stdout: process.take_output(),
            stderr: process.log(),
        }
    }

    /// It did what it was to do.
    #[track_caller]
    pub fn succeeded(self) -> Self {
        self.ended(0, &[])
    }

    /// Fails unless it ended with this code and said each of these words.
    #[track_caller]
    pub fn ended(self, code: i32, words: &[&str]) -> Self {
        assert_eq!(self.code, Some(code), "stderr: {}", self.stderr);
        assert_has(&self.stderr, words);
        self
    }

    /// The text that it wrote.
    #[track_caller]
    pub fn text(&self) -> String {
        String::from_utf8(self.stdout.clone()).unwrap()
    }

    /// The JSON value that it wrote.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}", self.stderr))
    }

    /// This code, and one line that says why, with these words in it; beside it nothing but notes.
    #[track_caller]
    pub fn failed(self, code: i32, words: &[&str]) -> Self {
        assert_eq!(self.code, Some(code), "stderr: {}", self.stderr);
        let notes: fn(&&str) -> bool = |line| line.starts_with("pp: ") && !line.contains("error");
        let lines: Vec<_> = self.stderr.lines().filter(|line| !notes(line)).collect();
        assert_eq!(lines.len(), 1, "one line: {}", self.stderr);
        assert_has(lines[0], words);
        self
    }
}

/// Starts a command without input whose output is piped.
pub fn spawn(command: &mut Command) -> Child {
    spawn_with(command, Stdio::null())
}

/// Starts a command whose input and output are piped.
pub fn spawn_with_input(command: &mut Command) -> Child {
    spawn_with(command, Stdio::piped())
}

fn spawn_with(command: &mut Command, stdin: Stdio) -> Child {
    let command = command.stdin(stdin).stdout(Stdio::piped());
    command.stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs to the end with this standard input.
#[track_caller]
pub fn run(command: &mut Command, input: Option<Vec<u8>>) -> Ended {
    let Some(bytes) = input else {
        return finish(spawn(command));
    };
    let process = Process::start(command, Output::Kept).unwrap();
    process.give(true, move |pipe| pipe.write_all(&bytes));
    Ended::of(&process)
}

/// Waits for a child whose output is piped; kills it and fails when it hangs.
#[track_caller]
pub fn finish(child: Child) -> Ended {
    Ended::of(&Process::watch(child, Output::Kept))
}

/// Waits for a child whose output is read elsewhere, or not at all.
#[track_caller]
pub fn wait(child: &mut Child) -> Option<i32> {
    let deadline = Instant::now() + HANG;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            panic!("hung");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
