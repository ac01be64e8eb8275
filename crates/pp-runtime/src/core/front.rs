//! What the front does next: admit, decode, drop what a hard cut left behind, drain.

use std::collections::VecDeque;

use pp_contract::{CacheEpoch, ChunkIndex};

/// How a chunk begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cut {
    /// It continues the chunk before it.
    None,
    /// It begins a new epoch, and what is in flight is decoded: a scene cut in a recording, where
    /// every frame counts.
    Flush,
    /// It begins a new epoch at once; what is in flight is received and dropped. For live video,
    /// where the newest picture counts more than the frames in flight.
    Hard,
}

/// What the core cannot know by itself when it is polled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Facts {
    /// A slot of the forward edge is leased and waits for a chunk.
    pub credit: bool,
    /// The sink would take a decoded chunk now.
    pub sink_ready: bool,
}

/// What the front is to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FrontAction {
    /// Nothing until something new is handled.
    Wait,
    /// Encode the offered chunk and send it. Then [`FrontCore::handle_sent`].
    Build {
        /// Its index.
        chunk: ChunkIndex,
        /// The epoch it belongs to.
        epoch: CacheEpoch,
        /// True for the first chunk of an epoch.
        starts_epoch: bool,
        /// True for the first chunk that a Phase B gets which was started anew.
        rebuilds: bool,
    },
    /// Send a chunk again whose result went down with a Phase B, to the next one. Then
    /// [`FrontCore::handle_sent_again`].
    SendAgain {
        /// True for the first chunk that the new Phase B gets.
        rebuilds: bool,
    },
    /// Decode the oldest result that waits: [`FrontCore::begin_decode`], then
    /// [`FrontCore::handle_decoding`] if a device works on it, and [`FrontCore::handle_decoded`]
    /// once it is with the sink.
    Decode,
    /// Release the oldest result unread: a hard cut overtook it. Then
    /// [`FrontCore::handle_dropped`].
    Drop,
    /// Everything is emitted: tell Phase B. Then [`FrontCore::handle_shutdown_sent`].
    SendShutdown,
    /// Both sides are done.
    Finish,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Source {
    /// It has not said yet whether there is another chunk.
    Unknown,
    Offers(Cut),
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Closing {
    Open,
    ShutdownSent,
    Closed,
}

/// A chunk that was sent and whose decode has not begun.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Entry<C> {
    chunk: ChunkIndex,
    epoch: CacheEpoch,
    state: ChunkState,
    record: C,
}

/// How far a chunk is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum ChunkState {
    /// It went down with a Phase B and is to be sent again.
    Lost,
    /// At Phase B, or on the way there or back.
    Away,
    Back,
}

/// How many chunks went where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Counts {
    /// Sent to Phase B.
    pub admitted: u64,
    /// Decoded and given to the sink.
    pub emitted: u64,
    /// Received and dropped after a hard cut.
    pub dropped: u64,
    /// The most chunks that were in flight at once.
    pub max_in_flight: u32,
}

/// A result that does not fit what was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a result for chunk {got} of epoch {got_epoch} came where {} was due", due(*expected))]
pub struct Unexpected {
    /// The chunk it names.
    pub got: ChunkIndex,
    /// The epoch it names.
    pub got_epoch: CacheEpoch,
    /// The oldest chunk that is with Phase B, and its epoch, if there is one.
    pub expected: Option<(ChunkIndex, CacheEpoch)>,
}

fn due(expected: Option<(ChunkIndex, CacheEpoch)>) -> String {
    let named = |(chunk, epoch)| format!("chunk {chunk} of epoch {epoch}");
    expected.map_or_else(|| "nothing".into(), named)
}

/// The front's state. At most `depth` chunks are between admission and the end of their decode.
///
/// The core holds the one record of each chunk for the driver, and never looks at it: a `C` until
/// its decode begins, and a `D` while a device decodes it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FrontCore<C, D> {
    depth: u32,
    source: Source,
    drain: bool,
    closing: Closing,
    /// That of the newest chunk.
    epoch: CacheEpoch,
    /// That of the newest hard cut: results of older epochs are stale.
    oldest: CacheEpoch,
    next: ChunkIndex,
    /// Oldest first: what is back, what is away, what is lost.
    chunks: VecDeque<Entry<C>>,
    /// Oldest first. All are older than those in `chunks`.
    decoding: VecDeque<D>,
    /// Phase B was started anew and was sent nothing yet.
    rebuilds: bool,
    counts: Counts,
}

impl<C, D> FrontCore<C, D> {
    /// A front that keeps at most `depth` chunks in flight.
    ///
    /// # Panics
    /// If `depth` is 0: nothing would ever be admitted.
    pub fn new(depth: u32) -> Self {
        assert!(depth > 0, "a depth of 0 admits nothing");
        Self {
            depth,
            source: Source::Unknown,
            drain: false,
            closing: Closing::Open,
            epoch: CacheEpoch::new(0),
            oldest: CacheEpoch::new(0),
            next: ChunkIndex::new(0),
            chunks: VecDeque::with_capacity(depth as usize),
            decoding: VecDeque::with_capacity(depth as usize),
            rebuilds: false,
            counts: Counts::default(),
        }
    }

    /// Whether the source should be asked for the next chunk.
    pub fn wants_offer(&self) -> bool {
        self.source == Source::Unknown && !self.drain
    }

    /// The source has a chunk ready; the offer stands until it is built.
    pub fn handle_offer(&mut self, cut: Cut) {
        debug_assert!(self.wants_offer());
        self.source = Source::Offers(cut);
    }

    /// The source has no more chunks.
    pub fn handle_source_end(&mut self) {
        self.source = Source::Ended;
    }

    /// Take nothing new, finish what is in flight. Saying it twice changes nothing.
    pub fn handle_drain(&mut self) {
        self.drain = true;
    }

    /// What to do now.
    pub fn poll(&self, facts: Facts) -> FrontAction {
        match self.closing {
            Closing::Closed if self.in_flight() == 0 => return FrontAction::Finish,
            Closing::ShutdownSent => return FrontAction::Wait,
            Closing::Closed | Closing::Open => {}
        }
        let back = self.chunks.front().filter(|c| c.state == ChunkState::Back);
        let stale = back.filter(|c| c.epoch < self.oldest);
        // Records and slots leave in order, so what is being decoded comes first.
        if stale.is_some() && self.decoding.is_empty() {
            return FrontAction::Drop;
        }
        // Feed Phase B before decoding: the other order leaves it idle for as long as a decode.
        if facts.credit && self.chunks.iter().any(|c| c.state == ChunkState::Lost) {
            let rebuilds = self.rebuilds;
            return FrontAction::SendAgain { rebuilds };
        }
        if let Some(build) = self.next_build(facts) {
            return build;
        }
        if facts.sink_ready && back.is_some() && stale.is_none() {
            return FrontAction::Decode;
        }
        if self.admits_no_more() && self.in_flight() == 0 {
            return FrontAction::SendShutdown;
        }
        FrontAction::Wait
    }

    fn next_build(&self, facts: Facts) -> Option<FrontAction> {
        let Source::Offers(cut) = self.source else {
            return None;
        };
        let is_first = self.next == ChunkIndex::new(0);
        let is_full = self.in_flight() >= self.depth;
        if self.drain || !facts.credit || is_full {
            return None;
        }
        let raises = cut != Cut::None && !is_first;
        // Numbers that are used up stay where they are, and the peer refuses the frame.
        let raised = self.epoch.next().unwrap_or(self.epoch);
        Some(FrontAction::Build {
            chunk: self.next,
            epoch: if raises { raised } else { self.epoch },
            starts_epoch: raises || is_first,
            rebuilds: self.rebuilds,
        })
    }

    /// The chunk of a [`FrontAction::Build`] has left. If a hard cut begins it, results of an older
    /// epoch are stale from now on.
    pub fn handle_sent(&mut self, chunk: ChunkIndex, epoch: CacheEpoch, record: C) {
        debug_assert_eq!(chunk, self.next);
        if self.source == Source::Offers(Cut::Hard) {
            self.oldest = epoch;
        }
        self.source = Source::Unknown;
        self.epoch = epoch;
        self.next = chunk.next().unwrap_or(chunk);
        self.rebuilds = false;
        self.chunks.push_back(Entry {
            chunk,
            epoch,
            state: ChunkState::Away,
            record,
        });
        self.counts.admitted += 1;
        self.counts.max_in_flight = self.counts.max_in_flight.max(self.in_flight());
    }

    /// Phase B is gone, with everything that had not come back from it. Of the oldest `arrived`
    /// results that wait everything is here, payload and all; they stay. The next Phase B gets the
    /// other chunks again, but for those that a hard cut overtook: they would not be decoded.
    pub fn handle_lost(&mut self, arrived: usize) {
        for chunk in self.chunks.iter_mut().skip(arrived) {
            // Stale: back with nothing, so that it is dropped in its turn.
            chunk.state = if chunk.epoch >= self.oldest {
                ChunkState::Lost
            } else {
                ChunkState::Back
            };
        }
        self.rebuilds = true;
        if self.closing == Closing::ShutdownSent {
            // All is emitted, and no peer is left to answer the goodbye.
            self.closing = Closing::Closed;
        }
    }

    /// The record of the chunk of a [`FrontAction::SendAgain`].
    ///
    /// # Panics
    /// If no chunk is lost.
    pub fn lost(&mut self) -> &mut C {
        &mut self.oldest_lost().record
    }

    /// The chunk of a [`FrontAction::SendAgain`] has left. Gives its record.
    ///
    /// # Panics
    /// If no chunk is lost.
    pub fn handle_sent_again(&mut self) -> &mut C {
        self.rebuilds = false;
        let lost = self.oldest_lost();
        lost.state = ChunkState::Away;
        &mut lost.record
    }

    fn oldest_lost(&mut self) -> &mut Entry<C> {
        let mut chunks = self.chunks.iter_mut();
        let lost = chunks.find(|c| c.state == ChunkState::Lost);
        lost.expect("a chunk is lost")
    }

    /// A result arrived. Results come back in the order of their envelopes. Gives the record of its
    /// chunk.
    ///
    /// # Errors
    /// It is not the one that is due.
    pub fn handle_result(
        &mut self,
        got: ChunkIndex,
        got_epoch: CacheEpoch,
    ) -> Result<&mut C, Unexpected> {
        let mut chunks = self.chunks.iter_mut();
        match chunks.find(|c| c.state == ChunkState::Away) {
            Some(due) if due.chunk == got && due.epoch == got_epoch => {
                due.state = ChunkState::Back;
                Ok(&mut due.record)
            }
            other => Err(Unexpected {
                got,
                got_epoch,
                expected: other.map(|c| (c.chunk, c.epoch)),
            }),
        }
    }

    /// The records of the chunks whose decode has not begun, oldest first.
    pub fn chunks_mut(&mut self) -> impl Iterator<Item = &mut C> {
        self.chunks.iter_mut().map(|chunk| &mut chunk.record)
    }

    /// The decode of the oldest result that waits begins. Gives the record of its chunk.
    ///
    /// # Panics
    /// If no result waits.
    pub fn begin_decode(&mut self) -> C {
        let oldest = self.chunks.pop_front().expect("a result waits");
        debug_assert_eq!(oldest.state, ChunkState::Back);
        oldest.record
    }

    /// A device works on the decode that began last.
    pub fn handle_decoding(&mut self, record: D) {
        self.decoding.push_back(record);
    }

    /// Takes out the record of the oldest decode that a device works on, to ask how far it is.
    /// Then [`FrontCore::handle_decoded`] or [`FrontCore::handle_still_decoding`].
    pub fn take_decoding(&mut self) -> Option<D> {
        self.decoding.pop_front()
    }

    /// The device still works on the decode that was taken out.
    pub fn handle_still_decoding(&mut self, record: D) {
        self.decoding.push_front(record);
    }

    /// A decode is done and its chunk with the sink.
    pub fn handle_decoded(&mut self) {
        self.counts.emitted += 1;
    }

    /// The oldest result is released unread. Gives the record of its chunk.
    ///
    /// # Panics
    /// If no result waits.
    pub fn handle_dropped(&mut self) -> C {
        self.counts.dropped += 1;
        self.begin_decode()
    }

    /// The run is over: the records of all chunks go.
    pub fn abandon(&mut self) {
        self.chunks.clear();
        self.decoding.clear();
    }

    /// Decodes that a device works on: always of the oldest chunks.
    pub fn decoding(&self) -> usize {
        self.decoding.len()
    }

    /// The shutdown header has left.
    pub fn handle_shutdown_sent(&mut self) {
        self.closing = Closing::ShutdownSent;
    }

    /// Whether all is emitted and only the goodbye is left.
    pub fn is_closing(&self) -> bool {
        self.closing != Closing::Open
    }

    /// Whether Phase B has given back everything that it will ever be sent: its headers at least.
    pub fn is_served(&self) -> bool {
        let is_back = |c: &Entry<C>| c.state == ChunkState::Back;
        self.admits_no_more() && self.chunks.iter().all(is_back)
    }

    fn admits_no_more(&self) -> bool {
        self.drain || self.source == Source::Ended
    }

    /// Phase B is gone, and nothing is missed of it: what is back is decoded, and there is no goodbye.
    pub fn handle_peer_gone(&mut self) {
        debug_assert!(self.is_served());
        self.closing = Closing::Closed;
    }

    /// Phase B has answered the shutdown; false if none was sent.
    pub fn handle_peer_closed(&mut self) -> bool {
        let expected = self.closing == Closing::ShutdownSent;
        if expected {
            self.closing = Closing::Closed;
        }
        expected
    }

    /// Chunks between admission and the end of their decode.
    pub fn in_flight(&self) -> u32 {
        (self.chunks.len() + self.decoding.len()) as u32
    }

    /// The epoch of the newest chunk.
    pub fn epoch(&self) -> CacheEpoch {
        self.epoch
    }

    /// The oldest epoch whose results are decoded.
    pub fn oldest_epoch(&self) -> CacheEpoch {
        self.oldest
    }

    /// How many chunks went where so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }
}
