//! What the source has admitted and the sink has not accepted.

use std::collections::VecDeque;

use pp_contract::{CacheEpoch, ChunkIndex};

/// How a chunk begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cut {
    /// It continues the chunk before it.
    None,
    /// It begins a new epoch, and what is in flight goes on: a scene cut in a recording, where
    /// every frame counts.
    Flush,
    /// It begins a new epoch at once, and what is in flight is dropped. For live video,
    /// where the newest picture counts more than the frames in flight.
    Hard,
}

/// How many chunks went where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Counts {
    /// Admitted by the source.
    pub admitted: u64,
    /// Taken by the sink.
    pub emitted: u64,
    /// Dropped after a hard cut.
    pub dropped: u64,
    /// The most chunks that were in flight at once.
    pub max_in_flight: u32,
}

/// An acceptance that does not fit what was admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("chunk {got} was accepted where {} was due", due(*expected))]
pub struct Unexpected {
    /// The chunk it names.
    pub got: ChunkIndex,
    /// The oldest chunk that was not accepted, if there is one.
    pub expected: Option<ChunkIndex>,
}

/// The source has ended within a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the source ended after {got} of the {chunks} chunks of a step; end it between two steps")]
pub struct CutShort {
    /// Chunks of the step that it gave.
    pub got: u64,
    /// Chunks of a step.
    pub chunks: u64,
}

fn due(expected: Option<ChunkIndex>) -> String {
    expected.map_or_else(|| "nothing".into(), |chunk| format!("chunk {chunk}"))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Offered {
    /// It has not said yet whether there is another chunk.
    Unknown,
    Chunk(Cut),
    End,
}

/// A chunk that was admitted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Entry<L> {
    chunk: ChunkIndex,
    epoch: CacheEpoch,
    /// It is to be sent again.
    is_lost: bool,
    /// `None` once the sink has it as it was sent in an older attempt, and it is on its way again.
    record: Option<L>,
}

/// The source's side of a job: at most `depth` chunks are between admission and acceptance. It holds one record of each
/// for the driver, and never looks at it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ledger<L> {
    depth: u32,
    /// The most chunks that may be in flight now: the depth or fewer.
    most: u32,
    /// Chunks of a step, where there is a fixed order: a step that has begun is finished, and its chunks are accepted in
    /// any order.
    step: Option<u64>,
    offered: Offered,
    /// That of the newest chunk.
    epoch: CacheEpoch,
    next: ChunkIndex,
    /// Oldest first. Those without a record come before all others.
    entries: VecDeque<Entry<L>>,
    /// The chunk before the next one was not sent in this attempt.
    rebuilds: bool,
    /// An attempt was lost once: an acceptance may be told twice.
    has_lost: bool,
    counts: Counts,
}

/// What the source does next.
pub(super) enum Due {
    Nothing,
    SendAgain {
        rebuilds: bool,
    },
    Build {
        chunk: ChunkIndex,
        epoch: CacheEpoch,
        starts_epoch: bool,
        rebuilds: bool,
    },
}

impl<L> Ledger<L> {
    /// # Panics
    /// If `depth` is 0: nothing would ever be admitted.
    pub(super) fn new(depth: u32) -> Self {
        assert!(depth > 0, "a depth of 0 admits nothing");
        Self {
            depth,
            most: depth,
            step: None,
            offered: Offered::Unknown,
            epoch: CacheEpoch::new(0),
            next: ChunkIndex::new(0),
            entries: VecDeque::with_capacity(depth as usize),
            rebuilds: false,
            has_lost: false,
            counts: Counts::default(),
        }
    }

    /// # Panics
    /// If a step has no chunks.
    pub(super) fn in_steps_of(&mut self, chunks: u64) {
        assert!(chunks > 0, "a step of 0 chunks never ends");
        self.step = Some(chunks);
    }

    /// Chunks of the step that were admitted; 0 between two steps.
    fn within_step(&self) -> u64 {
        self.step.map_or(0, |chunks| self.next.get() % chunks)
    }

    pub(super) fn wants_offer(&self) -> bool {
        self.offered == Offered::Unknown
    }

    /// Says whether a chunk is in flight or offered, and goes on without another word of the source. In a fixed order the next
    /// turn may be of a chunk that the source has not offered yet.
    pub(super) fn holds_chunk(&self) -> bool {
        let has_room = self.in_flight() < self.depth;
        let waits_for_source = self.step.is_some() && has_room && self.wants_offer();
        let is_offered = matches!(self.offered, Offered::Chunk(_));
        is_offered || self.in_flight() > 0 && !waits_for_source
    }

    /// Admits a chunk only beside fewer than `most`, at least 1 and at most the depth, and forgets what is offered: the source
    /// is asked again. Says whether it would be admitted.
    pub(super) fn ask_anew(&mut self, most: u32) -> bool {
        self.most = most.clamp(1, self.depth);
        if matches!(self.offered, Offered::Chunk(_)) {
            self.offered = Offered::Unknown;
        }
        let is_lost = self.entries.iter().any(|entry| entry.is_lost);
        self.wants_offer() && !is_lost && self.in_flight() < self.most
    }

    pub(super) fn offer(&mut self, cut: Cut) {
        debug_assert!(self.wants_offer());
        self.offered = Offered::Chunk(cut);
    }

    pub(super) fn end(&mut self) -> Result<(), CutShort> {
        self.offered = Offered::End;
        match (self.within_step(), self.step) {
            (got @ 1.., Some(chunks)) => Err(CutShort { got, chunks }),
            _ => Ok(()),
        }
    }

    /// Admits no further chunk, unless a step has begun.
    pub(super) fn drain(&mut self) {
        if self.within_step() == 0 {
            self.offered = Offered::End;
        }
    }

    pub(super) fn admits_no_more(&self) -> bool {
        self.offered == Offered::End
    }

    pub(super) fn in_flight(&self) -> u32 {
        self.entries.len() as u32
    }

    /// Chunks that the sink does not have.
    pub(super) fn not_accepted(&self) -> impl Iterator<Item = ChunkIndex> {
        let entries = self.entries.iter();
        let open = entries.filter(|entry| entry.record.is_some());
        open.map(|entry| entry.chunk)
    }

    pub(super) fn is_done(&self) -> bool {
        self.admits_no_more() && self.entries.is_empty()
    }

    pub(super) fn counts(&self) -> Counts {
        self.counts
    }

    pub(super) fn epoch(&self) -> CacheEpoch {
        self.epoch
    }

    /// What is due where a slot is free. A chunk of an epoch before `oldest` is sent again only because the sink may
    /// have it: it rebuilds no stage.
    pub(super) fn due(&self, oldest: CacheEpoch) -> Due {
        let rebuilds = self.rebuilds;
        if let Some(lost) = self.entries.iter().find(|entry| entry.is_lost) {
            let rebuilds = rebuilds && lost.epoch >= oldest;
            return Due::SendAgain { rebuilds };
        }
        let Offered::Chunk(cut) = self.offered else {
            return Due::Nothing;
        };
        if self.in_flight() >= self.most {
            return Due::Nothing;
        }
        let is_first = self.next == ChunkIndex::new(0);
        let raises = cut != Cut::None && !is_first;
        // Numbers that are used up stay where they are, and the next stage refuses the frame.
        let raised = self.epoch.next().unwrap_or(self.epoch);
        Due::Build {
            chunk: self.next,
            epoch: if raises { raised } else { self.epoch },
            starts_epoch: raises || is_first,
            rebuilds,
        }
    }

    /// A chunk was built. Whether a hard cut begins it: then nothing of an older epoch is taken any more.
    pub(super) fn built(&mut self, chunk: ChunkIndex, epoch: CacheEpoch, record: L) -> bool {
        debug_assert_eq!(chunk, self.next);
        let is_hard = self.offered == Offered::Chunk(Cut::Hard);
        self.offered = Offered::Unknown;
        self.epoch = epoch;
        self.next = chunk.next().unwrap_or(chunk);
        self.rebuilds = false;
        self.entries.push_back(Entry {
            chunk,
            epoch,
            is_lost: false,
            record: Some(record),
        });
        self.counts.admitted += 1;
        self.counts.max_in_flight = self.counts.max_in_flight.max(self.in_flight());
        is_hard
    }

    /// A rank was lost: all that was not accepted is sent again.
    pub(super) fn lose(&mut self) {
        self.forget_accepted();
        for entry in &mut self.entries {
            entry.is_lost = true;
        }
        self.rebuilds = true;
        self.has_lost = true;
    }

    /// What the sink has is not waited for any more.
    pub(super) fn forget_accepted(&mut self) {
        self.entries.retain(|entry| entry.record.is_some());
    }

    /// The oldest chunk that is to be sent again.
    pub(super) fn oldest_lost(&mut self) -> Option<&mut L> {
        let lost = self.entries.iter_mut().find(|entry| entry.is_lost);
        lost.and_then(|entry| entry.record.as_mut())
    }

    /// That chunk has left.
    pub(super) fn sent_again(&mut self, oldest: CacheEpoch) -> Option<&mut L> {
        let lost = self.entries.iter_mut().find(|entry| entry.is_lost)?;
        self.rebuilds &= lost.epoch < oldest;
        lost.is_lost = false;
        lost.record.as_mut()
    }

    /// The sink has a chunk. `None` if it was accepted before. `is_current`: it came to the sink in this attempt. If it
    /// did not and was sent again, it is in flight until it comes to the sink again: otherwise a ring could hold more
    /// chunks than the depth.
    pub(super) fn accept(
        &mut self,
        got: ChunkIndex,
        is_current: bool,
        is_stale: bool,
    ) -> Result<Option<L>, Unexpected> {
        let mut entries = self.entries.iter_mut();
        let at = entries.position(|entry| match self.step {
            None => entry.record.is_some() || is_current,
            Some(_) => entry.chunk == got,
        });
        let expected = at.map(|at| self.entries[at].chunk);
        if let Some(at) = at.filter(|_| expected == Some(got)) {
            let entry = &mut self.entries[at];
            let record = entry.record.take();
            if entry.is_lost || is_current {
                // The stages do not know a chunk that is not sent again.
                self.rebuilds |= entry.is_lost;
                self.entries.remove(at);
            }
            if record.is_some() {
                let count = match is_stale {
                    true => &mut self.counts.dropped,
                    false => &mut self.counts.emitted,
                };
                *count += 1;
            }
            return Ok(record);
        }
        let is_known = got < expected.unwrap_or(self.next);
        if self.has_lost && is_known {
            return Ok(None);
        }
        Err(Unexpected { got, expected })
    }

    pub(super) fn find(&mut self, chunk: ChunkIndex) -> Option<&mut L> {
        let mut entries = self.entries.iter_mut();
        let entry = entries.find(|entry| entry.chunk == chunk);
        entry.and_then(|entry| entry.record.as_mut())
    }

    pub(super) fn records(&mut self) -> impl DoubleEndedIterator<Item = &mut L> {
        let entries = self.entries.iter_mut();
        entries.filter_map(|entry| entry.record.as_mut())
    }

    pub(super) fn clear(&mut self) {
        self.entries.clear();
    }
}
