//! The CUDA kernels against the CPU backend and the f64 oracle, on a real GPU.
//!
//!     PP_TEST_GPU=real gpu_oracle [--small] [NAME ...]
//!
//! Without `PP_TEST_GPU=real` it says that it is skipped and succeeds; with it, a missing device is a failure. `--small`
//! runs every case at its smallest sizes, for compute-sanitizer. A NAME runs the cases whose name contains it.
//! `PP_TEST_KERNELS=FILE.so` takes a plugin in place of the built-in kernels.

#![allow(unreachable_pub)]

mod cases;
mod device;

use std::process::ExitCode;
use std::time::Instant;

use device::Gpu;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if std::env::var("PP_TEST_GPU").as_deref() != Ok("real") {
        println!("gpu_oracle: skipped, because PP_TEST_GPU is not \"real\"");
        return ExitCode::SUCCESS;
    }
    let small = arguments.iter().any(|argument| argument == "--small");
    // Whatever else begins with a dash is meant for the harness that this program does without.
    let names: Vec<_> = arguments.iter().filter(|a| !a.starts_with('-')).collect();
    let gpu = Gpu::open();
    println!("gpu_oracle: on {}", gpu.name());
    let (mut run, mut failed) = (0, 0);
    for (name, case) in cases::ALL {
        if !names.is_empty() && !names.iter().any(|wanted| name.contains(wanted.as_str())) {
            continue;
        }
        run += 1;
        let start = Instant::now();
        // A case that panics has said why, with its place.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(&gpu, small)));
        let word = if outcome.is_ok() { "ok" } else { "FAILED" };
        failed += usize::from(outcome.is_err());
        println!("{word:6} {name} ({:.2} s)", start.elapsed().as_secs_f64());
    }
    println!("gpu_oracle: {} of {run} cases passed", run - failed);
    if failed > 0 || run == 0 {
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
