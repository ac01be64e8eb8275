//! What the jobs of trials run on, and how their ranks are started.

use std::path::Path;
use std::process::Command;

use pp_contract::{DeviceName, FaultKind, Pipeline, Rank, with_source};
use pp_device::Device;
use pp_job::Error;
use pp_job::command_line::SUPERVISOR;
use pp_testing::net::{Net, can_name_hosts, on_named_host};
use pp_testing::process::with_variable;
use pp_transport::launch::LocalJob;
use pp_transport::nccl::Nccl;

use super::work::make_own;
use crate::hook::VARIABLE;

/// Parts of a job's folder that are no part of its result, and who finds each: what ranks record, and where fakes meet.
pub(crate) const ASIDE: [(&str, &str); 2] =
    [("flight", "PP_FLIGHT_DIR"), ("meet", "PP_FAKE_NCCL_DIR")];
/// The variable that tells the ranks of a job from others.
const JOB_ID: &str = "PP_JOB_ID";

/// Two ranks, with the sink on the rank of the source.
pub(crate) const TWO: &str = "encode@0 -> phase_b@1 -> decode@0";
/// Three ranks in a row.
pub(crate) const CHAIN: &str = "encode@0 -> phase_b@1 -> decode@2";

/// What carries the payloads of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Transport {
    /// Memory that the ranks share.
    Host,
    /// GPU memory by copy engine, or fakes; the ranks share the GPUs that there are.
    P2p,
    /// GPU memory over NCCL, or fakes; the ranks share the GPUs that there are.
    Nccl,
}

/// What the ranks run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ground {
    /// Shared memory.
    Host,
    /// The tests' stand-in for the CUDA driver, between whose GPUs the copy engine moves payloads.
    P2pFakes,
    /// Real GPUs, likewise.
    P2pGpus,
    /// The tests' stand-ins for the CUDA driver and NCCL.
    Fakes,
    /// Real GPUs and NCCL.
    Gpus,
}

impl Ground {
    /// The ground that this transport has here.
    pub(crate) fn of(transport: Transport) -> Self {
        let is_of_fakes = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with("PP_FAKE_");
        let on_fakes = std::env::vars_os().any(|(name, _)| is_of_fakes(&name));
        match (transport, on_fakes) {
            (Transport::Host, _) => Self::Host,
            (Transport::P2p, true) => Self::P2pFakes,
            (Transport::P2p, false) => Self::P2pGpus,
            (Transport::Nccl, true) => Self::Fakes,
            (Transport::Nccl, false) => Self::Gpus,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::P2pFakes => "p2p, stand-ins",
            Self::P2pGpus => "p2p, GPUs",
            Self::Fakes => "nccl, stand-ins",
            Self::Gpus => "nccl, GPUs",
        }
    }

    pub(crate) fn is_host(self) -> bool {
        self == Self::Host
    }

    pub(crate) fn has_nccl(self) -> bool {
        matches!(self, Self::Fakes | Self::Gpus)
    }

    /// The fewest GPUs for the ranks of this pipeline. A group needs one for each rank. So does NCCL for ranks whose hosts have one
    /// name, as those have that a supervisor starts.
    pub(crate) fn fewest_gpus(self, pipeline: &Pipeline, is_supervised: bool) -> u32 {
        let has_group = pipeline.stages().iter().any(|stage| stage.ranks.len() > 1);
        let is_one_host = self.has_nccl() && (is_supervised || !can_name_hosts());
        match self {
            Self::Host => 0,
            _ if !(has_group || is_one_host) => 1,
            _ => pipeline.world_size().get(),
        }
    }

    /// Says whether this machine has them.
    pub(crate) fn has_gpus(self, pipeline: &Pipeline, is_supervised: bool) -> bool {
        let fewest = self.fewest_gpus(pipeline, is_supervised);
        fewest == 0 || Device::count().is_ok_and(|count| count >= fewest)
    }

    pub(crate) fn is_real(self) -> bool {
        matches!(self, Self::P2pGpus | Self::Gpus)
    }
}

/// Refuses a machine without these GPUs and the NCCL that jobs need: each job would say so again.
pub(super) fn need_gpus(gpus: u32, ground: Ground) -> Result<(), Error> {
    let refuse = |why: String| {
        let why =
            format!("{why}; `pp doctor` says what is missing, and --transport host needs none");
        Err(Error::local(FaultKind::Device, "look for GPUs", why))
    };
    match Device::count() {
        Ok(count) if count < gpus => {
            refuse(format!("{count} GPUs visible, and a job needs {gpus}"))
        }
        Ok(_) if !ground.has_nccl() => Ok(()),
        Ok(_) => match Nccl::load() {
            Ok(_) => Ok(()),
            Err(error) => refuse(with_source(&error)),
        },
        Err(error) => refuse(with_source(&error)),
    }
}

/// The devices of so many ranks, as an option, where this machine has fewer GPUs than ranks: they share them.
pub(crate) fn shared_gpus(ranks: u32) -> Option<String> {
    let count = Device::count()
        .ok()
        .filter(|count| (1..ranks).contains(count))?;
    let devices: Vec<_> = (0..ranks)
        .map(|rank| format!("cuda:{}", rank % count))
        .collect();
    Some(format!("--devices={}", devices.join(",")))
}

/// A job of this pipeline whose ranks are not started yet.
pub(crate) fn new_job(pipeline: &Pipeline) -> LocalJob {
    LocalJob::new(pipeline.world_size())
}

/// The devices of ranks of which those with a stage between source and sink share the GPUs of this machine, and the others are
/// CPUs.
pub(crate) fn beside_cpus(pipeline: &Pipeline) -> String {
    let gpus = Device::count().unwrap_or(0).max(1);
    let stages = pipeline.stages();
    let between = &stages[1..stages.len() - 1];
    let is_between = |rank| between.iter().any(|stage| stage.ranks.contains(&rank));
    let devices = (0..pipeline.world_size().get()).map(|rank| match is_between(Rank::new(rank)) {
        true => DeviceName::Cuda(rank % gpus),
        false => DeviceName::Cpu,
    });
    DeviceName::list(&devices.collect::<Vec<_>>())
}

/// Makes it `run` of this program on this ground, in the folder of its job, with nothing of a launcher's environment.
pub(crate) fn run_in(
    folder: &Path,
    ground: Ground,
    pipeline: &Pipeline,
    command: &mut Command,
) -> std::io::Result<()> {
    run_of(folder, pipeline, command)?;
    command.args(match ground {
        Ground::Host => ["--transport", "host", "--kernels", "cpu"],
        Ground::P2pFakes | Ground::P2pGpus => ["--transport", "p2p", "--kernels", "ptx"],
        Ground::Fakes | Ground::Gpus => ["--transport", "nccl", "--kernels", "ptx"],
    });
    if !ground.is_host() {
        command.args(shared_gpus(pipeline.world_size().get()));
    }
    Ok(())
}

/// As [`run_in`], with no word of where it runs.
pub(crate) fn run_of(
    folder: &Path,
    pipeline: &Pipeline,
    command: &mut Command,
) -> std::io::Result<()> {
    for name in LocalJob::launcher_variables().chain([VARIABLE]) {
        command.env_remove(name);
    }
    for (name, variable) in ASIDE {
        let own = folder.join(name);
        make_own(&own)?;
        command.env(variable, own);
    }
    command.args(["run", "--threads", "1", "--pipeline"]);
    command.arg(pipeline.to_string());
    Ok(())
}

/// The program of a rank, which is this one. Over NCCL each rank that shares a GPU has a name for its host, and NCCL connects them by
/// its network.
pub(crate) fn program_of(
    rank: Rank,
    net: Option<&Net>,
    ground: Ground,
    pipeline: &Pipeline,
) -> std::io::Result<Command> {
    let program = std::env::current_exe()?;
    let host = rank.get() as usize;
    let ranks = pipeline.world_size().get();
    Ok(match net {
        Some(net) => net.command(host, program.as_os_str()),
        None if ground.has_nccl() && shared_gpus(ranks).is_some() => {
            on_named_host(host, program.as_os_str())
        }
        None => Command::new(program),
    })
}

/// Makes it a rank of the job; it dies with this process.
pub(crate) fn join(job: &LocalJob, rank: Rank, command: &mut Command) {
    command
        .envs(job.env(rank))
        .env(SUPERVISOR, std::process::id().to_string());
}

/// The processes of a job that are still there.
pub(crate) fn left_of(job: &LocalJob) -> Vec<u32> {
    let env = job.env(Rank::new(0));
    let id = env.iter().find(|(name, _)| *name == JOB_ID);
    id.map_or_else(Vec::new, |(name, id)| with_variable(name, id))
}
