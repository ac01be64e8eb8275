//! What the front does next: admit, decode, drop what a hard cut left behind, drain.

use std::collections::VecDeque;

use pp_contract::{CacheEpoch, ChunkIndex};

/// How a chunk begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cut {
    /// It continues the chunk before it.
    None,
    /// It begins a new epoch once everything in flight was decoded: a scene cut in a recording,
    /// where every frame counts.
    Flush,
    /// It begins a new epoch at once; what is in flight is received and dropped. A live system
    /// whose user asked for something else.
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
        /// Its index.
        chunk: ChunkIndex,
        /// The epoch it belongs to.
        epoch: CacheEpoch,
        /// True for the first chunk of an epoch.
        starts_epoch: bool,
        /// True for the first chunk that the new Phase B gets.
        rebuilds: bool,
    },
    /// Begin to decode the oldest result that waits. Then [`FrontCore::handle_decode_started`],
    /// and [`FrontCore::handle_decoded`] once it is with the sink.
    Decode {
        /// The chunk it belongs to.
        chunk: ChunkIndex,
    },
    /// Release the oldest result unread: a hard cut overtook it. Then
    /// [`FrontCore::handle_dropped`].
    Drop {
        /// The chunk it belongs to.
        chunk: ChunkIndex,
    },
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Flight {
    chunk: ChunkIndex,
    epoch: CacheEpoch,
    starts_epoch: bool,
    leg: Leg,
}

/// How far a chunk is on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Leg {
    /// It went down with a Phase B and is to be sent again.
    Lost,
    /// At Phase B, or on the way there or back.
    Away,
    Back,
    /// Its decode is under way.
    Decoding,
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
#[error("a result for chunk {got} of epoch {got_epoch} came where {expected} was due")]
pub struct Unexpected {
    /// The chunk it names.
    pub got: ChunkIndex,
    /// The epoch it names.
    pub got_epoch: CacheEpoch,
    /// What was due: a chunk and its epoch, or nothing.
    pub expected: Due,
}

/// What the front waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// No chunk is with Phase B.
    Nothing,
    /// The oldest chunk that is with Phase B.
    Chunk(ChunkIndex, CacheEpoch),
}

impl std::fmt::Display for Due {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Nothing => f.write_str("nothing"),
            Self::Chunk(chunk, epoch) => write!(f, "chunk {chunk} of epoch {epoch}"),
        }
    }
}

/// The front's state. At most `depth` chunks are between admission and the end of their decode.
///
/// In `flights`, oldest first: what is being decoded, what is back, what is away, what is lost.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct FrontCore {
    depth: u32,
    source: Source,
    drain: bool,
    closing: Closing,
    epoch: CacheEpoch,
    next: ChunkIndex,
    flights: VecDeque<Flight>,
    /// Phase B was started anew and was sent nothing yet.
    rebuilds: bool,
    counts: Counts,
}

impl FrontCore {
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
            next: ChunkIndex::new(0),
            flights: VecDeque::with_capacity(depth as usize),
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
            Closing::Closed if self.flights.is_empty() => return FrontAction::Finish,
            Closing::ShutdownSent => return FrontAction::Wait,
            Closing::Closed | Closing::Open => {}
        }
        let decoding = self.decoding();
        let back = self.flights.get(decoding).filter(|f| f.leg == Leg::Back);
        let stale = back.filter(|f| f.epoch != self.epoch);
        // Records and slots leave in order, so what is being decoded comes first.
        if let Some(stale) = stale.filter(|_| decoding == 0) {
            return FrontAction::Drop { chunk: stale.chunk };
        }
        // Feed Phase B before decoding: the other order leaves it idle for as long as a decode.
        let lost = self.flights.iter().find(|f| f.leg == Leg::Lost);
        if let Some(lost) = lost.filter(|_| facts.credit) {
            return FrontAction::SendAgain {
                chunk: lost.chunk,
                epoch: lost.epoch,
                starts_epoch: lost.starts_epoch,
                rebuilds: self.rebuilds,
            };
        }
        if let Some(build) = self.next_build(facts) {
            return build;
        }
        if let Some(back) = back.filter(|f| facts.sink_ready && f.epoch == self.epoch) {
            return FrontAction::Decode { chunk: back.chunk };
        }
        if self.admits_no_more() && self.flights.is_empty() {
            return FrontAction::SendShutdown;
        }
        FrontAction::Wait
    }

    fn next_build(&self, facts: Facts) -> Option<FrontAction> {
        let Source::Offers(cut) = self.source else {
            return None;
        };
        let is_first = self.next == ChunkIndex::new(0);
        let waits_for_flush = cut == Cut::Flush && !self.flights.is_empty();
        // A lost chunk that waits for a credit comes before any new one.
        let are_lost = self.flights.back().is_some_and(|f| f.leg == Leg::Lost);
        if self.drain
            || are_lost
            || !facts.credit
            || self.flights.len() >= self.depth as usize
            || waits_for_flush
        {
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

    /// The chunk of a [`FrontAction::Build`] has left. From now on results of an older epoch are
    /// stale.
    pub fn handle_sent(&mut self, chunk: ChunkIndex, epoch: CacheEpoch) {
        debug_assert_eq!(chunk, self.next);
        let starts_epoch = epoch != self.epoch || chunk == ChunkIndex::new(0);
        self.source = Source::Unknown;
        self.epoch = epoch;
        self.next = chunk.next().unwrap_or(chunk);
        self.rebuilds = false;
        self.flights.push_back(Flight {
            chunk,
            epoch,
            starts_epoch,
            leg: Leg::Away,
        });
        self.counts.admitted += 1;
        self.counts.max_in_flight = self.counts.max_in_flight.max(self.in_flight());
    }

    /// Phase B is gone, with everything that had not come back from it. Of the results of the
    /// oldest `arrived` chunks everything is here, payload and all; they stay. The next Phase B
    /// gets the others again, but for those that a hard cut overtook: nobody would decode them.
    pub fn handle_lost(&mut self, arrived: usize) {
        debug_assert!(arrived >= self.decoding());
        for flight in self.flights.iter_mut().skip(arrived) {
            // Stale: back with nothing, so that it is dropped in its turn.
            flight.leg = if flight.epoch == self.epoch {
                Leg::Lost
            } else {
                Leg::Back
            };
        }
        self.rebuilds = true;
        if self.closing == Closing::ShutdownSent {
            // All is emitted; there is nobody left to say goodbye to.
            self.closing = Closing::Closed;
        }
    }

    /// The chunk of a [`FrontAction::SendAgain`] has left.
    pub fn handle_sent_again(&mut self, chunk: ChunkIndex) {
        let lost = self.flights.iter_mut().find(|f| f.leg == Leg::Lost);
        debug_assert!(lost.as_ref().is_some_and(|f| f.chunk == chunk));
        if let Some(flight) = lost {
            flight.leg = Leg::Away;
        }
        self.rebuilds = false;
    }

    /// A result arrived. Results come back in the order of their envelopes.
    ///
    /// # Errors
    /// It is not the one that is due.
    pub fn handle_result(
        &mut self,
        got: ChunkIndex,
        got_epoch: CacheEpoch,
    ) -> Result<(), Unexpected> {
        let due = self.flights.iter_mut().find(|f| f.leg == Leg::Away);
        match due {
            Some(flight) if flight.chunk == got && flight.epoch == got_epoch => {
                flight.leg = Leg::Back;
                Ok(())
            }
            other => Err(Unexpected {
                got,
                got_epoch,
                expected: other.map_or(Due::Nothing, |f| Due::Chunk(f.chunk, f.epoch)),
            }),
        }
    }

    /// The decode of the oldest result that waited for one has begun.
    pub fn handle_decode_started(&mut self) {
        let next = self.decoding();
        debug_assert_eq!(self.flights[next].leg, Leg::Back);
        self.flights[next].leg = Leg::Decoding;
    }

    /// The oldest decode is done and its chunk with the sink.
    pub fn handle_decoded(&mut self) {
        self.retire(Leg::Decoding);
        self.counts.emitted += 1;
    }

    /// The oldest result was released unread.
    pub fn handle_dropped(&mut self) {
        self.retire(Leg::Back);
        self.counts.dropped += 1;
    }

    fn retire(&mut self, from: Leg) {
        let gone = self.flights.pop_front();
        debug_assert!(gone.is_some_and(|f| f.leg == from));
    }

    /// Decodes under way: always of the oldest chunks.
    pub fn decoding(&self) -> usize {
        let under_way = |f: &&Flight| f.leg == Leg::Decoding;
        self.flights.iter().take_while(under_way).count()
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
        let is_back = |f: &Flight| matches!(f.leg, Leg::Back | Leg::Decoding);
        self.admits_no_more() && self.flights.iter().all(is_back)
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
        self.flights.len() as u32
    }

    /// The epoch whose results are decoded.
    pub fn epoch(&self) -> CacheEpoch {
        self.epoch
    }

    /// How many chunks went where so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }
}
