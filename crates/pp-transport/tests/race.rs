//! The race that the types forbid, shown on real GPUs: a buffer written again while NCCL, or the copy engine, still
//! reads it.
//!
//! By hand the pattern of many projects (send, reuse, the transfer late) corrupts what arrives. Through our edges it does
//! not compile (see `compile_fail/`); its nearest form, which takes a lease again as soon as the edge gives one, never
//! does. Runs with `PP_TEST_GPU=real`, over NCCL on two GPUs and by copy engine on one, and prints a JSON object for each.

mod control_support;
mod edges_support;
mod two_way;

use std::time::{Duration, Instant};

use nccl_sys::{Nccl as RawNccl, ncclComm_t, ncclConfig_t, ncclDataType_t, ncclUniqueId};
use pp_contract::{Composer, Lockstep};
use pp_device::{Device, DeviceBuffer, Event, PinnedBuffer, Stream};
use pp_testing::{Barrier, edge, prepare, wait_for};
use pp_transport::backend::Backend;
use pp_transport::edge::Edges;
use pp_transport::gpu::{DeviceRx, DeviceTx, Receiving};
use pp_transport::gpu_backend::{GpuBackend, GpuTransport};
use pp_transport::launch::Via;
use pp_transport::nccl::{Nccl, NcclBackend};

use crate::edges_support::{Meeting, Peer};
use crate::two_way::{TwoWay, by_backend, edge_ends};

/// As many bytes as the activations of the peer program, 64 MiB.
const BYTES: usize = 2048 * 16384 * 2;
/// Raw runs; each is late by [`LATE`].
const RAW_RUNS: u32 = 5;
/// Copies by hand that are under way before the one that counts.
const COPIES_BEFORE: usize = 50;
const SAFE_RUNS: u64 = 1000;
const LATE: Duration = Duration::from_millis(300);
/// Bytes looked at of each payload: its ends and its middle.
const SAMPLE: usize = 1 << 20;
const HANG: Duration = Duration::from_secs(120);

fn wants_real_gpus() -> bool {
    std::env::var("PP_TEST_GPU").is_ok_and(|value| value == "real")
}

#[test]
fn reuse_before_completion_corrupts_through_raw_nccl_and_never_through_ours() {
    if !wants_real_gpus() {
        println!("skipped: PP_TEST_GPU is not 'real'");
        return;
    }
    let over_nccl = |device| NcclBackend::new(device, Nccl::load().unwrap());
    judge("race", raw_corrupted(), safe_corrupted([0, 1], over_nccl));
}

#[test]
fn reuse_before_completion_corrupts_by_copy_engine_and_never_through_ours() {
    if !wants_real_gpus() {
        println!("skipped: PP_TEST_GPU is not 'real'");
        return;
    }
    let by_copy_engine =
        |device| GpuBackend::new(NcclBackend::alone(device), GpuTransport::P2p, |_| {});
    let safe = safe_corrupted([0, 0], by_copy_engine);
    judge("race_copy_engine", copies_corrupted(), safe);
}

#[track_caller]
fn judge(what: &str, raw: u32, (safe, seconds): (u64, f64)) {
    println!(
        "{{\"what\":\"{what}\",\"bytes\":{BYTES},\"raw_runs\":{RAW_RUNS},\"raw_corrupted\":{raw},\
         \"safe_runs\":{SAFE_RUNS},\"safe_corrupted\":{safe},\"safe_seconds\":{seconds:.1}}}"
    );
    assert!(
        raw > 0,
        "the raw pattern did not corrupt: the experiment shows nothing"
    );
    assert_eq!(safe, 0);
}

/// Runs in which a copy by hand gave something else than was to be copied: others are under way before it, and its source
/// is written again at once.
fn copies_corrupted() -> u32 {
    let device = Device::open(0).unwrap();
    device.bind().unwrap();
    let [copies, compute] = [(); 2].map(|()| Stream::new(&device).unwrap());
    let [x, y, other] = [(); 3].map(|()| DeviceBuffer::new(&device, BYTES).unwrap());
    let mut corrupted = 0;
    for _ in 0..RAW_RUNS {
        // SAFETY: the buffers outlive all that is issued here, which is waited for. That one is written while it is
        // copied is the race that this shows: device memory, whose content is only counted.
        unsafe {
            compute.fill(x.ptr(), 1).unwrap();
            wait(&compute);
            for _ in 0..COPIES_BEFORE {
                copies.copy(other.ptr(), y.ptr()).unwrap();
            }
            copies.copy(x.ptr(), y.ptr()).unwrap();
            compute.fill(x.ptr(), 2).unwrap();
        }
        wait(&compute);
        wait(&copies);
        corrupted += u32::from(differs(&device, &copies, y.address(), 1));
    }
    corrupted
}

fn wait(stream: &Stream) {
    let deadline = Instant::now() + HANG;
    while !stream.is_idle().unwrap() {
        assert!(
            Instant::now() < deadline,
            "the stream never came to its end"
        );
        std::hint::spin_loop();
    }
}

/// Says whether any looked-at byte of the device's memory differs from `value`.
fn differs(device: &Device, stream: &Stream, address: u64, value: u8) -> bool {
    let mut seen = PinnedBuffer::new(device, SAMPLE).unwrap();
    [0, BYTES / 2, BYTES - SAMPLE].into_iter().any(|at| {
        let from = pp_device::DevicePtr {
            address: address + at as u64,
            len: SAMPLE,
        };
        // SAFETY: the range lies in a buffer of BYTES bytes that no work writes any more, and both
        // outlive the copy, which is waited for.
        unsafe { stream.download(from, &mut seen, 0) }.unwrap();
        wait(stream);
        seen.bytes().iter().any(|byte| *byte != value)
    })
}

/// Runs in which the receiver got something else than was sent.
fn raw_corrupted() -> u32 {
    let nccl = RawNccl::load().unwrap();
    let id = nccl.unique_id().unwrap();
    let barrier = Barrier::new(2);
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| raw_sender(&nccl, id, &barrier));
        let corrupted = raw_receiver(&nccl, id, &barrier);
        sender.join().unwrap();
        corrupted
    })
}

fn raw_connect(nccl: &RawNccl, id: ncclUniqueId, rank: i32) -> ncclComm_t {
    let mut comm = std::ptr::null_mut();
    let mut config = ncclConfig_t {
        blocking: 1,
        ..ncclConfig_t::INITIALIZER
    };
    // SAFETY: `comm` and `config` are valid for the call; the context is bound to this thread.
    let result = unsafe {
        (nccl.functions().ncclCommInitRankConfig)(&raw mut comm, 2, id, rank, &raw mut config)
    };
    nccl.check("ncclCommInitRankConfig", result).unwrap();
    comm
}

fn raw_sender(nccl: &RawNccl, id: ncclUniqueId, barrier: &Barrier) {
    let device = Device::open(0).unwrap();
    device.bind().unwrap();
    let comm = raw_connect(nccl, id, 0);
    let (comms, compute) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    let x = DeviceBuffer::new(&device, BYTES).unwrap();
    for _ in 0..RAW_RUNS {
        // SAFETY: the buffer outlives the fill, which is waited for.
        unsafe { compute.fill(x.ptr(), 1) }.unwrap();
        wait(&compute);
        barrier.wait();
        // SAFETY: the buffer outlives the send, which is waited for below. That it is written
        // meanwhile is the race that this shows: device memory, whose content is only counted.
        let result = unsafe {
            (nccl.functions().ncclSend)(
                x.address() as *const _,
                BYTES,
                ncclDataType_t::ncclUint8,
                1,
                comm,
                comms.raw() as *mut _,
            )
        };
        nccl.check("ncclSend", result).unwrap();
        // SAFETY: as above.
        unsafe { compute.fill(x.ptr(), 2) }.unwrap();
        wait(&compute);
        wait(&comms);
        barrier.wait();
    }
}

fn raw_receiver(nccl: &RawNccl, id: ncclUniqueId, barrier: &Barrier) -> u32 {
    let device = Device::open(1).unwrap();
    device.bind().unwrap();
    let comm = raw_connect(nccl, id, 1);
    let comms = Stream::new(&device).unwrap();
    let y = DeviceBuffer::new(&device, BYTES).unwrap();
    let mut corrupted = 0;
    for _ in 0..RAW_RUNS {
        barrier.wait();
        std::thread::sleep(LATE);
        // SAFETY: the buffer outlives the receive, which is waited for.
        let result = unsafe {
            (nccl.functions().ncclRecv)(
                y.address() as *mut _,
                BYTES,
                ncclDataType_t::ncclUint8,
                0,
                comm,
                comms.raw() as *mut _,
            )
        };
        nccl.check("ncclRecv", result).unwrap();
        wait(&comms);
        corrupted += u32::from(differs(&device, &comms, y.address(), 1));
        barrier.wait();
    }
    corrupted
}

/// Runs in which the receiver got something else than was sent, and how long all took.
fn safe_corrupted<B>(ordinals: [u32; 2], backend: impl Fn(Device) -> B + Sync) -> (u64, f64)
where
    B: Backend<Tx = DeviceTx, Rx = DeviceRx, Receiving = Receiving>,
{
    let [low, high] = Meeting::of_two(Via::Unix);
    let connect = |rank: usize, mut peer: Peer| {
        let device = Device::open(ordinals[rank]).unwrap();
        device.bind().unwrap();
        let ends = edge_ends(edge(1, BYTES as u64), edge(1, 64), rank == 0);
        (
            by_backend(&mut backend(device.clone()), &mut peer, ends),
            device,
        )
    };
    let start = Instant::now();
    let corrupted = std::thread::scope(|scope| {
        scope.spawn(|| {
            let (link, device) = connect(0, low);
            safe_sender(link, &device);
        });
        let (link, device) = connect(1, high);
        safe_receiver(link, &device)
    });
    (corrupted, start.elapsed().as_secs_f64())
}

/// Writes the one slot again as soon as the edge gives it back.
fn safe_sender<B: Edges<Tx = DeviceTx>>(mut link: TwoWay<B>, device: &Device) {
    let stream = Stream::new(device).unwrap();
    let mut composer = Composer::new();
    let deadline = Instant::now() + HANG;
    for run in 0..SAFE_RUNS {
        let mut lease = loop {
            if let Some(lease) = link.try_lease().unwrap() {
                break lease;
            }
            assert!(Instant::now() < deadline, "no credit came");
        };
        lease
            .write_on(&stream, |to| {
                let to = pp_device::DevicePtr { len: BYTES, ..to };
                // SAFETY: the slot is leased, and in flight afterwards, until the stream passed.
                unsafe { stream.fill(to, run as u8) }
                    .map_err(pp_transport::error::TransportError::from)
            })
            .unwrap();
        let (message, stamp) = prepare(&mut composer, run, BYTES);
        // Dropped in flight: the slot is given out again only once it is done.
        drop(link.send(message, stamp, Some(lease)).unwrap());
    }
    while link.try_lease().unwrap().is_none() {
        assert!(Instant::now() < deadline, "the last slot never came back");
    }
}

fn safe_receiver<B>(mut link: TwoWay<B>, device: &Device) -> u64
where
    B: Edges<Tx = DeviceTx, Rx = DeviceRx, Receiving = Receiving>,
{
    let stream = Stream::new(device).unwrap();
    let (mut lockstep, mut inbox) = (Lockstep::new(), Vec::new());
    let deadline = Instant::now() + HANG;
    let mut corrupted = 0;
    for run in 0..SAFE_RUNS {
        while !link.poll_frame(&mut inbox).unwrap() {
            assert!(Instant::now() < deadline, "no frame came");
        }
        let matched = lockstep.admit(&inbox).unwrap();
        // Late, so that the sender could overtake; very late now and then.
        let late = if run % 100 == 0 {
            LATE / 10
        } else {
            LATE / 1000
        };
        std::thread::sleep(late);
        let arrived: DeviceRx = wait_for(link.receive(&matched).unwrap());
        let seen = arrived.read_on(&stream, |from| {
            Ok::<_, pp_transport::error::TransportError>(differs(
                device,
                &stream,
                from.address,
                run as u8,
            ))
        });
        corrupted += u64::from(seen.unwrap());
        drop(arrived);
        let done = Event::new(device).unwrap();
        done.record(&stream).unwrap();
        while !done.is_done().unwrap() {}
        // Gives the slot back.
        let _ = link.try_lease();
    }
    corrupted
}
