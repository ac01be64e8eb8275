//! One recorded operation of a rank.

use pp_contract::{
    Action, CacheEpoch, CallId, ChunkIndex, DType, EdgeSeq, Generation, Header, Rank,
};
use serde::{Deserialize, Serialize};

use pp_words::flight::{WORDS, Words};

/// Declares an enumeration whose values are stored in a word, as their place in a list.
macro_rules! packed {
    ($(#[$doc:meta])* $name:ident { $($(#[$about:meta])* $variant:ident => $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[non_exhaustive]
        pub enum $name { $($(#[$about])* $variant,)+ }

        impl $name {
            /// Every value there is.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            fn unpack(code: u64) -> Option<Self> {
                Self::ALL.get(usize::try_from(code).ok()?).copied()
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(match self { $(Self::$variant => $text,)+ })
            }
        }
    };
}

packed! {
    /// What kind of operation it is.
    Kind {
        /// A message to the peer, with its payload if it has one.
        Send => "send",
        /// A message from the peer, with its payload if it has one.
        Receive => "receive",
        /// A send to a member of a group.
        GroupSend => "group send",
        /// A receive from a member of a group.
        GroupReceive => "group receive",
        /// A reduction among all members of a group.
        AllReduce => "all-reduce",
        /// A copy from one member of a group to all others.
        Broadcast => "broadcast",
        /// A part from one member of a group to each.
        Scatter => "scatter",
        /// A part from each member of a group to one.
        Gather => "gather",
        /// A wait of all members of a group for each other.
        Barrier => "barrier",
    }
}

impl Kind {
    /// Tells whether all members of a group take part.
    #[must_use]
    pub const fn is_collective(self) -> bool {
        self.is_of_group() && !matches!(self, Self::GroupSend | Self::GroupReceive)
    }

    /// Tells whether it is an operation of a group rather than of an edge.
    #[must_use]
    pub const fn is_of_group(self) -> bool {
        !matches!(self, Self::Send | Self::Receive)
    }
}

packed! {
    /// How far an operation has come. Its times say when it reached each state.
    State {
        /// A send was given to its edge, the header of a receive has arrived, or a group operation was put together.
        Prepared => "prepared",
        /// The header has left, the receive is posted, or the group operation is entered.
        Committed => "committed",
        /// The backend has the payload and moves it.
        Started => "started",
        /// The operation is over, and its buffer belongs to its owner again.
        Done => "done",
        /// It failed or was given up.
        Poisoned => "poisoned",
        /// No caller waits for the operation any more. Its slot comes back by itself.
        Left => "left",
    }
}

packed! {
    /// The kind of a message.
    Message {
        /// A sign of life alone.
        Noop => "noop",
        /// A chunk, or its acceptance.
        Chunk => "chunk",
        /// The sender's last message.
        Shutdown => "shutdown",
    }
}

impl Message {
    fn of(header: &Header) -> Self {
        match header.action() {
            Action::Noop => Self::Noop,
            Action::Infer => Self::Chunk,
            Action::Shutdown => Self::Shutdown,
        }
    }
}

/// One operation: what it was, and how far it came.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// Its number in this rank, over all edges and groups.
    pub sequence: u64,
    /// What kind of operation it is.
    pub kind: Kind,
    /// How far it has come.
    pub state: State,
    /// What the message is; unknown for operations of a group and before a send is committed.
    pub message: Option<Message>,
    /// The group, as an index into the recording's list.
    pub group: Option<u8>,
    /// The other rank. For a broadcast, a scatter or a gather: the root.
    pub peer: Option<Rank>,
    /// The generation of the edge or the communicator.
    pub generation: Generation,
    /// The number of the edge. `None` for operations of a group.
    pub edge: Option<u32>,
    /// The number of the operation: on its edge, among the collectives of its group, or among the transfers of its
    /// group between these two ranks in this direction. `None` for messages without a payload.
    pub number: Option<u64>,
    /// Bytes of the payload.
    pub bytes: u64,
    /// Type of the elements. `None` for messages, whose payloads are plain bytes to the edge.
    pub dtype: Option<DType>,
    /// The call that the message makes or answers. `None` before a send is committed.
    pub call_id: Option<CallId>,
    /// The chunk it is about.
    pub chunk_index: Option<ChunkIndex>,
    /// The epoch it belongs to.
    pub cache_epoch: Option<CacheEpoch>,
    /// When it was prepared, on this host's monotonic clock.
    pub prepared_ns: u64,
    /// When it was committed.
    pub committed_ns: Option<u64>,
    /// When the backend got it.
    pub started_ns: Option<u64>,
    /// When it was done, poisoned or left.
    pub ended_ns: Option<u64>,
}

impl Operation {
    /// Tells whether the operation has ended.
    #[must_use]
    pub const fn is_over(&self) -> bool {
        matches!(self.state, State::Done | State::Poisoned | State::Left)
    }

    /// Returns when it reached its state.
    #[must_use]
    pub fn since_ns(&self) -> u64 {
        let later = self.ended_ns.or(self.started_ns).or(self.committed_ns);
        later.unwrap_or(self.prepared_ns)
    }
}

/// Stands for a number that is absent or not known yet.
const NONE: u64 = u64::MAX;
/// Stands for a byte that is absent or not known yet.
const NONE_BYTE: u64 = 0xFF;

/// The index of each word in a record. Word 0 belongs to the ring.
const STATE: usize = 1;
const MESSAGE: usize = 2;
/// Kind, group, type of the elements and edge.
const ABOUT: usize = 3;
/// Peer and generation.
const WHERE: usize = 4;
const BYTES: usize = 5;
const CALL: usize = 6;
const CHUNK: usize = 7;
const EPOCH: usize = 8;
const NUMBER: usize = 9;
const PREPARED: usize = 10;
const COMMITTED: usize = 11;
const STARTED: usize = 12;
const ENDED: usize = 13;
const _: () = assert!(ENDED + 1 == WORDS);

/// The values of an operation that are known when it begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Draft {
    pub(crate) kind: Kind,
    pub(crate) group: Option<u8>,
    pub(crate) peer: Option<Rank>,
    pub(crate) generation: Generation,
    pub(crate) edge: Option<u32>,
    pub(crate) number: Option<u64>,
    pub(crate) bytes: u64,
    pub(crate) dtype: Option<DType>,
    pub(crate) chunk: Option<(ChunkIndex, CacheEpoch)>,
}

impl Draft {
    /// Returns the words of an operation that was prepared now.
    pub(crate) fn words(&self, now_ns: u64) -> Words {
        let mut words = [NONE; WORDS];
        words[STATE] = State::Prepared as u64;
        let group = self.group.map_or(NONE_BYTE, u64::from);
        let dtype = self.dtype.map_or(NONE_BYTE, |d| u64::from(d.code()));
        // Edges are few, so the highest number stands for none.
        let edge = u64::from(self.edge.unwrap_or(u32::MAX));
        words[ABOUT] = self.kind as u64 | group << 8 | dtype << 16 | edge << 32;
        // Ranks are small, so the highest number stands for none.
        let peer = self.peer.map_or(u32::MAX, Rank::get);
        words[WHERE] = u64::from(peer) | u64::from(self.generation.get()) << 32;
        words[BYTES] = self.bytes;
        if let Some((chunk, epoch)) = self.chunk {
            words[CHUNK] = chunk.get();
            words[EPOCH] = epoch.get();
        }
        words[NUMBER] = self.number.unwrap_or(NONE);
        words[PREPARED] = now_ns;
        words
    }
}

/// A change of a record: the index of a word, and its new value.
pub(crate) type Change = (usize, u64);

/// Returns the changes that record what a header says of its message.
pub(crate) fn identified(header: &Header) -> [Change; 3] {
    [
        (MESSAGE, Message::of(header) as u64),
        (CALL, header.call_id().get()),
        (NUMBER, header.edge_seq().map_or(NONE, EdgeSeq::get)),
    ]
}

/// Returns the changes for an operation that reached this state now. A skipped state counts as reached at the same
/// time.
pub(crate) fn reached(state: State, now_ns: u64) -> impl Iterator<Item = Change> {
    let time = match state {
        State::Prepared => PREPARED,
        State::Committed => COMMITTED,
        State::Started => STARTED,
        State::Done | State::Poisoned | State::Left => ENDED,
    };
    [(STATE, state as u64), (time, now_ns)].into_iter()
}

/// Returns the operation of a record, or `None` if its words are not valid.
pub(crate) fn unpack(sequence: u64, words: &Words) -> Option<Operation> {
    let known = |word: u64| (word != NONE).then_some(word);
    let byte = |word: u64, at: u32| (word >> at) & 0xFF;
    let about = words[ABOUT];
    let group = byte(about, 8);
    let dtype = byte(about, 16);
    let (peer, edge) = (words[WHERE] as u32, (about >> 32) as u32);
    Some(Operation {
        sequence,
        kind: Kind::unpack(byte(about, 0))?,
        state: State::unpack(words[STATE])?,
        message: Message::unpack(words[MESSAGE]),
        group: (group != NONE_BYTE).then_some(group as u8),
        peer: (peer != u32::MAX).then(|| Rank::new(peer)),
        generation: Generation::new((words[WHERE] >> 32) as u32),
        edge: (edge != u32::MAX).then_some(edge),
        number: known(words[NUMBER]),
        bytes: words[BYTES],
        dtype: DType::try_from(dtype as u8).ok(),
        call_id: known(words[CALL]).map(CallId::new),
        chunk_index: known(words[CHUNK]).map(ChunkIndex::new),
        cache_epoch: known(words[EPOCH]).map(CacheEpoch::new),
        prepared_ns: words[PREPARED],
        committed_ns: known(words[COMMITTED]),
        started_ns: known(words[STARTED]),
        ended_ns: known(words[ENDED]),
    })
}
