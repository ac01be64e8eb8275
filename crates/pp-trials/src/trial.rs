//! What the catalogue of faults, the matrix of shutdowns and the placements have in common: trials, which are jobs of this
//! very program in folders of their own, side by side.

mod job;
mod left;
mod run;
mod told;
mod work;

use std::time::Duration;

pub(crate) use self::job::{
    ASIDE, CHAIN, Ground, TWO, beside_cpus, join, left_of, new_job, program_of, run_in, run_of,
    shared_gpus,
};
#[cfg(test)]
pub(crate) use self::run::choose;
pub(crate) use self::run::{Trial, TrialArgs};
pub(crate) use self::told::{Ended, Time, Told};

/// From the moment at which a rank notices a fault to the end of the last rank.
pub(crate) const ENDS_WITHIN: Duration = Duration::from_secs(1);
