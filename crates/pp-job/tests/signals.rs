//! A signal acts on the jobs that run, and on none that has ended. Signals are the process's, so this is the only test
//! of its program. A shell may ignore SIGINT for a program in the background, so the signal is SIGTERM.

use std::cell::Cell;

use pp_contract::{FaultKind, Manifest};
use pp_job::prelude::*;
use pp_testing::{Toy, ToyFront, bytes};
use rustix::process::{Signal, getpid, kill_process};

#[test]
fn a_signal_drains_the_job_that_runs_and_forgets_the_one_that_failed() {
    let config = Config::alone(|_| None).unwrap();
    let edges = Edges::new(1, 64, 64);
    let is_asked = Cell::new(false);
    let run = |fails: bool| {
        let ranks = Ranks {
            front: |_| {
                if fails {
                    return Err(StageError::new(FaultKind::BadInput, "open", "asked for").into());
                }
                let source = || {
                    if !is_asked.replace(true) {
                        kill_process(getpid(), Signal::TERM).unwrap();
                    }
                    // Only the signal ends this job.
                    Offer::Later
                };
                let build =
                    |_: &mut TxLease| Envelope::new(Toy(0), bytes(64), Manifest::empty()).unwrap();
                Ok(FrontPart::new(ToyFront::new(source, build, drop), edges))
            },
            phase_b: |()| {
                let stages = OnHost::new(|_: &Envelope<Toy>, _: &[u8], _: &mut [u8]| Ok(()));
                Ok(PhaseBPart { stages, edges })
            },
            finish: |_, _| Ok(()),
        };
        Job::new(&config).run_alone(ranks)
    };
    run(true).unwrap_err();
    let ended = run(false).unwrap_err();
    assert!(matches!(ended, Error::Interrupted(15)), "{ended:?}");
}
