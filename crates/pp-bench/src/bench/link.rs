//! `pp bench link`: what the edges between two ranks carry, as the runtime sees it.
//!
//! One run of the drivers with stages that do nothing: for each size a burst of chunks that
//! travel one way and are answered by a header alone, then chunks one at a time that come back
//! with as many bytes. A cut before each keeps them apart: nothing is admitted before all before
//! it was emitted.

use std::convert::Infallible;
use std::fmt::Debug;

use pp_command::env::Env;
use pp_command::{TransportChoice, backend, print_result};
use pp_contract::{ChunkIndex, Manifest, Rank};
use pp_job::{Config, Error, Finished, Job, Opened, Profile, Program};
use pp_runtime::core::Cut;
use pp_runtime::report::{ChunkRecord, FAR, are_far_apart};
use pp_runtime::stage::{
    Built, Chunk, Done, Offer, Place, Progress, Sink, Source, Stage, StageResult, Taken, Worked,
};
use pp_transport::edge::Edges;
use pp_transport::host::Host;
use serde::Serialize;

use super::plan::{BenchPlan, SOURCE, payload};
use crate::args::LinkArgs;

/// Payload sizes: a word, a page, small, middle, the activations of a video model, and large.
const SIZES: [u64; 7] = [4, 4096, 65_536, 1 << 20, 22_118_400, 64 << 20, 1 << 30];
/// Above this a message takes so long that a few are enough.
const LARGE_BYTES: u64 = 32 << 20;
/// There and back.
const PIPELINE: &str = "s0@0 -> s1@1 -> s2@0";

/// Which way a chunk's bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// To rank 1, as many in flight as the depth allows.
    One,
    /// There and back, one at a time.
    Round,
}

/// Chunks of one size that go one way.
#[derive(Clone, Copy, Debug)]
struct Burst {
    bytes: u64,
    way: Way,
    chunks: u64,
}

fn bursts(max_bytes: u64) -> Vec<Burst> {
    let sizes = SIZES.into_iter().filter(|bytes| *bytes <= max_bytes);
    let burst = |bytes, way| Burst {
        bytes,
        way,
        chunks: match way {
            Way::One if bytes <= LARGE_BYTES => 600,
            Way::One => 60,
            Way::Round if bytes <= LARGE_BYTES => 300,
            Way::Round => 30,
        },
    };
    sizes
        .flat_map(|bytes| [burst(bytes, Way::One), burst(bytes, Way::Round)])
        .collect()
}

/// What one size gave.
#[derive(Default, Serialize)]
struct Figure {
    bytes: u64,
    /// Median distance of two messages of a burst one way.
    one_way_us: Option<f64>,
    /// Its mean.
    one_way_mean_us: Option<f64>,
    /// Bytes over the median; none where payloads are handed over, since no byte moves.
    one_way_gbytes_per_s: Option<f64>,
    /// Median time from the beginning of a send to the arrival of as many bytes back.
    round_trip_us: Option<f64>,
    round_trip_p90_us: Option<f64>,
    /// Median time that the sender's thread spent in a send.
    send_us: Option<f64>,
    send_p99_us: Option<f64>,
}

#[derive(Serialize)]
struct LinkReport {
    transport: &'static str,
    /// Whether NCCL's communicators block the thread that calls them.
    blocking: bool,
    /// Whether payloads move. In shared memory they are handed over.
    payload_moves: bool,
    depth: u32,
    figures: Vec<Figure>,
}

/// Runs the whole job, or this process's rank of it.
pub(crate) fn link(args: &LinkArgs, env: &Env) -> Result<(), Error> {
    if args.non_blocking && args.transport == TransportChoice::Host {
        let what = "--non-blocking is about NCCL; use it with --transport nccl";
        return Err(Error::Usage(what.into()));
    }
    backend::check_transport(args.transport, &args.devices)?;
    let bursts = || bursts(args.max_bytes);
    let bytes = bursts().iter().map(|b| b.bytes).max().unwrap_or(0);
    let pipeline = PIPELINE.parse()?;
    let config = Config::from_env(env.lookup())?;
    let job = Job::new(&config, &pipeline)
        .depth(args.depth)
        .devices(&args.devices);
    job.run(|rank| {
        let (backend, choice) = backend::choose_transport(args.transport, rank, env)?;
        if rank.rank() == Rank::new(0) {
            backend::say(choice.as_deref());
        }
        let mut profile = Profile::new()
            .set("max_bytes", args.max_bytes)
            .set("blocking", !args.non_blocking);
        profile.chunks = Some(bursts().iter().map(|b| b.chunks).sum());
        profile.choice = choice;
        let payload_moves = matches!(backend, backend::Backend::Gpu(_));
        let finish = |finished: Finished| {
            let recorder = &finished.summary.recorder;
            let records: Vec<&ChunkRecord> = recorder.records().collect();
            let report = LinkReport {
                transport: finished.summary.transport,
                blocking: !args.non_blocking,
                payload_moves,
                depth: args.depth,
                figures: figures(&bursts(), &records, payload_moves),
            };
            print_result(&report, args.json)
        };
        match backend {
            backend::Backend::Host => rank.run(Host, profile, program(bursts(), bytes, finish)),
            backend::Backend::Gpu(mut gpu) => {
                gpu.blocking = !args.non_blocking;
                rank.run(*gpu, profile, program(bursts(), bytes, finish))
            }
        }
    })
}

/// The same for every backend: no stage looks into a slot.
fn program<'p, B: Edges>(
    bursts: Vec<Burst>,
    bytes: u64,
    finish: impl FnOnce(Finished) -> Result<(), Error> + 'p,
) -> Program<'p, B, Sweep, ()> {
    Program::new(SOURCE, |_| Ok(Opened::new(Sweep::new(bursts)?)))
        .payloads(move |_, ()| bytes)
        .stage("s1", |_, ()| Ok(Echo))
        .sink("s2", |(), _| Ok(Nothing))
        .finish(|_, finished| finish(finished))
}

/// Offers the bursts, chunk by chunk.
struct Sweep {
    bursts: Vec<(Burst, Manifest)>,
    /// The burst, and the chunk of it, that comes next.
    next: (usize, u64),
    in_flight: u64,
}

impl Sweep {
    fn new(bursts: Vec<Burst>) -> Result<Self, Error> {
        let with_manifest = |burst: Burst| Ok((burst, payload(burst.bytes)?));
        let bursts: Result<_, pp_contract::ManifestError> =
            bursts.into_iter().map(with_manifest).collect();
        Ok(Self {
            bursts: bursts.map_err(anyhow::Error::new)?,
            next: (0, 0),
            in_flight: 0,
        })
    }
}

impl<Tx> Source<Tx> for Sweep {
    type Plan = BenchPlan;
    type Carry = ();

    fn poll(&mut self) -> StageResult<Offer> {
        let Some((burst, _)) = self.bursts.get(self.next.0) else {
            return Ok(Offer::End);
        };
        // A burst begins on an empty pipeline, and a round trip is measured alone.
        let alone = burst.way == Way::Round || self.next.1 == 0;
        Ok(match alone && self.in_flight > 0 {
            true => Offer::Later,
            false => Offer::Chunk(Cut::None),
        })
    }

    fn build(&mut self, place: Place, _: &mut Tx) -> StageResult<Built<BenchPlan, ()>> {
        let (burst, manifest) = &self.bursts[self.next.0];
        let plan = BenchPlan {
            chunk: place.chunk.get(),
            hands_on: burst.way == Way::Round,
        };
        let built = Built::new(plan, manifest.clone(), ());
        self.in_flight += 1;
        self.next.1 += 1;
        if self.next.1 == burst.chunks {
            self.next = (self.next.0 + 1, 0);
        }
        Ok(built)
    }

    fn accepted(&mut self, _: ChunkIndex, (): (), _: Option<&[u8]>) -> StageResult<Option<u64>> {
        self.in_flight -= 1;
        Ok(None)
    }

    fn queued(&self) -> u32 {
        1
    }
}

/// Hands on at once, with whatever lies in the slot.
struct Echo;

impl<Tx: Debug, Rx> Stage<Tx, Rx> for Echo {
    type Plan = BenchPlan;
    type Kept = Infallible;

    fn run(
        &mut self,
        chunk: Chunk<'_, BenchPlan>,
        _: Option<&Rx>,
        _: &mut Tx,
    ) -> StageResult<Progress<Done, Infallible>> {
        let message = chunk.message;
        let tensors = match message.plan().hands_on {
            true => message.tensors().clone(),
            false => Manifest::empty(),
        };
        let report = Taken {
            worked: Some(Worked {
                work_ns: 0,
                idle_ns: 0,
            }),
            ..Taken::of(message.plan(), 1)
        };
        Ok(Progress::Done(Done { tensors, report }))
    }
}

/// A sink that does nothing.
struct Nothing;

impl<Rx> Sink<Rx> for Nothing {
    type Plan = BenchPlan;
    type Kept = Infallible;

    fn take(
        &mut self,
        chunk: Chunk<'_, BenchPlan>,
        _: Option<&Rx>,
    ) -> StageResult<Progress<Taken, Infallible>> {
        Ok(Progress::Done(Taken::of(chunk.message.plan(), 1)))
    }
}

/// The figures of each size; the first quarter of every burst warms up.
fn figures(bursts: &[Burst], records: &[&ChunkRecord], payload_moves: bool) -> Vec<Figure> {
    let mut figures: Vec<Figure> = Vec::new();
    let mut at = 0;
    for burst in bursts {
        let end = (at + burst.chunks as usize).min(records.len());
        let measured = &records[(at + burst.chunks as usize / 4).min(end)..end];
        at = end;
        match burst.way {
            Way::One => {
                let periods = measured
                    .windows(2)
                    .map(|pair| pair[1].accepted_ns.saturating_sub(pair[0].accepted_ns));
                let periods: Vec<u64> = periods.collect();
                let sum: u64 = periods.iter().sum();
                let mean = sum as f64 / 1e3 / periods.len().max(1) as f64;
                let one_way_mean_us = (!periods.is_empty()).then_some(mean);
                let one_way_us = quantile(periods, 0.5);
                let moved_in_us = one_way_us.filter(|us| *us > 0.0 && payload_moves);
                let sends = || {
                    let send = |r: &&ChunkRecord| r.sent_ns.saturating_sub(r.build_end_ns);
                    measured.iter().map(send).collect()
                };
                figures.push(Figure {
                    bytes: burst.bytes,
                    one_way_us,
                    one_way_mean_us,
                    one_way_gbytes_per_s: moved_in_us.map(|us| burst.bytes as f64 / us / 1e3),
                    send_us: quantile(sends(), 0.5),
                    send_p99_us: quantile(sends(), 0.99),
                    ..Figure::default()
                });
            }
            Way::Round => {
                let trips = || {
                    let trip = |r: &&ChunkRecord| r.accepted_ns.saturating_sub(r.build_start_ns);
                    measured.iter().map(trip).collect()
                };
                if let Some(figure) = figures.last_mut() {
                    figure.round_trip_us = quantile(trips(), 0.5);
                    figure.round_trip_p90_us = quantile(trips(), 0.9);
                }
            }
        }
    }
    figures
}

/// In microseconds.
fn quantile(mut ns: Vec<u64>, share: f64) -> Option<f64> {
    ns.sort_unstable();
    let at = (ns.len() as f64 * share) as usize;
    let ns = ns.get(at.min(ns.len().saturating_sub(1)))?;
    Some(*ns as f64 / 1e3)
}

impl std::fmt::Display for LinkReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "transport {}, depth {}", self.transport, self.depth)?;
        let messages = "messages, with headers, credits and drivers:";
        writeln!(f, "{:>12} {messages}", "")?;
        let columns = [
            "one way µs",
            "mean µs",
            "GB/s",
            "round trip µs",
            "its p90 µs",
            "send µs",
        ];
        write_row(f, "bytes", columns.map(Cell::Text))?;
        for figure in &self.figures {
            let rate = match self.payload_moves {
                true => Cell::Figure(figure.one_way_gbytes_per_s),
                false => Cell::Text("handed over"),
            };
            let mean = match figure.one_way_us.zip(figure.one_way_mean_us) {
                Some((median, mean)) if are_far_apart(median, mean) => Cell::Far(mean),
                _ => Cell::Figure(figure.one_way_mean_us),
            };
            let cells = [
                Cell::Figure(figure.one_way_us),
                mean,
                rate,
                Cell::Figure(figure.round_trip_us),
                Cell::Figure(figure.round_trip_p90_us),
                Cell::Figure(figure.send_us),
            ];
            write_row(f, figure.bytes, cells)?;
        }
        writeln!(
            f,
            "{:>12} ! the mean differs by more than {:.0} % from the median",
            "",
            100.0 * FAR
        )
    }
}

/// What stands in a column.
enum Cell {
    Text(&'static str),
    Figure(Option<f64>),
    /// A mean that is far from the median beside it.
    Far(f64),
}

fn write_row(
    f: &mut std::fmt::Formatter<'_>,
    bytes: impl std::fmt::Display,
    cells: [Cell; 6],
) -> std::fmt::Result {
    write!(f, "{bytes:>12}")?;
    for cell in cells {
        match cell {
            Cell::Text(text) => write!(f, " {text:>13}")?,
            Cell::Figure(Some(figure)) => write!(f, " {figure:>13.2}")?,
            Cell::Figure(None) => write!(f, " {:>13}", "n/a")?,
            Cell::Far(mean) => write!(f, " {mean:>12.2}!")?,
        }
    }
    writeln!(f)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_come_from_the_records_of_their_own_burst() {
        let bursts = [
            Burst {
                bytes: 4,
                way: Way::One,
                chunks: 4,
            },
            Burst {
                bytes: 4,
                way: Way::Round,
                chunks: 4,
            },
            Burst {
                bytes: 9,
                way: Way::One,
                chunks: 4,
            },
            Burst {
                bytes: 9,
                way: Way::Round,
                chunks: 4,
            },
        ];
        let record = |build_start_ns, accepted_ns| ChunkRecord {
            build_start_ns,
            accepted_ns,
            ..ChunkRecord::default()
        };
        let mut records = Vec::new();
        for scale in [1_000, 3_000] {
            records.extend((0..4).map(|k| record(0, k * scale)));
            records.extend((0..4).map(|k| record(k * 100_000, k * 100_000 + 7 * scale)));
        }
        let records: Vec<_> = records.iter().collect();
        let figures = |moves| figures(&bursts, &records, moves);
        let seen: Vec<_> = figures(true)
            .iter()
            .map(|f| (f.bytes, f.one_way_us, f.round_trip_us))
            .collect();
        assert_eq!(
            seen,
            [(4, Some(1.0), Some(7.0)), (9, Some(3.0), Some(21.0))]
        );
        // No byte moves where payloads are handed over, however long that took.
        let rates = |moves| [0, 1].map(|at| figures(moves)[at].one_way_gbytes_per_s);
        assert_eq!(rates(true), [Some(0.004), Some(0.003)]);
        assert_eq!(rates(false), [None, None]);
    }

    #[test]
    fn a_burst_that_was_cut_short_has_no_figures_and_no_nan() {
        let bursts = bursts(4);
        let report = LinkReport {
            transport: "host",
            blocking: true,
            payload_moves: false,
            depth: 4,
            figures: figures(&bursts, &[], false),
        };
        let text = report.to_string();
        let row = text.lines().nth(3).unwrap();
        let words: Vec<_> = row.split_whitespace().collect();
        assert_eq!(
            words,
            ["4", "n/a", "n/a", "handed", "over", "n/a", "n/a", "n/a"]
        );
    }

    #[test]
    fn no_size_is_above_the_largest_that_was_asked_for() {
        assert!(bursts(65_536).iter().all(|b| b.bytes <= 65_536));
        assert!(bursts(1).is_empty());
    }
}
