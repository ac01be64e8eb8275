//! The words that the members of a group share, and the order in which they move.
//!
//! Hazard: members that are in different calls wait for each other for ever, or take the bytes of one call for those of
//! another. Guarantee: a member leaves no call before all that the call needs are in it, and have been compared; members
//! that wait for each other in a circle are found by the last of them. A word that the protocol cannot have written is
//! an error, and never an index or a size.
//!
//! Each word has one writer, and counts up. A collective is entered by all (`entered`); then all go through the same
//! steps. In a step a member publishes a piece of its staging, perhaps an empty one, takes those of others, and says so
//! (`consumed`). A piece is written into its slot when all have consumed what was there. A transfer has a sender and a
//! receiver, with words of their own for each ordered pair, and uses the staging of its sender.

use crate::bell::BellWords;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Pieces that the staging of a member has room for; in the models, so few that slots are used again.
pub const SLOTS: u64 = if cfg!(loom) { 2 } else { 4 };
/// Bytes of a reason.
pub const TEXT_BYTES: usize = TEXT_WORDS * 8;
const TEXT_WORDS: usize = 32;

/// What is called, in numbers: the same at all members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Call {
    /// Kind, type and root, packed.
    pub what: u64,
    pub bytes: u64,
    /// Of the parts.
    pub digest: u64,
}

/// A member's words.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct MemberWords {
    pub bell: BellWords,
    /// Collectives that it has entered.
    entered: AtomicU64,
    /// The last two of them: no member is ahead of another by more than one.
    calls: [[AtomicU64; 3]; 2],
    /// It makes no more calls.
    left: AtomicU32,
    published: Line,
    consumed: Line,
}

/// A word on a cache line of its own.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Line(AtomicU64);

/// One side of the transfers from a member to another.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct SideWords {
    begun: AtomicU64,
    bytes: AtomicU64,
    /// Pieces published, or consumed.
    moved: AtomicU64,
}

/// The transfers from a member to another.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct PairWords {
    sender: SideWords,
    receiver: SideWords,
}

impl PairWords {
    fn side(&self, side: Side) -> &SideWords {
        match side {
            Side::Sender => &self.sender,
            Side::Receiver => &self.receiver,
        }
    }
}

/// Whether the group lives, and why it does not.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct LifeWords {
    state: AtomicU32,
    length: AtomicU32,
    text: [AtomicU64; TEXT_WORDS],
}

const ALIVE: u32 = 0;
const DYING: u32 = 1;
const DEAD: u32 = 2;
/// Looks at a reason that is being written.
const LOOKS: u32 = 1000;

impl LifeWords {
    /// Ends the group; the first reason stays. What is too long is cut.
    pub fn end(&self, why: &str) {
        let (taken, lost) = (Ordering::AcqRel, Ordering::Acquire);
        let first = self.state.compare_exchange(ALIVE, DYING, taken, lost);
        if first.is_err() {
            return;
        }
        let bytes = &why.as_bytes()[..why.floor_char_boundary(TEXT_BYTES)];
        for (word, chunk) in self.text.iter().zip(bytes.chunks(8)) {
            let mut eight = [0; 8];
            eight[..chunk.len()].copy_from_slice(chunk);
            word.store(u64::from_le_bytes(eight), Ordering::Relaxed);
        }
        self.length.store(bytes.len() as u32, Ordering::Relaxed);
        self.state.store(DEAD, Ordering::Release);
    }

    #[inline]
    pub fn has_ended(&self) -> bool {
        self.state.load(Ordering::Acquire) != ALIVE
    }

    /// Why it ended, as the member says that ended it: any bytes. Empty when that member did not come so far.
    pub fn why(&self) -> String {
        let mut looks = 0;
        while self.state.load(Ordering::Acquire) == DYING && looks < LOOKS {
            looks += 1;
            crate::sync::pause();
            // The writer may have no core; 40 ms in all.
            #[cfg(not(loom))]
            if looks > LOOKS / 2 {
                std::thread::sleep(std::time::Duration::from_micros(80));
            }
        }
        if self.state.load(Ordering::Acquire) != DEAD {
            return String::new();
        }
        let length = self.length.load(Ordering::Relaxed) as usize;
        let words = self.text.iter().map(|word| word.load(Ordering::Relaxed));
        let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        bytes.truncate(length);
        let text = String::from_utf8_lossy(&bytes);
        text.chars().filter(|c| !c.is_control()).collect()
    }
}

/// Where the words of a group lie.
pub trait GroupWords {
    fn members(&self) -> usize;
    fn member(&self, at: usize) -> &MemberWords;
    fn pair(&self, from: usize, to: usize) -> &PairWords;
}

/// Why a member cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// That member is in this call instead.
    Other { member: usize, call: Call },
    /// That member sends, or expects, so many bytes.
    OtherBytes { member: usize, bytes: u64 },
    /// That member has left the group.
    Left { member: usize },
    /// A word of that member is nothing that it can have written.
    InvalidWord {
        member: usize,
        word: &'static str,
        value: u64,
    },
}

/// A member's side of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Sender,
    Receiver,
}

impl Side {
    pub fn opposite(self) -> Self {
        match self {
            Self::Sender => Self::Receiver,
            Self::Receiver => Self::Sender,
        }
    }
}

/// A member's own count of everything, where no other can write it.
#[derive(Debug)]
pub struct Counts<W> {
    pub words: W,
    own: usize,
    entered: u64,
    call: Call,
    /// Steps that this member has published, and those that it has consumed: at most the slots behind.
    given: u64,
    steps: u64,
    /// By member: the last that was seen of it.
    published: Box<[u64]>,
    consumed: Box<[u64]>,
    /// By member: transfers and pieces to it, and from it.
    sent: Box<[Moved]>,
    received: Box<[Moved]>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Moved {
    transfers: u64,
    pieces: u64,
}

impl<W: GroupWords> Counts<W> {
    pub fn new(words: W, own: usize) -> Self {
        let members = words.members();
        assert!(own < members && members <= 64);
        Self {
            own,
            entered: 0,
            call: Call::default(),
            given: 0,
            steps: 0,
            published: vec![0; members].into(),
            consumed: vec![0; members].into(),
            sent: vec![Moved::default(); members].into(),
            received: vec![Moved::default(); members].into(),
            words,
        }
    }

    fn own_words(&self) -> &MemberWords {
        self.words.member(self.own)
    }

    pub fn others(&self) -> impl Iterator<Item = usize> + use<W> {
        let own = self.own;
        (0..self.words.members()).filter(move |member| *member != own)
    }

    /// Enters a collective.
    pub fn enter(&mut self, call: Call) {
        let words = self.own_words();
        let numbers = [call.what, call.bytes, call.digest];
        for (word, number) in words.calls[(self.entered % 2) as usize].iter().zip(numbers) {
            word.store(number, Ordering::Relaxed);
        }
        words.entered.store(self.entered + 1, Ordering::Release);
        self.entered += 1;
        self.call = call;
    }

    /// Says whether a member has entered the collective that this one is in.
    pub fn has_entered(&self, member: usize) -> Result<bool, Stop> {
        let words = self.words.member(member);
        let entered = words.entered.load(Ordering::Acquire);
        if entered.checked_add(1) == Some(self.entered) {
            let left = words.left.load(Ordering::Acquire) != 0;
            // It may have entered before it left.
            let is_gone = left && words.entered.load(Ordering::Acquire) == entered;
            return if is_gone {
                Err(Stop::Left { member })
            } else {
                Ok(false)
            };
        }
        if entered != self.entered && Some(entered) != self.entered.checked_add(1) {
            return Err(invalid(member, "entered", entered));
        }
        let call = call_of(words, self.entered);
        if call != self.call {
            return Err(Stop::Other { member, call });
        }
        Ok(true)
    }

    /// Says whether the slot of the next piece is free: all have consumed what was in it.
    pub fn may_publish(&mut self) -> Result<bool, Stop> {
        if self.given >= self.steps + SLOTS {
            return Ok(false);
        }
        self.have_consumed((self.given + 1).saturating_sub(SLOTS))
    }

    /// Says whether all have consumed so many steps.
    fn have_consumed(&mut self, steps: u64) -> Result<bool, Stop> {
        for member in self.others() {
            let word = &self.words.member(member).consumed.0;
            if !advance(&mut self.consumed[member], word, self.steps, steps)
                .map_err(|value| invalid(member, "consumed", value))?
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The slot of the next piece that this member publishes.
    pub fn free_slot(&self) -> u64 {
        self.given % SLOTS
    }

    /// The slot of the pieces of this step.
    pub fn slot(&self) -> u64 {
        self.steps % SLOTS
    }

    /// The next piece is in its slot.
    pub fn publish(&mut self) {
        self.given += 1;
        let published = &self.own_words().published.0;
        published.store(self.given, Ordering::Release);
    }

    /// Says whether a member's piece of this step is in its slot.
    pub fn has_published(&mut self, member: usize) -> Result<bool, Stop> {
        let word = &self.words.member(member).published.0;
        let seen = &mut self.published[member];
        advance(seen, word, self.steps, self.steps + 1)
            .map_err(|value| invalid(member, "published", value))
    }

    /// This member is done with the pieces of this step.
    pub fn consume(&mut self) {
        let consumed = &self.own_words().consumed.0;
        consumed.store(self.steps + 1, Ordering::Release);
        self.steps += 1;
    }

    fn pair(&self, side: Side, other: usize) -> &PairWords {
        match side {
            Side::Sender => self.words.pair(self.own, other),
            Side::Receiver => self.words.pair(other, self.own),
        }
    }

    fn own_side(&self, side: Side, other: usize) -> &SideWords {
        self.pair(side, other).side(side)
    }

    fn other_side(&self, side: Side, other: usize) -> &SideWords {
        self.pair(side, other).side(side.opposite())
    }

    fn moved(&mut self, side: Side, other: usize) -> &mut Moved {
        match side {
            Side::Sender => &mut self.sent[other],
            Side::Receiver => &mut self.received[other],
        }
    }

    /// Begins a transfer.
    pub fn begin(&mut self, side: Side, other: usize, bytes: u64) {
        let moved = self.moved(side, other);
        moved.transfers += 1;
        let transfers = moved.transfers;
        let words = self.own_side(side, other);
        words.bytes.store(bytes, Ordering::Relaxed);
        words.begun.store(transfers, Ordering::Release);
    }

    /// Says whether the other member is in the transfer too, and the staging of its sender is free.
    pub fn has_begun(&mut self, side: Side, other: usize, bytes: u64) -> Result<bool, Stop> {
        let transfers = self.moved(side, other).transfers;
        let words = self.other_side(side, other);
        let begun = words.begun.load(Ordering::Acquire);
        if begun.checked_add(1) == Some(transfers) {
            let left = self.words.member(other).left.load(Ordering::Acquire) != 0;
            let is_gone = left && words.begun.load(Ordering::Acquire) == begun;
            let gone = Err(Stop::Left { member: other });
            return if is_gone { gone } else { Ok(false) };
        }
        if begun != transfers {
            return Err(invalid(other, "begun", begun));
        }
        let theirs = words.bytes.load(Ordering::Relaxed);
        if theirs != bytes {
            let (member, bytes) = (other, theirs);
            return Err(Stop::OtherBytes { member, bytes });
        }
        match side {
            Side::Sender => self.have_consumed(self.steps),
            Side::Receiver => Ok(true),
        }
    }

    /// Says whether this member may move piece `piece` of the transfer: the sender when its slot is free, the receiver when it
    /// is published.
    pub fn may_move(&mut self, side: Side, other: usize, piece: u64) -> Result<bool, Stop> {
        let base = self.moved(side, other).pieces;
        let moved = self.other_side(side, other).moved.load(Ordering::Acquire);
        let (least, most) = match side {
            Side::Sender => ((piece + 1).saturating_sub(SLOTS), piece),
            Side::Receiver => (piece + 1, piece + SLOTS),
        };
        match moved.checked_sub(base) {
            Some(moved) if moved <= most => Ok(moved >= least),
            _ => Err(invalid(other, "moved", moved)),
        }
    }

    /// This member has moved piece `piece` of the transfer.
    pub fn has_moved(&mut self, side: Side, other: usize, piece: u64) {
        let base = self.moved(side, other).pieces;
        let moved = &self.own_side(side, other).moved;
        moved.store(base + piece + 1, Ordering::Release);
    }

    /// Ends the transfer, of so many pieces; at the sender, once the receiver has all.
    pub fn finish(&mut self, side: Side, other: usize, pieces: u64) -> Result<bool, Stop> {
        if side == Side::Sender && !self.may_move(side, other, pieces + SLOTS - 1)? {
            return Ok(false);
        }
        self.moved(side, other).pieces += pieces;
        Ok(true)
    }

    /// This member makes no more calls.
    pub fn leave(&self) {
        self.own_words().left.store(1, Ordering::Release);
    }

    /// A member that this one waits for, and that waits for this one, perhaps through others: none of them will ever go
    /// on. With a call that it waits in.
    ///
    /// The caller has entered its call and then rung the others, which has a fence; so the last of those that wait in a
    /// circle sees all of it. Members that move meanwhile are in no circle.
    pub fn stuck_with(&self) -> Option<(usize, Waiting)> {
        let before = self.sum();
        let awaited = |member: usize| {
            let mut found = 0_u64;
            self.for_each_awaited(member, |other, _| found |= 1 << other);
            found
        };
        let own = awaited(self.own);
        for member in self.others().filter(|member| own & (1 << member) != 0) {
            // All that it waits for.
            let (mut reached, mut looked_at) = (awaited(member), 1_u64 << member);
            while reached & (1 << self.own) == 0 && reached & !looked_at != 0 {
                let next = (reached & !looked_at).trailing_zeros() as usize;
                looked_at |= 1 << next;
                reached |= awaited(next);
            }
            if reached & (1 << self.own) != 0 {
                let mut call = None;
                self.for_each_awaited(member, |_, waiting| call = Some(waiting));
                return call
                    .map(|call| (member, call))
                    .filter(|_| self.sum() == before);
            }
        }
        None
    }

    fn for_each_awaited(&self, member: usize, each: impl FnMut(usize, Waiting)) {
        for_each_awaited(&self.words, member, each);
    }

    /// Of all calls that were entered. It only grows, so it is the same at two times only if no member entered a call
    /// between them.
    fn sum(&self) -> u64 {
        let members = 0..self.words.members();
        let mut sum = 0_u64;
        for at in members.clone() {
            let words = self.words.member(at);
            sum = sum.wrapping_add(words.entered.load(Ordering::Acquire));
            for pair in members.clone().map(|to| self.words.pair(at, to)) {
                for side in [&pair.sender, &pair.receiver] {
                    sum = sum.wrapping_add(side.begun.load(Ordering::Acquire));
                }
            }
        }
        sum
    }
}

/// Calls `each` with the members that one waits for to enter a call, and the call.
pub fn for_each_awaited<W: GroupWords>(
    words: &W,
    member: usize,
    mut each: impl FnMut(usize, Waiting),
) {
    let entered = |member| words.member(member).entered.load(Ordering::Acquire);
    let own = entered(member);
    for other in (0..words.members()).filter(|other| *other != member) {
        if own > entered(other) {
            let call = call_of(words.member(member), own);
            each(other, Waiting::Collective(call));
        }
        for (side, pair) in [
            (Side::Sender, words.pair(member, other)),
            (Side::Receiver, words.pair(other, member)),
        ] {
            let (here, there) = (pair.side(side), pair.side(side.opposite()));
            let begun = here.begun.load(Ordering::Acquire);
            if begun > there.begun.load(Ordering::Acquire) {
                let bytes = here.bytes.load(Ordering::Relaxed);
                each(other, Waiting::Transfer { side, other, bytes });
            }
        }
    }
}

/// A call in which a member waits for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    Collective(Call),
    Transfer {
        side: Side,
        other: usize,
        bytes: u64,
    },
}

fn call_of(words: &MemberWords, entered: u64) -> Call {
    let at = (entered.wrapping_sub(1) % 2) as usize;
    let [what, bytes, digest] = &words.calls[at];
    Call {
        what: what.load(Ordering::Relaxed),
        bytes: bytes.load(Ordering::Relaxed),
        digest: digest.load(Ordering::Relaxed),
    }
}

/// Takes a count of another member over into `seen`, unless it was there already: whether it is `least`. A count that
/// went back, or is further than the slots allow a member that has done `steps`, is the error.
fn advance(seen: &mut u64, word: &AtomicU64, steps: u64, least: u64) -> Result<bool, u64> {
    if *seen >= least {
        return Ok(true);
    }
    let value = word.load(Ordering::Acquire);
    if value < *seen || value > steps + SLOTS {
        return Err(value);
    }
    *seen = value;
    Ok(value >= least)
}

fn invalid(member: usize, word: &'static str, value: u64) -> Stop {
    Stop::InvalidWord {
        member,
        word,
        value,
    }
}
