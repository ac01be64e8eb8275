//! All ranks of a pipeline in one process.

use pp_contract::pipeline::EdgeKind;
use pp_contract::{Fault, FaultKind, Rank};
use pp_runtime::core::Order;
use pp_runtime::driver::{Driven, RankOptions, RankRun, Stages, Summary};
use pp_runtime::schedule::Runnable;
use pp_runtime::stage::Source;
use pp_runtime::switch::Switch;
use pp_transport::backend::{Backend as _, End};
use pp_transport::bell::Bell;
use pp_transport::edge::Capabilities;
use pp_transport::host::{EdgeShape, Host, HostGroup, HostLocal, RxLease, TxLease};

use crate::edge;

/// What a rank gets for one generation of edges.
#[derive(Debug)]
pub struct Seat {
    /// The switch of the rank.
    pub switch: Switch,
    /// Its ends of the edges, with their numbers.
    pub ends: Vec<(usize, End<Host>)>,
}

/// Options for this pipeline over shared memory, without restarts.
///
/// # Panics
/// If this is no pipeline.
pub fn options(pipeline: &str, depth: u32) -> RankOptions {
    let pipeline = pipeline.parse().expect("a pipeline");
    RankOptions::new(pipeline, depth, capabilities())
}

/// What the host backend says of itself.
pub fn capabilities() -> Capabilities {
    Host.capabilities()
}

/// Slots for all chunks in flight, and for those that are kept as context.
fn shape(options: &RankOptions, slot_bytes: u64) -> EdgeShape {
    edge(options.depth + options.context_chunks, slot_bytes)
}

/// A slot edge between two stages of one rank: one slot more where the source sends chunks again while it keeps those of
/// an older attempt.
///
/// # Panics
/// If there is no memory.
pub fn local(options: &RankOptions, slot_bytes: u64) -> HostLocal {
    let mut shape = shape(options, slot_bytes);
    shape.depth += u32::from(options.restarts > 0);
    Host.local(shape).expect("memory")
}

/// A switch for each rank of the pipeline, and all edges between them.
///
/// # Panics
/// If there is no memory.
pub fn seats(options: &RankOptions, slot_bytes: u64) -> Vec<Seat> {
    let seat = |rank| Seat {
        switch: Switch::new(rank, Bell::new().expect("a bell")).expect("a switch"),
        ends: Vec::new(),
    };
    let ranks = options.pipeline.world_size().ranks();
    let mut seats: Vec<Seat> = ranks.map(seat).collect();
    for (number, spec) in options.pipeline.edges().enumerate() {
        let bytes = match spec.kind {
            EdgeKind::Accept => 0,
            _ => slot_bytes,
        };
        let [from, to] = [spec.source, spec.target].map(|rank| rank.get() as usize);
        let (out, incoming) = Host::pair(
            shape(options, bytes),
            (spec.source, seats[from].switch.bell()),
            (spec.target, seats[to].switch.bell()),
        )
        .expect("memory");
        seats[from].ends.push((number, End::Out(out)));
        seats[to].ends.push((number, End::In(incoming)));
    }
    // What the watches say. Without restarts no rank waits for it, and a test may ask for it itself.
    if options.restarts > 0 {
        let others: Vec<Switch> = seats[1..].iter().map(|seat| seat.switch.clone()).collect();
        let tell = move || others.iter().for_each(Switch::hear_served);
        seats[0].switch.when_served(tell);
    }
    seats
}

/// Ends all ranks where a thread panics, so that a test fails and does not hang.
#[derive(Debug)]
pub struct TellPanic<'a>(pub &'a [Switch]);

impl Drop for TellPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let text = "a thread of the test panicked";
            let fault = Fault::new(FaultKind::Internal, Rank::new(0), "test", text);
            self.0
                .iter()
                .for_each(|switch| _ = switch.raise(fault.clone()));
        }
    }
}

/// Runs all ranks of a pipeline, each on a thread of its own, which makes its stages. The fault of one is told to all
/// that need others.
/// `meanwhile` gets their switches.
///
/// # Panics
/// If a stage panics.
pub fn run_ranks<'s, S: Source<TxLease>>(
    options: &RankOptions,
    slot_bytes: u64,
    stages: impl Fn(Rank) -> Stages<'s, TxLease, RxLease, HostGroup, S> + Sync,
    meanwhile: impl FnOnce(&[Switch]) + Send,
) -> Vec<Result<Summary, Fault>> {
    let seats = seats(options, slot_bytes);
    run_seats(&|_| options.clone(), (seats, slot_bytes), stages, meanwhile)
}

/// Runs all ranks of a schedule, as [`run_ranks`].
///
/// # Panics
/// If a stage panics.
pub fn run_schedule<'s, S: Source<TxLease>>(
    schedule: &Runnable,
    slot_bytes: u64,
    stages: impl Fn(Rank) -> Stages<'s, TxLease, RxLease, HostGroup, S> + Sync,
) -> Vec<Result<Summary, Fault>> {
    let of_depth = |depth| RankOptions::new(schedule.pipeline().clone(), depth, capabilities());
    let options = |rank: Rank| RankOptions {
        order: Order::Fixed(schedule.orders()[rank.get() as usize].clone()),
        ..of_depth(schedule.depth())
    };
    let seats = seats(&of_depth(schedule.slots()), slot_bytes);
    run_seats(&options, (seats, slot_bytes), stages, |_| {})
}

fn run_seats<'s, S: Source<TxLease>>(
    options: &(impl Fn(Rank) -> RankOptions + Sync),
    (seats, slot_bytes): (Vec<Seat>, u64),
    stages: impl Fn(Rank) -> Stages<'s, TxLease, RxLease, HostGroup, S> + Sync,
    meanwhile: impl FnOnce(&[Switch]) + Send,
) -> Vec<Result<Summary, Fault>> {
    let pipeline = options(Rank::new(0)).pipeline;
    let switches: Vec<Switch> = seats.iter().map(|seat| seat.switch.clone()).collect();
    let mut groups: Vec<Vec<(usize, HostGroup)>> = seats.iter().map(|_| Vec::new()).collect();
    for (at, stage) in pipeline.stages().iter().enumerate() {
        if stage.ranks.len() > 1 {
            let members = HostGroup::of_threads(&stage.name, &stage.ranks).expect("memory");
            for (rank, member) in stage.ranks.iter().zip(members) {
                groups[rank.get() as usize].push((at, member));
            }
        }
    }
    let (switches, stages) = (&switches[..], &stages);
    std::thread::scope(|scope| {
        let seats = seats.into_iter().zip(groups);
        let ranks = pipeline.world_size().ranks().zip(seats);
        let threads: Vec<_> = ranks
            .map(|(rank, (seat, groups))| {
                scope.spawn(move || {
                    let _tell = TellPanic(switches);
                    let options = options(rank);
                    let slots = |_, _| Ok(local(&options, slot_bytes));
                    let run = RankRun::new(rank, stages(rank), options.clone(), slots);
                    let mut run: RankRun<'_, Host, S> = run.expect("memory");
                    for (number, end) in seat.ends {
                        run.attach(number, end);
                    }
                    for (at, member) in groups {
                        run.attach_group(at, member);
                    }
                    let ended = match run.drive(&seat.switch) {
                        Ok(Driven::Finished) => Ok(run.finish().1),
                        Ok(Driven::Lost(fault)) | Err(fault) => Err(fault),
                    };
                    if let Err(fault) = &ended {
                        let others = switches.iter().filter(|switch| !switch.is_served());
                        others.for_each(|switch| _ = switch.raise(fault.clone()));
                    }
                    ended
                })
            })
            .collect();
        let _tell = TellPanic(switches);
        meanwhile(switches);
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.map(|ended| ended.expect("no panic")).collect()
    })
}
