//! Faults made on purpose, to see what a job does about them.
//!
//! `PP_FAULT=NAME[@RANK][:chunk=N][:ms=T][:times=N]` names one fault of the job; what each does is in
//! docs/faults.md. It is a setting: the handshake compares it, so it cannot be on for one rank
//! alone.
//!
//! Hazard: a test of faults that tests the tester, because the fault was made in a place where
//! none can happen. Guarantee: everything here decorates what a run is made of, a link or the
//! stages, and the driver between them is the one of every run.

mod backend;
mod breakable;
mod frame;
mod front;
mod kinds;
mod link;
mod phase_b;
mod plan;

use std::cell::Cell;
use std::ffi::OsStr;
use std::fmt;
use std::io::Write as _;
use std::rc::Rc;
use std::time::Duration;

use clap::ValueEnum as _;
use pp_contract::{Generation, Rank};
use pp_job::Error;
use rustix::process::{Signal, getpid, kill_process};

pub(crate) use self::backend::FaultyBackend;
pub(crate) use self::breakable::Breakable;
pub(crate) use self::front::FaultyFront;
pub(crate) use self::kinds::Need;
use self::kinds::{Break, Felt};
pub(crate) use self::phase_b::{Elsewhere, FaultyPhaseB};

/// The variable that names the fault of a job.
pub(crate) const VARIABLE: &str = "PP_FAULT";
/// The chunk at which a fault happens by default.
const CHUNK: u64 = 3;
/// How each line of a hook begins.
pub(crate) const SAYS: &str = "pp: fault hook: ";
/// In every line that says that a fault was not stopped where it must be.
pub(crate) const AFTER: &str = "after the fault";
/// How long a fault lasts that lasts, by default: longer than any rank waits.
const LASTS: Duration = Duration::from_secs(60);

/// The fault of a job, as every rank knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hook {
    what: Break,
    rank: Rank,
    chunk: u64,
    lasts: Duration,
    times: u32,
}

impl Hook {
    /// The fault that the variable names.
    pub(crate) fn read(text: &OsStr) -> Result<Self, Error> {
        let text = text.to_string_lossy();
        Self::parse(&text).map_err(|why| {
            Error::Usage(format!(
                "{VARIABLE} is {text:?}: {why}; it takes NAME[@RANK][:chunk=N][:ms=T][:times=N], and \
                 `pp-trials faults --hooks` has the names"
            ))
        })
    }

    fn parse(text: &str) -> Result<Self, String> {
        let mut parts = text.split(':');
        let place = parts.next().unwrap_or_default();
        let (id, rank) = match place.split_once('@') {
            None => (place, None),
            Some((id, rank)) => (id, Some(number::<u32>("the rank", rank)?)),
        };
        let what = Break::named(id).ok_or_else(|| format!("there is no hook {id:?}"))?;
        let ranks = what.ranks();
        let rank = Rank::new(rank.unwrap_or(ranks[0]));
        if !ranks.contains(&rank.get()) {
            return Err(format!("{id} does not happen on rank {rank}"));
        }
        let mut hook = Self {
            what,
            rank,
            chunk: CHUNK,
            lasts: LASTS,
            times: 1,
        };
        for part in parts {
            match part.split_once('=') {
                Some(("chunk", value)) => hook.chunk = number("chunk", value)?,
                Some(("ms", value)) => hook.lasts = Duration::from_millis(number("ms", value)?),
                Some(("times", value)) => hook.times = number("times", value)?,
                _ => return Err(format!("{part:?} is none of chunk=N, ms=T, times=N")),
            }
        }
        Ok(hook)
    }

    /// The name of the fault.
    pub(crate) fn name(self) -> String {
        self.what.id()
    }

    /// What a run must be, or the fault never happens in it.
    pub(crate) fn need(self) -> Option<Need> {
        self.what.need()
    }

    /// The hook in the hands of one rank.
    pub(crate) fn arm(self, me: Rank) -> Rc<Arm> {
        Rc::new(Arm {
            hook: self,
            me,
            generation: Cell::new(0),
            struck: Cell::new(false),
        })
    }
}

fn number<T: std::str::FromStr>(what: &str, text: &str) -> Result<T, String> {
    let refuse = |_| format!("{what} is {text:?}, which is no number");
    text.parse().map_err(refuse)
}

/// As `PP_FAULT` takes it: what the handshake compares.
impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            what,
            rank,
            chunk,
            lasts,
            times,
        } = self;
        let (id, ms) = (what.id(), lasts.as_millis());
        write!(f, "{id}@{rank}:chunk={chunk}:ms={ms}:times={times}")
    }
}

/// A hook on one rank: what its links and its stages share.
#[derive(Debug)]
pub(crate) struct Arm {
    hook: Hook,
    me: Rank,
    /// Of the link.
    generation: Cell<u32>,
    /// In this generation.
    struck: Cell<bool>,
}

impl Arm {
    /// A link of this generation begins.
    fn begins(&self, generation: Generation) {
        self.generation.set(generation.get());
        self.struck.set(false);
    }

    /// Whether it strikes here: on its rank, in the first `times` generations, so that a rank that was started again does
    /// not fall over the same stone.
    fn is_mine(&self) -> bool {
        self.hook.rank == self.me && self.generation.get() < self.hook.times
    }

    /// Whether this rank is to say that it has other kernels.
    pub(crate) fn changes_weights(&self) -> bool {
        self.strikes(Break::ChangedWeights, self.hook.chunk)
    }

    /// Whether `what` strikes now, at this chunk; says so, and does not strike again.
    fn strikes(&self, what: Break, chunk: u64) -> bool {
        let now = self.is_due(what, chunk);
        if now {
            self.strike();
        }
        now
    }

    /// Whether `what` is to strike, and the run has come to its chunk.
    fn is_due(&self, what: Break, chunk: u64) -> bool {
        self.is_mine() && !self.struck.get() && self.hook.what == what && chunk >= self.hook.chunk
    }

    /// The fault happens now.
    fn strike(&self) {
        self.struck.set(true);
        let Hook { what, chunk, .. } = self.hook;
        say(&format!("{} at chunk {chunk}", what.id()));
    }

    /// The run is over on this rank; says so where nothing was made that was asked for.
    fn ends(&self) {
        // What is said at the handshake was made before there was a link.
        let is_of_link = self.hook.what != Break::ChangedWeights;
        if self.is_mine() && is_of_link && !self.struck.get() && !std::thread::panicking() {
            say(&format!("{} did not strike", self.hook.what.id()));
        }
    }

    /// Says that the fault had not the effect that it must have.
    fn misses(&self, what: &str) {
        say(&format!("{}: {what} {AFTER}", self.hook.what.id()));
    }

    /// A chunk is about to be computed here.
    fn sees_compute(&self, chunk: u64) {
        let first = match self.felt() {
            Felt::NotComputed => self.hook.chunk,
            Felt::NextNotComputed => self.hook.chunk + 1,
            _ => return,
        };
        if chunk >= first {
            self.misses(&format!("chunk {chunk} was computed"));
        }
    }

    /// A chunk is about to be decoded here.
    fn sees_decode(&self, chunk: u64) {
        let Hook { chunk: at, .. } = self.hook;
        let is_wrong = match self.felt() {
            Felt::Anywhere => false,
            Felt::NotComputed | Felt::NotDecoded => chunk >= at,
            Felt::NextNotComputed | Felt::NextNotDecoded => chunk > at,
            Felt::Dropped => chunk == at,
        };
        if is_wrong {
            self.misses(&format!("chunk {chunk} was decoded"));
        }
    }

    fn felt(&self) -> Felt {
        self.hook.what.felt(self.hook.rank.get())
    }

    /// The faults that any stage may have: a process that dies, or is stopped.
    fn happen_to_process(&self, chunk: u64) {
        for (what, signal) in [(Break::Kill, Signal::KILL), (Break::Stop, Signal::STOP)] {
            if self.strikes(what, chunk) {
                let _ = kill_process(getpid(), signal);
            }
        }
        assert!(
            !self.strikes(Break::Panic, chunk),
            "asked for by {VARIABLE}"
        );
    }
}

/// One line on standard error, which may be closed.
fn say(what: &str) {
    // In one piece: the other rank may write to the same place.
    let line = format!("{SAYS}{what}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// What a hook does, in words.
pub(crate) fn about(text: &str) -> String {
    let hook = Hook::parse(text).ok();
    hook.map_or_else(String::new, |hook| hook.what.about())
}

/// Whether a line of a rank says that its hook struck, rather than that it did not, or what came of it.
pub(crate) fn is_strike(line: &str) -> bool {
    let said = line.strip_prefix(SAYS);
    said.is_some_and(|said| said.contains(" at chunk ") && !said.contains(AFTER))
}

/// The hooks: name, ranks with the usual one first, and what a run must be.
pub(crate) fn hooks() -> impl Iterator<Item = (String, &'static [u32], Option<&'static str>)> {
    Break::value_variants()
        .iter()
        .map(|what| (what.id(), what.ranks(), what.need().map(Need::option)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hook_says_what_it_was_made_of() {
        for (text, whole) in [
            ("kill", "kill@1:chunk=3:ms=60000:times=1"),
            ("kill@0:chunk=7", "kill@0:chunk=7:ms=60000:times=1"),
            (
                "stall-compute@1:ms=250:chunk=0:times=2",
                "stall-compute@1:chunk=0:ms=250:times=2",
            ),
        ] {
            let hook = Hook::parse(text).unwrap();
            assert_eq!(hook.to_string(), whole);
            assert_eq!(Hook::parse(whole), Ok(hook));
        }
    }

    #[test]
    fn wrong_grammar_is_named() {
        for (text, word) in [
            ("", "\"\""),
            ("kil", "\"kil\""),
            ("kill@", "rank"),
            ("kill@2", "rank 2"),
            ("stall-compute@0", "rank 0"),
            ("kill@1:chunk", "\"chunk\""),
            ("kill@1:chunk=-1", "\"-1\""),
            ("kill@1:when=3", "when=3"),
        ] {
            let why = Hook::parse(text).unwrap_err();
            assert!(why.contains(word), "{text}: {why}");
        }
    }

    #[test]
    fn a_hook_strikes_once_on_its_rank_from_its_chunk_on() {
        let hook = Hook::parse("kill@1:chunk=2").unwrap();
        let arm = hook.arm(Rank::new(1));
        assert!(!arm.strikes(Break::Kill, 1) && !arm.strikes(Break::Stop, 2));
        assert!(arm.strikes(Break::Kill, 2) && !arm.strikes(Break::Kill, 2));
        assert!(!hook.arm(Rank::new(0)).strikes(Break::Kill, 2));
        arm.begins(Generation::new(1));
        assert!(!arm.strikes(Break::Kill, 2));
    }
}
