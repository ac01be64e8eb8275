//! A rank's seat in the job: meet the others, agree, learn the shape of the work, map the edges.

use std::io::Write;
use std::time::{Duration, Instant};

use pp_contract::{
    Fault, FaultKind, Hello, HelloParts, Plan, Rank, Settings, Text, WorldSize, digest,
};
use pp_runtime::switch::Switch;
use pp_runtime::watch::{Watch, WatchOptions};
use pp_transport::bell::Bell;
use pp_transport::control::{
    ControlChannel, ControlError, Message, Peers, RendezvousOptions, SocketKind, agree, rendezvous,
};
use pp_transport::error::TransportError;
use pp_transport::host::{EdgeShape, HostLink, Offer};
use pp_transport::launch::Launch;
use rustix::process::{Signal, getpid, kill_process};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{FRONT, GRACE, PHASE_B, supervise};
use crate::exit::{Failure, code_of};

/// Time for the ranks to find each other.
const MEET_WITHIN: Duration = Duration::from_secs(60);
/// Time that a rank which cannot take part looks for the others to tell them.
const DECLINE_WITHIN: Duration = Duration::from_secs(2);
/// Time for one step of setting up, mapping memory included.
const SET_UP_WITHIN: Duration = Duration::from_secs(30);
/// Time for what a plugin or library does at exit.
const EXIT_WITHIN: Duration = Duration::from_millis(100);
/// For what a live input may make as long as it likes.
const FOREVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// What a rank says of itself, apart from who it is.
pub(crate) struct Profile {
    pub(crate) settings: Settings,
    pub(crate) chunks: Option<u64>,
    pub(crate) kernels: String,
    pub(crate) kernels_digest: u64,
}

/// The sizes of both edges.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edges {
    pub(crate) depth: u32,
    pub(crate) forward_bytes: u64,
    pub(crate) backward_bytes: u64,
}

impl Edges {
    fn shapes(self) -> (EdgeShape, EdgeShape) {
        let shape = |slot_bytes| EdgeShape {
            depth: self.depth,
            slot_bytes,
        };
        (shape(self.forward_bytes), shape(self.backward_bytes))
    }
}

/// A rank that has met its peer and agreed with it.
pub(crate) struct Seat {
    rank: Rank,
    peer: Rank,
    channel: ControlChannel,
}

/// A rank that is ready to run.
pub(crate) struct Ready {
    pub(crate) link: HostLink,
    pub(crate) switch: Switch,
    pub(crate) watch: Watch,
}

impl Seat {
    /// Meets the other ranks and compares how they were started.
    pub(crate) fn take<P: Plan>(launch: &Launch, profile: Profile) -> Result<Self, Failure> {
        let rank = launch.rank();
        let options = RendezvousOptions {
            timeout: MEET_WITHIN,
            ..RendezvousOptions::default()
        };
        let mut peers = rendezvous(launch, &options).map_err(|error| {
            let text = pp_runtime::driver::with_source(&error);
            Fault::new(FaultKind::HandshakeMismatch, rank, "rendezvous", text)
        })?;
        let hello = hello::<P>(launch, profile)?;
        agree(&mut peers, &hello, Instant::now() + SET_UP_WITHIN)?;
        let peer = if rank == FRONT { PHASE_B } else { FRONT };
        let channel = only_peer(peers, peer)?;
        Ok(Self {
            rank,
            peer,
            channel,
        })
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
        let peer = self.peer;
        let refuse = |what: String| {
            Fault::new(
                FaultKind::PeerMisbehaved,
                peer,
                "learn the shape of the work",
                what,
            )
        };
        let receiver = self.channel.receiver();
        match receiver.recv_deadline(Instant::now() + FOREVER) {
            Ok(Message::Frame(body)) => {
                serde_json::from_slice(body).map_err(|e| refuse(e.to_string()).into())
            }
            Ok(Message::Abort(fault)) => Err(fault.into()),
            Ok(other) => Err(refuse(format!("it sent {other:?} instead")).into()),
            Err(error) => Err(error.fault("learn the shape of the work").into()),
        }
    }

    /// Ends the job before it began: tells the peer why.
    pub(crate) fn give_up(self, failure: Failure) -> Failure {
        let fault = match &failure {
            Failure::Fault(fault) => fault.clone(),
            other => Fault::new(FaultKind::Internal, self.rank, "set up", other),
        };
        let deadline = Instant::now() + Duration::from_millis(200);
        // A peer that cannot be told notices the end of the connection.
        let _ = self.channel.sender().send(&Message::Abort(fault), deadline);
        failure
    }

    /// Maps the edges that both ranks share and starts the watchdog.
    pub(crate) fn connect(
        mut self,
        edges: Edges,
        bell: Bell,
        heartbeat: Option<Duration>,
    ) -> Result<Ready, Failure> {
        let link = match self.map_edges(edges, &bell) {
            Ok(link) => link,
            Err(failure) => return Err(self.give_up(failure)),
        };
        let internal = |e: std::io::Error| Failure::Other(anyhow::Error::new(e));
        let switch = Switch::new(self.rank, bell).map_err(internal)?;
        let options = WatchOptions {
            heartbeat,
            grace: GRACE,
            on_stuck: Box::new(end_process),
        };
        let watch = Watch::start(vec![self.channel], switch.clone(), options).map_err(internal)?;
        Ok(Ready {
            link,
            switch,
            watch,
        })
    }

    fn map_edges(&mut self, edges: Edges, bell: &Bell) -> Result<HostLink, Failure> {
        if self.channel.socket_kind() != SocketKind::Unix {
            return Err(Failure::Fault(Fault::new(
                FaultKind::HandshakeMismatch,
                self.peer,
                "map edges",
                "the ranks met over TCP and share no memory; the host transport needs both on one \
                 machine and in one network namespace, and this build has no other transport",
            )));
        }
        let (rank, peer) = (self.rank, self.peer);
        let own = |error: TransportError| {
            let kind = match &error {
                TransportError::NoMemory { .. } | TransportError::BadShape { .. } => {
                    FaultKind::BadInput
                }
                TransportError::BadRegion { .. } => FaultKind::PeerMisbehaved,
                _ => FaultKind::Internal,
            };
            let text = pp_runtime::driver::with_source(&error);
            Failure::Fault(Fault::new(kind, rank, "map edges", text))
        };
        let (up, down) = edges.shapes();
        if rank == FRONT {
            let offer = Offer::new(up, down).map_err(own)?;
            self.send_fds(&[offer.fd(), bell.fd()])?;
            let [peer_bell] = self.receive_fds()?;
            let peer_bell = Bell::open(peer_bell).map_err(own)?;
            Ok(offer.into_link(peer, bell.clone(), peer_bell))
        } else {
            let [region, peer_bell] = self.receive_fds()?;
            let peer_bell = Bell::open(peer_bell).map_err(own)?;
            let link = HostLink::open(region, up, down, peer, bell.clone(), peer_bell);
            let link = link.map_err(own)?;
            self.send_fds(&[bell.fd()])?;
            Ok(link)
        }
    }

    fn send(&self, message: &Message<'_>) -> Result<(), Failure> {
        let sent = self
            .channel
            .sender()
            .send(message, Instant::now() + SET_UP_WITHIN);
        sent.map_err(|e| e.fault("set up").into())
    }

    fn send_fds(&self, fds: &[std::os::fd::BorrowedFd<'_>]) -> Result<(), Failure> {
        let deadline = Instant::now() + SET_UP_WITHIN;
        let sent = self.channel.sender().send_fds(fds, deadline);
        sent.map_err(|e| e.fault("pass shared memory").into())
    }

    fn receive_fds<const N: usize>(&mut self) -> Result<[std::os::fd::OwnedFd; N], Failure> {
        // The peer may load weights before it maps anything; if it dies, the channel ends.
        let deadline = Instant::now() + FOREVER;
        let fds = self.channel.receiver().recv_fds(N, deadline);
        let fds = fds.map_err(|e: ControlError| e.fault("receive shared memory"))?;
        let count = fds.len();
        fds.try_into().map_err(|_| {
            let text = format!("{count} descriptors came where {N} were due");
            Fault::new(
                FaultKind::PeerMisbehaved,
                self.peer,
                "receive shared memory",
                text,
            )
            .into()
        })
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
        device: None,
        device_given: None,
        kernels: Text::truncated(&profile.kernels),
        kernels_digest: profile.kernels_digest,
    };
    Ok(Hello::new(parts).map_err(anyhow::Error::new)?)
}

fn host_name() -> String {
    let name = rustix::system::uname();
    name.nodename().to_string_lossy().into_owned()
}

/// The driver did not come back from a stage after a fault: end the process under it. Nothing is
/// half written, because unfinished output has no name.
fn end_process(fault: &Fault) {
    end_with(fault)
}

/// Ends this process with what is known of the fault.
pub(crate) fn end_with(fault: &Fault) -> ! {
    if !supervise::report(fault) {
        // Without a standard error nobody wants to read it.
        let _ = writeln!(std::io::stderr(), "pp: error: {fault}");
    }
    let code = i32::from(code_of(fault.kind));
    // What runs at exit may wait for the stage that does not come back.
    std::thread::spawn(move || std::process::exit(code));
    std::thread::sleep(EXIT_WITHIN);
    let _ = kill_process(getpid(), Signal::KILL);
    std::process::exit(code)
}
