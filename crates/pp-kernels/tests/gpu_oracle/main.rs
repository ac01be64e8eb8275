//! The CUDA kernels against the CPU backend and the f64 oracle.
//!
//!     PP_TEST_GPU=real gpu_oracle [--small] [NAME ...]
//!
//! With `PP_TEST_GPU=real` it runs on device 0, and a missing device is a failure. Without it, it runs the smallest sizes
//! on the fake driver, which computes what the kernels do from the formula: that checks the host's side of them. What
//! needs cublasLt is skipped then. `--small` runs every case at its smallest sizes on a real device too, for
//! compute-sanitizer. A NAME runs the cases whose name contains it. `PP_TEST_KERNELS=FILE.so` takes a plugin in place of
//! the built-in kernels.

mod cases;
mod device;
mod digests;
mod either;
mod work;

use std::process::ExitCode;
use std::time::Instant;

use device::Gpu;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let is_real = match std::env::var("PP_TEST_GPU").as_deref() {
        Ok("real") => true,
        Ok(other) => {
            println!("gpu_oracle: PP_TEST_GPU is {other:?}, must be \"real\" or not set");
            return ExitCode::FAILURE;
        }
        Err(_) => false,
    };
    let small = !is_real || arguments.iter().any(|argument| argument == "--small");
    // Whatever else begins with a dash is meant for the harness that this program does without.
    let names: Vec<_> = arguments.iter().filter(|a| !a.starts_with('-')).collect();
    let is_wanted = |name: &str| names.is_empty() || names.iter().any(|n| name.contains(*n));
    if !is_real {
        pp_fakes::Fakes::newest().load();
    }
    let gpu = Gpu::open();
    println!("gpu_oracle: on {}", gpu.name());

    let (mut run, mut failed, mut skipped) = (0, 0, 0);
    let groups = [
        (cases::ALL, true),
        (digests::ALL, true),
        (work::ALL, true),
        (work::WITH_CUBLASLT, is_real),
    ];
    for (group, runs) in groups {
        for (name, case) in group.iter().filter(|(name, _)| is_wanted(name)) {
            if !runs {
                skipped += 1;
                println!("skipped {name}");
                continue;
            }
            run += 1;
            let start = Instant::now();
            // A case that panics has said why, with its place.
            let outcome =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| case(&gpu, small)));
            let word = if outcome.is_ok() { "ok" } else { "FAILED" };
            failed += usize::from(outcome.is_err());
            println!("{word:7} {name} ({:.2} s)", start.elapsed().as_secs_f64());
        }
    }
    println!("gpu_oracle: {} of {run} cases passed", run - failed);
    if skipped > 0 {
        println!(
            "gpu_oracle: {skipped} cases skipped: they need a GPU, and PP_TEST_GPU=real to ask for it"
        );
    }
    if failed > 0 || (is_real && run == 0) {
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
