//! Two ranks in one process.

use pp_contract::{Rank, WorldSize};
use pp_transport::control::{ControlChannel, RendezvousOptions, rendezvous};
use pp_transport::host::EdgeShape;
use pp_transport::launch::LocalJob;

/// The shape of an edge.
pub const fn edge(depth: u32, slot_bytes: u64) -> EdgeShape {
    EdgeShape { depth, slot_bytes }
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
