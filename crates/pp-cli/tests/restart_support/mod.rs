//! A run whose Phase B is killed or stopped again and again, at moments that follow from how far it
//! has come.

#![allow(dead_code, reason = "each test file uses its part")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::common::{
    HANG, abort, assert_keys_are_documented, children, is_alive, pp, rank_of, signal,
    spawn_with_input, wait,
};

/// How far the output may run ahead of the next strike.
const AHEAD: u64 = 40_000;

/// What is done to Phase B, and when.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strike {
    /// When so many bytes of the output are there.
    pub(crate) at: u64,
    /// And so long after that.
    pub(crate) after: Duration,
    pub(crate) signal: Signal,
}

/// Death well within the run.
pub(crate) const KILL: Strike = Strike {
    at: 60_000,
    after: Duration::ZERO,
    signal: Signal::KILL,
};

/// A command that reads and writes a video through this process.
pub(crate) fn through(args: &[&str]) -> Command {
    let mut command = pp(&["run", "--input", "-", "--output", "-"]);
    command.args(["--frames-per-chunk", "2"]).args(args);
    command
}

/// The same on shared memory.
pub(crate) fn host(args: &[&str]) -> Command {
    let mut command = through(&["--transport", "host", "--denoise-steps", "2"]);
    command.args(args);
    command
}

/// Numbers that look random and are the same each time.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        // Knuth's generator; the low bits are poor.
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    /// Kills all over an output of so many bytes. Some come while the one before is not made up for.
    pub(crate) fn kills(&mut self, count: u64, bytes: u64) -> Vec<Strike> {
        let mut at: Vec<u64> = (0..count).map(|_| self.below(bytes)).collect();
        at.sort_unstable();
        let kills = at.into_iter().map(|at| Strike {
            at,
            after: Duration::from_micros(self.below(4) * self.below(3000)),
            signal: Signal::KILL,
        });
        kills.collect()
    }
}

/// What a disturbed run came to.
pub(crate) struct Disturbed {
    pub(crate) code: Option<i32>,
    pub(crate) stderr: String,
    pub(crate) output: Vec<u8>,
}

/// A run that reads its video from this process and writes it back here, so that it can be held up.
pub(crate) struct Held {
    pub(crate) child: Child,
    seen: Arc<AtomicU64>,
    gate: Arc<AtomicU64>,
    output: JoinHandle<Vec<u8>>,
    said: Arc<Mutex<Vec<u8>>>,
    errors: JoinHandle<()>,
    struck: Mutex<Vec<u32>>,
    /// The input does not end before this is dropped.
    open: Option<Sender<()>>,
}

impl Held {
    pub(crate) fn start(command: &mut Command, input: Vec<u8>) -> Self {
        let mut child = spawn_with_input(command);
        let mut stdin = child.stdin.take().unwrap();
        let (open, is_closed) = channel::<()>();
        std::thread::spawn(move || {
            // Whoever stops reading early has a reason that the test looks at.
            let _ = stdin.write_all(&input);
            let _ = is_closed.recv();
        });
        let (seen, gate) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let mut stdout = child.stdout.take().unwrap();
        let (count, limit) = (Arc::clone(&seen), Arc::clone(&gate));
        let output = std::thread::spawn(move || {
            let (mut all, mut piece) = (Vec::new(), vec![0; 4096]);
            loop {
                while count.load(Ordering::Acquire) >= limit.load(Ordering::Acquire) {
                    std::thread::sleep(Duration::from_micros(200));
                }
                match stdout.read(&mut piece) {
                    Ok(0) | Err(_) => return all,
                    Ok(n) => all.extend_from_slice(&piece[..n]),
                }
                count.store(all.len() as u64, Ordering::Release);
            }
        });
        let mut stderr = child.stderr.take().unwrap();
        let said = Arc::<Mutex<Vec<u8>>>::default();
        let all = Arc::clone(&said);
        let errors = std::thread::spawn(move || {
            let mut piece = [0; 4096];
            while let Ok(count @ 1..) = stderr.read(&mut piece) {
                all.lock().unwrap().extend_from_slice(&piece[..count]);
            }
        });
        Self {
            child,
            seen,
            gate,
            output,
            said,
            errors,
            struck: Mutex::default(),
            open: Some(open),
        }
    }

    /// Waits until it has said these words.
    pub(crate) fn wait_until_it_says(&self, words: &str) {
        let deadline = Instant::now() + HANG;
        let said = || String::from_utf8_lossy(&self.said.lock().unwrap()).into_owned();
        while !said().contains(words) {
            assert!(
                Instant::now() < deadline,
                "never said {words:?}: {}",
                said()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Lets the output go on to this byte, and waits until it is there or the run is over.
    pub(crate) fn wait_for(&mut self, byte: u64) {
        self.gate.fetch_max(byte + AHEAD, Ordering::AcqRel);
        let deadline = Instant::now() + HANG;
        while self.seen.load(Ordering::Acquire) < byte {
            if self.child.try_wait().unwrap().is_some() {
                return;
            }
            assert!(Instant::now() < deadline, "the run stands still");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// The process of this rank, which was not struck yet.
    pub(crate) fn rank(&mut self, rank: u32) -> u32 {
        let deadline = Instant::now() + HANG;
        loop {
            let struck = self.struck.lock().unwrap();
            let found = children(self.child.id())
                .into_iter()
                .find(|pid| rank_of(*pid) == Some(rank) && is_alive(*pid) && !struck.contains(pid));
            if let Some(pid) = found {
                return pid;
            }
            drop(struck);
            assert!(
                self.child.try_wait().unwrap().is_none() && Instant::now() < deadline,
                "rank {rank} is not there"
            );
            std::thread::sleep(Duration::from_micros(300));
        }
    }

    pub(crate) fn strike(&mut self, strike: Strike) {
        self.wait_for(strike.at);
        let pid = self.rank(1);
        std::thread::sleep(strike.after);
        self.struck.get_mut().unwrap().push(pid);
        signal(pid, strike.signal);
    }

    /// Lets it run to its end.
    pub(crate) fn finish(mut self) -> Disturbed {
        self.open = None;
        self.drained()
    }

    /// Lets it run to its end while its input stays open: something else has to end it.
    pub(crate) fn drained(mut self) -> Disturbed {
        self.gate.store(u64::MAX, Ordering::Release);
        let code = wait(&mut self.child);
        self.errors.join().unwrap();
        let said = self.said.lock().unwrap();
        Disturbed {
            code,
            stderr: String::from_utf8_lossy(&said).into_owned(),
            output: self.output.join().unwrap(),
        }
    }

    /// Interrupts it until it ends. While the output is held up, nothing else ends it.
    pub(crate) fn aborted(mut self) -> Disturbed {
        abort(&mut self.child);
        self.drained()
    }
}

/// The lines that a process says, one by one, and all of them once it has ended.
pub(crate) fn lines(
    from: impl std::io::Read + Send + 'static,
) -> (Receiver<String>, JoinHandle<String>) {
    let (say, said) = channel();
    let reading = std::thread::spawn(move || {
        let mut all = String::new();
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            all += &line;
            all.push('\n');
            // The test may have heard enough.
            let _ = say.send(line);
        }
        all
    });
    (said, reading)
}

/// What a run reports of itself.
pub(crate) fn report(path: &PathBuf) -> serde_json::Value {
    let text = std::fs::read(path).unwrap();
    let whole: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_keys_are_documented(&whole);
    whole["run"].clone()
}

/// Memory, threads, descriptors and mappings of a process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Footprint {
    pub(crate) rss_kib: u64,
    pub(crate) threads: usize,
    pub(crate) descriptors: usize,
    pub(crate) mappings: usize,
}

impl Footprint {
    pub(crate) fn of(pid: u32) -> Self {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap();
        let count = |name: &str| {
            std::fs::read_dir(format!("/proc/{pid}/{name}"))
                .unwrap()
                .count()
        };
        let status = read("status");
        let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let rss = rss.and_then(|rss| rss.split_whitespace().next()).unwrap();
        Self {
            rss_kib: rss.parse().unwrap(),
            threads: count("task"),
            descriptors: count("fd"),
            mappings: read("maps").lines().count(),
        }
    }
}
