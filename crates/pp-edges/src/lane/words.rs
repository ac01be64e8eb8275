//! Where the words of an edge's slots lie: in a region that both ranks map, or in this process alone, where messages
//! from the peer change them.

use std::sync::Arc;

use crate::shm::layout::Direction;
use crate::shm::region::Region;
use pp_words::slots::{Producer, SlotWord, SlotWords};

/// The slots of an edge at its sender. The sending end and its leases share them.
#[doc(hidden)]
pub type OutSlots = Producer<Words>;

/// The slot words of an edge.
#[derive(Clone, Debug)]
#[doc(hidden)]
pub enum Words {
    /// In the region, at this offset.
    Shared {
        region: Arc<Region>,
        at: usize,
        depth: u32,
    },
    /// In this process.
    Own(Arc<[SlotWord]>),
}

impl Words {
    pub fn shared(region: &Arc<Region>, place: Direction) -> Self {
        Self::Shared {
            region: Arc::clone(region),
            at: place.slot_words,
            depth: place.depth,
        }
    }

    pub fn own(depth: u32) -> Self {
        Self::Own((0..depth).map(|_| SlotWord::default()).collect())
    }
}

impl SlotWords for Words {
    fn depth(&self) -> u32 {
        match self {
            Self::Shared { depth, .. } => *depth,
            Self::Own(words) => words.len() as u32,
        }
    }

    fn word(&self, slot: u32) -> &SlotWord {
        match self {
            Self::Shared { region, at, depth } => {
                assert!(slot < *depth);
                region.words(at + slot as usize * size_of::<SlotWord>())
            }
            Self::Own(words) => &words[slot as usize],
        }
    }
}
