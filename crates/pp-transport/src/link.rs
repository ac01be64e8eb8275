//! What a backend must do: move headers and payloads between this rank and one peer.
//!
//! A link is two directed edges. A payload travels in a slot; a slot is a lease that walks with
//! the chunk and comes back as the credit for the next. The header leaves only for a message
//! that was prepared whole, and a receive is posted only with the header that announced it.
//!
//! The runtime is generic over this trait and never names a backend. What a lease gives its
//! holder (bytes on a host, an address and a stream on a device) is between the backend and the
//! stages that were written for it.

use std::fmt::Debug;

use pp_contract::{Header, Matched, Prepared, Stamp};

use crate::bell::Bell;
use crate::error::TransportError;
use crate::in_flight::{InFlight, Rejected, Resend, Submission};

/// What a backend says of itself in reports and at the handshake.
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
#[derive(Debug)]
pub struct Sent<S: Submission> {
    /// Its header, as the peer sees it: what an answer must echo.
    pub header: Header,
    /// Its payload, until the peer has given the slot back. `None` when it has none.
    pub payload: Option<InFlight<S>>,
}

/// Both edges between this rank and one peer, in the hands of one thread.
pub trait Link {
    /// A slot of the outgoing edge, to be written.
    type Tx: Debug;
    /// A slot of the incoming edge, to be read; dropping it gives the credit back.
    type Rx: Debug;
    /// A send under way, whose payload can be sent again over another link.
    type Sending: Resend<Buffer = Self::Tx> + Debug;
    /// A receive under way.
    type Receiving: Submission<Buffer = Self::Rx> + Debug;

    /// What this backend is.
    fn capabilities(&self) -> Capabilities;

    /// The bell that rings when a frame, a credit or a completion may be there.
    fn bell(&self) -> &Bell;

    /// A free slot of the outgoing edge; `None` is backpressure, and the bell rings when it ends.
    ///
    /// # Errors
    /// The link is broken.
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

    /// Copies the next frame from the peer into `inbox`; false when there is none.
    ///
    /// # Errors
    /// The link is broken, or the peer wrote what cannot be.
    fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError>;

    /// Posts the receive that the header of the frame polled last announces.
    ///
    /// # Errors
    /// The header announces no payload, or one that the edge cannot hold.
    fn receive(
        &mut self,
        header: &Matched<'_>,
    ) -> Result<InFlight<Self::Receiving>, TransportError>;

    /// The peer will not take part in the end of this link: a drop does not wait for it.
    fn peer_is_gone(&mut self) {}
}

/// Whether a payload goes with a message of so many payload bytes: whether its slot is one of this
/// link, and how much it holds.
pub(crate) fn check_payload(bytes: u64, slot: Option<(bool, usize)>) -> Result<(), TransportError> {
    let with = match slot {
        None if bytes == 0 => return Ok(()),
        None => "a send without a slot".to_owned(),
        Some(_) if bytes == 0 => "a slot, since it needs none".to_owned(),
        Some((false, _)) => "a slot of another edge".to_owned(),
        Some((true, capacity)) if bytes > capacity as u64 => format!("a slot of {capacity} bytes"),
        Some(_) => return Ok(()),
    };
    Err(TransportError::PayloadMismatch {
        payload_bytes: bytes,
        with,
    })
}
