//! What a job does to keep up with a source that does not wait.
//!
//! Hazard: chunks that come faster than they are worked on pile up, and everything that comes out is later and later.
//! Guarantee: with [`Late::Drop`] a chunk is built only where the times that were measured say that it comes out within
//! the latency that was asked for, with room for stages that take 20 % longer than they did. What must be dropped is dropped
//! before it is built, the oldest first.
//!
//! Choices: [`LivePolicy`] is a value, and time is an argument. The period of a pipeline is the work of its busiest rank;
//! what an empty one takes is the work of all ranks, and the least that was ever seen beside it. Chunks leave in order, so
//! from the moments of admission of those in flight follows when the next one leaves. How far such a forecast was off
//! corrects the next ones. Denoising steps go down one at a time as soon as half of the time that is left is used up,
//! and go up only where the work that was measured for more steps fits between two chunks of the source.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// A chunk may take so much longer than forecast.
const ROOM: f64 = 0.3;
/// Chunks that show what an empty pipeline takes.
const FIRST: u64 = 8;
/// Chunks that a mean goes back over.
const WINDOW: u32 = 32;
/// Chunks with so many works measured tell what a number of steps takes.
const ENOUGH: u32 = 4;
/// Every so many chunks, one with more steps shows what they would take.
const PROBE_EVERY: u32 = 16;
/// The busiest rank is to be busy for at most this share of the time before the steps go up.
const BUSY: f64 = 0.97;

/// What happens to chunks that come faster than they can be worked on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Late {
    /// The source waits, and nothing is lost: what comes out is as late as it is.
    #[default]
    Block,
    /// Chunks that would come out too late are dropped before they are built: what comes out is fresh.
    Drop,
}

/// How a job keeps up with its source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LiveOptions {
    /// What happens to late chunks.
    pub late: Late,
    /// The most time from when the first frame of a chunk is there until the sink has the chunk, in nanoseconds.
    pub max_latency_ns: Option<u64>,
    /// The fewest and the most denoising steps of a chunk; `None` where they do not vary.
    pub steps: Option<(u16, u16)>,
}

/// What a chunk that the sink has tells of the pipeline. Moments are nanoseconds of one clock.
#[derive(Clone, Copy, Debug)]
pub struct Passed<'a> {
    /// How long each rank worked on it, in nanoseconds.
    pub works_ns: &'a [u64],
    /// When its first and its last frame were there.
    pub read_ns: (u64, u64),
    /// Its build began.
    pub build_start_ns: u64,
    /// The sink has it.
    pub accepted_ns: u64,
    /// The steps that were asked for.
    pub steps: Option<u16>,
    /// Its frames, and those that were dropped between the chunk before and it.
    pub frames: (u32, u32),
}

/// A latency was asked for that no chunk can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a latency of at most {:.1} ms is asked for, and one chunk takes {:.1} ms where no other is in its way{}; \
     ask for more, or let a chunk have fewer frames or less work",
    millis(*.asked_ns),
    millis(*.least_ns),
    if *.at_fewest { ", at the fewest steps" } else { "" }
)]
pub struct TooSlow {
    /// What was asked for.
    pub asked_ns: u64,
    /// The least that one of the first chunks took.
    pub least_ns: u64,
    /// Steps vary, and they had the fewest.
    pub at_fewest: bool,
}

fn millis(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// A mean over the latest values.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    value: f64,
    seen: u32,
}

impl Mean {
    fn add(&mut self, value: f64, window: u32) {
        self.seen = (self.seen + 1).min(window);
        self.value += (value - self.value) / f64::from(self.seen);
    }

    fn get(&self) -> Option<f64> {
        (self.seen > 0).then_some(self.value)
    }
}

/// What chunks take, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct ChunkCost {
    /// From one to the next.
    period: f64,
    /// Where no other is in the way.
    empty: f64,
}

impl ChunkCost {
    /// How many chunks keep the busiest rank busy where works scatter: each rank works on one, and two wait before each but
    /// the first.
    fn busy(self) -> u32 {
        (3.0 * self.empty / self.period.max(1.0) - 1.0)
            .round()
            .max(2.0) as u32
    }
}

/// A chunk between its admission and its acceptance.
#[derive(Clone, Copy, Debug)]
struct Flying {
    admitted_ns: u64,
    cost: Option<ChunkCost>,
    /// How long it was to take, if that was known.
    forecast: Option<f64>,
}

/// Decides how many chunks may be in flight, which of those that wait are dropped, and how many steps the next one has.
#[derive(Clone, Debug)]
pub struct LivePolicy {
    options: LiveOptions,
    depth: u32,
    /// The work of each rank, for each number of steps from the fewest on.
    works: Vec<Vec<Mean>>,
    /// The least that chunks took beside the work of the ranks.
    beside: Option<f64>,
    /// By how much chunks took longer than forecast.
    stretch: Mean,
    /// Between two chunks of the source.
    interval: Mean,
    read_ns: Option<u64>,
    in_flight: VecDeque<Flying>,
    last_accepted_ns: u64,
    admitted: u64,
    accepted: u64,
    /// What the fastest of the first chunks took.
    least_ns: Option<u64>,
    /// Steps beyond the fewest.
    level: usize,
    /// Chunks since the steps changed, and since one had waited long.
    settled: u32,
    calm: u32,
}

impl LivePolicy {
    /// Before the first chunk, for a job of so many ranks that holds at most `depth` chunks in flight.
    #[must_use]
    pub fn new(options: LiveOptions, depth: u32, ranks: usize) -> Self {
        let levels = options.steps.map_or(0, |(least, most)| most - least);
        Self {
            options,
            depth,
            works: vec![vec![Mean::default(); ranks]; usize::from(levels) + 1],
            beside: None,
            stretch: Mean::default(),
            interval: Mean::default(),
            read_ns: None,
            in_flight: VecDeque::with_capacity(depth as usize),
            last_accepted_ns: 0,
            admitted: 0,
            accepted: 0,
            least_ns: None,
            level: 0,
            settled: 0,
            calm: 0,
        }
    }

    /// Says whether chunks are dropped, and fewer than the depth may be in flight.
    #[must_use]
    pub fn drops(&self) -> bool {
        self.options.late == Late::Drop
    }

    /// Says whether there is anything to decide or to judge. Otherwise chunks need not be told of.
    #[must_use]
    pub fn is_needed(&self) -> bool {
        self.options != LiveOptions::default()
    }

    /// The most chunks that may be in flight now, 1 or more: another one would only wait inside, or come out too late. It
    /// changes when a chunk is accepted.
    #[must_use]
    pub fn most_in_flight(&self, now_ns: u64) -> u32 {
        if !self.drops() {
            return self.depth;
        }
        let is_in_doubt = self.accepted < FIRST && self.least_ns > self.options.max_latency_ns;
        if is_in_doubt && self.options.max_latency_ns.is_some() {
            // What an empty pipeline takes is measured where it is empty.
            return 1;
        }
        let ranks = self.works[0].len() as u32;
        let Some(cost) = self.cost(self.level) else {
            return self.depth.min(ranks + 1);
        };
        let most = self.depth.min(cost.busy());
        let in_flight = self.in_flight.len() as u32;
        let takes = self.takes_at_most(now_ns, cost);
        let asked = self.options.max_latency_ns;
        match asked.is_some_and(|asked| takes > asked as f64) {
            true => most.min(in_flight.max(1)),
            false => most,
        }
    }

    /// What waits and was there before this moment comes out too late, also with the fewest steps.
    #[must_use]
    pub fn drops_before_ns(&self, now_ns: u64) -> u64 {
        let Some(cost) = self.cost(0) else { return 0 };
        // The busiest rank has enough to do until more is known.
        let may_wait = self.in_flight.len() + 1 >= cost.busy() as usize;
        let takes = match may_wait {
            true => self.takes(now_ns, cost, 0.0),
            false => self.takes_at_most(now_ns, cost),
        };
        self.bound_ns(now_ns, takes)
    }

    /// Says whether a chunk that was not dropped, and whose first frame was there at `read_ns`, is not to be built now either: it
    /// may come out too late, and that is known better, or a newer one is there, when the next chunk is accepted.
    #[must_use]
    pub fn holds(&self, now_ns: u64, read_ns: Option<u64>) -> bool {
        let (Some(read_ns), Some(cost)) = (read_ns, self.cost(0)) else {
            return false;
        };
        let bound_ns = self.bound_ns(now_ns, self.takes_at_most(now_ns, cost));
        !self.in_flight.is_empty() && read_ns < bound_ns
    }

    fn bound_ns(&self, now_ns: u64, takes: f64) -> u64 {
        let asked = self.options.max_latency_ns.filter(|_| self.drops());
        let out_ns = now_ns.saturating_add(takes as u64);
        asked.map_or(0, |asked| out_ns.saturating_sub(asked))
    }

    /// A chunk is built now, whose first frame was there at `read_ns`, if that is known. Gives the steps that it is to have;
    /// `None` where they do not vary.
    pub fn admit(&mut self, now_ns: u64, read_ns: Option<u64>) -> Option<u16> {
        let waited_ns = read_ns.map(|read_ns| now_ns.saturating_sub(read_ns) as f64);
        let level = self.choose(now_ns, waited_ns);
        let cost = self.cost(level);
        let forecast = cost.map(|cost| self.forecast(now_ns, cost));
        self.admitted += 1;
        self.in_flight.push_back(Flying {
            admitted_ns: now_ns,
            cost,
            forecast,
        });
        self.options.steps.map(|(least, _)| least + level as u16)
    }

    /// How many steps fewer than the most these are.
    #[must_use]
    pub fn saved(&self, steps: Option<u16>) -> u16 {
        let most = self.options.steps.map(|(_, most)| most);
        most.zip(steps)
            .map_or(0, |(most, steps)| most.saturating_sub(steps))
    }

    /// Says whether a chunk took longer than was asked for.
    #[must_use]
    pub fn is_late(&self, latency_ns: Option<u64>) -> bool {
        let asked = self.options.max_latency_ns.zip(latency_ns);
        asked.is_some_and(|(asked, took)| took > asked)
    }

    /// The sink has the oldest chunk in flight.
    ///
    /// # Errors
    /// No chunk can be as fast as was asked for.
    pub fn passed(&mut self, chunk: &Passed<'_>) -> Result<(), TooSlow> {
        let took_ns = chunk.accepted_ns.saturating_sub(chunk.build_start_ns);
        if let Some(forecast) = self.overtaken(chunk.accepted_ns) {
            let off = took_ns as f64 / forecast.max(1.0);
            self.stretch.add(off.clamp(0.5, 2.0), 4 * WINDOW);
        }
        let fewest = self.options.steps.map_or(0, |(fewest, _)| fewest);
        let level = usize::from(chunk.steps.unwrap_or(fewest).saturating_sub(fewest));
        for (mean, work) in self.works[level].iter_mut().zip(chunk.works_ns) {
            mean.add(*work as f64, WINDOW);
        }
        let works_ns: u64 = chunk.works_ns.iter().sum();
        let beside = took_ns.saturating_sub(works_ns) as f64;
        self.beside = Some(self.beside.map_or(beside, |least| least.min(beside)));
        let (read_ns, (frames, skipped)) = (chunk.read_ns.0, chunk.frames);
        if let Some(before_ns) = self.read_ns.replace(read_ns) {
            let chunks = 1.0 + f64::from(skipped) / f64::from(frames.max(1));
            let interval = read_ns.saturating_sub(before_ns) as f64 / chunks;
            self.interval.add(interval, WINDOW);
        }
        self.accepted += 1;
        if self.accepted > FIRST {
            return Ok(());
        }
        // With `Block` chunks wait for each other, so their work alone counts.
        let own_ns = if self.drops() { took_ns } else { works_ns };
        let gathered_ns = chunk.read_ns.1.saturating_sub(read_ns);
        let least_ns = own_ns + gathered_ns;
        let least_ns = self.least_ns.map_or(least_ns, |least| least.min(least_ns));
        self.least_ns = Some(least_ns);
        match self.options.max_latency_ns {
            Some(asked_ns) if self.accepted == FIRST && least_ns > asked_ns => Err(TooSlow {
                asked_ns,
                least_ns,
                at_fewest: self.options.steps.is_some(),
            }),
            _ => Ok(()),
        }
    }

    /// A hard cut overtook the oldest chunk in flight. Gives how long it was to take.
    pub fn overtaken(&mut self, now_ns: u64) -> Option<f64> {
        self.last_accepted_ns = now_ns;
        self.in_flight.pop_front()?.forecast
    }

    /// What chunks with so many steps beyond the fewest take; of a number that was never measured, what the next lower one
    /// takes that was.
    fn cost(&self, level: usize) -> Option<ChunkCost> {
        let known = self.works[..=level].iter().rev();
        let mut known = known.chain(&self.works[level..]);
        let works = known.find(|works| works.iter().any(|mean| mean.seen > 0))?;
        let works = works.iter().map(|mean| mean.value);
        Some(ChunkCost {
            period: works.clone().fold(0.0, f64::max),
            empty: works.sum::<f64>() + self.beside.unwrap_or(0.0),
        })
    }

    /// How long a chunk takes that is admitted now, by what was measured of each.
    fn forecast(&self, now_ns: u64, cost: ChunkCost) -> f64 {
        let now = now_ns as f64;
        let leaves = |before: f64, admitted: f64, cost: ChunkCost| {
            (admitted + cost.empty).max(before + cost.period)
        };
        let before = self.last_accepted_ns as f64;
        let before = self.in_flight.iter().fold(before, |before, flying| {
            let cost = flying.cost.unwrap_or(cost);
            leaves(before, flying.admitted_ns as f64, cost).max(now)
        });
        leaves(before, now, cost) - now
    }

    fn stretch(&self) -> f64 {
        self.stretch.value.max(1.0)
    }

    /// How long it takes at the most: the scatter of several works evens out.
    fn takes_at_most(&self, now_ns: u64, cost: ChunkCost) -> f64 {
        let works = self.forecast(now_ns, cost) / cost.period.max(1.0);
        self.takes(now_ns, cost, works.sqrt())
    }

    /// How long it takes, with room for the scatter of so many works.
    fn takes(&self, now_ns: u64, cost: ChunkCost, works: f64) -> f64 {
        self.stretch() * (self.forecast(now_ns, cost) + ROOM * works * cost.period)
    }

    /// Chooses the steps of a chunk that has waited so long.
    fn choose(&mut self, now_ns: u64, waited_ns: Option<f64>) -> usize {
        let cost = self.cost(self.level).filter(|_| self.drops());
        let (Some((fewest, _)), Some(cost)) = (self.options.steps, cost) else {
            return if self.drops() {
                0
            } else {
                self.works.len() - 1
            };
        };
        if self.admitted < FIRST {
            return 0;
        }
        let waited = waited_ns.unwrap_or(0.0);
        let asked = self.options.max_latency_ns.map(|asked| asked as f64);
        let asked = asked.unwrap_or(cost.empty + f64::from(self.depth) * cost.period);
        // What is left of the time for waiting.
        let left = |level: usize| {
            let takes = self
                .cost(level)
                .map(|cost| self.takes_at_most(now_ns, cost));
            asked - takes.unwrap_or(0.0)
        };
        let mut level = self.level;
        while level > 0 && waited > left(level) {
            level -= 1;
        }
        let is_settled = self.settled > self.in_flight.len() as u32 + ENOUGH;
        if level == self.level && level > 0 && is_settled && 2.0 * waited > left(level) {
            level -= 1;
        }
        if level < self.level {
            (self.level, self.settled, self.calm) = (level, 0, 0);
            return level;
        }
        let (left, stretch) = (left(level), self.stretch());
        self.settled += 1;
        self.calm = if 4.0 * waited > left {
            0
        } else {
            self.calm + 1
        };
        let Some(next) = self.works.get(level + 1) else {
            return level;
        };
        let seen = next.iter().map(|mean| mean.seen).max().unwrap_or(0);
        // At the most all of its work is in its steps.
        let steps = f64::from(fewest) + level as f64;
        let more = (steps + 1.0) / steps.max(1.0);
        let measured = self.cost(level + 1).filter(|_| seen >= ENOUGH);
        let period = measured.map_or(cost.period * more, |cost| cost.period);
        let fits = waited + (asked - left) * more <= asked;
        if self.calm < PROBE_EVERY || !fits {
            return level;
        }
        let interval = self.interval.get().filter(|_| waited_ns.is_some());
        if interval.is_none_or(|interval| period * stretch <= BUSY * interval) {
            (self.level, self.settled, self.calm) = (level + 1, 0, 0);
            return self.level;
        }
        let every = if seen < ENOUGH {
            PROBE_EVERY
        } else {
            4 * PROBE_EVERY
        };
        level + usize::from(self.settled.is_multiple_of(every))
    }
}
