//! Ranks whose payloads lie on GPUs. Each pair of ranks takes the best transport that works between their GPUs.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::{Deref, DerefMut};

use nccl_sys::Nccl;
use pp_contract::{Fault, FaultKind, Rank, with_source};

use crate::gpu::host;
use crate::gpu::p2p::trial::{self, Tried, Why};
use crate::gpu::{DeviceIn, DeviceLocal, DeviceOut, DeviceRx, DeviceTx, Receiving, Sending, join};
use crate::nccl::{self, Communicator, NcclBackend, UniqueId};
use pp_device::{CudaError, Reach};
use pp_edges::backend::{
    Backend, Connect, Connected, EdgeEnd, Joined, MemoryProbe, Neighbours, OnFrame, Peer, compare,
    exchange, in_order,
};
use pp_edges::bell::Bell;
use pp_edges::edge::{Capabilities, Edges};
use pp_edges::error::TransportError;
use pp_edges::group::Members;
use pp_edges::host::{EdgeShape, check_host};

/// The operation named in a fault while two ranks choose a transport.
const WHAT: &str = "choose a way between GPUs";

/// Selects the transport of payloads between two GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuTransport {
    /// The copy engine over NVLink if it works, else NCCL. The backend reports its choice and the reason.
    Best,
    /// The copy engine, over NVLink or over the bus.
    P2p,
    /// NCCL.
    Nccl,
}

/// Holds the transport that two ranks agreed on for all edges between them.
#[derive(Debug)]
pub struct GpuAgreed(Taken);

/// The transport of the edges between two ranks.
#[derive(Debug)]
enum Taken {
    /// A copy engine, between two GPUs or between a GPU and host memory.
    Copies(Tried),
    Nccl(nccl::Agreed),
}

/// Makes edges for payloads in GPU memory, by copy engine or NCCL. Each rank has one GPU. Groups use NCCL, which is
/// loaded when it is first needed.
#[derive(Debug)]
pub struct GpuBackend {
    nccl: NcclBackend,
    way: GpuTransport,
    /// Reports one line per peer that names the transport of the edges, if the user left the choice to this backend.
    /// Also reports one line per group, unless the user asked for NCCL.
    say: fn(&str),
    /// The last line reported for each peer. A new process of a peer mostly leads to the same line, which is not
    /// repeated.
    said: BTreeMap<Rank, String>,
    /// Whether any edge uses the copy engine between GPUs ([`P2P`]), whether any edge or group uses [`NCCL`], and whether
    /// any edge leads to a rank in host memory ([`HOST`]).
    taken: [bool; 3],
}

const P2P: usize = 0;
const NCCL: usize = 1;
const HOST: usize = 2;

impl GpuBackend {
    /// Returns a backend that uses transport `way` and reports its choices through `say`.
    pub fn new(nccl: NcclBackend, way: GpuTransport, say: fn(&str)) -> Self {
        Self {
            nccl,
            way,
            say,
            said: BTreeMap::new(),
            taken: [false; 3],
        }
    }

    /// Makes the edges with a peer by copy engine. Returns the reason if that does not work. Both ranks get the same answer.
    fn try_p2p(
        &self,
        peer: &mut dyn Peer,
        edges: &[EdgeEnd],
        bell: &Bell,
    ) -> Result<Result<Tried, Why>, Fault> {
        let device = &self.device;
        if !peer.shares_host() {
            // Both ranks know this, so neither needs to tell the other.
            let ranks = (peer.own_rank(), peer.rank());
            return Ok(Err(format!(
                "ranks {} and {} share no host, or no Unix socket on it",
                ranks.0, ranks.1
            )));
        }
        peer.send(&device.about().uuid)?;
        let uuid = peer.receive(WHAT)?;
        let is_shared = uuid[..] == device.about().uuid;
        let reach = <[u8; 16]>::try_from(&uuid[..]).map_err(|_| Unreachable::NoUuid);
        let reach = reach.and_then(|uuid| self.reach(uuid));
        let made = match exchange(peer, WHAT, reach)? {
            Ok(()) => trial::make(peer, device, edges, bell)?,
            Err(why) => Err(why),
        };
        match made {
            Err(why) if is_shared => {
                let text = format!(
                    "{why}; the ranks share a GPU, and NCCL wants one for each rank; give each a GPU of its own"
                );
                Err(Fault::new(FaultKind::Device, peer.own_rank(), WHAT, text))
            }
            made => Ok(made),
        }
    }

    /// Checks that this device can reach the device of a peer, over a connection that the chosen transport allows.
    fn reach(&self, uuid: [u8; 16]) -> Result<(), Unreachable> {
        self.device.bind()?;
        if !self.device.can_share()? {
            return Err(Unreachable::NotShared);
        }
        match self.device.reach(uuid)? {
            Reach::Bus if self.way == GpuTransport::Best => Err(Unreachable::Bus),
            Reach::Itself | Reach::NvLink | Reach::Bus => Ok(()),
            Reach::Not => Err(Unreachable::Not),
            Reach::Hidden => Err(Unreachable::Hidden),
        }
    }

    /// Loads NCCL and compares its settings with the peer's. Does nothing if the handshake has compared them already.
    fn agree_on_nccl(&mut self, peer: &mut dyn Peer, why: &str) -> Result<(), Fault> {
        if self.way == GpuTransport::Nccl {
            return Ok(());
        }
        if self.nccl.nccl.is_none() {
            let loaded = Nccl::load().map_err(|error| {
                let text = format!("{why}; NCCL: {}", with_source(&error));
                Fault::new(FaultKind::Device, peer.own_rank(), WHAT, text)
            })?;
            self.nccl.nccl = Some(loaded);
        }
        let settings = self.nccl.device_settings().into_iter();
        let lines: Vec<String> = settings
            .map(|(name, value)| format!("{name} {value:?}"))
            .collect();
        compare(
            peer,
            (WHAT, "NCCL"),
            &lines,
            "start every rank with the same",
        )
    }

    /// Reports the transport of the edges with a peer, if the user left the choice to this backend. Only the lower rank
    /// reports.
    fn tell(&mut self, peer: &dyn Peer, edges: &[EdgeEnd], way: &str, why: &str) {
        if self.way != GpuTransport::Best || peer.own_rank() > peer.rank() {
            return;
        }
        let mut line = String::from("edges between ranks: ");
        let mut comma = "";
        for end in edges.iter().filter(|end| end.shape.has_payloads()) {
            let (own, other) = (peer.own_rank(), peer.rank());
            let (from, to) = if end.is_sender {
                (own, other)
            } else {
                (other, own)
            };
            let _ = write!(line, "{comma}{from} -> {to} {way}");
            comma = ", ";
        }
        if !why.is_empty() {
            let _ = write!(line, " ({why})");
        }
        if self.said.get(&peer.rank()) != Some(&line) {
            (self.say)(&line);
            self.said.insert(peer.rank(), line);
        }
    }
}

/// Why this rank cannot use the GPU of a peer.
#[derive(Debug, thiserror::Error)]
enum Unreachable {
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error("the driver cannot pass the memory of this GPU to another process")]
    NotShared,
    #[error("the two GPUs are not connected by NVLink; --transport p2p takes the bus")]
    Bus,
    #[error("this GPU cannot reach the memory of the other")]
    Not,
    #[error(
        "the GPU of the other rank is hidden from this one; let CUDA_VISIBLE_DEVICES name both"
    )]
    Hidden,
    #[error("the other rank has named no GPU")]
    NoUuid,
}

/// Gives access to the NCCL backend, with the device, the library and its settings.
impl Deref for GpuBackend {
    type Target = NcclBackend;

    fn deref(&self) -> &NcclBackend {
        &self.nccl
    }
}

impl DerefMut for GpuBackend {
    fn deref_mut(&mut self) -> &mut NcclBackend {
        &mut self.nccl
    }
}

impl Edges for GpuBackend {
    type Tx = DeviceTx;
    type Rx = DeviceRx;
    type Sending = Sending;
    type Receiving = Receiving;
    type Out = DeviceOut;
    type In = DeviceIn;
    type Local = DeviceLocal;
    type Group = Communicator;
}

impl Backend for GpuBackend {
    type Agreed = GpuAgreed;
    type AgreedGroup = (Members, [UniqueId; 2]);

    /// Leaves out NCCL's settings unless NCCL was asked for: they are compared once two ranks have chosen NCCL.
    fn device_settings(&self) -> Vec<(String, String)> {
        let transport = match self.way {
            GpuTransport::Best => "p2p or nccl",
            GpuTransport::P2p => "p2p",
            GpuTransport::Nccl => return self.nccl.device_settings(),
        };
        vec![("transport".into(), transport.into())]
    }

    fn device(&self) -> Option<(String, Option<String>)> {
        Backend::device(&self.nccl)
    }

    fn free_memory(&self) -> u64 {
        self.nccl.free_memory()
    }

    fn memory_probe(&self) -> Option<MemoryProbe> {
        self.nccl.memory_probe()
    }

    /// Returns a name that lists the transports which the edges and groups of this rank use.
    fn capabilities(&self) -> Capabilities {
        const NAMES: [&str; 8] = [
            "",
            "p2p",
            "nccl",
            "p2p+nccl",
            "host",
            "p2p+host",
            "host+nccl",
            "p2p+host+nccl",
        ];
        let taken = [P2P, NCCL, HOST].map(|at| usize::from(self.taken[at]) << at);
        let name = match (NAMES[taken.iter().sum::<usize>()], self.way) {
            ("", GpuTransport::P2p) => "p2p",
            ("", _) => "nccl",
            (name, _) => name,
        };
        Capabilities {
            name,
            payload_moves: true,
            completions_ring: false,
            is_under_mps: self.nccl.device.about().has_mps,
        }
    }

    fn load_ahead(&mut self) {
        if self.way == GpuTransport::Nccl {
            self.nccl.load_ahead();
        }
    }

    fn agree(
        &mut self,
        peer: &mut dyn Peer,
        edges: &[EdgeEnd],
        bell: &Bell,
    ) -> Result<(GpuAgreed, Option<OnFrame>), Fault> {
        let edges = in_order(edges);
        let has_payloads = edges.iter().any(|end| end.shape.has_payloads());
        if !peer.is_on_device() {
            check_host(peer)?;
            let made = host::make(peer, &self.device, &edges, bell)?;
            self.taken[HOST] = true;
            return Ok((GpuAgreed(Taken::Copies(made)), None));
        }
        let mut why = String::new();
        if has_payloads && self.way != GpuTransport::Nccl {
            match self.try_p2p(peer, &edges, bell)? {
                Ok(tried) => {
                    self.taken[P2P] = true;
                    self.tell(peer, &edges, "p2p", "");
                    return Ok((GpuAgreed(Taken::Copies(tried)), None));
                }
                Err(reason) if self.way == GpuTransport::P2p => {
                    let text = format!("{reason}; use --transport auto or nccl");
                    return Err(Fault::new(FaultKind::Device, peer.own_rank(), WHAT, text));
                }
                Err(reason) => why = reason,
            }
        }
        if has_payloads {
            self.agree_on_nccl(peer, &why)?;
            self.taken[NCCL] = true;
            self.tell(peer, &edges, "nccl", &why);
        }
        let (agreed, on_frame) = self.nccl.agree(peer, &edges, bell)?;
        Ok((GpuAgreed(Taken::Nccl(agreed)), on_frame))
    }

    fn connect(
        &mut self,
        GpuAgreed(taken): GpuAgreed,
        how: Connect<'_>,
    ) -> Result<Connected<Self>, TransportError> {
        match taken {
            Taken::Copies(Tried { life, edges }) => Ok(join(edges, Some(life))),
            Taken::Nccl(agreed) => self.nccl.connect_as(agreed, how),
        }
    }

    fn agree_on_group(
        &mut self,
        members: &Members,
        neighbours: &mut dyn Neighbours,
    ) -> Result<Self::AgreedGroup, Fault> {
        let why = "groups of ranks need NCCL";
        if members.is_leader() {
            for rank in &members.ranks()[1..] {
                self.agree_on_nccl(&mut *neighbours.neighbour(*rank), why)?;
            }
            if self.way != GpuTransport::Nccl {
                let line = format!("group {} nccl", members.name());
                (self.say)(&line);
            }
        } else {
            self.agree_on_nccl(&mut *neighbours.neighbour(members.leader()), why)?;
        }
        self.taken[NCCL] = true;
        self.nccl.agree_on_group(members, neighbours)
    }

    fn connect_group(
        &mut self,
        agreed: Self::AgreedGroup,
        how: Connect<'_>,
    ) -> Result<Joined<Communicator>, TransportError> {
        self.nccl.connect_group(agreed, how)
    }

    fn local(&mut self, shape: EdgeShape) -> Result<DeviceLocal, TransportError> {
        self.nccl.local(shape)
    }

    fn has_failed_for_all() -> bool {
        NcclBackend::has_failed_for_all()
    }

    fn is_at_rest() -> bool {
        NcclBackend::is_at_rest()
    }
}
