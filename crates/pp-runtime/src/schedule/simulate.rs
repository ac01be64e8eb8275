//! A simulated run of a schedule.
//!
//! Hazard: a schedule that looks full on paper leaves ranks idle when backwards take longer than forwards, or transfers take
//! time. Guarantee: the times are those of a run in which everything begins as early as it can.

use super::Schedule;
use super::check::{Report, report};
use super::clock::{Cost, Span, spans};
use super::flaw::Flaw;
use super::graph::Graph;
use super::limits::Limits;
use super::walk::least_slots;

/// A simulated run. All times are in the unit of the costs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// The end of the last step; the first begins at 0.
    pub makespan: u64,
    /// By rank: the makespan less the time of its steps.
    pub idle: Vec<u64>,
    /// By rank: its steps, in the schedule's order.
    pub spans: Vec<Vec<Span>>,
    /// The slots of the run.
    pub limits: Limits,
    /// What the run takes. The use of edges is that of a run at these costs with `slots_per_edge` slots on each edge.
    pub report: Report,
}

impl Timeline {
    /// The share of the makespan in which a rank does nothing, 0 to 1; 0 if the makespan is 0.
    ///
    /// # Panics
    /// There is no such rank.
    #[must_use]
    pub fn bubble(&self, rank: u32) -> f64 {
        match self.makespan {
            0 => 0.0,
            makespan => self.idle[rank as usize] as f64 / makespan as f64,
        }
    }
}

impl Schedule {
    /// Simulates a run: the start and end of each step at these costs, with the slots that `limits` names. Without a limit no
    /// step waits for a slot.
    ///
    /// # Errors
    /// The [`Flaw`] for which [`check`](Self::check) refuses the schedule with these limits; [`Flaw::TooLong`] if a time is
    /// past 64 bits.
    pub fn simulate(&self, costs: &impl Cost, limits: Limits) -> Result<Timeline, Flaw> {
        let graph = Graph::new(self)?;
        let least = least_slots(&graph)?;
        let spans = spans(&graph, costs, limits.slots)?;
        let ends = spans.iter().filter_map(|spans| spans.last());
        let makespan = ends.map(|span| span.end).max().unwrap_or_default();
        let busy = |spans: &Vec<Span>| spans.iter().map(|span| span.end - span.start).sum::<u64>();
        let report = report(&graph, costs, least)?;
        Ok(Timeline {
            makespan,
            idle: spans.iter().map(|spans| makespan - busy(spans)).collect(),
            spans,
            limits,
            report,
        })
    }
}
