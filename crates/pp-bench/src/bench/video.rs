//! `pp bench video`: how fast the source reads a clip and the sink writes one, without stages between them.

use std::path::Path;
use std::time::Instant;

use crossbeam_channel::bounded;
use pp_command::print_result;
use pp_runtime::core::Late;
use pp_video::buffer::Buffer;
use pp_video::header::Header;
use pp_video::sink::{Sink, SinkOptions};
use pp_video::source::{Chunk, Polled, Skip, Source, SourceOptions};
use pp_video::y4m::Reader;
use pp_video::{InputError, QUEUE, io_threads};
use serde::Serialize;

use crate::args::VideoArgs;
use pp_job::Error;
use pp_job::output::one_file_each;

/// Rates of one side over all runs, in GB/s of frames.
#[derive(Serialize)]
struct Rates {
    median: f64,
    mean: f64,
    worst: f64,
}

/// The result of `pp bench video`.
#[derive(Serialize)]
struct VideoReport {
    width: u32,
    height: u32,
    frames: u64,
    frame_bytes: usize,
    frames_per_chunk: u32,
    threads: usize,
    runs: u32,
    source_gbytes_per_s: Option<Rates>,
    /// From the first frame to the name of the file, its sync included. None without `--output`.
    sink_gbytes_per_s: Option<Rates>,
}

/// One whole reading of the clip.
struct Read {
    header: Header,
    frames: u64,
    seconds: f64,
    /// Any chunk of it.
    sample: Vec<u8>,
}

/// Measures and prints.
pub(crate) fn video(args: &VideoArgs) -> Result<(), Error> {
    let output = args.output.as_deref();
    one_file_each(&[("--input", Some(&args.input))], &[("--output", output)])?;
    if *args.input == *Path::new("-") || output == Some(Path::new("-")) {
        let why = "pp bench video measures files; give --input and --output names";
        return Err(Error::Usage(why.into()));
    }
    let (mut reads, mut writes) = (Vec::new(), Vec::new());
    let mut last = None;
    for _ in 0..args.runs {
        let read = read(args)?;
        reads.push(rate(&read, read.seconds));
        if let Some(target) = output {
            writes.push(rate(&read, write(args, target, &read)?));
        }
        last = Some(read);
    }
    let Some(Read { header, frames, .. }) = last else {
        return Ok(());
    };
    let report = VideoReport {
        width: header.width(),
        height: header.height(),
        frames,
        frame_bytes: header.frame_bytes(),
        frames_per_chunk: args.frames_per_chunk,
        threads: io_threads(),
        runs: args.runs,
        source_gbytes_per_s: rates(reads),
        sink_gbytes_per_s: rates(writes),
    };
    print_result(&report, args.json)
}

fn rate(read: &Read, seconds: f64) -> f64 {
    read.frames as f64 * read.header.frame_bytes() as f64 / seconds.max(1e-9) / 1e9
}

fn rates(mut rates: Vec<f64>) -> Option<Rates> {
    rates.sort_by(f64::total_cmp);
    Some(Rates {
        worst: *rates.first()?,
        median: *rates.get(rates.len() / 2)?,
        mean: rates.iter().sum::<f64>() / rates.len() as f64,
    })
}

/// Reads the clip to its end, as `pp run` does: it looks for cuts, and adds no noise.
fn read(args: &VideoArgs) -> Result<Read, Error> {
    let reader = Reader::open(&args.input)?;
    let header = reader.header.clone();
    let options = SourceOptions {
        frames_per_chunk: args.frames_per_chunk as usize,
        chunks: None,
        skip: Skip::default(),
        noise: None,
        scene_cuts: true,
        queue: QUEUE,
        threads: io_threads(),
        late: Late::Block,
        pace: false,
    };
    let (ring, rung) = bounded(1);
    let chunk = vec![0; args.frames_per_chunk as usize * header.frame_bytes()];
    let buffers = (0..QUEUE + 3 + io_threads()).map(|_| touched(&chunk));
    let buffers = buffers.collect();
    let start = Instant::now();
    let wake = move || {
        // Full: the look that it asks for is still to come.
        let _ = ring.try_send(());
    };
    let mut source = Source::start(reader, options, buffers, wake)
        .map_err(|e| anyhow::Error::new(e).context("cannot start the reading threads"))?;
    let (mut frames, mut sample) = (0, Vec::new());
    while let Some(chunk) = next(&mut source, &rung)? {
        frames += chunk.frames as u64;
        if sample.len() < chunk.data().len() {
            sample = chunk.data().to_vec();
        }
        source.recycle(chunk);
    }
    Ok(Read {
        header,
        frames,
        seconds: start.elapsed().as_secs_f64(),
        sample,
    })
}

fn next(
    source: &mut Source,
    rung: &crossbeam_channel::Receiver<()>,
) -> Result<Option<Chunk>, InputError> {
    loop {
        match source.poll()? {
            Polled::Ready(chunk) => return Ok(Some(chunk)),
            Polled::End => return Ok(None),
            Polled::Later => {
                // Without a sender the threads have ended, which the next look finds.
                let _ = rung.recv();
            }
        }
    }
}

/// Writes as many frames, in chunks as large, and says how long that took.
fn write(args: &VideoArgs, target: &Path, read: &Read) -> Result<f64, Error> {
    let Read { header, sample, .. } = read;
    let options = SinkOptions {
        queue: QUEUE,
        threads: io_threads(),
        keep: None,
        repeats: false,
    };
    let buffers = (0..QUEUE + 2 + 2 * io_threads()).map(|_| touched(sample));
    let buffers = buffers.collect();
    let start = Instant::now();
    let mut sink = Sink::open(target, header, options, buffers, || {})?;
    let mut left = read.frames;
    while left > 0 {
        let frames = left.min(u64::from(args.frames_per_chunk));
        let mut buffer = sink.buffer();
        buffer.resize(frames as usize * header.frame_bytes());
        sink.push(buffer, Vec::new(), 0)?;
        left -= frames;
    }
    sink.commit()?;
    Ok(start.elapsed().as_secs_f64())
}

/// A buffer with these bytes, whose pages exist.
fn touched(bytes: &[u8]) -> Buffer {
    let mut buffer = Buffer::default();
    buffer.resize(bytes.len());
    buffer.copy_from_slice(bytes);
    buffer
}

impl std::fmt::Display for VideoReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "{} frames of {}x{}, {} frames a chunk, {} threads each way, {} runs",
            self.frames, self.width, self.height, self.frames_per_chunk, self.threads, self.runs
        )?;
        let sides = [
            ("source", &self.source_gbytes_per_s),
            ("sink", &self.sink_gbytes_per_s),
        ];
        for (side, rates) in sides {
            if let Some(rates) = rates {
                writeln!(
                    f,
                    "{side:>8} {:.2} GB/s (median; mean {:.2}, worst {:.2})",
                    rates.median, rates.mean, rates.worst
                )?;
            }
        }
        Ok(())
    }
}
