//! The life of a job in one process: the supervisor's, a rank's, or that of a job of one process.

use std::cmp::Ordering::{Equal, Greater, Less};
use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use anyhow::Context as _;
use pp_contract::pipeline::MAX_DEPTH;
use pp_contract::{DeviceName, Pipeline, Rank};
use pp_runtime::report::Count;
use pp_runtime::schedule::Runnable;
use pp_transport::launch::{Launch, Launcher, LocalJob};

use crate::config::Config;
use crate::context::Context;
use crate::decline::join_to_abort;
use crate::end::{end_now, leave, log_aside, say};
use crate::error::{Error, caught};
use crate::flight::Flight;
use crate::interrupt::{Hearing, take_signals};

use crate::caller::Caller;
use crate::reports::{Report, Reporter};
use crate::signals::Signals;
use crate::supervisor::{Supervised, supervise};
use crate::{RANK_0, supervisor};

/// Runs `program`, prints its error as one line, and below it the text of its fault if it has one, and ends the process with
/// the matching exit code. It does not return, so values that the caller holds are not dropped. Call it as the last expression
/// of `main`.
pub fn main(program: impl FnOnce() -> Result<(), Error>) -> ExitCode {
    let code = match caught("the program", program) {
        Ok(()) => 0,
        Err(error) => {
            if !error.is_told() && !say(error.lines()) {
                // What runs at exit may wait for a thread that holds standard error.
                end_now(error.code());
            }
            error.code()
        }
    };
    leave(code)
}

/// A job: a pipeline, and how it is run.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    pub(crate) config: &'a Config,
    pub(crate) pipeline: &'a Pipeline,
    pub(crate) depth: u32,
    pub(crate) restarts: u32,
    pub(crate) schedule: Option<&'a Runnable>,
    pub(crate) devices: &'a [DeviceName],
    pub(crate) command: &'a [OsString],
    pub(crate) number: u32,
}

impl<'a> Job<'a> {
    /// A job that runs this pipeline, whose processes have these settings.
    #[must_use]
    pub fn new(config: &'a Config, pipeline: &'a Pipeline) -> Self {
        Self {
            config,
            pipeline,
            depth: pipeline.default_depth(),
            restarts: 0,
            schedule: None,
            devices: &config.devices,
            command: &[],
            number: 0,
        }
    }

    /// A job whose ranks work in the order of a training schedule, with its depth and its slots. It takes no restarts, and
    /// no [`Job::depth`] below that of the schedule.
    #[must_use]
    pub fn scheduled(config: &'a Config, schedule: &'a Runnable) -> Self {
        Self {
            depth: schedule.depth(),
            schedule: Some(schedule),
            ..Self::new(config, schedule.pipeline())
        }
    }

    /// The most chunks in flight; without this [`Pipeline::default_depth`].
    #[must_use]
    pub fn depth(mut self, depth: u32) -> Self {
        self.depth = depth;
        self
    }

    /// How often ranks may be started again when they are lost, all together. Those of the source and of the sink never
    /// are.
    #[must_use]
    pub fn restarts(mut self, restarts: u32) -> Self {
        self.restarts = restarts;
        self
    }

    /// The device of each rank, in order of the ranks; or none, and each rank finds its device. The program of a rank opens
    /// its [`ThisRank::device`]. Without this, a rank that a supervisor started has the devices of the supervisor's job.
    #[must_use]
    pub fn devices(mut self, devices: &'a [DeviceName]) -> Self {
        self.devices = devices;
        self
    }

    /// The program that runs a rank, and its arguments, where no launcher started the ranks. Without this, or if it is empty,
    /// a rank runs the command line of this process. The program must run the same job in each rank. A job of one rank starts
    /// none.
    ///
    /// The process that is started must be the rank itself: a script that wraps it must `exec` it. Give an absolute path, since
    /// the program is looked up again when a rank is started again. It has ten minutes to come to its job. A program in Python gives `sys.executable` and its script:
    /// the file of its process is the interpreter behind its virtual environment.
    #[must_use]
    pub fn command(mut self, command: &'a [OsString]) -> Self {
        self.command = command;
        self
    }

    /// Which job of the program this is, where a program runs several, one after the other: 1, 2 and so on. Without a launcher
    /// each job starts ranks of its own. A rank that was started for job N passes over the jobs before it, and its process
    /// ends where the program comes to a job behind it. Without this a rank takes part in the job that it comes to first.
    #[must_use]
    pub fn number(mut self, number: u32) -> Self {
        self.number = number;
        self
    }

    /// Refuses what cannot be run.
    fn check(&self) -> Result<(), Error> {
        if self.depth == 0 || self.depth > MAX_DEPTH {
            return Err(Error::Usage(format!(
                "a depth of {}; give 1 to {MAX_DEPTH} chunks in flight",
                self.depth
            )));
        }
        if let Some(least) = self.schedule.map(Runnable::depth)
            && self.depth < least
        {
            return Err(Error::Usage(format!(
                "a depth of {}, and the training schedule has {least} microbatches in flight; leave the depth out",
                self.depth
            )));
        }
        if self.restarts > 0 && self.schedule.is_some() {
            return Err(Error::Usage(
                "--restarts starts a lost rank again, and a training schedule would lose what the rank had computed; leave \
                 --restarts out"
                    .into(),
            ));
        }
        check_devices(self.devices, self.pipeline)?;
        let together = self.config.launch.as_ref();
        if self.restarts > 0
            && let Some(launch) = together.filter(|launch| launch.is_all_or_none())
        {
            return Err(Error::Usage(format!(
                "--restarts starts a lost rank again, and {} ends or restarts all ranks together; leave --restarts out, or \
                 start each rank with RANK and WORLD_SIZE alone",
                launch.launcher()
            )));
        }
        if self.restarts > 0 && self.pipeline.restartable().next().is_none() {
            return Err(Error::Usage(format!(
                "--restarts starts a lost rank again, and no rank of {} may be: the source's and the sink's never are; \
                 leave --restarts out",
                self.pipeline
            )));
        }
        Ok(())
    }

    /// Runs the job to its end. In a rank it calls `rank`. Without a launcher, and if there is more than one rank, this
    /// process starts the same command line, or that of [`Job::command`], once for each rank, supervises the ranks, and never
    /// calls `rank`. So a program without a launcher runs one such job: each rank would run all of them. If `rank` fails or
    /// panics before [`ThisRank::run`], the other ranks, which wait for it, are told why; but wrong usage they find themselves.
    ///
    /// # Errors
    /// What ended the job. The supervisor prints it, so that a job prints one line.
    pub fn run(self, rank: impl FnOnce(ThisRank<'_>) -> Result<(), Error>) -> Result<(), Error> {
        match self.begin()? {
            Placed::PassedOver => Ok(()),
            Placed::Rank(launch) => self.be_rank(&launch, None, rank),
            Placed::Supervisor => {
                let done = supervise(&self.supervised(), None, channel());
                log_aside(|| tracing::info!("the job ends"));
                done
            }
        }
    }

    /// Says what this process is to do, before it does anything.
    pub(crate) fn begin(&self) -> Result<Placed, Error> {
        // First, so that a rank whose supervisor is gone says nothing.
        if let Some(supervisor) = &self.config.supervisor {
            supervisor::bind_to_parent(&supervisor.pid)?;
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
                check_world(started, self.pipeline, &instead)?;
                Ok(Placed::Rank(launch.clone()))
            }
            None if world.get() == 1 => {
                let alone = LocalJob::new(world).launch(RANK_0);
                Ok(Placed::Rank(alone.map_err(anyhow::Error::new)?))
            }
            None => Ok(Placed::Supervisor),
        }
    }

    /// What its supervisor must know.
    pub(crate) fn supervised(&self) -> Supervised<'a> {
        Supervised {
            config: self.config,
            pipeline: self.pipeline,
            restarts: self.restarts,
            command: self.command,
            devices: self.devices,
            number: self.number,
        }
    }

    /// Is a rank, to its end.
    pub(crate) fn be_rank(
        self,
        launch: &Launch,
        caller: Option<&Arc<Caller>>,
        rank: impl FnOnce(ThisRank<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        log_aside(|| tracing::info!(pid = std::process::id(), "the rank starts"));
        let context = self.context(launch, caller);
        let (context, _hearing) = context.map_err(|error| join_to_abort(launch, error))?;
        context.reporter.tell(Report::SignalsReady);
        let this = ThisRank {
            context: &context,
            launch,
            pipeline: self.pipeline,
            depth: self.depth,
            restarts: self.restarts,
            schedule: self.schedule,
            devices: self.devices,
        };
        let done = context.catch(launch, || {
            rank(this)?;
            if launch.rank() == RANK_0 {
                context.reporter.tell(Report::Finished);
            }
            Ok(())
        });
        log_aside(|| tracing::info!("the rank ends"));
        done
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
        let flight = Flight::open(launch, self.config, &reporter)?;
        let context = Arc::new(Context {
            config: self.config.clone(),
            rank: reporter.rank,
            signals: Signals::new(),
            flight,
            reporter,
            is_met: AtomicBool::new(false),
            caller: caller.cloned(),
            shared: Mutex::default(),
        });
        if let Some(caller) = caller {
            caller.hears(Arc::clone(&context) as _);
        }
        let is_told = caller.is_some() && context.is_supervised();
        let hearing = (!is_told).then(|| take_signals(&context)).transpose();
        Ok((context, hearing.context("cannot handle signals")?))
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

/// Refuses a launcher that started another number of ranks than the pipeline has. `instead` says how to get a pipeline of
/// as many.
///
/// # Errors
/// [`Error::Usage`] with both numbers.
pub fn check_world(started: u32, pipeline: &Pipeline, instead: &str) -> Result<(), Error> {
    let needed = pipeline.world_size().get();
    if started == needed {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "the launcher started {}, and {pipeline} has {needed}; start {needed}, {instead}, or {} to let pp start \
         its own ranks",
        Count(started.into(), "rank"),
        Launcher::unset_all()
    )))
}

/// Refuses devices of another number than the pipeline has ranks, and CPUs beside GPUs in a group.
fn check_devices(devices: &[DeviceName], pipeline: &Pipeline) -> Result<(), Error> {
    let (named, ranks) = (devices.len(), pipeline.world_size().get() as usize);
    if named > 0 && named != ranks {
        return Err(Error::Usage(format!(
            "--devices names {}, and {pipeline} has {}; name one for each rank",
            Count(named as u64, "device"),
            Count(ranks as u64, "rank")
        )));
    }
    let is_gpu = |rank: &Rank| {
        devices
            .get(rank.get() as usize)
            .is_some_and(|device| device.is_gpu())
    };
    for stage in pipeline.stages() {
        let (gpus, cpus): (Vec<Rank>, Vec<Rank>) =
            stage.ranks.iter().partition(|rank| is_gpu(rank));
        if let ([gpu, ..], [cpu, ..]) = (&*gpus, &*cpus) {
            return Err(Error::Usage(format!(
                "--devices gives rank {cpu} a CPU and rank {gpu} a GPU, and both run {}: the ranks of a group work in one \
                 kind of memory; give all of them GPUs, or all of them CPUs",
                stage.name
            )));
        }
    }
    Ok(())
}

/// What a process does in a job.
pub(crate) enum Placed {
    /// It is a rank of a later job of the program.
    PassedOver,
    Rank(Launch),
    Supervisor,
}

/// The rank that this process is.
#[derive(Clone, Copy)]
pub struct ThisRank<'a> {
    pub(crate) context: &'a Arc<Context>,
    pub(crate) launch: &'a Launch,
    pub(crate) pipeline: &'a Pipeline,
    pub(crate) depth: u32,
    pub(crate) restarts: u32,
    pub(crate) schedule: Option<&'a Runnable>,
    pub(crate) devices: &'a [DeviceName],
}

impl ThisRank<'_> {
    /// Its number.
    #[must_use]
    pub fn rank(&self) -> Rank {
        self.launch.rank()
    }

    /// Says whether a supervisor started it on this host, together with the other ranks.
    #[must_use]
    pub fn is_supervised(&self) -> bool {
        self.context.is_supervised()
    }

    /// Its place among the ranks, on this host and in the job.
    #[must_use]
    pub fn launch(&self) -> &Launch {
        self.launch
    }

    /// The device that [`Job::devices`] names for this rank; `None` if the job names none. The program opens it: host memory
    /// for [`DeviceName::Cpu`], GPU N of the visible ones for [`DeviceName::Cuda`], and GPU [`ThisRank::gpus_before`] for
    /// [`DeviceName::NextCuda`], unless a launcher shows each rank its own GPU alone: then GPU 0.
    #[must_use]
    pub fn device(&self) -> Option<DeviceName> {
        self.devices.get(self.rank().get() as usize).copied()
    }

    /// The devices of all ranks; none where the job names none.
    #[must_use]
    pub fn devices(&self) -> &[DeviceName] {
        self.devices
    }

    /// Which stages stand on which ranks.
    #[must_use]
    pub fn pipeline(&self) -> &Pipeline {
        self.pipeline
    }

    /// How many ranks in front of it on this host are [`DeviceName::NextCuda`], too: so many visible GPUs are theirs. If not
    /// all ranks are, the ranks of a host must follow each other.
    #[must_use]
    pub fn gpus_before(&self) -> u32 {
        if self
            .devices
            .iter()
            .all(|device| *device == DeviceName::NextCuda)
        {
            return self.launch.local_rank();
        }
        let own = self.rank().get() as usize;
        let first = own.saturating_sub(self.launch.local_rank() as usize);
        let before = self.devices.get(first..own).unwrap_or_default();
        before
            .iter()
            .filter(|device| **device == DeviceName::NextCuda)
            .count() as u32
    }
}

#[cfg(test)]
mod tests {
    use pp_runtime::schedule::Schedule;

    use super::*;

    #[test]
    fn devices_are_one_for_each_rank_and_of_one_kind_in_a_group() {
        let config = Config::alone(|_| None).unwrap();
        let check = |pipeline: &str, text: &str| {
            let pipeline = pipeline.parse().unwrap();
            let devices: Vec<DeviceName> =
                text.split(',').map(|one| one.parse().unwrap()).collect();
            let checked = Job::new(&config, &pipeline).devices(&devices).check();
            checked.map_err(|error| error.to_string())
        };
        let chain = "a@0 -> b@1";
        for good in ["cpu,cpu", "cuda:0,cuda:0", "cuda,cuda:1", "cpu,cuda"] {
            assert_eq!(check(chain, good), Ok(()));
        }
        let group = "a@0 -> b@1+2 -> c@0";
        assert_eq!(check(group, "cpu,cuda,cuda"), Ok(()));
        for (pipeline, text, words) in [
            (chain, "cpu", "names 1 device, and a@0 -> b@1 has 2 ranks"),
            (
                group,
                "cuda,cuda,cpu",
                "gives rank 2 a CPU and rank 1 a GPU, and both run b",
            ),
        ] {
            let refused = check(pipeline, text).unwrap_err();
            assert!(refused.contains(words), "{refused}");
        }
    }

    #[test]
    fn a_training_schedule_takes_no_restarts_and_no_depth_below_its_own() {
        let config = Config::alone(|_| None).unwrap();
        let schedule = Schedule::parse_csv("0F0,0F1,0B0,0B1").unwrap();
        let runnable = schedule.runnable(1).unwrap();
        let job = Job::scheduled(&config, &runnable);
        assert!(job.check().is_ok());
        let depth = runnable.depth();
        assert!(job.depth(depth + 1).check().is_ok());
        for (job, remedy) in [
            (job.restarts(1), "leave --restarts out"),
            (job.depth(depth - 1), "leave the depth out"),
        ] {
            let refused = job.check().unwrap_err();
            assert!(refused.to_string().contains(remedy), "{refused}");
        }
    }
}
