//! What a backend must do: move headers and payloads along the edges of a rank.
//!
//! An edge has one direction, and two ends in two ranks, or both in one. A rank has any number of
//! edges with any number of peers. A payload travels in a slot; a slot is a lease that walks with
//! the chunk and comes back as the credit for the next. The header leaves only for a message
//! that was prepared whole, and a receive is posted only with the header that announced it.
//!
//! The runtime is generic over these traits and never names a backend. What a lease gives its
//! holder (bytes on a host, an address and a stream on a device) is between the backend and the
//! stages that were written for it.

use std::fmt::Debug;

use pp_contract::{Header, Matched, Prepared, Stamp};

use crate::error::TransportError;
use crate::in_flight::{InFlight, Rejected, Resend, Submission};

/// Describes a backend in reports and at the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Short name: `host`, `nccl`.
    pub name: &'static str,
    /// Whether a payload takes time to move after its header; else it is there with it.
    pub payload_moves: bool,
    /// Whether the bell rings for completions; if not, the caller must poll.
    pub completions_ring: bool,
}

/// A message that has left.
///
/// # If dropped
/// As [`InFlight`]: the payload's slot comes back to its pool once the peer has read it.
#[must_use = "its payload is still read by the peer: keep it until it is done"]
#[derive(Debug)]
pub struct Sent<S: Submission> {
    /// Its header, as the peer sees it: what an answer must echo.
    pub header: Header,
    /// Its payload, until the peer has given the slot back. `None` when it has none.
    pub payload: Option<InFlight<S>>,
}

/// The sending end of an edge, in the hands of one thread.
///
/// # If dropped
/// Nothing more is sent. Leases stay valid. The last end of all edges with one peer ends what they
/// have in common, as its backend says.
pub trait EdgeTx {
    /// A slot, to be written.
    type Tx: Debug;
    /// A send under way, whose payload can be sent again over another edge.
    type Sending: Resend<Buffer = Self::Tx> + Debug;

    /// A free slot; `None` is backpressure, and the bell rings when it ends. An edge that carries
    /// headers alone never has one.
    ///
    /// # Errors
    /// The edge is broken.
    fn try_lease(&mut self) -> Result<Option<Self::Tx>, TransportError>;

    /// Commits a message and hands over its payload. `payload` is there exactly when the message
    /// has payload bytes. Everything that can fail is checked before the header leaves.
    ///
    /// # Errors
    /// The payload comes back in [`Rejected`], the header has not left, and the message's
    /// sequence numbers are not used up. [`TransportError::is_backpressure`] asks to try later.
    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<Self::Tx>,
    ) -> Result<Sent<Self::Sending>, Rejected<Self::Tx>>;

    /// The peer will not take part in the end of the edges with it: a drop does not wait for it.
    fn peer_is_gone(&mut self) {}
}

/// The receiving end of an edge, in the hands of one thread.
///
/// # If dropped
/// Nothing more is received. Leases stay valid. The last end of all edges with one peer ends what
/// they have in common, as its backend says.
pub trait EdgeRx {
    /// A slot, to be read; dropping it gives the credit back.
    type Rx: Debug;
    /// A receive under way.
    type Receiving: Submission<Buffer = Self::Rx> + Debug;

    /// Copies the next frame from the peer into `inbox`; false when there is none, and the bell
    /// rings for the next.
    ///
    /// # Errors
    /// The edge is broken, or the peer wrote what cannot be.
    fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError>;

    /// Posts the receive that the header of the frame polled last announces.
    ///
    /// # Errors
    /// The header announces no payload, or one that the edge cannot hold.
    fn receive(
        &mut self,
        header: &Matched<'_>,
    ) -> Result<InFlight<Self::Receiving>, TransportError>;

    /// As [`EdgeTx::peer_is_gone`].
    fn peer_is_gone(&mut self) {}
}

/// An edge between two stages of one rank: a payload stays where it is, its slot is handed on.
///
/// # If dropped
/// Nothing more is handed on. Leases stay valid.
pub trait EdgeLocal {
    /// A slot, to be written.
    type Tx: Debug;
    /// A slot, to be read.
    type Rx: Debug;
    /// What the sender may hold of a payload that was handed on.
    type Sending: Resend<Buffer = Self::Tx> + Debug;

    /// A free slot; `None` when there is none now, or the edge carries headers alone.
    ///
    /// # Errors
    /// The device refuses.
    fn try_lease(&mut self) -> Result<Option<Self::Tx>, TransportError>;

    /// Hands the first `bytes` of a written slot to the next stage. `Sending` is what the sender
    /// may hold, the lease is what the next stage reads. The slot is free again when both are gone.
    ///
    /// # Errors
    /// The payload comes back in [`Rejected`]: the slot is of another edge, or does not hold so
    /// many bytes.
    #[expect(clippy::type_complexity, reason = "two handles, or the slot back")]
    fn hand_on(
        &mut self,
        payload: Self::Tx,
        bytes: u64,
    ) -> Result<(InFlight<Self::Sending>, Self::Rx), Rejected<Self::Tx>>;
}

/// One member of a group of ranks that run a stage together.
pub trait GroupEnd {
    /// Asked while work of the group is under way: whether the group has failed, which no completion would ever say.
    ///
    /// # Errors
    /// It has.
    fn look(&self) -> Result<(), TransportError> {
        Ok(())
    }

    /// How long this member has waited for others in its calls, in all, in nanoseconds; 0 where only a device could tell.
    fn waited_ns(&self) -> u64 {
        0
    }

    /// As [`EdgeTx::peer_is_gone`], of another member.
    fn peer_is_gone(&mut self) {}
}

/// The edges that one backend makes. All kinds share their leases.
pub trait Edges {
    /// A slot, to be written.
    type Tx: Debug;
    /// A slot, to be read.
    type Rx: Debug;
    /// A send under way, or a payload that was handed on.
    type Sending: Resend<Buffer = Self::Tx> + Debug;
    /// A receive under way.
    type Receiving: Submission<Buffer = Self::Rx> + Debug;
    /// The sending end of an edge to another rank.
    type Out: EdgeTx<Tx = Self::Tx, Sending = Self::Sending>;
    /// The receiving end of an edge from another rank.
    type In: EdgeRx<Rx = Self::Rx, Receiving = Self::Receiving>;
    /// An edge within this rank.
    type Local: EdgeLocal<Tx = Self::Tx, Rx = Self::Rx, Sending = Self::Sending>;
    /// One member of a group of ranks that run a stage together. Its collectives are of the backend's own memory.
    type Group: GroupEnd;
}

/// Whether a payload goes with a message of so many payload bytes: whether its slot is one of this
/// edge, and how much it holds.
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
