//! Stages that count, and both drivers on them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use pp_contract::{ChunkIndex, Envelope, Fault, FaultKind, Outcome, Rank};
use pp_runtime::core::{Counts, Cut};
use pp_runtime::driver::{FrontOptions, run_front, run_phase_b};
use pp_runtime::report::ChunkRecord;
use pp_runtime::stage::{
    Built, Computed, Decoded, FrontStages, Offer, PhaseBStages, Place, Progress, StageError,
};
use pp_runtime::switch::Switch;
use pp_testing::{Pair, Toy, bytes, computed, edge};
use pp_transport::bell::Bell;
use pp_transport::host::{RxLease, TxLease};

pub(crate) const BYTES: usize = 1000;
/// What Phase B adds to every byte: its plan's number.
const ADDED: u64 = 7;

/// Works for as long as it is asked three times, and counts how much it had to do at once.
#[derive(Default)]
pub(crate) struct Device {
    at_work: usize,
    asked: u32,
    pub(crate) most: usize,
}

impl Device {
    fn begin<T>(&mut self, work: T) -> Progress<T, T> {
        self.at_work += 1;
        self.most = self.most.max(self.at_work);
        Progress::UnderWay(work)
    }

    fn poll<T>(&mut self, work: T) -> Progress<T, T> {
        self.asked += 1;
        if !self.asked.is_multiple_of(3) {
            return Progress::UnderWay(work);
        }
        self.at_work -= 1;
        Progress::Done(work)
    }
}

/// Sends chunk `n` as bytes of value `n`, with these cuts, and collects what comes back.
pub(crate) struct Counting {
    pub(crate) cuts: Vec<Cut>,
    pub(crate) offered: usize,
    pub(crate) emitted: Vec<(u64, u8)>,
    pub(crate) fail_decode_at: Option<u64>,
    /// Decodes that a device would still work on; each ends when asked for the third time.
    pub(crate) later: Option<Device>,
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
    pub(crate) is_served: Arc<AtomicBool>,
}

impl Hold {
    /// With what the test hears, and what it says.
    pub(crate) fn new() -> (Self, mpsc::Receiver<()>, mpsc::Sender<()>) {
        let ((served, is_served), (say, go_on)) = (mpsc::channel(), mpsc::channel());
        let hold = Self {
            served,
            go_on,
            is_served: Arc::default(),
        };
        (hold, is_served, say)
    }
}

impl Counting {
    pub(crate) fn new(cuts: Vec<Cut>) -> Self {
        Self {
            cuts,
            offered: 0,
            emitted: Vec::new(),
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
    /// The chunk's own index.
    type Carry = u64;
    type Decoding = Decoded;

    fn poll_source(&mut self) -> Result<Offer, StageError> {
        let cut = self.cuts.get(self.offered).copied();
        self.offered += 1;
        Ok(cut.map_or(Offer::End, Offer::Chunk))
    }

    fn build(&mut self, place: Place, slot: &mut TxLease) -> Result<Built<Toy, u64>, StageError> {
        let chunk = place.chunk.get();
        // Every third chunk is shorter, every seventh empty.
        let bytes = match chunk {
            n if n % 7 == 3 => 0,
            n if n % 3 == 2 => BYTES / 2,
            _ => BYTES,
        };
        slot.bytes_mut()[..bytes].fill(chunk as u8);
        let envelope = Envelope::new(Toy(ADDED), self::bytes(bytes), self::bytes(bytes)).unwrap();
        Ok(Built {
            read_ns: self.tells_reads.then_some((chunk, chunk + 1)),
            ..Built::new(envelope, chunk)
        })
    }

    fn is_sink_ready(&mut self, _: usize) -> Result<bool, StageError> {
        if self
            .hold
            .take_if(|hold| hold.is_served.load(Ordering::SeqCst) && hold.go_on.try_recv().is_ok())
            .is_some()
        {
            return Ok(true);
        }
        Ok(self.hold.is_none())
    }

    fn decode(
        &mut self,
        chunk: ChunkIndex,
        carry: u64,
        _: &Outcome,
        payload: Option<RxLease>,
    ) -> Result<Progress<Decoded, Decoded>, StageError> {
        assert_eq!(carry, chunk.get());
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

    fn poll_decoded(&mut self, oldest: Decoded) -> Result<Progress<Decoded, Decoded>, StageError> {
        Ok(self.later.as_mut().unwrap().poll(oldest))
    }
}

pub(crate) struct Adder {
    pub(crate) fail_at: Option<u64>,
    pub(crate) lie_about_calls: bool,
    pub(crate) later: Option<Device>,
}

impl Adder {
    pub(crate) fn new() -> Self {
        Self {
            fail_at: None,
            lie_about_calls: false,
            later: None,
        }
    }
}

impl PhaseBStages<TxLease, RxLease> for Adder {
    type Plan = Toy;
    type Computing = Computed;

    fn compute(
        &mut self,
        place: Place,
        envelope: &Envelope<Toy>,
        input: Option<&RxLease>,
        output: &mut TxLease,
    ) -> Result<Progress<Computed, Computed>, StageError> {
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

    fn poll_computed(
        &mut self,
        oldest: Computed,
    ) -> Result<Progress<Computed, Computed>, StageError> {
        Ok(self.later.as_mut().unwrap().poll(oldest))
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
    if let Some(hold) = &stages.hold {
        let (is_served, served) = (Arc::clone(&hold.is_served), hold.served.clone());
        front_switch.when_served(move || {
            is_served.store(true, Ordering::SeqCst);
            served.send(()).unwrap();
        });
    }
    let ((front, records), back) = std::thread::scope(|scope| {
        let back = scope.spawn(|| run_phase_b(back, &mut adder, &back_switch, Rank::new(0), depth));
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
