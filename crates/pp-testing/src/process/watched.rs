//! A process that is watched: what it says and when, what it writes, and when and how it ends.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::proc::{is_alive, signal};

/// The processes that have not ended, until none may be started any more.
static ALIVE: Mutex<Option<BTreeSet<u32>>> = Mutex::new(Some(BTreeSet::new()));
/// The ranks of a supervisor end with it; that is waited for no longer than this.
const END_WITHIN: Duration = Duration::from_secs(2);

fn alive() -> MutexGuard<'static, Option<BTreeSet<u32>>> {
    // Each change is one call.
    ALIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends every process that was started here, and keeps others from being started.
pub fn end_all() {
    let all = alive().take().unwrap_or_default();
    for pid in &all {
        signal(*pid, Signal::KILL);
    }
    let deadline = Instant::now() + END_WITHIN;
    while all.iter().any(|pid| is_alive(*pid)) && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What becomes of the standard output of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    /// It is read and counted.
    Counted,
    /// It is read and kept.
    Kept,
    /// It is kept, and read as far as [`Process::read_to`] says.
    Held,
}

/// A process, and everything seen of it so far. It is killed when this is dropped.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    /// Open until the process has ended or is dropped here.
    input: Arc<Mutex<Option<ChildStdin>>>,
    /// The thread that writes it: the next one waits for it.
    writer: Mutex<Option<JoinHandle<()>>>,
    seen: Arc<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    now: Mutex<Now>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Now {
    lines: Vec<(Instant, String)>,
    output: Vec<u8>,
    output_bytes: u64,
    /// The output is read as far as this.
    read_to: u64,
    ended: Option<(Instant, ExitStatus)>,
    /// Pipes that are open: no line and no output follows once none is.
    open: u32,
}

impl Process {
    /// Starts it, with pipes to all sides that are read at all times.
    ///
    /// # Errors
    /// It cannot be started, or none may be any more.
    pub fn start(command: &mut Command, output: Output) -> std::io::Result<Self> {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let command = command.stderr(Stdio::piped());
        let child = {
            let mut alive = alive();
            let alive = alive.as_mut();
            let alive = alive.ok_or_else(|| std::io::Error::other("interrupted"))?;
            let child = command.spawn()?;
            alive.insert(child.id());
            child
        };
        Ok(Self::watch(child, output))
    }

    /// Watches a child. Pipes that were taken are none of its business.
    pub fn watch(mut child: Child, output: Output) -> Self {
        let pid = child.id();
        let input = Arc::new(Mutex::new(child.stdin.take()));
        let seen = Arc::new(Seen::default());
        seen.change(|now| {
            now.read_to = if output == Output::Held { 0 } else { u64::MAX };
            now.open = u32::from(child.stdout.is_some()) + u32::from(child.stderr.is_some());
        });
        if let Some(stderr) = child.stderr.take() {
            let seen = Arc::clone(&seen);
            std::thread::spawn(move || {
                seen.read_lines(stderr);
                seen.change(|now| now.open -= 1);
            });
        }
        if let Some(stdout) = child.stdout.take() {
            let seen = Arc::clone(&seen);
            std::thread::spawn(move || {
                seen.read_output(stdout, output != Output::Counted);
                seen.change(|now| now.open -= 1);
            });
        }
        let here = Arc::clone(&seen);
        std::thread::spawn(move || {
            if let Ok(status) = child.wait() {
                if let Some(alive) = alive().as_mut() {
                    alive.remove(&pid);
                }
                here.change(|now| now.ended = Some((Instant::now(), status)));
            }
        });
        Self {
            pid,
            input,
            writer: Mutex::default(),
            seen,
        }
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.pid
    }

    /// Writes its input, on a thread of its own: it may read as late as it likes.
    pub fn give(
        &self,
        and_ends: bool,
        write: impl FnOnce(&mut ChildStdin) -> std::io::Result<()> + Send + 'static,
    ) {
        let input = Arc::clone(&self.input);
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let before = writer.take();
        *writer = Some(std::thread::spawn(move || {
            let _ = before.map(JoinHandle::join);
            let mut input = input.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(pipe) = input.as_mut() {
                // A process that has ended reads nothing more.
                let _ = write(pipe);
            }
            if and_ends {
                *input = None;
            }
        }));
    }

    /// Does nothing to a process that has ended.
    pub fn signal(&self, number: Signal) {
        let now = self.seen.lock();
        if now.ended.is_none() {
            signal(self.pid, number);
        }
    }

    /// Lets an output that is held up be read to this byte.
    pub fn read_to(&self, byte: u64) {
        self.seen.change(|now| now.read_to = now.read_to.max(byte));
    }

    /// Bytes that were read of its standard output.
    pub fn output_bytes(&self) -> u64 {
        self.seen.lock().output_bytes
    }

    /// Waits for so many bytes of its output, or its end; false where neither comes.
    pub fn writes(&self, bytes: u64, deadline: Instant) -> bool {
        self.seen.wait(deadline, |now| {
            now.output_bytes >= bytes || now.ended.is_some()
        })
    }

    /// Counts the bytes of its output so far.
    pub fn written(&self) -> u64 {
        self.seen.lock().output_bytes
    }

    /// Waits until it says a line that holds all of these words; when that was.
    pub fn says(&self, words: &[&str], deadline: Instant) -> Option<Instant> {
        let mut found = None;
        self.seen.wait(deadline, |now| {
            let has_all = |line: &str| words.iter().all(|word| line.contains(word));
            found = now
                .lines
                .iter()
                .find(|(_, line)| has_all(line))
                .map(|(at, _)| *at);
            found.is_some() || now.has_ended()
        });
        found
    }

    /// When and how it ended, if it has: an exit code, or below zero the signal that ended it.
    pub fn ended(&self) -> Option<(Instant, i32)> {
        let ended = self.seen.lock().ended;
        ended.map(|(at, status)| (at, code(status)))
    }

    /// Says whether it ends before the deadline.
    pub fn ends_by(&self, deadline: Instant) -> bool {
        self.seen.wait(deadline, |now| now.ended.is_some())
    }

    /// When and how it ends, once its last words were heard. What it has started may hold its pipes: not waited for.
    pub fn ends(&self, deadline: Instant) -> Option<(Instant, i32)> {
        self.ends_by(deadline);
        let soon = Instant::now() + Duration::from_millis(500);
        self.seen
            .wait(soon, |now| now.open == 0 || now.ended.is_none());
        self.ended()
    }

    /// When and how it ended, once its pipes are closed; `None` where that takes longer.
    pub fn ends_silent(&self, deadline: Instant) -> Option<(Instant, i32)> {
        let is_over = self.seen.wait(deadline, Now::has_ended);
        self.ended().filter(|_| is_over)
    }

    /// Every line that it said, and when.
    pub fn lines(&self) -> Vec<(Instant, String)> {
        self.seen.lock().lines.clone()
    }

    /// Everything that it said.
    pub fn log(&self) -> String {
        let now = self.seen.lock();
        now.lines
            .iter()
            .fold(String::new(), |all, (_, line)| all + line + "\n")
    }

    /// What it wrote and was not taken, where that is kept.
    pub fn take_output(&self) -> Vec<u8> {
        std::mem::take(&mut self.seen.lock().output)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        self.ends_by(Instant::now() + Duration::from_secs(5));
    }
}

impl Now {
    fn has_ended(&self) -> bool {
        self.ended.is_some() && self.open == 0
    }
}

impl Seen {
    fn lock(&self) -> MutexGuard<'_, Now> {
        // Each change is one assignment or a push.
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Now)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// False where the deadline came first.
    fn wait(&self, deadline: Instant, mut is_done: impl FnMut(&Now) -> bool) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), left, |now| !is_done(now));
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn read_lines(&self, stderr: impl Read) {
        let mut stderr = BufReader::new(stderr);
        let mut line = Vec::new();
        while stderr.read_until(b'\n', &mut line).is_ok_and(|n| n > 0) {
            let text = String::from_utf8_lossy(&line).trim_end().to_owned();
            self.change(|now| now.lines.push((Instant::now(), text)));
            line.clear();
        }
    }

    fn read_output(&self, mut stdout: impl Read, is_kept: bool) {
        let mut piece = vec![0; 1 << 16];
        loop {
            let mut room = 0;
            self.wait(Instant::now() + super::HANG, |now| {
                room = now.read_to.saturating_sub(now.output_bytes);
                room > 0
            });
            let most = piece.len().min(usize::try_from(room).unwrap_or(usize::MAX));
            let Ok(read @ 1..) = stdout.read(&mut piece[..most]) else {
                return;
            };
            self.change(|now| {
                now.output_bytes += read as u64;
                if is_kept {
                    now.output.extend_from_slice(&piece[..read]);
                }
            });
        }
    }
}

fn code(status: ExitStatus) -> i32 {
    let signal = status.signal().map(|signal| -signal);
    status.code().or(signal).unwrap_or(-1)
}
