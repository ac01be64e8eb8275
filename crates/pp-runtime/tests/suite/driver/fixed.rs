//! Training schedules through the driver: each rank does what the schedule lists, in that order.

use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use pp_contract::{ChunkIndex, Fault, FaultKind, Rank};
use pp_runtime::core::Cut;
use pp_runtime::driver::{BoxedStage, Stages, Summary};
use pp_runtime::schedule::{Kind, Limits, Schedule, Step};
use pp_runtime::stage::{
    Built, Chunk, Done, Offer, OnHost, Progress, Stage, StageError, StageResult,
};
use pp_testing::{HANG, Random, Toy, ToySink, ToySource, bytes, done, run_schedule};
use pp_transport::host::{HostGroup, RxLease, TxLease};

use super::stages::BYTES;

/// What was begun, as PyTorch writes it, and what was done, and by which rank.
type Log = Mutex<Vec<(u32, String)>>;

fn of_rank(log: &Log, rank: u32) -> Vec<String> {
    let log = log.lock().unwrap();
    let own = log
        .iter()
        .filter(|(by, done)| *by == rank && !done.contains(' '));
    own.map(|(_, action)| action.clone()).collect()
}

/// The forward or the backward of a stage of the model. Adds one to each byte, and notes what it does.
struct Noting<'a> {
    log: &'a Log,
    rank: Rank,
    stage: usize,
    is_forward: bool,
    device: Device,
    length: Duration,
    /// The chunks whose results have gone on while the device still works, each with the looks that are left.
    ahead: VecDeque<(ChunkIndex, u32)>,
}

/// When the work of a stage is done.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Device {
    /// When it returns.
    None,
    /// At the next look; the result waits for that.
    Waits,
    /// At the second look; the result has gone on.
    Ahead,
    /// As before, and the work of stage 1 on chunk 1 fails there.
    Fails,
}

impl Noting<'_> {
    fn note(&self, op: &str, chunk: ChunkIndex, what: &str) {
        let action = format!("{}{op}{chunk}{what}", self.stage);
        let mut log = self.log.lock().unwrap();
        log.push((self.rank.get(), action));
    }
}

/// Each byte and one.
fn add(input: &[u8], output: &mut [u8]) {
    for (out, byte) in output.iter_mut().zip(input) {
        *out = byte.wrapping_add(1);
    }
}

impl Stage<TxLease, RxLease> for Noting<'_> {
    type Plan = Toy;
    type Kept = Done;

    fn run(
        &mut self,
        chunk: Chunk<'_, Toy>,
        input: Option<&RxLease>,
        output: &mut TxLease,
    ) -> StageResult<Progress<Done, Done>> {
        let op = match (self.is_forward, chunk.puts_off) {
            (true, _) => "F",
            (false, true) => "I",
            (false, false) => "B",
        };
        self.note(op, chunk.place.chunk, "");
        std::thread::sleep(self.length);
        self.note(op, chunk.place.chunk, " is done");
        add(input.map_or(&[], RxLease::bytes), output.bytes_mut());
        let done = done(chunk.message, bytes(BYTES));
        if matches!(self.device, Device::Ahead | Device::Fails) {
            self.ahead.push_back((chunk.place.chunk, 2));
        }
        Ok(match self.device {
            Device::Waits => Progress::UnderWay(done),
            _ => Progress::Done(done),
        })
    }

    fn ahead(&mut self) -> Option<(ChunkIndex, StageResult<bool>)> {
        let (chunk, looks) = self.ahead.front_mut()?;
        let chunk = *chunk;
        *looks -= 1;
        if *looks > 0 {
            return Some((chunk, Ok(false)));
        }
        self.ahead.pop_front();
        let fails = self.device == Device::Fails && (self.stage, chunk.get()) == (1, 1);
        let error = StageError::new(FaultKind::Device, "issue work", "an address is not valid");
        Some((chunk, if fails { Err(error) } else { Ok(true) }))
    }

    fn poll(&mut self, oldest: Done) -> StageResult<Progress<Done, Done>> {
        Ok(Progress::Done(oldest))
    }

    fn later(&mut self, chunk: ChunkIndex) -> StageResult<()> {
        self.note("W", chunk, "");
        Ok(())
    }
}

/// What the source says when it is asked, by the number of the question; `None`: it has no more.
type Offers<'a> = &'a (dyn Fn(u64) -> Option<Cut> + Sync);
type Ends = Vec<Result<Summary, Fault>>;
/// The stage of a rank with this place in the pipeline.
type Open<'a> =
    &'a (dyn Fn(Rank, usize) -> BoxedStage<'a, TxLease, RxLease, HostGroup, Toy> + Sync);

/// Runs all ranks with the fewest slots, and checks what comes out.
fn run<'a>(schedule: &Schedule, offers: Offers<'a>, open: Open<'a>) -> Ends {
    let slots = schedule.check(Limits::default()).unwrap().slots_per_edge;
    let runnable = schedule.runnable(slots.max(1)).unwrap();
    let last = runnable.pipeline().stages().len() - 1;
    let passed = last as u8 - 1;
    let stages = |rank: Rank| {
        let mut asked = 0;
        let offer = move || {
            let cut = offers(asked);
            asked += 1;
            cut.map_or(Offer::End, Offer::Chunk)
        };
        let source = ToySource::new(offer, |place, slot: &mut TxLease| {
            let chunk = place.chunk.get();
            slot.bytes_mut().fill(chunk as u8);
            Built::new(Toy(chunk), bytes(BYTES), ())
        });
        let mut stages = Stages::new((rank.get() == 0).then_some(source));
        for (at, _) in runnable
            .pipeline()
            .stages_at(rank)
            .filter(|(at, _)| (1..last).contains(at))
        {
            stages.push(open(rank, at));
        }
        if rank.get() == 0 {
            stages.push(BoxedStage::sink(ToySink::new(
                move |chunk: Chunk<'_, Toy>, payload: &[u8]| {
                    let value = (chunk.place.chunk.get() as u8).wrapping_add(passed);
                    assert!(payload.len() == BYTES && payload.iter().all(|byte| *byte == value));
                    Ok(())
                },
            )));
        }
        stages
    };
    run_schedule(&runnable, BYTES as u64, stages)
}

/// What the schedule lists for so many steps.
fn listed(schedule: &Schedule, steps: u32) -> Vec<Vec<String>> {
    let of_rank = |row: &Vec<Step>| {
        let step = |step: u32| {
            let first = step * schedule.microbatches();
            let actions = row.iter().flat_map(Step::actions);
            actions.map(move |mut action| {
                action.microbatch += first;
                action.to_string()
            })
        };
        (0..steps).flat_map(step).collect()
    };
    schedule.ranks().iter().map(of_rank).collect()
}

/// Runs whole steps, each work as long as this; gives what was done.
fn done_in(schedule: &Schedule, steps: u32, device: Device, length: Duration) -> Log {
    let (ends, log) = ends_in(schedule, steps, device, length);
    let chunks = u64::from(steps * schedule.microbatches());
    assert!(ends.iter().all(Result::is_ok), "{ends:?}");
    assert_eq!(ends[0].as_ref().unwrap().counts.emitted, chunks);
    log
}

fn ends_in(schedule: &Schedule, steps: u32, device: Device, length: Duration) -> (Ends, Log) {
    let log = Log::default();
    let all = schedule.stages() as usize;
    let open = |rank, at: usize| {
        let is_forward = at <= all;
        BoxedStage::new(Noting {
            log: &log,
            rank,
            stage: if is_forward { at - 1 } else { 2 * all - at },
            is_forward,
            device,
            length,
            ahead: VecDeque::new(),
        })
    };
    let chunks = u64::from(steps * schedule.microbatches());
    let ends = run(
        schedule,
        &|asked| (asked < chunks).then_some(Cut::None),
        &open,
    );
    (ends, log)
}

#[test]
fn each_rank_does_what_its_schedule_lists_with_the_fewest_slots() {
    let mut runs = 0;
    for kind in Kind::ALL {
        for (ranks, stages, microbatches) in [(1, 2, 3), (2, 1, 4), (2, 2, 4), (3, 3, 6), (4, 2, 8)]
        {
            let Ok(schedule) = Schedule::build(kind, ranks, stages, microbatches) else {
                continue;
            };
            for (device, steps) in [
                (Device::None, 1),
                (Device::None, 2),
                (Device::Waits, 2),
                (Device::Ahead, 2),
            ] {
                let log = done_in(&schedule, steps, device, Duration::ZERO);
                let done = (0..ranks).map(|rank| of_rank(&log, rank));
                assert!(done.eq(listed(&schedule, steps)), "{kind}: {log:?}");
                runs += 1;
            }
        }
    }
    assert!(runs >= 60, "{runs}");
}

/// Runs two steps with the fewest slots, at once and on a device.
fn runs_to_its_end(csv: &str) {
    for device in [Device::None, Device::Waits, Device::Ahead] {
        let (tell, ended) = mpsc::channel();
        let schedule = Schedule::parse_csv(csv).unwrap();
        let listed = listed(&schedule, 2);
        std::thread::spawn(move || {
            let log = done_in(&schedule, 2, device, Duration::ZERO);
            let ranks = 0..schedule.ranks().len() as u32;
            tell.send(ranks.map(|rank| of_rank(&log, rank)).collect())
        });
        let done: Result<Vec<_>, _> = ended.recv_timeout(HANG);
        assert_eq!(done.as_ref(), Ok(&listed), "{device:?}\n{csv}");
    }
}

#[test]
fn what_comes_in_one_order_is_worked_on_in_another() {
    runs_to_its_end("0F0,0F1,0B1,0B0\n1F1,1F0,1B0,1B1\n");
    // With two slots for three messages: the slot that comes back first is that of the later send.
    runs_to_its_end("0F0,0F2,0B2,0F1,0B1,0B0\n1F2,1B2,1F1,1B1,1F0,1B0\n");
}

/// Any order of the actions of up to four ranks in which each finds its inputs, with split backwards and overlapped pairs.
fn any_schedule(random: &mut Random) -> String {
    let mut below = |bound: usize| random.below(bound as u64) as usize;
    let ranks = 1 + below(4);
    let (stages, microbatches) = (ranks + below(4), 1 + below(6));
    // Each rank has a stage, and stage 0 is on rank 0.
    let mut rank_of: Vec<usize> = (0..ranks).collect();
    for stage in 1..stages {
        match stage < ranks {
            true => rank_of.swap(stage, 1 + below(stage)),
            false => rank_of.push(below(ranks)),
        }
    }
    let mut rows = vec![Vec::new(); ranks];
    let mut split = HashSet::new();
    for at in 0..stages * microbatches {
        if below(3) == 0 {
            split.insert((at / microbatches, at % microbatches));
        }
    }
    let mut done = HashSet::new();
    loop {
        let has = |op, stage, microbatch| done.contains(&(op, stage, microbatch));
        let is_ready = |&(op, stage, of): &(char, usize, usize)| {
            let is_due = match op {
                'F' => stage == 0 || has('F', stage - 1, of),
                'B' => has('F', stage, of) && (stage + 1 == stages || has('B', stage + 1, of)),
                _ => split.contains(&(stage, of)) && has('B', stage, of),
            };
            is_due && !has(op, stage, of)
        };
        let all = (0..stages * microbatches).flat_map(|at| {
            let (stage, of) = (at / microbatches, at % microbatches);
            ['F', 'B', 'W'].map(|op| (op, stage, of))
        });
        let ready: Vec<_> = all.filter(is_ready).collect();
        if ready.is_empty() {
            let rows = rows.iter().map(|row: &Vec<String>| row.join(","));
            return rows.collect::<Vec<_>>().join("\n");
        }
        let (op, stage, of) = ready[below(ready.len())];
        let is_split = |stage, of| split.contains(&(stage, of));
        let pair = ready.iter().find(|&&(other, at, with)| {
            let is_pair = (op, other) == ('F', 'B') && rank_of[at] == rank_of[stage];
            is_pair && at != stage && !is_split(at, with)
        });
        let pair = pair.copied().filter(|_| below(3) == 0);
        let name = if op == 'B' && is_split(stage, of) {
            'I'
        } else {
            op
        };
        rows[rank_of[stage]].push(match pair {
            Some((_, at, with)) => format!("({stage}F{of};{at}B{with})OVERLAP_F_B"),
            None => format!("{stage}{name}{of}"),
        });
        done.extend(pair);
        done.insert((op, stage, of));
    }
}

#[test]
fn any_schedule_that_is_accepted_runs_with_the_fewest_slots() {
    for seed in 0..60 {
        runs_to_its_end(&any_schedule(&mut Random::new(seed)));
    }
}

#[test]
fn nothing_leaves_of_an_overlapped_pair_before_both_are_done() {
    let csv = "0F0,3F0,(0F1;3B0)OVERLAP_F_B,3F1,0B0,3B1,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n";
    let schedule = Schedule::parse_csv(csv).unwrap();
    // Long enough for rank 1 to begin with what it waits for, if it could.
    let log = done_in(&schedule, 1, Device::None, Duration::from_millis(20));
    let log = log.into_inner().unwrap();
    let place = |action: &str| log.iter().position(|(_, done)| done == action).unwrap();
    assert!(place("3B0 is done") < place("1F1"), "{log:?}");
}

#[test]
fn a_device_that_fails_behind_a_result_is_named_by_its_own_rank() {
    // Nothing is left to do on rank 1 behind the forward of chunk 1 but what waits for rank 0.
    let csv = "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1B0,1B1,1F2,1B2\n";
    let schedule = Schedule::parse_csv(csv).unwrap();
    let (ends, _) = ends_in(&schedule, 1, Device::Fails, Duration::ZERO);
    for fault in ends.into_iter().map(Result::unwrap_err) {
        let named = (fault.kind, fault.rank, fault.chunk);
        let (rank, chunk) = (Rank::new(1), ChunkIndex::new(1));
        assert_eq!(named, (FaultKind::Device, rank, Some(chunk)), "{fault}");
        assert_eq!(fault.operation.as_str(), "issue work");
    }
}

/// Runs 1F1B on two ranks with stages that put nothing off; gives the fault that all ranks end with.
fn fails(csv: &str, offers: Offers<'_>) -> Fault {
    let schedule = Schedule::parse_csv(csv).unwrap();
    let open = |_, _| {
        BoxedStage::new(OnHost::new(
            |chunk: Chunk<'_, Toy>, input: &[u8], output: &mut [u8]| {
                add(input, output);
                Ok(done(chunk.message, bytes(BYTES)))
            },
        ))
    };
    let ends = run(&schedule, offers, &open);
    let mut faults = ends.into_iter().map(Result::unwrap_err);
    let fault = faults.next().unwrap();
    assert!(faults.all(|other| other == fault));
    fault
}

#[test]
fn what_leaves_a_step_unfinished_is_a_fault() {
    let csv = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n";
    let cut_short = fails(csv, &|asked| (asked < 3).then_some(Cut::None));
    assert_eq!(
        (cut_short.kind, cut_short.rank),
        (FaultKind::BadInput, Rank::new(0))
    );
    let said = "the source ended after 1 of the 2 chunks of a step; end it between two steps";
    assert_eq!(cut_short.detail.as_str(), said);
    let cut = fails(csv, &|asked| {
        Some(if asked == 1 { Cut::Hard } else { Cut::None })
    });
    assert!(cut.detail.as_str().contains("offers a cut"), "{cut}");
    assert!(cut.stage.is_some() && cut.chunk.is_none(), "{cut:?}");
    let split = "0F0,0B0\n1F0,1I0,1W0\n";
    let puts_off = fails(split, &|asked| (asked < 1).then_some(Cut::None));
    assert_eq!(
        (puts_off.rank, puts_off.operation.as_str()),
        (Rank::new(1), "work later")
    );
    assert!(
        puts_off.detail.as_str().contains("puts nothing off"),
        "{puts_off}"
    );
    assert!(puts_off.stage.is_some(), "{puts_off:?}");
    assert_eq!(puts_off.chunk, Some(ChunkIndex::new(0)));
}
