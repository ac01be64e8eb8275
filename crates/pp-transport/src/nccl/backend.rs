//! Two ranks whose payloads lie on GPUs, connected by NCCL.

use std::time::Instant;

use nccl_sys::Nccl;
use pp_contract::{Fault, FaultKind, with_source};

use super::settings::as_settings;
use super::{Issuer, NcclLink, NcclOptions, UniqueId, is_at_rest, warm_up};
use crate::backend::{Abort, Backend, Connect, Edges, OnFrame, Peer, own_fault, share_memory};
use crate::bell::Bell;
use crate::error::TransportError;
use crate::lane::{Lane, bare};
use pp_device::Device;

/// Payloads in the memory of one GPU for each rank.
#[derive(Debug)]
pub struct NcclBackend {
    /// This rank's GPU.
    pub device: Device,
    /// The library that connects it with the other.
    pub nccl: Nccl,
    /// Whether communicators block the thread that calls them. A send costs less then, but a connection cannot be given
    /// up while it is made.
    pub blocking: bool,
    /// The variables of the environment that steer NCCL, by name and value: what must be the same on both ranks is
    /// compared at the handshake.
    pub variables: Vec<(String, String)>,
    /// The GPU that the environment gave this process by its UUID, if it did.
    pub given: Option<String>,
    issuer: Option<Issuer>,
}

/// What two ranks exchange before NCCL connects them.
#[derive(Debug)]
pub struct Agreed {
    ids: [UniqueId; 2],
    lane: Lane,
    is_lower: bool,
    edges: Edges,
}

impl NcclBackend {
    /// A backend with blocking communicators.
    pub fn new(device: Device, nccl: Nccl) -> Self {
        Self {
            device,
            nccl,
            blocking: true,
            variables: Vec::new(),
            given: None,
            issuer: None,
        }
    }

    /// The issuer of the device, once the threads that an earlier generation left behind are done.
    fn issuer(&mut self, how: Connect<'_>) -> Result<Issuer, TransportError> {
        if let Some(issuer) = self.issuer.take() {
            return Ok(issuer);
        }
        loop {
            match Issuer::open(&self.nccl, &self.device) {
                Err(TransportError::DeviceTaken { .. })
                    if Instant::now() < how.deadline && (how.is_wanted)() =>
                {
                    std::thread::sleep(crate::times::LEFT_BEHIND_LOOK_EVERY);
                }
                opened => return opened,
            }
        }
    }

    /// Connects, and gives a second handle of the issuer for what else is to be connected on the device.
    ///
    /// # Errors
    /// As [`Backend::connect`].
    pub fn connect_and_share(
        &mut self,
        agreed: Agreed,
        how: Connect<'_>,
    ) -> Result<(NcclLink, Issuer), TransportError> {
        let issuer = self.issuer(how)?;
        let shared = issuer.share();
        let options = NcclOptions {
            issuer,
            lane: agreed.lane,
            is_lower: agreed.is_lower,
            up: agreed.edges.up,
            down: agreed.edges.down,
            ids: agreed.ids,
            deadline: how.deadline,
            generation: how.generation,
            blocking: self.blocking,
        };
        Ok((NcclLink::connect(options, how.is_wanted)?, shared))
    }

    /// Ids of communicators, made by the lower rank. They are secrets: they travel inside the authenticated channel
    /// alone.
    ///
    /// # Errors
    /// NCCL refuses, the other rank is lost, or it sent something else.
    pub fn agree_on_ids<const N: usize>(
        &self,
        peer: &mut dyn Peer,
    ) -> Result<[UniqueId; N], Fault> {
        const WHAT: &str = "agree on communicators";
        let rank = peer.own_rank();
        if rank < peer.rank() {
            let ids: Result<Vec<_>, _> = (0..N).map(|_| UniqueId::new(&self.nccl)).collect();
            let ids = ids.map_err(|e| Fault::new(e.fault_kind(), rank, WHAT, with_source(&e)))?;
            let body: Vec<u8> = ids.iter().flat_map(UniqueId::to_bytes).collect();
            peer.send(&body)?;
            return Ok(ids.try_into().expect("as many as were made"));
        }
        let body = peer.receive(WHAT)?;
        let (ids, rest) = body.as_chunks::<{ UniqueId::BYTES }>();
        let ids: Vec<_> = ids.iter().map(|id| UniqueId::from_bytes(*id)).collect();
        let ids = ids.try_into().ok().filter(|_| rest.is_empty());
        ids.ok_or_else(|| {
            let text = format!("it sent {} bytes where {N} ids were due", body.len());
            Fault::new(FaultKind::PeerMisbehaved, peer.rank(), WHAT, text)
        })
    }
}

impl Backend for NcclBackend {
    type Link = NcclLink;
    type Agreed = Agreed;

    fn settings(&self) -> Vec<(String, String)> {
        let mut settings = vec![
            ("transport".into(), "nccl".into()),
            ("nccl_version".into(), self.nccl.version().to_string()),
        ];
        settings.extend(as_settings(self.variables.clone()));
        settings
    }

    fn device(&self) -> Option<(String, Option<String>)> {
        Some((uuid_text(self.device.about().uuid), self.given.clone()))
    }

    fn load_ahead(&mut self) {
        let Ok(issuer) = Issuer::open(&self.nccl, &self.device) else {
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
        edges: Edges,
        bell: &Bell,
    ) -> Result<(Agreed, Option<OnFrame>), Fault> {
        let ids = self.agree_on_ids(peer)?;
        let (lane, on_frame) = open_lane(peer, edges, bell)?;
        let agreed = Agreed {
            ids,
            lane,
            is_lower: peer.own_rank() < peer.rank(),
            edges,
        };
        Ok((agreed, on_frame))
    }

    fn connect(&mut self, agreed: Agreed, how: Connect<'_>) -> Result<NcclLink, TransportError> {
        Ok(self.connect_and_share(agreed, how)?.0)
    }

    fn abort(&self, link: &NcclLink) -> Option<Abort> {
        let handle = link.abort_handle();
        Some(Box::new(move |why, deadline| handle.abort(why, deadline)))
    }

    fn is_at_rest() -> bool {
        is_at_rest()
    }
}

/// As `nvidia-smi -L` prints it, and CUDA_VISIBLE_DEVICES takes it.
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

/// The lane for headers: memory that both ranks share on one host, else the control channel.
fn open_lane(
    peer: &mut dyn Peer,
    edges: Edges,
    bell: &Bell,
) -> Result<(Lane, Option<OnFrame>), Fault> {
    let (up, down) = (edges.up.depth, edges.down.depth);
    if !peer.shares_host() {
        let own = peer.own_rank();
        let (out, incoming) = if own < peer.rank() {
            (up, down)
        } else {
            (down, up)
        };
        let lane = Lane::over_channel(peer.sender().clone(), bell.clone(), out, incoming);
        let (lane, inlet) = lane.map_err(own_fault(own))?;
        let on_frame: OnFrame = Box::new(move |_, body| inlet.deliver(body));
        return Ok((lane, Some(on_frame)));
    }
    let (up, down) = (bare(up), bare(down));
    let end = share_memory(peer, Edges { up, down }, bell)?;
    Ok((Lane::over_memory(&end), None))
}
