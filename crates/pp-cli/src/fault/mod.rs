//! Faults made on purpose, so that everybody can see what a job does about them.
//!
//! `PP_FAULT=NAME[@RANK][:chunk=N][:ms=T][:times=N]` names one fault of the job; what each does is in
//! docs/faults.md. It is a setting: the handshake compares it, so it cannot be on for one rank
//! alone. Without it no code of this folder runs.
//!
//! Hazard: a test of faults that tests the tester, because the fault was made in a place where
//! none can happen. Guarantee: everything here decorates what a run is made of, a link or the
//! stages, and the driver between them is the one of every run.

mod breakable;
mod frame;
mod front;
mod kinds;
mod link;
mod phase_b;
mod plan;

use std::cell::Cell;
use std::fmt;
use std::io::Write as _;
use std::rc::Rc;
use std::time::Duration;

use pp_contract::{Generation, Rank};
use rustix::process::{Signal, getpid, kill_process};

use crate::exit::Failure;

pub(crate) use self::breakable::Breakable;
pub(crate) use self::front::FaultyFront;
use self::kinds::{Break, Felt, Need};
pub(crate) use self::link::Faulty;
pub(crate) use self::phase_b::FaultyPhaseB;

/// The variable that names the fault of a job.
pub(crate) const VARIABLE: &str = "PP_FAULT";
/// The chunk at which a fault happens when nobody says.
const CHUNK: u64 = 3;
/// How each line of a hook begins.
pub(crate) const SAYS: &str = "pp: fault hook: ";
/// In every line that says that a fault was not stopped where it must be.
pub(crate) const AFTER: &str = "after the fault";
/// How long a fault lasts that lasts, when nobody says: longer than anybody waits.
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
    /// The fault that the environment names, if it names one.
    pub(crate) fn from_env() -> Result<Option<Self>, Failure> {
        let Some(text) = std::env::var_os(VARIABLE) else {
            return Ok(None);
        };
        let text = text.to_string_lossy();
        Self::parse(&text).map(Some).map_err(|why| {
            Failure::Usage(format!(
                "{VARIABLE} is {text:?}: {why}; it takes NAME[@RANK][:chunk=N][:ms=T][:times=N], and \
                 `pp faults --hooks` has the names"
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

    /// The hook in the hands of one rank. It strikes in the first `times` generations of the links,
    /// so that a rank that was started again does not fall over the same stone.
    pub(crate) fn arm(self, me: Rank, generation: Generation) -> Rc<Arm> {
        Rc::new(Arm {
            hook: self,
            me,
            is_mine: self.rank == me && generation.get() < self.times,
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

/// A hook on one rank: what its link and its stages share.
#[derive(Debug)]
pub(crate) struct Arm {
    hook: Hook,
    me: Rank,
    /// This is the rank, and the generation, in which it strikes.
    is_mine: bool,
    struck: Cell<bool>,
}

impl Arm {
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
        self.is_mine && !self.struck.get() && self.hook.what == what && chunk >= self.hook.chunk
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
        if self.is_mine && is_of_link && !self.struck.get() && !std::thread::panicking() {
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

    /// A receive is about to be posted here.
    fn sees_receive(&self, chunk: u64) {
        let heard_here = self.is_mine && self.struck.get() && self.hook.what.is_heard();
        if heard_here && chunk >= self.hook.chunk {
            self.misses(&format!("a receive was posted for chunk {chunk}"));
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

/// One line on standard error, which nobody may want to read.
fn say(what: &str) {
    // In one piece: the other rank may write to the same place.
    let line = format!("{SAYS}{what}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// The digest of the kernels, as a rank says it.
pub(crate) fn digest_of_kernels(digest: u64, me: Rank) -> Result<u64, Failure> {
    let first = Generation::new(0);
    let arm = Hook::from_env()?.map(|hook| hook.arm(me, first));
    match arm {
        Some(arm) if arm.strikes(Break::ChangedWeights, arm.hook.chunk) => Ok(digest ^ 1),
        _ => Ok(digest),
    }
}

/// The rank on which a hook strikes.
pub(crate) fn rank_of(text: &str) -> Option<u32> {
    Hook::parse(text).ok().map(|hook| hook.rank.get())
}

/// Whether a line of a rank says that its hook struck, rather than that it did not, or what came of it.
pub(crate) fn is_strike(line: &str) -> bool {
    let said = line.strip_prefix(SAYS);
    said.is_some_and(|said| said.contains(" at chunk ") && !said.contains(AFTER))
}

/// Refuses a hook that cannot strike in this run. What carries the payloads may not be known yet.
pub(crate) fn refuse_in_vain(
    transport: Option<&str>,
    recompute: bool,
    hard_cuts: bool,
) -> Result<(), Failure> {
    let need = Hook::from_env()?.and_then(|hook| Some((hook.what, hook.what.need()?)));
    let Some((what, need)) = need else {
        return Ok(());
    };
    let is_met = match need {
        Need::Host => transport.is_none_or(|transport| transport == "host"),
        Need::Nccl => transport.is_none_or(|transport| transport == "nccl"),
        Need::Recompute => recompute,
        Need::HardCuts => hard_cuts,
    };
    if is_met {
        return Ok(());
    }
    Err(Failure::Usage(format!(
        "{VARIABLE}={} cannot strike in this run: it needs {}",
        what.id(),
        need.option()
    )))
}

/// The hooks: name, ranks with the usual one first, and what a run must be.
pub(crate) fn hooks() -> impl Iterator<Item = (&'static str, &'static [u32], Option<&'static str>)>
{
    Break::all().map(|what| (what.id(), what.ranks(), what.need().map(Need::option)))
}

/// Refuses a hook where there are no two ranks.
pub(crate) fn refuse_alone() -> Result<(), Failure> {
    match Hook::from_env()? {
        None => Ok(()),
        Some(_) => Err(Failure::Usage(format!(
            "{VARIABLE} is about two ranks; unset it, or leave --ranks 1 out"
        ))),
    }
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
        let (first, second) = (Generation::new(0), Generation::new(1));
        let arm = hook.arm(Rank::new(1), first);
        assert!(!arm.strikes(Break::Kill, 1) && !arm.strikes(Break::Stop, 2));
        assert!(arm.strikes(Break::Kill, 2) && !arm.strikes(Break::Kill, 2));
        assert!(!hook.arm(Rank::new(0), first).strikes(Break::Kill, 2));
        assert!(!hook.arm(Rank::new(1), second).strikes(Break::Kill, 2));
    }
}
