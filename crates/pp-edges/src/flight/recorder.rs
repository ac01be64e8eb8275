//! The recorder of a process, and the handles to operations in progress.

use std::cell::Cell;
use std::sync::{Arc, OnceLock};

use pp_contract::{CacheEpoch, ChunkIndex, Generation, Header, List, Rank, Stamp, Text};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::operation::{Change, Draft, Kind, Operation, State, identified, reached, unpack};
use crate::error::TransportError;
use pp_words::flight::Ring;

/// The number of operations that are kept by default.
pub const DEFAULT_OPERATIONS: usize = 4096;
/// The most operations that can be kept.
pub const MAX_OPERATIONS: usize = 65_536;
/// The most groups that can be recorded.
pub const MAX_GROUPS: usize = 16;
/// The most members of a group that can be recorded.
pub const MAX_MEMBERS: usize = 1024;

/// Returns the nanoseconds on `CLOCK_MONOTONIC`, which all processes of one host share.
pub(crate) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // The clock starts at 0 when the machine does and is never negative.
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Ranks that have operations in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Its name.
    pub name: Text<64>,
    /// Its members. Empty if there are more than can be recorded.
    pub members: List<Rank, MAX_MEMBERS>,
}

/// Keeps the latest operations of this process. Clones are handles to the same recorder. It outlives edges and
/// generations.
///
/// Any thread may write and any may read, and no thread waits for another.
#[derive(Clone, Debug)]
pub struct FlightRecorder(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    ring: Ring,
    groups: [OnceLock<Group>; MAX_GROUPS],
}

impl FlightRecorder {
    /// Returns a recorder of `operations` operations, [`MAX_OPERATIONS`] at most. All memory is allocated here, 128
    /// bytes for each operation. With 0 it records nothing and costs nothing.
    #[must_use]
    pub fn new(operations: usize) -> Self {
        Self((operations > 0).then(|| {
            Arc::new(Inner {
                ring: Ring::new(operations.min(MAX_OPERATIONS)),
                groups: Default::default(),
            })
        }))
    }

    /// Returns a recorder that records nothing.
    #[must_use]
    pub const fn off() -> Self {
        Self(None)
    }

    /// Tells whether this recorder records.
    #[must_use]
    pub const fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// Returns the number of operations that it keeps.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.0.as_ref().map_or(0, |inner| inner.ring.capacity())
    }

    /// Returns the number of operations that were ever recorded.
    #[must_use]
    pub fn begun(&self) -> u64 {
        self.0.as_ref().map_or(0, |inner| inner.ring.begun())
    }

    /// Returns the operations that it still has, oldest first, and the number ever recorded. Leaves out an operation
    /// that a thread is writing at this moment.
    #[must_use]
    pub fn operations(&self) -> (Vec<Operation>, u64) {
        let Some(inner) = &self.0 else {
            return (Vec::new(), 0);
        };
        let begun = inner.ring.begun();
        let oldest = begun.saturating_sub(inner.ring.capacity() as u64);
        let read = |number| unpack(number, &inner.ring.read(number)?);
        ((oldest..begun).filter_map(read).collect(), begun)
    }

    /// Returns the groups, in the order of their numbers.
    #[must_use]
    pub fn groups(&self) -> Vec<Group> {
        let groups = self.0.iter().flat_map(|inner| &inner.groups);
        groups.map_while(OnceLock::get).cloned().collect()
    }

    /// Returns the number of the group with this name and these members. `None` if there are too many groups.
    pub(crate) fn group(&self, name: &str, members: &[Rank]) -> Option<u8> {
        let groups = &self.0.as_ref()?.groups;
        let own = || Group {
            name: Text::truncated(name),
            members: List::new(members.to_vec()).unwrap_or_default(),
        };
        let is_own = |place: &OnceLock<Group>| *place.get_or_init(own) == own();
        let at = groups.iter().position(is_own)?;
        Some(at as u8)
    }

    /// Records that an operation was prepared.
    pub(crate) fn begin(&self, draft: &Draft) -> Record {
        let begin = |inner: &Arc<Inner>| inner.ring.append(&draft.words(now_ns()));
        Record::of(
            self.0
                .as_ref()
                .map(|inner| (Arc::clone(inner), begin(inner))),
        )
    }
}

/// Records the messages of one end of an edge.
#[derive(Clone, Debug)]
pub struct EdgeLog {
    /// Keeps what is recorded.
    pub recorder: FlightRecorder,
    /// The rank at the other end.
    pub peer: Rank,
    /// The generation of the edge.
    pub generation: Generation,
    /// The number of the edge.
    pub edge: u32,
}

impl EdgeLog {
    fn draft(&self, kind: Kind, bytes: u64, chunk: (ChunkIndex, CacheEpoch)) -> Draft {
        Draft {
            kind,
            group: None,
            peer: Some(self.peer),
            generation: self.generation,
            edge: Some(self.edge),
            number: None,
            bytes,
            dtype: None,
            chunk: Some(chunk),
        }
    }

    /// Records a message with this many bytes of payload that is about to be given to the edge.
    #[must_use]
    pub fn sends(&self, payload_bytes: u64, stamp: Stamp) -> Record {
        let chunk = (stamp.chunk_index, stamp.cache_epoch);
        self.recorder
            .begin(&self.draft(Kind::Send, payload_bytes, chunk))
    }

    /// Records a message that has arrived. Without a payload the operation is over.
    #[must_use]
    pub fn hears(&self, header: &Header) -> Record {
        let Some(inner) = &self.recorder.0 else {
            return Record::default();
        };
        let now = now_ns();
        let chunk = (header.chunk_index(), header.cache_epoch());
        let draft = self.draft(Kind::Receive, header.payload_bytes(), chunk);
        let mut words = draft.words(now);
        let is_over = header.payload_bytes() == 0;
        let until = reached(State::Committed, now).chain(reached(State::Done, now));
        let changes = identified(header).into_iter();
        for (at, word) in changes.chain(until.filter(|_| is_over)) {
            words[at] = word;
        }
        let number = inner.ring.append(&words);
        Record::of((!is_over).then(|| (Arc::clone(inner), number)))
    }
}

/// The record of an operation until the operation is over. Empty if nothing is recorded.
///
/// # If dropped
/// The record stays as it is.
#[derive(Debug, Default)]
pub struct Record {
    place: Option<(Arc<Inner>, u64)>,
    is_over: Cell<bool>,
}

impl Record {
    fn of(place: Option<(Arc<Inner>, u64)>) -> Self {
        let is_over = Cell::new(false);
        Self { place, is_over }
    }

    fn amend<C: IntoIterator<Item = Change>>(&self, changes: impl FnOnce(u64) -> C) {
        if let Some((inner, number)) = &self.place {
            inner.ring.amend(*number, changes(now_ns()));
        }
    }

    /// Notes that the operation has reached this state.
    pub fn reached(&self, state: State) {
        self.amend(|now| reached(state, now));
    }

    /// Notes that a message has left with this header. Without a payload the operation is over.
    pub fn left(&self, header: &Header) {
        let last = match header.payload_bytes() {
            0 => State::Done,
            _ => State::Started,
        };
        self.amend(|now| {
            let until = reached(State::Committed, now).chain(reached(last, now));
            identified(header).into_iter().chain(until)
        });
    }

    /// Notes that the operation was committed and given to the backend.
    pub fn started(&self) {
        self.amend(|now| reached(State::Committed, now).chain(reached(State::Started, now)));
    }

    /// Notes how the operation ended. Only the first call counts.
    pub fn end(&self, state: State) {
        if !self.is_over.replace(true) {
            self.reached(state);
        }
    }

    /// Notes the result of a poll.
    pub(crate) fn look(&self, done: &Result<bool, TransportError>) {
        match done {
            Ok(true) => self.end(State::Done),
            Ok(false) => {}
            Err(_) => self.end(State::Poisoned),
        }
    }
}
