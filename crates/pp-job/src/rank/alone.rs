//! A job of one process: both drivers, each on its own thread.

use std::sync::Arc;
use std::time::Instant;

use pp_contract::{Fault, FaultKind};
use pp_runtime::driver::{FrontOptions, run_front, run_phase_b};
use pp_runtime::stage::{FrontStages, PhaseBStages};
use pp_runtime::switch::Switch;
use pp_runtime::watch::{SetUp, Watch, WatchOptions};
use pp_transport::bell::Bell;
use pp_transport::host::{HostLink, RxLease, TxLease};
use pp_transport::link::Link as _;

use super::parts::{Finished, FrontPart, PhaseBPart, Ranks};
use crate::error::Error;
use crate::job::Job;
use crate::{FRONT, GRACE};

impl Job<'_> {
    /// Runs the stages of both ranks in this process, which starts no other. The fault of a stage names rank 0.
    ///
    /// # Errors
    /// The first fault, or the error of a closure.
    pub fn run_alone<F, S, T>(
        self,
        ranks: Ranks<
            impl FnOnce(Bell) -> Result<FrontPart<F, T>, Error>,
            impl FnOnce(T) -> Result<PhaseBPart<S>, Error>,
            impl FnOnce(F, Finished) -> Result<(), Error>,
        >,
    ) -> Result<(), Error>
    where
        F: FrontStages<TxLease, RxLease>,
        S: PhaseBStages<TxLease, RxLease, Plan = F::Plan> + Send,
    {
        self.alone(|context| {
            let bell = Bell::new().map_err(anyhow::Error::new)?;
            let mut front = (ranks.front)(bell.clone())?;
            let depth = front.depth()?;
            let mut phase_b = (ranks.phase_b)(front.shape)?;
            let edges = front.edges;
            let links = HostLink::pair(edges.up, edges.down, bell.clone());
            let (link, back_link) = links.map_err(anyhow::Error::new)?;
            let switch = Switch::new(FRONT, bell).map_err(anyhow::Error::new)?;
            let back_bell = back_link.bell().clone();
            let back_switch = Switch::new(FRONT, back_bell).map_err(anyhow::Error::new)?;
            context.attach(&switch);
            // No peer to watch: only whether a driver comes back from what it does.
            let watch = |switch: &Switch| -> Result<Watch, Error> {
                let ending = Arc::clone(context);
                let options = WatchOptions {
                    rank: FRONT,
                    heartbeat: None,
                    grace: GRACE,
                    limits: context.config.limits,
                    on_stuck: Box::new(move |fault| ending.end_with(fault)),
                    on_fault: None,
                };
                let set_up = SetUp::start(Vec::new(), options).map_err(anyhow::Error::new)?;
                Ok(set_up.run(switch.clone(), None, None)?)
            };
            let watches = [watch(&switch)?, watch(&back_switch)?];
            let start = Instant::now();
            let summary = std::thread::scope(|scope| {
                let back = scope.spawn(|| {
                    let _tell = TellPanic(&switch);
                    let result =
                        run_phase_b(back_link, &mut phase_b.stages, &back_switch, FRONT, depth);
                    if let Err(fault) = result {
                        switch.raise(fault);
                    }
                });
                let tell = TellPanic(&back_switch);
                let options = FrontOptions::new(FRONT, depth);
                let summary = run_front(link, &mut front.stages, &switch, options);
                drop(tell);
                let summary = summary.map_err(|fault| {
                    back_switch.raise(fault.clone());
                    // If Phase B failed, its own words were first there.
                    back_switch.fault().cloned().unwrap_or(fault)
                });
                if let Err(fault) = &summary {
                    // As the watchdog does between ranks: a stage that does not come back is left behind.
                    let deadline = Instant::now() + GRACE;
                    while !back.is_finished() {
                        if Instant::now() > deadline {
                            context.end_with(fault);
                        }
                        std::thread::sleep(GRACE / 40);
                    }
                }
                let _ = back.join();
                summary
            })?;
            watches.into_iter().for_each(Watch::close);
            let finished = Finished {
                summary,
                restarts: 0,
                wall: start.elapsed(),
                interrupted: switch.drain_signal(),
            };
            context.signals.finished(finished.interrupted);
            (ranks.finish)(front.stages, finished)
        })
    }
}

/// Ends the other driver when this thread panics: in one process there is no watchdog between them.
struct TellPanic<'a>(&'a Switch);

impl Drop for TellPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let what = "a thread of the pipeline panicked; its message stands above";
            let fault = Fault::new(FaultKind::Internal, FRONT, "run", what);
            self.0.raise(fault);
        }
    }
}
