//! Two ranks in one process.

use pp_contract::{Rank, WorldSize};
use pp_runtime::switch::Switch;
use pp_transport::bell::Bell;
use pp_transport::control::{ControlChannel, RendezvousOptions, rendezvous};
use pp_transport::host::{EdgeShape, HostLink};
use pp_transport::launch::LocalJob;
use pp_transport::link::Link as _;

/// The shape of an edge.
pub const fn edge(depth: u32, slot_bytes: u64) -> EdgeShape {
    EdgeShape { depth, slot_bytes }
}

/// Both ends of a link on one host, and the switch of each rank.
#[derive(Debug)]
pub struct Pair {
    /// The end of rank 0.
    pub front: HostLink,
    /// The end of rank 1.
    pub back: HostLink,
    /// The switch of rank 0.
    pub front_switch: Switch,
    /// The switch of rank 1.
    pub back_switch: Switch,
}

impl Pair {
    /// A new link, whose front listens to this bell.
    pub fn new(up: EdgeShape, down: EdgeShape, bell: Bell) -> Self {
        let (front, back) = HostLink::pair(up, down, bell.clone()).unwrap();
        let front_switch = Switch::new(Rank::new(0), bell).unwrap();
        let back_switch = Switch::new(Rank::new(1), back.bell().clone()).unwrap();
        Self {
            front,
            back,
            front_switch,
            back_switch,
        }
    }
}

/// Both ends of a control channel: that of rank 0, that of rank 1.
pub fn channels() -> (ControlChannel, ControlChannel) {
    let job = LocalJob::new(WorldSize::new(2).unwrap());
    let meet = |rank: u32| {
        let launch = job.launch(Rank::new(rank)).unwrap();
        let mut peers = rendezvous(&launch, &RendezvousOptions::default()).unwrap();
        peers.take(Rank::new(1 - rank)).unwrap()
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| meet(1));
        (meet(0), other.join().unwrap())
    })
}
