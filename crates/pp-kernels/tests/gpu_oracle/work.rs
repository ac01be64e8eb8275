//! Synthetic work and measurements: that they run, with their figures printed.

use pp_testing::assert_has;
use std::time::Duration;

use pp_kernels::synthetic::{Kind, Work};
use pp_kernels::{Chroma, KernelSet, measure};

use crate::cases::Case;
use crate::device::Gpu;

pub(crate) const ALL: &[(&str, Case)] = &[
    ("synthetic_work_runs", synthetic_work_runs),
    ("calls_are_measured", calls_are_measured),
    (
        "kernels_and_the_device_are_measured",
        kernels_and_the_device_are_measured,
    ),
];

/// They need cublasLt, which needs a GPU.
pub(crate) const WITH_CUBLASLT: &[(&str, Case)] = &[("matrix_products_run", matrix_products_run)];

fn work(gpu: &Gpu, kind: Kind) -> Work {
    let (context, stream) = gpu.handles();
    // SAFETY: both live as long as `gpu`, and the context is current.
    unsafe { Work::new(kind, context, stream) }.expect("the work can be made")
}

/// Calibrates, then launches a few times without a wait in between.
fn runs(gpu: &Gpu, kind: Kind) {
    let mut work = work(gpu, kind);
    let found = work
        .calibrate(Duration::from_millis(1))
        .expect("it can be calibrated");
    println!("        {kind:?}: {found:?}");
    assert!(found.repetitions >= 1 && found.achieved > Duration::ZERO);
    for _ in 0..3 {
        work.launch().expect("it can be launched");
    }
    gpu.stream.synchronize().expect("the stream is sound");
}

fn synthetic_work_runs(gpu: &Gpu, _: bool) {
    for kind in [Kind::Spin { blocks: 8 }, Kind::Hbm { bytes: 1 << 20 }] {
        runs(gpu, kind);
    }
    let (context, stream) = gpu.handles();
    for kind in [
        Kind::Spin { blocks: 0 },
        Kind::Gemm { size: 100 },
        Kind::Hbm { bytes: 17 },
    ] {
        // SAFETY: as in `work`.
        let refused = unsafe { Work::new(kind, context, stream) };
        let reason = refused.expect_err("out of range").to_string();
        assert!(reason.contains("must"), "{reason}");
    }
    // SAFETY: the context is not looked at: it is compared with the current one.
    let refused = unsafe { Work::new(Kind::spin(), context + 1, stream) };
    let reason = refused.expect_err("another context is current").to_string();
    assert_has(&reason, &["must be current on the calling thread"]);
}

fn matrix_products_run(gpu: &Gpu, small: bool) {
    runs(
        gpu,
        Kind::Gemm {
            size: if small { 256 } else { 2048 },
        },
    );
}

fn case(small: bool, steps: u32) -> measure::Case {
    let (width, height, runs) = if small { (48, 32, 2) } else { (1280, 720, 9) };
    measure::Case {
        width,
        height,
        chroma: Chroma::C420,
        frames: if small { 3 } else { 8 },
        steps,
        runs,
    }
}

fn show(figures: &[measure::Figure]) {
    for figure in figures {
        println!(
            "        {}: {:?}, {:.0} GB/s, {:.2} TFLOP/s",
            figure.name,
            figure.median,
            figure.bytes_per_second() / 1e9,
            figure.flops_per_second() / 1e12
        );
        assert!(
            figure.best <= figure.median && figure.bytes > 0,
            "{figure:?}"
        );
    }
}

fn calls_are_measured(gpu: &Gpu, small: bool) {
    let (context, stream) = gpu.handles();
    let (set, case) = (KernelSet::for_device(), case(small, 0));
    // SAFETY: as in `work`.
    let figures = unsafe { measure::kernels(&set, &case, context, stream) }.expect("figures");
    show(&figures);
    let names: Vec<_> = figures.iter().map(|figure| figure.name).collect();
    let expected = [
        "encode",
        "phase_b",
        "decode",
        "encode with context",
        "phase_b with recompute",
    ];
    assert_eq!(names, expected);
}

fn kernels_and_the_device_are_measured(gpu: &Gpu, small: bool) {
    let (context, stream) = gpu.handles();
    let (set, case) = (KernelSet::for_device(), case(small, 2));
    // SAFETY: as in `work`.
    unsafe {
        show(&measure::kernels(&set, &case, context, stream).expect("figures"));
        show(&measure::single_kernels(&case, context, stream).expect("figures"));
    }
    if !small {
        // SAFETY: as above.
        let ceilings = unsafe { measure::ceilings(context, stream, 5) }.expect("ceilings");
        println!("        {ceilings:?}");
    }
}
