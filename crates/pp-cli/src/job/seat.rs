//! A rank's seat in the job: meet the others, agree, learn the shape of the work.

use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pp_contract::{
    Fault, FaultKind, Generation, Hello, HelloParts, Plan, Rank, Settings, Text, WorldSize, digest,
};
use pp_transport::control::{
    ControlChannel, Message, Peers, RendezvousOptions, Tell, agree, rendezvous,
};
use pp_transport::launch::Launch;
use pp_transport::nccl::Issuer;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::set_up::SetUp;
use super::survival::Survival;
use super::{FRONT, PHASE_B, heartbeat, meet_within, signals, supervise};
use crate::exit::{Failure, code_of, end_now, say_aside};
use crate::flight;

/// Time between two lines of a rank that waits for another.
const TELL_EVERY: Duration = Duration::from_secs(5);
/// The same where a supervisor watches the ranks, which may load for long.
const TELL_EVERY_SUPERVISED: Duration = Duration::from_secs(60);
/// Time that a rank which cannot take part looks for the others to tell them.
const DECLINE_WITHIN: Duration = Duration::from_secs(2);
/// Time for one step of setting up, mapping memory included.
pub(super) const SET_UP_WITHIN: Duration = Duration::from_secs(30);
/// Time to say why. Only a standard error that nobody reads takes all of it, and a machine so busy that a thread waits.
const EXIT_WITHIN: Duration = Duration::from_millis(500);
/// What a rank says of itself, apart from who it is.
pub(crate) struct Profile {
    pub(crate) settings: Settings,
    pub(crate) chunks: Option<u64>,
    pub(crate) kernels: String,
    pub(crate) kernels_digest: u64,
    /// UUID of the GPU, where payloads lie on one.
    pub(crate) device: Option<String>,
}

/// A rank that has met its peer and agreed with it.
pub(crate) struct Seat {
    pub(super) rank: Rank,
    pub(super) peer: Rank,
    pub(super) set_up: SetUp,
    peer_pid: Option<u32>,
    /// Which link between the two this will be.
    pub(crate) generation: Generation,
    /// Set where this rank lives on when its peer is gone.
    pub(super) survival: Option<Arc<Survival>>,
    /// What to connect with, where something was made ready with it.
    pub(crate) issuer: Option<Issuer>,
}

/// Why a rank did not take its seat.
pub(crate) struct Unmet {
    pub(crate) failure: Failure,
    /// The time was over, and the other rank had not come.
    pub(crate) is_timeout: bool,
}

impl<F: Into<Failure>> From<F> for Unmet {
    fn from(failure: F) -> Self {
        Self {
            failure: failure.into(),
            is_timeout: false,
        }
    }
}

impl Seat {
    /// Meets the other ranks and compares how they were started.
    pub(crate) fn take<P: Plan>(launch: &Launch, profile: Profile) -> Result<Self, Failure> {
        Self::take_within::<P>(launch, profile, meet_within()?).map_err(|unmet| unmet.failure)
    }

    /// The same with another time for the ranks to find each other.
    pub(crate) fn take_within<P: Plan>(
        launch: &Launch,
        profile: Profile,
        within: Duration,
    ) -> Result<Self, Unmet> {
        let rank = launch.rank();
        let is_supervised = supervise::is_supervised();
        let options = RendezvousOptions {
            timeout: within,
            tell: Some(Tell {
                every: if is_supervised {
                    TELL_EVERY_SUPERVISED
                } else {
                    TELL_EVERY
                },
                take: |line| say_aside(format!("pp: {line}")),
            }),
            ..RendezvousOptions::default()
        };
        let mut peers = rendezvous(launch, &options).map_err(|error| Unmet {
            failure: error.fault(rank).into(),
            is_timeout: error.is_timeout(),
        })?;
        let hello = hello::<P>(launch, profile)?;
        agree(&mut peers, &hello, Instant::now() + SET_UP_WITHIN)?;
        let peer = if rank == FRONT { PHASE_B } else { FRONT };
        let channel = only_peer(peers, peer)?;
        let pid = channel.peer_pid();
        let set_up = SetUp::start(channel, heartbeat()?).map_err(anyhow::Error::new)?;
        signals::set_up(rank, set_up.sender());
        Ok(Self {
            rank,
            peer,
            set_up,
            peer_pid: pid.map(|pid| pid.as_raw_nonzero().get().cast_unsigned()),
            generation: Generation::new(0),
            survival: None,
            issuer: None,
        })
    }

    /// The same seat for a link of this generation, at a rank that lives on when its peer is gone.
    pub(crate) fn surviving(mut self, generation: Generation, survival: &Arc<Survival>) -> Self {
        self.generation = generation;
        self.survival = Some(Arc::clone(survival));
        self.live_on();
        self
    }

    /// From now on this rank lives on when its peer is gone.
    pub(crate) fn live_on(&self) {
        self.set_up.live_on();
    }

    /// The peer's process, where it is one of this machine.
    pub(crate) fn peer_pid(&self) -> Option<u32> {
        self.peer_pid
    }

    /// A rank that cannot take its seat comes all the same, to say why: the others would wait for
    /// it as long as for one that is late.
    pub(crate) fn decline(launch: &Launch, failure: Failure) -> Failure {
        let Failure::Fault(fault) = &failure else {
            return failure;
        };
        let options = RendezvousOptions {
            timeout: DECLINE_WITHIN,
            ..RendezvousOptions::default()
        };
        // Nobody there: then nobody waits.
        if let Ok(peers) = rendezvous(launch, &options) {
            for channel in peers.iter() {
                let deadline = Instant::now() + DECLINE_WITHIN;
                let told = Message::Abort(fault.clone());
                let _ = channel.sender().send(&told, deadline);
            }
        }
        failure
    }

    /// Tells the peer what the front found in its input.
    pub(crate) fn tell_shape(&mut self, shape: &impl Serialize) -> Result<(), Failure> {
        let body = serde_json::to_vec(shape).map_err(anyhow::Error::new)?;
        self.send(&Message::Frame(&body))
    }

    /// Learns from the front what it found in its input; waits as long as that takes.
    pub(crate) fn hear_shape<T: DeserializeOwned>(&mut self) -> Result<T, Failure> {
        self.hear("learn the shape of the work", |body| {
            serde_json::from_slice(body).map_err(|e| e.to_string())
        })
    }

    /// Takes in the message that the peer sends next; waits as long as the peer is there.
    pub(super) fn hear<T>(
        &mut self,
        operation: &str,
        read: impl FnOnce(&[u8]) -> Result<T, String>,
    ) -> Result<T, Failure> {
        let body = self.set_up.frame(operation)?;
        let refuse = |what| Fault::new(FaultKind::PeerMisbehaved, self.peer, operation, what);
        read(&body).map_err(|what| refuse(what).into())
    }

    /// Ends the job before it began: tells the peer why.
    pub(crate) fn give_up(self, failure: Failure) -> Failure {
        let fault = failure.fault(self.rank, "set up");
        let deadline = Instant::now() + Duration::from_millis(200);
        // A peer that cannot be told notices the end of the connection.
        let _ = self.set_up.sender().send(&Message::Abort(fault), deadline);
        failure
    }

    pub(super) fn send(&self, message: &Message<'_>) -> Result<(), Failure> {
        let sent = self
            .set_up
            .sender()
            .send(message, Instant::now() + SET_UP_WITHIN);
        sent.map_err(|e| self.lost(e.fault("set up")).into())
    }

    /// Why the peer was lost, if more is known of it.
    pub(super) fn lost(&self, otherwise: Fault) -> Fault {
        self.set_up.fault().unwrap_or(otherwise)
    }
}

fn only_peer(mut peers: Peers, peer: Rank) -> Result<ControlChannel, Failure> {
    let missing = || anyhow::anyhow!("rank {peer} is not among the peers").into();
    peers.take(peer).ok_or_else(missing)
}

fn hello<P: Plan>(launch: &Launch, profile: Profile) -> Result<Hello, Failure> {
    let (plan_name, plan_version) = HelloParts::plan::<P>();
    let parts = HelloParts {
        job: digest(launch.job_id().as_bytes()),
        rank: launch.rank(),
        world_size: WorldSize::new(launch.world_size().get()).map_err(anyhow::Error::new)?,
        plan_name,
        plan_version,
        settings: profile.settings,
        chunks: profile.chunks,
        host: Text::truncated(&host_name()),
        device: profile.device.as_deref().map(Text::truncated),
        // What a rank that works in host memory was given does not matter.
        device_given: profile.device.and_then(|_| device_given()),
        kernels: Text::truncated(&profile.kernels),
        kernels_digest: profile.kernels_digest,
    };
    Ok(Hello::new(parts).map_err(anyhow::Error::new)?)
}

/// The GPU that this rank was given by name, where its environment names just one.
fn device_given() -> Option<Text<64>> {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok()?;
    let is_full_uuid = visible.len() == 40 && visible.starts_with("GPU-");
    is_full_uuid.then(|| Text::truncated(&visible))
}

fn host_name() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

/// The driver did not come back from a stage after a fault: end the process under it. Nothing is
/// half written, because unfinished output has no name.
pub(super) fn end_process(fault: &Fault) {
    end_with(fault)
}

/// Ends this process with what is known of the fault.
pub(crate) fn end_with(fault: &Fault) -> ! {
    let fault = fault.clone();
    let code = code_of(fault.kind);
    // On a thread of its own: standard error may be held by whoever is stuck. If there is no thread to
    // be had, the end comes without a word. Nothing runs at exit: the driver may be in a stage.
    let last = std::thread::Builder::new().name("pp-end".into());
    let _ = last.spawn(move || {
        if !supervise::report(&fault) {
            // Without a standard error nobody wants to read it.
            let hint = flight::hint();
            let _ = writeln!(std::io::stderr(), "pp: error: {fault}{hint}");
        }
        end_now(code)
    });
    std::thread::sleep(EXIT_WITHIN);
    signal_hook::low_level::exit(code.into())
}
