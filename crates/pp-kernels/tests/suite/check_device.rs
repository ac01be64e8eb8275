//! The checks of `pp plugin check` in the memory of a device, on a driver that is not real.

use std::fs;

use pp_fakes::ok;
use pp_fakes::raw::device;
use pp_kernels::KernelSet;
use pp_kernels::check::Subject;
use pp_testing::{rows, until_some};

use crate::common::{compile_c_file, failed_checks, root, rust_plugin};
use crate::recorded;

#[test]
fn sound_kernels_pass_on_a_device_each_fault_is_named_and_all_memory_is_freed() {
    if !pp_testing::alone!() {
        return;
    }
    let (_, records) = recorded("check-device-records");

    let (context, stream) = device(0);
    let failed = |set: &KernelSet| {
        // SAFETY: the context is current on this thread, and lives as long as the process, with its stream.
        let subject = unsafe { Subject::on_device(set, context as u64, stream as u64) };
        failed_checks(&subject.expect("the context is current"))
    };
    let source = root().join("crates/pp-kernels/tests/plugins/device.c");
    let variant = |fault| KernelSet::load(&compile_c_file(&source, &[fault])).unwrap();

    assert_eq!(failed(&KernelSet::for_device()), []);
    let cust = KernelSet::load(&rust_plugin("pp-plugin-cust")).unwrap();
    assert_eq!(failed(&cust), []);
    for sound in ["NO_FAULT", "NO_FAULT_ALIKE"] {
        let both = variant(sound);
        assert_eq!(failed(&both), []);
        assert_eq!(failed_checks(&Subject::on_host(&both)), []);
    }
    for [fault, reason] in rows("
        FAULT_FRONT | phase_b wrote in front of tensor latents_out (bytes changed: 1)
        FAULT_BEHIND | phase_b wrote behind tensor latents_out (bytes changed: 1)
        FAULT_GAP | encode wrote behind tensor conditioning_embeds (bytes changed: 1)
        FAULT_WRITES_INPUT | phase_b wrote into tensor latents_in, which it may only read (bytes changed: 1)
        FAULT_WRITES_FRAMES | encode wrote into plane 0 of frame 0, which it may only read (bytes changed: 1)
        FAULT_OTHER_BYTES | GPU memory, at 40x24 Mono, gives another result: byte 0 of tensor latents_out of phase_b in chunk 0
        FAULT_OUTSIDE | decode wrote in front of plane 0 of frame 0 (bytes changed: 1)
    ") {
        let failed = failed(&variant(fault));
        assert!(
            failed.iter().any(|(_, why)| why == reason),
            "{fault}: {failed:?}"
        );
    }

    ok!(stream_synchronize(stream));
    let recording = records.file(&format!("{}.rec", std::process::id()));
    let read = || fs::read_to_string(&recording).unwrap();
    let count_in = |text: &str, call: &str| text.matches(&format!(" {call} ")).count();
    // A thread of its own frees.
    let recording = until_some("the last page-locked memory is freed", || {
        let text = read();
        let [taken, freed] = ["cuMemHostAlloc", "cuMemFreeHost"].map(|call| count_in(&text, call));
        (taken == freed).then_some(text)
    });
    let count = |call: &str| count_in(&recording, call);
    assert!(count("cuMemAllocAsync") > 100 && count("cuMemHostAlloc") > 100);
    assert_eq!(count("cuMemAllocAsync"), count("cuMemFreeAsync"));
    assert_eq!(count("Fault"), 0);
}
