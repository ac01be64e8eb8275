//! The NCCL backend, for ranks whose payloads lie on GPUs.

use std::time::Instant;

use nccl_sys::Nccl;
use pp_contract::{Fault, FaultKind, Rank, with_source};

use super::edge::{Agreed, NcclEdge, connect};
use super::issuer::ConnectWait;
use super::settings::as_settings;
use super::{Communicator, Issuer, UniqueId, is_at_rest, warm_up};
use crate::gpu::{DeviceIn, DeviceLocal, DeviceOut, DeviceRx, DeviceTx, Receiving, Sending, join};
use pp_device::Device;
use pp_edges::backend::{
    Backend, Connect, Connected, EdgeEnd, Joined, MemoryProbe, Neighbours, OnFrame, Peer, in_order,
    own_fault, share_memory,
};
use pp_edges::bell::Bell;
use pp_edges::edge::{Capabilities, Edges};
use pp_edges::error::TransportError;
use pp_edges::flight::GroupLog;
use pp_edges::group::Members;
use pp_edges::host::EdgeShape;
use pp_edges::lane::{self, LaneEnd};
use pp_edges::shm::layout::Holds;

const WHAT: &str = "agree on communicators";

/// Makes edges over NCCL for payloads in GPU memory. Each rank has one GPU.
#[derive(Debug)]
pub struct NcclBackend {
    /// This rank's GPU.
    pub device: Device,
    /// The NCCL library. `None` in a job of one rank.
    pub nccl: Option<Nccl>,
    /// Whether communicators block the thread that calls them. A send then costs less, but a connection cannot be given
    /// up while it is made.
    pub blocking: bool,
    /// The environment variables that steer NCCL, by name and value. The handshake compares those that must be the same
    /// on all ranks.
    pub variables: Vec<(String, String)>,
    /// The UUID of the GPU that the environment assigned to this process, if it did.
    pub given: Option<String>,
    issuer: Option<Issuer>,
}

impl NcclBackend {
    /// Returns a backend with blocking communicators.
    pub fn new(device: Device, nccl: Nccl) -> Self {
        let mut backend = Self::alone(device);
        backend.nccl = Some(nccl);
        backend
    }

    /// Returns a backend without NCCL. By itself it makes edges within one rank. In a
    /// [`GpuBackend`](crate::gpu_backend::GpuBackend) it serves any number of ranks: NCCL is loaded when an edge or a group first
    /// needs it.
    pub fn alone(device: Device) -> Self {
        Self {
            device,
            nccl: None,
            blocking: true,
            variables: Vec::new(),
            given: None,
            issuer: None,
        }
    }

    /// Returns the issuer of the device, which all edges and groups of this rank share.
    ///
    /// # Errors
    /// Another issuer of this process held the device until the deadline, or until the issuer was not wanted; or there
    /// is no NCCL.
    pub fn issuer(&mut self, how: Connect<'_>) -> Result<Issuer, TransportError> {
        let nccl = self.nccl.as_ref().ok_or(TransportError::Alone)?;
        let issuer = match self.issuer.take() {
            Some(issuer) => issuer,
            None => loop {
                match Issuer::open(nccl, &self.device) {
                    Err(TransportError::DeviceTaken { .. }) if !ConnectWait::of(how).is_over() => {
                        std::thread::sleep(crate::times::LEFT_BEHIND_LOOK_EVERY);
                    }
                    opened => break opened?,
                }
            },
        };
        Ok(self.issuer.insert(issuer).share())
    }

    /// Agrees with the peer on `count` ids of communicators, made by the lower rank. The ids are secrets, so they
    /// travel only inside the authenticated channel.
    ///
    /// # Errors
    /// There is no NCCL, or it refuses; the other rank is lost, or sent something unexpected.
    pub fn agree_on_ids(&self, peer: &mut dyn Peer, count: usize) -> Result<Vec<UniqueId>, Fault> {
        if peer.own_rank() > peer.rank() {
            return Self::receive_ids(peer, count);
        }
        let ids = self.make_ids(peer.own_rank(), count)?;
        let body: Vec<u8> = ids.iter().flat_map(UniqueId::to_bytes).collect();
        peer.send(&body)?;
        Ok(ids)
    }

    /// Makes the edges with a peer, for any backend.
    pub(crate) fn connect_as<E>(
        &mut self,
        agreed: Agreed,
        how: Connect<'_>,
    ) -> Result<Connected<E>, TransportError>
    where
        E: Edges<Out = DeviceOut, In = DeviceIn> + ?Sized,
    {
        if agreed.edges.iter().all(|edge| edge.payloads.is_none()) {
            // There is nothing to connect, so NCCL is not called.
            let lone = agreed.edges.into_iter();
            return Ok(join(lone.map(|edge| (edge.number, edge.lane, None)), None));
        }
        connect(&self.issuer(how)?, agreed, self.blocking, how)
    }

    fn make_ids(&self, rank: Rank, count: usize) -> Result<Vec<UniqueId>, Fault> {
        let own = |e: TransportError| Fault::new(e.fault_kind(), rank, WHAT, with_source(&e));
        let nccl = self.nccl.as_ref().ok_or(TransportError::Alone);
        let nccl = nccl.map_err(own)?;
        let ids: Result<Vec<_>, _> = (0..count).map(|_| UniqueId::new(nccl)).collect();
        ids.map_err(own)
    }

    fn receive_ids(peer: &mut dyn Peer, count: usize) -> Result<Vec<UniqueId>, Fault> {
        let body = peer.receive(WHAT)?;
        let (ids, rest) = body.as_chunks::<{ UniqueId::BYTES }>();
        if ids.len() == count && rest.is_empty() {
            return Ok(ids.iter().map(|id| UniqueId::from_bytes(*id)).collect());
        }
        let text = format!("it sent {} bytes where {count} ids were due", body.len());
        Err(Fault::new(
            FaultKind::PeerMisbehaved,
            peer.rank(),
            WHAT,
            text,
        ))
    }
}

impl Edges for NcclBackend {
    type Tx = DeviceTx;
    type Rx = DeviceRx;
    type Sending = Sending;
    type Receiving = Receiving;
    type Out = DeviceOut;
    type In = DeviceIn;
    type Local = DeviceLocal;
    type Group = Communicator;
}

impl Backend for NcclBackend {
    type Agreed = Agreed;
    type AgreedGroup = (Members, [UniqueId; 2]);

    fn device_settings(&self) -> Vec<(String, String)> {
        let mut settings = vec![("transport".into(), "nccl".into())];
        let version = self.nccl.as_ref().map(|nccl| nccl.version().to_string());
        settings.extend(version.map(|version| ("nccl_version".into(), version)));
        settings.extend(as_settings(self.variables.clone()));
        settings
    }

    fn device(&self) -> Option<(String, Option<String>)> {
        Some((uuid_text(self.device.about().uuid), self.given.clone()))
    }

    fn free_memory(&self) -> u64 {
        self.device.memory().map_or(u64::MAX, |memory| memory.free)
    }

    fn memory_probe(&self) -> Option<MemoryProbe> {
        let device = self.device.clone();
        Some(Box::new(move || {
            let memory = device.memory().ok()?;
            Some([memory.free, memory.total])
        }))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "nccl",
            payload_moves: true,
            completions_ring: false,
            is_under_mps: self.device.about().has_mps,
        }
    }

    fn load_ahead(&mut self) {
        let Some(nccl) = &self.nccl else {
            return;
        };
        let Ok(issuer) = Issuer::open(nccl, &self.device) else {
            return;
        };
        if let Err(error) = warm_up(&issuer, Instant::now()) {
            tracing::debug!(%error, "NCCL is not loaded ahead");
        }
        self.issuer = Some(issuer);
    }

    fn agree(
        &mut self,
        peer: &mut dyn Peer,
        edges: &[EdgeEnd],
        bell: &Bell,
    ) -> Result<(Agreed, Option<OnFrame>), Fault> {
        let edges = in_order(edges);
        let with_payloads = edges.iter().filter(|end| end.shape.has_payloads());
        let ids = match with_payloads.count() {
            0 => Vec::new(),
            count => self.agree_on_ids(peer, count)?,
        };
        let (lanes, on_frame) = open_lanes(peer, &edges, bell)?;
        let mut ids = ids.into_iter();
        let made = edges.iter().zip(lanes).map(|(end, lane)| {
            let id = end.shape.has_payloads().then(|| ids.next()).flatten();
            let payloads = id.map(|id| (end.shape, id));
            NcclEdge {
                number: end.edge,
                lane,
                payloads,
            }
        });
        let agreed = Agreed {
            edges: made.collect(),
            is_lower: peer.own_rank() < peer.rank(),
        };
        Ok((agreed, on_frame))
    }

    fn connect(
        &mut self,
        agreed: Agreed,
        how: Connect<'_>,
    ) -> Result<Connected<Self>, TransportError> {
        self.connect_as(agreed, how)
    }

    fn agree_on_group(
        &mut self,
        members: &Members,
        neighbours: &mut dyn Neighbours,
    ) -> Result<(Members, [UniqueId; 2]), Fault> {
        if !members.is_leader() {
            let mut leader = neighbours.neighbour(members.leader());
            let ids = Self::receive_ids(&mut *leader, 2)?;
            return Ok((members.clone(), [ids[0], ids[1]]));
        }
        let ids = self.make_ids(members.own(), 2)?;
        let body: Vec<u8> = ids.iter().flat_map(UniqueId::to_bytes).collect();
        for rank in &members.ranks()[1..] {
            neighbours.neighbour(*rank).send(&body)?;
        }
        Ok((members.clone(), [ids[0], ids[1]]))
    }

    fn connect_group(
        &mut self,
        agreed: (Members, [UniqueId; 2]),
        how: Connect<'_>,
    ) -> Result<Joined<Self::Group>, TransportError> {
        let (name, ranks) = (agreed.0.name(), agreed.0.ranks());
        let log = GroupLog::new(how.recorder, name, ranks, how.generation);
        let (issuer, wait) = (self.issuer(how)?, ConnectWait::of(how));
        let group = Communicator::connect(&issuer, agreed, self.blocking, &wait, log)?;
        Ok(Joined {
            abort: group.abort(),
            group,
            waits: None,
        })
    }

    fn local(&mut self, shape: EdgeShape) -> Result<DeviceLocal, TransportError> {
        DeviceLocal::new(&self.device, shape)
    }

    fn has_failed_for_all() -> bool {
        pp_device::has_failed_for_all()
    }

    fn is_at_rest() -> bool {
        is_at_rest()
    }
}

/// Formats a UUID as `nvidia-smi -L` prints it and CUDA_VISIBLE_DEVICES takes it.
#[must_use]
pub fn uuid_text(uuid: [u8; 16]) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<String>();
    format!(
        "GPU-{}-{}-{}-{}-{}",
        hex(&uuid[..4]),
        hex(&uuid[4..6]),
        hex(&uuid[6..8]),
        hex(&uuid[8..10]),
        hex(&uuid[10..])
    )
}

/// Opens the lanes for headers: in shared memory for ranks of one host, else over the control channel.
fn open_lanes(
    peer: &mut dyn Peer,
    edges: &[EdgeEnd],
    bell: &Bell,
) -> Result<(Vec<LaneEnd>, Option<OnFrame>), Fault> {
    if !peer.shares_host() {
        let lanes = lane::over_channel(peer.sender().clone(), bell.clone(), edges);
        let (lanes, inlet) = lanes.map_err(own_fault(peer.own_rank()))?;
        let on_frame: OnFrame = Box::new(move |_, body| inlet.deliver(body));
        return Ok((lanes, Some(on_frame)));
    }
    let shared = share_memory(peer, edges, Holds::Rings, bell)?;
    let lanes = edges.iter().zip(&shared);
    let lanes = lanes.map(|(end, shared)| LaneEnd::over_memory(shared, end.is_sender));
    Ok((lanes.collect(), None))
}
