//! Groups as a rank makes them with its backend: the leader passes what is needed to each other member.

mod host;
mod nccl;

use std::time::Instant;

use pp_contract::Rank;
use pp_testing::HANG;
use pp_transport::backend::{Backend, Joined, Neighbours, Peer};
use pp_transport::error::TransportError;
use pp_transport::flight::FlightRecorder;
use pp_transport::group::Members;
use pp_transport::launch::Via;

use crate::edges_support::Meeting;
use crate::two_way::how;

/// What a member asks for the ranks with which it has an edge.
struct Wires<'m> {
    meeting: &'m Meeting,
    own: Rank,
}

impl Neighbours for Wires<'_> {
    fn neighbour(&mut self, rank: Rank) -> Box<dyn Peer + '_> {
        let has_edge = [self.own, rank].contains(&ranks(1)[0]);
        assert!(has_edge, "only the leader has one to each other member");
        Box::new(self.meeting.peer(self.own, rank))
    }
}

/// Ranks that are not their places; the first leads, and is not the lowest.
fn ranks(members: usize) -> Vec<Rank> {
    (0..members)
        .map(|at| Rank::new(if at == 0 { 7 } else { at as u32 }))
        .collect()
}

/// Makes this rank's member, as a job does it.
fn join<B: Backend>(
    backend: &mut B,
    at: usize,
    members: usize,
    mut wires: Wires<'_>,
    recorder: &FlightRecorder,
) -> Result<Joined<B::Group>, TransportError> {
    let ranks = ranks(members);
    let members = Members::new("phase_b", &ranks, ranks[at])?;
    let agreed = backend.agree_on_group(&members, &mut wires).unwrap();
    backend.connect_group(agreed, how(HANG, &|| true, recorder))
}

/// Runs the part of each member on a thread of its own; gives what they return.
fn each<R: Send>(members: usize, via: Via, part: impl Fn(usize, Wires<'_>) -> R + Sync) -> Vec<R> {
    let (ranks, part) = (ranks(members), &part);
    let meeting = &Meeting::new(&ranks, via);
    std::thread::scope(|scope| {
        let run = |(at, own)| scope.spawn(move || part(at, Wires { meeting, own }));
        let threads: Vec<_> = ranks.iter().copied().enumerate().map(run).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}
