//! Every decoder that a peer can reach, run on any bytes under a bound on what it may allocate.
//! The property test and the fuzz targets share it.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each user of this file takes a part"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::LazyLock;

use pp_contract::*;

/// Most bytes that decoding one frame, its body and the reason of a refusal may allocate in sum.
const FRAME_BOUND: usize = 32 << 10;
/// Laps of the edges below; those of a chunk are at most as many.
const LAPS: u8 = 8;
/// Most bytes that decoding a hello may allocate in sum: its texts, at most the frame, and the list
/// of settings.
const HELLO_BOUND: usize = MAX_HELLO_BYTES + (8 << 10);
/// Most bytes that decoding a fault may allocate in sum.
const FAULT_BOUND: usize = Fault::MAX_BYTES;

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

/// The allocator of the system, which counts what each thread asks it for.
pub struct Counting;

// SAFETY: every call is handed on to the system's allocator unchanged, under the same contract;
// the counter is a thread-local without a destructor and allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED.set(ALLOCATED.get().saturating_add(layout.size()));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`; `alloc` took it from the system.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Bytes that this thread asked for while `work` ran, and what it gave.
pub fn allocated<T>(work: impl FnOnce() -> T) -> (usize, T) {
    ALLOCATED.set(0);
    let value = work();
    (ALLOCATED.get(), value)
}

/// Runs a decoder and fails if it allocates more than `bound`.
fn bounded<T>(what: &str, bound: usize, decode: impl FnOnce() -> T) -> T {
    let (bytes, value) = allocated(decode);
    assert!(
        bytes <= bound,
        "{what} allocated {bytes} bytes, the bound is {bound}"
    );
    value
}

/// The frame as it is, and then with its fixed fields and checksums made right, so that what lies
/// behind them is reached too. A message that is accepted has to survive the way back and forth.
pub fn frame(bytes: &[u8]) {
    decode_frame(bytes);
    if let Some(repaired) = repair_frame(bytes) {
        decode_frame(&repaired);
    }
}

/// Each frame is decoded as one of every stage of these.
static PIPELINES: LazyLock<[Pipeline; 2]> = LazyLock::new(|| {
    [
        "encode@0,phase_b@1,decode@2",
        "encode@0,(phase_b@1,guide@2)*steps,decode@0",
    ]
    .map(|text| text.parse().expect("a pipeline"))
});

fn makers() -> impl Iterator<Item = (&'static Pipeline, usize)> {
    let makers =
        |pipeline: &'static Pipeline| (0..pipeline.stages().len()).map(move |at| (pipeline, at));
    PIPELINES.iter().flat_map(makers)
}

fn decode_frame(frame: &[u8]) {
    let mut lockstep = Lockstep::with_laps(LAPS.into());
    let Ok(matched) = bounded("admitting", 0, || lockstep.admit(frame)) else {
        return;
    };
    for (pipeline, maker) in makers() {
        let decode = || matched.message::<VideoPlan>(pipeline, maker);
        if let Ok(message) = bounded("a message", FRAME_BOUND, decode) {
            survives(&message, matched.header(), pipeline, maker);
        }
    }
}

/// What was accepted is composed again, and must come out as the same value. And the next stage can work on it.
fn survives(message: &Message<VideoPlan>, header: &Header, pipeline: &Pipeline, maker: usize) {
    let again = |message: &Message<VideoPlan>| {
        let mut composer = Composer::new();
        let prepared = composer.prepare(message).expect("it came over the wire");
        let sent = prepared.commit(&mut Sequencer::new(), Stamp::of(header));
        let mut lockstep = Lockstep::with_laps(LAPS.into());
        let matched = lockstep.admit(sent.frame()).expect("we sent it");
        matched.message::<VideoPlan>(pipeline, maker)
    };
    assert_eq!(again(message).as_ref(), Ok(message));
    let stale = message.clone().overtaken();
    assert_eq!(again(&stale).as_ref(), Ok(&stale));
    let report = StageReport::default();
    for (_, next) in pipeline.next(maker) {
        let tensors = message.tensors().clone();
        let place = (next, Stamp::of(header).lap);
        let _ = message.clone().hand_on(pipeline, place, tensors, &report);
        if next + 1 == pipeline.stages().len() {
            let _ = message.clone().accepted(pipeline, &report, Vec::new());
        }
    }
}

fn repair_frame(bytes: &[u8]) -> Option<Vec<u8>> {
    let mut frame = bytes.to_vec();
    let body_len = u32::try_from(bytes.len().checked_sub(HEADER_BYTES)?).ok()?;
    let body_crc = crc32(&bytes[HEADER_BYTES..]);
    frame[0..4].copy_from_slice(&MAGIC);
    frame[4..6].copy_from_slice(&WIRE_VERSION.to_le_bytes());
    // A body goes with INFER alone.
    (frame[6], frame[7]) = (if body_len > 0 { 1 } else { frame[6] % 3 }, 0);
    // The first payload of an edge, if there is one at all.
    frame[32..40].fill(if bytes[40..48] == [0; 8] { 0xff } else { 0 });
    frame[46..48].fill(0);
    (frame[58], frame[59]) = (frame[58] % LAPS, 0);
    frame[48..52].copy_from_slice(&body_len.to_le_bytes());
    frame[52..56].copy_from_slice(&body_crc.to_le_bytes());
    if let Some(payload) = manifest_bytes(&frame).filter(|payload| *payload > 0) {
        frame[32..40].fill(0);
        frame[40..48].copy_from_slice(&payload.to_le_bytes());
    }
    let header_crc = crc32(&frame[..60]);
    frame[60..64].copy_from_slice(&header_crc.to_le_bytes());
    Some(frame)
}

/// The size of payload that the body of the frame asks for, as its refusal tells it.
fn manifest_bytes(frame: &[u8]) -> Option<u64> {
    let mut guess = frame.to_vec();
    guess[32..40].fill(0);
    guess[40..48].copy_from_slice(&MAX_PAYLOAD_BYTES.to_le_bytes());
    let header_crc = crc32(&guess[..60]);
    guess[60..64].copy_from_slice(&header_crc.to_le_bytes());
    let mut lockstep = Lockstep::with_laps(LAPS.into());
    let matched = lockstep.admit(&guess).ok()?;
    makers().find_map(
        |(pipeline, maker)| match matched.message::<VideoPlan>(pipeline, maker) {
            Err(BodyError::PayloadSize { manifest, .. }) => Some(manifest),
            _ => None,
        },
    )
}

/// A hello as it is, and then with its fixed fields and checksum made right.
pub fn hello(bytes: &[u8]) {
    decode_hello(bytes);
    let body = bytes.get(HELLO_HEADER_BYTES..).unwrap_or_default();
    let mut repaired = b"PPH1".to_vec();
    repaired.extend(WIRE_VERSION.to_le_bytes());
    repaired.extend([0, 0]);
    repaired.extend((body.len() as u32).to_le_bytes());
    let crc = crc32(&[&repaired, body].concat());
    repaired.extend(crc.to_le_bytes());
    repaired.extend(body);
    decode_hello(&repaired);
}

fn decode_hello(frame: &[u8]) {
    if let Ok(hello) = bounded("a hello", HELLO_BOUND, || Hello::decode(frame)) {
        let again = Hello::decode(&hello.encode().expect("it came over the wire"));
        assert_eq!(again.as_ref(), Ok(&hello));
        assert_eq!(compare(&hello, &hello), Ok(()));
        let _ = check_devices(&[hello]);
    }
}

/// A fault.
pub fn fault(bytes: &[u8]) {
    if let Ok(fault) = bounded("a fault", FAULT_BOUND, || Fault::decode(bytes)) {
        let again = Fault::decode(&fault.encode().expect("it came over the wire"));
        assert!(!fault.to_string().contains('\n'));
        let is_shown = |c: char| !c.is_control() || c == '\n' || c == '\t';
        assert!(fault.below().chars().all(is_shown));
        assert_eq!(again, Ok(fault));
    }
}

fn crc32(bytes: &[u8]) -> u32 {
    crc32fast::hash(bytes)
}
