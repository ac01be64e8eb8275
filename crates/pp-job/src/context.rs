//! What the parts of one rank share.

use std::io::Write as _;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pp_contract::{Fault, FaultKind, Rank};
use pp_runtime::switch::Switch;

use crate::caller::Caller;
use crate::config::Config;
use crate::end::{end_now, says_why};
use crate::error::{Error, code_of, indented};
use crate::flight::Flight;
use crate::reports::{Report, Reporter};
use crate::seen::Viewer;
use crate::seen::vitals::Signs;
use crate::shared::SharedDevice;
use crate::signals::Signals;

/// A rank's settings, and its lines to the user, to its supervisor and to the reader of its flight recording.
pub(crate) struct Context {
    pub(crate) config: Config,
    pub(crate) rank: Rank,
    pub(crate) signals: Signals,
    pub(crate) flight: Flight,
    pub(crate) reporter: Reporter,
    /// The other ranks hear of the end of this one over their channels, or learn that it does not come.
    pub(crate) is_met: AtomicBool,
    /// The process is a caller's: nothing here ends it.
    pub(crate) caller: Option<Arc<Caller>>,
    /// The GPUs that several ranks share; on rank 0.
    pub(crate) shared: Mutex<Vec<SharedDevice>>,
    /// Shows the job; on rank 0.
    pub(crate) viewer: Option<Viewer>,
    /// The vital signs of this rank.
    pub(crate) signs: Signs,
}

impl Context {
    pub(crate) fn lock_shared(&self) -> MutexGuard<'_, Vec<SharedDevice>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_supervised(&self) -> bool {
        self.config.is_supervised()
    }

    /// From now on signals go to this switch, and the supervisor hears once its driver needs nothing more of other
    /// ranks.
    pub(crate) fn attach(&self, switch: &Switch) {
        self.signals.attach(switch);
        if let Some(viewer) = &self.viewer {
            viewer.connected(switch, &self.lock_shared());
        }
        let reporter = self.reporter.clone();
        switch.when_served(move || _ = reporter.tell(Report::Served));
    }

    /// The error of this rank, once the user, or the supervisor, has been told what there is to tell.
    pub(crate) fn settle(&self, error: Error) -> Error {
        let error = match error {
            Error::Fault(fault) if fault.kind == FaultKind::Interrupted => {
                Error::Aborted(fault, self.signals.aborted_by())
            }
            error => error,
        };
        if let Some(viewer) = &self.viewer {
            viewer.end(Err(&error));
        }
        if error.is_told() {
            return error;
        }
        let fault = error.fault(self.rank, "run");
        let is_told = self.reporter.tell(Report::Exiting(fault));
        match self.flight.hint() {
            _ if is_told => Error::Told(error.code()),
            None => error,
            Some(hint) => Error::Recorded(Box::new(error), hint),
        }
    }

    /// Ends this process with what is known of the fault. Nothing is half written, because output that is not
    /// finished has no name. Where the process is a caller's, this ends the rank, and leaves the thread that calls it behind.
    pub(crate) fn end_with(self: &Arc<Self>, fault: &Fault) -> ! {
        if let Some(caller) = &self.caller {
            caller.end(Err(self.settle(fault.clone().into())));
            loop {
                std::thread::park();
            }
        }
        if let Some(viewer) = &self.viewer {
            viewer.end(Err(&Error::from(fault.clone())));
        }
        let (fault, context) = (fault.clone(), Arc::clone(self));
        let code = match fault.kind {
            FaultKind::Interrupted => 128 + self.signals.aborted_by(),
            kind => code_of(kind),
        };
        // Another thread may end the process at the same time, or has said why on its way out: it has so long, too.
        let speaks = says_why();
        // On a thread of its own: a stuck thread may hold standard error. If there is no thread to be had,
        // the end comes without a word. Nothing runs at exit: the driver may be in a stage.
        let last = std::thread::Builder::new().name("pp-end".into());
        let _ = last.spawn(move || {
            if !speaks {
                return;
            }
            if !context.reporter.tell(Report::Exiting(fault.clone())) {
                // If standard error is closed, the line is lost.
                let hint = context.flight.hint().unwrap_or_default();
                let below = indented(&fault.below());
                let _ = writeln!(std::io::stderr(), "pp: error: {fault}{hint}{below}");
            }
            if let Some(viewer) = &context.viewer {
                viewer.show_the_end();
            }
            end_now(code)
        });
        std::thread::sleep(crate::times::EXIT_WITHIN);
        signal_hook::low_level::exit(code.into())
    }
}
