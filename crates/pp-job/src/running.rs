//! A job that runs beside its caller: rank 0, or the rank of a launcher, is in the caller's process.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use pp_contract::FaultKind;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::low_level::raise;

use crate::caller::{Caller, Here};
use crate::config::Config;
use crate::error::{Error, caught};
use crate::flow::Flow;
use crate::job::{Job, ThisRank};
use crate::life::Placed;
use crate::supervisor::{Notice, supervise};
use crate::threads::spawn;

/// A job that runs, begun by [`Job::open`].
///
/// # If dropped
/// Aborts the job and waits for its end.
pub struct Running {
    ended: Receiver<Result<(), Error>>,
    signal: Box<dyn Fn(i32) + Send>,
    is_over: bool,
    is_passed_over: bool,
}

impl Running {
    /// Waits for the end of the job.
    ///
    /// # Errors
    /// What ended it, as [`Job::run`] says. No line about it was printed.
    pub fn wait(mut self) -> Result<(), Error> {
        let ended = self.ended.recv();
        self.is_over = true;
        ended.unwrap_or_else(|_| Err(lost()))
    }

    /// Waits this long for the end of the job; gives `None` if it goes on. Once the end was given, a further call returns
    /// `Some(Ok(()))`.
    pub fn wait_for(&mut self, within: Duration) -> Option<Result<(), Error>> {
        if self.is_over {
            return Some(Ok(()));
        }
        let ended = match self.ended.recv_timeout(within) {
            Err(RecvTimeoutError::Timeout) => return None,
            Err(RecvTimeoutError::Disconnected) => Err(lost()),
            Ok(ended) => ended,
        };
        self.is_over = true;
        Some(ended)
    }

    /// Lets the chunks in flight finish and ends the job, as a first Ctrl-C does. The job then ends with
    /// [`Error::Interrupted`]. Does nothing if the job drains already.
    pub fn drain(&self) {
        (self.signal)(SIGINT);
    }

    /// Ends the job at once, as a second Ctrl-C does. What is in flight is lost.
    pub fn abort(&self) {
        // Of two kinds: the same signal again, at once, is an echo.
        (self.signal)(SIGINT);
        (self.signal)(SIGTERM);
    }

    /// Says whether this process is a rank of a later job of the program, and so takes no part in this one.
    #[must_use]
    pub fn is_passed_over(&self) -> bool {
        self.is_passed_over
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.is_over {
            self.abort();
            let _ = self.ended.recv();
        }
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut running = f.debug_struct("Running");
        running
            .field("is_over", &self.is_over)
            .finish_non_exhaustive()
    }
}

/// The thread that had the end of the job is gone without it.
fn lost() -> Error {
    Error::local(
        FaultKind::Internal,
        "run",
        "a thread of the job ended early",
    )
}

impl Job {
    /// Begins the job with rank 0 in this process, or with the rank that a launcher gave this process, and returns. `rank`
    /// runs on a thread of its own, which may outlive the job where it is stuck. Without a launcher this process also starts
    /// the other ranks and supervises them, from another thread. They are processes of the same command line, or of
    /// [`Job::command`], and come to this call as well: there it runs their rank.
    ///
    /// Nothing ends this process: a fault, a lost rank or a stuck stage is an error of [`Running::wait`], and nothing is
    /// printed about it. A rank that this process has started is ended at a fault, though.
    ///
    /// Behind a job of a schedule ([`Job::scheduled`]) the program of another rank may go on as long as it wants. It must end
    /// well: otherwise that is an error of [`Running::wait`], which waits for it. Behind any other job it is ended within
    /// seconds.
    ///
    /// A program that opens several jobs numbers them ([`Job::number`]).
    ///
    /// # Errors
    /// [`Error::Usage`]: what cannot be run. No thread is to be had.
    pub fn open(
        self,
        rank: impl FnOnce(ThisRank<'_>) -> Result<(), Error> + Send + 'static,
    ) -> Result<Running, Error> {
        self.open_then(|| (), rank)
    }

    /// Begins the job as [`Job::open`] does, with a flow into its source and out of its sink. All waits of the flow end with the
    /// job, also where its driver is stuck.
    ///
    /// # Errors
    /// As [`Job::open`].
    pub fn open_flow<T: Send + 'static, R: Send + 'static>(
        self,
        flow: &Flow<T, R>,
        rank: impl FnOnce(ThisRank<'_>) -> Result<(), Error> + Send + 'static,
    ) -> Result<Running, Error> {
        let own = flow.clone();
        let opened = self.open_then(move || own.close(), rank);
        if opened.is_err() {
            flow.close();
        }
        opened
    }

    fn open_then(
        self,
        then: impl FnOnce() + Send + 'static,
        rank: impl FnOnce(ThisRank<'_>) -> Result<(), Error> + Send + 'static,
    ) -> Result<Running, Error> {
        let (ended, is_ended) = channel();
        let tell = move |result| {
            // Who drops the job waits for this, maybe with a lock that a waker of the flow wants.
            let _ = ended.send(result);
            then();
        };
        let own = self.clone();
        let work = move |config: Config, caller: Option<&Arc<Caller>>| {
            let launch = config.launch.clone().expect("it is a rank");
            Job { config, ..own }.be_rank(&launch, caller, rank)
        };
        let here = Here(Box::new(work));
        let mut is_passed_over = false;
        let signal: Box<dyn Fn(i32) + Send> = match self.begin()? {
            Placed::PassedOver => {
                is_passed_over = true;
                tell(Ok(()));
                Box::new(|_| {})
            }
            Placed::Rank(launch) => {
                let config = Config {
                    launch: Some(launch),
                    ..self.config.clone()
                };
                let caller = here.start(config, tell)?;
                match self.config.is_supervised() {
                    true => Box::new(|signal| _ = raise(signal)),
                    false => Box::new(move |signal| caller.ask(signal)),
                }
            }
            Placed::Supervisor => {
                let (notices, noticed) = channel();
                let signals = notices.clone();
                // The ranks die with the thread that has started them.
                spawn("pp-supervise", move || {
                    let supervised = || supervise(&self, Some(here), (notices, noticed));
                    tell(caught("the supervisor", supervised));
                })?;
                Box::new(move |signal| _ = signals.send(Notice::Asked(signal)))
            }
        };
        Ok(Running {
            ended: is_ended,
            signal,
            is_over: false,
            is_passed_over,
        })
    }
}
