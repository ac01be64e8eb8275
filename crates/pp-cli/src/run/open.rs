//! Kernels opened for a run, as its arguments ask for them.

use pp_contract::{Fault, FaultKind, Rank, with_source};
use pp_kernels::{KernelError, KernelSet, SessionConfig, guard};

use super::codec::Geometry;
use super::on_host::HostKernels;
use crate::args::{KernelChoice, RunArgs, Strength, TransportChoice};
use crate::exit::Failure;
use crate::job::FRONT;

/// Kernels for a job of one process.
pub(super) fn load_for_host(args: &RunArgs) -> Result<KernelSet, Failure> {
    let refuse = |what: &str| {
        Failure::Usage(format!(
            "{what} needs two ranks on two GPUs; leave --ranks 1 out"
        ))
    };
    if args.transport == TransportChoice::Nccl {
        return Err(refuse("--transport nccl"));
    }
    match &args.kernels {
        KernelChoice::Auto | KernelChoice::Cpu => Ok(KernelSet::cpu()),
        KernelChoice::Ptx => Err(refuse("--kernels ptx")),
        KernelChoice::File(path) => KernelSet::load(path).map_err(|error| {
            let text = with_source(&error);
            Fault::new(FaultKind::Plugin, FRONT, "load kernels", text).into()
        }),
    }
}

/// What kernels on host memory are opened for.
pub(super) fn config(args: &RunArgs, geometry: Geometry, threads: u32) -> SessionConfig {
    let Geometry {
        width,
        height,
        chroma,
        ..
    } = geometry;
    let mut config = SessionConfig::host(width, height, chroma, args.frames_per_chunk);
    config.threads = threads;
    config.noise_sigma = match args.strength {
        Strength::Auto => None,
        Strength::Sigma(sigma) => Some(sigma),
    };
    config
}

/// A session on host memory. Encode and decode are light; the cores are Phase B's.
pub(super) fn host_kernels(
    args: &RunArgs,
    kernels: &KernelSet,
    geometry: Geometry,
    rank: Rank,
    threads: u32,
) -> Result<HostKernels, Failure> {
    let session = kernels
        .open(&config(args, geometry, threads))
        .map_err(|e| kernel_fault(&e, rank, "open kernels"))?;
    Ok(HostKernels::new(session, geometry))
}

/// Kernels of whichever kind failed.
pub(super) fn kernel_fault(error: &KernelError, rank: Rank, operation: &str) -> Fault {
    Fault::new(FaultKind::Plugin, rank, operation, with_source(error))
}

/// Bytes of a slot for a payload: behind it lies the guard that catches kernels which write on.
pub(super) fn slot_bytes(payload: u64) -> u64 {
    payload + guard::GUARD_BYTES as u64
}
