//! A signal acts on the jobs that run, and on none that has ended; then a handler of the program alone acts. Signals are
//! the process's, so each test here has a process of its own. A shell may ignore SIGINT for a program in the background,
//! so the signal is SIGTERM.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pp_job::prelude::*;
use pp_testing::{Toy, ToySink, ToySource};
use rustix::process::{Signal, getpid, kill_process};

#[test]
fn a_signal_drains_the_job_that_runs_and_forgets_the_one_that_failed() {
    if !pp_testing::alone!() {
        return;
    }
    let seen = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(signal_hook::consts::SIGUSR1, Arc::clone(&seen)).unwrap();
    let config = Config::alone(|_| None).unwrap();
    let pipeline = "a@0 -> c@0".parse().unwrap();
    let is_asked = Cell::new(false);
    let run = |fails: bool| {
        let open = |_| {
            if fails {
                return Err(StageError::new(FaultKind::BadInput, "open", "asked for").into());
            }
            let poll = || {
                if !is_asked.replace(true) {
                    kill_process(getpid(), Signal::TERM).unwrap();
                }
                // Only the signal ends this job.
                Offer::Later
            };
            let build = |_: Place, _: &mut TxLease| Built::new(Toy(0), Manifest::empty(), ());
            Ok(Opened::new(ToySource::new(poll, build)))
        };
        let sink = |(): &(), _| Ok(ToySink::<Toy, _>::new(|_, _| Ok(())));
        let program = Program::<Host, _, _>::new("a", open);
        let program = program.payloads(|_, ()| 1).sink("c", sink);
        Job::new(&config, &pipeline).run(|this| this.run(Host, Profile::new(), program))
    };
    run(true).unwrap_err();
    let ended = run(false).unwrap_err();
    assert!(matches!(ended, Error::Interrupted(15)), "{ended:?}");
    // Longer than a signal counts as meant for the job, and then until it would have ended this process.
    std::thread::sleep(Duration::from_millis(1300));
    kill_process(getpid(), Signal::USR1).unwrap();
    while !seen.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(300));
}

#[test]
fn each_job_keeps_the_exit_status_of_children_while_it_runs() {
    if !pp_testing::alone!() {
        return;
    }
    let config = Config::alone(|_| None).unwrap();
    let pipeline = "a@0 -> c@0".parse().unwrap();
    let job = Job::new(&config, &pipeline);
    let exit_status = || {
        let child = std::process::Command::new("true").status();
        child.map(|status| status.code())
    };
    job.run(|_| {
        // SAFETY: no handler is set.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
        exit_status().unwrap_err();
        job.run(|_| {
            assert_eq!(exit_status()?, Some(0));
            Ok(())
        })
    })
    .unwrap();
    // The program ignores it again.
    exit_status().unwrap_err();
}
