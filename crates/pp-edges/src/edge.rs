//! What a backend must do: move headers and payloads along the edges of a rank.
//!
//! An edge has one direction and two ends, in two ranks or both in one. A rank has any number of edges with any number
//! of peers. A payload travels in a slot. The right to use the slot is a lease, which moves along with the chunk and
//! comes back as the credit for the next one. A header leaves only for a message that was completely prepared, and a
//! receive is posted only with the header that announced it.
//!
//! The runtime is generic over these traits and never names a backend. What a lease gives its holder (bytes on a host,
//! an address and a stream on a device) is known only to the backend and to the stages written for it.

use std::fmt::Debug;

use pp_contract::{Header, Matched, Prepared, Stamp};

use crate::error::TransportError;
use crate::in_flight::{InFlight, Rejected, Resend, Submission};

/// Describes a backend in reports and at the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Short name: `host`, `nccl`.
    pub name: &'static str,
    /// Whether a payload arrives some time after its header. Otherwise it arrives with the header.
    pub payload_moves: bool,
    /// Whether the bell rings for completions. If not, the caller must poll.
    pub completions_ring: bool,
    /// Whether NVIDIA's MPS serves the GPU: the work of its processes overlaps, and if one faults, all fail.
    pub is_under_mps: bool,
}

/// A message that has left.
///
/// # If dropped
/// Behaves as [`InFlight`]: the payload's slot comes back to its pool once the peer has read it.
#[must_use = "its payload is still read by the peer: keep it until it is done"]
#[derive(Debug)]
pub struct Sent<S: Submission> {
    /// Its header, as the peer sees it. An answer must echo it.
    pub header: Header,
    /// Its payload, until the peer has returned the slot. `None` if the message has no payload.
    pub payload: Option<InFlight<S>>,
}

/// The sending end of an edge. One thread at a time uses it.
///
/// # If dropped
/// Sends nothing more. Leases stay valid. When the last end of all edges with one peer is dropped, it ends their shared
/// state, as its backend documents.
pub trait EdgeTx {
    /// A lease to write a slot.
    type Tx: Debug;
    /// A send in progress, whose payload can be sent again over another edge.
    type Sending: Resend<Buffer = Self::Tx> + Debug;

    /// Leases a free slot. `None` is backpressure, and the bell rings when a slot is free again. An edge that carries
    /// headers alone has no slots.
    ///
    /// # Errors
    /// The edge is broken.
    fn try_lease(&mut self) -> Result<Option<Self::Tx>, TransportError>;

    /// Commits a message and hands over its payload. `payload` is present exactly when the message has payload bytes.
    /// Everything that can fail is checked before the header leaves.
    ///
    /// # Errors
    /// The payload comes back in [`Rejected`], the header has not left, and the message's sequence numbers are not used
    /// up. If [`TransportError::is_backpressure`] is true, try again later.
    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<Self::Tx>,
    ) -> Result<Sent<Self::Sending>, Rejected<Self::Tx>>;

    /// Lets headers leave that waited until the device had moved their payloads. Returns whether all have left. Whoever
    /// sends calls it again and again until its sends are done.
    ///
    /// # Errors
    /// The edge is broken.
    fn advance(&mut self) -> Result<bool, TransportError>;

    /// Notes that the peer will not take part in ending the edges with it, so a drop does not wait for the peer.
    fn peer_is_gone(&mut self) {}
}

/// The receiving end of an edge. One thread at a time uses it.
///
/// # If dropped
/// Receives nothing more. Leases stay valid. When the last end of all edges with one peer is dropped, it ends their
/// shared state, as its backend documents.
pub trait EdgeRx {
    /// A lease to read a slot. Dropping it returns the credit.
    type Rx: Debug;
    /// A receive in progress.
    type Receiving: Submission<Buffer = Self::Rx> + Debug;

    /// Copies the next frame from the peer into `inbox`. Returns false if there is none; the bell rings for the next
    /// one.
    ///
    /// # Errors
    /// The edge is broken, or the peer wrote an impossible value.
    fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError>;

    /// Posts the receive that the header of the last polled frame announces.
    ///
    /// # Errors
    /// The header announces no payload, or one that the edge cannot hold.
    fn receive(
        &mut self,
        header: &Matched<'_>,
    ) -> Result<InFlight<Self::Receiving>, TransportError>;

    /// Does the same as [`EdgeTx::peer_is_gone`].
    fn peer_is_gone(&mut self) {}
}

/// An edge between two stages of one rank. The payload stays in place, and its slot is handed on.
///
/// # If dropped
/// Hands on nothing more. Leases stay valid.
pub trait EdgeLocal {
    /// A lease to write a slot.
    type Tx: Debug;
    /// A lease to read a slot.
    type Rx: Debug;
    /// What the sender may keep of a payload that it has handed on.
    type Sending: Resend<Buffer = Self::Tx> + Debug;

    /// Leases a free slot. Returns `None` if no slot is free now, or if the edge carries headers alone.
    ///
    /// # Errors
    /// The device refuses.
    fn try_lease(&mut self) -> Result<Option<Self::Tx>, TransportError>;

    /// Hands the first `bytes` of a written slot to the next stage. The sender may keep the `Sending` handle, and the
    /// next stage reads through the lease. The slot is free again when both are gone.
    ///
    /// # Errors
    /// The payload comes back in [`Rejected`]: the slot belongs to another edge, or has room for fewer bytes.
    #[expect(clippy::type_complexity, reason = "two handles, or the slot back")]
    fn hand_on(
        &mut self,
        payload: Self::Tx,
        bytes: u64,
    ) -> Result<(InFlight<Self::Sending>, Self::Rx), Rejected<Self::Tx>>;
}

/// One member of a group of ranks that run a stage together.
pub trait GroupEnd {
    /// Checks whether the group has failed, while work of the group is in progress. No completion would ever report
    /// that.
    ///
    /// # Errors
    /// The group has failed.
    fn look(&self) -> Result<(), TransportError> {
        Ok(())
    }

    /// Returns how long this member has waited for others in all its calls, in nanoseconds. Returns 0 if only a device
    /// could tell.
    fn waited_ns(&self) -> u64 {
        0
    }

    /// Does the same as [`EdgeTx::peer_is_gone`], for another member.
    fn peer_is_gone(&mut self) {}
}

/// The edges that one backend makes. All kinds share their leases.
pub trait Edges {
    /// A lease to write a slot.
    type Tx: Debug;
    /// A lease to read a slot.
    type Rx: Debug;
    /// A send in progress, or a payload that was handed on.
    type Sending: Resend<Buffer = Self::Tx> + Debug;
    /// A receive in progress.
    type Receiving: Submission<Buffer = Self::Rx> + Debug;
    /// The sending end of an edge to another rank.
    type Out: EdgeTx<Tx = Self::Tx, Sending = Self::Sending>;
    /// The receiving end of an edge from another rank.
    type In: EdgeRx<Rx = Self::Rx, Receiving = Self::Receiving>;
    /// An edge within this rank.
    type Local: EdgeLocal<Tx = Self::Tx, Rx = Self::Rx, Sending = Self::Sending>;
    /// One member of a group of ranks that run a stage together. Its collectives work on the backend's kind of memory.
    type Group: GroupEnd;
}

/// Checks that a payload and its slot match a message of `bytes` payload bytes. `slot` says whether the slot belongs to
/// this edge, and how many bytes it holds.
#[doc(hidden)]
pub fn check_payload(bytes: u64, slot: Option<(bool, usize)>) -> Result<(), TransportError> {
    let with = match slot {
        None if bytes == 0 => return Ok(()),
        None => "a send without a slot".to_owned(),
        Some(_) if bytes == 0 => "a slot, since it needs none".to_owned(),
        Some((false, _)) => "a slot of another edge".to_owned(),
        Some((true, slot_bytes)) if bytes > slot_bytes as u64 => {
            return Err(TransportError::TooLarge {
                payload_bytes: bytes,
                slot_bytes,
            });
        }
        Some(_) => return Ok(()),
    };
    Err(TransportError::PayloadMismatch {
        payload_bytes: bytes,
        with,
    })
}
