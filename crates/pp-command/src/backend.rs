//! Where a rank's payloads lie and what they travel over: host memory, or a GPU's memory by copy engine or NCCL.
//!
//! CUDA and NCCL are looked for when they are wanted, in one binary for every machine. What was
//! found and chosen is said in one line.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::Path;

use pp_contract::{DeviceName, Fault, FaultKind, Pipeline, Rank, StageSpec, with_source};
use pp_device::{CudaError, Device};
use pp_job::command_line::say_note;
use pp_job::{Error, ThisRank};
use pp_kernels::{Description, KernelSet, check_device, runs_on};
pub use pp_transport::gpu_backend::GpuBackend;
use pp_transport::gpu_backend::GpuTransport;
use pp_transport::launch::Launcher;
use pp_transport::nccl::{Nccl, NcclBackend, uuid_text};

use crate::choice::{KernelChoice, KernelChoices, TransportChoice};
use crate::env::Env;

/// The operation of a fault while GPUs are looked for.
const LOOK: &str = "look for GPUs";

/// `NVIDIA H200 (GPU-…)`.
fn describe(gpu: &GpuBackend) -> String {
    let about = gpu.device.about();
    format!("{} ({})", about.name, uuid_text(about.uuid))
}

/// Says what a report calls the carrier of the payloads of so many ranks, whose backend has this short name.
#[must_use]
pub fn label(name: &str, ranks: u32) -> String {
    let processes = match ranks {
        1 => "1 process".to_owned(),
        ranks => format!("{ranks} processes"),
    };
    match name {
        "host" => format!("host (shared memory, {processes})"),
        _ if ranks == 1 => format!("GPU memory ({processes})"),
        name if name.ends_with("nccl") => {
            // It is loaded already.
            let version = Nccl::load().map(|nccl| format!(" {}", nccl.version()));
            format!("{name}{} ({processes})", version.unwrap_or_default())
        }
        name => format!("{name} ({processes})"),
    }
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

/// Kernels and where those of this rank run.
#[derive(Debug)]
pub struct Choice {
    /// The kernels of each stage of the pipeline.
    pub kernels: Vec<KernelSet>,
    /// Where the payloads of this rank lie.
    pub backend: Backend,
    /// What was found, where the choice was left to us.
    pub said: Option<String>,
}

/// Refuses kernels, a transport and devices that cannot go together on any machine.
///
/// # Errors
/// They cannot go together; with the remedy.
pub fn check(
    kernels: &KernelChoices,
    transport: TransportChoice,
    devices: &[DeviceName],
    pipeline: &Pipeline,
) -> Result<(), Error> {
    check_transport(transport, devices)?;
    let stages = pipeline.stages();
    if let Some(other) = kernels
        .names()
        .find(|name| stages.iter().all(|stage| &*stage.name != *name))
    {
        return Err(Error::Usage(format!(
            "--kernels names the stage {other}, and {pipeline} has none of that name; name one of its stages"
        )));
    }
    // With devices the kernels of each stage are compared with those, once they are described.
    if !devices.is_empty() {
        return Ok(());
    }
    let built_in = || {
        stages
            .iter()
            .filter_map(|stage| match kernels.of(&stage.name) {
                KernelChoice::BuiltIn(set) => Some(set.describe()),
                _ => None,
            })
    };
    let of_host = built_in().find(|about| !about.cuda);
    let of_gpus = built_in().find(|about| !about.host);
    let (about, memory, other, default) = match (of_host, of_gpus) {
        (Some(host), Some(gpus)) => {
            return Err(Error::Usage(format!(
                "--kernels names {}, which works in host memory, and {}, which works in GPU memory; say with --devices which ranks \
                 are CPUs, as in --devices cpu,cuda:0",
                host.name, gpus.name
            )));
        }
        (Some(host), _) if transport.is_on_gpus() => {
            (host, "host", "host", KernelSet::for_device())
        }
        (_, Some(gpus)) if transport == TransportChoice::Host => {
            (gpus, "GPU", "auto", KernelSet::for_host())
        }
        _ => return Ok(()),
    };
    Err(Error::Usage(format!(
        "--kernels {} works in {memory} memory, which --transport {transport} does not carry; use \
         --transport {other}, or --kernels {}",
        about.name,
        default.describe().name
    )))
}

/// Says whether this machine has one GPU, no more, which these kernels can use, built in or not.
#[must_use]
pub fn is_the_only_gpu_usable(are_built_in: bool) -> bool {
    let is_usable = |device: Device| {
        let checked = device.bind().map(|()| check_device(device.raw_context()));
        checked.is_ok_and(|checked| checked.is_ok() || !are_built_in)
    };
    matches!(Device::count(), Ok(1)) && Device::open(0).is_ok_and(is_usable)
}

/// Counts the GPUs of this machine. Makes no context.
#[must_use]
pub fn gpus() -> u32 {
    Device::count().unwrap_or(0)
}

/// Says whether the built-in kernels run on this GPU. Makes no context.
#[must_use]
pub fn runs_built_in(number: u32) -> bool {
    Device::describe(number).is_ok_and(|about| runs_on(&about))
}

/// Refuses a transport between devices that it does not connect.
///
/// # Errors
/// `host` with a GPU, or a transport of GPUs without one; with the remedy.
pub fn check_transport(transport: TransportChoice, devices: &[DeviceName]) -> Result<(), Error> {
    let refuse = |what| Err(Error::Usage(format!("--transport {transport} {what}")));
    let has_gpu = devices.iter().any(|device| device.is_gpu());
    match transport {
        TransportChoice::Host if has_gpu => {
            refuse("moves host memory, and --devices names a GPU; use --transport auto or p2p")
        }
        gpus if gpus.is_on_gpus() && !devices.is_empty() && !has_gpu => {
            refuse("moves GPU memory, and --devices names no GPU; use --transport host")
        }
        _ => Ok(()),
    }
}

/// Refuses kernels whose name is neither one of those built in nor the path of a file.
///
/// # Errors
/// There is no such file; with the names that there are.
pub fn find_plugin(kernels: &KernelChoice) -> Result<(), Error> {
    let KernelChoice::File(path) = kernels else {
        return Ok(());
    };
    match std::fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let names: String = KernelSet::built_in()
                .map(|set| format!("{}, ", set.describe().name))
                .collect();
            let told = format!(
                "--kernels {path:?}: there is no such file; it takes auto, {names}or the path of a plugin"
            );
            Err(match path.as_os_str().as_encoded_bytes().contains(&b'/') {
                true => Error::local(FaultKind::Io, "find kernels", told),
                // A name, misspelt.
                false => Error::Usage(told),
            })
        }
        _ => Ok(()),
    }
}

/// Chooses the kernels of all stages, and the backend of this rank: both work on the same memory.
///
/// # Errors
/// There are no GPUs, or no library, for the transport; or the kernels cannot be loaded, or do not work in its memory.
pub fn choose(
    kernels: &KernelChoices,
    transport: TransportChoice,
    this: ThisRank<'_>,
    env: &Env,
) -> Result<Choice, Error> {
    let rank = this.rank();
    let stages = this.pipeline().stages();
    // Without devices all ranks have one kind of memory, whatever their stages.
    let is_named = this.device().is_some();
    let own: Vec<&KernelChoice> = stages
        .iter()
        .filter(|stage| !is_named || stage.ranks.contains(&rank))
        .map(|stage| kernels.of(&stage.name))
        .collect();
    let has_built_in = |is: fn(&Description) -> bool| {
        let is = |choice: &&KernelChoice| matches!(choice, KernelChoice::BuiltIn(set) if is(set.describe()));
        own.iter().any(is)
    };
    let on_gpus_alone = has_built_in(|about| !about.host);
    let need = match transport {
        _ if this.device().is_some_and(DeviceName::is_gpu) => Need::Must,
        _ if is_named => Need::Never,
        gpus if gpus.is_on_gpus() => Need::Must,
        TransportChoice::Host => Need::Never,
        _ if on_gpus_alone => Need::Must,
        _ if has_built_in(|about| !about.cuda) => Need::Never,
        _ => Need::IfThere,
    };
    let without_gpus = match (on_gpus_alone, transport) {
        (true, TransportChoice::Auto) => "--kernels cpu",
        (true, _) => "--kernels cpu --transport host",
        (false, _) => "--transport host",
    };
    let found = match (need, transport.way()) {
        (Need::IfThere | Need::Must, Some(way)) => find(this, env, (need, without_gpus), way),
        _ if is_named => Err("--devices gives this rank a CPU".to_owned()),
        _ => Err("--transport host moves host memory".to_owned()),
    };
    let is_built_in = |choice: &&KernelChoice| !matches!(choice, KernelChoice::File(_));
    let found = found.and_then(|gpu| {
        if own.iter().any(is_built_in) {
            gpu.device.bind().map_err(|e| with_source(&e))?;
            check_device(gpu.device.raw_context()).map_err(|e| with_source(&e))?;
        }
        Ok(gpu)
    });
    let given = given(kernels, stages, rank)?;
    let of_own = stages.iter().zip(&given);
    let of_own = of_own.filter(|(stage, _)| !is_named || stage.ranks.contains(&rank));
    let of_own: Vec<&Description> = of_own
        .filter_map(|(_, set)| Some(set.as_ref()?.describe()))
        .collect();
    let (backend, reason) = place(&of_own, (need, transport), found, this)?;
    let is_on_gpu = |stage: &StageSpec| match this.devices() {
        [] => matches!(backend, Backend::Gpu(_)),
        devices => devices[stage.leader().get() as usize].is_gpu(),
    };
    let built_in = |stage: &StageSpec| match is_on_gpu(stage) {
        true => KernelSet::for_device(),
        false => KernelSet::for_host(),
    };
    let kernels: Vec<KernelSet> = stages
        .iter()
        .zip(given)
        .map(|(stage, set)| set.unwrap_or_else(|| built_in(stage)))
        .collect();
    // Nothing needs to be said of what was asked for.
    let is_asked = transport != TransportChoice::Auto || is_named;
    let said = (!is_asked).then(|| match (&backend, reason) {
        (Backend::Gpu(gpu), _) => format!("found {}", describe(gpu)),
        (Backend::Host, Some(reason)) => format!("on CPUs: {reason}"),
        (Backend::Host, None) => format!("--kernels {} needs no GPU", kernels[0].describe().name),
    });
    Ok(Choice {
        kernels,
        backend,
        said,
    })
}

/// Loads the kernels that are named, for each stage; none where `auto` chooses.
fn given(
    kernels: &KernelChoices,
    stages: &[StageSpec],
    rank: Rank,
) -> Result<Vec<Option<KernelSet>>, Error> {
    let mut plugins: BTreeMap<&Path, KernelSet> = BTreeMap::new();
    let given = stages.iter().map(|stage| {
        Ok(match kernels.of(&stage.name) {
            KernelChoice::Auto => None,
            KernelChoice::BuiltIn(set) => Some(KernelSet::clone(set)),
            KernelChoice::File(path) => Some(match plugins.get(&**path) {
                Some(loaded) => loaded.clone(),
                None => {
                    let loaded = KernelSet::load(path).map_err(|error| {
                        Fault::new(FaultKind::Plugin, rank, "load kernels", with_source(&error))
                    })?;
                    plugins.entry(path).or_insert(loaded).clone()
                }
            }),
        })
    });
    given.collect()
}

/// The backend for kernels that are there only for some memory; and why it is not the GPU's.
fn place(
    kernels: &[&Description],
    (need, transport): (Need, TransportChoice),
    found: Result<GpuBackend, String>,
    this: ThisRank<'_>,
) -> Result<(Backend, Option<String>), Error> {
    let fault = |kind, what| Err(Fault::new(kind, this.rank(), LOOK, what).into());
    let of_host = kernels.iter().find(|about| !about.cuda);
    let of_gpus = kernels.iter().find(|about| !about.host);
    match (found, of_host, of_gpus) {
        (Ok(gpu), None, _) => Ok((Backend::Gpu(Box::new(gpu)), None)),
        (Ok(_), Some(host), Some(gpus)) if this.device().is_none() => fault(
            FaultKind::BadInput,
            format!(
                "the kernels '{}' work in host memory and the kernels '{}' in GPU memory alone; say with --devices which ranks \
                 are CPUs",
                host.name, gpus.name
            ),
        ),
        (Ok(_), Some(host), _) if need == Need::Must => fault(
            FaultKind::BadInput,
            match this.device() {
                Some(device) => format!(
                    "the kernels '{}' work in host memory, and --devices gives this rank {device}; give it cpu, or its stages \
                     other kernels",
                    host.name
                ),
                None => format!(
                    "the kernels '{}' work in host memory, which --transport {transport} does not carry; \
                     use --transport host, or other kernels",
                    host.name
                ),
            },
        ),
        (found, Some(host), None) if need == Need::IfThere || found.is_ok() => Ok((
            Backend::Host,
            Some(format!("the kernels '{}' work in host memory", host.name)),
        )),
        (Ok(_), Some(_), _) => unreachable!("both kinds are refused above, and devices want a GPU"),
        (Err(reason), ..) if need == Need::Must => fault(FaultKind::Device, reason),
        (Err(reason), _, None) => Ok((Backend::Host, (need != Need::Never).then_some(reason))),
        (Err(reason), _, Some(gpus)) => fault(
            FaultKind::BadInput,
            format!(
                "the kernels '{}' work in GPU memory alone, and {reason}; give their stages a GPU, or other kernels",
                gpus.name
            ),
        ),
    }
}

/// Chooses a transport for work that needs no kernels; and says what was found, where the choice
/// was left to us.
///
/// # Errors
/// There are no GPUs, or no library, for the transport.
pub fn choose_transport(
    transport: TransportChoice,
    this: ThisRank<'_>,
    env: &Env,
) -> Result<(Backend, Option<String>), Error> {
    let is_gpu = this.device().map(DeviceName::is_gpu);
    let Some(way) = transport.way().filter(|_| is_gpu != Some(false)) else {
        return Ok((Backend::Host, None));
    };
    let need = match way {
        GpuTransport::Best if is_gpu.is_none() => Need::IfThere,
        _ => Need::Must,
    };
    match find(this, env, (need, "--transport host"), way) {
        Ok(gpu) => {
            let said = format!("found {}", describe(&gpu));
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
pub fn say(said: Option<&str>) {
    if let Some(said) = said {
        say_note(format!("pp: {said}"));
    }
}

/// Ranks on this machine that see the same GPUs, where that is known: those that we start
/// ourselves, and those of launchers that say how many they started and hide no GPU.
fn ranks_here(this: ThisRank<'_>, env: &Env) -> Option<u32> {
    let launch = this.launch();
    if launch.launcher() == Launcher::Local || this.is_supervised() {
        return Some(launch.world_size().get());
    }
    env.text(launch.launcher().local_size_variable()?)?
        .parse()
        .ok()
}

/// This rank's GPU and, where other ranks are to be reached by NCCL alone, the library; or why there is none, and the options
/// that need no GPU.
fn find(
    this: ThisRank<'_>,
    env: &Env,
    (need, without_gpus): (Need, &str),
    way: GpuTransport,
) -> Result<GpuBackend, String> {
    let count = Device::count().map_err(|error| match (need, error) {
        // Where a GPU is only hoped for, `pp doctor` gives the advice.
        (Need::IfThere, CudaError::NoDriver) => "no NVIDIA driver was found".into(),
        (_, error) => with_source(&error),
    })?;
    let ordinal = match this.device() {
        Some(device) => named(device, this, env, count)?,
        None => own(this, env, count, (need, without_gpus))?,
    };
    let nccl = match (this.launch().world_size().get(), way) {
        (2.., GpuTransport::Nccl) => Some(Nccl::load().map_err(|e| with_source(&e))?),
        _ => None,
    };
    let device = Device::open(ordinal).map_err(|e| with_source(&e))?;
    let mut gpu = NcclBackend::alone(device);
    gpu.nccl = nccl;
    gpu.variables = env.starting_with("NCCL_");
    // A GPU that the environment names just by itself.
    gpu.given = env
        .text("CUDA_VISIBLE_DEVICES")
        .filter(|visible| visible.len() == 40 && visible.starts_with("GPU-"));
    Ok(GpuBackend::new(gpu, way, |line| say(Some(line))))
}

/// The number of a GPU that the user named, where so many are visible.
fn named(device: DeviceName, this: ThisRank<'_>, env: &Env, count: u32) -> Result<u32, String> {
    let number = match device {
        DeviceName::Cuda(number) => number,
        // A launcher may show each rank its own GPU alone.
        _ if count == 1 && ranks_here(this, env).is_none() => 0,
        _ => this.gpus_before(),
    };
    if number < count {
        return Ok(number);
    }
    let plural = if count == 1 { "" } else { "s" };
    Err(format!(
        "--devices gives rank {} {device}, which is GPU {number} of this host, and {count} GPU{plural} visible, counted from \
         0; name another one, or check CUDA_VISIBLE_DEVICES",
        this.rank()
    ))
}

/// The number of the GPU that a rank takes by itself, where there is one for each rank of its host.
fn own(
    this: ThisRank<'_>,
    env: &Env,
    count: u32,
    (need, without_gpus): (Need, &str),
) -> Result<u32, String> {
    let local = this.launch().local_rank();
    let together = ranks_here(this, env);
    let masked = count == 1 && together.is_none();
    let wanted = together.unwrap_or(1);
    if count < wanted || (local >= count && !masked) {
        let advice = match need {
            Need::Must => format!(
                "; put all stages on as many ranks as there are GPUs (--ranks or --pipeline), let ranks share a GPU (--devices), \
                 check CUDA_VISIBLE_DEVICES, run ranks on other machines, too, or use {without_gpus}"
            ),
            _ => String::new(),
        };
        let plural = if count == 1 { "" } else { "s" };
        return Err(format!(
            "{count} GPU{plural} visible, and the ranks of this machine need {}{advice}",
            wanted.max(local + 1)
        ));
    }
    // A launcher may show each rank its own GPU alone.
    Ok(if local < count { local } else { 0 })
}
