//! The launchers, a file for each: the variables that it sets, how its job is told apart, and where rank 0 is met.

mod open_mpi;
mod rules;
mod slurm;
mod torchrun;

pub(super) use self::rules::Rules;
use super::place::{Env, Launcher};

/// The launchers, the innermost first.
pub(super) const ALL: [Rules; 3] = [torchrun::RULES, open_mpi::RULES, slurm::RULES];

impl Launcher {
    /// The remedy where one of them started this process and must not have: the variables to unset.
    #[must_use]
    pub fn unset_all() -> String {
        let [usual, others @ ..] = ALL;
        let others = others.map(|rules| rules.rank).join(", ");
        format!("unset {} ({others})", usual.shows.join(" and "))
    }

    /// The variable with the number of ranks on this host, where no GPU of the host is hidden from them.
    #[must_use]
    pub fn local_size_variable(self) -> Option<&'static str> {
        let rules = ALL.into_iter().find(|rules| rules.launcher == self);
        rules?.local_size
    }
}

impl Rules {
    /// The launcher that started this process.
    pub(super) fn of(env: &Env<'_>) -> Option<Self> {
        let is_here = |rules: &Self| {
            let starts_ranks = rules.no_rank_without;
            env.first(rules.shows).is_some()
                && (starts_ranks.is_empty() || env.first(starts_ranks).is_some())
        };
        ALL.into_iter().find(is_here)
    }
}
