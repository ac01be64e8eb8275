//! The handshake: nothing is transferred before all ranks agree on how.
//!
//! Hazard: ranks started with different settings hang later, in the middle of a transfer, with no
//! word about why. Guarantee: every rank gets the same answer; a difference names the key, both
//! values and both ranks. Rank 0 gathers all hellos, compares them and tells everybody.

use std::time::Instant;

use pp_contract::{
    DeviceClash, Fault, FaultKind, Hello, Rank, check_devices, compare, with_source,
};
use rustix::event::{PollFd, PollFlags};

use super::channel::ControlChannel;
use super::message::Message;
use super::rendezvous::{MEETING_RANK, Peers};
use super::socket::poll_until;
use crate::times::VERDICT_LATER;

const OPERATION: &str = "handshake";

fn fault(kind: FaultKind, rank: Rank, what: impl std::fmt::Display) -> Fault {
    Fault::new(kind, rank, OPERATION, what)
}

/// Exchanges hellos with all ranks. On success every rank holds all of them, in order of rank.
///
/// # Errors
/// The [`Fault`] that ended it. A mismatch, a conflict of devices, or a rank that is gone, late or
/// misbehaves is the same fault on every rank that can still be told.
pub fn agree(peers: &mut Peers, hello: &Hello, deadline: Instant) -> Result<Vec<Hello>, Fault> {
    let result = if peers.rank() == MEETING_RANK {
        preside(peers, hello, deadline)
    } else {
        attend(peers, hello, deadline)
    };
    match &result {
        Ok(hellos) => tracing::debug!(ranks = hellos.len(), "all ranks agree"),
        Err(fault) => tracing::error!(%fault, "the ranks do not agree"),
    }
    result
}

fn preside(peers: &mut Peers, hello: &Hello, deadline: Instant) -> Result<Vec<Hello>, Fault> {
    let verdict = gather(peers, hello, deadline).and_then(|hellos| {
        judge(&hellos)?;
        encode(&hellos).map(|encoded| (hellos, encoded))
    });
    let deadline = deadline.max(Instant::now() + VERDICT_LATER);
    match verdict {
        Ok((hellos, encoded)) => {
            let told = peers.iter_mut().try_for_each(|channel| {
                let mut tell = |message| channel.tell(&message, OPERATION, deadline);
                encoded
                    .iter()
                    .try_for_each(|hello| tell(Message::Hello(hello)))
                    .and_then(|()| tell(Message::Verdict(&[])))
            });
            if let Err(fault) = &told {
                peers.tell(fault);
            }
            told.map(|()| hellos)
        }
        Err(fault) => {
            if let Ok(body) = fault.encode() {
                for channel in peers.iter() {
                    // A rank that is gone, or that is to blame, need not hear it.
                    let _ = channel.sender().send(&Message::Verdict(&body), deadline);
                }
            }
            Err(fault)
        }
    }
}

/// All hellos, in order of rank. Listens to all at once, so that one that is slow does not hide
/// one that is gone.
fn gather(peers: &mut Peers, own: &Hello, deadline: Instant) -> Result<Vec<Hello>, Fault> {
    let mut hellos = vec![own.clone()];
    while hellos.len() < peers.world_size().get() as usize {
        let is_heard = |rank| hellos.iter().any(|hello: &Hello| hello.rank() == rank);
        let heard = peers.iter_mut().filter(|channel| !is_heard(channel.peer()));
        let new = heard.filter_map(|channel| hear(channel).transpose());
        let new = new.collect::<Result<Vec<Hello>, Fault>>()?;
        if new.is_empty() {
            wait_for_any(peers, is_heard, deadline)?;
        }
        hellos.extend(new);
    }
    hellos.sort_by_key(Hello::rank);
    Ok(hellos)
}

/// The hello of a rank, if it is there.
fn hear(channel: &mut ControlChannel) -> Result<Option<Hello>, Fault> {
    let rank = channel.peer();
    let misbehaved = |what: String| fault(FaultKind::PeerMisbehaved, rank, what);
    let message = channel.receiver().try_recv();
    let hello = match message.map_err(|error| error.fault(OPERATION))? {
        None => return Ok(None),
        Some(Message::Hello(bytes)) => Hello::decode(bytes),
        Some(Message::Abort(fault)) => return Err(fault),
        Some(other) => {
            return Err(misbehaved(format!("{} in place of a hello", other.name())));
        }
    };
    let hello = hello.map_err(|error| {
        let what = format!(
            "the hello of rank {rank} is refused: {}",
            with_source(&error)
        );
        fault(FaultKind::HandshakeMismatch, rank, what)
    })?;
    if hello.rank() != rank {
        let what = format!("rank {rank} says hello as rank {}", hello.rank());
        return Err(misbehaved(what));
    }
    Ok(Some(hello))
}

/// Sleeps until one of the ranks not yet heard says something.
fn wait_for_any(
    peers: &Peers,
    is_heard: impl Fn(Rank) -> bool,
    deadline: Instant,
) -> Result<(), Fault> {
    let started = Instant::now();
    let awaited = peers.iter().filter(|channel| !is_heard(channel.peer()));
    let awaited: Vec<&ControlChannel> = awaited.collect();
    let fds = awaited
        .iter()
        .map(|channel| PollFd::new(*channel, PollFlags::IN));
    let mut fds: Vec<PollFd<'_>> = fds.collect();
    let internal = |what: String| fault(FaultKind::Internal, peers.rank(), what);
    let Some(first) = awaited.first().map(|channel| channel.peer()) else {
        let what = format!(
            "{} channels in a world of {}",
            peers.iter().count(),
            peers.world_size()
        );
        return Err(internal(what));
    };
    match poll_until(&mut fds, deadline) {
        Ok(0) => {
            let what = format!("no hello of rank {first} after {:.1?}", started.elapsed());
            Err(fault(FaultKind::TimedOut, first, what))
        }
        Ok(_) => Ok(()),
        Err(error) => Err(internal(error.to_string())),
    }
}

/// Compares each rank with rank 0, then the devices of all.
fn judge(hellos: &[Hello]) -> Result<(), Fault> {
    let mismatch = |rank, what: String| fault(FaultKind::HandshakeMismatch, rank, what);
    if let Some((first, rest)) = hellos.split_first() {
        for hello in rest {
            // Ranks on GPUs have more settings in common.
            let is_alike =
                |other: &&Hello| other.parts().device.is_some() == hello.parts().device.is_some();
            let alike = hellos.iter().find(is_alike).unwrap_or(first);
            let compared = compare(first, hello).and_then(|()| compare(alike, hello));
            compared.map_err(|error| mismatch(hello.rank(), error.to_string()))?;
        }
    }
    check_devices(hellos)
        .map_err(|error| mismatch(misplaced(&error.clash), error.to_string()))
        .map(|_| ())
}

/// The rank that is to be started differently.
fn misplaced(clash: &DeviceClash) -> Rank {
    match clash {
        DeviceClash::Shared { second, .. } => *second,
        DeviceClash::NotAsGiven { rank, .. } | DeviceClash::RankTwice { rank } => *rank,
        _ => MEETING_RANK,
    }
}

fn encode(hellos: &[Hello]) -> Result<Vec<Vec<u8>>, Fault> {
    let encode = |hello: &Hello| {
        let encoded = hello.encode();
        encoded.map_err(|error| fault(FaultKind::Internal, hello.rank(), error))
    };
    hellos.iter().map(encode).collect()
}

fn attend(peers: &mut Peers, hello: &Hello, deadline: Instant) -> Result<Vec<Hello>, Fault> {
    let own = peers.rank();
    let world_size = peers.world_size().get() as usize;
    let channel = peers
        .get_mut(MEETING_RANK)
        .ok_or_else(|| fault(FaultKind::Internal, own, "no channel to rank 0"))?;
    let encoded = encode(std::slice::from_ref(hello))?.concat();
    // When rank 0 is gone, its reason may still lie there.
    let sent = channel.sender().send(&Message::Hello(&encoded), deadline);
    let misbehaved = |what: String| fault(FaultKind::PeerMisbehaved, MEETING_RANK, what);
    let mut hellos = Vec::new();
    loop {
        let received = channel.receiver().recv_deadline(deadline + VERDICT_LATER);
        match received.map_err(|error| sent.as_ref().err().unwrap_or(&error).fault(OPERATION))? {
            Message::Hello(bytes) if hellos.len() < world_size => {
                let hello =
                    Hello::decode(bytes).map_err(|error| misbehaved(with_source(&error)))?;
                hellos.push(hello);
            }
            Message::Verdict([]) if hellos.len() == world_size => return Ok(hellos),
            Message::Verdict(body) => {
                return Err(
                    Fault::decode(body).unwrap_or_else(|error| misbehaved(with_source(&error)))
                );
            }
            Message::Abort(fault) => return Err(fault),
            other => {
                return Err(misbehaved(format!(
                    "{} in place of a verdict",
                    other.name()
                )));
            }
        }
    }
}
