//! How a job trains: the figures of its steps, and where they differ from the simulation of its schedule.

use std::collections::VecDeque;
use std::io::{self, Write};

use super::svg::write_step_svg;
use super::trained::{CauseMeasures, StageCosts, TrainingMeasures};
use crate::schedule::{Action, Cause, MeasuredStep, Op, Schedule, Step, Timeline};

/// Measured steps that are kept.
const KEPT: usize = 16;
/// The computations, in the order of the fields of [`StageCosts`].
const OPS: [Op; 4] = [
    Op::Forward,
    Op::BackwardInput,
    Op::BackwardWeight,
    Op::Backward,
];

/// The training of a job: its schedule and its latest steps.
#[derive(Clone, Debug)]
pub struct Training {
    name: String,
    schedule: Schedule,
    steps: u64,
    loss: Option<f64>,
    /// The latest steps that were measured, oldest first.
    latest: VecDeque<MeasuredStep>,
}

impl Training {
    /// A job that trains by this schedule, before its first step.
    #[must_use]
    pub fn new(name: &str, schedule: &Schedule) -> Self {
        Self {
            name: name.into(),
            schedule: schedule.clone(),
            steps: 0,
            loss: None,
            latest: VecDeque::new(),
        }
    }

    /// Takes in a step: its loss, and when its actions were at work ([`MeasuredStep::new`]); nothing where that was not
    /// measured.
    pub fn step(&mut self, loss: f64, seconds: &[f64]) {
        self.steps += 1;
        self.loss = Some(loss);
        if let Some(step) = MeasuredStep::new(&self.schedule, seconds) {
            if self.latest.len() == KEPT {
                self.latest.pop_front();
            }
            self.latest.push_back(step);
        }
    }

    /// The name of its schedule.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How many steps it made, and the loss of the last one.
    #[must_use]
    pub fn progress(&self) -> (u64, Option<f64>) {
        (self.steps, self.loss)
    }

    /// The bubble of the last step, if it was measured.
    #[must_use]
    pub fn last_bubble(&self) -> Option<f64> {
        let last = self.latest.back()?;
        share(&last.idle(&self.schedule), last.makespan())
    }

    /// The figures of its steps.
    #[must_use]
    pub fn measures(&self) -> TrainingMeasures {
        let costs = self.costs();
        let stage = |(stage, &[forward, input, weight, backward]): (usize, &[Option<u64>; 4])| {
            let ms = |ns: Option<u64>| ns.map(|ns| ns as f64 / 1e6);
            StageCosts {
                stage: stage as u32,
                rank: self.schedule.stage_to_rank()[stage],
                forward_ms: ms(forward),
                input_ms: ms(input),
                weight_ms: ms(weight),
                backward_ms: ms(backward),
            }
        };
        let (timelines, cause) = self.replayed(&costs).unzip();
        let [run, simulated] = timelines.map_or([None, None], |both| both.map(Some));
        let ms = |of: &Option<Timeline>| Some(of.as_ref()?.makespan as f64 / 1e6);
        let bubble = |of: &Option<Timeline>| {
            let of = of.as_ref()?;
            share(&of.idle, of.makespan)
        };
        TrainingMeasures {
            schedule: self.name.clone(),
            ranks: self.schedule.ranks().len() as u32,
            microbatches: self.schedule.microbatches(),
            steps: self.steps,
            loss: self.loss,
            stages: costs.iter().enumerate().map(stage).collect(),
            step_ms: ms(&run),
            step_simulated_ms: ms(&simulated),
            bubble: bubble(&run),
            bubble_simulated: bubble(&simulated),
            cause: cause.flatten().map(|cause| CauseMeasures {
                action: cause.place.step.to_string(),
                rank: cause.place.rank,
                began_late_ms: cause.began_late as f64 / 1e6,
                took_longer_ms: cause.took_longer as f64 / 1e6,
            }),
        }
    }

    /// Draws the step of median length, and its simulation below it. Draws nothing and gives `false` where no step was
    /// measured.
    ///
    /// # Errors
    /// Whatever `out` returns.
    pub fn write_svg(&self, out: &mut impl Write) -> io::Result<bool> {
        let Some((timelines, _)) = self.replayed(&self.costs()) else {
            return Ok(false);
        };
        let measures = self.measures();
        let about = ("a training step", &*measures.to_string());
        write_step_svg(out, about, &self.schedule, &timelines)?;
        Ok(true)
    }

    /// By stage, what its actions take.
    fn costs(&self) -> Vec<[Option<u64>; 4]> {
        let stages = self.schedule.stages() as usize;
        let mut lengths = vec![[const { Vec::new() }; 4]; stages];
        let steps = || self.schedule.ranks().iter().flatten();
        for action in steps().flat_map(Step::actions) {
            let Some(at) = OPS.iter().position(|op| *op == action.op) else {
                continue;
            };
            let spans = self.latest.iter().map(|step| step.span(action));
            let of = &mut lengths[action.stage as usize][at];
            of.extend(spans.map(|span| span.end - span.start));
        }
        let median = |mut all: Vec<u64>| {
            all.sort_unstable();
            all.get(all.len().saturating_sub(1) / 2).copied()
        };
        let of_stage = lengths.into_iter().map(|ops| ops.map(median));
        of_stage.collect()
    }

    /// The step of median length beside its simulation.
    fn replayed(&self, costs: &[[Option<u64>; 4]]) -> Option<([Timeline; 2], Option<Cause>)> {
        let mut by_length: Vec<_> = self.latest.iter().collect();
        by_length.sort_by_key(|step| step.makespan());
        let step = by_length.get(by_length.len().saturating_sub(1) / 2)?;
        let cost = |_: u32, action: Action| {
            let at = OPS.iter().position(|op| *op == action.op);
            let known = at.and_then(|at| costs[action.stage as usize][at]);
            known.unwrap_or(0)
        };
        // The schedule was checked before it was run.
        self.schedule.replayed(step, &cost).ok()
    }
}

/// The share of the time of all ranks in which they are idle.
fn share(idle: &[u64], makespan: u64) -> Option<f64> {
    let whole = makespan as f64 * idle.len() as f64;
    let idle = idle.iter().map(|idle| *idle as f64).sum::<f64>();
    (whole > 0.0).then(|| idle / whole)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Kind;

    /// A step of 1F1B on two ranks with two microbatches, F of 1 s, B of 2 s, whose actions come `late` by so much.
    fn seconds(late: impl Fn(&str) -> f64, rank_1_clock: f64) -> Vec<f64> {
        let mut all = Vec::new();
        for (name, start, length) in [
            ("0F0", 10.0, 1.0),
            ("0B0", 14.0, 2.0),
            ("0F1", 11.0, 1.0),
            ("0B1", 17.0, 2.0),
            ("1F0", 11.0, 1.0),
            ("1B0", 12.0, 2.0),
            ("1F1", 14.0, 1.0),
            ("1B1", 15.0, 2.0),
        ] {
            let clock = if name.starts_with('1') {
                rank_1_clock
            } else {
                0.0
            };
            let start = start + late(name) + clock;
            all.extend([start, start + length]);
            if name.contains('B') {
                // There is no W.
                all.extend([0.0, 0.0]);
            }
        }
        all
    }

    fn training() -> Training {
        Training::new("1f1b", &Schedule::build(Kind::OneFOneB, 2, 1, 2).unwrap())
    }

    #[test]
    fn a_step_that_runs_as_simulated_has_its_bubble_and_no_cause() {
        // The second clock is behind, or ahead, by more than the step takes.
        for clock in [0.0, -9.0, 9e5] {
            let mut training = training();
            training.step(0.5, &seconds(|_| 0.0, clock));
            let m = training.measures();
            assert_eq!(
                (m.step_ms, m.step_simulated_ms),
                (Some(9e3), Some(9e3)),
                "{clock}"
            );
            assert_eq!(
                (m.bubble, m.bubble_simulated, &m.cause),
                (Some(1.0 / 3.0), Some(1.0 / 3.0), &None)
            );
            assert_eq!(training.last_bubble(), m.bubble);
            let costs: Vec<_> = m
                .stages
                .iter()
                .map(|of| (of.rank, of.forward_ms, of.input_ms, of.backward_ms))
                .collect();
            assert_eq!(costs, [0, 1].map(|rank| (rank, Some(1e3), None, Some(2e3))));
        }
    }

    #[test]
    fn the_action_where_a_delay_arises_is_named_and_not_those_that_wait_for_it() {
        let mut training = training();
        // 1B0 begins late, 1F1 behind it later still, and all behind them wait. Nothing waits for 0F1, the latest.
        let late = |name: &str| match name {
            "0F1" => 1.5,
            "1B0" | "0B0" => 0.25,
            "1F1" | "1B1" | "0B1" => 0.75,
            _ => 0.0,
        };
        training.step(0.5, &seconds(late, 0.0));
        let m = training.measures();
        let cause = m.cause.clone().unwrap();
        assert_eq!((&*cause.action, cause.rank), ("1F1", 1));
        assert_eq!((cause.began_late_ms, cause.took_longer_ms), (500.0, 0.0));
        assert_eq!((m.step_ms, m.step_simulated_ms), (Some(9.75e3), Some(9e3)));
        let line = "1f1b, 1 step, loss 0.500000; a step 9750.0 ms, simulated 9000.0 ms; bubble 38.5 %, simulated 33.3 %; \
                    most by 1F1 on rank 1: began 500.0 ms late, took 0.0 ms longer";
        assert_eq!(m.to_string(), line);
    }

    #[test]
    fn the_step_of_median_length_counts_and_the_latest_16_are_kept() {
        let mut training = training();
        for step in 0..20 {
            let late = |name: &str| if name == "0B1" { f64::from(step) } else { 0.0 };
            training.step(f64::from(step), &seconds(late, 0.0));
        }
        let m = training.measures();
        assert_eq!(
            (m.steps, m.loss, m.step_ms),
            (20, Some(19.0), Some(9e3 + 11e3))
        );
    }

    #[test]
    fn the_picture_has_both_steps_with_their_microbatches_and_empty_bubbles() {
        let mut out = Vec::new();
        let mut training = training();
        assert!(!training.write_svg(&mut out).unwrap() && out.is_empty());
        training.step(0.5, &seconds(|_| 0.0, 0.0));
        assert!(training.write_svg(&mut out).unwrap());
        let svg = String::from_utf8(out).unwrap();
        for (what, count) in [
            // The bars, each with the number of its microbatch, and the legend.
            ("<rect class=\"source\"", 2 * 4 + 1),
            ("<rect class=\"stage0\"", 2 * 4 + 1),
            ("<text class=\"num\"", 2 * 8),
            ("<title>1B1, 2000 ms</title>", 2),
            (
                ">measured · 2 ranks · 2 stages · 2 microbatches · makespan 9000 ms",
                1,
            ),
            (">simulated · 2 ranks", 1),
            ("class=\"idle\"", 0),
        ] {
            assert_eq!(svg.matches(what).count(), count, "{what}\n{svg}");
        }
    }

    #[test]
    fn a_training_without_times_says_so() {
        let mut training = training();
        // Neither are these times.
        for seconds in [&[][..], &[1.0; 23], &[f64::NAN; 24], &[0.0; 24]] {
            training.step(0.25, seconds);
        }
        let m = training.measures();
        assert_eq!(
            (m.steps, m.step_ms, m.stages[0].forward_ms),
            (4, None, None)
        );
        assert_eq!(
            m.to_string(),
            "1f1b, 4 steps, loss 0.250000, the times of actions were not measured"
        );
    }
}
