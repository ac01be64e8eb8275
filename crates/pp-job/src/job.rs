//! The life of a job in one process: the supervisor's, a rank's, or that of a job of one process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::Context as _;
use pp_contract::Rank;
use pp_transport::launch::Launch;

use crate::config::Config;
use crate::context::Context;
use crate::end::{end_now, leave, log_aside, say};
use crate::error::{Error, panicked};
use crate::flight::Flight;
use crate::interrupt::{Hearing, take_signals};
use crate::rank::join::join_to_abort;
use crate::reports::{Report, Reporter};
use crate::signals::Signals;
use crate::{FRONT, supervisor};

/// Runs `program`, prints its error as one line and ends the process with the matching exit code. It does not return,
/// so values that the caller holds are not dropped. Call it as the last expression of `main`.
pub fn main(program: impl FnOnce() -> Result<(), Error>) -> ExitCode {
    let done = catch_unwind(AssertUnwindSafe(program));
    let code = match done.unwrap_or_else(|panic| Err(panicked("the program", &*panic))) {
        Ok(()) => 0,
        Err(error) => {
            if !error.is_told() && !say(format!("pp: error: {error}")) {
                // What runs at exit may wait for a thread that holds standard error.
                end_now(error.code());
            }
            error.code()
        }
    };
    leave(code)
}

/// A job of two ranks.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    config: &'a Config,
    restarts: u32,
}

impl<'a> Job<'a> {
    /// A job whose processes have these settings.
    #[must_use]
    pub fn new(config: &'a Config) -> Self {
        Self {
            config,
            restarts: 0,
        }
    }

    /// How often Phase B may be started again when it is lost.
    #[must_use]
    pub fn restarts(mut self, restarts: u32) -> Self {
        self.restarts = restarts;
        self
    }

    /// Runs the job to its end. Without a launcher this process starts the same command line once for each rank,
    /// supervises the ranks, and never calls `rank`; in a rank it calls `rank`. So a program without a launcher runs one
    /// such job: each rank would run all of them.
    ///
    /// # Errors
    /// What ended the job. The supervisor prints it, so that a job prints one line.
    pub fn run(self, rank: impl FnOnce(ThisRank<'_>) -> Result<(), Error>) -> Result<(), Error> {
        // First, so that a rank whose supervisor is gone says nothing.
        if let Some(supervisor) = &self.config.supervisor {
            supervisor::bind_to_parent(&supervisor.pid)?;
        }
        let Some(launch) = &self.config.launch else {
            let done = supervisor::supervise(self.config, self.restarts);
            log_aside(|| tracing::info!("the job ends"));
            return done;
        };
        log_aside(|| tracing::info!(pid = std::process::id(), "the rank starts"));
        let reporter = Reporter::new(launch.rank(), self.config.supervisor.as_ref());
        reporter.prepare_out_of_memory();
        if self.config.heartbeat.is_some() {
            reporter.live()?;
        }
        let flight = Flight::open(launch, self.config, &reporter)?;
        let (context, _hearing) = self.context(reporter, flight)?;
        context.reporter.tell(Report::SignalsReady);
        let this = ThisRank {
            context: &context,
            launch,
            restarts: self.restarts,
        };
        let done = context.catch(|| {
            rank(this)?;
            if launch.rank() == FRONT {
                context.reporter.tell(Report::Finished);
            }
            Ok(())
        });
        log_aside(|| tracing::info!("the rank ends"));
        done
    }

    /// Runs `work` as a job of this one process: signals drain and abort it, and no other process is started.
    pub(crate) fn alone(
        self,
        work: impl FnOnce(&Arc<Context>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let (context, _hearing) = self.context(Reporter::new(FRONT, None), Flight::off())?;
        context.catch(|| work(&context))
    }

    /// What the parts of this rank share. It takes signals as long as the second value lives.
    fn context(
        &self,
        reporter: Reporter,
        flight: Flight,
    ) -> Result<(Arc<Context>, Hearing), Error> {
        let context = Arc::new(Context {
            config: self.config.clone(),
            rank: reporter.rank,
            signals: Signals::new(),
            flight,
            reporter,
        });
        let hearing = take_signals(&context).context("cannot handle signals")?;
        Ok((context, hearing))
    }
}

impl Context {
    /// Does the work of this process. Its error is told, and an end that a signal asked for is one.
    fn catch(&self, work: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        let done = catch_unwind(AssertUnwindSafe(work));
        let own = format!("rank {}", self.rank);
        let done = done.unwrap_or_else(|panic| Err(panicked(&own, &*panic)));
        match (done, self.signals.interrupted_by()) {
            (Ok(()), None) => Ok(()),
            (Ok(()), Some(signal)) => Err(Error::Interrupted(signal)),
            (Err(error), _) => Err(self.settle(error)),
        }
    }
}

/// The rank that this process is.
#[derive(Clone, Copy)]
pub struct ThisRank<'a> {
    pub(crate) context: &'a Arc<Context>,
    pub(crate) launch: &'a Launch,
    pub(crate) restarts: u32,
}

impl ThisRank<'_> {
    /// Its number.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.launch.rank()
    }

    /// Whether a supervisor started it on this host, together with the other rank.
    #[must_use]
    pub fn is_supervised(&self) -> bool {
        self.context.is_supervised()
    }

    /// Its place among the ranks, on this host and in the job.
    #[must_use]
    pub fn launch(&self) -> &Launch {
        self.launch
    }

    /// This rank cannot take part. Tells the other rank why, which would wait for it, and returns the error. Wrong usage
    /// is not told: the other rank has the same command line.
    pub fn decline(&self, error: Error) -> Error {
        join_to_abort(self.launch, error)
    }
}
