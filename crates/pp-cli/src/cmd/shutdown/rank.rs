//! One rank as a process of its own: what it says and when, and when it ends.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// The processes that have not ended, until nobody may start any more.
static ALIVE: Mutex<Option<BTreeSet<u32>>> = Mutex::new(Some(BTreeSet::new()));

/// The ranks of ranks end with them; that is waited for no longer than this.
const END_WITHIN: Duration = Duration::from_secs(2);

fn alive() -> MutexGuard<'static, Option<BTreeSet<u32>>> {
    // Each change is one call.
    ALIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends every process that was started here, and keeps others from being started.
pub(super) fn end_all() {
    let all = alive().take().unwrap_or_default();
    for pid in &all {
        if let Some(pid) = Pid::from_raw(*pid as i32) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
    let deadline = Instant::now() + END_WITHIN;
    while !all.iter().all(|pid| super::left::has_ended(*pid)) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A process, and everything seen of it so far.
pub(super) struct Process {
    pid: Pid,
    /// Open until the process has ended or is dropped here.
    input: Arc<Mutex<Option<ChildStdin>>>,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    now: Mutex<Now>,
    changed: Condvar,
    output_bytes: AtomicU64,
}

#[derive(Default)]
struct Now {
    lines: Vec<(Instant, String)>,
    ended: Option<(Instant, ExitStatus)>,
    /// Its standard error is closed: no line follows.
    is_silent: bool,
}

impl Process {
    /// Starts it, with pipes to all sides that are read at all times.
    pub(super) fn start(command: &mut Command) -> std::io::Result<Self> {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = {
            let mut alive = alive();
            let alive = alive.as_mut();
            let alive = alive.ok_or_else(|| std::io::Error::other("interrupted"))?;
            let child = command.spawn()?;
            alive.insert(child.id());
            child
        };
        let seen = Arc::new(Seen::default());
        let pid = Pid::from_child(&child);
        let input = Arc::new(Mutex::new(child.stdin.take()));
        if let Some(stderr) = child.stderr.take() {
            let seen = Arc::clone(&seen);
            std::thread::spawn(move || seen.read_lines(stderr));
        }
        if let Some(stdout) = child.stdout.take() {
            let seen = Arc::clone(&seen);
            std::thread::spawn(move || seen.count(stdout));
        }
        {
            let seen = Arc::clone(&seen);
            std::thread::spawn(move || {
                if let Ok(status) = child.wait() {
                    if let Some(alive) = alive().as_mut() {
                        alive.remove(&child.id());
                    }
                    seen.lock().ended = Some((Instant::now(), status));
                    seen.changed.notify_all();
                }
            });
        }
        Ok(Self { pid, input, seen })
    }

    pub(super) fn pid(&self) -> Pid {
        self.pid
    }

    /// Writes its input, on a thread of its own: it may read as late as it likes.
    pub(super) fn give(
        &self,
        and_ends: bool,
        write: impl FnOnce(&mut ChildStdin) -> std::io::Result<()> + Send + 'static,
    ) {
        let input = Arc::clone(&self.input);
        std::thread::spawn(move || {
            let mut input = input.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(pipe) = input.as_mut() {
                // Whoever has ended reads nothing more.
                let _ = write(pipe);
            }
            if and_ends {
                *input = None;
            }
        });
    }

    /// Does nothing to a process that has ended.
    pub(super) fn signal(&self, signal: Signal) {
        let now = self.seen.lock();
        if now.ended.is_none() {
            let _ = kill_process(self.pid, signal);
        }
    }

    /// Bytes it has written to standard output.
    pub(super) fn output_bytes(&self) -> u64 {
        self.seen.output_bytes.load(Ordering::Relaxed)
    }

    /// Waits until it says a line that holds all of these words; when that was.
    pub(super) fn says(&self, words: &[&str], deadline: Instant) -> Option<Instant> {
        let mut found = None;
        self.seen.wait(deadline, |now| {
            found = find(&now.lines, words);
            found.is_some() || now.ended.is_some() && now.is_silent
        });
        found
    }

    /// When and how it ended, if it has.
    pub(super) fn ended(&self) -> Option<(Instant, i32)> {
        let ended = self.seen.lock().ended;
        ended.map(|(at, status)| (at, code(status)))
    }

    /// Whether it ends before the deadline.
    pub(super) fn ends_by(&self, deadline: Instant) -> bool {
        self.seen.wait(deadline, |now| now.ended.is_some());
        self.ended().is_some()
    }

    /// When and how it ends, once its last words were heard.
    pub(super) fn ends(&self, deadline: Instant) -> Option<(Instant, i32)> {
        self.ends_by(deadline);
        let soon = Instant::now() + Duration::from_millis(500);
        self.seen
            .wait(soon, |now| now.is_silent || now.ended.is_none());
        self.ended()
    }

    /// Everything that it said and that is not a record of its log.
    pub(super) fn last_words(&self) -> String {
        let now = self.seen.lock();
        let lines = now.lines.iter().map(|(_, line)| line.as_str());
        let mut words = lines.filter(|line| line.starts_with("pp:") && !line.contains("hook"));
        words.next_back().unwrap_or_default().to_owned()
    }

    /// All of it.
    pub(super) fn log(&self) -> String {
        let now = self.seen.lock();
        let lines = now.lines.iter().map(|(_, line)| line.as_str());
        lines.collect::<Vec<_>>().join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        self.seen
            .wait(Instant::now() + Duration::from_secs(5), |now| {
                now.ended.is_some()
            });
    }
}

impl Seen {
    fn lock(&self) -> MutexGuard<'_, Now> {
        // Each change is one assignment or a push.
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, deadline: Instant, mut is_done: impl FnMut(&Now) -> bool) {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), left, |now| !is_done(now));
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    fn read_lines(&self, stderr: impl Read) {
        let mut stderr = BufReader::new(stderr);
        let mut line = Vec::new();
        while stderr.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            self.lock().lines.push((Instant::now(), text));
            self.changed.notify_all();
            line.clear();
        }
        self.lock().is_silent = true;
        self.changed.notify_all();
    }

    fn count(&self, mut stdout: impl Read) {
        let mut bytes = vec![0; 1 << 16];
        while let Ok(read) = stdout.read(&mut bytes) {
            if read == 0 {
                return;
            }
            self.output_bytes.fetch_add(read as u64, Ordering::Relaxed);
        }
    }
}

fn find(lines: &[(Instant, String)], words: &[&str]) -> Option<Instant> {
    let has_all = |line: &str| words.iter().all(|word| line.contains(word));
    let found = lines.iter().find(|(_, line)| has_all(line));
    found.map(|(at, _)| *at)
}

/// An exit code, or the number of the signal that ended it, below zero.
fn code(status: ExitStatus) -> i32 {
    let signal = status.signal().map(|signal| -signal);
    status.code().or(signal).unwrap_or(-1)
}
