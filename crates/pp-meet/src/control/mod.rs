//! The control channel: how ranks find each other, prove who they are, and talk.
//!
//! Hazard: the sockets of a job are open to strangers, and a peer can die, hang or lie at any
//! moment. Guarantee: bytes are acted on only after they have proven to come, once and in order,
//! from a rank of this job; every wait has a deadline; what a peer can make us hold is bounded.
//!
//! Choices, bottom up: bounded frames, a Noise session keyed by the job's secret,
//! [`rendezvous()`] around rank 0, [`ControlChannel`] with its two halves, [`agree`], which
//! compares what the ranks were started with, and [`introduce()`], which gives two other ranks a channel. No thread is
//! started here and no runtime needed. Between ranks of one host the channel is a Unix socket and passes descriptors;
//! the header lane itself is then a ring in shared memory, and this channel stays for hellos, heartbeats, faults and
//! the end of the stream.

pub(crate) mod channel;
mod error;
mod fds;
mod frame;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod handshake;
mod message;
mod rendezvous;
mod secure;
mod socket;

pub use channel::{ControlChannel, ControlReceiver, ControlSender, Received};
pub use error::ControlError;
pub use fds::MAX_FDS;
pub use handshake::agree;
pub use message::{Message, Vitals};
pub use rendezvous::{
    OnMet, Peers, RendezvousError, RendezvousOptions, Tell, TurnedAway, introduce, rendezvous,
};
pub use secure::MAX_MESSAGE_BYTES;
pub use socket::SocketKind;
