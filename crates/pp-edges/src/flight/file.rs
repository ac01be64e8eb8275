//! The recording of one rank, as a file.
//!
//! | bytes | what |
//! |---|---|
//! | 0–7 | `PPFLIGHT` |
//! | 8–9 | version, 3 |
//! | 10–11 | 0 |
//! | 12–15 | length of the body |
//! | 16–23 | XXH3-64 of the body |
//! | 24– | the body: a [`Recording`] in postcard |
//!
//! Numbers are little endian. Nothing follows the body.

use pp_contract::{Fault, List, Rank, Text, WorldSize, digest};
use serde::{Deserialize, Serialize};

use super::operation::Operation;
use super::recorder::{FlightRecorder, Group, MAX_GROUPS, MAX_OPERATIONS};

/// The version of the file that this build writes and reads.
pub const FILE_VERSION: u16 = 3;
/// The first bytes of a file.
const MAGIC: [u8; 8] = *b"PPFLIGHT";
/// Bytes before the body.
const HEAD_BYTES: usize = 24;
/// The longest file. An operation takes at most 146 bytes, and mostly 50.
pub const MAX_FILE_BYTES: usize = 16 << 20;

/// A moment on both clocks of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// Nanoseconds on its monotonic clock, as the times of operations are.
    pub monotonic_ns: u64,
    /// Nanoseconds since 1970.
    pub realtime_ns: u64,
}

/// Why a recording was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Reason {
    /// A user asked for it, and the rank went on.
    Asked,
    /// A fault ended the job, or this generation of it. It has no text.
    Fault(Fault),
    /// A thread panicked.
    Panic(Text<512>),
}

/// Names the operation that the driver of a rank was in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Activity {
    /// Its name.
    pub operation: Text<64>,
    /// Whether a stage was at work, rather than the transport.
    pub is_stage: bool,
    /// When the operation began, or was first seen. `None` if no thread looked.
    pub since_ns: Option<u64>,
    /// Since when the driver waits for a peer or a device. `None` if it does not wait.
    pub waiting_since_ns: Option<u64>,
}

/// Holds the events that one rank recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recording {
    /// Digest of the job's id.
    pub job: u64,
    /// The rank.
    pub rank: Rank,
    /// Ranks of the job.
    pub world_size: WorldSize,
    /// The process id. A rank that was started again has another one.
    pub pid: u32,
    /// Name of its host.
    pub host: Text<64>,
    /// An id of one boot of the host. Ranks with the same id share a clock.
    pub boot: Text<64>,
    /// When it was written.
    pub written: Moment,
    /// Why.
    pub reason: Reason,
    /// What the driver was doing. `None` before there was a driver.
    pub activity: Option<Activity>,
    /// The most operations that were kept.
    pub capacity: u32,
    /// Number of operations that were ever recorded.
    pub total: u64,
    /// The groups, by number.
    pub groups: List<Group, MAX_GROUPS>,
    /// The operations that were kept, oldest first.
    pub operations: List<Operation, MAX_OPERATIONS>,
}

/// Why a file is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RecordingError {
    /// The first bytes are not those of a recording.
    #[error("it is no flight recording: it does not begin with PPFLIGHT")]
    Magic,
    /// The file has another version.
    #[error(
        "it is of version {theirs}, this program reads version {FILE_VERSION}; read it with the pp \
         that wrote it"
    )]
    Version {
        /// The version of the file.
        theirs: u16,
    },
    /// The length differs from the length that the file states.
    #[error("it has {got} bytes where it says {stated}; it was cut off or added to: copy it again")]
    Length {
        /// Bytes of the file.
        got: u64,
        /// Bytes that the file states.
        stated: u64,
    },
    /// The content was changed.
    #[error("it is damaged: its digest is {computed:016x}, it says {stated:016x}; copy it again")]
    Digest {
        /// Digest of the body in the file.
        computed: u64,
        /// Digest that the file states.
        stated: u64,
    },
    /// The file is longer than any recording.
    #[error("it has {got} bytes; no recording has more than {MAX_FILE_BYTES}")]
    TooLong {
        /// Bytes of the file.
        got: u64,
    },
    /// The digest is right, but the content is not valid.
    #[error("its content cannot be: {why}")]
    Malformed {
        /// What is wrong with it.
        why: String,
    },
}

impl Recording {
    /// Adds the operations and groups that `recorder` has kept.
    #[must_use]
    pub fn with(mut self, recorder: &FlightRecorder) -> Self {
        let (operations, total) = recorder.operations();
        self.capacity = recorder.capacity() as u32;
        self.total = total;
        // Neither is ever longer than the bound.
        self.operations = List::new(operations).unwrap_or_default();
        self.groups = List::new(recorder.groups()).unwrap_or_default();
        self
    }

    /// Encodes the recording as a file.
    ///
    /// # Errors
    /// [`RecordingError::Malformed`]; a recording always encodes, so this is not known to occur.
    pub fn encode(&self) -> Result<Vec<u8>, RecordingError> {
        let mut file = vec![0; HEAD_BYTES];
        file = postcard::to_extend(self, file).map_err(malformed)?;
        let (head, body) = file.split_at_mut(HEAD_BYTES);
        head[..8].copy_from_slice(&MAGIC);
        head[8..10].copy_from_slice(&FILE_VERSION.to_le_bytes());
        head[12..16].copy_from_slice(&(body.len() as u32).to_le_bytes());
        head[16..].copy_from_slice(&digest(body).to_le_bytes());
        Ok(file)
    }

    /// Decodes a file. Uses memory in proportion to the file, and never more than [`MAX_OPERATIONS`] need.
    ///
    /// # Errors
    /// [`RecordingError`]: the version is checked first, then the length, then the digest.
    pub fn decode(file: &[u8]) -> Result<Self, RecordingError> {
        let magic = &file[..file.len().min(MAGIC.len())];
        if *magic != MAGIC[..magic.len()] || magic.is_empty() {
            return Err(RecordingError::Magic);
        }
        let got = file.len() as u64;
        if file.len() > MAX_FILE_BYTES {
            return Err(RecordingError::TooLong { got });
        }
        let Some((head, body)) = file.split_first_chunk::<HEAD_BYTES>() else {
            let stated = HEAD_BYTES as u64;
            return Err(RecordingError::Length { got, stated });
        };
        let theirs = u16::from_le_bytes([head[8], head[9]]);
        if theirs != FILE_VERSION {
            return Err(RecordingError::Version { theirs });
        }
        let length = u32::from_le_bytes([head[12], head[13], head[14], head[15]]);
        let stated = HEAD_BYTES as u64 + u64::from(length);
        if stated != got {
            return Err(RecordingError::Length { got, stated });
        }
        let (_, stated) = head.split_last_chunk().expect("a digest at its end");
        let stated = u64::from_le_bytes(*stated);
        let computed = digest(body);
        if computed != stated || head[10..12] != [0, 0] {
            return Err(RecordingError::Digest { computed, stated });
        }
        let (recording, rest): (Self, _) = postcard::take_from_bytes(body).map_err(malformed)?;
        if !rest.is_empty() {
            let why = format!("{} bytes follow it", rest.len());
            return Err(RecordingError::Malformed { why });
        }
        recording.check()
    }

    /// Checks the rules that no type expresses.
    fn check(self) -> Result<Self, RecordingError> {
        let refuse = |why: String| Err(RecordingError::Malformed { why });
        if !self.world_size.contains(self.rank) {
            return refuse(format!("rank {} of {}", self.rank, self.world_size));
        }
        let numbers = self.operations.iter().map(|operation| operation.sequence);
        if !numbers.clone().is_sorted_by(|a, b| a < b) {
            return refuse("its operations are not in order".into());
        }
        if let Some(last) = numbers.max().filter(|last| *last >= self.total) {
            return refuse(format!("operation {last} of {}", self.total));
        }
        let group = |operation: &Operation| operation.group.map(usize::from);
        let unknown = |group: &usize| *group >= self.groups.len();
        if let Some(group) = self.operations.iter().filter_map(group).find(unknown) {
            return refuse(format!("group {group} of {}", self.groups.len()));
        }
        Ok(self)
    }
}

fn malformed(error: postcard::Error) -> RecordingError {
    let why = error.to_string();
    RecordingError::Malformed { why }
}
