//! Where a rank's payloads lie and what they travel over: host memory, or a GPU's memory and NCCL.
//!
//! CUDA and NCCL are looked for when they are wanted, in one binary for every machine. What was
//! found and chosen is said in one line.

use std::io::{ErrorKind, Write as _};
use std::time::Instant;

use pp_contract::{Fault, FaultKind, Rank, digest, with_source};
use pp_kernels::{Description, KernelSet, check_device};
use pp_transport::cuda::{CudaError, Device};
use pp_transport::launch::{Launch, Launcher};
use pp_transport::nccl::{Issuer, Nccl, warm_up};

use crate::args::{KernelChoice, TransportChoice};
use crate::exit::Failure;
use crate::job::supervise;

/// The operation of a fault while GPUs are looked for.
const LOOK: &str = "look for GPUs";

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

    /// Begins to load what NCCL needs on the device, for a rank that may have to wait for its peer.
    /// Gives the issuer that it is to connect with. What fails here fails there again, and is told
    /// there.
    pub(crate) fn warm_up(&self) -> Option<Issuer> {
        let issuer = Issuer::open(&self.nccl, &self.device).ok()?;
        if let Err(error) = warm_up(&issuer, Instant::now()) {
            tracing::debug!(%error, "NCCL is not loaded ahead");
        }
        Some(issuer)
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

/// Bytes of a name and of a value in the handshake.
const LONGEST_NAME: usize = 64;
const LONGEST_VALUE: usize = 256;
/// Variables of NCCL that are settings of their own. The handshake has room for 64 settings in all.
const MOST_VARIABLES: usize = 32;
/// The setting that stands for all others.
const OTHER_VARIABLES: &str = "other_nccl_variables";

/// Whether a variable steers how NCCL's ranks talk, rather than what one machine is like or says.
fn is_for_all(name: &str) -> bool {
    const OWN: [&str; 8] = [
        "NCCL_DEBUG",
        "NCCL_SOCKET_IFNAME",
        "NCCL_IB_HCA",
        "NCCL_TOPO",
        "NCCL_GRAPH",
        "NCCL_HOSTID",
        "NCCL_CONF_FILE",
        "NCCL_HOME",
    ];
    name.starts_with("NCCL_") && !OWN.iter().any(|own| name.starts_with(own))
}

/// Variables as settings of the handshake: what does not fit is compared by its digest, and all
/// variables that do not fit together by one, beside as many of their names as there is room for.
fn as_settings(mut variables: Vec<(String, String)>) -> Vec<(String, String)> {
    let digest_of = |bytes: &[u8]| format!("digest {:016x}", digest(bytes));
    variables.sort_unstable();
    let (mut settings, mut others) = (Vec::new(), Vec::new());
    for (name, value) in variables {
        if name.len() > LONGEST_NAME || settings.len() == MOST_VARIABLES {
            others.push((name, value));
        } else if value.len() > LONGEST_VALUE {
            settings.push((name, digest_of(value.as_bytes())));
        } else {
            settings.push((name, value));
        }
    }
    if !others.is_empty() {
        // No value of a variable has a zero in it.
        let all = others
            .iter()
            .map(|(name, value)| format!("{name}={value}\0"));
        let all = digest_of(all.collect::<String>().as_bytes());
        let mut value = format!("{all} of {}:", others.len());
        for (name, _) in &others {
            value += " ";
            value += name;
        }
        value.truncate(value.floor_char_boundary(LONGEST_VALUE));
        settings.push((OTHER_VARIABLES.to_owned(), value));
    }
    settings
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

    /// What steers the transport and must be the same on all ranks, beside its name: NCCL's
    /// version, and each of its variables that is about more than this machine.
    pub(crate) fn settings(&self) -> Vec<(String, String)> {
        let mut settings = vec![("transport".to_owned(), self.transport().to_owned())];
        if let Self::Gpu(gpu) = self {
            settings.push(("nccl_version".into(), gpu.nccl.version().to_string()));
            let named = std::env::vars_os().filter_map(|(name, value)| {
                let name = name.into_string().ok()?;
                is_for_all(&name).then(|| (name, value.to_string_lossy().into_owned()))
            });
            settings.extend(as_settings(named.collect()));
        }
        settings
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
    /// What was found, where the choice was left to us.
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

/// Refuses kernels whose name is neither one of those built in nor the path of a file.
pub(crate) fn find_plugin(kernels: &KernelChoice) -> Result<(), Failure> {
    let KernelChoice::File(path) = kernels else {
        return Ok(());
    };
    match std::fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Err(Failure::Usage(format!(
            "--kernels {path:?}: there is no such file; it takes auto, cpu, ptx, or the path of a plugin"
        ))),
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
    let wants_ptx = matches!(kernels, KernelChoice::Auto | KernelChoice::Ptx);
    let found = found.and_then(|gpu| {
        if wants_ptx {
            gpu.device.bind().map_err(|e| with_source(&e))?;
            check_device(gpu.device.raw_context()).map_err(|e| with_source(&e))?;
        }
        Ok(gpu)
    });
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
    // Nothing needs to be said of what was asked for.
    let said = (transport == TransportChoice::Auto).then(|| match (&backend, reason) {
        (Backend::Gpu(gpu), _) => format!("found {}", gpu.describe()),
        (Backend::Host, Some(reason)) => format!("on CPUs: {reason}"),
        (Backend::Host, None) => "--kernels cpu needs no GPU".to_owned(),
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
    let fault = |kind, what| Err(Fault::new(kind, rank, LOOK, what).into());
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

/// Chooses a transport for work that needs no kernels; and says what was found, where the choice
/// was left to us.
pub(crate) fn choose_transport(
    transport: TransportChoice,
    launch: &Launch,
) -> Result<(Backend, Option<String>), Failure> {
    let need = match transport {
        TransportChoice::Host => return Ok((Backend::Host, None)),
        TransportChoice::Nccl => Need::Must,
        TransportChoice::Auto => Need::IfThere,
    };
    match find(launch, need) {
        Ok(gpu) => {
            let said = format!("found {}; transport nccl", gpu.describe());
            Ok((Backend::Gpu(gpu), (need == Need::IfThere).then_some(said)))
        }
        Err(reason) if need == Need::IfThere => Ok((
            Backend::Host,
            Some(format!("on CPUs: {reason}; transport host")),
        )),
        Err(reason) => Err(Fault::new(FaultKind::Device, launch.rank(), LOOK, reason).into()),
    }
}

/// A refusal of the handshake, with why this rank chose what it chose, where that was left to it:
/// the ranks may have found different machines. Whether that is why they differ is for a person to read.
pub(crate) fn explain(failure: Failure, launch: &Launch, said: Option<&str>) -> Failure {
    match (failure, said) {
        (Failure::Fault(fault), Some(said)) if fault.kind == FaultKind::HandshakeMismatch => {
            let detail = format!(
                "{}; rank {} chose by itself: {said}",
                fault.detail,
                launch.rank()
            );
            Fault::new(fault.kind, fault.rank, &fault.operation, detail).into()
        }
        (failure, _) => failure,
    }
}

/// Says what was found and chosen; the front alone does.
pub(crate) fn say(said: Option<&str>) {
    if let Some(said) = said {
        // Without a standard error nobody wants to read it.
        let _ = writeln!(std::io::stderr(), "pp: {said}");
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
    let count = Device::count().map_err(|error| match (need, error) {
        // Where a GPU is only hoped for, `pp doctor` gives the advice.
        (Need::IfThere, CudaError::NoDriver) => "no NVIDIA driver was found".into(),
        (_, error) => with_source(&error),
    })?;
    let local = launch.local_rank();
    // A launcher may show each rank its own device alone.
    let ordinal = if local < count { local } else { 0 };
    let together = ranks_here(launch);
    let masked = count == 1 && together.is_none();
    let wanted = together.unwrap_or(1);
    if count < wanted || (local >= count && !masked) {
        let advice = match need {
            Need::Must => "; start fewer ranks here, or use --transport host",
            _ => "",
        };
        return Err(format!(
            "{count} visible where the ranks of this machine need {}{advice}",
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

#[cfg(test)]
mod tests {
    use super::*;
    use pp_contract::WorldSize;
    use pp_transport::launch::LocalJob;

    #[test]
    fn any_variables_fit_the_handshake_and_each_counts() {
        let long = format!("NCCL_{}", "X".repeat(100));
        let many = || {
            let names = (0..200).map(|n| format!("NCCL_{n:03}"));
            let all = names.chain([long.clone(), "NCCL_Y".into()]);
            all.map(|name| (name, "1".to_owned())).collect::<Vec<_>>()
        };
        let hello = |variables| {
            let mut settings = pp_contract::Settings::new();
            for (name, value) in as_settings(variables) {
                settings.set(&name, value).expect("it fits");
            }
            settings
        };
        let all = hello(many());
        assert_eq!(all.iter().len(), MOST_VARIABLES + 1);
        let others = all.get(OTHER_VARIABLES).expect("one for the others");
        assert!(others.contains("of 170: NCCL_032 NCCL_033 "), "{others}");
        let reversed = many().into_iter().rev().collect();
        assert!(hello(reversed) == all, "the order counts");
        for at in 0..many().len() {
            let mut changed = many();
            changed[at].1 = "2".into();
            assert!(hello(changed) != all, "variable {at} does not count");
        }
        let name = ("NCCL_A".to_owned(), "v".repeat(300));
        assert!(
            hello(vec![name])
                .get("NCCL_A")
                .is_some_and(|v| v.starts_with("digest "))
        );
        assert_eq!(hello(vec![(long, "1".into())]).iter().len(), 1);
    }

    #[test]
    fn a_rank_that_chose_by_itself_says_why_when_another_chose_otherwise() {
        let job = LocalJob::new(WorldSize::new(2).expect("two"));
        let launch = job.launch(Rank::new(1)).expect("a rank of it");
        let fault = |kind, detail: &str| Fault::new(kind, Rank::new(1), "handshake", detail).into();
        let said = Some("on CPUs: no NVIDIA driver was found");
        let mismatch = "settings.transport is \"nccl\" on rank 0 and \"host\" on rank 1";
        let text =
            explain(fault(FaultKind::HandshakeMismatch, mismatch), &launch, said).to_string();
        assert!(
            text.contains(mismatch) && text.contains("rank 1 chose by itself: on CPUs"),
            "{text}"
        );
        for (kind, detail, said) in [
            (FaultKind::PeerDied, "its kernels died", said),
            (FaultKind::HandshakeMismatch, mismatch, None),
        ] {
            let plain = fault(kind, detail).to_string();
            assert_eq!(
                explain(fault(kind, detail), &launch, said).to_string(),
                plain
            );
        }
    }
}
