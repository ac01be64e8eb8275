//! Groups of operations of three ranks: collectives, and transfers that begin together.

use std::process::Command;
use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use pp_contract::{DType, Rank};
use pp_device::{Device, DeviceBuffer, Stream};
use pp_transport::in_flight::Completion;
use pp_transport::nccl::{CommOptions, Communicator, GroupBuffer, Issuer, Nccl, Reduce, UniqueId};

use crate::job::{Outcome, STUCK, end_when_stuck, record};
use pp_fakes::Fakes;
use pp_fakes::check::{Expect, Fresh, Rule, check};
use pp_fakes::raw::TestKernels;

const RANKS: u32 = 3;
const ROUNDS: u64 = 20;
const BYTES: usize = 4096;

fn run(seed: u32, faults: &str) -> Outcome {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "mesh::child", "--ignored", "--nocapture"])
        .env("PP_FAKE_DEVICES", RANKS.to_string())
        .env("PP_FAKE_SEED", seed.to_string())
        .env("PP_FAKE_NCCL_EAGER", "1000")
        .env("PP_FAKE_FAULTS", faults);
    record(&mut command)
}

/// The process of a mesh; not a test by itself.
#[test]
#[ignore = "the process that the other tests start"]
fn child() {
    let faults = std::env::var("PP_FAKE_FAULTS").expect("started by the other tests");
    end_when_stuck(!faults.is_empty());
    let loaded = Fakes::newest().load();
    let nccl = Nccl::load().unwrap();
    let id = UniqueId::new(&nccl).unwrap();
    let all = Barrier::new(RANKS as usize);
    let together = |note: &str| {
        if all.wait().is_leader() {
            loaded.note(note);
        }
        all.wait();
    };
    thread::scope(|scope| {
        for rank in 0..RANKS {
            let (nccl, together) = (&nccl, &together);
            scope.spawn(move || {
                let device = Device::open(rank).unwrap();
                let mut mesh = Communicator::connect(CommOptions {
                    issuer: Issuer::open(nccl, &device).unwrap(),
                    name: "mesh",
                    members: (0..RANKS).map(Rank::new).collect(),
                    me: Rank::new(rank),
                    id,
                    gathers: None,
                    deadline: Instant::now() + STUCK,
                    blocking: true,
                })
                .unwrap();
                let stream = Stream::new(&device).unwrap();
                device.bind().unwrap();
                let kernels = TestKernels::load();
                let memory = || DeviceBuffer::new(&device, BYTES).unwrap();
                let mut buffers = vec![memory(), memory(), memory()];
                together("Mark name=run");
                for round in 0..ROUNDS {
                    buffers = one_round(&mut mesh, &stream, &kernels, buffers, rank, round);
                }
                together("Mark name=end");
            });
        }
    });
}

/// Hands a payload around the ring of ranks, reduces another, and gives out the next root's.
fn one_round(
    mesh: &mut Communicator,
    stream: &Stream,
    kernels: &TestKernels,
    buffers: Vec<DeviceBuffer>,
    rank: u32,
    round: u64,
) -> Vec<DeviceBuffer> {
    for buffer in &buffers {
        kernels.fill(stream.raw(), buffer.address(), BYTES, round);
        buffer.used_by(stream).unwrap();
    }
    let mut buffers = buffers
        .into_iter()
        .map(|b| GroupBuffer::new(b, DType::U8, BYTES).unwrap());
    let mut next = || buffers.next().expect("three");
    let mut flights = Vec::new();
    let mut group = mesh.group();
    group.send(next(), Rank::new((rank + 1) % RANKS)).unwrap();
    group
        .recv(next(), Rank::new((rank + RANKS - 1) % RANKS))
        .unwrap();
    flights.extend(group.commit(stream).unwrap());
    let mut group = mesh.group();
    let third = next();
    if round.is_multiple_of(2) {
        group.all_reduce(third, Reduce::Max).unwrap();
    } else {
        group
            .broadcast(third, Rank::new(round as u32 % RANKS))
            .unwrap();
    }
    flights.extend(group.commit(stream).unwrap());
    flights
        .into_iter()
        .map(|mut flight| {
            loop {
                match flight.complete().unwrap() {
                    Completion::Done(buffer) => break buffer.into_memory(),
                    Completion::Pending(again) => flight = again,
                }
                thread::yield_now();
            }
        })
        .collect()
}

const EXPECT: Expect = Expect {
    warm_up: 6,
    complete: true,
    fresh: Fresh::Whole,
    late_events: 0,
};

#[test]
fn groups_of_three_ranks_are_in_order() {
    for seed in 1..4 {
        let outcome = run(seed, "");
        assert!(outcome.is_right, "{}", outcome.said);
        let report = check(&outcome.recordings, EXPECT);
        report.assert_clean();
        assert_eq!(report.transfers as u64, u64::from(RANKS) * 2 * ROUNDS);
    }
}

#[test]
fn a_spoiled_group_is_seen() {
    for (fault, rule) in [
        ("ncclSend:31:free", Rule::Lifetime),
        ("ncclSend:31:half", Rule::Agreement),
        ("ncclAllReduce:8:skip", Rule::Agreement),
        ("ncclBroadcast:8:skip", Rule::Agreement),
    ] {
        let report = check(&run(1, fault).recordings, EXPECT);
        assert!(report.broke(rule), "{fault}: {:?}", report.violations);
    }
}
