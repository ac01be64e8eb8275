//! Training schedules for the package: checked, and as the order in which the ranks of a job work.

use pp_runtime::report::Training;
use pp_runtime::schedule::{Action, Kind, Limits, Runnable, Schedule as Listed, Step};
use pyo3::prelude::*;

use crate::error::refused;

/// A schedule that was checked, with an exchange at the end of each step.
#[pyclass(frozen, module = "pp_pipeline._native")]
pub(crate) struct Schedule {
    name: String,
    listed: Listed,
    pub(crate) runnable: Runnable,
}

/// Stage, letter of the computation (F, I, W or B) and microbatch.
type Row = (u32, &'static str, u32);

#[pymethods]
impl Schedule {
    /// The schedule that `pp schedule list` calls `name`.
    #[staticmethod]
    fn build(name: &str, ranks: u32, stages_per_rank: u32, microbatches: u32) -> PyResult<Self> {
        let kind: Kind = name.parse().map_err(|error| refused(&error))?;
        let listed = Listed::build(kind, ranks, stages_per_rank, microbatches);
        Self::of(kind.name(), listed.map_err(|error| refused(&error))?)
    }

    /// The schedule that a CSV of this name holds: a line for each rank.
    #[staticmethod]
    fn csv(text: &str, name: &str) -> PyResult<Self> {
        let listed = Listed::parse_csv(text);
        Self::of(name, listed.map_err(|error| refused(&error))?)
    }

    /// The stages of a job that runs it. Source and sink stand on rank 0.
    #[getter]
    fn pipeline(&self) -> String {
        self.runnable.pipeline().to_string()
    }

    /// The rank of each stage of the model.
    #[getter]
    fn rank_of(&self) -> Vec<u32> {
        self.listed.stage_to_rank().to_vec()
    }

    #[getter]
    fn microbatches(&self) -> u32 {
        self.listed.microbatches()
    }

    /// What each rank does, in its order.
    fn actions(&self) -> Vec<Vec<Row>> {
        let row = |action: Action| (action.stage, action.op.name(), action.microbatch);
        let rows = |steps: &Vec<Step>| steps.iter().flat_map(Step::actions).map(row).collect();
        self.listed.ranks().iter().map(rows).collect()
    }
}

impl Schedule {
    /// Two slots more than it needs. With as many as it needs, a rank makes no result while the one before is in use, and a rank
    /// that issues work to a device returns a slot only behind that.
    fn of(name: &str, listed: Listed) -> PyResult<Self> {
        let report = listed
            .check(Limits::default())
            .map_err(|error| refused(&error))?;
        let slots = report.slots_per_edge.max(1) + 2;
        let runnable = listed.trainable(slots).map_err(|error| refused(&error))?;
        Ok(Self {
            name: name.into(),
            listed,
            runnable,
        })
    }

    /// A training by it, before its first step.
    pub(crate) fn training(&self) -> Training {
        Training::new(&self.name, &self.listed)
    }
}
