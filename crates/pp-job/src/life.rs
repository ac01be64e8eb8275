//! The life of a job in one process: the supervisor's, a rank's, or that of a job of one process.

use std::cmp::Ordering::{Equal, Greater, Less};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use anyhow::Context as _;
use pp_transport::launch::{Launch, LocalJob};

use crate::RANK_0;
use crate::caller::Caller;
use crate::config::host_name;
use crate::context::Context;
use crate::decline::join_to_abort;
use crate::end::{go_on_behind_failure, leave, log_aside};
use crate::error::{Error, caught};
use crate::flight::Flight;
use crate::hearing::Hearing;
use crate::interrupt::take_signals;
use crate::job::{Job, ThisRank, check_world};
use crate::reports::{Report, Reporter};
use crate::seen::socket::Server;
use crate::seen::vitals::Signs;
use crate::seen::{AboutJob, Viewer};
use crate::signals::Signals;
use crate::supervisor::{bind_to_parent, supervise};

/// What a process does in a job.
pub(crate) enum Placed {
    /// It is a rank of a later job of the program.
    PassedOver,
    Rank(Launch),
    Supervisor,
}

impl Job {
    /// Runs the job to its end. In a rank it calls `rank`. Without a launcher, and if there is more than one rank, this
    /// process starts the same command line, or that of [`Job::command`], once for each rank, supervises the ranks, and never
    /// calls `rank`. A program that runs several jobs numbers them ([`Job::number`]), since each rank runs the whole program. If `rank` fails or
    /// panics before [`ThisRank::run`], the other ranks, which wait for it, are told why; but wrong usage they find themselves.
    ///
    /// # Errors
    /// What ended the job. The supervisor prints it, so that a job prints one line.
    pub fn run(&self, rank: impl FnOnce(ThisRank<'_>) -> Result<(), Error>) -> Result<(), Error> {
        match self.begin()? {
            Placed::PassedOver => Ok(()),
            Placed::Rank(launch) => self.be_rank(&launch, None, rank),
            Placed::Supervisor => {
                let done = supervise(self, None, channel());
                log_aside(|| tracing::info!("the job ends"));
                done
            }
        }
    }

    /// Says what this process is to do, before it does anything.
    pub(crate) fn begin(&self) -> Result<Placed, Error> {
        // First, so that a rank whose supervisor is gone says nothing.
        if let Some(supervisor) = &self.config.supervisor {
            bind_to_parent(&supervisor.pid)?;
            match self.number.cmp(&supervisor.job) {
                Less => return Ok(Placed::PassedOver),
                Equal => {}
                // Another process was started for it.
                Greater => leave(0),
            }
        }
        self.check()?;
        let world = self.pipeline.world_size();
        match &self.config.launch {
            Some(launch) => {
                let started = launch.world_size().get();
                let instead = format!("give a pipeline of {started}");
                check_world(started, &self.pipeline, &instead)?;
                Ok(Placed::Rank(launch.clone()))
            }
            None if world.get() == 1 => {
                let alone = LocalJob::new(world).launch(RANK_0);
                Ok(Placed::Rank(alone.map_err(anyhow::Error::new)?))
            }
            None => Ok(Placed::Supervisor),
        }
    }

    /// Is a rank, to its end.
    pub(crate) fn be_rank(
        &self,
        launch: &Launch,
        caller: Option<&Arc<Caller>>,
        rank: impl FnOnce(ThisRank<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        log_aside(|| tracing::info!(pid = std::process::id(), "the rank starts"));
        go_on_behind_failure();
        let context = self.context(launch, caller);
        let (context, _hearing) = context.map_err(|error| join_to_abort(launch, error))?;
        context.reporter.tell(Report::SignalsReady);
        let this = ThisRank {
            context: &context,
            launch,
            job: self,
        };
        let viewer = context.viewer.clone();
        let folder = self.config.runtime_folder.as_deref();
        let shown = viewer.and_then(|viewer| Server::start(viewer, folder));
        let done = context.catch(launch, || {
            rank(this)?;
            context.reporter.tell(match launch.rank() {
                RANK_0 => Report::Finished,
                _ => Report::Left,
            });
            Ok(())
        });
        if let Some(viewer) = &context.viewer {
            viewer.end(done.as_ref().map(|&()| ()));
        }
        context.signs.end();
        drop(shown);
        log_aside(|| tracing::info!("the rank ends"));
        done
    }

    /// Shows this job, from its rank 0.
    fn viewer(&self, signs: &Signs) -> Viewer {
        let devices = self.devices.iter().map(ToString::to_string).collect();
        Viewer::new(self.about(), &self.pipeline, devices, signs.clone())
    }

    /// What this process runs.
    fn about(&self) -> AboutJob {
        let mut words = std::env::args_os().map(|word| {
            let name = Path::new(&word).file_name().unwrap_or_default().to_owned();
            name.to_string_lossy().chars().take(64).collect::<String>()
        });
        let program = words.next().unwrap_or_default();
        // The program is what the interpreter runs.
        let script = words.next().filter(|_| program.starts_with("python"));
        let started = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        AboutJob {
            pid: std::process::id(),
            number: self.number,
            program: script.unwrap_or(program),
            host: host_name(),
            pipeline: self.pipeline.to_string(),
            depth: self.depth,
            restarts_allowed: self.restarts,
            started_unix_s: started.map_or(0, |time| time.as_secs()),
            pp_version: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    /// What the parts of this rank share. It takes signals as long as the second value lives, or from its supervisor where
    /// that is this process, too.
    fn context(
        &self,
        launch: &Launch,
        caller: Option<&Arc<Caller>>,
    ) -> Result<(Arc<Context>, Option<Hearing>), Error> {
        let reporter = Reporter::new(launch.rank(), self.config.supervisor.as_ref());
        if caller.is_none() {
            reporter.prepare_last();
        }
        if self.config.heartbeat.is_some() {
            reporter.live(caller.is_some())?;
        }
        let flight = Flight::open(launch, &self.config, &reporter)?;
        let signs = Signs::default();
        let is_first = launch.rank() == RANK_0;
        let context = Arc::new(Context {
            config: self.config.clone(),
            rank: reporter.rank,
            signals: Signals::new(),
            flight,
            reporter,
            is_met: AtomicBool::new(false),
            caller: caller.cloned(),
            shared: Mutex::default(),
            viewer: is_first.then(|| self.viewer(&signs)),
            signs,
        });
        if let Some(caller) = caller {
            caller.hears(Arc::clone(&context) as _);
        }
        let is_told = caller.is_some() && context.is_supervised();
        // Rank 0 of its own process ends with the job.
        let goes_on = self.schedule.is_some() && !is_first;
        let hearing = (!is_told).then(|| take_signals(&context, goes_on));
        let hearing = hearing.transpose();
        let hearing = hearing.context("cannot handle signals")?;
        match (caller, hearing) {
            // A driver that is left behind takes none.
            (Some(caller), Some(hearing)) => {
                caller.listens(hearing);
                Ok((context, None))
            }
            (_, hearing) => Ok((context, hearing)),
        }
    }
}

impl Context {
    /// Does the work of this process. Its error is told, to ranks too that wait for it, and an end that a signal asked for
    /// is one.
    fn catch(
        &self,
        launch: &Launch,
        work: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        let done = caught(format_args!("rank {}", self.rank), work);
        match (done, self.signals.interrupted_by()) {
            (Ok(()), None) => Ok(()),
            (Ok(()), Some(signal)) => Err(Error::Interrupted(signal)),
            (Err(error), _) if self.is_met.load(Ordering::Relaxed) => Err(self.settle(error)),
            (Err(error), _) => Err(self.settle(join_to_abort(launch, error))),
        }
    }
}
