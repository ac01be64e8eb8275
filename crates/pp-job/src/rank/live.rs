//! What a source may ask for to keep up with it.

use pp_contract::Pipeline;
use pp_contract::pipeline::Laps;
use pp_runtime::core::{Late, LiveOptions};

use crate::error::Error;

/// Refuses what this job cannot do.
///
/// # Errors
/// [`Error::Usage`] names it, and the remedy.
pub(super) fn check(
    pipeline: &Pipeline,
    is_in_fixed_order: bool,
    live: LiveOptions,
) -> Result<(), Error> {
    let refuse = |what: &str| Err(Error::Usage(what.to_owned()));
    if is_in_fixed_order && live != LiveOptions::default() {
        return refuse(
            "the job works in a fixed order, which drops nothing and has no greatest latency; leave out late, max_latency and \
             steps_range, or the schedule",
        );
    }
    if live.max_latency_ns == Some(0) {
        return refuse("max_latency is 0, and no chunk is that fast; give a longer time");
    }
    let Some((fewest, most)) = live.steps else {
        return Ok(());
    };
    if live.late == Late::Block {
        return refuse(
            "steps_range is given, and with late block all chunks have all steps; leave it out, or choose drop",
        );
    }
    if fewest == 0 || fewest > most {
        return refuse(&format!(
            "steps_range is {fewest} to {most}; let it begin with 1 or more, and end with as many or more"
        ));
    }
    if pipeline.rings().iter().any(|ring| ring.laps == Laps::Steps) {
        return refuse(
            "steps_range is given, and the pipeline has a ring over steps, whose laps are the same for all chunks; leave it out",
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_job_cannot_do_is_refused() {
        let chain = "a@0 -> b@1 -> c@0";
        let drop = |max_latency_ns, steps| LiveOptions {
            late: Late::Drop,
            max_latency_ns,
            steps,
        };
        let block = |max_latency_ns, steps| LiveOptions {
            late: Late::Block,
            ..drop(max_latency_ns, steps)
        };
        for (pipeline, is_in_fixed_order, live, words) in [
            (chain, false, drop(Some(1), Some((1, 1))), None),
            (chain, false, block(Some(1), None), None),
            (chain, true, block(None, None), None),
            (chain, true, drop(None, None), Some("fixed order")),
            (chain, true, block(Some(1), None), Some("fixed order")),
            (chain, false, drop(Some(0), None), Some("max_latency is 0")),
            (chain, false, block(None, Some((1, 2))), Some("late block")),
            (chain, false, drop(None, Some((0, 2))), Some("is 0 to 2")),
            (chain, false, drop(None, Some((3, 2))), Some("is 3 to 2")),
            (
                "a@0 -> (b@1 -> c@2)*2 -> d@0",
                false,
                drop(None, Some((1, 2))),
                None,
            ),
            (
                "a@0 -> (b@1 -> c@2)*steps -> d@0",
                false,
                drop(None, Some((1, 2))),
                Some("over steps"),
            ),
        ] {
            let checked = check(&pipeline.parse().unwrap(), is_in_fixed_order, live);
            match words {
                None => checked.unwrap(),
                Some(words) => {
                    let error = checked.unwrap_err().to_string();
                    assert!(error.contains(words), "{error}");
                }
            }
        }
    }
}
