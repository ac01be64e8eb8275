//! Schedules that PyTorch 2.15 made, and what follows from them.

use std::collections::BTreeMap;

use pp_runtime::schedule::{Kind, Schedule};
use serde::Deserialize;

/// Computations in zero-bubble order with bubbles, two ranks and four stages.
pub(crate) const ZB1P: &str = include_str!("golden/zb1p-2ranks-4stages-compute.csv");
/// The same, both backwards merged where they can be, and lowered without waits.
pub(crate) const ZB1P_LOWERED: &str = include_str!("golden/zb1p-2ranks-4stages-lowered.csv");
/// A valid schedule that no builder makes.
pub(crate) const CUSTOM: &str = include_str!("golden/custom-2ranks-4stages.csv");

/// A schedule of PyTorch.
#[derive(Debug, Deserialize)]
pub(crate) struct Golden {
    schedule: String,
    pub(crate) ranks: u32,
    pub(crate) stages_per_rank: u32,
    pub(crate) microbatches: u32,
    pub(crate) stage_to_rank: Vec<u32>,
    compute: Vec<String>,
    lowered: Vec<String>,
    /// By rank.
    pub(crate) activation_slots: Vec<u64>,
    /// By the costs, which the key names.
    pub(crate) sim: BTreeMap<String, Simulated>,
    pub(crate) min_slots_per_edge: u32,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Simulated {
    pub(crate) makespan: u64,
    /// By rank.
    pub(crate) idle: Vec<u64>,
}

impl Golden {
    pub(crate) fn kind(&self) -> Kind {
        match (self.schedule.as_str(), self.stages_per_rank) {
            ("InterleavedZeroBubble", 1) => Kind::ZbH1,
            (name, _) => name.parse().unwrap(),
        }
    }

    /// The computations alone.
    pub(crate) fn compute(&self) -> Schedule {
        Schedule::parse_csv(&self.compute.join("\n")).unwrap()
    }

    /// With sends, receives and waits, as PyTorch writes them.
    pub(crate) fn lowered(&self) -> String {
        self.lowered.join("\n") + "\n"
    }
}

/// All 40.
pub(crate) fn all() -> Vec<Golden> {
    let lines = include_str!("golden/schedules.jsonl").lines();
    let all: Vec<Golden> = lines
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(all.len(), 40);
    all
}

/// Stages a rank, microbatches and ranks of PyTorch's own tests.
const SIZES: [[u32; 3]; 22] = [
    [2, 2, 2],
    [2, 4, 4],
    [2, 8, 2],
    [2, 8, 4],
    [2, 8, 8],
    [4, 4, 4],
    [4, 8, 4],
    [4, 8, 8],
    [4, 16, 4],
    [4, 32, 4],
    [4, 64, 4],
    [4, 16, 16],
    [4, 32, 32],
    [4, 128, 64],
    [3, 2, 2],
    [3, 8, 2],
    [3, 12, 4],
    [4, 6, 3],
    [4, 10, 5],
    [2, 3, 4],
    [2, 10, 4],
    [2, 15, 4],
];

/// Every schedule at the sizes of PyTorch's own tests, with its own number of stages a rank where it insists on one.
pub(crate) fn matrix() -> Vec<(String, Schedule)> {
    let mut built = Vec::new();
    for [stages, microbatches, ranks] in SIZES {
        for kind in Kind::ALL {
            let stages = kind.stages_per_rank().unwrap_or(stages);
            if let Ok(schedule) = Schedule::build(kind, ranks, stages, microbatches) {
                built.push((format!("{kind} {ranks} {stages} {microbatches}"), schedule));
            }
        }
    }
    built
}

/// A schedule that must be refused.
#[derive(Deserialize)]
struct Bad {
    name: String,
    /// By rank.
    ranks: BTreeMap<u32, String>,
}

/// The five that PyTorch's own checks were tried with: name and rows.
pub(crate) fn bad() -> Vec<(String, String)> {
    let bad: Vec<Bad> = serde_json::from_str(include_str!("golden/bad.json")).unwrap();
    let rows = |ranks: BTreeMap<u32, String>| ranks.into_values().collect::<Vec<_>>().join("\n");
    let bad = bad.into_iter();
    bad.map(|bad| (bad.name, rows(bad.ranks))).collect()
}
