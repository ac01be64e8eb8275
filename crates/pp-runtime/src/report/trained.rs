//! The figures of a training, as the report has them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a stage takes: the median of its actions of each kind in the latest steps, in milliseconds; none of a kind that it does
/// not have.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StageCosts {
    /// The stage of the model.
    pub stage: u32,
    /// Its rank.
    pub rank: u32,
    /// Of a forward (F).
    pub forward_ms: Option<f64>,
    /// Of a backward for the input (I).
    pub input_ms: Option<f64>,
    /// Of a backward for the weights (W).
    pub weight_ms: Option<f64>,
    /// Of a whole backward (B).
    pub backward_ms: Option<f64>,
}

/// The action that moved the end of a step most.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CauseMeasures {
    /// The action, as a schedule writes it.
    pub action: String,
    /// Its rank.
    pub rank: u32,
    /// How long its rank and all that it needs were there before it began.
    pub began_late_ms: f64,
    /// How much longer than the median of its kind it took.
    pub took_longer_ms: f64,
}

/// How a job trained. The figures of a step are those of the one with the median length among the latest 16; they are null
/// where actions were not measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainingMeasures {
    /// The name of the schedule.
    pub schedule: String,
    /// Its ranks.
    pub ranks: u32,
    /// Its microbatches.
    pub microbatches: u32,
    /// Steps that moved the weights.
    pub steps: u64,
    /// The loss of the last one.
    pub loss: Option<f64>,
    /// The stages of the model.
    pub stages: Vec<StageCosts>,
    /// From the start of the first action of a step to the end of the last.
    pub step_ms: Option<f64>,
    /// The same by the simulator, for the costs of the stages.
    pub step_simulated_ms: Option<f64>,
    /// The share of the time of all ranks in which none of their actions is at work, from 0 to 1.
    pub bubble: Option<f64>,
    /// The same by the simulator.
    pub bubble_simulated: Option<f64>,
    /// What made the step longer than its simulation.
    pub cause: Option<CauseMeasures>,
}

/// One line.
impl fmt::Display for TrainingMeasures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |ms: f64| format!("{ms:.1} ms");
        let plural = if self.steps == 1 { "" } else { "s" };
        write!(f, "{}, {} step{plural}", self.schedule, self.steps)?;
        if let Some(loss) = self.loss {
            write!(f, ", loss {loss:.6}")?;
        }
        let lengths = self.step_ms.zip(self.step_simulated_ms);
        let Some(((run, simulated), bubbles)) = lengths.zip(self.bubble.zip(self.bubble_simulated))
        else {
            return f.write_str(", the times of actions were not measured");
        };
        let [bubble, ideal] = [bubbles.0, bubbles.1].map(|share| 100.0 * share);
        write!(f, "; a step {}, simulated {}", ms(run), ms(simulated))?;
        write!(f, "; bubble {bubble:.1} %, simulated {ideal:.1} %")?;
        if let Some(cause) = &self.cause {
            let (late, longer) = (ms(cause.began_late_ms), ms(cause.took_longer_ms));
            let (action, rank) = (&cause.action, cause.rank);
            write!(f, "; most by {action} on rank {rank}: began {late} late")?;
            write!(f, ", took {longer} longer")?;
        }
        Ok(())
    }
}
