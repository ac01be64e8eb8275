//! Where a rank's payloads lie and what they travel over: host memory, or a GPU's memory and NCCL.
//!
//! CUDA and NCCL are looked for when they are wanted, in one binary for every machine. What was
//! found and chosen is said in one line.

use pp_contract::{Fault, FaultKind, Rank};
use pp_kernels::{Description, KernelSet};
use pp_runtime::driver::with_source;
use pp_transport::cuda::Device;
use pp_transport::launch::{Launch, Launcher};
use pp_transport::nccl::Nccl;

use crate::args::{KernelChoice, TransportChoice};
use crate::exit::Failure;
use crate::job::supervise;

/// A GPU, and the library that connects it with others.
pub(crate) struct Gpu {
    pub(crate) device: Device,
    pub(crate) nccl: Nccl,
    /// Whether its communicators block the thread that calls them; issuing costs less then.
    pub(crate) blocking: bool,
}

impl Gpu {
    /// `NVIDIA H200 (GPU-…), NCCL 2.28.9 from /…/libnccl.so.2`.
    pub(crate) fn describe(&self) -> String {
        let about = self.device.about();
        format!(
            "{} ({}), NCCL {} from {}",
            about.name,
            uuid_text(about.uuid),
            self.nccl.version(),
            self.nccl.path().display()
        )
    }

    /// The device's name in the handshake.
    pub(crate) fn uuid(&self) -> String {
        uuid_text(self.device.about().uuid)
    }
}

/// As `nvidia-smi -L` prints it, and CUDA_VISIBLE_DEVICES takes it.
pub(crate) fn uuid_text(uuid: [u8; 16]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    format!(
        "GPU-{}-{}-{}-{}-{}",
        hex(&uuid[..4]),
        hex(&uuid[4..6]),
        hex(&uuid[6..8]),
        hex(&uuid[8..10]),
        hex(&uuid[10..])
    )
}

/// Where payloads lie.
pub(crate) enum Backend {
    Host,
    Gpu(Gpu),
}

impl Backend {
    /// The name that both ranks must agree on.
    pub(crate) fn transport(&self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Gpu(_) => "nccl",
        }
    }

    /// UUID of the device, for the handshake.
    pub(crate) fn device(&self) -> Option<String> {
        match self {
            Self::Host => None,
            Self::Gpu(gpu) => Some(gpu.uuid()),
        }
    }
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
    /// What was found and chosen, where the choice was left to us.
    pub(crate) said: Option<String>,
}

/// Refuses kernels and a transport that cannot go together on any machine.
pub(crate) fn check(kernels: &KernelChoice, transport: TransportChoice) -> Result<(), Failure> {
    let refuse = |what: &str| Err(Failure::Usage(what.into()));
    match (kernels, transport) {
        (KernelChoice::Cpu, TransportChoice::Nccl) => refuse(
            "--kernels cpu works in host memory, which --transport nccl does not carry; use \
             --transport host, or --kernels ptx",
        ),
        (KernelChoice::Ptx, TransportChoice::Host) => refuse(
            "--kernels ptx works in GPU memory, which --transport host does not carry; use \
             --transport nccl, or --kernels cpu",
        ),
        _ => Ok(()),
    }
}

/// Chooses kernels and transport together: both work on the same memory.
pub(crate) fn choose(
    kernels: &KernelChoice,
    transport: TransportChoice,
    launch: &Launch,
) -> Result<Choice, Failure> {
    let rank = launch.rank();
    let need = match (transport, kernels) {
        (TransportChoice::Nccl, _) | (TransportChoice::Auto, KernelChoice::Ptx) => Need::Must,
        (TransportChoice::Host, _) | (TransportChoice::Auto, KernelChoice::Cpu) => Need::Never,
        (TransportChoice::Auto, KernelChoice::Auto | KernelChoice::File(_)) => Need::IfThere,
    };
    let found = match need {
        Need::Never => Err("--transport host moves host memory".to_owned()),
        Need::IfThere | Need::Must => find(launch, need),
    };
    let set = match kernels {
        KernelChoice::Cpu => KernelSet::cpu(),
        KernelChoice::Ptx => KernelSet::ptx(),
        KernelChoice::Auto if found.is_ok() => KernelSet::ptx(),
        KernelChoice::Auto => KernelSet::cpu(),
        KernelChoice::File(path) => KernelSet::load(path).map_err(|error| {
            Fault::new(FaultKind::Plugin, rank, "load kernels", with_source(&error))
        })?,
    };
    let (backend, reason) = place(set.describe(), need, found, rank)?;
    let is_auto = transport == TransportChoice::Auto || *kernels == KernelChoice::Auto;
    let said = is_auto.then(|| {
        let found = match (&backend, reason) {
            (Backend::Gpu(gpu), _) => format!("found {}", gpu.describe()),
            (Backend::Host, Some(reason)) => format!("no GPU: {reason}"),
            (Backend::Host, None) => "no GPU is wanted".to_owned(),
        };
        let transport = backend.transport();
        format!(
            "{found}; transport {transport}, kernels {}",
            set.describe().name
        )
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
    found: Result<Gpu, String>,
    rank: Rank,
) -> Result<(Backend, Option<String>), Failure> {
    let name = &kernels.name;
    let fault = |kind, what| Err(Fault::new(kind, rank, "choose a transport", what).into());
    match found {
        Ok(gpu) if kernels.cuda => Ok((Backend::Gpu(gpu), None)),
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

/// Chooses a transport for work that needs no kernels.
pub(crate) fn choose_transport(
    transport: TransportChoice,
    launch: &Launch,
) -> Result<Backend, Failure> {
    let need = match transport {
        TransportChoice::Host => return Ok(Backend::Host),
        TransportChoice::Nccl => Need::Must,
        TransportChoice::Auto => Need::IfThere,
    };
    match find(launch, need) {
        Ok(gpu) => Ok(Backend::Gpu(gpu)),
        Err(_) if need == Need::IfThere => Ok(Backend::Host),
        Err(reason) => {
            let what = "choose a transport";
            Err(Fault::new(FaultKind::Device, launch.rank(), what, reason).into())
        }
    }
}

/// Ranks on this machine that see the same GPUs, where that is known: those that we start
/// ourselves, and those of launchers that say how many they started and hide no GPU.
fn ranks_here(launch: &Launch) -> Option<u32> {
    if launch.launcher() == Launcher::Local || supervise::is_supervised() {
        return Some(launch.world_size().get());
    }
    let name = match launch.launcher() {
        Launcher::Torchrun => "LOCAL_WORLD_SIZE",
        Launcher::OpenMpi => "OMPI_COMM_WORLD_LOCAL_SIZE",
        // Slurm may show each task a GPU of its own.
        _ => return None,
    };
    std::env::var(name).ok()?.parse().ok()
}

/// This rank's GPU and NCCL, or why there is none.
fn find(launch: &Launch, need: Need) -> Result<Gpu, String> {
    let count = Device::count().map_err(|e| with_source(&e))?;
    let local = launch.local_rank();
    // A launcher may show each rank its own device alone.
    let ordinal = if local < count { local } else { 0 };
    let together = ranks_here(launch);
    let masked = count == 1 && together.is_none();
    let wanted = together.unwrap_or(1);
    if count < wanted || (local >= count && !masked) {
        let advice = match need {
            Need::Must => "; start fewer ranks here, or use --transport host --kernels cpu",
            _ => "",
        };
        return Err(format!(
            "{count} of {} GPUs that the ranks of this machine need are visible{advice}",
            wanted.max(local + 1)
        ));
    }
    let nccl = Nccl::load().map_err(|e| with_source(&e))?;
    let device = Device::open(ordinal).map_err(|e| with_source(&e))?;
    Ok(Gpu {
        device,
        nccl,
        blocking: true,
    })
}
