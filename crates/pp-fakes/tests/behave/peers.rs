//! Memory that one process makes and another maps, and words that streams write for hosts.

use std::ffi::{c_int, c_uint, c_void};
use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::{alloc, alone, device, event, read_u64};
use pp_fakes::raw::{Handle, Properties, Right, TestKernels};
use pp_fakes::{Fakes, ok, raw};

const BYTES: usize = 2 << 20;
const PAYLOAD: usize = 1 << 20;
const BY_DESCRIPTOR: c_uint = 1;

/// Makes memory of a device; its handle.
fn create(ordinal: c_int) -> u64 {
    let mut handle = 0;
    ok!(create(&mut handle, BYTES, &Properties::of(ordinal), 0));
    handle
}

/// Maps a handle where a device may touch it.
fn map(handle: u64, ordinal: c_int) -> u64 {
    let mut at = 0;
    ok!(reserve(&mut at, BYTES, 0, 0, 0));
    ok!(map(at, BYTES, 0, handle, 0));
    ok!(set_access(at, BYTES, &Right::of(ordinal), 1));
    at
}

fn export(handle: u64) -> OwnedFd {
    let mut file = -1;
    ok!(export(&mut file, handle, BY_DESCRIPTOR, 0));
    // SAFETY: a descriptor that was just made for this caller.
    unsafe { OwnedFd::from_raw_fd(file) }
}

fn import(file: &OwnedFd) -> Result<u64, c_int> {
    let (mut handle, given) = (0, file.as_raw_fd() as usize as *mut c_void);
    match raw!(import(&mut handle, given, BY_DESCRIPTOR)) {
        0 => Ok(handle),
        code => Err(code),
    }
}

fn unmap(at: u64, handle: u64) {
    ok!(unmap(at, BYTES));
    ok!(free_addresses(at, BYTES));
    ok!(release(handle));
}

/// A page of words that processes share.
pub(crate) fn words_of(file: &OwnedFd) -> &'static [AtomicU32; 1024] {
    let (rights, shared) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
    // SAFETY: a new mapping of a page that stays mapped as long as the process lives.
    let page = unsafe { mmap(null_mut(), 4096, rights, shared, file, 0) }.unwrap();
    // SAFETY: as above; a page of zeroes is words of zero, and all who share it use atomics.
    unsafe { &*page.cast() }
}

/// The same, registered; its place for the host and for devices.
pub(crate) fn page_of(file: &OwnedFd) -> (&'static [AtomicU32; 1024], u64) {
    let (words, mut at) = (words_of(file), 0);
    let page = std::ptr::from_ref(words).cast_mut().cast();
    ok!(register(page, 4096, 3));
    ok!(device_pointer(&mut at, page, 0));
    (words, at)
}

pub(crate) fn new_page() -> OwnedFd {
    let file = memfd_create("words", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 4096).unwrap();
    file
}

pub(crate) fn wait_for(word: &AtomicU32, value: u32) {
    let began = Instant::now();
    while word.load(Ordering::Acquire) != value {
        assert!(began.elapsed() < Duration::from_secs(60), "no {value}");
        thread::yield_now();
    }
}

/// Starts this test again as a process of its own, which gives descriptors in one line.
fn peer(test: &str) -> (Child, Vec<OwnedFd>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]);
    command.env("PP_TEST_CHILD", "1").stdout(Stdio::piped());
    let mut child = Fakes::newest().give_to(&mut command).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let given = lines
        .map_while(Result::ok)
        .find_map(|line| Some(line.split_once("gives ")?.1.to_owned()))
        .expect("a line of the peer");
    let process = child.id();
    let of_peer = |number: &str| {
        let path = format!("/proc/{process}/fd/{number}");
        let file = File::options().read(true).write(true).open(path).unwrap();
        file.into()
    };
    (child, given.split(' ').map(of_peer).collect())
}

/// The receiver: checks each payload behind its number, and gives the slot back.
fn receive() {
    let stream = device(1);
    let memory = create(1);
    let (slot, file, page) = (map(memory, 1), export(memory), new_page());
    let (words, at) = page_of(&page);
    let (kernels, wrong) = (TestKernels::load(), alloc(8));
    println!("gives {} {}", file.as_raw_fd(), page.as_raw_fd());
    for n in 1.. {
        wait_for(&words[0], n);
        kernels.check(stream as u64, slot, PAYLOAD, n.into(), wrong);
        assert_eq!(read_u64(stream, wrong), 0);
        ok!(write_word(stream, at + 4, n, 0));
    }
}

/// Bytes come to another process behind their number; and when it is killed, copies into its memory go on without harm.
#[test]
fn memory_of_another_process() {
    if std::env::var_os("PP_TEST_CHILD").is_some() {
        return receive();
    }
    let _alone = alone();
    let (mut child, given) = peer("peers::memory_of_another_process");
    let stream = device(0);
    let before = free_bytes(1);
    let handle = import(&given[0]).unwrap();
    let slot = map(handle, 0);
    assert_eq!(before - free_bytes(1), BYTES, "kept alive by this process");
    let (words, at) = page_of(&given[1]);
    let (kernels, payload) = (TestKernels::load(), alloc(PAYLOAD));
    let send = |n: u32| {
        kernels.fill(stream as u64, payload, PAYLOAD, n.into());
        ok!(copy(slot, payload, PAYLOAD, stream));
        ok!(write_word(stream, at, n, 0));
    };
    for n in 1..20 {
        send(n);
        wait_for(&words[1], n);
    }
    child.kill().unwrap();
    child.wait().unwrap();
    send(20);
    send(21);
    ok!(stream_synchronize(stream));
    unmap(slot, handle);
    assert_eq!(before, free_bytes(1));
}

fn free_bytes(ordinal: c_int) -> usize {
    let mut contexts = [null_mut(); 2];
    let (mut free, mut total) = (0, 0);
    for (ordinal, context) in contexts.iter_mut().enumerate() {
        ok!(retain(context, ordinal as c_int));
    }
    ok!(set_current(contexts[ordinal as usize]));
    ok!(memory_info(&mut free, &mut total));
    ok!(set_current(contexts[0]));
    free
}

/// Sends `rounds` payloads from device 0 to device 1 within this process; how many bytes were wrong behind the number.
pub(crate) fn torn(number_on: impl Fn(Handle, Handle) -> Handle, rounds: u32) -> u64 {
    let (stream, handle) = (device(0), create(1));
    let target = import(&export(handle)).unwrap();
    let (slot, page) = (map(target, 0), new_page());
    let (words, at) = page_of(&page);
    let mut other = null_mut();
    ok!(stream_create(&mut other, 1, 0));
    let (kernels, payload) = (TestKernels::load(), alloc(PAYLOAD));
    let receiver = thread::spawn(move || {
        let stream = device(1);
        let slot = map(handle, 1);
        let (kernels, wrong) = (TestKernels::load(), alloc(8));
        ok!(fill(wrong, 0, 8, stream));
        for n in 1..=rounds {
            wait_for(&words[0], n);
            kernels.check(stream as u64, slot, PAYLOAD, n.into(), wrong);
            ok!(write_word(stream, at + 4, n, 0));
        }
        let torn = read_u64(stream, wrong);
        unmap(slot, handle);
        torn
    });
    for n in 1..=rounds {
        kernels.fill(stream as u64, payload, PAYLOAD, n.into());
        let filled = event();
        ok!(event_record(filled, stream));
        ok!(stream_wait(other, filled, 0));
        ok!(copy(slot, payload, PAYLOAD, stream));
        ok!(write_word(number_on(stream, other), at, n, 0));
        wait_for(&words[1], n);
        ok!(stream_synchronize(stream));
    }
    let torn = receiver.join().unwrap();
    unmap(slot, target);
    torn
}

/// A number on the stream of its copy comes behind the copy; on another stream it overtakes it.
#[test]
fn a_number_on_another_stream_overtakes_the_copy() {
    let (_alone, loaded) = alone();
    loaded.set("DELAY_US", "2000");
    assert_eq!(torn(|same, _| same, 40), 0);
    assert!(torn(|_, other| other, 40) > 0);
    loaded.set("DELAY_US", "60");
}

#[test]
fn a_payload_that_is_spoiled_on_the_way() {
    let (_alone, loaded) = alone();
    loaded.set("FAULTS", "cuMemcpyDtoDAsync:2:flip");
    assert_eq!(torn(|same, _| same, 3), 1);
    loaded.set("FAULTS", "cuMemcpyDtoDAsync:0:flip");
    assert_eq!(torn(|same, _| same, 3), 3);
}

#[test]
fn peer_access_and_its_atomics_may_be_refused() {
    let (_alone, loaded) = alone();
    device(0);
    let peers = || {
        let (mut can, mut atomics) = (-1, -1);
        ok!(can_access_peer(&mut can, 0, 1));
        ok!(peer_attribute(&mut atomics, 3, 0, 1));
        (can, atomics)
    };
    assert_eq!(peers(), (1, 1));
    loaded.set("PEERS", "pcie");
    assert_eq!(peers(), (1, 0));
    loaded.set("PEERS", "none");
    assert_eq!(peers(), (0, 0));
    // No device reaches memory of another one.
    let handle = create(1);
    let mut at = 0;
    ok!(reserve(&mut at, BYTES, 0, 0, 0));
    ok!(map(at, BYTES, 0, handle, 0));
    assert_eq!(raw!(set_access(at, BYTES, &Right::of(0), 1)), 101);
    ok!(set_access(at, BYTES, &Right::of(1), 1));
    loaded.set("PEERS", "nvlink");
    // Every call fails.
    let file = export(handle);
    loaded.set(
        "FAULTS",
        "cuMemImportFromShareableHandle:0:801,cuStreamWriteValue32:0:801",
    );
    assert_eq!([import(&file), import(&file)], [Err(801); 2]);
    let mut stream = null_mut();
    ok!(stream_create(&mut stream, 1, 0));
    assert_eq!(raw!(write_word(stream, at, 1, 0)), 801);
    loaded.set("FAULTS", "");
    // A descriptor of something else.
    assert_eq!(import(&new_page()), Err(1));
    let supports = || {
        let mut value = -1;
        ok!(attribute(&mut value, 103, 0));
        value
    };
    assert_eq!(supports(), 1);
    loaded.set("DESCRIPTORS", "0");
    assert_eq!(supports(), 0);
    let mut other = 0;
    assert_eq!(raw!(create(&mut other, BYTES, &Properties::of(0), 0)), 801);
    loaded.set("DESCRIPTORS", "1");
    unmap(at, handle);
}

#[test]
fn misuse_of_mapped_memory_is_refused() {
    let _alone = alone();
    device(0);
    let mut bytes = 0;
    ok!(granularity(&mut bytes, &Properties::of(0), 0));
    assert_eq!(bytes, BYTES);
    let (mut handle, mut at, mut x) = (0, 0, 0);
    let odd = BYTES + 4096;
    assert_eq!(raw!(create(&mut handle, odd, &Properties::of(0), 0)), 1);
    assert_eq!(raw!(reserve(&mut at, odd, 0, 0, 0)), 1);
    let handle = create(0);
    ok!(reserve(&mut at, 2 * BYTES, 0, 0, 0));
    assert_eq!(raw!(map(at, odd, 0, handle, 0)), 1);
    assert_eq!(
        raw!(map(at, 2 * BYTES, 0, handle, 0)),
        1,
        "beyond the memory"
    );
    assert_eq!(raw!(map(at, BYTES, 4096, handle, 0)), 1);
    assert_eq!(raw!(map(at + 2 * BYTES as u64, BYTES, 0, handle, 0)), 1);
    assert_eq!(
        raw!(set_access(at, BYTES, &Right::of(0), 1)),
        1,
        "not mapped"
    );
    assert_eq!(raw!(unmap(at, BYTES)), 1);
    ok!(map(at, BYTES, 0, handle, 0));
    assert_eq!(raw!(map(at, BYTES, 0, handle, 0)), 1, "mapped already");
    assert_eq!(raw!(free(at)), 1, "not of cuMemAlloc");
    assert_eq!(raw!(free_addresses(at, 2 * BYTES)), 1, "still mapped");
    ok!(release(handle));
    assert_eq!(raw!(release(handle)), 1);
    assert_eq!(raw!(export(&mut x, handle, BY_DESCRIPTOR, 0)), 1);
    assert_eq!(raw!(unmap(at, 2 * BYTES)), 1);
    ok!(unmap(at, BYTES));
    assert_eq!(raw!(unmap(at, BYTES)), 1);
    ok!(free_addresses(at, 2 * BYTES));
    assert_eq!(raw!(free_addresses(at, 2 * BYTES)), 1);
    let mut again = 0;
    ok!(reserve(&mut again, BYTES, 0, 0, 0));
    assert_ne!(again, at, "an address is never used twice");
    ok!(free_addresses(again, BYTES));
}

/// Each in a process of its own, for the error is sticky: without a right, after the mapping is gone, or by the host.
#[test]
fn an_access_that_is_not_allowed_poisons_the_device() {
    let Ok(case) = std::env::var("PP_TEST_CHILD") else {
        for (case, succeeds) in [("right", true), ("unmap", true), ("host", false)] {
            let status = Command::new(std::env::current_exe().unwrap())
                .args([
                    "--exact",
                    "peers::an_access_that_is_not_allowed_poisons_the_device",
                ])
                .env("PP_TEST_CHILD", case)
                .stderr(Stdio::null())
                .status()
                .unwrap();
            assert_eq!(status.success(), succeeds, "{case}");
        }
        return;
    };
    let (_alone, stream) = (alone(), device(0));
    let handle = create(0);
    let mut at = 0;
    ok!(reserve(&mut at, BYTES, 0, 0, 0));
    ok!(map(at, BYTES, 0, handle, 0));
    if case != "right" {
        ok!(set_access(at, BYTES, &Right::of(0), 1));
        ok!(fill(at, 1, 64, stream));
        ok!(stream_synchronize(stream));
    }
    match case.as_str() {
        "unmap" => ok!(unmap(at, BYTES)),
        // SAFETY: none; the process dies of it, which is what is tested.
        "host" => println!("{}", unsafe { (at as *const u8).read_volatile() }),
        _ => {}
    }
    ok!(fill(at, 1, 64, stream));
    assert_eq!(raw!(stream_synchronize(stream)), 700);
}

#[test]
fn a_write_to_registered_memory_is_refused_if_misaligned_and_survives_munmap() {
    let _alone = alone();
    let stream = device(0);
    let page = new_page();
    let (words, at) = page_of(&page);
    let host = std::ptr::from_ref(words).cast_mut().cast();
    assert_eq!(raw!(register(host, 4096, 3)), 712);
    assert_eq!(raw!(write_word(stream, at + 2, 1, 0)), 1, "not aligned");
    ok!(write_word(stream, at, 1, 0));
    wait_for(&words[0], 1);
    // The device still writes to the same page when the host has unmapped it.
    // SAFETY: nothing uses `words` from here on.
    unsafe { munmap(host, 4096) }.unwrap();
    ok!(write_word(stream, at, 2, 0));
    ok!(stream_synchronize(stream));
    let mut value = [0; 4];
    rustix::io::pread(&page, &mut value, 0).unwrap();
    assert_eq!(u32::from_ne_bytes(value), 2);
    ok!(unregister(host));
    assert_eq!(raw!(unregister(host)), 713);
    assert_eq!(raw!(register(host, 4096, 3)), 1, "nothing is mapped there");
    assert_eq!(raw!(write_word(stream, at, 1, 0)), 1, "not registered");
    let (mut own, mut x) = ([0u32; 16], 0);
    let own_host = std::ptr::from_mut(&mut own).cast();
    assert_eq!(raw!(device_pointer(&mut x, own_host, 0)), 1);
    ok!(register(own_host, 64, 3));
    ok!(device_pointer(&mut x, own_host, 0));
    ok!(write_word(stream, x, 7, 0));
    ok!(stream_synchronize(stream));
    ok!(unregister(own_host));
    assert_eq!(own[0], 7);
}
