//! Faults made on purpose, to see what a job does about them.
//!
//! `PP_FAULT=NAME[@RANK][:chunk=N][:ms=T][:times=N]` names one fault of the job; what each does is in
//! docs/faults.md. It is a setting: the handshake compares it, so it cannot be on for one rank
//! alone.
//!
//! Hazard: a test of faults that tests the tester, because the fault was made in a place where
//! none can happen. Guarantee: everything here decorates what a run is made of, edges and
//! stages, and the driver between them is the one of every run.

mod backend;
mod breakable;
mod edges;
mod frame;
mod kinds;
mod stages;

use std::cell::Cell;
use std::ffi::OsStr;
use std::fmt;
use std::io::Write as _;
use std::rc::Rc;
use std::time::{Duration, Instant};

use clap::ValueEnum as _;
use pp_contract::{CacheEpoch, Generation, Pipeline, Rank, StageSpec, Stamp};
use pp_job::Error;
use rustix::process::{Signal, getpid, kill_process};

pub(crate) use self::backend::FaultyBackend;
pub(crate) use self::breakable::{Breakable, Collective};
use self::kinds::Break;
pub(crate) use self::kinds::Need;
pub(crate) use self::stages::Faulty;

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
/// A rank that has sent nothing for so long, and hears nothing, is idle.
const IDLE_AFTER: Duration = Duration::from_millis(500);

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
    /// The fault that the variable names, in a run of this pipeline.
    pub(crate) fn read(text: &OsStr, pipeline: &Pipeline) -> Result<Self, Error> {
        let text = text.to_string_lossy();
        Self::parse(&text, pipeline).map_err(|why| {
            Error::Usage(format!(
                "{VARIABLE} is {text:?}: {why}; it takes NAME[@RANK][:chunk=N][:ms=T][:times=N], and \
                 `pp-trials faults --hooks` has the names"
            ))
        })
    }

    fn parse(text: &str, pipeline: &Pipeline) -> Result<Self, String> {
        let mut parts = text.split(':');
        let place = parts.next().unwrap_or_default();
        let (id, rank) = match place.split_once('@') {
            None => (place, None),
            Some((id, rank)) => (id, Some(Rank::new(number("the rank", rank)?))),
        };
        let what = Break::named(id).ok_or_else(|| format!("there is no hook {id:?}"))?;
        let rank = rank.unwrap_or_else(|| what.usual_rank(pipeline));
        if let Some(why) = what.cannot_be_on(rank, pipeline) {
            return Err(format!("{id} cannot happen on rank {rank}: {why}"));
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
    pub(crate) fn arm(self, me: Rank, pipeline: &Pipeline) -> Rc<Arm> {
        Rc::new(Arm {
            hook: self,
            me,
            pipeline: pipeline.clone(),
            generation: Cell::new(None),
            struck: Cell::new(false),
            sent: Cell::new(None),
            epoch_of_hook: Cell::new(None),
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

/// A hook on one rank: what its edges and its stages share.
#[derive(Debug)]
pub(crate) struct Arm {
    hook: Hook,
    me: Rank,
    pipeline: Pipeline,
    /// Of the edges, once there are some.
    generation: Cell<Option<Generation>>,
    /// In this generation.
    struck: Cell<bool>,
    /// The chunk that was sent last, its epoch, and when.
    sent: Cell<Option<(u64, CacheEpoch, Instant)>>,
    /// The epoch in which the chunk of the hook was sent.
    epoch_of_hook: Cell<Option<CacheEpoch>>,
}

impl Arm {
    /// Edges of this generation begin.
    fn begins(&self, generation: Generation) {
        if self.generation.replace(Some(generation)) != Some(generation) {
            self.struck.set(false);
        }
    }

    /// Says whether it strikes here: on its rank, in the first `times` generations, so that a rank that was started again does
    /// not fall over the same stone.
    fn is_mine(&self) -> bool {
        let generation = self.generation.get().map_or(0, Generation::get);
        self.hook.rank == self.me && generation < self.hook.times
    }

    /// Says whether this rank is to say that it has other kernels.
    pub(crate) fn changes_weights(&self) -> bool {
        self.strikes(Break::ChangedWeights, self.hook.chunk)
    }

    /// The place of a stage in the pipeline.
    pub(crate) fn place_of(&self, stage: &StageSpec) -> usize {
        let mut stages = self.pipeline.stages().iter();
        let at = stages.position(|known| known == stage);
        at.expect("a stage of this pipeline")
    }

    /// The place of the sink.
    pub(crate) fn last(&self) -> usize {
        self.pipeline.stages().len() - 1
    }

    /// Says whether a slot of another edge is needed.
    fn sends_foreign_slots(&self) -> bool {
        self.is_mine() && self.hook.what == Break::ForeignSlot
    }

    /// Says whether `what` strikes now, at this chunk; says so, and does not strike again.
    fn strikes(&self, what: Break, chunk: u64) -> bool {
        let now = self.is_due(what, chunk);
        if now {
            self.strike();
        }
        now
    }

    /// Says whether `what` is to strike, and the run has come to its chunk.
    fn is_due(&self, what: Break, chunk: u64) -> bool {
        self.is_mine() && !self.struck.get() && self.hook.what == what && chunk >= self.hook.chunk
    }

    /// The fault happens now.
    fn strike(&self) {
        self.struck.set(true);
        let Hook { what, chunk, .. } = self.hook;
        say(&format!("{} at chunk {chunk}", what.id()));
    }

    /// A message leaves.
    fn sends(&self, stamp: Stamp) {
        let chunk = stamp.chunk_index.get();
        self.sent
            .set(Some((chunk, stamp.cache_epoch, Instant::now())));
        if chunk == self.hook.chunk {
            self.epoch_of_hook.set(Some(stamp.cache_epoch));
        }
    }

    /// Says whether something of a later epoch than the hook's chunk was sent, once that was sent.
    fn is_cut(&self) -> Option<bool> {
        let (_, now, _) = self.sent.get()?;
        Some(now != self.epoch_of_hook.get()?)
    }

    /// This rank heard nothing.
    fn leaves_if_idle(&self) {
        let Some((chunk, _, at)) = self.sent.get() else {
            return;
        };
        // What it has sent is on its way no longer.
        if at.elapsed() >= IDLE_AFTER && self.strikes(Break::LeaveIdle, chunk) {
            pp_job::command_line::end_now(0);
        }
    }

    /// Says that the fault had not the effect that it must have.
    fn misses(&self, what: &str) {
        say(&format!("{}: {what} {AFTER}", self.hook.what.id()));
    }

    /// The stage in this place is about to work on a chunk.
    fn sees(&self, at: usize, chunk: u64) {
        let Hook { what, rank, .. } = self.hook;
        let Some((first, behind)) = what.felt(rank, &self.pipeline) else {
            return;
        };
        // The others of a group work on what a member hears wrongly from its leader.
        let stage = &self.pipeline.stages()[at];
        if self.me != rank && stage.leader() != rank && stage.ranks.contains(&rank) {
            return;
        }
        if at >= first && chunk >= self.hook.chunk + behind {
            let name = &self.pipeline.stages()[at].name;
            self.misses(&format!("{name} worked on chunk {chunk}"));
        }
    }

    /// The faults that any stage may have: a process that dies, or is stopped.
    fn happen_to_process(&self, chunk: u64) {
        for (what, signal) in [(Break::Kill, Signal::KILL), (Break::Stop, Signal::STOP)] {
            if self.strikes(what, chunk) {
                let _ = kill_process(getpid(), signal);
            }
        }
        if self.strikes(Break::Leave, chunk) {
            pp_job::command_line::end_now(0);
        }
        if self.strikes(Break::Stall, chunk) {
            std::thread::sleep(self.hook.lasts);
        }
        assert!(
            !self.strikes(Break::Panic, chunk),
            "asked for by {VARIABLE}"
        );
    }
}

/// The run is over on this rank; says so where nothing was made that was asked for.
impl Drop for Arm {
    fn drop(&mut self) {
        // What is said at the handshake was made before there was an edge.
        let is_of_edges =
            self.generation.get().is_some() && self.hook.what != Break::ChangedWeights;
        if self.is_mine() && is_of_edges && !self.struck.get() && !std::thread::panicking() {
            say(&format!("{} did not strike", self.hook.what.id()));
        }
    }
}

/// One line on standard error, which may be closed.
fn say(what: &str) {
    // In one piece: other ranks may write to the same place.
    let line = format!("{SAYS}{what}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// What the hook of this name does, in words.
pub(crate) fn about(name: &str) -> String {
    Break::named(name).map_or_else(String::new, Break::about)
}

/// Says whether a line of a rank says that its hook struck, rather than that it did not, or what came of it.
pub(crate) fn is_strike(line: &str) -> bool {
    let said = line.strip_prefix(SAYS);
    said.is_some_and(|said| said.contains(" at chunk ") && !said.contains(AFTER))
}

/// The hooks: name, what it does, and what a run must be.
pub(crate) fn hooks() -> impl Iterator<Item = (String, String, Option<&'static str>)> {
    Break::value_variants()
        .iter()
        .map(|what| (what.id(), what.about(), what.need().map(Need::option)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Pipeline {
        "encode@0 -> phase_b@1 -> decode@0".parse().unwrap()
    }

    fn three() -> Pipeline {
        "encode@0 -> phase_b@1 -> decode@2".parse().unwrap()
    }

    #[test]
    fn a_hook_says_what_it_was_made_of() {
        for (text, whole) in [
            ("kill", "kill@1:chunk=3:ms=60000:times=1"),
            ("kill@0:chunk=7", "kill@0:chunk=7:ms=60000:times=1"),
            ("huge-note", "huge-note@0:chunk=3:ms=60000:times=1"),
            (
                "stall@1:ms=250:chunk=0:times=2",
                "stall@1:chunk=0:ms=250:times=2",
            ),
        ] {
            let hook = Hook::parse(text, &two()).unwrap();
            assert_eq!(hook.to_string(), whole);
            assert_eq!(Hook::parse(whole, &two()), Ok(hook));
        }
    }

    #[test]
    fn wrong_grammar_is_named() {
        for (text, word) in [
            ("", "\"\""),
            ("kil", "\"kil\""),
            ("kill@", "rank"),
            ("kill@2", "rank 2: there is no such rank"),
            ("huge-note@1", "rank 1: only the source"),
            ("kill@1:chunk", "\"chunk\""),
            ("kill@1:chunk=-1", "\"-1\""),
            ("kill@1:when=3", "when=3"),
        ] {
            let why = Hook::parse(text, &two()).unwrap_err();
            assert!(why.contains(word), "{text}: {why}");
        }
        for text in ["late-result", "skipped-recompute@0"] {
            assert!(Hook::parse(text, &two()).is_ok(), "{text}");
            assert!(Hook::parse(text, &three()).is_err(), "{text}");
        }
    }

    #[test]
    fn a_hook_strikes_once_on_its_rank_from_its_chunk_on() {
        let hook = Hook::parse("kill@1:chunk=2", &two()).unwrap();
        let arm = hook.arm(Rank::new(1), &two());
        assert!(!arm.strikes(Break::Kill, 1) && !arm.strikes(Break::Stop, 2));
        assert!(arm.strikes(Break::Kill, 2) && !arm.strikes(Break::Kill, 2));
        assert!(!hook.arm(Rank::new(0), &two()).strikes(Break::Kill, 2));
        // The edges to each peer begin by themselves.
        arm.begins(Generation::new(0));
        assert!(arm.strikes(Break::Kill, 2));
        arm.begins(Generation::new(0));
        assert!(!arm.strikes(Break::Kill, 2));
        arm.begins(Generation::new(1));
        assert!(!arm.strikes(Break::Kill, 2));
    }

    #[test]
    fn a_fault_may_be_felt_no_further_than_the_stage_that_hears_it() {
        for (pipeline, text, felt) in [
            (two(), "kill@1", None),
            (two(), "huge-note@0", Some((1, 0))),
            (two(), "side-transfer@0", Some((1, 0))),
            (two(), "side-transfer@1", Some((2, 0))),
            (two(), "swapped@1", Some((1, 0))),
            (two(), "swapped@0", Some((2, 0))),
            (two(), "duplicated@0", Some((2, 1))),
            (three(), "swapped@2", Some((2, 0))),
            // An acceptance: no stage works on it.
            (three(), "swapped@0", None),
        ] {
            let Hook { what, rank, .. } = Hook::parse(text, &pipeline).unwrap();
            assert_eq!(what.felt(rank, &pipeline), felt, "{text} in {pipeline}");
        }
    }
}
