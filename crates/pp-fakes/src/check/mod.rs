//! Proves on recordings that a run was ordered, whatever the timing was.
//!
//! The recordings of all ranks become one graph of what must happen before what (`graph`); a vector clock for each
//! node (`clocks`) then answers "is this ordered?" for every pair of accesses (`memory`). What a run may do besides,
//! and in what order, is judged on the calls themselves (`calls`). A run that went well by luck is found out: no rule
//! looks at what happened first, only at what had to.

mod calls;
mod clocks;
mod graph;
mod memory;
mod record;
mod report;
mod shared;

pub use record::Recording;
pub use report::{Expect, Fresh, Report, Rule, Violation};

/// Checks the recordings of all processes of one run.
pub fn check(recordings: &[Recording], expect: Expect) -> Report {
    let mut report = Report::default();
    calls::faults(recordings, &mut report);
    calls::one_issuer(recordings, &mut report);
    calls::ranks_agree(recordings, expect.complete, &mut report);
    calls::steady(recordings, expect, &mut report);
    let graph = graph::build(recordings);
    match clocks::Clocks::of(&graph) {
        Ok(clocks) => memory::check(recordings, &graph, &clocks, expect.fresh, &mut report),
        Err(line) => report.violations.push(Violation {
            rule: Rule::Deadlock,
            what: format!(
                "the order has a cycle through {}",
                graph.describe(recordings, line)
            ),
        }),
    }
    if expect.complete {
        let strict = graph.with_rendezvous();
        if let Err(node) = clocks::Clocks::of(&strict) {
            report.violations.push(Violation {
                rule: Rule::Deadlock,
                what: format!(
                    "without eager sends this waits for ever: {}",
                    strict.describe(recordings, node)
                ),
            });
        }
    }
    report
}
