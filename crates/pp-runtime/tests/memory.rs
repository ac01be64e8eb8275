//! A run may last for days: nothing grows with the number of chunks. A test program of its own,
//! so that no other test allocates meanwhile.

use pp_contract::{
    ChunkIndex, DType, Envelope, Manifest, Outcome, Plan, PlanError, Rank, TensorSpec,
};
use pp_runtime::core::Cut;
use pp_runtime::driver::{FrontOptions, run_front, run_phase_b};
use pp_runtime::stage::{
    Computed, Decoded, FrontStages, Offer, PhaseBStages, Place, Progress, StageError,
};
use pp_runtime::switch::Switch;
use pp_transport::bell::Bell;
use pp_transport::host::{EdgeShape, HostLink, RxLease, TxLease};
use pp_transport::link::Link;

const CHUNKS: u64 = 100_000;
const WARM: u64 = 1_000;

#[derive(Clone, Debug, PartialEq)]
struct Nothing(());

impl Plan for Nothing {
    const NAME: &'static str = "nothing";
    const VERSION: u16 = 1;
    type Parts = ();

    fn from_parts((): ()) -> Result<Self, PlanError> {
        Ok(Self(()))
    }
    fn parts(&self) -> &() {
        &self.0
    }
    fn expected_calls(&self) -> u32 {
        0
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

/// Bytes of this process that are in memory.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * rustix::param::page_size() as u64
}

struct Front {
    manifest: Manifest,
    built: u64,
    decoded: u64,
    resident_when_warm: u64,
    resident_at_end: u64,
}

impl FrontStages<TxLease, RxLease> for Front {
    type Plan = Nothing;

    fn poll_source(&mut self) -> Result<Offer, StageError> {
        Ok(if self.built == CHUNKS {
            Offer::End
        } else {
            Offer::Chunk(Cut::None)
        })
    }
    fn build(&mut self, _: Place, slot: &mut TxLease) -> Result<Envelope<Nothing>, StageError> {
        self.built += 1;
        slot.bytes_mut().fill(self.built as u8);
        let (inputs, outputs) = (self.manifest.clone(), self.manifest.clone());
        Ok(Envelope::new(Nothing(()), inputs, outputs).unwrap())
    }
    fn decode(
        &mut self,
        _: ChunkIndex,
        _: &Outcome,
        _: Option<RxLease>,
    ) -> Result<Progress<Decoded>, StageError> {
        self.decoded += 1;
        match self.decoded {
            WARM => self.resident_when_warm = resident(),
            CHUNKS => self.resident_at_end = resident(),
            _ => {}
        }
        Ok(Progress::Done(Decoded::default()))
    }
}

struct Back;

impl PhaseBStages<TxLease, RxLease> for Back {
    type Plan = Nothing;

    fn compute(
        &mut self,
        _: Place,
        _: &Envelope<Nothing>,
        _: Option<&RxLease>,
        _: &mut TxLease,
    ) -> Result<Progress<Computed>, StageError> {
        Ok(Progress::Done(Computed {
            observed_calls: 0,
            start_frame: 0,
            seal: None,
            worked: None,
        }))
    }
}

#[test]
fn resident_size_at_chunk_100_000_is_what_it_was_at_chunk_1_000() {
    let plain = FrontOptions::new(Rank::new(1), 4);
    // Payloads are kept for a restart, and nothing for them.
    let keeping = FrontOptions {
        restarts: 1,
        context_chunks: 2,
        ..plain
    };
    for options in [plain, keeping] {
        run_long(options);
    }
}

fn run_long(options: FrontOptions) {
    let edge = |depth| EdgeShape {
        depth,
        slot_bytes: 4096,
    };
    let bell = Bell::new().unwrap();
    let (up, down) = (edge(options.forward_slots()), edge(4));
    let (front_link, back_link) = HostLink::pair(up, down, bell.clone()).unwrap();
    let front_switch = Switch::new(Rank::new(0), bell).unwrap();
    let back_switch = Switch::new(Rank::new(1), back_link.bell().clone()).unwrap();
    let spec = TensorSpec::new("x", DType::U8, &[4096]).unwrap();
    let mut front = Front {
        manifest: Manifest::new(&[spec]).unwrap(),
        built: 0,
        decoded: 0,
        resident_when_warm: 0,
        resident_at_end: 0,
    };
    std::thread::scope(|scope| {
        scope.spawn(|| run_phase_b(back_link, &mut Back, &back_switch, Rank::new(0), 4).unwrap());
        run_front(front_link, &mut front, &front_switch, options).unwrap();
    });
    assert_eq!(front.decoded, CHUNKS);
    // The allocator may touch a page or two late; a leak of a byte a chunk would be 99,000.
    let (warm, end) = (front.resident_when_warm, front.resident_at_end);
    assert!(end <= warm + 64 * 1024, "{warm} bytes grew to {end}");
}
