//! A device that fails or hangs, on a driver that is not real.

use std::fs;
use std::time::{Duration, Instant};

use pp_fakes::ok;
use pp_fakes::raw::Handle;
use pp_kernels::{Chroma, KernelSet, measure};

use crate::common::{compile_c_file, root, rust_plugin};
use crate::recorded;

fn new_stream() -> Handle {
    let mut stream = std::ptr::null_mut();
    ok!(stream_create(&mut stream, 1, 0));
    stream
}

/// The median plugin whose encode fails, in one way or another.
fn failing(variant: &[&str]) -> KernelSet {
    let source = root().join("crates/pp-kernels/tests/plugins/stuck.c");
    KernelSet::load(&compile_c_file(&source, variant)).unwrap()
}

/// Measures kernels; gives the failure.
fn measure(set: &KernelSet, context: Handle, stream: Handle) -> String {
    let case = measure::Case {
        width: 48,
        height: 32,
        chroma: Chroma::Mono,
        frames: 1,
        steps: 0,
        runs: 1,
    };
    // SAFETY: context and stream live as long as the process, and the context is current.
    let outcome = unsafe { measure::kernels(set, &case, context as u64, stream as u64) };
    outcome.unwrap_err().to_string()
}

#[test]
fn codes_that_nobody_knows_are_errors_and_streams_that_hang_are_not_waited_for() {
    if !pp_testing::alone!() {
        return;
    }
    let (loaded, records) = recorded("bad-device-records");
    let mut context = std::ptr::null_mut();
    ok!(init(0));
    ok!(retain(&mut context, 0));
    ok!(set_current(context));

    // A result code of a driver that is newer than all that this was built with.
    let stream = new_stream();
    let ptx = KernelSet::for_device();
    let cust = KernelSet::load(&rust_plugin("pp-plugin-cust")).unwrap();
    for (set, code, expected) in [
        (ptx, 4242, "with an unknown error (4242)"),
        (cust, 4243, ": code 4243"),
    ] {
        loaded.set("FAULTS", &format!("cuLaunchKernel:1:{code}"));
        let error = measure(&set, context, stream);
        assert!(error.contains("cuLaunchKernel failed"), "{error}");
        assert!(error.contains(expected), "{error}");
    }

    let error = measure(&failing(&[]), context, stream);
    assert!(error.contains("no encode today"), "{error}");
    let file = records.file(&format!("{}.rec", std::process::id()));
    let recording = || fs::read_to_string(&file).unwrap();
    // A thread of its own frees.
    let deadline = Instant::now() + Duration::from_secs(20);
    let count = |call: &str| recording().matches(call).count();
    while count(" cuMemFreeHost ") < count(" cuMemHostAlloc ") {
        assert!(Instant::now() < deadline, "{}", recording());
        std::thread::sleep(Duration::from_millis(1));
    }
    loaded.note("Mark name=stuck");
    let error = measure(&failing(&["STUCK"]), context, stream);
    assert!(error.contains("no encode today"), "{error}");
    // Behind what the call gave up to that thread.
    std::thread::sleep(Duration::from_millis(200));

    let recording = recording();
    let (sound, stuck) = recording.split_once("Mark name=stuck").unwrap();
    assert!(sound.contains(" cuMemHostAlloc "), "{sound}");
    assert!(stuck.contains(" cuMemHostAlloc "), "{stuck}");
    // The real one would wait for the stream, for ever.
    assert!(!stuck.contains(" cuMemFreeHost "), "{stuck}");
}
