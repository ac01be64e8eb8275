//! Both drivers over the host backend, in one process: what goes in comes out, once, in order.

use std::sync::mpsc;

use pp_contract::{
    ChunkIndex, DType, Envelope, Fault, FaultKind, Manifest, Outcome, Plan, PlanError, Rank,
    TensorSpec,
};
use pp_runtime::core::{Counts, Cut};
use pp_runtime::driver::{FrontOptions, run_front, run_phase_b};
use pp_runtime::report::ChunkRecord;
use pp_runtime::stage::{
    Computed, Decoded, FrontStages, Kept, Offer, PhaseBStages, Place, Progress, StageError,
    send_as_it_was,
};
use pp_runtime::switch::Switch;
use pp_transport::bell::Bell;
use pp_transport::host::{EdgeShape, HostLink, RxLease, TxLease};
use pp_transport::link::Link;

const BYTES: usize = 1000;

/// A number that Phase B adds to every byte.
#[derive(Clone, Debug, PartialEq)]
struct Add(u8);

impl Plan for Add {
    const NAME: &'static str = "add";
    const VERSION: u16 = 1;
    type Parts = u8;

    fn from_parts(parts: u8) -> Result<Self, PlanError> {
        Ok(Self(parts))
    }
    fn parts(&self) -> &u8 {
        &self.0
    }
    fn expected_calls(&self) -> u32 {
        1
    }
    fn start_frame(&self) -> u64 {
        0
    }
    fn check_inputs(&self, _: &Manifest) -> Result<(), PlanError> {
        Ok(())
    }
    fn check_outputs(&self, _: &Manifest, _: &Manifest) -> Result<(), PlanError> {
        Ok(())
    }
}

fn manifest(bytes: usize) -> Manifest {
    Manifest::new(&[TensorSpec::new("x", DType::U8, &[bytes as u64]).unwrap()]).unwrap()
}

/// Works for as long as it is asked three times, and counts how much it had to do at once.
struct Device<T> {
    queue: std::collections::VecDeque<T>,
    asked: u32,
    most: usize,
}

impl<T> Device<T> {
    fn new() -> Self {
        Self {
            queue: std::collections::VecDeque::new(),
            asked: 0,
            most: 0,
        }
    }

    fn begin(&mut self, work: T) -> Progress<T> {
        self.queue.push_back(work);
        self.most = self.most.max(self.queue.len());
        Progress::UnderWay
    }

    fn poll(&mut self) -> Option<T> {
        assert!(!self.queue.is_empty(), "asked though nothing is under way");
        self.asked += 1;
        if !self.asked.is_multiple_of(3) {
            return None;
        }
        self.queue.pop_front()
    }
}

/// Sends chunk `n` as bytes of value `n`, with these cuts, and collects what comes back.
struct Counting {
    cuts: Vec<Cut>,
    offered: usize,
    built: Vec<u64>,
    emitted: Vec<(u64, u8)>,
    forgotten: Vec<u64>,
    fail_decode_at: Option<u64>,
    /// Decodes that a device would still work on; each ends when asked for the third time.
    later: Option<Device<Decoded>>,
    /// Taken before the first decode: the test decides when it may go on.
    gate: Option<mpsc::Receiver<()>>,
    /// Says when the frames of a chunk were read: chunk `n` from `n` to `n + 1` ns.
    tells_reads: bool,
}

impl Counting {
    fn new(cuts: Vec<Cut>) -> Self {
        Self {
            cuts,
            offered: 0,
            built: Vec::new(),
            emitted: Vec::new(),
            forgotten: Vec::new(),
            fail_decode_at: None,
            later: None,
            gate: None,
            tells_reads: false,
        }
    }
}

impl FrontStages<TxLease, RxLease> for Counting {
    type Plan = Add;

    fn poll_source(&mut self) -> Result<Offer, StageError> {
        let cut = self.cuts.get(self.offered).copied();
        self.offered += 1;
        Ok(cut.map_or(Offer::End, Offer::Chunk))
    }

    fn build(&mut self, place: Place, slot: &mut TxLease) -> Result<Envelope<Add>, StageError> {
        let chunk = place.chunk.get();
        self.built.push(place.epoch.get());
        // Every third chunk is shorter, every seventh empty.
        let bytes = match chunk {
            n if n % 7 == 3 => 0,
            n if n % 3 == 2 => BYTES / 2,
            _ => BYTES,
        };
        slot.bytes_mut()[..bytes].fill(chunk as u8);
        Ok(Envelope::new(Add(7), manifest(bytes), manifest(bytes)).unwrap())
    }

    fn rebuild(
        &mut self,
        _: Place,
        sent: &Envelope<Add>,
        kept: &dyn Kept<TxLease>,
        slot: &mut TxLease,
    ) -> Result<Envelope<Add>, StageError> {
        send_as_it_was(sent, kept, slot)
    }

    fn is_sink_ready(&mut self) -> Result<bool, StageError> {
        Ok(true)
    }

    fn decode(
        &mut self,
        chunk: ChunkIndex,
        _: &Outcome,
        payload: Option<RxLease>,
    ) -> Result<Progress<Decoded>, StageError> {
        if let Some(gate) = self.gate.take() {
            gate.recv().unwrap();
        }
        if self.fail_decode_at == Some(chunk.get()) {
            return Err(StageError::new(FaultKind::Io, "write output", "disk full"));
        }
        let bytes = payload.as_ref().map_or(&[][..], RxLease::bytes);
        let value = bytes.first().copied().unwrap_or(chunk.get() as u8 + 7);
        assert!(bytes.iter().all(|byte| *byte == value));
        self.emitted.push((chunk.get(), value));
        let decoded = Decoded::default();
        Ok(match &mut self.later {
            Some(device) => device.begin(decoded),
            None => Progress::Done(decoded),
        })
    }

    fn poll_decoded(&mut self) -> Result<Option<Decoded>, StageError> {
        Ok(self.later.as_mut().and_then(Device::poll))
    }

    fn forget(&mut self, chunk: ChunkIndex) {
        self.forgotten.push(chunk.get());
    }

    fn frames_built(&self) -> u32 {
        1
    }

    fn read_ns(&self) -> Option<(u64, u64)> {
        let chunk = self.built.len() as u64 - 1;
        self.tells_reads.then_some((chunk, chunk + 1))
    }

    fn queued(&self) -> (u32, u32) {
        (0, 0)
    }
}

struct Adder {
    fail_at: Option<u64>,
    lie_about_calls: bool,
    later: Option<Device<Computed>>,
    epochs_started: Vec<u64>,
}

impl Adder {
    fn new() -> Self {
        Self {
            fail_at: None,
            lie_about_calls: false,
            later: None,
            epochs_started: Vec::new(),
        }
    }
}

impl PhaseBStages<TxLease, RxLease> for Adder {
    type Plan = Add;

    fn compute(
        &mut self,
        place: Place,
        envelope: &Envelope<Add>,
        input: Option<&RxLease>,
        output: &mut TxLease,
    ) -> Result<Progress<Computed>, StageError> {
        if place.starts_epoch {
            self.epochs_started.push(place.epoch.get());
        }
        if self.fail_at == Some(place.chunk.get()) {
            return Err(StageError::new(
                FaultKind::Plugin,
                "phase_b",
                "kernel exploded",
            ));
        }
        let input = input.map_or(&[][..], RxLease::bytes);
        for (out, byte) in output.bytes_mut().iter_mut().zip(input) {
            *out = byte.wrapping_add(envelope.plan().0);
        }
        let computed = Computed {
            observed_calls: 1 + u32::from(self.lie_about_calls),
            start_frame: 0,
            seal: None,
            worked: None,
        };
        Ok(match &mut self.later {
            Some(device) => device.begin(computed),
            None => Progress::Done(computed),
        })
    }

    fn poll_computed(&mut self) -> Result<Option<Computed>, StageError> {
        if let Some(device) = &mut self.later {
            return Ok(device.poll());
        }
        Ok(None)
    }
}

struct Ends {
    front: Result<Counts, Fault>,
    records: Vec<ChunkRecord>,
    back: Result<u64, Fault>,
    stages: Counting,
    adder: Adder,
}

/// Runs both drivers; `meanwhile` gets both switches.
fn run(
    depth: u32,
    mut stages: Counting,
    mut adder: Adder,
    meanwhile: impl FnOnce(&Switch, &Switch) + Send,
) -> Ends {
    let edge = EdgeShape {
        depth,
        slot_bytes: BYTES as u64,
    };
    let bell = Bell::new().unwrap();
    let (front_link, back_link) = HostLink::pair(edge, edge, bell.clone()).unwrap();
    let front_switch = Switch::new(Rank::new(0), bell).unwrap();
    let back_switch = Switch::new(Rank::new(1), back_link.bell().clone()).unwrap();
    let ((front, records), back) = std::thread::scope(|scope| {
        let back = scope.spawn(|| {
            let result = run_phase_b(back_link, &mut adder, &back_switch, Rank::new(0), depth);
            result.map(|summary| summary.answered)
        });
        let (front_seen, back_seen) = (&front_switch, &back_switch);
        scope.spawn(move || meanwhile(front_seen, back_seen));
        let options = FrontOptions::new(Rank::new(1), depth);
        let front = run_front(front_link, &mut stages, &front_switch, options);
        if let Err(fault) = &front {
            back_switch.raise(fault.clone());
        }
        let front = match front {
            Ok(summary) => {
                let records = summary.recorder.records().copied().collect();
                (Ok(summary.counts), records)
            }
            Err(fault) => (Err(fault), Vec::new()),
        };
        (front, back.join().unwrap())
    });
    Ends {
        front,
        records,
        back,
        stages,
        adder,
    }
}

#[test]
fn every_chunk_comes_back_once_and_in_order_at_every_depth() {
    for depth in [1, 2, 3, 4, 8, 64] {
        let ends = run(
            depth,
            Counting::new(vec![Cut::None; 200]),
            Adder::new(),
            |_, _| {},
        );
        let counts = ends.front.unwrap();
        assert_eq!(
            (counts.admitted, counts.emitted, counts.dropped),
            (200, 200, 0)
        );
        assert!(counts.max_in_flight <= depth, "{counts:?} at depth {depth}");
        assert_eq!(ends.back, Ok(200));
        let expected: Vec<_> = (0..200).map(|n| (n, (n as u8).wrapping_add(7))).collect();
        assert_eq!(ends.stages.emitted, expected, "depth {depth}");
        for record in ends.records {
            let b = record.phase_b.unwrap();
            let order = [
                record.first_read_ns,
                record.last_read_ns,
                record.build_start_ns,
                record.build_end_ns,
                record.sent_ns,
                b.recv_ns,
                b.compute_start_ns,
                b.compute_end_ns,
                b.sent_ns,
                record.received_ns,
                record.decode_start_ns,
                record.decode_end_ns,
                record.emitted_ns,
            ];
            assert!(order.is_sorted(), "{record:?}");
            // A source that reads nothing counts from the admission.
            assert_eq!(record.first_read_ns, record.build_start_ns);
            assert_eq!(record.last_read_ns, record.build_start_ns);
        }
    }
}

#[test]
fn a_record_has_when_the_frames_of_its_chunk_were_read() {
    let mut stages = Counting::new(vec![Cut::None; 50]);
    stages.tells_reads = true;
    let ends = run(4, stages, Adder::new(), |_, _| {});
    assert_eq!(ends.records.len(), 50);
    for (chunk, record) in (0..).zip(&ends.records) {
        assert_eq!(
            (record.first_read_ns, record.last_read_ns),
            (chunk, chunk + 1)
        );
        assert_eq!(record.latency_ns(), Some(record.emitted_ns - chunk));
        assert_eq!(
            record.added_latency_ns(),
            Some(record.emitted_ns - chunk - 1)
        );
    }
}

#[test]
fn stages_that_work_on_lose_nothing_and_fill_the_depth() {
    for depth in [1, 2, 4] {
        let mut cuts = vec![Cut::None; 200];
        cuts[50] = Cut::Flush;
        let mut stages = Counting::new(cuts);
        stages.later = Some(Device::new());
        let mut adder = Adder::new();
        adder.later = Some(Device::new());
        let ends = run(depth, stages, adder, |_, _| {});
        assert_eq!(ends.front.unwrap().emitted, 200);
        assert_eq!(ends.back, Ok(200));
        let expected: Vec<_> = (0..200).map(|n| (n, (n as u8).wrapping_add(7))).collect();
        assert_eq!(ends.stages.emitted, expected, "depth {depth}");
        for most in [
            ends.stages.later.unwrap().most,
            ends.adder.later.unwrap().most,
        ] {
            assert!((1..=depth as usize).contains(&most));
        }
    }
}

#[test]
fn nothing_to_do_is_done_well() {
    let ends = run(4, Counting::new(Vec::new()), Adder::new(), |_, _| {});
    assert_eq!(ends.front.unwrap().admitted, 0);
    assert_eq!(ends.back, Ok(0));
}

#[test]
fn a_flush_cut_loses_nothing_and_starts_an_epoch_on_both_sides() {
    let mut cuts = vec![Cut::None; 20];
    cuts[5] = Cut::Flush;
    cuts[13] = Cut::Flush;
    let ends = run(4, Counting::new(cuts), Adder::new(), |_, _| {});
    assert_eq!(ends.front.unwrap().emitted, 20);
    assert_eq!(ends.stages.built[4..6], [0, 1]);
    assert_eq!(ends.stages.built[12..14], [1, 2]);
    assert_eq!(ends.adder.epochs_started, [0, 1, 2]);
}

#[test]
fn a_hard_cut_drops_what_is_in_flight_and_decodes_none_of_it() {
    // The first decode is held up until the depth is full; then the cut comes.
    let mut cuts = vec![Cut::None; 40];
    cuts[10] = Cut::Hard;
    let ends = run(4, Counting::new(cuts), Adder::new(), |_, _| {});
    let counts = ends.front.unwrap();
    assert_eq!(counts.admitted, 40);
    assert_eq!(counts.emitted + counts.dropped, 40);
    assert_eq!(counts.dropped, ends.stages.forgotten.len() as u64);
    // Everything emitted after the cut was admitted is of the new epoch: only chunks right
    // before the cut can be missing.
    assert!(ends.stages.forgotten.iter().all(|n| (6..10).contains(n)));
    let emitted: Vec<u64> = ends.stages.emitted.iter().map(|(n, _)| *n).collect();
    assert!(emitted.is_sorted() && (10..40).all(|n| emitted.contains(&n)));
}

#[test]
fn a_drain_finishes_what_is_in_flight() {
    let mut stages = Counting::new(vec![Cut::None; 100_000]);
    let (open, gate) = mpsc::channel();
    stages.gate = Some(gate);
    let ends = run(4, stages, Adder::new(), move |front, _| {
        front.request_drain();
        open.send(()).unwrap();
    });
    let counts = ends.front.unwrap();
    assert!(counts.admitted < 100_000, "it did not drain");
    assert_eq!(counts.emitted, counts.admitted);
    assert_eq!(ends.back, Ok(counts.admitted));
}

#[test]
fn a_failed_compute_ends_both_ranks_with_its_name() {
    let mut adder = Adder::new();
    adder.fail_at = Some(5);
    let ends = run(4, Counting::new(vec![Cut::None; 50]), adder, |_, _| {});
    for fault in [ends.front.unwrap_err(), ends.back.unwrap_err()] {
        assert_eq!(fault.kind, FaultKind::Plugin);
        assert_eq!(fault.rank, Rank::new(1));
        assert_eq!(fault.operation.as_str(), "phase_b");
        assert_eq!(fault.detail.as_str(), "kernel exploded");
    }
    // What came back before the failure was emitted, in order.
    assert!(ends.stages.emitted.len() <= 5);
    assert!(
        ends.stages
            .emitted
            .iter()
            .enumerate()
            .all(|(i, (n, _))| i as u64 == *n)
    );
}

#[test]
fn a_failed_decode_ends_the_front_with_its_name() {
    let mut stages = Counting::new(vec![Cut::None; 50]);
    stages.fail_decode_at = Some(9);
    let ends = run(4, stages, Adder::new(), |_, _| {});
    let fault = ends.front.unwrap_err();
    assert_eq!((fault.kind, fault.rank), (FaultKind::Io, Rank::new(0)));
    assert_eq!(ends.stages.emitted.len(), 9);
}

#[test]
fn a_result_with_other_calls_than_planned_is_refused() {
    let mut adder = Adder::new();
    adder.lie_about_calls = true;
    let ends = run(2, Counting::new(vec![Cut::None; 5]), adder, |_, _| {});
    let fault = ends.front.unwrap_err();
    assert_eq!(
        (fault.kind, fault.rank),
        (FaultKind::PeerMisbehaved, Rank::new(1))
    );
    let text = fault.to_string();
    assert!(
        text.contains("2 generator calls were made, 1 were planned"),
        "{text}"
    );
    assert!(ends.stages.emitted.is_empty());
}

#[test]
fn an_abort_ends_both_while_a_stage_waits() {
    let mut stages = Counting::new(vec![Cut::None; 100]);
    let (open, gate) = mpsc::channel();
    stages.gate = Some(gate);
    let ends = run(4, stages, Adder::new(), move |front, _| {
        front.abort();
        open.send(()).unwrap();
    });
    assert_eq!(ends.front.unwrap_err().kind, FaultKind::Interrupted);
    assert!(ends.back.is_err());
}
