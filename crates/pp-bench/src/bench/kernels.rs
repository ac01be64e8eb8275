//! `pp bench kernels`: what the CUDA kernels reach on the first GPU, beside what the GPU can do.

use pp_command::print_result;
use pp_contract::{Fault, FaultKind, Rank, with_source};
use pp_device::{Device, Stream};
use pp_kernels::measure::{self, Case, Ceilings, Figure};
use pp_kernels::{Chroma, KernelSet};
use serde::Serialize;

use crate::args::KernelsArgs;
use pp_job::Error;

/// One call of the kernels.
#[derive(Serialize)]
struct Kernel {
    name: &'static str,
    median_us: f64,
    best_us: f64,
    /// Bytes of device memory that have to be read and written, over the median.
    gbytes_per_s: f64,
    /// Bytes that have to cross to or from the host, over the median.
    host_gbytes_per_s: f64,
    /// Operations of the formula, over the median.
    tflops: f64,
}

#[derive(Serialize)]
struct KernelsReport {
    device: String,
    width: u32,
    height: u32,
    frames: u32,
    steps: u32,
    kernels: Vec<Kernel>,
    /// What `--verify` adds to a chunk of phase_b, over what that takes: its input twice, its output once.
    verify_share_of_phase_b: f64,
    copy_gbytes_per_s: f64,
    upload_gbytes_per_s: f64,
    download_gbytes_per_s: f64,
    gemm_tflops: Option<f64>,
    /// Why there is no figure for matrix products.
    gemm_missing: Option<String>,
}

fn fault(error: &(dyn std::error::Error + 'static)) -> Error {
    let text = with_source(error);
    Fault::new(FaultKind::Device, Rank::new(0), "measure kernels", text).into()
}

/// Measures and prints.
pub(crate) fn kernels(args: &KernelsArgs) -> Result<(), Error> {
    let device = Device::open(0).map_err(|e| fault(&e))?;
    device.bind().map_err(|e| fault(&e))?;
    let stream = Stream::new(&device).map_err(|e| fault(&e))?;
    let (context, raw) = (device.raw_context(), stream.raw());
    let case = Case {
        width: args.width,
        height: args.height,
        chroma: Chroma::C420,
        frames: args.frames_per_chunk,
        steps: args.denoise_steps,
        runs: args.runs,
    };
    // SAFETY: the context is the device's primary one, bound to this thread above; the stream
    // outlives both calls, which wait for what they issue.
    let figures = unsafe { measure::kernels(&KernelSet::for_device(), &case, context, raw) };
    let mut figures = figures.map_err(|e| fault(&e))?;
    // SAFETY: as above.
    let single = unsafe { measure::single_kernels(&case, context, raw) };
    figures.extend(single.map_err(|e| fault(&e))?);
    // SAFETY: as above.
    let ceilings = unsafe { measure::ceilings(context, raw, args.runs) };
    let ceilings = ceilings.map_err(|e| fault(&e))?;
    let report = report(&device, &case, &figures, ceilings);
    print_result(&report, args.json)
}

fn report(device: &Device, case: &Case, figures: &[Figure], ceilings: Ceilings) -> KernelsReport {
    let gemm = ceilings.gemm_flops_per_second;
    KernelsReport {
        device: device.about().name.clone(),
        width: case.width,
        height: case.height,
        frames: case.frames,
        steps: case.steps,
        kernels: figures
            .iter()
            .map(|figure| Kernel {
                name: figure.name,
                median_us: figure.median.as_secs_f64() * 1e6,
                best_us: figure.best.as_secs_f64() * 1e6,
                gbytes_per_s: figure.bytes_per_second() / 1e9,
                host_gbytes_per_s: figure.host_bytes as f64
                    / figure.median.as_secs_f64().max(1e-9)
                    / 1e9,
                tflops: figure.flops_per_second() / 1e12,
            })
            .collect(),
        verify_share_of_phase_b: verify_share(figures),
        copy_gbytes_per_s: ceilings.copy_bytes_per_second / 1e9,
        upload_gbytes_per_s: ceilings.upload_bytes_per_second / 1e9,
        download_gbytes_per_s: ceilings.download_bytes_per_second / 1e9,
        gemm_tflops: gemm.as_ref().ok().map(|rate| rate / 1e12),
        gemm_missing: gemm.err(),
    }
}

/// An output is about as large as an input.
fn verify_share(figures: &[Figure]) -> f64 {
    let median = |name| figures.iter().find(|figure| figure.name == name);
    match (median(measure::DIGESTS), median("phase_b")) {
        (Some(digests), Some(phase_b)) => {
            3.0 * digests.median.as_secs_f64() / phase_b.median.as_secs_f64().max(1e-9)
        }
        _ => 0.0,
    }
}

impl std::fmt::Display for KernelsReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{}, {}x{}, {} frames a chunk, {} passes",
            self.device, self.width, self.height, self.frames, self.steps
        )?;
        for kernel in &self.kernels {
            writeln!(
                f,
                "{:>22} {:>10.1} µs (best {:.1}), {:.0} GB/s of device memory, {:.1} GB/s to or \
                 from the host, {:.1} TFLOP/s",
                kernel.name,
                kernel.median_us,
                kernel.best_us,
                kernel.gbytes_per_s,
                kernel.host_gbytes_per_s,
                kernel.tflops
            )?;
        }
        writeln!(
            f,
            "this GPU: copies {:.0} GB/s (read and written), to it {:.1} GB/s, from it {:.1} GB/s",
            self.copy_gbytes_per_s, self.upload_gbytes_per_s, self.download_gbytes_per_s
        )?;
        writeln!(
            f,
            "--verify adds {:.1} % to a chunk of phase_b that is verified",
            100.0 * self.verify_share_of_phase_b
        )?;
        match (&self.gemm_tflops, &self.gemm_missing) {
            (Some(rate), _) => writeln!(f, "bf16 matrix products {rate:.0} TFLOP/s"),
            (None, Some(why)) => writeln!(f, "bf16 matrix products not measured: {why}"),
            (None, None) => Ok(()),
        }
    }
}
