//! Generations that end in the middle of their work: slots, mappings and pages of numbers stay until the device has passed
//! all that uses them, and no longer.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pp_contract::{Composer, Lockstep};
use pp_device::{Device, DeviceBuffer};
use pp_testing::{Barrier, prepare, until, until_some};
use pp_transport::edge::{EdgeTx as _, Edges};

use crate::job::{Case, Computes, LARGEST as BYTES, hear, run, take_arrived};
use crate::runs::{BESIDE_HOST, CASE, P2P};
use crate::two_way::TwoWay;
use pp_fakes::check::{Expect, check};

/// More bytes than all that the ranks of a test leave to be freed.
const MUCH: usize = 256 << 20;

/// How a generation ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// A payload is written, and one is read.
    AtWork,
    /// The stages that write and read have panicked, so no event stands behind what they issued: it may never be freed.
    AtPanic,
}

/// Begins work that waits at the gate, and drops its slot and all edges. Both ranks have begun when one drops.
pub(crate) fn leave<B: Edges>(
    rank: u32,
    mut link: TwoWay<B>,
    stage: &impl Computes<B>,
    cut: Cut,
    both: &Barrier,
) {
    if rank == 0 {
        let mut composer = Composer::new();
        let mut leases = [(); 2].map(|()| until_some("a slot", || link.try_lease().unwrap()));
        stage.fill(&mut leases[0], BYTES, 0).unwrap();
        stage.hold(cut);
        let write = || stage.fill(&mut leases[1], BYTES, 1);
        let written = catch_unwind(AssertUnwindSafe(write));
        let [first, second] = leases;
        let (message, stamp) = prepare(&mut composer, 0, BYTES);
        let first = link.send(message, stamp, Some(first)).unwrap();
        let (message, stamp) = prepare(&mut composer, 1, BYTES);
        let second = link.out.send(message, stamp, Some(second));
        assert_eq!(written.is_ok(), second.is_ok());
        both.wait();
        drop((first, second, link));
    } else {
        let (mut lockstep, mut inbox) = (Lockstep::new(), Vec::new());
        let mut receiving = VecDeque::new();
        let payload = until_some("a payload", || {
            receiving.extend(hear(&mut link, &mut lockstep, &mut inbox).unwrap());
            take_arrived(&mut receiving).unwrap()?.1
        });
        let is_held = stage.hold(cut);
        let read = catch_unwind(AssertUnwindSafe(|| stage.check(&payload, 0)));
        // To a rank in host memory the second header does not come: it waits for the work at the gate.
        while is_held && read.is_ok() && receiving.is_empty() {
            receiving.extend(hear(&mut link, &mut lockstep, &mut inbox).unwrap());
        }
        both.wait();
        drop((payload, receiving, link));
    }
}

/// Waits until all is freed that the device had no use for: as much as was free `before`, where nothing may be lost.
pub(crate) fn wait_until_freed(device: &Device, before: u64, cut: Cut) {
    let free = || device.memory().unwrap().free;
    let has = |name| {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.contains(name)
    };
    if cut == Cut::AtWork {
        return until(|| free() >= before && !has("pp-numbers") && !has("pp-edges"));
    }
    // Behind all that was dropped before it.
    let last = DeviceBuffer::new(device, MUCH).unwrap();
    let without = free() + MUCH as u64;
    drop(last);
    // What is lost is memory of the device alone.
    until(|| free() >= without && !has("pp-edges"));
}

#[test]
fn what_the_device_uses_outlives_its_generation_whatever_moves_payloads() {
    let [to_host, from_host] = BESIDE_HOST;
    for (case, cut) in [CASE, P2P, to_host, from_host]
        .into_iter()
        .flat_map(|case| [(case, Cut::AtWork), (case, Cut::AtPanic)])
    {
        let case = Case {
            depth: 2,
            cut: Some(cut),
            ..case
        };
        let outcome = run(case, "");
        let expect = Expect {
            warm_up: usize::MAX,
            complete: false,
            ..Expect::default()
        };
        check(&outcome.recordings, expect).assert_clean();
        assert!(outcome.is_right, "{case:?}: {}", outcome.said);
        let lines = || outcome.recordings.iter().flat_map(|one| &one.lines);
        let count = |name| lines().filter(|line| line.name == name).count();
        if cut == Cut::AtWork {
            assert_eq!(count("cuMemMap"), count("cuMemUnmap"));
            assert_eq!(count("cuMemHostRegister"), count("cuMemHostUnregister"));
        }
    }
}
