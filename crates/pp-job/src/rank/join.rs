//! Joining a job: meet the other rank, agree with it, learn the shape of the work.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use pp_contract::{
    Fault, FaultKind, Generation, Hello, HelloParts, Plan, Rank, Settings, Text, WorldSize, digest,
};
use pp_runtime::watch::{SetUp, WatchOptions};
use pp_transport::backend::{Backend, Peer};
use pp_transport::control::{
    ControlSender, Message, RendezvousOptions, SocketKind, Tell, agree, rendezvous,
};
use pp_transport::launch::Launch;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::failover::Failover;
use crate::context::Context;
use crate::end::say_aside;
use crate::error::Error;
use crate::reports::TargetProcess;
use crate::{FRONT, GRACE, PHASE_B, times};

/// What must be the same on both ranks, beside the plan and the backend: the handshake compares it.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    settings: Vec<(String, String)>,
    /// The most chunks that the job has.
    pub chunks: Option<u64>,
    /// The kernels' name and version.
    pub kernels: String,
    /// A digest of the kernels.
    pub kernels_digest: u64,
    /// What this rank found and chose by itself, if it did. When the other rank differs, the error says it.
    pub choice: Option<String>,
}

impl Profile {
    /// A profile without settings.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a setting that both ranks must have alike; the error of a handshake names it. A name has at most 64 bytes
    /// and a value at most 256; longer ones end the set-up with an error. `pp-job` adds those of the backend.
    #[must_use]
    pub fn set(mut self, name: &str, value: impl ToString) -> Self {
        self.settings.push((name.to_owned(), value.to_string()));
        self
    }
}

/// A rank that has met its peer and agreed with it.
pub(crate) struct Member {
    pub(super) context: Arc<Context>,
    /// This rank.
    pub(super) own: Rank,
    pub(super) peer: Rank,
    pub(super) set_up: SetUp,
    /// The peer's process, where it is one of this machine.
    pub(super) peer_pid: Option<u32>,
    /// Which link between the two this will be.
    pub(super) generation: Generation,
    /// Set where this rank survives the loss of its peer.
    pub(super) failover: Option<Arc<Failover>>,
}

/// Why a rank did not join.
pub(crate) struct JoinError {
    pub(crate) error: Error,
    /// The time was over, and the other rank had not come.
    pub(crate) is_timeout: bool,
    /// The process of Phase B that came, if one did.
    pub(crate) phase_b: TargetProcess,
}

impl<E: Into<Error>> From<E> for JoinError {
    fn from(error: E) -> Self {
        Self {
            error: error.into(),
            is_timeout: false,
            phase_b: TargetProcess::Unknown,
        }
    }
}

/// Meets the other rank and compares how both were started.
pub(crate) fn join<P: Plan>(
    context: &Arc<Context>,
    launch: &Launch,
    backend: &impl Backend,
    profile: &Profile,
    within: Duration,
) -> Result<Member, JoinError> {
    let rank = launch.rank();
    let hello = hello::<P>(launch, backend, profile).map_err(|e| join_to_abort(launch, e))?;
    let tell = Some(Tell {
        every: if context.is_supervised() {
            times::TELL_EVERY_SUPERVISED
        } else {
            times::TELL_EVERY
        },
        take: |line| say_aside(format!("pp: {line}")),
    });
    let options = RendezvousOptions {
        timeout: within,
        tell,
        ..RendezvousOptions::default()
    };
    let mut peers = rendezvous(launch, &options).map_err(|error| JoinError {
        is_timeout: error.is_timeout(),
        ..error.fault(rank).into()
    })?;
    let agreed = agree(&mut peers, &hello, Instant::now() + times::SET_UP_WITHIN);
    agreed.map_err(|fault| explain(fault, rank, profile))?;
    let peer = if rank == FRONT { PHASE_B } else { FRONT };
    let missing = || anyhow::anyhow!("rank {peer} is not among the peers");
    let channel = peers.take(peer).ok_or_else(missing)?;
    let pid = channel.peer_pid();
    let (ending, flight) = (Arc::clone(context), context.flight.clone());
    let options = WatchOptions {
        rank,
        heartbeat: context.config.heartbeat,
        grace: GRACE,
        limits: context.config.limits,
        on_stuck: Box::new(move |fault| ending.end_with(fault)),
        on_fault: Some(Box::new(move |fault| flight.write_for_fault(fault))),
    };
    let mut set_up = SetUp::start(vec![channel], options).map_err(anyhow::Error::new)?;
    set_up.tell(tell);
    context.signals.set_up(set_up.sender(peer));
    Ok(Member {
        context: Arc::clone(context),
        own: rank,
        peer,
        set_up,
        peer_pid: pid.map(|pid| pid.as_raw_nonzero().get().cast_unsigned()),
        generation: Generation::new(0),
        failover: None,
    })
}

/// A fault of the handshake, with what this rank chose by itself: the ranks may have found different machines. Whether
/// that is why they differ is for a person to read.
fn explain(fault: Fault, rank: Rank, profile: &Profile) -> Fault {
    match &profile.choice {
        Some(choice) if fault.kind == FaultKind::HandshakeMismatch => {
            let detail = format!("{}; rank {rank} chose by itself: {choice}", fault.detail);
            Fault::new(fault.kind, fault.rank, &fault.operation, detail)
        }
        _ => fault,
    }
}

/// A rank that cannot take part joins all the same, to say why: the others would wait for it as long as for one that is
/// late. They find wrong usage themselves, as they have the same command line.
pub(crate) fn join_to_abort(launch: &Launch, error: Error) -> Error {
    if let Error::Usage(_) = error {
        return error;
    }
    let options = RendezvousOptions {
        timeout: times::DECLINE_WITHIN,
        ..RendezvousOptions::default()
    };
    // Where none is there, none waits.
    if let Ok(peers) = rendezvous(launch, &options) {
        let told = Message::Abort(error.fault(launch.rank(), "set up"));
        for channel in peers.iter() {
            let deadline = Instant::now() + times::DECLINE_WITHIN;
            let _ = channel.sender().send(&told, deadline);
        }
    }
    error
}

impl Member {
    /// This rank for a link of this generation, if it survives the loss of its peer.
    pub(super) fn with_failover(
        mut self,
        generation: Generation,
        failover: &Arc<Failover>,
    ) -> Self {
        self.generation = generation;
        self.failover = Some(Arc::clone(failover));
        self.survive_peer_loss();
        self
    }

    /// From now on the loss of the peer does not end this process.
    pub(super) fn survive_peer_loss(&self) {
        self.set_up.live_on();
    }

    /// Tells the peer what the front found in its input.
    pub(super) fn tell_shape(&self, shape: &impl Serialize) -> Result<(), Error> {
        let body = serde_json::to_vec(shape).map_err(anyhow::Error::new)?;
        Ok(self.send(&body)?)
    }

    /// Learns from the front what it found in its input; waits as long as that takes.
    pub(super) fn hear_shape<T: DeserializeOwned>(&mut self) -> Result<T, Error> {
        const WHAT: &str = "learn the shape of the work";
        let body = self.receive(WHAT)?;
        let refuse =
            |what: serde_json::Error| Fault::new(FaultKind::PeerMisbehaved, self.peer, WHAT, what);
        Ok(serde_json::from_slice(&body).map_err(refuse)?)
    }

    /// Ends the job before it began: tells the peer why.
    pub(super) fn give_up(self, error: Error) -> Error {
        // A peer that cannot be told notices the end of the connection.
        self.set_up.raise(error.fault(self.own, "set up"));
        error
    }

    /// Why the peer was lost, if more is known of it.
    fn lost(&self, otherwise: Fault) -> Fault {
        self.set_up.fault().unwrap_or(otherwise)
    }
}

impl Peer for Member {
    fn own_rank(&self) -> Rank {
        self.own
    }

    fn rank(&self) -> Rank {
        self.peer
    }

    fn shares_host(&self) -> bool {
        self.set_up.socket_kind(self.peer) == SocketKind::Unix
    }

    fn sender(&self) -> &ControlSender {
        self.set_up.sender(self.peer)
    }

    fn send(&self, body: &[u8]) -> Result<(), Fault> {
        let deadline = Instant::now() + times::SET_UP_WITHIN;
        let sent = self.sender().send(&Message::Frame(body), deadline);
        sent.map_err(|e| self.lost(e.fault("set up")))
    }

    fn receive(&mut self, operation: &'static str) -> Result<Vec<u8>, Fault> {
        self.set_up.frame(self.peer, operation)
    }

    fn send_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<(), Fault> {
        let deadline = Instant::now() + times::SET_UP_WITHIN;
        let sent = self.sender().send_fds(fds, deadline);
        sent.map_err(|e| self.lost(e.fault("pass shared memory")))
    }

    fn receive_fds(&mut self) -> Result<Vec<OwnedFd>, Fault> {
        // The peer may load weights before it maps anything.
        self.set_up.descriptors(self.peer, "receive shared memory")
    }
}

fn hello<P: Plan>(
    launch: &Launch,
    backend: &impl Backend,
    profile: &Profile,
) -> Result<Hello, Error> {
    let (plan_name, plan_version) = HelloParts::plan::<P>();
    let mut settings = Settings::new();
    for (name, value) in profile.settings.iter().chain(&backend.settings()) {
        let set = settings.set(name, value);
        set.with_context(|| format!("the setting {name:?} of the handshake"))?;
    }
    // What a rank that works in host memory was given does not matter.
    let (device, device_given) = backend.device().unzip();
    let parts = HelloParts {
        job: digest(launch.job_id().as_bytes()),
        rank: launch.rank(),
        world_size: WorldSize::new(launch.world_size().get()).map_err(anyhow::Error::new)?,
        plan_name,
        plan_version,
        settings,
        chunks: profile.chunks,
        host: Text::truncated(&rustix::system::uname().nodename().to_string_lossy()),
        device: device.as_deref().map(Text::truncated),
        device_given: device_given.flatten().as_deref().map(Text::truncated),
        kernels: Text::truncated(&profile.kernels),
        kernels_digest: profile.kernels_digest,
    };
    Ok(Hello::new(parts).map_err(anyhow::Error::new)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_chose_by_itself_says_why_when_another_chose_otherwise() {
        let fault = |kind| Fault::new(kind, PHASE_B, "handshake", "transport differs");
        let alone = Profile::new();
        let chose = Profile {
            choice: Some("on CPUs: no driver was found".into()),
            ..Profile::new()
        };
        let mismatch = fault(FaultKind::HandshakeMismatch);
        let text = explain(mismatch.clone(), PHASE_B, &chose).to_string();
        let why = "transport differs; rank 1 chose by itself: on CPUs";
        assert!(text.contains(why), "{text}");
        assert_eq!(explain(mismatch.clone(), PHASE_B, &alone), mismatch);
        let died = fault(FaultKind::PeerDied);
        assert_eq!(explain(died.clone(), PHASE_B, &chose), died);
    }
}
