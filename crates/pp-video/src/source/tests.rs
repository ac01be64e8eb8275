mod skip;

use std::io::{Cursor, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::buffer::FrameMemory;
use super::super::header::Header;
use super::super::noise::Noise;
use super::super::testing::write_frame;
use super::super::y4m::write_header;
use super::*;
use pp_kernels::{Bits, Chroma};
use pp_testing::Folder;

fn header() -> Header {
    Header::new(18, 17, Chroma::C420).unwrap()
}

/// Frame `k` of the test clip: a scene of its own for every ten frames.
fn frame(k: u64) -> Vec<u8> {
    let scene = 40 + 120 * (k / 10 % 2);
    (0..header().frame_bytes() as u64)
        .map(|i| (scene + i % 23 + k % 10) as u8)
        .collect()
}

fn clip(frames: u64) -> Vec<u8> {
    let mut out = Vec::new();
    write_header(&mut out, &header()).unwrap();
    (0..frames).for_each(|k| write_frame(&mut out, &frame(k)));
    out
}

fn start(bytes: impl Read + Send + 'static, options: SourceOptions) -> Source {
    Source::start(
        Reader::new(bytes, "clip".into()).unwrap(),
        options,
        Vec::new(),
        || {},
    )
    .unwrap()
}

fn options() -> SourceOptions {
    SourceOptions {
        frames_per_chunk: 4,
        chunks: None,
        skip: Skip::default(),
        noise: None,
        scene_cuts: false,
        queue: 4,
        threads: 1,
        late: Late::Block,
        pace: false,
    }
}

/// The next chunk, waiting for it.
fn wait(source: &mut Source) -> Result<Option<Chunk>, InputError> {
    if source.left != Some(0) && source.behind.is_none() {
        source.behind = Some(source.ready.recv().expect("an end, or an error"));
    }
    match source.poll()? {
        Polled::Ready(chunk) => Ok(Some(chunk)),
        Polled::Later => panic!("nothing is there"),
        Polled::End => Ok(None),
    }
}

/// All chunks, and the error behind them.
fn drain(source: &mut Source) -> (Vec<Chunk>, Option<InputError>) {
    let mut chunks = Vec::new();
    loop {
        match wait(source) {
            Ok(Some(chunk)) => chunks.push(chunk),
            Ok(None) => return (chunks, None),
            Err(error) => return (chunks, Some(error)),
        }
    }
}

fn lengths(chunks: &[Chunk]) -> Vec<usize> {
    chunks.iter().map(|c| c.frames).collect()
}

#[test]
fn frames_come_in_order_in_chunks_and_the_last_is_shorter() {
    let (chunks, error) = drain(&mut start(Cursor::new(clip(10)), options()));
    assert!(error.is_none());
    assert_eq!(lengths(&chunks), [4, 4, 2]);
    let all: Vec<u8> = chunks.iter().flat_map(|c| c.data().to_vec()).collect();
    assert_eq!(all, (0..10).flat_map(frame).collect::<Vec<u8>>());
    let starts: Vec<_> = chunks.iter().map(|c| (c.index, c.first_frame)).collect();
    assert_eq!(starts, [(0, 0), (1, 4), (2, 8)]);
    assert!(chunks.iter().all(|c| c.clean.is_empty() && !c.cut));
    // Each frame was read after the one before it.
    let reads: Vec<u64> = chunks
        .iter()
        .flat_map(|c| [c.read_ns.0, c.read_ns.1])
        .collect();
    assert!(reads[0] > 0 && reads.is_sorted(), "{reads:?}");
}

#[test]
fn a_limit_on_chunks_is_kept() {
    let options = SourceOptions {
        chunks: Some(2),
        ..options()
    };
    let (chunks, error) = drain(&mut start(Cursor::new(clip(100)), options));
    assert_eq!((lengths(&chunks), error.is_none()), (vec![4, 4], true));
}

#[test]
fn a_cut_begins_a_chunk_wherever_it_falls() {
    for frames_per_chunk in 1..=11 {
        let options = SourceOptions {
            frames_per_chunk,
            scene_cuts: true,
            ..options()
        };
        let (chunks, _) = drain(&mut start(Cursor::new(clip(35)), options));
        let cuts: Vec<_> = chunks
            .iter()
            .filter(|c| c.cut)
            .map(|c| c.first_frame)
            .collect();
        assert_eq!(cuts, [10, 20, 30], "{frames_per_chunk} frames a chunk");
        assert!(
            chunks
                .iter()
                .all(|c| c.first_frame / 10 == (c.first_frame + c.frames as u64 - 1) / 10)
        );
        assert!(chunks.iter().map(|c| c.index).eq(0..chunks.len() as u64));
        let all: Vec<u8> = chunks.iter().flat_map(|c| c.data().to_vec()).collect();
        assert_eq!(all, (0..35).flat_map(frame).collect::<Vec<u8>>());
    }
}

#[test]
fn an_error_comes_behind_the_whole_frames_before_it() {
    let mut bytes = clip(7);
    bytes.truncate(bytes.len() - 5);
    let (chunks, error) = drain(&mut start(Cursor::new(bytes), options()));
    assert_eq!(lengths(&chunks), [4, 2]);
    assert!(matches!(
        error,
        Some(InputError::Truncated { at, .. }) if at.frame == 6
    ));
}

#[test]
fn noise_does_not_depend_on_the_chunks_and_the_clean_frames_are_kept() {
    let noisy = |frames_per_chunk| {
        let options = SourceOptions {
            frames_per_chunk,
            noise: Some(Noise::new(20.0, 3, Bits::Eight)),
            scene_cuts: true,
            ..options()
        };
        let (chunks, _) = drain(&mut start(Cursor::new(clip(25)), options));
        let clean: Vec<u8> = chunks
            .iter()
            .flat_map(|c| c.clean[..c.data().len()].to_vec())
            .collect();
        assert_eq!(clean, (0..25).flat_map(frame).collect::<Vec<u8>>());
        chunks
            .iter()
            .flat_map(|c| c.data().to_vec())
            .collect::<Vec<u8>>()
    };
    let expected = noisy(1);
    assert_ne!(expected, (0..25).flat_map(frame).collect::<Vec<u8>>());
    for frames_per_chunk in [2, 3, 4, 25] {
        assert_eq!(noisy(frames_per_chunk), expected);
    }
}

#[test]
fn recycled_buffers_are_used_again() {
    let mut source = start(
        Cursor::new(clip(400)),
        SourceOptions {
            queue: 2,
            ..options()
        },
    );
    let mut seen = std::collections::HashSet::new();
    while let Some(chunk) = wait(&mut source).unwrap() {
        seen.insert(chunk.data().as_ptr() as usize);
        source.recycle(chunk);
    }
    // The queue, the one being read, the one here, and one that was asked for just before it came back.
    assert!(seen.len() <= 5, "{} buffers for 100 chunks", seen.len());
}

#[test]
fn the_reader_is_at_most_the_queue_ahead() {
    let (counted, bytes_read) = Counted::new(clip(1_000));
    let mut source = start(
        counted,
        SourceOptions {
            queue: 3,
            ..options()
        },
    );
    while source.queued() < 3 {
        thread::yield_now();
    }
    // Three chunks queued, one in the hand, and what the file buffer holds.
    let ahead = bytes_read.load(Ordering::Relaxed);
    assert!(
        ahead <= 16 * (header().frame_bytes() + 6) + (256 << 10) + 100,
        "{ahead} bytes"
    );
    assert_eq!(drain(&mut source).0.len(), 250);
}

#[test]
fn each_chunk_and_the_end_wake_the_driver() {
    let (tx, woken) = crossbeam_channel::unbounded();
    // With room for one chunk a forgotten wake leaves both sides waiting.
    let options = SourceOptions {
        queue: 1,
        ..options()
    };
    let reader = Reader::new(Cursor::new(clip(9)), "clip".into()).unwrap();
    let mut source =
        Source::start(reader, options, Vec::new(), move || tx.send(()).unwrap()).unwrap();
    let mut chunks = 0;
    loop {
        match source.poll().unwrap() {
            Polled::Ready(_) => chunks += 1,
            Polled::Later => woken.recv().unwrap(),
            Polled::End => break,
        }
    }
    assert_eq!(chunks, 3);
}

#[test]
fn a_drop_does_not_wait_for_a_silent_pipe() {
    let (silent, _open) = std::io::pipe().unwrap();
    let mut source = start(Cursor::new(clip(4)).chain(silent), options());
    wait(&mut source).unwrap().unwrap();
    drop(source);
}

struct Counted(Cursor<Vec<u8>>, Arc<std::sync::atomic::AtomicUsize>);

impl Counted {
    fn new(bytes: Vec<u8>) -> (Self, Arc<std::sync::atomic::AtomicUsize>) {
        let count = Arc::default();
        (Self(Cursor::new(bytes), Arc::clone(&count)), count)
    }
}

impl Read for Counted {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = self.0.read(buf)?;
        self.1.fetch_add(n, Ordering::Relaxed);
        Ok(n)
    }
}

#[test]
fn a_reader_that_panics_is_an_error_and_no_end() {
    struct Panics(usize);
    impl Read for Panics {
        fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
            let whole = clip(2);
            assert!(self.0 < whole.len(), "the input is gone");
            let n = to.len().min(whole.len() - self.0);
            to[..n].copy_from_slice(&whole[self.0..self.0 + n]);
            self.0 += n;
            Ok(n)
        }
    }
    let mut source = start(Panics(0), options());
    let end = loop {
        match source.poll() {
            Ok(Polled::Ready(_)) => {}
            Ok(Polled::Later) => thread::yield_now(),
            Ok(Polled::End) => panic!("half a video passed for a whole one"),
            Err(error) => break error,
        }
    };
    assert!(matches!(end, InputError::ReaderDied), "{end}");
}

/// What a driver sees of a chunk.
fn seen(chunk: &Chunk) -> impl PartialEq + std::fmt::Debug + use<> {
    let clean = Some(&chunk.clean)
        .filter(|c| !c.is_empty())
        .map(|c| c[..chunk.data().len()].to_vec());
    let place = (chunk.index, chunk.first_frame, chunk.frames, chunk.cut);
    (place, chunk.data().to_vec(), clean, chunk.params.clone())
}

#[test]
fn a_file_gives_what_a_pipe_gives_however_many_threads_read_it() {
    let scratch = Folder::scratch();
    let path = scratch.file("in.y4m");
    let whole = clip(43);
    let stride = header().frame_bytes() + 6;
    let first = whole.len() - 43 * stride;
    let mut with_params = whole.clone();
    let at = first + 29 * stride + 5;
    with_params.splice(at..at, *b" Xkey=1");
    let mut without_marker = whole.clone();
    without_marker[first + 33 * stride] = b'X';
    let cases = [
        ("whole", &whole[..]),
        ("one frame", &whole[..first + stride]),
        ("no frame", &whole[..first]),
        ("cut in a frame", &whole[..first + 21 * stride + 99]),
        ("cut in a marker", &whole[..first + 12 * stride + 3]),
        ("parameters", &with_params),
        ("no marker", &without_marker),
    ];
    for (name, bytes) in cases {
        std::fs::write(&path, bytes).unwrap();
        for (frames_per_chunk, chunks) in
            [(1, None), (3, None), (4, Some(6)), (10, None), (50, None)]
        {
            for scene_cuts in [false, true] {
                let read = |reader: Reader, threads| {
                    let options = SourceOptions {
                        frames_per_chunk,
                        chunks,
                        noise: Some(Noise::new(9.0, 1, Bits::Eight)),
                        scene_cuts,
                        threads,
                        ..options()
                    };
                    let mut source = Source::start(reader, options, Vec::new(), || {}).unwrap();
                    let (chunks, error) = drain(&mut source);
                    let error =
                        error.map(|e| e.to_string().replace(path.to_str().unwrap(), "clip"));
                    (chunks.iter().map(seen).collect::<Vec<_>>(), error)
                };
                let pipe = Reader::new(Cursor::new(bytes.to_vec()), "clip".into()).unwrap();
                let expected = read(pipe, 1);
                for threads in [1, 2, 5] {
                    let got = read(Reader::open(&path).unwrap(), threads);
                    assert!(
                        got == expected,
                        "{name}: {frames_per_chunk} frames a chunk, {threads} threads, cuts {scene_cuts}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_file_that_was_begun_is_read_from_there() {
    let scratch = Folder::scratch();
    let path = scratch.file("in.y4m");
    std::fs::write(&path, [b"something else".to_vec(), clip(9)].concat()).unwrap();
    let mut file = std::fs::File::open(&path).unwrap();
    io::Seek::seek(&mut file, io::SeekFrom::Start(14)).unwrap();
    let reader = Reader::of(file, "clip".into()).unwrap();
    assert_eq!(reader.plain_frames().unwrap().count(), Some(9));
    let mut source = Source::start(reader, options(), Vec::new(), || {}).unwrap();
    let (chunks, error) = drain(&mut source);
    assert!(error.is_none());
    let all: Vec<u8> = chunks.iter().flat_map(|c| c.data().to_vec()).collect();
    assert_eq!(all, (0..9).flat_map(frame).collect::<Vec<u8>>());
}

/// Memory of a device that says when it is done with it.
struct Shared {
    bytes: Vec<u8>,
    is_idle: Arc<AtomicBool>,
}

impl FrameMemory for Shared {
    fn bytes(&self) -> &[u8] {
        &self.bytes
    }
    fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(
            self.is_idle.load(Ordering::Acquire),
            "written while it is read"
        );
        &mut self.bytes
    }
    fn is_idle(&self) -> bool {
        self.is_idle.load(Ordering::Acquire)
    }
}

#[test]
fn memory_that_a_device_still_reads_is_not_read_into() {
    let is_idle = Arc::new(AtomicBool::new(true));
    let memory: Box<dyn FrameMemory> = Box::new(Shared {
        bytes: vec![0; 4 * header().frame_bytes()],
        is_idle: Arc::clone(&is_idle),
    });
    let reader = Reader::new(Cursor::new(clip(80)), "clip".into()).unwrap();
    let options = SourceOptions {
        queue: 1,
        ..options()
    };
    let mut source = Source::start(reader, options, vec![memory.into()], || {}).unwrap();
    let is_shared = |chunk: &Chunk| chunk.memory().given::<Shared>().is_some();
    let first = wait(&mut source).unwrap().unwrap();
    assert!(is_shared(&first));
    is_idle.store(false, Ordering::Release);
    source.recycle(first);
    for _ in 0..6 {
        assert!(!is_shared(&wait(&mut source).unwrap().unwrap()));
    }
    is_idle.store(true, Ordering::Release);
    let (rest, _) = drain(&mut source);
    assert!(rest.iter().any(is_shared), "lost");
}

/// A source in which late chunks make room, of a pipe, and the pipe; `frames` of the clip are in it.
fn live(frames: u64, options: SourceOptions) -> (Source, std::io::PipeWriter) {
    let (out, mut into) = std::io::pipe().unwrap();
    io::Write::write_all(&mut into, &clip(frames)).unwrap();
    let options = SourceOptions {
        late: Late::Drop,
        queue: 3,
        ..options
    };
    (start(out, options), into)
}

/// Waits until so many chunks have made room.
fn lose(source: &Source, chunks: u64) {
    while source.lost.0.load(Ordering::Acquire) < chunks {
        thread::yield_now();
    }
}

/// First frame, frames missing before it, and whether there is a cut.
fn gaps(chunks: &[Chunk]) -> Vec<(u64, u64, bool)> {
    let of = |chunk: &Chunk| (chunk.first_frame, chunk.skipped, chunk.cut);
    chunks.iter().map(of).collect()
}

#[test]
fn the_newest_chunks_are_kept_and_say_what_is_missing() {
    let options = SourceOptions {
        scene_cuts: true,
        ..options()
    };
    // 4, 4 and 2 frames in each scene.
    let (mut source, into) = live(60, options);
    drop(into);
    lose(&source, 15);
    let (chunks, error) = drain(&mut source);
    assert!(error.is_none());
    assert_eq!(
        gaps(&chunks),
        [(50, 50, true), (54, 0, false), (58, 0, false)]
    );
    assert_eq!(
        chunks[0].data()[..],
        (50..54).flat_map(frame).collect::<Vec<u8>>()
    );
}

#[test]
fn late_chunks_are_skipped_and_the_last_that_waits_never_is() {
    let options = SourceOptions {
        scene_cuts: true,
        chunks: Some(2),
        ..options()
    };
    let (mut source, mut into) = live(4, options);
    let mut chunk = wait(&mut source).unwrap().unwrap();
    (4..14).for_each(|k| write_frame(&mut into, &frame(k)));
    while source.queued() < 3 {
        thread::yield_now();
    }
    let stamp = chunk.read_ns.0;
    assert!(!source.drop_late(&mut chunk, stamp), "it is not late");
    assert!(source.drop_late(&mut chunk, stamp + 1));
    assert_eq!(gaps(std::slice::from_ref(&chunk)), [(4, 4, false)]);
    while source.drop_late(&mut chunk, u64::MAX) {}
    assert_eq!(gaps(std::slice::from_ref(&chunk)), [(10, 10, true)]);
    // It counts as one of two.
    (14..18).for_each(|k| write_frame(&mut into, &frame(k)));
    drop(into);
    let (rest, _) = drain(&mut source);
    assert_eq!(gaps(&rest), [(14, 0, false)]);
}

#[test]
fn a_chunk_in_the_hand_is_dropped_before_younger_ones() {
    for scene_cuts in [false, true] {
        let options = SourceOptions {
            scene_cuts,
            ..options()
        };
        let (mut source, mut into) = live(4, options);
        let mut chunk = wait(&mut source).unwrap().unwrap();
        (4..40).for_each(|k| write_frame(&mut into, &frame(k)));
        drop(into);
        lose(&source, if scene_cuts { 8 } else { 6 });
        source.catch_up(&mut chunk, |old, new| old.cut == new.cut);
        let mut chunks = vec![chunk];
        chunks.extend(drain(&mut source).0);
        let expected: &[_] = match scene_cuts {
            false => &[(28, 28, false), (32, 0, false), (36, 0, false)],
            // That there is a cut was not known when it was offered.
            true => &[
                (0, 0, false),
                (30, 26, true),
                (34, 0, false),
                (38, 0, false),
            ],
        };
        assert_eq!(gaps(&chunks), expected);
    }
}

#[test]
fn a_reader_that_waits_for_nobody_ends_with_the_driver() {
    let (source, mut into) = live(4, options());
    let weak = Arc::downgrade(&source.lost.0);
    drop(source);
    let framed = |k| [&b"FRAME\n"[..], &frame(k)].concat();
    let mut more = (4..).map(|k| io::Write::write_all(&mut into, &framed(k)));
    // It ends at a full queue, and with it the pipe.
    assert!(more.any(|written| written.is_err()));
    assert_eq!(weak.strong_count(), 0);
}

#[test]
fn a_paced_file_is_there_at_the_rate_of_its_header() {
    let scratch = Folder::scratch();
    let path = scratch.file("in.y4m");
    let text = b"YUV4MPEG2 W18 H17 F5000:3\n";
    let frames = &clip(10)[clip(0).len()..];
    std::fs::write(&path, [text, frames].concat()).unwrap();
    for late in [Late::Block, Late::Drop] {
        let options = SourceOptions {
            late,
            pace: true,
            queue: 9,
            ..options()
        };
        let reader = Reader::open(&path).unwrap();
        let mut source = Source::start(reader, options, Vec::new(), || {}).unwrap();
        let (chunks, _) = drain(&mut source);
        let start = chunks[0].read_ns.0;
        let ms = |ns: u64| (ns - start) / 100_000;
        let at: Vec<_> = chunks
            .iter()
            .map(|c| (ms(c.read_ns.0), ms(c.read_ns.1)))
            .collect();
        assert_eq!(at, [(0, 18), (24, 42), (48, 54)], "tenths of a millisecond");
        assert!(
            now_ns() >= start + 5_400_000,
            "they were read before they were there"
        );
    }
}
