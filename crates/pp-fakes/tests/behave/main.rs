//! The fake driver and the fake NCCL do what the real ones do, as far as the other tests count on it.

mod peers;
mod watch;

use std::ffi::{c_char, c_int};
use std::ptr::null_mut;
use std::thread;
use std::time::Duration;

use pp_fakes::raw::{Config, Handle, IN_PROGRESS, TestKernels, UniqueId};
use pp_fakes::{Fakes, Loaded, ok, raw};

/// One test at a time: the fakes' settings are of the process.
static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());

fn alone() -> (std::sync::MutexGuard<'static, ()>, &'static Loaded) {
    let guard = ALONE
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    let loaded = Fakes::newest().load();
    loaded.set("NCCL_DIR", env!("CARGO_TARGET_TMPDIR"));
    loaded.set("NCCL_EAGER", "65536");
    loaded.set("NCCL_ABORT_MS", "0");
    loaded.set("FAULTS", "");
    (guard, loaded)
}

/// Makes a device current on this thread, and gives it a stream.
fn device(ordinal: c_int) -> Handle {
    pp_fakes::raw::device(ordinal).1
}

fn alloc(bytes: usize) -> u64 {
    let mut at = 0;
    ok!(alloc(&mut at, bytes));
    at
}

fn event() -> Handle {
    let mut event = null_mut();
    ok!(event_create(&mut event, 0));
    event
}

fn read_u64(stream: Handle, at: u64) -> u64 {
    let mut value = 0u64;
    ok!(download(
        std::ptr::from_mut(&mut value).cast(),
        at,
        8,
        stream
    ));
    ok!(stream_synchronize(stream));
    value
}

#[test]
fn without_a_current_context_calls_fail() {
    let _alone = alone();
    ok!(init(0));
    ok!(set_current(null_mut()));
    let mut at = 0;
    assert_eq!(raw!(alloc(&mut at, 16)), 201);
    let mut made = null_mut();
    assert_eq!(raw!(stream_create(&mut made, 1, 0)), 201);
}

/// Streams are asynchronous, and only an event orders two of them: the negative half makes the positive one worth something.
#[test]
fn a_wait_orders_two_streams_and_its_lack_shows() {
    let (_alone, loaded) = alone();
    loaded.set("DELAY_US", "2000");
    let a = device(0);
    let mut b = null_mut();
    ok!(stream_create(&mut b, 1, 0));
    let kernels = TestKernels::load();
    let (payload, wrong) = (alloc(1 << 16), alloc(8));
    let mut torn = [0, 0];
    for (waits, torn) in [false, true].into_iter().zip(&mut torn) {
        ok!(fill(wrong, 0, 8, b));
        ok!(stream_synchronize(b));
        for n in 0..40 {
            let ready = event();
            kernels.spin(a as u64, 300);
            kernels.fill(a as u64, payload, 1 << 16, n);
            ok!(event_record(ready, a));
            if waits {
                ok!(stream_wait(b, ready, 0));
            }
            kernels.check(b as u64, payload, 1 << 16, n, wrong);
            ok!(stream_synchronize(b));
            ok!(stream_synchronize(a));
        }
        *torn = read_u64(b, wrong);
    }
    assert!(torn[0] > 0, "a missing wait did not show");
    assert_eq!(torn[1], 0);
    loaded.set("DELAY_US", "60");
}

/// CUDA: a wait means the recording that was newest at the call, not a later one.
#[test]
fn waits_and_queries_mean_the_recording_at_their_call() {
    let _alone = alone();
    let a = device(0);
    let (mut b, mut c) = (null_mut(), null_mut());
    ok!(stream_create(&mut b, 1, 0));
    ok!(stream_create(&mut c, 1, 0));
    let kernels = TestKernels::load();
    let (e, block) = (event(), event());
    assert_eq!(raw!(event_query(e)), 0, "never recorded is done");
    ok!(event_record(e, a));
    ok!(stream_wait(b, e, 0));
    // The second recording sits behind a long kernel; b's wait was for the first.
    kernels.spin(c as u64, 300_000);
    ok!(event_record(e, c));
    ok!(event_record(block, b));
    ok!(event_synchronize(block));
    assert_eq!(raw!(event_query(e)), 600, "the query means the second");
    ok!(event_synchronize(e));
    assert_eq!(raw!(event_query(e)), 0);
}

#[test]
fn a_freed_address_poisons_the_device() {
    // The error is sticky.
    if !pp_testing::alone!() {
        return;
    }
    let stream = device(0);
    let at = alloc(64);
    ok!(free(at));
    ok!(fill(at, 1, 64, stream));
    assert_eq!(raw!(stream_synchronize(stream)), 700);
    let mut other = 0;
    assert_eq!(raw!(alloc(&mut other, 64)), 700);
}

#[test]
fn memory_has_an_end_and_unknown_kernels_an_error() {
    let _alone = alone();
    device(1);
    let mut at = 0;
    assert_eq!(raw!(alloc(&mut at, 2 << 30)), 2);
    let mut module = null_mut();
    let ptx = c".visible .entry nobody_knows_me(.param .u64 x) {}";
    ok!(module_load(&mut module, ptx.as_ptr()));
    let (mut function, mut stream) = (null_mut(), null_mut());
    let missing = c"not_there";
    assert_eq!(
        raw!(module_function(&mut function, module, missing.as_ptr())),
        500
    );
    let unknown = c"nobody_knows_me";
    ok!(module_function(&mut function, module, unknown.as_ptr()));
    ok!(stream_create(&mut stream, 1, 0));
    let (mut x, none) = (0u64, null_mut());
    let mut arguments = [std::ptr::from_mut(&mut x).cast()];
    let launched = raw!(launch(
        function,
        1,
        1,
        1,
        1,
        1,
        1,
        0,
        stream,
        arguments.as_mut_ptr(),
        none
    ));
    assert_eq!(launched, 801);
}

/// Runs both ranks of a communicator, each on a thread and a device of its own.
fn ranks(body: impl Fn(c_int, Handle, Handle) + Sync) {
    ranks_of(&Config::new(true), body);
}

fn ranks_of(config: &Config, body: impl Fn(c_int, Handle, Handle) + Sync) {
    let mut id: UniqueId = [0 as c_char; 128];
    ok!(unique_id(&mut id));
    thread::scope(|scope| {
        for rank in 0..2 {
            let body = &body;
            scope.spawn(move || {
                let stream = device(rank);
                let mut comm = null_mut();
                raw!(comm_init(&mut comm, 2, id, rank, config));
                assert_eq!(settled(comm), 0);
                body(rank, comm, stream);
            });
        }
    });
}

/// What the communicator says of itself.
fn state(comm: Handle) -> c_int {
    let mut state = 0;
    ok!(comm_error(comm, &mut state));
    state
}

/// What the communicator says of itself once it is no longer in progress.
fn settled(comm: Handle) -> c_int {
    loop {
        match state(comm) {
            IN_PROGRESS => thread::yield_now(),
            state => return state,
        }
    }
}

#[test]
fn a_small_send_needs_no_receiver_and_a_large_one_does() {
    let (_alone, loaded) = alone();
    loaded.set("NCCL_LAZY", "0");
    ranks(|rank, comm, stream| {
        let payload = alloc(1 << 20);
        if rank == 0 {
            ok!(send(payload, 65536, 1, 1, comm, stream));
            ok!(stream_synchronize(stream));
            ok!(send(payload, 65537, 1, 1, comm, stream));
            thread::sleep(Duration::from_millis(50));
            assert_eq!(raw!(stream_query(stream)), 600);
        }
        ok!(comm_abort(comm));
        // The peer did not receive it, and the stream says success: as the real one does.
        ok!(stream_synchronize(stream));
    });
    loaded.set("NCCL_LAZY", "1");
}

#[test]
fn a_smaller_receive_truncates_silently_and_a_larger_one_hangs() {
    let _alone = alone();
    ranks(|rank, comm, stream| {
        let payload = alloc(4096);
        for received in [1000, 3000] {
            if rank == 0 {
                ok!(send(payload, 2000, 1, 1, comm, stream));
            } else {
                ok!(recv(payload, received, 1, 0, comm, stream));
            }
            if rank == 0 || received < 2000 {
                ok!(stream_synchronize(stream));
            }
        }
        if rank == 1 {
            thread::sleep(Duration::from_millis(50));
            assert_eq!(raw!(stream_query(stream)), 600);
        }
        ok!(comm_abort(comm));
        ok!(stream_synchronize(stream));
    });
}

#[test]
fn two_ranks_on_one_device_are_refused() {
    let _alone = alone();
    let mut id: UniqueId = [0 as c_char; 128];
    ok!(unique_id(&mut id));
    thread::scope(|scope| {
        for rank in 0..2 {
            scope.spawn(move || {
                device(0);
                let mut comm = null_mut();
                let config = Config::new(true);
                assert_eq!(raw!(comm_init(&mut comm, 2, id, rank, &config)), 5);
            });
        }
    });
}

/// An abort from another thread lets go of a host that waits for a peer which never uses its connection.
#[test]
fn an_abort_frees_a_caller_that_connects() {
    let _alone = alone();
    ranks(|rank, comm, stream| {
        let payload = alloc(16);
        if rank == 0 {
            let comm = comm as usize;
            let aborting = thread::spawn(move || {
                thread::sleep(Duration::from_millis(30));
                ok!(comm_abort(comm as Handle));
            });
            assert_ne!(raw!(send(payload, 16, 1, 1, comm as Handle, stream)), 0);
            aborting.join().unwrap();
        } else {
            ok!(comm_abort(comm));
        }
    });
}

/// Without blocking the caller is never held: the first operation is in progress until the peer uses its connection,
/// and an abort ends it.
#[test]
fn a_first_operation_that_does_not_block_is_in_progress_until_the_peer_is_there() {
    let _alone = alone();
    let issued = std::sync::Barrier::new(2);
    ranks_of(&Config::new(false), |rank, comm, stream| {
        let payload = alloc(16);
        if rank == 0 {
            assert_eq!(raw!(send(payload, 16, 1, 1, comm, stream)), IN_PROGRESS);
            assert_eq!(state(comm), IN_PROGRESS);
        }
        issued.wait();
        if rank == 1 {
            assert_eq!(raw!(recv(payload, 16, 1, 0, comm, stream)), IN_PROGRESS);
        }
        assert_eq!(settled(comm), 0);
        ok!(stream_synchronize(stream));
        if rank == 0 {
            // The other direction, which the peer never uses.
            assert_eq!(raw!(recv(payload, 16, 1, 1, comm, stream)), IN_PROGRESS);
            assert_eq!(state(comm), IN_PROGRESS);
        }
        ok!(comm_abort(comm));
    });
}
