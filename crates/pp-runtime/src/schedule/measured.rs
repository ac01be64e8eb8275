//! A step as a run measured it, beside its simulation.
//!
//! Hazard: a run that is slower than its simulation does not say why, and its longest wait may have cost nothing. Guarantee:
//! the cause is sought along the chain of steps that the end of the run waited for, so what is named has moved the end.

use super::clock::{Cost, Span};
use super::flaw::{Flaw, StepPlace};
use super::graph::{Graph, NONE};
use super::limits::Limits;
use super::simulate::Timeline;
use super::{Action, Op, Schedule, Step};

/// Numbers of a stage and a microbatch: start and end of F, of I or B, and of W.
const NUMBERS: usize = 6;

/// When each action of a step was at work, in nanoseconds from the start of the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeasuredStep {
    /// By stage, microbatch, and F, I or B, W.
    spans: Vec<Span>,
    microbatches: u32,
}

/// The step that moved the end of a run most. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cause {
    /// Where it stands.
    pub place: StepPlace,
    /// How long its rank and all that it needs were there before it began.
    pub began_late: u64,
    /// How much longer than its costs it took.
    pub took_longer: u64,
}

impl MeasuredStep {
    /// Takes the start and the end of F, of I or B, and of W in seconds, for each microbatch of each stage; of a W that there is
    /// not, any number. Ranks whose clocks differ are moved so far that no action begins before the end of what it needs.
    /// `None` if there are not as many numbers, one is no time, or all are 0: then nothing was measured.
    #[must_use]
    pub fn new(schedule: &Schedule, seconds: &[f64]) -> Option<Self> {
        let microbatches = schedule.microbatches;
        let all = schedule.rank_of.len() * microbatches as usize;
        let is_time = |second: &f64| (0.0..1e9).contains(second);
        let is_measured = seconds.iter().any(|second| *second > 0.0);
        if seconds.len() != NUMBERS * all || !seconds.iter().all(is_time) || !is_measured {
            return None;
        }
        let ns = |second: f64| (second * 1e9) as i64;
        let times: Vec<[i64; 2]> = seconds
            .chunks_exact(2)
            .map(|two| [ns(two[0]), ns(two[1])])
            .collect();
        let moved = moved(schedule, &times);
        let there = |action: Action| {
            let by = moved[schedule.rank_of[action.stage as usize] as usize];
            times[place(action, microbatches)].map(|at| at + by)
        };
        let actions = || schedule.ranks.iter().flatten().flat_map(Step::actions);
        let first = actions().map(|action| there(action)[0]).min()?;
        let mut spans = vec![Span { start: 0, end: 0 }; times.len()];
        for action in actions() {
            let [start, end] = there(action).map(|at| (at - first).cast_unsigned());
            let end = end.max(start);
            spans[place(action, microbatches)] = Span { start, end };
        }
        Some(Self {
            spans,
            microbatches,
        })
    }

    /// When an action was at work.
    pub(crate) fn span(&self, action: Action) -> Span {
        self.spans[place(action, self.microbatches)]
    }

    /// The end of the last action.
    #[must_use]
    pub fn makespan(&self) -> u64 {
        let ends = self.spans.iter().map(|span| span.end);
        ends.max().unwrap_or(0)
    }

    /// By rank: the time in which none of its actions was at work.
    #[must_use]
    pub fn idle(&self, schedule: &Schedule) -> Vec<u64> {
        let length = |action| {
            let span = self.span(action);
            span.end - span.start
        };
        let busy =
            |steps: &Vec<Step>| -> u64 { steps.iter().flat_map(Step::actions).map(length).sum() };
        let idle = |steps| self.makespan().saturating_sub(busy(steps));
        schedule.ranks.iter().map(idle).collect()
    }

    /// From the start of the first to the end of the last action of a step of a rank.
    fn step(&self, step: Step) -> Span {
        let spans = || step.actions().map(|action| self.span(action));
        Span {
            start: spans().map(|span| span.start).min().unwrap_or(0),
            end: spans().map(|span| span.end).max().unwrap_or(0),
        }
    }
}

fn place(action: Action, microbatches: u32) -> usize {
    let kind = match action.op {
        Op::Forward => 0,
        Op::BackwardWeight => 2,
        _ => 1,
    };
    let of_stage = action.stage as usize * microbatches as usize;
    (of_stage + action.microbatch as usize) * (NUMBERS / 2) + kind
}

/// By rank: how much later its clock must be read.
fn moved(schedule: &Schedule, times: &[[i64; 2]]) -> Vec<i64> {
    let rank_of = |stage: u32| schedule.rank_of[stage as usize] as usize;
    let mut moved = vec![0; schedule.ranks.len()];
    // Clocks that have one time need no round. Else each round sets one rank more right at least.
    for _ in 0..moved.len() {
        let before = moved.clone();
        for (stage, microbatch) in (1..schedule.stages())
            .flat_map(|stage| (0..schedule.microbatches).map(move |number| (stage, number)))
        {
            let at =
                |stage, op| times[place(Action::new(stage, op, microbatch), schedule.microbatches)];
            let (below, above) = (stage - 1, stage);
            for (from, to, op) in [
                (below, above, Op::Forward),
                (above, below, Op::BackwardInput),
            ] {
                let [start, end] = [at(to, op)[0], at(from, op)[1]];
                let least = moved[rank_of(from)] + end - start;
                if rank_of(from) != rank_of(to) && moved[rank_of(to)] < least {
                    moved[rank_of(to)] = least;
                }
            }
        }
        if moved == before {
            break;
        }
    }
    moved
}

impl Schedule {
    /// A step that was run, as a timeline beside its simulation at these costs in nanoseconds, with any number of slots; and
    /// what made the difference, where a step began late or took longer than its costs.
    ///
    /// # Errors
    /// As [`Schedule::simulate`].
    pub fn replayed(
        &self,
        measured: &MeasuredStep,
        costs: &impl Cost,
    ) -> Result<([Timeline; 2], Option<Cause>), Flaw> {
        let simulated = self.simulate(costs, Limits::default())?;
        let spans = |steps: &Vec<Step>| steps.iter().map(|step| measured.step(*step)).collect();
        let run = Timeline {
            makespan: measured.makespan(),
            idle: measured.idle(self),
            spans: self.ranks.iter().map(spans).collect(),
            ..simulated.clone()
        };
        let cause = cause(&Graph::new(self)?, &run, costs);
        Ok(([run, simulated], cause))
    }
}

/// What delayed the end most, among the steps that it waited for.
fn cause(graph: &Graph<'_>, run: &Timeline, costs: &impl Cost) -> Option<Cause> {
    let span = |rank: u32, node: u32| run.spans[rank as usize][(node - graph.first(rank)) as usize];
    let lasts = (0..graph.ranks()).filter_map(|rank| {
        let last = graph.first(rank + 1).checked_sub(1)?;
        (last >= graph.first(rank)).then_some((rank, last))
    });
    let mut at = lasts.max_by_key(|(rank, node)| span(*rank, *node).end);
    let mut worst: Option<Cause> = None;
    while let Some((rank, node)) = at {
        let before = (node > graph.first(rank)).then(|| (rank, node - 1));
        let mut needs: Vec<(u32, u32)> = before.into_iter().collect();
        graph.waits(rank, node, None, |wait| needs.push((wait.rank, wait.node)));
        needs.retain(|(_, node)| *node != NONE);
        let latest = needs
            .into_iter()
            .max_by_key(|(rank, node)| span(*rank, *node).end);
        let ready = latest.map_or(0, |(rank, node)| span(rank, node).end);
        let Span { start, end } = span(rank, node);
        let place = graph.place(node);
        let found = Cause {
            place,
            began_late: start.saturating_sub(ready),
            took_longer: (end - start).saturating_sub(costs.step(rank, place.step)),
        };
        let delay = |cause: &Cause| cause.began_late + cause.took_longer;
        if delay(&found) > worst.as_ref().map_or(0, delay) {
            worst = Some(found);
        }
        at = latest;
    }
    worst
}
