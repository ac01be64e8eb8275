//! Collectives of a group of three ranks.

use std::process::Command;
use std::thread;

use pp_contract::{DType, Rank};
use pp_device::{Device, DeviceBuffer, DevicePtr, Stream};
use pp_testing::{Barrier, until};
use pp_transport::backend::Backend as _;
use pp_transport::flight::FlightRecorder;
use pp_transport::group::Members;
use pp_transport::nccl::{Communicator, Nccl, NcclBackend, UniqueId};

use crate::job::{Outcome, STUCK, end_when_stuck, record};
use crate::two_way::how;
use pp_fakes::Fakes;
use pp_fakes::check::{Expect, Fresh, Rule, check};
use pp_fakes::raw::TestKernels;

const RANKS: u32 = 3;
const ROUNDS: u64 = 20;
/// What each rank has of a payload, above the eager limit.
const PART: usize = 2048;
const BYTES: usize = 7 * PART;

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
    let all = Barrier::new(RANKS as usize);
    let together = |note: &str| {
        if all.wait() {
            loaded.note(note);
        }
        all.wait();
    };
    let ids = [(); 2].map(|()| UniqueId::new(&nccl).unwrap());
    thread::scope(|scope| {
        for rank in 0..RANKS {
            let (nccl, together) = (&nccl, &together);
            scope.spawn(move || {
                let device = Device::open(rank).unwrap();
                let ranks: Vec<Rank> = (0..RANKS).map(Rank::new).collect();
                let members = Members::new("mesh", &ranks, Rank::new(rank)).unwrap();
                let mut backend = NcclBackend::new(device.clone(), nccl.clone());
                let off = FlightRecorder::off();
                let joined = backend.connect_group((members, ids), how(STUCK, &|| true, &off));
                let mut mesh = joined.unwrap().group;
                let stream = Stream::new(&device).unwrap();
                device.bind().unwrap();
                let kernels = TestKernels::load();
                let memory = DeviceBuffer::new(&device, BYTES).unwrap();
                together("Mark name=run");
                for round in 0..ROUNDS {
                    one_round(&mut mesh, &stream, &kernels, &memory, round);
                }
                memory.used_by(&stream).unwrap();
                until(|| memory.is_idle().unwrap());
                together("Mark name=end");
            });
        }
    });
}

/// Gives out what the next root has, reduces it, and takes it back in parts.
fn one_round(
    mesh: &mut Communicator,
    stream: &Stream,
    kernels: &TestKernels,
    memory: &DeviceBuffer,
    round: u64,
) {
    let root = round as u32 % RANKS;
    let part = |at: usize, len: usize| DevicePtr {
        address: memory.address() + (at * PART) as u64,
        len,
    };
    let (all, parts) = (part(0, 3 * PART), [PART as u64; RANKS as usize]);
    let (own, back) = (part(3, PART), part(4, 3 * PART));
    kernels.fill(stream.raw(), memory.address(), BYTES, round);
    // SAFETY: parts of this rank's own memory that do not overlap, which only this stream uses.
    unsafe {
        mesh.scatter(all, &parts, own, root, stream).unwrap();
        if round.is_multiple_of(2) {
            mesh.all_reduce_sum(own, DType::I32, stream).unwrap();
        } else {
            mesh.broadcast(own, root, stream).unwrap();
        }
        mesh.gather(own, &parts, back, root, stream).unwrap();
    }
}

const EXPECT: Expect = Expect {
    warm_up: 6,
    complete: true,
    fresh: Fresh::Whole,
    // Those that note the use of memory, and of a group, by the stream of a rank.
    late_events: 2 * RANKS as usize,
};

#[test]
fn groups_of_three_ranks_are_in_order() {
    for seed in 1..4 {
        let outcome = run(seed, "");
        assert!(outcome.is_right, "{}", outcome.said);
        let report = check(&outcome.recordings, EXPECT);
        report.assert_clean();
        // To and from each member but the root, sent and received.
        assert_eq!(report.transfers as u64, u64::from(RANKS - 1) * 4 * ROUNDS);
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
