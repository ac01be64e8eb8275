//! What of the suite runs here, and what must.

use std::env;

use anyhow::{Result, ensure};

use crate::process::git;

/// Set on build machines: there a check that cannot run has failed.
pub(crate) const MUST_RUN: &str = "PP_TESTS_MUST_RUN";
/// Chooses what runs of the faults, shutdowns, placements, mutants and kills of networks; with `all`, all faults and shutdowns run.
pub(crate) const PART: &str = "PP_TESTS_PART";

/// The value of [`PART`]; by default the commit.
pub(crate) fn seed() -> String {
    let commit = || git("rev-parse HEAD").unwrap_or_default();
    env::var(PART).unwrap_or_else(|_| commit())
}

/// Says that a check was left out, or fails where none may be.
pub(crate) fn cannot_run(what: &str, must_run: bool) -> Result<()> {
    ensure!(!must_run, "{MUST_RUN} is set, and this cannot run: {what}");
    println!("skipped: {what}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_that_cannot_run_fails_where_it_must() {
        assert!(cannot_run("a check", false).is_ok());
        let error = cannot_run("a check", true).unwrap_err().to_string();
        assert!(error.contains("PP_TESTS_MUST_RUN") && error.contains("a check"));
    }
}
