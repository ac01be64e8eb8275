//! All ranks of a pipeline over one generation of edges after the other. One rank may die in each.

use std::sync::{Arc, mpsc};

use pp_contract::{Fault, FaultKind, Rank};
use pp_runtime::driver::{Driven, RankOptions, RankRun, Stages, Summary};
use pp_runtime::stage::Source;
use pp_runtime::switch::Switch;
use pp_testing::{HANG, Seat, TellPanic, local, seats};
use pp_transport::backend::End as EdgeEnd;
use pp_transport::host::{Host, HostGroup, RxLease, TxLease};

use super::edges::{Failing, Fuse, broken, late};
use super::stages::{CONTEXT_CHUNKS, SLOT};

/// What the others hear of a rank that was killed.
pub(crate) fn died(rank: u32) -> Fault {
    Fault::new(
        FaultKind::PeerDied,
        Rank::new(rank),
        "watch",
        "it was killed",
    )
}

/// How a generation ends: with the death of this rank, once the edges of `rank` have done so many operations. Where that
/// is another one, it sees the death there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Life {
    pub(crate) dies: u32,
    pub(crate) rank: u32,
    pub(crate) left: usize,
}

/// Nothing breaks.
pub(crate) const WHOLE: Life = Life {
    dies: 1,
    rank: 1,
    left: usize::MAX,
};

/// A pipeline whose stages remember.
pub(crate) fn options(pipeline: &str, depth: u32, restarts: u32) -> RankOptions {
    RankOptions {
        restarts,
        context_chunks: CONTEXT_CHUNKS,
        ..pp_testing::options(pipeline, depth)
    }
}

/// A rank before its first chunk.
pub(crate) fn rank_run<'a, S: Source<TxLease>>(
    rank: Rank,
    options: &RankOptions,
    stages: Stages<'a, TxLease, RxLease, HostGroup, S>,
) -> RankRun<'a, Failing, S> {
    let slots = |_, _| Ok(local(options, SLOT));
    RankRun::new(rank, stages, options.clone(), slots).unwrap()
}

/// Gives a rank its ends, which fail together.
pub(crate) fn attach<S: Source<TxLease>>(
    run: &mut RankRun<'_, Failing, S>,
    ends: Vec<(usize, EdgeEnd<Host>)>,
    fuse: &Arc<Fuse>,
) {
    for (number, end) in ends {
        run.attach(number, fuse.end(end));
    }
}

/// What came of a run.
pub(crate) struct End {
    /// Of rank 0.
    pub(crate) result: Result<Summary, Fault>,
    /// Operations of each rank in the first generation.
    pub(crate) done: Vec<usize>,
}

/// One generation, for one rank.
struct Turn {
    generation: u16,
    seat: Seat,
    fuse: Arc<Fuse>,
    switches: Vec<Switch>,
}

/// How a rank came out of a generation. A rank that is done says what it has to tell.
type Outcome = (usize, Result<Driven, Fault>, Option<Summary>);

/// A rank, until it is done or dead.
fn live<S: Source<TxLease>>(
    mut run: RankRun<'_, Failing, S>,
    rank: usize,
    turns: &mpsc::Receiver<Turn>,
    tell: &mpsc::Sender<Outcome>,
) {
    while let Ok(turn) = turns.recv() {
        let _tell = TellPanic(&turn.switches);
        run.begin_attempt(turn.generation);
        attach(&mut run, turn.seat.ends, &turn.fuse);
        let mut driven = run.drive(&turn.seat.switch);
        if let Ok(Driven::Lost(fault)) = &driven
            && rank > 0
        {
            // As its watch tells all others.
            let others = turn.switches.iter();
            others.for_each(|other| other.lose_peer(fault.clone()));
            if turn.seat.switch.is_source_done(HANG) {
                driven = run.leave();
            }
        }
        if !matches!(driven, Ok(Driven::Lost(_))) {
            let summary = driven.is_ok().then(|| run.finish().1);
            tell.send((rank, driven, summary)).unwrap();
            return;
        }
        drop(run.detach());
        tell.send((rank, driven, None)).unwrap();
    }
}

/// Runs all ranks over one life after the other, with another process in the place of each that dies. `stages` makes
/// those of a process that begins with this life; where the job `drains`, that is asked for when a rank dies.
#[expect(clippy::too_many_lines, reason = "one life after the other")]
pub(crate) fn run<'a, S: Source<TxLease>>(
    options: &RankOptions,
    lives: &[Life],
    drains: bool,
    stages: &(dyn Fn(Rank, usize) -> Stages<'a, TxLease, RxLease, HostGroup, S> + Sync),
) -> End {
    let mut done = Vec::new();
    let result = std::thread::scope(|scope| {
        let (tell, heard) = mpsc::channel::<Outcome>();
        let ranks = options.pipeline.world_size().get() as usize;
        let mut threads: Vec<Option<mpsc::Sender<Turn>>> = vec![None; ranks];
        for (generation, life) in lives.iter().enumerate() {
            let seats = seats(options, SLOT);
            let switches: Vec<Switch> = seats.iter().map(|seat| seat.switch.clone()).collect();
            let mut fuses = Vec::new();
            for (rank, seat) in seats.into_iter().enumerate() {
                let (left, own, dies) = match rank as u32 == life.rank {
                    true => (life.left, seat.switch.clone(), life.dies),
                    false => (usize::MAX, seat.switch.clone(), life.dies),
                };
                let is_seen = dies != rank as u32;
                let at_the_end = move || {
                    if !is_seen {
                        return broken();
                    }
                    own.lose_peer(died(dies));
                    late()
                };
                let fuse = Fuse::new(seat.switch.bell().clone(), left, at_the_end);
                fuses.push(Arc::clone(&fuse));
                let thread = threads[rank].get_or_insert_with(|| {
                    let (turn, turns) = mpsc::channel();
                    let tell = tell.clone();
                    scope.spawn(move || {
                        let own = Rank::new(rank as u32);
                        let run = rank_run(own, options, stages(own, generation));
                        live(run, rank, &turns, &tell);
                    });
                    turn
                });
                let turn = Turn {
                    generation: generation as u16,
                    seat,
                    fuse,
                    switches: switches.clone(),
                };
                thread.send(turn).unwrap();
            }
            let _tell = TellPanic(&switches);
            let mut outcomes: Vec<Option<Outcome>> = (0..ranks).map(|_| None).collect();
            for _ in 0..ranks {
                let next = heard.recv_timeout(HANG);
                let (rank, driven, summary) =
                    next.unwrap_or_else(|_| panic!("{life:?}: a rank hangs"));
                if let Err(fault) = &driven {
                    let is_killed = rank as u32 == life.dies && generation + 1 < lives.len();
                    let is_over = *fault == died(life.dies);
                    assert!(is_killed || is_over, "{life:?}: rank {rank}: {fault}");
                }
                if rank == 0 && driven != Ok(Driven::Finished) {
                    // It has lost the rank, and leaves its edges.
                    for switch in &switches[1..] {
                        switch.lose_peer(died(life.dies));
                        switch.lose_peer(died(0));
                    }
                }
                if fuses[rank].is_blown() || driven != Ok(Driven::Finished) {
                    // What the watches say.
                    let victim = life.dies as usize;
                    for (other, switch) in switches.iter().enumerate() {
                        if drains {
                            switch.request_drain(2);
                        }
                        match other == victim {
                            true => _ = switch.raise(died(life.dies)),
                            false => switch.lose_peer(died(life.dies)),
                        }
                    }
                }
                if driven != Ok(Driven::Lost(died(life.dies))) {
                    threads[rank] = None;
                }
                outcomes[rank] = Some((rank, driven, summary));
            }
            if generation == 0 {
                done = fuses.iter().map(|fuse| fuse.done()).collect();
            }
            threads[life.dies as usize] = None;
            match outcomes[0].take().expect("rank 0 has told") {
                (_, Ok(Driven::Finished), summary) => {
                    return Ok(summary.expect("it is done"));
                }
                (_, Ok(Driven::Lost(fault)), _) => assert_eq!(fault, died(life.dies)),
                (_, Err(fault), _) => return Err(fault),
            }
        }
        panic!("rank 0 waits for another life");
    });
    End { result, done }
}
