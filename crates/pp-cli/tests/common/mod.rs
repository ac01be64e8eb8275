//! What the end-to-end tests share: videos made up on the spot, and `pp` with a guard against
//! hangs.

#![allow(dead_code, reason = "each test file uses its part")]

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use pp_testing::Folder;

/// A test that takes this long has hung.
pub(crate) const HANG: Duration = Duration::from_secs(120);

/// The folder of a test.
pub(crate) fn folder(test: &str) -> Folder {
    Folder::new(env!("CARGO_TARGET_TMPDIR"), test)
}

/// A Y4M file: a gradient that moves, with some noise; every byte depends on its place.
pub(crate) fn video(width: usize, height: usize, sampling: &str, frames: usize) -> Vec<u8> {
    let (w2, h2) = (width.div_ceil(2), height.div_ceil(2));
    let chroma = match sampling {
        "mono" => 0,
        "420jpeg" => 2 * w2 * h2,
        "422" => 2 * w2 * height,
        "444" => 2 * width * height,
        other => panic!("no sampling {other}"),
    };
    let mut file = format!("YUV4MPEG2 W{width} H{height} F25:1 Ip A1:1 C{sampling}\n").into_bytes();
    let mut seed = 12345_u32;
    for frame in 0..frames {
        file.extend_from_slice(b"FRAME\n");
        for at in 0..width * height + chroma {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let slope = (at % width) * 3 + at / width + frame * 5;
            file.push((slope as u32 % 200 + (seed >> 27)) as u8);
        }
    }
    file
}

/// `pp` with these arguments.
pub(crate) fn pp<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pp"));
    command.args(args).env_remove("PP_LOG");
    // Not among the files of whoever runs the tests, and not where they look for leftovers.
    let recordings = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("flight");
    command.env("PP_FLIGHT_DIR", recordings);
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

/// The same command, started by a shell with these words before it: `ulimit -n 10`, `trap '' INT`.
pub(crate) fn after(shell_words: &str, command: &Command) -> Command {
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

/// A benchmark that runs until it is ended.
pub(crate) fn endless(bytes: &str, stage_ms: &str) -> Command {
    let mut command = pp(&["bench", "overlap", "--chunks", "10000000"]);
    command.args([
        "--bytes",
        bytes,
        "--decode-ms",
        stage_ms,
        "--phase-b-ms",
        stage_ms,
    ]);
    command
}

/// The command as a rank that a launcher starts.
pub(crate) fn as_rank(mut command: Command, rank: u32, port: u16) -> Command {
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

pub(crate) fn free_port() -> u16 {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    socket.local_addr().unwrap().port()
}

/// Compiles a C library from this text, and from these sources of the repository.
pub(crate) fn c_library(folder: &Folder, text: &str, sources: &[&str]) -> PathBuf {
    let root = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
    let (source, library) = (
        folder.write("library.c", text.as_bytes()),
        folder.file("library.so"),
    );
    let mut compile = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".into()));
    compile
        .args(["-std=gnu11", "-shared", "-fPIC", "-O1", "-o"])
        .arg(&library)
        .arg(source);
    compile
        .arg("-I")
        .arg(root.join("crates/pp-kernels/include"));
    compile.args(sources.iter().map(|source| root.join(source)));
    assert!(compile.status().expect("a C compiler").success());
    library
}

pub(crate) struct Ended {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
}

impl Ended {
    #[track_caller]
    pub(crate) fn succeeded(self) -> Self {
        assert_eq!(self.code, Some(0), "stderr: {}", self.stderr);
        self
    }

    /// This code, and one line that says why, with these words in it; beside it nothing but notes of `pp`.
    #[track_caller]
    pub(crate) fn failed(self, code: i32, words: &[&str]) -> Self {
        assert_eq!(self.code, Some(code), "stderr: {}", self.stderr);
        let notes: fn(&&str) -> bool = |line| line.starts_with("pp: ") && !line.contains("error");
        let lines: Vec<_> = self.stderr.lines().filter(|line| !notes(line)).collect();
        assert_eq!(lines.len(), 1, "one line: {}", self.stderr);
        for word in words {
            assert!(lines[0].contains(word), "{word:?} is not in: {}", lines[0]);
        }
        self
    }

    /// A signal ended it early: this code, and a line that says how many frames there are, and where.
    #[track_caller]
    pub(crate) fn was_interrupted(self, code: i32, words: &[&str]) -> Self {
        assert_eq!(self.code, Some(code), "stderr: {}", self.stderr);
        let mut lines = self.stderr.lines();
        let line = lines.find(|line| line.starts_with("pp: interrupted by "));
        let line = line.unwrap_or_else(|| panic!("{}", self.stderr));
        for word in words {
            assert!(line.contains(word), "{word:?} is not in: {line}");
        }
        self
    }
}

/// Starts a command without input whose output is piped.
pub(crate) fn spawn(command: &mut Command) -> Child {
    spawn_with(command, Stdio::null())
}

/// Starts a command whose input and output are piped.
pub(crate) fn spawn_with_input(command: &mut Command) -> Child {
    spawn_with(command, Stdio::piped())
}

fn spawn_with(command: &mut Command, stdin: Stdio) -> Child {
    let command = command.stdin(stdin).stdout(Stdio::piped());
    command.stderr(Stdio::piped()).spawn().unwrap()
}

/// Runs to the end with this standard input.
pub(crate) fn run(command: &mut Command, input: Option<Vec<u8>>) -> Ended {
    let mut child = match input {
        Some(_) => spawn_with_input(command),
        None => spawn(command),
    };
    if let (Some(bytes), Some(mut pipe)) = (input, child.stdin.take()) {
        std::thread::spawn(move || {
            // Whoever stops reading early has a reason that the test looks at.
            let _ = pipe.write_all(&bytes);
        });
    }
    finish(child)
}

/// Waits for a child whose output is piped; kills it and fails when it hangs.
pub(crate) fn finish(mut child: Child) -> Ended {
    let stdout = child.stdout.take().map(read_all);
    let stderr = child.stderr.take().map(read_all);
    let code = wait(&mut child);
    let text = |thread: Option<std::thread::JoinHandle<Vec<u8>>>| {
        thread.map_or_else(Vec::new, |t| t.join().unwrap())
    };
    Ended {
        code,
        stdout: text(stdout),
        stderr: String::from_utf8_lossy(&text(stderr)).into_owned(),
    }
}

pub(crate) fn wait(child: &mut Child) -> Option<i32> {
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

fn read_all(mut pipe: impl Read + Send + 'static) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        bytes
    })
}

/// The processes that `pid` has started and that still run.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    let lists = tasks
        .into_iter()
        .flatten()
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("children")).ok());
    lists
        .flat_map(|list| {
            list.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        })
        .filter_map(|pid| pid.parse().ok())
        .collect()
}

/// The rank that a process is, from its environment.
pub(crate) fn rank_of(pid: u32) -> Option<u32> {
    let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
    let rank = environment
        .split(|byte| *byte == 0)
        .find_map(|entry| entry.strip_prefix(b"RANK="))?;
    String::from_utf8_lossy(rank).parse().ok()
}

/// Waits until both ranks run, and gives their processes in order of rank.
pub(crate) fn ranks(supervisor: u32) -> [u32; 2] {
    let deadline = Instant::now() + HANG;
    loop {
        let mut found = [None; 2];
        for child in children(supervisor) {
            if let Some(rank) = rank_of(child) {
                found[rank as usize] = Some(child);
            }
        }
        if let [Some(front), Some(back)] = found {
            return [front, back];
        }
        assert!(Instant::now() < deadline, "the ranks never came up");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Waits until a rank is connected and runs: its watch thread is there.
pub(crate) fn wait_until_it_runs(pid: u32) {
    let deadline = Instant::now() + HANG;
    let is_watched = || {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
        let names = tasks
            .into_iter()
            .flatten()
            .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
        names.into_iter().any(|name| name.trim() == "pp-watch")
    };
    while !is_watched() {
        assert!(Instant::now() < deadline, "the rank never ran");
        std::thread::sleep(Duration::from_millis(5));
    }
    // From the start of that thread to the first chunk.
    std::thread::sleep(Duration::from_millis(300));
}

/// True while the process runs (a zombie has ended).
pub(crate) fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ");
    state.is_some_and(|(_, state)| !state.starts_with(['Z', 'X']))
}

#[track_caller]
pub(crate) fn all_gone(pids: &[u32]) {
    let deadline = Instant::now() + HANG;
    while pids.iter().any(|pid| is_alive(*pid)) {
        assert!(Instant::now() < deadline, "a rank lives on");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid.try_into().unwrap()).unwrap();
    let _ = rustix::process::kill_process(pid, signal);
}

/// Interrupts a process until it ends: two signals that come before it has run again are one.
pub(crate) fn abort(child: &mut Child) {
    let deadline = Instant::now() + HANG;
    while child.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "it takes no interrupt");
        signal(child.id(), rustix::process::Signal::INT);
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Names in a folder that belong to `pp`.
pub(crate) fn leftovers() -> Vec<PathBuf> {
    ["/dev/shm", "/tmp"]
        .iter()
        .flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten())
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            path.file_name()
                .is_some_and(|n| n.to_string_lossy().starts_with("pp-"))
        })
        .collect()
}

pub(crate) fn output(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().unwrap()
}

/// Every key of a report stands in the document of the report file.
pub(crate) fn assert_keys_are_documented(value: &serde_json::Value) {
    const DOCUMENT: &str = include_str!("../../../../docs/report.md");
    match value {
        serde_json::Value::Object(object) => {
            for (key, value) in object {
                assert!(
                    DOCUMENT.contains(&format!("`{key}`")),
                    "{key} is not in docs/report.md"
                );
                // Digests have the names of tensors.
                if !["inputs", "outputs"].contains(&key.as_str()) {
                    assert_keys_are_documented(value);
                }
            }
        }
        serde_json::Value::Array(list) => list.iter().for_each(assert_keys_are_documented),
        _ => {}
    }
}
