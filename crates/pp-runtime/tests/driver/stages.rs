//! Stages that count, and both drivers on them.

use std::sync::mpsc;

use pp_contract::{ChunkIndex, Envelope, Fault, FaultKind, Outcome, Rank};
use pp_runtime::core::{Counts, Cut};
use pp_runtime::driver::{FrontOptions, run_front, run_phase_b};
use pp_runtime::report::ChunkRecord;
use pp_runtime::stage::{
    Computed, Decoded, FrontStages, Offer, PhaseBStages, Place, Progress, StageError,
};
use pp_runtime::switch::Switch;
use pp_testing::{Pair, Toy, bytes, computed, edge};
use pp_transport::bell::Bell;
use pp_transport::host::{RxLease, TxLease};

pub(crate) const BYTES: usize = 1000;
/// What Phase B adds to every byte: its plan's number.
const ADDED: u64 = 7;

/// Works for as long as it is asked three times, and counts how much it had to do at once.
pub(crate) struct Device<T> {
    pub(crate) queue: std::collections::VecDeque<T>,
    pub(crate) asked: u32,
    pub(crate) most: usize,
}

impl<T> Device<T> {
    pub(crate) fn new() -> Self {
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
pub(crate) struct Counting {
    pub(crate) cuts: Vec<Cut>,
    pub(crate) offered: usize,
    pub(crate) built: Vec<u64>,
    pub(crate) emitted: Vec<(u64, u8)>,
    pub(crate) forgotten: Vec<u64>,
    pub(crate) fail_decode_at: Option<u64>,
    /// Decodes that a device would still work on; each ends when asked for the third time.
    pub(crate) later: Option<Device<Decoded>>,
    /// Taken before the first decode: the test decides when it may go on.
    pub(crate) gate: Option<mpsc::Receiver<()>>,
    /// The sink takes nothing before all results are here and the test says so.
    pub(crate) hold: Option<Hold>,
    /// Says when the frames of a chunk were read: chunk `n` from `n` to `n + 1` ns.
    pub(crate) tells_reads: bool,
}

/// Holds a front back that needs its peer no more.
pub(crate) struct Hold {
    /// Told when the results of all chunks are here.
    pub(crate) served: mpsc::Sender<()>,
    /// Taken from the moment on at which the front is to go on.
    pub(crate) go_on: mpsc::Receiver<()>,
    pub(crate) is_served: bool,
}

impl Hold {
    /// With what the test hears, and what it says.
    pub(crate) fn new() -> (Self, mpsc::Receiver<()>, mpsc::Sender<()>) {
        let ((served, is_served), (say, go_on)) = (mpsc::channel(), mpsc::channel());
        let hold = Self {
            served,
            go_on,
            is_served: false,
        };
        (hold, is_served, say)
    }
}

impl Counting {
    pub(crate) fn new(cuts: Vec<Cut>) -> Self {
        Self {
            cuts,
            offered: 0,
            built: Vec::new(),
            emitted: Vec::new(),
            forgotten: Vec::new(),
            fail_decode_at: None,
            later: None,
            gate: None,
            hold: None,
            tells_reads: false,
        }
    }
}

impl FrontStages<TxLease, RxLease> for Counting {
    type Plan = Toy;

    fn poll_source(&mut self) -> Result<Offer, StageError> {
        let cut = self.cuts.get(self.offered).copied();
        self.offered += 1;
        Ok(cut.map_or(Offer::End, Offer::Chunk))
    }

    fn build(&mut self, place: Place, slot: &mut TxLease) -> Result<Envelope<Toy>, StageError> {
        let chunk = place.chunk.get();
        self.built.push(place.epoch.get());
        // Every third chunk is shorter, every seventh empty.
        let bytes = match chunk {
            n if n % 7 == 3 => 0,
            n if n % 3 == 2 => BYTES / 2,
            _ => BYTES,
        };
        slot.bytes_mut()[..bytes].fill(chunk as u8);
        Ok(Envelope::new(Toy(ADDED), self::bytes(bytes), self::bytes(bytes)).unwrap())
    }

    fn is_sink_ready(&mut self) -> Result<bool, StageError> {
        if self
            .hold
            .take_if(|hold| hold.is_served && hold.go_on.try_recv().is_ok())
            .is_some()
        {
            return Ok(true);
        }
        Ok(self.hold.is_none())
    }

    fn served(&mut self) {
        if let Some(hold) = &mut self.hold {
            hold.is_served = true;
            hold.served.send(()).unwrap();
        }
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

    fn read_ns(&self) -> Option<(u64, u64)> {
        let chunk = self.built.len() as u64 - 1;
        self.tells_reads.then_some((chunk, chunk + 1))
    }
}

pub(crate) struct Adder {
    pub(crate) fail_at: Option<u64>,
    pub(crate) lie_about_calls: bool,
    pub(crate) later: Option<Device<Computed>>,
    pub(crate) epochs_started: Vec<u64>,
}

impl Adder {
    pub(crate) fn new() -> Self {
        Self {
            fail_at: None,
            lie_about_calls: false,
            later: None,
            epochs_started: Vec::new(),
        }
    }
}

impl PhaseBStages<TxLease, RxLease> for Adder {
    type Plan = Toy;

    fn compute(
        &mut self,
        place: Place,
        envelope: &Envelope<Toy>,
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
            *out = byte.wrapping_add(envelope.plan().0 as u8);
        }
        let mut computed = computed(envelope.plan());
        computed.observed_calls += u32::from(self.lie_about_calls);
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

pub(crate) struct Ends {
    pub(crate) front: Result<Counts, Fault>,
    pub(crate) records: Vec<ChunkRecord>,
    pub(crate) back: Result<u64, Fault>,
    pub(crate) stages: Counting,
    pub(crate) adder: Adder,
}

/// Runs both drivers; `meanwhile` gets both switches.
pub(crate) fn run(
    depth: u32,
    mut stages: Counting,
    mut adder: Adder,
    meanwhile: impl FnOnce(&Switch, &Switch) + Send,
) -> Ends {
    let edge = edge(depth, BYTES as u64);
    let Pair {
        front,
        back,
        front_switch,
        back_switch,
    } = Pair::new(edge, edge, Bell::new().unwrap());
    let ((front, records), back) = std::thread::scope(|scope| {
        let back = scope.spawn(|| {
            let result = run_phase_b(back, &mut adder, &back_switch, Rank::new(0), depth);
            result.map(|summary| summary.answered)
        });
        let (front_seen, back_seen) = (&front_switch, &back_switch);
        scope.spawn(move || meanwhile(front_seen, back_seen));
        let options = FrontOptions::new(Rank::new(1), depth);
        let front = run_front(front, &mut stages, &front_switch, options);
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
