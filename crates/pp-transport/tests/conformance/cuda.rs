//! Buffers, streams and events of CUDA by themselves.

use pp_device::{CudaError, Device, DeviceBuffer, DevicePtr, Event, PinnedBuffer, Stream};
use pp_testing::{assert_has, until};

use crate::devices::{issuers, settled_free, the_fakes};
use pp_fakes::raw;
use pp_fakes::raw::{Handle, TestKernels};

/// Device 0, for this test alone.
fn device() -> Device {
    let [first, _] = issuers();
    first.device().clone()
}

#[test]
fn bytes_go_up_over_and_down_again() {
    let device = device();
    let stream = Stream::new(&device).unwrap();
    let mut pinned = PinnedBuffer::new(&device, 1000).unwrap();
    assert!(pinned.bytes().iter().all(|b| *b == 0));
    for (i, byte) in pinned.bytes_mut().iter_mut().enumerate() {
        *byte = i as u8;
    }
    let buffers = [(); 2].map(|()| DeviceBuffer::new(&device, 600).unwrap());
    assert_eq!(buffers[0].address() % 256, 0);
    let mut back = PinnedBuffer::new(&device, 700).unwrap();
    let tail = DevicePtr {
        address: buffers[1].address() + 590,
        len: 10,
    };
    // SAFETY: one stream orders all of it, and everything outlives the wait below.
    unsafe {
        stream.upload(&pinned, 100..700, buffers[0].ptr()).unwrap();
        stream.copy(buffers[0].ptr(), buffers[1].ptr()).unwrap();
        stream.fill(tail, 0xAB).unwrap();
        stream.download(buffers[1].ptr(), &mut back, 100).unwrap();
    }
    until(|| stream.is_idle().unwrap());
    for (i, byte) in back.bytes().iter().enumerate() {
        let wanted = match i {
            0..100 => 0,
            100..690 => i as u8,
            _ => 0xAB,
        };
        assert_eq!(*byte, wanted, "at {i}");
    }
}

#[test]
fn copies_past_the_end_are_refused() {
    let device = device();
    let stream = Stream::new(&device).unwrap();
    let mut pinned = PinnedBuffer::new(&device, 100).unwrap();
    let buffer = DeviceBuffer::new(&device, 50).unwrap();
    let small = DeviceBuffer::new(&device, 49).unwrap();
    // SAFETY: nothing is issued: each is refused for its range.
    let refused = unsafe {
        [
            stream.upload(&pinned, 60..101, buffer.ptr()),
            stream.upload(&pinned, 0..51, buffer.ptr()),
            stream.download(buffer.ptr(), &mut pinned, 51),
            stream.download(buffer.ptr(), &mut pinned, usize::MAX),
            stream.copy(buffer.ptr(), small.ptr()),
        ]
    };
    for result in refused {
        let error = result.unwrap_err();
        assert!(matches!(error, CudaError::OutOfRange { .. }), "{error}");
    }
    assert!(stream.is_idle().unwrap());
}

#[test]
fn any_thread_may_issue_and_an_error_names_its_call() {
    let device = device();
    let stream = Stream::urgent(&device).unwrap();
    let event = Event::new(&device).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let buffer = DeviceBuffer::new(&device, 64).unwrap();
            // SAFETY: the buffer stays until the stream is idle.
            unsafe { stream.fill(buffer.ptr(), 1) }.unwrap();
            event.record(&stream).unwrap();
            until(|| event.is_done().unwrap() && stream.is_idle().unwrap());
        });
    });
    let error = DeviceBuffer::new(&device, 1 << 50).unwrap_err();
    assert!(error.is_out_of_memory());
    let text = error.to_string();
    assert_has(&text, &["cuMemAlloc_v2", "(2)"]);
    let wanted = "1125899906842624 bytes of device memory could not be had (";
    assert!(text.starts_with(wanted), "{text}");
    assert!(text.contains("bytes are free); lower --depth"), "{text}");
}

#[test]
fn timed_events_measure_what_lies_between() {
    the_fakes!();
    let device = device();
    device.bind().unwrap();
    let kernels = TestKernels::load();
    let stream = Stream::new(&device).unwrap();
    let [start, end] = [(); 2].map(|()| Event::timed(&device).unwrap());
    start.record(&stream).unwrap();
    kernels.spin(stream.raw(), 3000);
    end.record(&stream).unwrap();
    until(|| end.is_done().unwrap());
    let took = end.elapsed_ns(&start).unwrap();
    assert!(took >= 3_000_000, "{took}");
}

/// Two streams use a buffer, and the one that is done first must not hide the other.
#[test]
fn a_buffer_dropped_in_use_is_leaked_and_one_dropped_after_is_freed() {
    // How much of a real device is free is not for this process alone to say.
    the_fakes!();
    const BYTES: usize = 1 << 20;
    let device = device();
    device.bind().unwrap();
    let kernels = TestKernels::load();
    let streams = [(); 2].map(|()| Stream::new(&device).unwrap());
    let free = || device.memory().unwrap().free;

    let before = settled_free(&device);
    let buffer = DeviceBuffer::new(&device, BYTES).unwrap();
    for (stream, us) in streams.iter().zip([200_000, 1]) {
        kernels.spin(stream.raw(), us);
        buffer.used_by(stream).unwrap();
    }
    until(|| streams[1].is_idle().unwrap());
    assert!(!buffer.is_idle().unwrap());
    drop(buffer);
    until(|| streams[0].is_idle().unwrap());

    let buffer = DeviceBuffer::new(&device, BYTES).unwrap();
    kernels.spin(streams[0].raw(), 1000);
    buffer.used_by(&streams[0]).unwrap();
    until(|| buffer.is_idle().unwrap());
    drop(buffer);
    // The second one comes back, some time; the first one never does.
    until(|| free() >= before - BYTES as u64);
    assert_eq!(free(), before - BYTES as u64);
}

/// A use that could not be noted is one that never ends, even where an earlier one was noted.
#[test]
fn a_use_that_cannot_be_noted_keeps_the_buffer_for_good() {
    let fakes = the_fakes!();
    let device = device();
    let stream = Stream::new(&device).unwrap();
    for notes_before in [0, 1] {
        let buffer = DeviceBuffer::new(&device, 64).unwrap();
        for _ in 0..notes_before {
            buffer.used_by(&stream).unwrap();
            until(|| buffer.is_idle().unwrap());
        }
        fakes.set("FAULTS", "cuEventRecord:1:999,nothing:3:skip");
        let noted = buffer.used_by(&stream);
        fakes.set("FAULTS", "");
        assert!(noted.is_err());
        until(|| stream.is_idle().unwrap());
        assert!(!buffer.is_idle().unwrap(), "{notes_before}");
    }
}

/// Somebody else's library has left another context behind, or none.
#[test]
fn what_is_made_is_made_on_its_device_whatever_context_was_left() {
    the_fakes!();
    let device = device();
    let other = Device::open(1).unwrap();
    for left in [other.raw_context(), 0] {
        device.bind().unwrap();
        let lose = || assert_eq!(raw!(set_current(left as Handle)), 0);
        let before = [&device, &other].map(settled_free);
        lose();
        let buffer = DeviceBuffer::new(&device, 1 << 20).unwrap();
        let after = [&device, &other].map(|d| d.memory().unwrap().free);
        assert_eq!(after, [before[0] - (1 << 20), before[1]], "{left}");
        lose();
        let _pinned = PinnedBuffer::new(&device, 64).unwrap();
        lose();
        let stream = Stream::new(&device).unwrap();
        lose();
        let event = Event::new(&device).unwrap();
        // The driver refuses an event of another device.
        event.record(&stream).unwrap();
        buffer.used_by(&stream).unwrap();
    }
}
