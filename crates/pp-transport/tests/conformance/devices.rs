//! Two devices and the issuers of each, for the tests of this process: the fake driver's, or with
//! `PP_TEST_GPU=real` those of the machine.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pp_device::{Device, DeviceBuffer, DevicePtr, Event, PinnedBuffer, Stream};
use pp_testing::{HANG, until};
use pp_transport::error::TransportError;
use pp_transport::flight::FlightRecorder;
use pp_transport::gpu::{DeviceRx, DeviceTx};
use pp_transport::gpu_backend::{GpuBackend, GpuTransport};
use pp_transport::nccl::{Issuer, Nccl, NcclBackend};

use crate::two_way::how;
use pp_fakes::{Fakes, Loaded};

/// Says whether the tests run on real devices. Nothing is skipped then: what is missing fails.
pub(crate) fn is_real() -> bool {
    std::env::var("PP_TEST_GPU").is_ok_and(|value| value == "real")
}

/// The fakes, where they are used.
pub(crate) fn fakes() -> Option<&'static Loaded> {
    (!is_real()).then(|| Fakes::newest().load())
}

/// The fakes; a test that needs them ends here on real devices.
macro_rules! the_fakes {
    () => {
        match $crate::devices::fakes() {
            Some(fakes) => fakes,
            None => return,
        }
    };
}
pub(crate) use the_fakes;

/// Where calls and kernels of the fakes wait: the fault `wait`, and a kernel that spins for ever.
pub(crate) struct Gate {
    path: PathBuf,
    reached: PathBuf,
}

impl Gate {
    /// One that lets everything through, and counts it.
    pub(crate) fn open(fakes: &Loaded) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("gate-{}-{count}", std::process::id());
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let reached = path.with_extension("reached");
        fakes.set("GATE", path.to_str().unwrap());
        Self { path, reached }
    }

    /// One that lets nothing through before it is dropped.
    pub(crate) fn closed(fakes: &Loaded) -> Self {
        let gate = Self::open(fakes);
        std::fs::write(&gate.path, []).unwrap();
        gate
    }

    /// Says whether so many have come to it.
    pub(crate) fn was_reached_by(&self, count: u64) -> bool {
        std::fs::metadata(&self.reached).is_ok_and(|file| file.len() >= count)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // Neither may be there.
        let _ = std::fs::remove_file(&self.path);
        let _ = std::fs::remove_file(&self.reached);
    }
}

/// Both devices, for one test at a time: a device has one issuer, and an issuer one thread. What the fakes are told to do
/// wrong is for one test, too.
pub(crate) struct Held {
    pub(crate) nccl: [NcclBackend; 2],
    pub(crate) p2p: [GpuBackend; 2],
    // Last: the next test begins when all of the above is gone.
    _turn: MutexGuard<'static, ()>,
}

/// Acts on what belongs to the test on this thread.
pub(crate) fn with<R>(act: impl FnOnce(&mut Held) -> R) -> R {
    static TURN: Mutex<()> = Mutex::new(());
    thread_local! {
        static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
    }
    HELD.with_borrow_mut(|held| {
        let held = held.get_or_insert_with(|| {
            let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
            Held::new(turn)
        });
        act(held)
    })
}

impl Held {
    fn new(turn: MutexGuard<'static, ()>) -> Self {
        fakes();
        let nccl = Nccl::load().unwrap();
        let devices = [0, 1].map(|ordinal| Device::open(ordinal).unwrap());
        let with_nccl = |device: &Device| NcclBackend::new(device.clone(), nccl.clone());
        let p2p = |device: &Device| {
            GpuBackend::new(
                NcclBackend::alone(device.clone()),
                GpuTransport::P2p,
                |_| {},
            )
        };
        Self {
            nccl: devices.each_ref().map(with_nccl),
            p2p: devices.each_ref().map(p2p),
            _turn: turn,
        }
    }
}

/// The issuers of both devices, once the threads that an earlier test left behind are done with them.
pub(crate) fn issuers() -> [Issuer; 2] {
    let off = FlightRecorder::off();
    let issuer = |backend: &mut NcclBackend| backend.issuer(how(HANG, &|| true, &off)).unwrap();
    with(|held| held.nccl.each_mut().map(issuer))
}

/// A stream of the device, of this thread's own.
fn stream(device: usize) -> Stream {
    thread_local! {
        static STREAMS: RefCell<[Option<Stream>; 2]> = const { RefCell::new([None, None]) };
    }
    STREAMS.with_borrow_mut(|streams| {
        streams[device]
            .get_or_insert_with(|| Stream::new(&Device::open(device as u32).unwrap()).unwrap())
            .clone()
    })
}

/// Page-locked memory, and an event behind the work that uses it.
type Staging = (PinnedBuffer, Event);

/// Staging memory of each device. Used again and never freed: freeing waits for the device, on
/// which a test may have left a send that only the test itself can let go on.
static STAGING: [Mutex<Vec<Staging>>; 2] = [const { Mutex::new(Vec::new()) }; 2];

/// Takes staging memory of at least so many bytes that nothing uses any more.
fn staging(on: usize, bytes: usize) -> Staging {
    let device = Device::open(on as u32).unwrap();
    let mut idle = STAGING[on].lock().unwrap_or_else(PoisonError::into_inner);
    let fits = |(buffer, passed): &Staging| buffer.len() >= bytes && passed.is_done().unwrap();
    if let Some(at) = idle.iter().position(fits) {
        return idle.swap_remove(at);
    }
    let room = bytes.next_power_of_two().max(4096);
    let buffer = PinnedBuffer::new(&device, room).unwrap();
    (buffer, Event::new(&device).unwrap())
}

fn give_back(on: usize, staging: Staging) {
    let mut idle = STAGING[on].lock().unwrap_or_else(PoisonError::into_inner);
    idle.push(staging);
}

/// Issues an upload to a slot of device `on`, and does not wait for it.
pub(crate) fn upload(on: usize, lease: &mut DeviceTx, at: usize, bytes: &[u8]) {
    let stream = stream(on);
    let (mut pinned, passed) = staging(on, bytes.len());
    pinned.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
    let issued = lease.write_on(&stream, |slot| -> Result<(), TransportError> {
        let place = DevicePtr {
            address: slot.address + at as u64,
            len: slot.len - at,
        };
        // SAFETY: the slot is device memory that only the lease's streams touch, in turn; the
        // buffer is not touched again before its event is done.
        unsafe { stream.upload(&pinned, 0..bytes.len(), place) }?;
        Ok(passed.record(&stream)?)
    });
    issued.unwrap();
    give_back(on, (pinned, passed));
}

/// The payload that arrived on device `on`.
pub(crate) fn download(on: usize, lease: &DeviceRx) -> Vec<u8> {
    let stream = stream(on);
    let (mut pinned, passed) = staging(on, lease.len());
    let issued = lease.read_on(&stream, |payload| -> Result<(), TransportError> {
        // SAFETY: the payload is not written while the lease is there; the buffer is looked at only
        // once the stream has passed the copy.
        unsafe { stream.download(payload, &mut pinned, 0) }?;
        Ok(passed.record(&stream)?)
    });
    issued.unwrap();
    until(|| stream.is_idle().unwrap());
    let bytes = pinned.bytes()[..lease.len()].to_vec();
    give_back(on, (pinned, passed));
    bytes
}

/// Waits until the thread that frees has looked at all that was dropped before, and gives what is free on this device then.
pub(crate) fn settled_free(device: &Device) -> u64 {
    // More than all that it may have to free first.
    const LAST: usize = 256 << 20;
    let free = || device.memory().unwrap().free;
    let last = DeviceBuffer::new(device, LAST).unwrap();
    let without = free() + LAST as u64;
    drop(last);
    until(|| free() >= without);
    free()
}

/// Bytes free on both devices, once what was dropped before and is not in use is freed.
pub(crate) fn free() -> [u64; 2] {
    [0, 1].map(|on| settled_free(&Device::open(on).unwrap()))
}

/// Waits until as much is free as was before.
pub(crate) fn assert_free(before: [u64; 2]) {
    until(|| {
        free()
            .iter()
            .zip(before)
            .all(|(now, before)| *now >= before)
    });
}
