//! `pp-trials start`: what a rank must do in any case before it works.

use std::io::Write as _;

use pp_command::{TransportChoice, whole};
use pp_contract::{FaultKind, with_source};
use pp_device::{Device, Stream};
use pp_job::Error;
use pp_kernels::{Chroma, KernelSet, SessionConfig};

/// What it says when it is ready.
pub(super) const READY: &str = "pp-trials: ready";
/// The stage of the rank, and its frames: those of the film.
const STAGE: &str = "phase_b";
const SIDE: u32 = 16;
const FRAMES: u32 = 2;

/// The arguments of `pp-trials start`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct StartArgs {
    /// Where payloads would lie.
    #[arg(long, value_enum, default_value = "host")]
    transport: TransportChoice,
    /// The GPU, 0 to 63, or the last one where there are not so many.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = whole(0..=63_u32))]
    device: u32,
}

fn failed(error: &(dyn std::error::Error + 'static)) -> Error {
    Error::local(FaultKind::Device, "start", with_source(error))
}

/// Opens the driver and a context, loads the kernels, says so, and ends.
pub(crate) fn start(args: &StartArgs) -> Result<(), Error> {
    let host = SessionConfig::host(SIDE, SIDE, Chroma::Mono, FRAMES);
    let ready = || writeln!(std::io::stderr(), "{READY}");
    if args.transport == TransportChoice::Host {
        let opened = KernelSet::for_host().open_stage(STAGE, &host, &[]);
        let _session = opened.map_err(|e| failed(&e))?;
        return Ok(ready()?);
    }
    let count = Device::count().map_err(|e| failed(&e))?;
    let device = args.device.min(count.saturating_sub(1));
    let device = Device::open(device).map_err(|e| failed(&e))?;
    device.bind().map_err(|e| failed(&e))?;
    let stream = Stream::new(&device).map_err(|e| failed(&e))?;
    let (context, raw) = (device.raw_context(), stream.raw());
    let config = SessionConfig::cuda(SIDE, SIDE, Chroma::Mono, FRAMES, context, raw);
    let kernels = KernelSet::for_device();
    // SAFETY: the context is the device's primary one, which lives as long as the process, and was bound to this thread
    // above; the stream is dropped after the session.
    let opened = unsafe { kernels.open_stage_on_device(STAGE, &config, &[]) };
    let _session = opened.map_err(|e| failed(&e))?;
    Ok(ready()?)
}
