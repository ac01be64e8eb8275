//! The kinds of message on a control channel.

use std::borrow::Cow;
use std::fmt;

use pp_contract::{BodyError, CacheEpoch, Fault};

/// One message between two ranks. Bytes are borrowed: from the caller when sent, from the
/// receiver's buffer when received. `Debug` tells their number alone: a frame may carry an id that
/// lets its reader in.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Message<'a> {
    /// An encoded hello of the handshake.
    Hello(&'a [u8]),
    /// Rank 0's word on the handshake.
    Verdict(&'a [u8]),
    /// The peer is alive.
    Heartbeat,
    /// A header frame, for a pair of ranks with no ring between them.
    Frame(&'a [u8]),
    /// Rank 0 introduces a rank to another, and what such a rank answers. Only its own functions read it.
    Introduce(&'a [u8]),
    /// A signal with this number asked the sender to finish what is in flight, and end.
    Drain(u8),
    /// Rank 0 says: a hard cut began this epoch, and what is older is dropped.
    Cut(CacheEpoch),
    /// Rank 0 says: nothing more is needed of any other rank, so the loss of one is no fault any more.
    Served,
    /// Rank 0 asks for vital signs, one message a second, or for no more of them.
    Ask(bool),
    /// The vital signs of a rank that was asked.
    Vitals(Vitals),
    /// The job is over, and why.
    Abort(Fault),
    /// The peer leaves in order; nothing follows.
    Bye,
}

/// The vital signs of a rank: what somebody who looks at the job sees of it between two chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Vitals {
    /// Bytes of the host's memory that its process has.
    pub resident_bytes: u64,
    /// Chunks that wait for its stages.
    pub queued: u64,
    /// Bytes of its device's memory that are free, and all of them; 0 for all where it has no device.
    pub device_bytes: [u64; 2],
}

impl Vitals {
    /// Bytes on the wire.
    const BYTES: usize = 32;

    fn encode(&self) -> [u8; Self::BYTES] {
        let [free, total] = self.device_bytes;
        let mut bytes = [0; Self::BYTES];
        let words = [self.resident_bytes, self.queued, free, total];
        for (at, word) in bytes.chunks_exact_mut(8).zip(words) {
            at.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn decode(body: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = body.try_into().ok()?;
        let word = |at: usize| {
            let bytes = bytes[8 * at..][..8].try_into();
            u64::from_le_bytes(bytes.expect("eight bytes"))
        };
        Some(Self {
            resident_bytes: word(0),
            queued: word(1),
            device_bytes: [word(2), word(3)],
        })
    }
}

impl fmt::Debug for Message<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hello(body) | Self::Verdict(body) | Self::Frame(body) | Self::Introduce(body) => {
                write!(f, "{} of {} bytes", self.name(), body.len())
            }
            Self::Abort(fault) => write!(f, "{}: {fault}", self.name()),
            Self::Cut(epoch) => write!(f, "{} at epoch {epoch}", self.name()),
            Self::Drain(signal) => write!(f, "{} after signal {signal}", self.name()),
            Self::Ask(is_on) => write!(f, "{}: {is_on}", self.name()),
            Self::Heartbeat | Self::Served | Self::Vitals(_) | Self::Bye => {
                f.write_str(self.name())
            }
        }
    }
}

/// Signals have numbers up to this one.
const MAX_SIGNAL: u8 = 64;

/// Kinds on the wire. Those up to `REFUSED` belong to the rendezvous.
pub(super) mod kind {
    pub(crate) const CONFIRM: u8 = 1;
    pub(crate) const JOINED: u8 = 2;
    pub(crate) const WELCOME: u8 = 3;
    pub(crate) const REFUSED: u8 = 4;
    pub(crate) const HELLO: u8 = 16;
    pub(crate) const VERDICT: u8 = 17;
    pub(crate) const FDS: u8 = 18;
    pub(crate) const HEARTBEAT: u8 = 19;
    pub(crate) const FRAME: u8 = 20;
    pub(crate) const ABORT: u8 = 21;
    pub(crate) const BYE: u8 = 22;
    pub(crate) const DRAIN: u8 = 23;
    pub(crate) const INTRODUCE: u8 = 24;
    pub(crate) const CUT: u8 = 25;
    pub(crate) const SERVED: u8 = 26;
    pub(crate) const ASK: u8 = 27;
    pub(crate) const VITALS: u8 = 28;
}

impl<'a> Message<'a> {
    /// Its kind and its body on the wire.
    ///
    /// # Errors
    /// A fault that cannot be encoded.
    pub(super) fn encode(&self) -> Result<(u8, Cow<'_, [u8]>), BodyError> {
        Ok(match self {
            Self::Hello(body) => (kind::HELLO, Cow::Borrowed(*body)),
            Self::Verdict(body) => (kind::VERDICT, Cow::Borrowed(*body)),
            Self::Heartbeat => (kind::HEARTBEAT, Cow::default()),
            Self::Frame(body) => (kind::FRAME, Cow::Borrowed(*body)),
            Self::Introduce(body) => (kind::INTRODUCE, Cow::Borrowed(*body)),
            Self::Drain(signal) => (kind::DRAIN, std::slice::from_ref(signal).into()),
            Self::Cut(epoch) => (kind::CUT, epoch.get().to_le_bytes().to_vec().into()),
            Self::Served => (kind::SERVED, Cow::default()),
            Self::Ask(is_on) => (kind::ASK, vec![u8::from(*is_on)].into()),
            Self::Vitals(vitals) => (kind::VITALS, vitals.encode().to_vec().into()),
            Self::Abort(fault) => (kind::ABORT, fault.encode()?.into()),
            Self::Bye => (kind::BYE, Cow::default()),
        })
    }

    /// What to call it in an error.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "a hello",
            Self::Verdict(_) => "a verdict",
            Self::Heartbeat => "a heartbeat",
            Self::Frame(_) => "a header frame",
            Self::Introduce(_) => "an introduction",
            Self::Drain(_) => "a drain",
            Self::Cut(_) => "a cut",
            Self::Served => "word that all is served",
            Self::Ask(_) => "a request for vital signs",
            Self::Vitals(_) => "vital signs",
            Self::Abort(_) => "an abort",
            Self::Bye => "a goodbye",
        }
    }

    /// The message that came as `kind` and `body`; what is wrong with it otherwise.
    pub(super) fn parse(kind: u8, body: &'a [u8]) -> Result<Self, String> {
        let empty = |message| match body.len() {
            0 => Ok(message),
            bytes => Err(format!("message kind {kind} came with {bytes} bytes")),
        };
        match kind {
            kind::HELLO => Ok(Self::Hello(body)),
            kind::VERDICT => Ok(Self::Verdict(body)),
            kind::HEARTBEAT => empty(Self::Heartbeat),
            kind::FRAME => Ok(Self::Frame(body)),
            kind::INTRODUCE => Ok(Self::Introduce(body)),
            kind::ABORT => match Fault::decode(body) {
                Ok(fault) => Ok(Self::Abort(fault)),
                Err(error) => Err(error.to_string()),
            },
            kind::BYE => empty(Self::Bye),
            kind::SERVED => empty(Self::Served),
            kind::DRAIN => match *body {
                [signal @ 1..=MAX_SIGNAL] => Ok(Self::Drain(signal)),
                _ => Err(format!("a drain of {} bytes names no signal", body.len())),
            },
            kind::CUT => match body.try_into() {
                Ok(epoch) => Ok(Self::Cut(CacheEpoch::new(u64::from_le_bytes(epoch)))),
                Err(_) => Err(format!("a cut of {} bytes names no epoch", body.len())),
            },
            kind::ASK => match *body {
                [is_on @ 0..=1] => Ok(Self::Ask(is_on == 1)),
                _ => Err(format!("a request of {} bytes says nothing", body.len())),
            },
            kind::VITALS => match Vitals::decode(body) {
                Some(vitals) => Ok(Self::Vitals(vitals)),
                None => Err(format!("vital signs of {} bytes", body.len())),
            },
            kind::FDS => Err("file descriptors came when none were expected".into()),
            _ => Err(format!("message kind {kind} is not one of this version")),
        }
    }
}
