//! Edges within a rank: a chain of three stages on one device, each on a stream of its own.

use std::process::Command;

use pp_device::{Device, DeviceBuffer, Event, PinnedBuffer, Stream};
use pp_testing::{edge, until, until_some};
use pp_transport::edge::EdgeLocal as _;
use pp_transport::error::TransportError;
use pp_transport::gpu::{DeviceLocal, DeviceTx};

use crate::job::{Outcome, end_when_stuck, record};
use pp_fakes::Fakes;
use pp_fakes::check::{Expect, Recording, Report, Rule, check};
use pp_fakes::raw::TestKernels;

const CHUNKS: u64 = 200;
const BYTES: usize = 4096;

fn run(depth: u32, seed: u32, faults: &str) -> Outcome {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "local::child", "--ignored", "--nocapture"])
        .env("PP_ORDER_CASE", depth.to_string())
        .env("PP_FAKE_SEED", seed.to_string())
        .env("PP_FAKE_FAULTS", faults);
    record(&mut command)
}

/// The process of a chain; not a test by itself.
#[test]
#[ignore = "the process that the other tests start"]
fn child() {
    let depth = std::env::var("PP_ORDER_CASE").expect("started by the other tests");
    let depth = depth.parse().unwrap();
    let faults = std::env::var("PP_FAKE_FAULTS").unwrap_or_default();
    end_when_stuck(!faults.is_empty());
    let loaded = Fakes::newest().load();
    let device = Device::open(0).unwrap();
    device.bind().unwrap();
    let kernels = TestKernels::load();
    let [first, second, third] = [(); 3].map(|()| Stream::new(&device).unwrap());
    let edge = || DeviceLocal::new(&device, edge(depth, BYTES as u64)).unwrap();
    let (mut one, mut two) = (edge(), edge());
    let wrong = DeviceBuffer::new(&device, 8).unwrap();
    let mut count = PinnedBuffer::new(&device, 8).unwrap();
    let done = Event::new(&device).unwrap();
    // SAFETY: the buffer lives as long as this process works on it, and its stream passes this first.
    unsafe { third.fill(wrong.ptr(), 0) }.unwrap();
    loaded.note("Mark name=run");
    for n in 0..CHUNKS {
        let mut input = lease(&mut one);
        let written = input.write_on(&first, |to| {
            kernels.fill(first.raw(), to.address, BYTES, n);
            Ok::<_, TransportError>(())
        });
        written.unwrap();
        let (sending, input) = one.hand_on(input, BYTES as u64).unwrap();
        drop(sending);
        let mut output = lease(&mut two);
        let copied = input.read_on(&second, |from| {
            output.write_on(&second, |to| {
                kernels.copy(second.raw(), to.address, from.address, BYTES);
                Ok::<_, TransportError>(())
            })
        });
        copied.unwrap();
        drop(input);
        let (sending, output) = two.hand_on(output, BYTES as u64).unwrap();
        let checked = output.read_on(&third, |from| {
            let wrong = wrong.address();
            kernels.check(third.raw(), from.address, BYTES, n, wrong);
            Ok::<_, TransportError>(())
        });
        checked.unwrap();
        // In both orders.
        if n % 2 == 0 {
            drop((sending, output));
        } else {
            drop((output, sending));
        }
    }
    loaded.note("Mark name=end");
    // SAFETY: both buffers live until the event is done.
    unsafe { third.download(wrong.ptr(), &mut count, 0) }.unwrap();
    done.record(&third).unwrap();
    until(|| done.is_done().unwrap());
    let wrong = u64::from_le_bytes(count.bytes().try_into().unwrap());
    assert_eq!(wrong, 0, "bytes are wrong");
}

fn lease(edge: &mut DeviceLocal) -> DeviceTx {
    until_some("a slot", || edge.try_lease().unwrap())
}

fn judge(outcome: &Outcome, complete: bool) -> Report {
    let expect = Expect {
        complete,
        ..Expect::default()
    };
    check(&outcome.recordings, expect)
}

/// Each chunk is ordered on the device alone: no thread waits for it, and nothing is made for it.
#[test]
fn a_chain_on_one_device_is_in_order() {
    for (depth, seed) in [(1, 1), (2, 2), (4, 3)] {
        let outcome = run(depth, seed, "");
        assert!(outcome.is_right, "{}", outcome.said);
        let report = judge(&outcome, true);
        report.assert_clean();
        assert!(report.accesses as u64 >= CHUNKS * 4, "{}", report.accesses);
        let lines_of = |r: &Recording| r.lines[r.runs().remove(0)].to_vec();
        let lines = outcome.recordings.iter().flat_map(lines_of);
        let mut waits = 0;
        for line in lines {
            for never in ["Synchronize", "Alloc", "Free", "Create", "Destroy", "nccl"] {
                assert!(!line.name.contains(never), "{}", line.name);
            }
            waits += u64::from(line.name == "cuStreamWaitEvent" && !line.is_end());
        }
        assert!(waits >= CHUNKS * 2, "{waits}");
    }
}

/// Every second wait does no harm: a writer waits for a reader that the host has seen done, too.
#[test]
fn a_dropped_wait_within_a_rank_is_seen() {
    let calls = 40..48;
    let is_seen = |k: &u32| {
        let fault = format!("cuStreamWaitEvent:{k}:skip");
        let outcome = run(2, 1, &fault);
        let report = judge(&outcome, false);
        let found = !report.violations.is_empty();
        assert!(
            found || outcome.is_right,
            "{fault}: harm was done and not seen: {}",
            outcome.said
        );
        report.broke(Rule::Race)
    };
    let seen = calls.clone().filter(is_seen).count();
    assert!(seen * 3 >= calls.len(), "{seen}");
}
