//! How a rank joins a job: it meets the other ranks, agrees with them, and learns what rank 0 found in the input.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use pp_contract::{
    DeviceName, Fault, FaultKind, Generation, Hello, HelloParts, Pipeline, Plan, Rank, Settings,
    Text, WorldSize, digest,
};
use pp_runtime::watch::{SetUp, Sign, WatchOptions};
use pp_transport::backend::{Ahead, Backend};
use pp_transport::control::{
    ControlChannel, ControlSender, Message, OnMet, RendezvousOptions, Tell, agree, introduce,
    rendezvous,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::failover::Failover;
use crate::config::host_name;
use crate::context::Context;
use crate::end::say_aside;
use crate::error::Error;
use crate::job::ThisRank;
use crate::reports::TargetProcess;
use crate::{RANK_0, times};

/// Lists the settings, beside plan and backend, that must be equal on all ranks. The handshake compares them.
#[derive(Clone, Debug, Default)]
pub struct Profile {
    settings: Vec<(String, String)>,
    /// The most chunks that the job has.
    pub chunks: Option<u64>,
    /// What this rank found and chose by itself, if it did. When another rank differs, the error says it.
    pub choice: Option<String>,
}

impl Profile {
    /// A profile without settings.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a setting that all ranks must have alike; the error of a handshake names it. A name has at most 64 bytes
    /// and a value at most 256; longer ones end the set-up with an error. `pp-job` adds those of the backend.
    #[must_use]
    pub fn set(mut self, name: &str, value: impl ToString) -> Self {
        self.settings.push((name.to_owned(), value.to_string()));
        self
    }

    /// Gives the settings so far, by name.
    #[must_use]
    pub fn settings(&self) -> &[(String, String)] {
        &self.settings
    }

    /// Adds the kernels of a stage: their name and version, and a digest that tells two builds of them apart.
    #[must_use]
    pub fn kernels(self, stage: &str, name: &str, digest: u64) -> Self {
        let name = Text::<200>::truncated(name);
        self.set(
            &format!("kernels.{stage}"),
            format_args!("{}, digest {digest:016x}", name.as_str()),
        )
    }
}

/// A rank that has met the others and agreed with them.
pub(crate) struct JoinedRank {
    pub(super) context: Arc<Context>,
    /// This rank.
    pub(super) own: Rank,
    pub(super) set_up: SetUp,
    /// The ranks that it has a channel to.
    peers: Vec<Rank>,
    /// By rank: the UUID of the device on which its payloads lie; none for host memory.
    pub(super) devices: Vec<Option<Text<64>>>,
    /// The processes of the others, as far as they are of this machine.
    pub(super) pids: Vec<(Rank, u32)>,
    /// Which attempt to connect all ranks this is.
    pub(super) generation: Generation,
    /// What was made for the edges with some of them while they were awaited.
    pub(super) ahead: Vec<(Rank, Ahead)>,
    /// Set where this rank survives the loss of another.
    pub(super) failover: Option<Arc<Failover>>,
}

/// Why a rank did not join.
pub(crate) struct JoinError {
    pub(crate) error: Error,
    /// The time was over, and another rank had not come.
    pub(crate) is_timeout: bool,
    /// This rank was there, and rank 0 waited for another in vain.
    pub(crate) is_dismissed: bool,
    /// The process of the rank that the error blames, if one came.
    pub(crate) process: TargetProcess,
}

/// What rank 0 tells the others before they are connected.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Briefing<T> {
    pub(super) context_chunks: u32,
    pub(super) steps: u16,
    pub(super) shape: T,
}

impl JoinError {
    /// What went wrong once these processes had come.
    pub(super) fn after(error: Error, pids: &[(Rank, u32)]) -> Self {
        let blamed = match &error {
            Error::Fault(fault) => pids.iter().find(|(rank, _)| *rank == fault.rank),
            _ => None,
        };
        let process = blamed.map_or(TargetProcess::Unknown, |(_, pid)| TargetProcess::This(*pid));
        Self {
            process,
            ..error.into()
        }
    }
}

impl<E: Into<Error>> From<E> for JoinError {
    fn from(error: E) -> Self {
        Self {
            error: error.into(),
            is_timeout: false,
            is_dismissed: false,
            process: TargetProcess::Unknown,
        }
    }
}

/// Meets the other ranks and compares how all were started.
pub(crate) fn join<P: Plan, B: Backend>(
    this: &ThisRank<'_>,
    backend: &B,
    profile: &Profile,
    within: Duration,
) -> Result<JoinedRank, JoinError> {
    let (context, launch) = (this.context, this.launch);
    let rank = launch.rank();
    let hello = hello::<P>(this, backend, profile)?;
    let tell = Some(Tell {
        every: if context.is_supervised() {
            times::TELL_EVERY_SUPERVISED
        } else {
            times::TELL_EVERY
        },
        take: |line| say_aside(format!("pp: {line}")),
    });
    let signals = context.signals.clone();
    signals.set_up(Vec::new());
    context.is_met.store(true, Ordering::Relaxed);
    let options = RendezvousOptions {
        timeout: within,
        tell,
        on_met: Some(OnMet(Arc::new(move |peer| signals.meet(peer)))),
        ..RendezvousOptions::default()
    };
    let mut peers = rendezvous(launch, &options).map_err(|error| JoinError {
        is_timeout: error.is_timeout(),
        is_dismissed: error.is_dismissal(),
        ..error.fault(rank).into()
    })?;
    let deadline = Instant::now() + times::SET_UP_WITHIN;
    let agreed = agree(&mut peers, &hello, deadline);
    let hellos = agreed.map_err(|fault| explain(fault, rank, profile))?;
    check_shared(&this.job.pipeline, &hellos)?;
    let edges = this.job.pipeline.edges();
    let pairs: Vec<_> = edges.map(|edge| (edge.source, edge.target)).collect();
    introduce(&mut peers, launch, &pairs, deadline)?;
    let mut channels = Vec::new();
    for other in launch.world_size().ranks().filter(|other| *other != rank) {
        channels.extend(peers.take(other));
    }
    let ranks: Vec<Rank> = channels.iter().map(ControlChannel::peer).collect();
    let pid = |channel: &ControlChannel| {
        let pid = channel.peer_pid()?.as_raw_nonzero().get().cast_unsigned();
        Some((channel.peer(), pid))
    };
    let pids = channels.iter().filter_map(pid).collect();
    let (ending, flight) = (Arc::clone(context), context.flight.clone());
    let (viewer, signs) = (context.viewer.clone(), context.signs.clone());
    let options = WatchOptions {
        rank,
        // A rank without others has no heartbeats: the watchdog then watches only whether the driver makes progress.
        heartbeat: context.config.heartbeat.filter(|_| !channels.is_empty()),
        grace: times::GRACE,
        limits: context.config.limits,
        on_stuck: Box::new(move |fault| ending.end_with(fault)),
        on_fault: Some(Box::new(move |fault| flight.write_for_fault(fault))),
        on_sign: Some(Box::new(move |sign| match (sign, &viewer) {
            (Sign::Of(rank, vitals), Some(viewer)) => viewer.hear(rank, vitals),
            (Sign::Asked(is_on), None) => signs.ask(is_on),
            // Rank 0 asks, and the others say.
            (Sign::Of(..), None) | (Sign::Asked(_), Some(_)) => {}
        })),
    };
    let mut set_up = SetUp::start(channels, options).map_err(anyhow::Error::new)?;
    set_up.tell(tell);
    let senders = ranks.iter().map(|peer| set_up.sender(*peer).clone());
    context.signals.set_up(senders.collect());
    Ok(JoinedRank {
        context: Arc::clone(context),
        own: rank,
        set_up,
        ahead: Vec::new(),
        devices: hellos
            .iter()
            .map(|hello| hello.parts().device.clone())
            .collect(),
        peers: ranks,
        pids,
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
            fault.with_detail(detail)
        }
        _ => fault,
    }
}

impl JoinedRank {
    /// This rank, if it survives the loss of another.
    pub(super) fn with_failover(mut self, failover: &Arc<Failover>) -> Self {
        self.failover = Some(Arc::clone(failover));
        self.survive_loss();
        self
    }

    /// From now on the loss of another rank does not end this process.
    pub(super) fn survive_loss(&self) {
        self.set_up.live_on();
    }

    /// Rank 0 tells all others what they must know.
    pub(super) fn tell_briefing(&self, briefing: &impl Serialize) -> Result<(), Error> {
        let body = serde_json::to_vec(briefing).map_err(anyhow::Error::new)?;
        for peer in &self.peers {
            self.tell(*peer, &body)?;
        }
        Ok(())
    }

    /// Sends bytes to another rank.
    pub(super) fn tell(&self, peer: Rank, body: &[u8]) -> Result<(), Fault> {
        let deadline = Instant::now() + times::SET_UP_WITHIN;
        let frame = Message::Frame(body);
        let send = |to: &ControlSender| to.send(&frame, deadline);
        self.set_up.send(peer, "set up", send)
    }

    /// Learns from rank 0 what it found in its input; waits as long as that takes.
    pub(super) fn hear_briefing<T: DeserializeOwned>(&mut self) -> Result<T, Error> {
        const WHAT: &str = "learn the shape of the work";
        let body = self.set_up.frame(RANK_0, WHAT)?;
        let refuse =
            |what: serde_json::Error| Fault::new(FaultKind::PeerMisbehaved, RANK_0, WHAT, what);
        Ok(serde_json::from_slice(&body).map_err(refuse)?)
    }

    /// Ends the job before it began: tells the others why.
    pub(super) fn give_up(self, error: Error) -> Error {
        // A peer that cannot be told notices the end of the connection.
        self.set_up.raise(error.fault(self.own, "set up"));
        error
    }
}

/// Refuses two ranks on one device if NCCL would connect them. NCCL itself refuses such ranks only if their hosts have the same
/// name, or NCCL_HOSTID. So an edge between two host names is let through; the ranks of a group are always refused. All hellos
/// are there, in order of the ranks.
fn check_shared(pipeline: &Pipeline, hellos: &[Hello]) -> Result<(), Fault> {
    let parts = |rank: Rank| hellos[rank.get() as usize].parts();
    let is_nccl = |hello: &Hello| hello.parts().device_settings.get("transport") == Some("nccl");
    let is_nccl = hellos.iter().any(is_nccl);
    let members = pipeline.stages().iter().flat_map(|stage| {
        let ranks = &stage.ranks;
        let pairs = move |at: usize| ranks[..at].iter().map(move |one| (*one, ranks[at]));
        (0..ranks.len()).flat_map(pairs)
    });
    let edges = pipeline.edges().filter(|_| is_nccl);
    let edges = edges.map(|edge| (edge.source, edge.target));
    let edges = edges.filter(|(one, other)| parts(*one).host == parts(*other).host);
    for (one, other) in members.chain(edges).filter(|(one, other)| one != other) {
        let (first, second) = (&parts(one).device, &parts(other).device);
        let Some(shared) = first.as_ref().filter(|_| first == second) else {
            continue;
        };
        let what = format!(
            "ranks {one} and {other} are both on {shared}, and NCCL, which connects them, takes one GPU for each rank; give each \
             a GPU of its own, or use --transport p2p and no groups"
        );
        return Err(Fault::new(
            FaultKind::HandshakeMismatch,
            other,
            "set up",
            what,
        ));
    }
    Ok(())
}

fn hello<P: Plan>(
    this: &ThisRank<'_>,
    backend: &impl Backend,
    profile: &Profile,
) -> Result<Hello, Error> {
    let launch = this.launch;
    let (plan_name, plan_version) = HelloParts::plan::<P>();
    // What a rank that works in host memory was given does not matter.
    let (device, device_given) = backend.device().unzip();
    let parts = HelloParts {
        job: digest(launch.job_id().as_bytes()),
        rank: launch.rank(),
        world_size: WorldSize::new(launch.world_size().get()).map_err(anyhow::Error::new)?,
        plan_name,
        plan_version,
        settings: settings(&profile.settings)?,
        device_settings: settings(&backend.device_settings())?,
        chunks: profile.chunks,
        host: Text::truncated(&host_name()),
        device: device.as_deref().map(Text::truncated),
        device_given: device_given.flatten().as_deref().map(Text::truncated),
        device_named: matches!(this.device(), Some(DeviceName::Cuda(_))),
    };
    Ok(Hello::new(parts).map_err(anyhow::Error::new)?)
}

fn settings(given: &[(String, String)]) -> Result<Settings, Error> {
    let mut settings = Settings::new();
    for (name, value) in given {
        let set = settings.set(name, value);
        set.with_context(|| format!("the setting {name:?} of the handshake"))?;
    }
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edge_over_nccl_joins_two_host_names_on_one_gpu_and_a_group_does_not() {
        let is_refused = |pipeline: &str, hosts: [&str; 2]| {
            let hello = |(rank, host): (u32, &str)| {
                let parts = HelloParts {
                    job: 7,
                    rank: Rank::new(rank),
                    world_size: WorldSize::new(2).unwrap(),
                    plan_name: Text::truncated("plan"),
                    plan_version: 1,
                    settings: Settings::new(),
                    device_settings: settings(&[("transport".into(), "nccl".into())]).unwrap(),
                    chunks: None,
                    host: Text::truncated(host),
                    device: Some(Text::truncated("GPU-1")),
                    device_given: None,
                    device_named: true,
                };
                Hello::new(parts).unwrap()
            };
            let hellos: Vec<_> = (0..).zip(hosts).map(hello).collect();
            check_shared(&pipeline.parse().unwrap(), &hellos).is_err()
        };
        let (edge, group) = ("a@0 -> b@1", "a@0 -> b@0+1 -> c@0");
        assert!(is_refused(edge, ["one", "one"]));
        assert!(!is_refused(edge, ["one", "two"]));
        assert!(is_refused(group, ["one", "two"]));
    }

    #[test]
    fn a_rank_that_chose_by_itself_says_why_when_another_chose_otherwise() {
        let fault = |kind| Fault::new(kind, Rank::new(1), "handshake", "transport differs");
        let alone = Profile::new();
        let chose = Profile {
            choice: Some("on CPUs: no driver was found".into()),
            ..Profile::new()
        };
        let mismatch = fault(FaultKind::HandshakeMismatch);
        let text = explain(mismatch.clone(), Rank::new(1), &chose).to_string();
        let why = "transport differs; rank 1 chose by itself: on CPUs";
        assert!(text.contains(why), "{text}");
        assert_eq!(explain(mismatch.clone(), Rank::new(1), &alone), mismatch);
        let died = fault(FaultKind::PeerDied);
        assert_eq!(explain(died.clone(), Rank::new(1), &chose), died);
    }
}
