//! A run that reads its video from the test and writes it back there, so that it can be held up while a rank is struck.

use std::io::Write as _;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use super::{Ended, HANG, Output, Process, children, is_alive, rank_of, signal};

/// How far the output may run ahead of the next strike.
const AHEAD: u64 = 40_000;

/// What is done to a rank, and when.
#[derive(Clone, Copy, Debug)]
pub struct Strike {
    /// The rank that is struck.
    pub rank: u32,
    /// When so many bytes of the output are there.
    pub at: u64,
    /// And so long after that.
    pub after: Duration,
    /// What it gets.
    pub signal: Signal,
}

/// Death well within the run.
pub const KILL: Strike = Strike::kill(60_000);

impl Strike {
    /// Kills rank 1 when so many bytes of the output are there.
    pub const fn kill(at: u64) -> Self {
        let (rank, after, signal) = (1, Duration::ZERO, Signal::KILL);
        Self {
            rank,
            at,
            after,
            signal,
        }
    }
}

/// A run whose output is held up.
#[derive(Debug)]
pub struct Held {
    process: Process,
    struck: Vec<u32>,
}

impl Held {
    /// Starts a run, whose input stays open behind these bytes.
    pub fn start(command: &mut Command, input: Vec<u8>) -> Self {
        let process = Process::start(command, Output::Held).unwrap();
        process.give(false, move |pipe| pipe.write_all(&input));
        Self {
            process,
            struck: Vec::new(),
        }
    }

    /// The process that was started.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Waits until it has said these words.
    #[track_caller]
    pub fn wait_until_it_says(&self, words: &str) {
        let said = self.process.says(&[words], Instant::now() + HANG);
        assert!(
            said.is_some(),
            "never said {words:?}: {}",
            self.process.log()
        );
    }

    /// Lets the output go on to this byte, and waits until it is there or the run is over.
    #[track_caller]
    pub fn wait_for(&self, byte: u64) {
        self.process.read_to(byte + AHEAD);
        let is_there = self.process.writes(byte, Instant::now() + HANG);
        assert!(is_there, "the run stands still");
    }

    /// The process of this rank, which was not struck yet.
    #[track_caller]
    pub fn rank(&self, rank: u32) -> u32 {
        let deadline = Instant::now() + HANG;
        loop {
            let is_it = |pid: &u32| rank_of(*pid) == Some(rank) && is_alive(*pid);
            let mut found = children(self.id()).into_iter();
            if let Some(pid) = found.find(|pid| is_it(pid) && !self.struck.contains(pid)) {
                return pid;
            }
            assert!(
                self.process.ended().is_none() && Instant::now() < deadline,
                "rank {rank} is not there"
            );
            std::thread::sleep(Duration::from_micros(300));
        }
    }

    /// Strikes a rank.
    #[track_caller]
    pub fn strike(&mut self, strike: Strike) {
        self.wait_for(strike.at);
        let pid = self.rank(strike.rank);
        std::thread::sleep(strike.after);
        self.struck.push(pid);
        signal(pid, strike.signal);
    }

    /// Lets it run to its end.
    #[track_caller]
    pub fn finish(self) -> Ended {
        self.process.give(true, |_| Ok(()));
        self.drained()
    }

    /// Lets it run to its end while its input stays open: something else has to end it.
    #[track_caller]
    pub fn drained(self) -> Ended {
        self.process.read_to(u64::MAX);
        Ended::of(&self.process)
    }

    /// Interrupts it until it ends. While the output is held up, nothing else ends it. Two signals that come before it has
    /// run again are one.
    #[track_caller]
    pub fn aborted(self) -> Ended {
        let deadline = Instant::now() + HANG;
        while !self
            .process
            .ends_by(Instant::now() + Duration::from_millis(20))
        {
            assert!(Instant::now() < deadline, "it takes no interrupt");
            self.process.signal(Signal::INT);
        }
        self.drained()
    }
}
