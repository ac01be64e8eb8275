//! The Noise session under a control channel.
//!
//! Hazard: anyone can connect to a rank's socket, record what ranks say and say it again.
//! Guarantee: a session exists only between two holders of the job's secret, of one job, one
//! protocol version and the two ranks they believe to be; a frame is accepted once, in order.
//!
//! Choices: `Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s`. Ephemeral keys on both sides make recorded
//! bytes worthless, and psk0 lets a responder turn a stranger away for the price of one hash and
//! one failed decryption, before any curve arithmetic. The first message alone can be replayed, so
//! nothing follows from it: a peer counts as present only after its first sealed frame.
//! The world's size is not in the key: a rank that has it wrong is told so, not taken for a
//! stranger.

use std::sync::Arc;

use pp_contract::Rank;
use snow::params::{HashChoice, NoiseParams};
use snow::resolvers::{CryptoResolver, DefaultResolver};
use snow::types::Hash;
use snow::{Builder, HandshakeState, StatelessTransportState};

use super::frame::PREFIX_BYTES;
use crate::launch::Launch;

/// Version of rendezvous, framing and message kinds; bound into every session.
pub(crate) const CONTROL_VERSION: u16 = 3;

const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
const TAG_BYTES: usize = 16;
/// Longest Noise message; longer frames are sealed in segments.
const SEGMENT_BYTES: usize = 65_535;
const SEGMENT_PLAIN_BYTES: usize = SEGMENT_BYTES - TAG_BYTES;
/// Kind and length of the body, inside the seal: a cut between two segments is noticed.
const KIND_BYTES: usize = 5;

/// Largest body of one message: a header frame of 64 + 65,536 bytes, and room to say more.
pub const MAX_MESSAGE_BYTES: usize = 64 + 64 * 1024 + 1024;
pub(crate) const MIN_SEALED_BYTES: usize = KIND_BYTES + TAG_BYTES;
pub(crate) const MAX_SEALED_BYTES: usize = KIND_BYTES + MAX_MESSAGE_BYTES + 2 * TAG_BYTES;

const MAGIC: [u8; 4] = *b"PPC1";
const PREAMBLE_BYTES: usize = MAGIC.len() + 2 + 4;
const EPHEMERAL_BYTES: usize = 32;
/// Behind a preamble in the clear: the caller's proof does not hold here.
pub(crate) const NOT_OURS: [u8; 1] = [1];
/// Longest text in a refusal, in bytes.
pub(crate) const MAX_REASON_BYTES: usize = 400;
pub(crate) const MIN_CALL_BYTES: usize = PREAMBLE_BYTES;
pub(crate) const MAX_CALL_BYTES: usize = PREAMBLE_BYTES + EPHEMERAL_BYTES + 4 + TAG_BYTES;
pub(crate) const MIN_ANSWER_BYTES: usize = PREAMBLE_BYTES;
pub(crate) const MAX_ANSWER_BYTES: usize =
    PREAMBLE_BYTES + EPHEMERAL_BYTES + MAX_REASON_BYTES + TAG_BYTES;

/// Why a message of the handshake or a sealed frame is not from our peer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum AuthError {
    #[error("not a message of this protocol")]
    Garbage,
    #[error("speaks control version {theirs}, this rank speaks {CONTROL_VERSION}")]
    Version { theirs: u16 },
    #[error("does not hold the secret of this job")]
    Key,
    #[error("says that this rank does not hold the secret of its job")]
    OtherSecret,
    #[error("a frame that was altered, repeated or not sealed by the peer")]
    Frame,
}

/// Keys that a job's ranks derive from its secret and id. Shows nothing of them.
pub(crate) struct JobKey {
    psk: [u8; 32],
    name: [u8; 32],
}

impl JobKey {
    pub(crate) fn derive(launch: &Launch) -> Self {
        let mut hash = blake2s();
        // Extract, then expand with a label per use (HKDF of RFC 5869, with BLAKE2s).
        let prk = hmac(
            &mut *hash,
            b"pp-transport job secret v1",
            launch.secret.bytes(),
        );
        let expand = |hash: &mut dyn Hash, label: &[u8]| {
            let job_id = launch.job_id().as_bytes();
            let mut info = Vec::with_capacity(label.len() + 8 + job_id.len());
            info.extend_from_slice(label);
            info.extend_from_slice(&(job_id.len() as u64).to_le_bytes());
            info.extend_from_slice(job_id);
            hmac(hash, &prk, &info)
        };
        Self {
            psk: expand(&mut *hash, b"noise psk\0"),
            name: expand(&mut *hash, b"socket name\0"),
        }
    }

    /// Name of rank 0's abstract Unix socket. Keyed, so that no one outside the job can take it
    /// first.
    pub(crate) fn socket_name(&self) -> String {
        let hex: String = self.name[..16].iter().map(|b| format!("{b:02x}")).collect();
        format!("pp-{hex}")
    }
}

fn blake2s() -> Box<dyn Hash> {
    DefaultResolver
        .resolve_hash(&HashChoice::Blake2s)
        .expect("snow is built with BLAKE2s")
}

fn hmac(hash: &mut dyn Hash, key: &[u8], data: &[u8]) -> [u8; 32] {
    let mut out = [0; 32];
    hash.hmac(key, data, &mut out);
    out
}

fn preamble(rank: Rank) -> [u8; PREAMBLE_BYTES] {
    let mut bytes = [0; PREAMBLE_BYTES];
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4..6].copy_from_slice(&CONTROL_VERSION.to_le_bytes());
    bytes[6..].copy_from_slice(&rank.get().to_le_bytes());
    bytes
}

/// The sender's rank and the rest, once magic and version are ours.
fn split_preamble(frame: &[u8]) -> Result<(Rank, &[u8]), AuthError> {
    let (head, rest) = frame
        .split_first_chunk::<PREAMBLE_BYTES>()
        .ok_or(AuthError::Garbage)?;
    let [m0, m1, m2, m3, v0, v1, r0, r1, r2, r3] = *head;
    if [m0, m1, m2, m3] != MAGIC {
        return Err(AuthError::Garbage);
    }
    match u16::from_le_bytes([v0, v1]) {
        CONTROL_VERSION => Ok((Rank::new(u32::from_le_bytes([r0, r1, r2, r3])), rest)),
        theirs => Err(AuthError::Version { theirs }),
    }
}

/// What both sides must believe alike: protocol, and who calls whom.
fn prologue(caller: Rank, answerer: Rank) -> Vec<u8> {
    let mut bytes = b"pp-transport control".to_vec();
    bytes.extend_from_slice(&CONTROL_VERSION.to_le_bytes());
    bytes.extend_from_slice(&caller.get().to_le_bytes());
    bytes.extend_from_slice(&answerer.get().to_le_bytes());
    bytes
}

fn builder<'a>(key: &'a JobKey, prologue: &'a [u8]) -> Builder<'a> {
    let params: NoiseParams = PATTERN.parse().expect("the pattern's name is well formed");
    Builder::new(params)
        .psk(0, &key.psk)
        .and_then(|builder| builder.prologue(prologue))
        .expect("one key and one prologue are set once")
}

/// `prefix ++ preamble ++ noise message` for one step of the handshake.
fn handshake_frame(state: &mut HandshakeState, own: Rank, payload: &[u8]) -> Vec<u8> {
    let mut noise = [0; EPHEMERAL_BYTES + MAX_REASON_BYTES + TAG_BYTES];
    let len = state
        .write_message(payload, &mut noise)
        .expect("the buffer fits a bounded payload, and it is our turn");
    framed(&[&preamble(own), &noise[..len]])
}

/// Bytes with their length in front.
fn framed(parts: &[&[u8]]) -> Vec<u8> {
    let body = parts.concat();
    let mut frame = (body.len() as u32).to_le_bytes().to_vec();
    frame.extend_from_slice(&body);
    frame
}

/// The calling side of a handshake, after its first message.
pub(crate) struct Caller {
    state: HandshakeState,
}

/// What the answering side said.
pub(crate) enum Answer {
    Session(Session),
    Refused(String),
}

impl Caller {
    /// Starts a handshake; the second value is the frame to write.
    pub(crate) fn new(key: &JobKey, own: Rank, answerer: Rank, world_size: u32) -> (Self, Vec<u8>) {
        let prologue = prologue(own, answerer);
        let mut state = builder(key, &prologue)
            .build_initiator()
            .expect("NN needs no static keys");
        let frame = handshake_frame(&mut state, own, &world_size.to_le_bytes());
        (Self { state }, frame)
    }

    pub(crate) fn finish(mut self, answerer: Rank, frame: &[u8]) -> Result<Answer, AuthError> {
        let (rank, noise) = split_preamble(frame)?;
        if rank != answerer {
            return Err(AuthError::Garbage);
        }
        if noise == NOT_OURS {
            return Err(AuthError::OtherSecret);
        }
        let mut payload = [0; MAX_REASON_BYTES];
        let len = self
            .state
            .read_message(noise, &mut payload)
            .map_err(|_| AuthError::Key)?;
        if len > 0 {
            let reason = String::from_utf8_lossy(&payload[..len]).into_owned();
            return Ok(Answer::Refused(reason));
        }
        Session::new(self.state).map(Answer::Session)
    }
}

/// The answering side of a handshake, after the caller's first message. That message may be a
/// replay: it proves nothing but what its first sender knew.
pub(crate) struct Answerer {
    state: HandshakeState,
    own: Rank,
    pub(crate) caller: Rank,
    pub(crate) world_size: u32,
    /// The caller's key of this one handshake: a call with the same one is a copy.
    pub(crate) ephemeral: [u8; EPHEMERAL_BYTES],
}

impl Answerer {
    pub(crate) fn new(key: &JobKey, own: Rank, frame: &[u8]) -> Result<Self, AuthError> {
        let (caller, noise) = split_preamble(frame)?;
        let ephemeral = *noise.first_chunk().ok_or(AuthError::Key)?;
        let prologue = prologue(caller, own);
        let mut state = builder(key, &prologue)
            .build_responder()
            .expect("NN needs no static keys");
        let mut payload = [0; 4];
        match state.read_message(noise, &mut payload) {
            Ok(4) => Ok(Self {
                state,
                own,
                caller,
                world_size: u32::from_le_bytes(payload),
                ephemeral,
            }),
            _ => Err(AuthError::Key),
        }
    }

    /// The frame to write, and the session that a sealed frame from the caller will confirm.
    pub(crate) fn accept(mut self) -> Result<(Vec<u8>, Session), AuthError> {
        let frame = handshake_frame(&mut self.state, self.own, &[]);
        Ok((frame, Session::new(self.state)?))
    }

    /// The frame that tells the caller, and no one else, why it is refused.
    pub(crate) fn refuse(mut self, reason: &str) -> Vec<u8> {
        handshake_frame(&mut self.state, self.own, clip(reason).as_bytes())
    }
}

/// A frame in the clear: our own version, for a caller of another, or [`NOT_OURS`], for one whose proof does not
/// hold. The latter can be forged, so a caller does not believe the first one.
pub(crate) fn notice(own: Rank, notice: &[u8]) -> Vec<u8> {
    framed(&[&preamble(own), notice])
}

/// Who the caller claims to be.
pub(crate) fn claimed_rank(frame: &[u8]) -> Option<Rank> {
    split_preamble(frame).ok().map(|(rank, _)| rank)
}

/// A text cut to what fits into a refusal; never empty, which would mean acceptance.
pub(crate) fn clip(reason: &str) -> &str {
    match reason.floor_char_boundary(MAX_REASON_BYTES) {
        0 => "refused",
        end => &reason[..end],
    }
}

/// Both directions of an established session.
pub(crate) struct Session {
    pub(crate) sealer: Sealer,
    pub(crate) opener: Opener,
}

impl Session {
    fn new(state: HandshakeState) -> Result<Self, AuthError> {
        let state = state
            .into_stateless_transport_mode()
            .map_err(|_| AuthError::Garbage)?;
        Ok(Self::with(Arc::new(state)))
    }

    fn with(keys: Arc<StatelessTransportState>) -> Self {
        Self {
            sealer: Sealer {
                keys: Arc::clone(&keys),
                nonce: 0,
                plain: Vec::new(),
                wire: Vec::new(),
            },
            opener: Opener {
                keys,
                nonce: 0,
                plain: Vec::new(),
            },
        }
    }
}

/// Seals messages of one direction. Each seal uses the next nonce, so frames must go out in the
/// order they were sealed.
pub(crate) struct Sealer {
    keys: Arc<StatelessTransportState>,
    nonce: u64,
    plain: Vec<u8>,
    wire: Vec<u8>,
}

impl Sealer {
    /// The bytes to write for a message; `body` is at most [`MAX_MESSAGE_BYTES`].
    pub(crate) fn seal(&mut self, kind: u8, body: &[u8]) -> &[u8] {
        debug_assert!(body.len() <= MAX_MESSAGE_BYTES);
        self.plain.clear();
        self.plain.push(kind);
        self.plain
            .extend_from_slice(&(body.len() as u32).to_le_bytes());
        self.plain.extend_from_slice(body);
        let segments = self.plain.len().div_ceil(SEGMENT_PLAIN_BYTES);
        let sealed = self.plain.len() + segments * TAG_BYTES;
        self.wire.clear();
        self.wire.extend_from_slice(&(sealed as u32).to_le_bytes());
        self.wire.resize(PREFIX_BYTES + sealed, 0);
        let mut end = PREFIX_BYTES;
        for segment in self.plain.chunks(SEGMENT_PLAIN_BYTES) {
            end += self
                .keys
                .write_message(self.nonce, segment, &mut self.wire[end..])
                .expect("the buffer was sized for its segments, and 2^64 frames are never sent");
            self.nonce += 1;
        }
        &self.wire
    }
}

/// Opens messages of one direction, each exactly once and in order.
pub(crate) struct Opener {
    keys: Arc<StatelessTransportState>,
    nonce: u64,
    plain: Vec<u8>,
}

impl Opener {
    /// Kind and body of a sealed frame (without its prefix). After an error the stream is lost.
    pub(crate) fn open(&mut self, sealed: &[u8]) -> Result<(u8, &[u8]), AuthError> {
        self.plain.resize(sealed.len().min(MAX_SEALED_BYTES), 0);
        let mut end = 0;
        for segment in sealed.chunks(SEGMENT_BYTES) {
            end += self
                .keys
                .read_message(self.nonce, segment, &mut self.plain[end..])
                .map_err(|_| AuthError::Frame)?;
            self.nonce += 1;
        }
        let ([kind, len @ ..], body) = self.plain[..end]
            .split_first_chunk::<KIND_BYTES>()
            .ok_or(AuthError::Frame)?;
        if u32::from_le_bytes(*len) as usize != body.len() {
            return Err(AuthError::Frame);
        }
        Ok((*kind, body))
    }
}

#[cfg(any(test, feature = "fuzz"))]
pub(super) mod testing;
#[cfg(test)]
mod tests;
