//! Where a rank's payloads lie and what they travel over: host memory, or a GPU's memory and NCCL.
//!
//! CUDA and NCCL are looked for when they are wanted, in one binary for every machine. What was
//! found and chosen is said in one line.

use std::io::{ErrorKind, Write as _};

use pp_contract::{Fault, FaultKind, Rank, with_source};
use pp_device::{CudaError, Device};
use pp_job::{Error, ThisRank};
use pp_kernels::{Description, KernelSet, check_device};
use pp_transport::launch::Launcher;
use pp_transport::nccl::{Nccl, NcclBackend, uuid_text};

use crate::args::{KernelChoice, TransportChoice};
use crate::env::Env;

/// The operation of a fault while GPUs are looked for.
const LOOK: &str = "look for GPUs";

/// What makes edges between GPUs.
pub(crate) type GpuBackend = NcclBackend;

/// `NVIDIA H200 (GPU-…), NCCL 2.28.9 from /…/libnccl.so.2`.
fn describe(gpu: &GpuBackend) -> String {
    let about = gpu.device.about();
    let nccl = gpu.nccl.as_ref().map_or_else(String::new, |nccl| {
        format!(", NCCL {} from {}", nccl.version(), nccl.path().display())
    });
    format!("{} ({}){nccl}", about.name, uuid_text(about.uuid))
}

/// Where payloads lie.
#[derive(Debug)]
pub enum Backend {
    /// Host memory.
    Host,
    /// The memory of a GPU.
    Gpu(Box<GpuBackend>),
}

/// How much a job wants a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    Never,
    IfThere,
    Must,
}

/// Kernels and where they run.
pub(crate) struct Choice {
    pub(crate) kernels: KernelSet,
    pub(crate) backend: Backend,
    /// What was found, where the choice was left to us.
    pub(crate) said: Option<String>,
}

/// Refuses kernels and a transport that cannot go together on any machine.
pub(crate) fn check(kernels: &KernelChoice, transport: TransportChoice) -> Result<(), Error> {
    let KernelChoice::BuiltIn(set) = kernels else {
        return Ok(());
    };
    let about = set.describe();
    let (memory, given, other, default) = match transport {
        TransportChoice::Nccl if !about.cuda => ("host", "nccl", "host", KernelSet::for_device()),
        TransportChoice::Host if !about.host => ("GPU", "host", "nccl", KernelSet::for_host()),
        _ => return Ok(()),
    };
    Err(Error::Usage(format!(
        "--kernels {} works in {memory} memory, which --transport {given} does not carry; use \
         --transport {other}, or --kernels {}",
        about.name,
        default.describe().name
    )))
}

/// Refuses kernels whose name is neither one of those built in nor the path of a file.
pub(crate) fn find_plugin(kernels: &KernelChoice) -> Result<(), Error> {
    let KernelChoice::File(path) = kernels else {
        return Ok(());
    };
    match std::fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let names: String = KernelSet::built_in()
                .map(|set| format!("{}, ", set.describe().name))
                .collect();
            Err(Error::Usage(format!(
                "--kernels {path:?}: there is no such file; it takes auto, {names}or the path of a plugin"
            )))
        }
        _ => Ok(()),
    }
}

/// Chooses kernels and transport together: both work on the same memory.
pub(crate) fn choose(
    kernels: &KernelChoice,
    transport: TransportChoice,
    this: ThisRank<'_>,
    env: &Env,
) -> Result<Choice, Error> {
    let rank = this.rank();
    let need = match (transport, kernels) {
        (TransportChoice::Nccl, _) => Need::Must,
        (TransportChoice::Host, _) => Need::Never,
        (_, KernelChoice::BuiltIn(set)) if !set.describe().host => Need::Must,
        (_, KernelChoice::BuiltIn(set)) if !set.describe().cuda => Need::Never,
        _ => Need::IfThere,
    };
    let found = match need {
        Need::Never => Err("--transport host moves host memory".to_owned()),
        Need::IfThere | Need::Must => find(this, env, need),
    };
    let is_built_in = !matches!(kernels, KernelChoice::File(_));
    let found = found.and_then(|gpu| {
        if is_built_in {
            gpu.device.bind().map_err(|e| with_source(&e))?;
            check_device(gpu.device.raw_context()).map_err(|e| with_source(&e))?;
        }
        Ok(gpu)
    });
    let set = match kernels {
        KernelChoice::Auto if found.is_ok() => KernelSet::for_device(),
        KernelChoice::Auto => KernelSet::for_host(),
        KernelChoice::BuiltIn(set) => KernelSet::clone(set),
        KernelChoice::File(path) => KernelSet::load(path).map_err(|error| {
            Fault::new(FaultKind::Plugin, rank, "load kernels", with_source(&error))
        })?,
    };
    let (backend, reason) = place(set.describe(), need, found, rank)?;
    // Nothing needs to be said of what was asked for.
    let said = (transport == TransportChoice::Auto).then(|| match (&backend, reason) {
        (Backend::Gpu(gpu), _) => format!("found {}", describe(gpu)),
        (Backend::Host, Some(reason)) => format!("on CPUs: {reason}"),
        (Backend::Host, None) => format!("--kernels {} needs no GPU", set.describe().name),
    });
    Ok(Choice {
        kernels: set,
        backend,
        said,
    })
}

/// The backend for kernels that are there only for some memory; and why it is not the GPU's.
fn place(
    kernels: &Description,
    need: Need,
    found: Result<GpuBackend, String>,
    rank: Rank,
) -> Result<(Backend, Option<String>), Error> {
    let name = &kernels.name;
    let fault = |kind, what| Err(Fault::new(kind, rank, LOOK, what).into());
    match found {
        Ok(gpu) if kernels.cuda => Ok((Backend::Gpu(Box::new(gpu)), None)),
        Ok(_) if need == Need::Must => fault(
            FaultKind::BadInput,
            format!(
                "the kernels '{name}' work in host memory, which --transport nccl does not carry; \
                 use --transport host, or other kernels"
            ),
        ),
        Ok(_) => Ok((
            Backend::Host,
            Some(format!("the kernels '{name}' work in host memory")),
        )),
        Err(reason) if need == Need::Must => fault(FaultKind::Device, reason),
        Err(reason) if kernels.host => Ok((Backend::Host, (need != Need::Never).then_some(reason))),
        Err(reason) => fault(
            FaultKind::BadInput,
            format!("the kernels '{name}' work in GPU memory alone, and {reason}"),
        ),
    }
}

/// Chooses a transport for work that needs no kernels; and says what was found, where the choice
/// was left to us.
pub(crate) fn choose_transport(
    transport: TransportChoice,
    this: ThisRank<'_>,
    env: &Env,
) -> Result<(Backend, Option<String>), Error> {
    let need = match transport {
        TransportChoice::Host => return Ok((Backend::Host, None)),
        TransportChoice::Nccl => Need::Must,
        TransportChoice::Auto => Need::IfThere,
    };
    match find(this, env, need) {
        Ok(gpu) => {
            let said = format!("found {}; transport nccl", describe(&gpu));
            Ok((
                Backend::Gpu(Box::new(gpu)),
                (need == Need::IfThere).then_some(said),
            ))
        }
        Err(reason) if need == Need::IfThere => Ok((
            Backend::Host,
            Some(format!("on CPUs: {reason}; transport host")),
        )),
        Err(reason) => Err(Fault::new(FaultKind::Device, this.rank(), LOOK, reason).into()),
    }
}

/// Says what was found and chosen; rank 0 alone does.
pub(crate) fn say(said: Option<&str>) {
    if let Some(said) = said {
        // If standard error is closed, the line is lost.
        let _ = writeln!(std::io::stderr(), "pp: {said}");
    }
}

/// Ranks on this machine that see the same GPUs, where that is known: those that we start
/// ourselves, and those of launchers that say how many they started and hide no GPU.
fn ranks_here(this: ThisRank<'_>, env: &Env) -> Option<u32> {
    let launch = this.launch();
    if launch.launcher() == Launcher::Local || this.is_supervised() {
        return Some(launch.world_size().get());
    }
    let name = match launch.launcher() {
        Launcher::Torchrun => "LOCAL_WORLD_SIZE",
        Launcher::OpenMpi => "OMPI_COMM_WORLD_LOCAL_SIZE",
        // Slurm may show each task a GPU of its own.
        _ => return None,
    };
    env.text(name)?.parse().ok()
}

/// This rank's GPU and, where there are other ranks, NCCL; or why there is none.
fn find(this: ThisRank<'_>, env: &Env, need: Need) -> Result<GpuBackend, String> {
    let count = Device::count().map_err(|error| match (need, error) {
        // Where a GPU is only hoped for, `pp doctor` gives the advice.
        (Need::IfThere, CudaError::NoDriver) => "no NVIDIA driver was found".into(),
        (_, error) => with_source(&error),
    })?;
    let local = this.launch().local_rank();
    // A launcher may show each rank its own device alone.
    let ordinal = if local < count { local } else { 0 };
    let together = ranks_here(this, env);
    let masked = count == 1 && together.is_none();
    let wanted = together.unwrap_or(1);
    if count < wanted || (local >= count && !masked) {
        let advice = match need {
            Need::Must => {
                "; put all stages on as many ranks as there are GPUs (--ranks or --pipeline), check \
                 CUDA_VISIBLE_DEVICES, run ranks on other machines, too, or use --transport host"
            }
            _ => "",
        };
        return Err(format!(
            "{count} GPUs visible, and the ranks of this machine need {}{advice}",
            wanted.max(local + 1)
        ));
    }
    let nccl = match this.launch().world_size().get() {
        1 => None,
        _ => Some(Nccl::load().map_err(|e| with_source(&e))?),
    };
    let device = Device::open(ordinal).map_err(|e| with_source(&e))?;
    let mut gpu = GpuBackend::alone(device);
    gpu.nccl = nccl;
    gpu.variables = env.starting_with("NCCL_");
    // A GPU that the environment names just by itself.
    gpu.given = env
        .text("CUDA_VISIBLE_DEVICES")
        .filter(|visible| visible.len() == 40 && visible.starts_with("GPU-"));
    Ok(gpu)
}
