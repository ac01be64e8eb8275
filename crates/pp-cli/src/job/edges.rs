//! From a seat to a running rank: the edges between the ranks, and the watchdog.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, with_source};
use pp_runtime::switch::Switch;
use pp_runtime::watch::{OnFrame, Watch, WatchOptions};
use pp_transport::bell::Bell;
use pp_transport::control::{Message, SocketKind};
use pp_transport::error::TransportError;
use pp_transport::host::{EdgeShape, HostLink, Offer};
use pp_transport::lane::{Lane, LaneOffer};
use pp_transport::nccl::{CommOptions, Communicator, Issuer, NcclLink, NcclOptions, UniqueId};

use super::seat::{SET_UP_WITHIN, Seat, end_process, end_with};
use super::{FRONT, GRACE, PHASE_B, limits};
use crate::backend::Gpu;
use crate::exit::Failure;
use crate::flight;

/// Time for NCCL to connect two ranks; the first connection on a machine reads its topology.
const CONNECT_WITHIN: Duration = Duration::from_secs(30);

/// Time for the watchdog to say that the peer is gone, once NCCL has failed.
const VERDICT_WITHIN: Duration = Duration::from_secs(1);
/// Time between two looks at what another thread does.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// The sizes of both edges.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edges {
    /// The most chunks in flight, and the slots of the edge back.
    pub(crate) depth: u32,
    /// Slots of the edge to Phase B.
    pub(crate) forward_depth: u32,
    pub(crate) forward_bytes: u64,
    pub(crate) backward_bytes: u64,
}

impl Edges {
    fn shapes(self) -> (EdgeShape, EdgeShape) {
        let shape = |depth, slot_bytes| EdgeShape { depth, slot_bytes };
        (
            shape(self.forward_depth, self.forward_bytes),
            shape(self.depth, self.backward_bytes),
        )
    }
}

/// A rank that is ready to run.
pub(crate) struct Ready<L> {
    pub(crate) link: L,
    pub(crate) switch: Switch,
    pub(crate) watch: Watch,
}

/// The issuer of the device, once the threads that an earlier generation left behind are done.
fn open_issuer(
    gpu: &Gpu,
    deadline: Instant,
    is_wanted: &dyn Fn() -> bool,
) -> Result<Issuer, TransportError> {
    loop {
        match Issuer::open(&gpu.nccl, &gpu.device) {
            Err(TransportError::DeviceTaken { .. }) if Instant::now() < deadline && is_wanted() => {
                std::thread::sleep(LOOK_EVERY);
            }
            opened => return opened,
        }
    }
}

impl Seat {
    /// Maps the edges that both ranks share and starts the watchdog.
    pub(crate) fn connect_host(
        mut self,
        edges: Edges,
        bell: Bell,
        heartbeat: Option<Duration>,
    ) -> Result<Ready<HostLink>, Failure> {
        let link = match self.map_edges(edges, &bell) {
            Ok(link) => link,
            Err(failure) => return Err(self.give_up(failure)),
        };
        let (switch, watch) = self.watch(bell, heartbeat, None)?;
        Ok(Ready {
            link,
            switch,
            watch,
        })
    }

    /// Connects the GPUs of both ranks, under the eyes of the watchdog: a peer that dies
    /// meanwhile ends this rank, whatever NCCL waits for.
    pub(crate) fn connect_nccl(
        self,
        gpu: &Gpu,
        edges: Edges,
        bell: Bell,
        heartbeat: Option<Duration>,
    ) -> Result<Ready<NcclLink>, Failure> {
        let connected = self.connect_with(gpu, edges, bell, heartbeat, |_| Ok(()))?;
        Ok(connected.0)
    }

    /// The same, and a group of both ranks beside the link.
    pub(crate) fn connect_nccl_and_group(
        mut self,
        gpu: &Gpu,
        name: &'static str,
        edges: Edges,
        bell: Bell,
        heartbeat: Option<Duration>,
    ) -> Result<(Ready<NcclLink>, Communicator), Failure> {
        let [id] = self.agree_on_ids(gpu)?;
        let me = self.rank;
        let blocking = gpu.blocking;
        self.connect_with(gpu, edges, bell, heartbeat, |issuer| {
            Communicator::connect(CommOptions {
                issuer,
                name,
                members: vec![FRONT, PHASE_B],
                me,
                id,
                deadline: Instant::now() + CONNECT_WITHIN,
                blocking,
            })
        })
    }

    /// Connects a link, and then whatever else shares its issuer.
    fn connect_with<T>(
        mut self,
        gpu: &Gpu,
        edges: Edges,
        bell: Bell,
        heartbeat: Option<Duration>,
        more: impl FnOnce(Issuer) -> Result<T, TransportError>,
    ) -> Result<(Ready<NcclLink>, T), Failure> {
        let (rank, is_lower) = (self.rank, self.rank == FRONT);
        let (generation, survival) = (self.generation, self.survival.clone());
        let issuer = self.issuer.take();
        let prepared = self.agree_on_ids(gpu).and_then(|ids| {
            let (lane, on_frame) = self.open_lane(edges, &bell)?;
            Ok((ids, lane, on_frame))
        });
        let (ids, lane, on_frame) = match prepared {
            Ok(prepared) => prepared,
            Err(failure) => return Err(self.give_up(failure)),
        };
        let (switch, watch) = self.watch(bell, heartbeat, on_frame)?;
        let (up, down) = edges.shapes();
        let deadline = Instant::now() + CONNECT_WITHIN;
        // Elsewhere the watchdog ends a process whose peer is gone.
        let is_wanted = || survival.is_none() || switch.fault().is_none();
        let issuer = issuer.map_or_else(|| open_issuer(gpu, deadline, &is_wanted), Ok);
        let connected = issuer.and_then(|issuer| {
            let shared = issuer.share();
            let options = NcclOptions {
                issuer,
                lane,
                is_lower,
                up,
                down,
                ids,
                deadline,
                generation,
                blocking: gpu.blocking,
            };
            let link = NcclLink::connect_while(options, &is_wanted)?;
            if let Some(survival) = &survival {
                survival.hold(link.abort_handle());
            }
            Ok((link, more(shared)?))
        });
        match connected {
            Ok((link, more)) => {
                let ready = Ready {
                    link,
                    switch,
                    watch,
                };
                Ok((ready, more))
            }
            Err(error) => {
                let text = with_source(&error);
                let fault = Fault::new(error.fault_kind(), rank, "connect over nccl", text);
                if let Some(survival) = &survival {
                    // NCCL may learn first that the peer is gone, and says it in words of its own.
                    let deadline = Instant::now() + VERDICT_WITHIN;
                    while switch.fault().is_none() && Instant::now() < deadline {
                        std::thread::sleep(LOOK_EVERY);
                    }
                    survival.driver_is_back();
                }
                switch.raise(fault);
                watch.close();
                // The first fault counts: perhaps the peer's.
                let first = switch.fault().expect("just raised").clone();
                if let TransportError::NotInTime { .. } | TransportError::LeftBehind { .. } = error
                {
                    // A thread is still inside NCCL, and what runs at exit would wait for it.
                    match &survival {
                        None => end_with(&first),
                        Some(survival) => survival.leave_behind(),
                    }
                }
                Err(first.into())
            }
        }
    }

    fn watch(
        self,
        bell: Bell,
        heartbeat: Option<Duration>,
        on_frame: Option<OnFrame>,
    ) -> Result<(Switch, Watch), Failure> {
        let internal = |e: std::io::Error| Failure::from(anyhow::Error::new(e));
        let switch = Switch::new(self.rank, bell).map_err(internal)?;
        let options = WatchOptions {
            heartbeat,
            grace: GRACE,
            limits: limits()?,
            on_stuck: match self.survival {
                None => Box::new(end_process),
                Some(survival) => Box::new(move |fault| survival.outlive(fault)),
            },
            on_fault: Some(Box::new(flight::write_for_fault)),
            on_frame,
        };
        flight::follow(&switch);
        let (channel, drain) = self.set_up.finish()?;
        if let Some(signal) = drain {
            switch.request_drain(signal);
        }
        let watch = Watch::start(vec![channel], switch.clone(), options).map_err(internal)?;
        Ok((switch, watch))
    }

    /// The ids of communicators, made by the front. They are secrets: they travel inside the
    /// authenticated channel alone.
    fn agree_on_ids<const N: usize>(&mut self, gpu: &Gpu) -> Result<[UniqueId; N], Failure> {
        const WHAT: &str = "agree on communicators";
        let rank = self.rank;
        if rank == FRONT {
            let ids: Result<Vec<_>, _> = (0..N).map(|_| UniqueId::new(&gpu.nccl)).collect();
            let ids = ids.map_err(|e| Fault::new(e.fault_kind(), rank, WHAT, with_source(&e)))?;
            let body: Vec<u8> = ids.iter().flat_map(UniqueId::to_bytes).collect();
            self.send(&Message::Frame(&body))?;
            return Ok(ids.try_into().expect("as many as were made"));
        }
        self.hear(WHAT, |body| {
            let (ids, rest) = body.as_chunks::<{ UniqueId::BYTES }>();
            let ids: Vec<_> = ids.iter().map(|id| UniqueId::from_bytes(*id)).collect();
            let count = body.len();
            let ids = ids.try_into().ok().filter(|_| rest.is_empty());
            ids.ok_or_else(|| format!("it sent {count} bytes where {N} ids were due"))
        })
    }

    /// The lane for headers: memory that both ranks share on one host, else the control channel.
    fn open_lane(&mut self, edges: Edges, bell: &Bell) -> Result<(Lane, Option<OnFrame>), Failure> {
        let own = self.own_fault();
        let (up, down) = (edges.forward_depth, edges.depth);
        if self.set_up.socket_kind() != SocketKind::Unix {
            let sender = self.set_up.sender().clone();
            let (out, incoming) = if self.rank == FRONT {
                (up, down)
            } else {
                (down, up)
            };
            let lane = Lane::over_channel(sender, bell.clone(), out, incoming);
            let (lane, inlet) = lane.map_err(own)?;
            let on_frame: OnFrame = Box::new(move |_, body| inlet.deliver(body));
            return Ok((lane, Some(on_frame)));
        }
        let peer = self.peer;
        if self.rank == FRONT {
            let offer = LaneOffer::new(up, down).map_err(&own)?;
            self.send_fds(&[offer.fd(), bell.fd()])?;
            let [peer_bell] = self.receive_fds()?;
            let peer_bell = Bell::open(peer_bell).map_err(own)?;
            return Ok((offer.into_lane(peer, bell.clone(), peer_bell), None));
        }
        let [region, peer_bell] = self.receive_fds()?;
        let peer_bell = Bell::open(peer_bell).map_err(&own)?;
        let lane = Lane::open(region, up, down, peer, bell.clone(), peer_bell);
        let lane = lane.map_err(own)?;
        self.send_fds(&[bell.fd()])?;
        Ok((lane, None))
    }

    fn map_edges(&mut self, edges: Edges, bell: &Bell) -> Result<HostLink, Failure> {
        if self.set_up.socket_kind() != SocketKind::Unix {
            return Err(Failure::Fault(Fault::new(
                FaultKind::HandshakeMismatch,
                self.peer,
                "map edges",
                "the ranks met over TCP and share no memory; the host transport needs both on one \
                 machine and in one network namespace; between machines use --transport nccl",
            )));
        }
        let own = self.own_fault();
        let peer = self.peer;
        let (up, down) = edges.shapes();
        if self.rank == FRONT {
            let offer = Offer::new(up, down).map_err(&own)?;
            self.send_fds(&[offer.fd(), bell.fd()])?;
            let [peer_bell] = self.receive_fds()?;
            let peer_bell = Bell::open(peer_bell).map_err(own)?;
            Ok(offer.into_link(peer, bell.clone(), peer_bell))
        } else {
            let [region, peer_bell] = self.receive_fds()?;
            let peer_bell = Bell::open(peer_bell).map_err(&own)?;
            let link = HostLink::open(region, up, down, peer, bell.clone(), peer_bell);
            let link = link.map_err(own)?;
            self.send_fds(&[bell.fd()])?;
            Ok(link)
        }
    }

    /// An error of this rank while it maps memory.
    fn own_fault(&self) -> impl Fn(TransportError) -> Failure + use<> {
        let rank = self.rank;
        move |error| {
            let text = with_source(&error);
            Failure::Fault(Fault::new(error.fault_kind(), rank, "map edges", text))
        }
    }

    fn send_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<(), Failure> {
        let deadline = Instant::now() + SET_UP_WITHIN;
        let sent = self.set_up.sender().send_fds(fds, deadline);
        sent.map_err(|e| self.lost(e.fault("pass shared memory")).into())
    }

    fn receive_fds<const N: usize>(&mut self) -> Result<[OwnedFd; N], Failure> {
        // The peer may load weights before it maps anything.
        let fds = self.set_up.descriptors("receive shared memory")?;
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
