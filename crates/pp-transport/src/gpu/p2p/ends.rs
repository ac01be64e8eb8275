//! Ends of edges between GPUs, whichever way their payloads take.

use pp_contract::{Matched, Prepared, Stamp};

use super::edge::{P2pRx, P2pTx};
use super::trial::Tried;
use crate::edge::{EdgeRx, EdgeTx, Sent};
use crate::error::TransportError;
use crate::gpu::{DeviceRx, DeviceTx, Receiving, Sending};
use crate::in_flight::{InFlight, Rejected};
use crate::nccl::{self, NcclRx, NcclTx};

/// What two ranks agreed on for all edges between them.
#[derive(Debug)]
pub struct Agreed(pub(super) Taken);

/// The way that the edges between two ranks take.
#[derive(Debug)]
pub(super) enum Taken {
    /// With the numbers of the edges.
    P2p(Vec<u32>, Tried),
    Nccl(nccl::Agreed),
}

/// The sending end of an edge between GPUs.
///
/// # If dropped
/// As [`P2pTx`] or [`NcclTx`].
#[derive(Debug)]
pub enum GpuTx {
    /// By copy engine.
    P2p(P2pTx),
    /// By NCCL.
    Nccl(NcclTx),
}

/// The receiving end of an edge between GPUs.
///
/// # If dropped
/// As [`P2pRx`] or [`NcclRx`].
#[derive(Debug)]
pub enum GpuRx {
    /// By copy engine.
    P2p(P2pRx),
    /// By NCCL.
    Nccl(NcclRx),
}

impl From<P2pTx> for GpuTx {
    fn from(end: P2pTx) -> Self {
        Self::P2p(end)
    }
}

impl From<P2pRx> for GpuRx {
    fn from(end: P2pRx) -> Self {
        Self::P2p(end)
    }
}

impl EdgeTx for GpuTx {
    type Tx = DeviceTx;
    type Sending = Sending;

    fn try_lease(&mut self) -> Result<Option<DeviceTx>, TransportError> {
        match self {
            Self::P2p(end) => end.try_lease(),
            Self::Nccl(end) => end.try_lease(),
        }
    }

    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<DeviceTx>,
    ) -> Result<Sent<Sending>, Rejected<DeviceTx>> {
        match self {
            Self::P2p(end) => end.send(message, stamp, payload),
            Self::Nccl(end) => end.send(message, stamp, payload),
        }
    }

    fn peer_is_gone(&mut self) {
        match self {
            Self::P2p(end) => end.peer_is_gone(),
            Self::Nccl(end) => end.peer_is_gone(),
        }
    }
}

impl EdgeRx for GpuRx {
    type Rx = DeviceRx;
    type Receiving = Receiving;

    fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError> {
        match self {
            Self::P2p(end) => end.poll_frame(inbox),
            Self::Nccl(end) => end.poll_frame(inbox),
        }
    }

    fn receive(&mut self, header: &Matched<'_>) -> Result<InFlight<Receiving>, TransportError> {
        match self {
            Self::P2p(end) => end.receive(header),
            Self::Nccl(end) => end.receive(header),
        }
    }

    fn peer_is_gone(&mut self) {
        match self {
            Self::P2p(end) => end.peer_is_gone(),
            Self::Nccl(end) => end.peer_is_gone(),
        }
    }
}
