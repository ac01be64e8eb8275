//! Kernels opened for a run, as its arguments ask for them.

use std::fs::File;
use std::io::Read as _;

use anyhow::Context as _;
use pp_contract::{Digest, Fault, FaultKind, Rank, with_source};
use pp_job::{Error, FRONT};
use pp_kernels::{Description, KernelError, KernelSet, SessionConfig, guard};

use pp_runtime::drift::{Digester, Verify};

use super::codec::Geometry;
use super::on_host::HostKernels;
use crate::args::{KernelChoice, RunArgs, Strength, TransportChoice};

/// Kernels for a job of one process.
pub(super) fn load_for_host(args: &RunArgs) -> Result<KernelSet, Error> {
    let refuse = |what: &str| {
        Error::Usage(format!(
            "{what} needs two ranks on two GPUs; leave --ranks 1 out"
        ))
    };
    if args.transport == TransportChoice::Nccl {
        return Err(refuse("--transport nccl"));
    }
    match &args.kernels {
        KernelChoice::Auto => Ok(KernelSet::for_host()),
        KernelChoice::BuiltIn(set) if set.describe().host => Ok(KernelSet::clone(set)),
        KernelChoice::BuiltIn(set) => Err(refuse(&format!("--kernels {}", set.describe().name))),
        KernelChoice::File(path) => KernelSet::load(path).map_err(|error| {
            let text = with_source(&error);
            Fault::new(FaultKind::Plugin, FRONT, "load kernels", text).into()
        }),
    }
}

/// What kernels on host memory are opened for.
pub(super) fn config(args: &RunArgs, geometry: Geometry, threads: u32) -> SessionConfig {
    let (width, height) = (geometry.width, geometry.height);
    let mut config = SessionConfig::host(width, height, geometry.chroma, args.frames_per_chunk);
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
) -> Result<HostKernels, Error> {
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

/// Prepares the digester for slots of so many bytes, if chunks are verified.
pub(super) fn prepared<T, N: Digester>(
    mut kernels: T,
    digester: impl FnOnce(&mut T) -> &mut N,
    args: &RunArgs,
    slot_bytes: u64,
    rank: Rank,
) -> Result<T, Error> {
    if args.verify != Verify::Off {
        // Phase B has three of a chunk, and the front two of each that is in flight or is decoded.
        let tickets = 4 * args.depth as usize;
        let made = digester(&mut kernels).prepare(slot_bytes, tickets);
        made.map_err(|e| e.into_fault(rank))?;
    }
    Ok(kernels)
}

/// What tells one set of kernels, weights included, from another: what they say of themselves and, of a plugin, its file.
pub(super) fn digest_of_kernels(kernels: &KernelChoice, about: &Description) -> Result<u64, Error> {
    let KernelChoice::File(path) = kernels else {
        return Ok(about.digest);
    };
    let mut state = Digest::new();
    state.update(&about.digest.to_le_bytes());
    let mut piece = vec![0; 1 << 20];
    let read = File::open(path).and_then(|mut file| {
        loop {
            match file.read(&mut piece)? {
                0 => return Ok(()),
                bytes => state.update(&piece[..bytes]),
            }
        }
    });
    read.with_context(|| format!("cannot read {} again", path.display()))?;
    Ok(state.finish())
}
