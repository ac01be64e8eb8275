//! A job as a program asks for it, and what is refused; and the rank that a process is.

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;

use pp_contract::pipeline::MAX_DEPTH;
use pp_contract::{DeviceName, Pipeline, Rank};
use pp_runtime::report::Count;
use pp_runtime::schedule::Runnable;
use pp_transport::launch::{Launch, Launcher};

use crate::config::Config;
use crate::context::Context;
use crate::end::{end_now, end_with_job, leave, say, says_why};
use crate::error::{Error, caught};
use crate::seen::Viewer;

/// Runs `program`, prints its error as one line, and below it the text of its fault if it has one, and ends the process with
/// the matching exit code. It does not return, so values that the caller holds are not dropped. Call it as the last expression
/// of `main`. Since the process ends, a rank whose job fails does not wait until its library has ended the communicators.
pub fn main(program: impl FnOnce() -> Result<(), Error>) -> ExitCode {
    end_with_job();
    let code = match caught("the program", program) {
        Ok(()) => 0,
        Err(error) if !says_why() => {
            // Another thread ends the process, and says why.
            std::thread::sleep(crate::times::EXIT_WITHIN);
            error.code()
        }
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
#[derive(Clone, Debug)]
pub struct Job {
    pub(crate) config: Config,
    pub(crate) pipeline: Pipeline,
    pub(crate) depth: u32,
    pub(crate) restarts: u32,
    pub(crate) schedule: Option<Runnable>,
    pub(crate) devices: Vec<DeviceName>,
    pub(crate) command: Vec<OsString>,
    pub(crate) number: u32,
}

impl Job {
    /// A job that runs this pipeline, whose processes have these settings.
    #[must_use]
    pub fn new(config: &Config, pipeline: &Pipeline) -> Self {
        Self {
            config: config.clone(),
            pipeline: pipeline.clone(),
            depth: pipeline.default_depth(),
            restarts: 0,
            schedule: None,
            devices: config.devices.clone(),
            command: Vec::new(),
            number: 0,
        }
    }

    /// A job whose ranks work in the order of a training schedule, with its slots. Up to two chunks of a step more are in flight
    /// than the schedule holds, so that a GPU has its next forward before it is done with a backward: the order lets a stage begin
    /// with no chunk earlier. It takes no restarts, and no [`Job::depth`] below that of the schedule.
    #[must_use]
    pub fn scheduled(config: &Config, schedule: &Runnable) -> Self {
        let chunks = schedule.orders().first().map_or(0, |order| order.chunks());
        let room = chunks.saturating_sub(schedule.depth().into()).min(2) as u32;
        Self {
            depth: (schedule.depth() + room).min(MAX_DEPTH),
            schedule: Some(schedule.clone()),
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
    pub fn devices(mut self, devices: &[DeviceName]) -> Self {
        self.devices = devices.to_vec();
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
    pub fn command(mut self, command: &[OsString]) -> Self {
        self.command = command.to_vec();
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
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.depth == 0 || self.depth > MAX_DEPTH {
            return Err(Error::Usage(format!(
                "a depth of {}; give 1 to {MAX_DEPTH} chunks in flight",
                self.depth
            )));
        }
        if let Some(least) = self.schedule.as_ref().map(Runnable::depth)
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
        check_devices(&self.devices, &self.pipeline)?;
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

/// The rank that this process is.
#[derive(Clone, Copy)]
pub struct ThisRank<'a> {
    pub(crate) context: &'a Arc<Context>,
    pub(crate) launch: &'a Launch,
    pub(crate) job: &'a Job,
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
        self.job.devices.get(self.rank().get() as usize).copied()
    }

    /// The devices of all ranks; none where the job names none.
    #[must_use]
    pub fn devices(&self) -> &[DeviceName] {
        &self.job.devices
    }

    /// Shows the job while it runs, to whoever serves that; `None` on any other rank than 0.
    #[must_use]
    pub fn viewer(&self) -> Option<Viewer> {
        self.context.viewer.clone()
    }

    /// Which stages stand on which ranks.
    #[must_use]
    pub fn pipeline(&self) -> &Pipeline {
        &self.job.pipeline
    }

    /// How many ranks in front of it on this host are [`DeviceName::NextCuda`], too: so many visible GPUs are theirs. If not
    /// all ranks are, the ranks of a host must follow each other.
    #[must_use]
    pub fn gpus_before(&self) -> u32 {
        if self
            .job
            .devices
            .iter()
            .all(|device| *device == DeviceName::NextCuda)
        {
            return self.launch.local_rank();
        }
        let own = self.rank().get() as usize;
        let first = own.saturating_sub(self.launch.local_rank() as usize);
        let before = self.job.devices.get(first..own).unwrap_or_default();
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
        let schedule = Schedule::parse_csv("0F0,0F1,0B0,0F2,0B1,0B2").unwrap();
        let runnable = schedule.runnable(1).unwrap();
        let job = Job::scheduled(&config, &runnable);
        assert!(job.check().is_ok());
        let depth = runnable.depth();
        assert_eq!((depth, job.depth), (2, 3));
        assert!(job.clone().depth(depth).check().is_ok());
        for (job, remedy) in [
            (job.clone().restarts(1), "leave --restarts out"),
            (job.depth(depth - 1), "leave the depth out"),
        ] {
            let refused = job.check().unwrap_err();
            assert!(refused.to_string().contains(remedy), "{refused}");
        }
    }
}
