//! A run beside its simulation.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use pp_runtime::schedule::{Action, Cost, Limits, Message, Op, Schedule, Step, Way};
use serde::Serialize;

use super::stages::Timed;

/// How far a run is from its simulation. Times count from the first action.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Judged {
    pub(super) step_ms: f64,
    pub(super) simulated_ms: f64,
    /// The action that begins farthest from where the simulator says, and by how much: in milliseconds, later being more, and
    /// as a share of the step.
    pub(super) action: String,
    pub(super) off_ms: f64,
    pub(super) share: f64,
    /// The transfer time of the fastest edge, in microseconds.
    pub(super) hand_over_us: u64,
}

/// When a step of the schedule began and ended, in nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: u64,
    end: u64,
}

/// The last step of a run.
struct LastStep<'a> {
    schedule: &'a Schedule,
    /// By rank and step.
    spans: Vec<Vec<Span>>,
    /// By action: its rank and step.
    places: HashMap<Action, (usize, usize)>,
}

impl<'a> LastStep<'a> {
    /// Of what the ranks logged.
    ///
    /// # Errors
    /// A rank did something else than the schedule says, or in another order.
    fn new(schedule: &'a Schedule, logs: &[Vec<Timed>]) -> Result<Self> {
        let (ranks, wrote) = (schedule.ranks().len(), logs.len());
        ensure!(
            wrote == ranks,
            "{wrote} of {ranks} ranks wrote what they did"
        );
        let mut places = HashMap::new();
        let mut spans = Vec::new();
        for (rank, (steps, log)) in schedule.ranks().iter().zip(logs).enumerate() {
            let actions: usize = steps.iter().map(|step| step.actions().count()).sum();
            let whole = log.len() / actions.max(1);
            ensure!(
                log.len() == whole * actions && whole > 0,
                "rank {rank} left a step unfinished"
            );
            let first = (whole - 1) as u32 * schedule.microbatches();
            let mut last = log[log.len() - actions..].iter();
            let mut own = Vec::new();
            for (at, step) in steps.iter().enumerate() {
                let mut span = None;
                for action in step.actions() {
                    let done = last.next().context("counted")?;
                    let due = Action {
                        microbatch: first + action.microbatch,
                        ..action
                    };
                    let (done_is, due) = (&done.action, due.to_string());
                    ensure!(
                        *done_is == due,
                        "rank {rank} did {done_is}, and {due} was due"
                    );
                    let start = span.map_or(done.start_ns, |span: Span| span.start);
                    span = Some(Span {
                        start,
                        end: done.end_ns,
                    });
                    places.insert(action, (rank, at));
                }
                own.extend(span);
            }
            spans.push(own);
        }
        let run = Self {
            schedule,
            spans,
            places,
        };
        run.inputs_are_there()?;
        Ok(run)
    }

    fn span(&self, action: Action) -> Option<Span> {
        let (rank, step) = self.places.get(&action)?;
        Some(self.spans[*rank][*step])
    }

    /// What an action takes from another stage.
    fn input_of(&self, action: Action) -> Option<Action> {
        let Action {
            stage,
            op,
            microbatch,
        } = action;
        let last = self.schedule.stages() - 1;
        let backward = |stage| {
            let ops = [Op::Backward, Op::BackwardInput];
            let both = ops.map(|op| Action::new(stage, op, microbatch));
            both.into_iter()
                .find(|action| self.places.contains_key(action))
        };
        match op {
            Op::Forward => Some(Action::new(stage.checked_sub(1)?, op, microbatch)),
            Op::BackwardWeight => Some(Action::new(stage, Op::BackwardInput, microbatch)),
            _ if stage == last => Some(Action::new(stage, Op::Forward, microbatch)),
            _ => backward(stage + 1),
        }
    }

    /// Each action began when its input was there.
    fn inputs_are_there(&self) -> Result<()> {
        for action in self.places.keys() {
            let Some(input) = self.input_of(*action) else {
                ensure!(
                    action.stage == 0 && action.op == Op::Forward,
                    "{action} has no input"
                );
                continue;
            };
            let [began, ended] = [*action, input].map(|action| self.span(action));
            let (began, ended) = began.zip(ended).context("both are in the run")?;
            ensure!(
                began.start >= ended.end,
                "{action} began before {input} ended"
            );
        }
        Ok(())
    }

    fn began(&self) -> u64 {
        let firsts = self.spans.iter().filter_map(|spans| spans.first());
        firsts.map(|span| span.start).min().unwrap_or_default()
    }

    fn ended(&self) -> u64 {
        let lasts = self.spans.iter().filter_map(|spans| spans.last());
        lasts.map(|span| span.end).max().unwrap_or_default()
    }
}

/// The run's own times: of each step, and the transfer time of each edge: from the end of a step to the start of the one that
/// uses its result, the shortest of the edge.
struct Measured<'a> {
    run: &'a LastStep<'a>,
    hand_overs: HashMap<(bool, u32), u64>,
}

impl<'a> Measured<'a> {
    fn new(run: &'a LastStep<'a>) -> Self {
        let mut hand_overs = HashMap::new();
        for (action, (rank, _)) in &run.places {
            let Some(input) = run.input_of(*action) else {
                continue;
            };
            let is_edge = run.places[&input].0 != *rank;
            if let (true, Some(from), Some(to)) = (is_edge, run.span(input), run.span(*action)) {
                let edge = (action.op == Op::Forward, input.stage);
                let shortest = hand_overs.entry(edge).or_insert(u64::MAX);
                *shortest = (*shortest).min(to.start - from.end);
            }
        }
        Self { run, hand_overs }
    }
}

impl Cost for Measured<'_> {
    fn action(&self, rank: u32, action: Action) -> u64 {
        self.step(rank, Step::One(action))
    }

    fn step(&self, _: u32, step: Step) -> u64 {
        let span = step
            .actions()
            .next()
            .and_then(|action| self.run.span(action));
        span.map_or(0, |span| span.end - span.start)
    }

    fn transfer(&self, message: Message) -> u64 {
        let edge = (message.way == Way::Forward, message.from);
        self.hand_overs.get(&edge).copied().unwrap_or_default()
    }
}

/// Simulates the last step of a run, and compares the start of each action.
pub(super) fn judge(schedule: &Schedule, slots: u32, logs: &[Vec<Timed>]) -> Result<Judged> {
    let run = LastStep::new(schedule, logs)?;
    let measured = Measured::new(&run);
    let timeline = schedule.simulate(&measured, Limits::slots(slots))?;
    let began = run.began();
    let mut farthest = (0.0, String::new());
    for (rank, spans) in timeline.spans.iter().enumerate() {
        for (at, span) in spans.iter().enumerate() {
            let off = (run.spans[rank][at].start - began) as f64 - span.start as f64;
            if farthest.1.is_empty() || off.abs() > f64::abs(farthest.0) {
                farthest = (off, schedule.ranks()[rank][at].to_string());
            }
        }
    }
    let step = (run.ended() - began) as f64;
    let (off, action) = farthest;
    Ok(Judged {
        step_ms: step / 1e6,
        simulated_ms: timeline.makespan as f64 / 1e6,
        action,
        off_ms: off / 1e6,
        share: off.abs() / step,
        hand_over_us: measured
            .hand_overs
            .values()
            .min()
            .copied()
            .unwrap_or_default()
            / 1_000,
    })
}
