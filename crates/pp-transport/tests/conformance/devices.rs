//! Two devices and the issuers of each, for the tests of this process: the fake driver's, or with
//! `PP_TEST_GPU=real` those of the machine.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pp_contract::Generation;
use pp_device::{Device, DevicePtr, Event, PinnedBuffer, Stream};
use pp_transport::error::TransportError;
use pp_transport::gpu::{DeviceRx, DeviceTx};
use pp_transport::host::EdgeShape;
use pp_transport::nccl::{
    self, AbortHandle, Issuer, Nccl, NcclBackend, NcclEnd, NcclOptions, UniqueId,
};

use crate::two_way::{self, Lanes, TwoWay, connected};
use pp_fakes::{Fakes, Loaded};

/// Far enough away that only a hang reaches it.
pub(crate) const HANG: Duration = Duration::from_secs(60);

/// Whether the tests run on real devices. Nothing is skipped then: what is missing fails.
pub(crate) fn is_real() -> bool {
    std::env::var("PP_TEST_GPU").is_ok_and(|value| value == "real")
}

/// The fakes, where they are used.
pub(crate) fn fakes() -> Option<&'static Loaded> {
    (!is_real()).then(|| Fakes::newest().load())
}

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

    /// Whether so many have come to it.
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

/// Enough for communicators that end in order.
pub(crate) fn within() -> Duration {
    HANG / 2
}

/// Both devices, for one test at a time: a device has one issuer, and an issuer one thread.
struct Held {
    issuers: [Issuer; 2],
    // Last: the next test begins when all of the above is gone.
    _turn: MutexGuard<'static, ()>,
}

thread_local! {
    static HELD: RefCell<Option<Held>> = const { RefCell::new(None) };
}

fn with<R>(act: impl FnOnce(&mut Held) -> R) -> R {
    static TURN: Mutex<()> = Mutex::new(());
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
        Self {
            issuers: devices.each_ref().map(|device| take(&nccl, device)),
            _turn: turn,
        }
    }
}

/// The device's issuer, once the threads that an earlier test left behind are done with it.
fn take(nccl: &Nccl, device: &Device) -> Issuer {
    let deadline = Instant::now() + HANG;
    loop {
        match Issuer::open(nccl, device) {
            Err(TransportError::DeviceTaken { .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(1));
            }
            opened => return opened.unwrap(),
        }
    }
}

/// The issuers of both devices, which belong to the test on this thread.
pub(crate) fn issuers() -> [Issuer; 2] {
    with(|held| held.issuers.each_ref().map(Issuer::share))
}

/// What both ends of a link are made of.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) up: EdgeShape,
    pub(crate) down: EdgeShape,
    pub(crate) blocking: bool,
}

impl Shape {
    pub(crate) fn up(depth: u32, slot_bytes: u64) -> Self {
        Self {
            up: EdgeShape { depth, slot_bytes },
            down: EdgeShape {
                depth: 1,
                slot_bytes: 64,
            },
            blocking: true,
        }
    }
}

/// The names of the communicators of both edges.
pub(crate) fn ids() -> [UniqueId; 2] {
    [(); 2].map(|()| UniqueId::new(issuers()[0].nccl()).unwrap())
}

/// Edges to another rank and back, with what ends them.
pub(crate) struct NcclLink {
    pub(crate) both: TwoWay<NcclBackend>,
    handle: AbortHandle,
}

impl NcclLink {
    pub(crate) fn abort_handle(&self) -> AbortHandle {
        self.handle.clone()
    }

    pub(crate) fn close(self, deadline: Instant) -> Result<(), TransportError> {
        let TwoWay { out, incoming, .. } = self.both;
        nccl::close(vec![NcclEnd::Out(out), NcclEnd::In(incoming)], deadline)
    }
}

impl Deref for NcclLink {
    type Target = TwoWay<NcclBackend>;

    fn deref(&self) -> &Self::Target {
        &self.both
    }
}

impl DerefMut for NcclLink {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.both
    }
}

const SMALL: EdgeShape = EdgeShape {
    depth: 1,
    slot_bytes: 64,
};

/// The lanes of small edges.
pub(crate) fn small_lanes() -> (Lanes, Lanes) {
    two_way::lanes(SMALL, SMALL)
}

/// One end of small edges, the lower where its device is 0.
pub(crate) fn options(issuer: Issuer, lanes: Lanes, ids: [UniqueId; 2]) -> NcclOptions {
    let shape = Shape {
        up: SMALL,
        down: SMALL,
        blocking: false,
    };
    options_of(shape, issuer, lanes, ids)
}

fn options_of(shape: Shape, issuer: Issuer, lanes: Lanes, ids: [UniqueId; 2]) -> NcclOptions {
    NcclOptions {
        is_lower: issuer.device().about().ordinal == 0,
        issuer,
        edges: two_way::edges(lanes, shape.up, shape.down, ids),
        deadline: Instant::now() + HANG,
        generation: Generation::new(0),
        blocking: shape.blocking,
    }
}

/// Both ends, the lower on device 0 and the higher on device 1, over these lanes.
pub(crate) fn connect(
    shape: Shape,
    lanes: (Lanes, Lanes),
) -> Result<(NcclLink, NcclLink), TransportError> {
    let ([lower, higher], ids) = (issuers(), ids());
    let make = |issuer, lanes: Lanes| {
        let bell = lanes.bell.clone();
        let options = options_of(shape, issuer, lanes, ids);
        move || {
            let ends = nccl::connect(options, &|| true)?;
            let (both, handle) = connected(ends, bell);
            Ok::<_, TransportError>(NcclLink { both, handle })
        }
    };
    let (low, high) = (make(lower, lanes.0), make(higher, lanes.1));
    std::thread::scope(|scope| {
        let high = scope.spawn(high);
        let low = low()?;
        Ok((low, high.join().unwrap()?))
    })
}

pub(crate) fn pair(shape: Shape) -> (NcclLink, NcclLink) {
    connect(shape, two_way::lanes(shape.up, shape.down)).unwrap()
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
    wait(|| stream.is_idle().unwrap());
    let bytes = pinned.bytes()[..lease.len()].to_vec();
    give_back(on, (pinned, passed));
    bytes
}

/// Bytes free on the device, once what earlier tests left to be freed is.
pub(crate) fn settled_free(device: &Device) -> u64 {
    let look = || device.memory().unwrap().free;
    let (mut seen, mut times) = (look(), 0);
    while times < 20 {
        std::thread::sleep(Duration::from_millis(5));
        let now = look();
        times = if now == seen { times + 1 } else { 0 };
        seen = now;
    }
    seen
}

/// Waits until it is so.
pub(crate) fn wait(mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + HANG;
    while !is_so() {
        assert!(Instant::now() < deadline, "it never was so");
        std::thread::yield_now();
    }
}
