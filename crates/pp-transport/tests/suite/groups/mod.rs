//! Groups as a rank makes them with its backend: the leader passes what is needed to each other member.

mod host;
mod nccl;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use pp_contract::{Fault, Generation, Rank};
use pp_transport::backend::{Backend, Connect, Joined, Neighbours, Peer};
use pp_transport::control::ControlSender;
use pp_transport::error::TransportError;
use pp_transport::flight::FlightRecorder;
use pp_transport::group::Members;

/// Far enough away that only a hang reaches it.
const HANG: Duration = Duration::from_secs(60);

enum Said {
    Bytes(Vec<u8>),
    Fds(Vec<OwnedFd>),
}

/// A rank's end of what it says to another.
struct Wire {
    own: Rank,
    other: Rank,
    on_host: bool,
    to: Sender<Said>,
    from: Receiver<Said>,
}

impl Peer for &mut Wire {
    fn own_rank(&self) -> Rank {
        self.own
    }
    fn rank(&self) -> Rank {
        self.other
    }
    fn shares_host(&self) -> bool {
        self.on_host
    }
    fn sender(&self) -> &ControlSender {
        unreachable!("a group has no headers")
    }
    fn send(&self, body: &[u8]) -> Result<(), Fault> {
        self.to.send(Said::Bytes(body.to_vec())).unwrap();
        Ok(())
    }
    fn receive(&mut self, _: &'static str) -> Result<Vec<u8>, Fault> {
        match self.from.recv_timeout(HANG).unwrap() {
            Said::Bytes(bytes) => Ok(bytes),
            Said::Fds(_) => panic!("descriptors where bytes were due"),
        }
    }
    fn send_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<(), Fault> {
        let own = fds.iter().map(|fd| fd.try_clone_to_owned().unwrap());
        self.to.send(Said::Fds(own.collect())).unwrap();
        Ok(())
    }
    fn receive_fds(&mut self) -> Result<Vec<OwnedFd>, Fault> {
        match self.from.recv_timeout(HANG).unwrap() {
            Said::Fds(fds) => Ok(fds),
            Said::Bytes(_) => panic!("bytes where descriptors were due"),
        }
    }
}

/// The ranks with which one has an edge.
struct Wires(Vec<Wire>);

impl Neighbours for Wires {
    fn neighbour(&mut self, rank: Rank) -> Box<dyn Peer + '_> {
        let wire = self.0.iter_mut().find(|wire| wire.other == rank);
        Box::new(wire.expect("only the leader has a channel to each other member"))
    }
}

/// Ranks that are not their places; the first leads, and is not the lowest.
fn ranks(members: usize) -> Vec<Rank> {
    (0..members)
        .map(|at| Rank::new(if at == 0 { 7 } else { at as u32 }))
        .collect()
}

/// The wires of each member: those of the leader to all others, and theirs to it.
fn wires(members: usize, on_host: bool) -> Vec<Wires> {
    let ranks = ranks(members);
    let mut all: Vec<Wires> = ranks.iter().map(|_| Wires(Vec::new())).collect();
    for (at, rank) in ranks.iter().enumerate().skip(1) {
        let (down, up) = (channel(), channel());
        let wire = |own, other, to, from| Wire {
            own,
            other,
            on_host,
            to,
            from,
        };
        all[0].0.push(wire(ranks[0], *rank, down.0, up.1));
        all[at].0.push(wire(*rank, ranks[0], up.0, down.1));
    }
    all
}

/// Makes this rank's member, as a job does it.
fn join<B: Backend>(
    backend: &mut B,
    at: usize,
    members: usize,
    mut wires: Wires,
    recorder: &FlightRecorder,
) -> Result<Joined<B::Group>, TransportError> {
    let ranks = ranks(members);
    let members = Members::new("phase_b", &ranks, ranks[at])?;
    let agreed = backend.agree_on_group(&members, &mut wires).unwrap();
    let how = Connect {
        generation: Generation::new(3),
        deadline: Instant::now() + HANG,
        is_wanted: &|| true,
        recorder,
    };
    backend.connect_group(agreed, how)
}

/// Runs the part of each member on a thread of its own; gives what they return.
fn each<R: Send>(on: Vec<Wires>, part: impl Fn(usize, Wires) -> R + Sync) -> Vec<R> {
    let part = &part;
    std::thread::scope(|scope| {
        let run = |(at, wires)| scope.spawn(move || part(at, wires));
        let threads: Vec<_> = on.into_iter().enumerate().map(run).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}
