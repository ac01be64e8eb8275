use std::fs::{self, File};
use std::io::Read;

use super::super::y4m::Reader;
use super::*;
use pp_kernels::Chroma;
use pp_testing::Folder;

fn header() -> Header {
    Header::new(19, 16, Chroma::C422).unwrap()
}

fn options(queue: usize) -> SinkOptions {
    SinkOptions {
        queue,
        threads: 1,
        keep: None,
        repeats: false,
    }
}

fn open(path: &Path, queue: usize) -> Sink {
    Sink::open(path, &header(), options(queue), Vec::new(), || {}).unwrap()
}

fn frames(count: usize, value: u8) -> Buffer {
    let mut frames = Buffer::default();
    frames.resize(count * header().frame_bytes());
    frames.fill(value);
    frames
}

fn push_until_error(sink: &mut Sink) -> OutputError {
    loop {
        match sink.push(frames(8, 1), Params::new(), 0) {
            Ok(()) => {}
            Err(error) => return error,
        }
    }
}

#[test]
fn frames_are_repeated_where_others_are_missing() {
    let scratch = Folder::scratch();
    let path = scratch.file("out.y4m");
    let options = SinkOptions {
        threads: THREADS_THAT_PAY,
        repeats: true,
        ..options(2)
    };
    let mut sink = Sink::open(&path, &header(), options, Vec::new(), || {}).unwrap();
    let two = [&frames(1, 2)[..], &frames(1, 3)].concat();
    let mut batch = frames(2, 0);
    batch.copy_from_slice(&two);
    sink.push(batch, vec![(1, b" Xa".to_vec())], 2).unwrap();
    sink.push(frames(1, 4), Params::new(), 3).unwrap();
    assert_eq!(sink.commit().unwrap(), 8);
    assert_eq!(first_bytes(&path), [2, 2, 2, 3, 3, 3, 3, 4]);
    let bytes = fs::read(&path).unwrap();
    let with_params = bytes.windows(9).filter(|at| at == b"FRAME Xa\n");
    assert_eq!(with_params.count(), 1, "a repeated frame has none");
}

/// The first byte of each frame.
fn first_bytes(path: &Path) -> Vec<u8> {
    let mut reader = Reader::open(path).unwrap();
    let (mut frame, mut values) = (frames(1, 0), Vec::new());
    while reader.read_frame(&mut frame).unwrap() {
        values.push(frame[0]);
    }
    values
}

#[test]
fn frames_are_written_in_order_and_counted() {
    let scratch = Folder::scratch();
    let path = scratch.file("out.y4m");
    let mut sink = open(&path, 2);
    for (count, value) in [(4, 1), (4, 2), (1, 3)] {
        sink.push(frames(count, value), Params::new(), 0).unwrap();
    }
    assert!(!path.exists());
    assert_eq!(sink.commit().unwrap(), 9);

    let mut reader = Reader::open(&path).unwrap();
    assert_eq!(reader.header, header());
    let mut frame = frames(1, 0);
    let mut values = Vec::new();
    while reader.read_frame(&mut frame).unwrap() {
        assert!(frame.iter().all(|&b| b == frame[0]));
        values.push(frame[0]);
    }
    assert_eq!(values, [1, 1, 1, 1, 2, 2, 2, 2, 3]);
    assert_eq!(scratch.names(), ["out.y4m"]);
}

#[test]
fn a_sink_dropped_before_its_commit_leaves_no_file() {
    let scratch = Folder::scratch();
    let mut sink = open(&scratch.file("out.y4m"), 2);
    sink.push(frames(4, 1), Params::new(), 0).unwrap();
    drop(sink);
    assert!(scratch.names().is_empty());
}

#[test]
fn a_slow_reader_fills_the_queue_and_a_wake_says_when_there_is_room() {
    let scratch = Folder::scratch();
    let fifo = scratch.fifo("fifo");
    let reading = thread::spawn({
        let fifo = fifo.clone();
        move || File::open(fifo).unwrap()
    });
    let (tx, woken) = crossbeam_channel::unbounded();
    let mut sink = Sink::open(&fifo, &header(), options(2), Vec::new(), move || {
        let _ = tx.send(());
    })
    .unwrap();
    let mut reader = reading.join().unwrap();

    // The test does not read yet: the pipe fills up, then the queue.
    let mut pushed = 0;
    while sink.queued() < 2 {
        sink.push(frames(200, 7), Params::new(), 0).unwrap();
        pushed += 200;
    }
    while woken.try_recv().is_ok() {}

    let reading = thread::spawn(move || {
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        all.len()
    });
    woken.recv().unwrap();
    assert!(sink.queued() < 2);
    assert_eq!(sink.commit().unwrap(), pushed);
    let frame_bytes = header().frame_bytes() + b"FRAME\n".len();
    assert_eq!(
        reading.join().unwrap(),
        header().line().len() + 1 + pushed as usize * frame_bytes
    );
    assert!(fifo.exists());
}

#[test]
fn buffers_come_back() {
    let scratch = Folder::scratch();
    let mut sink = open(&scratch.file("out.y4m"), 1);
    let mut fresh = 0;
    for _ in 0..100 {
        let mut buffer = sink.buffer();
        fresh += u32::from(buffer.is_empty());
        buffer.resize(header().frame_bytes());
        sink.push(buffer, Params::new(), 0).unwrap();
    }
    // One in the queue, one being written, one here.
    assert!(fresh <= 3, "{fresh} new buffers");
    assert_eq!(sink.commit().unwrap(), 100);
}

#[test]
fn a_full_disk_is_named_and_leaves_nothing() {
    let mut sink = open(Path::new("/dev/full"), 2);
    let message = push_until_error(&mut sink).to_string();
    assert!(
        message.starts_with("/dev/full: writing failed after 0 bytes: No space left on device"),
        "{message}"
    );
    // The error was handed over; what follows goes nowhere.
    sink.push(frames(1, 1), Params::new(), 0).unwrap();

    let sink = open(Path::new("/dev/full"), 2);
    assert!(
        sink.commit()
            .unwrap_err()
            .to_string()
            .contains("No space left")
    );
}

#[test]
fn a_full_file_system_is_named_and_leaves_nothing() {
    let scratch = Folder::scratch();
    let mount = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=64k", "tmpfs"])
        .arg(scratch.path())
        .stderr(std::process::Stdio::null())
        .status();
    if !mount.is_ok_and(|status| status.success()) {
        return; // Only root may mount; `/dev/full` above covers the rest.
    }
    let path = scratch.file("out.y4m");
    let error = push_until_error(&mut open(&path, 2)).to_string();
    let names = scratch.names();
    std::process::Command::new("umount")
        .arg(scratch.path())
        .status()
        .unwrap();
    assert!(
        error.contains("out.y4m: writing failed after 65536 bytes: No space left"),
        "{error}"
    );
    assert!(names.is_empty(), "{names:?}");
}

/// A file in memory, and another handle of it.
fn in_memory(target: &Path) -> (StagedFile, File) {
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create("film", flags).unwrap());
    let again = file.try_clone().unwrap();
    (StagedFile::unnamed(file, target).unwrap(), again)
}

fn writer(file: StagedFile) -> Writer {
    Writer {
        file,
        header: header(),
        spare: bounded(1).0,
        frames: 0,
        last: None,
        repeats: false,
    }
}

#[test]
fn a_file_in_memory_is_the_same_film_whether_one_thread_writes_it_or_several() {
    let batches = || {
        (0..40).map(|n| {
            let params = vec![(0, b" Xkey=1".to_vec())];
            let params = if n % 7 == 0 { params } else { Params::new() };
            (frames(1 + n % 3, n as u8), params, 0)
        })
    };
    let film = |threads| {
        let (staged, mut file) = in_memory(Path::new("film"));
        assert!(staged.in_memory().is_some());
        let mut writer = writer(staged);
        writer.write_all(batches(), threads).unwrap();
        assert_eq!(writer.frames, (0..40).map(|n| 1 + n % 3).sum::<u64>());
        let mut film = Vec::new();
        io::Seek::rewind(&mut file).unwrap();
        file.read_to_end(&mut film).unwrap();
        film
    };
    let expected = film(1);
    assert!(expected.starts_with(header().line()));
    for threads in [THREADS_THAT_PAY, 2 * THREADS_THAT_PAY] {
        assert!(film(threads) == expected, "{threads} threads");
    }
}

#[test]
fn a_file_in_memory_that_cannot_grow_is_an_error() {
    let (staged, file) = in_memory(Path::new("film"));
    let mut writer = writer(staged);
    let batches = (0..1000).map(|n| {
        if n == 20 {
            rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::GROW).unwrap();
        }
        (frames(1, 1), Params::new(), 0)
    });
    let error = writer.write_all(batches, THREADS_THAT_PAY).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
    assert_eq!(writer.frames, 20);
}

#[test]
fn a_broken_pipe_is_named_with_its_remedy() {
    let scratch = Folder::scratch();
    let fifo = scratch.fifo("fifo");
    let reading = thread::spawn({
        let fifo = fifo.clone();
        move || {
            let mut start = [0; 10];
            File::open(fifo).unwrap().read_exact(&mut start).unwrap();
        }
    });
    let mut sink = open(&fifo, 2);
    reading.join().unwrap();
    let message = push_until_error(&mut sink).to_string();
    assert!(
        message.ends_with(
            "Broken pipe (os error 32); the program that reads it has ended; look at its messages"
        ),
        "{message}"
    );
}

#[test]
fn a_clip_without_frames_is_a_header() {
    let scratch = Folder::scratch();
    let path = scratch.file("out.y4m");
    assert_eq!(open(&path, 1).commit().unwrap(), 0);
    assert_eq!(fs::read(path).unwrap(), [header().line(), b"\n"].concat());
}

#[test]
fn a_failure_behind_a_full_queue_is_seen_by_who_waits_for_room() {
    use std::os::fd::AsRawFd;

    let (read_end, write_end) = rustix::pipe::pipe().unwrap();
    let path = format!("/proc/self/fd/{}", write_end.as_raw_fd());
    let mut sink = open(Path::new(&path), 2);
    drop(write_end);
    // Far more than a pipe holds: the thread is stuck in a write, and the queue fills up.
    while sink.has_room_beside(0) {
        sink.push(frames(400, 1), Params::new(), 0).unwrap();
        thread::sleep(std::time::Duration::from_millis(20));
    }
    drop(read_end);
    while !sink.has_room_beside(0) {
        thread::yield_now();
    }
    let error = sink
        .push(frames(1, 1), Params::new(), 0)
        .unwrap_err()
        .to_string();
    assert!(error.contains("pipe"), "{error}");
}
