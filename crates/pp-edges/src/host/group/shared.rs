//! What the members of a group and their abort handles share, and why a group ends.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use super::call::{in_words, rank_at};
use super::memory::Memory;
use pp_contract::Rank;
use pp_words::group::{Stop, Waiting, for_each_awaited};

use crate::bell::Bell;
use crate::error::TransportError;
use crate::group::Members;

/// What a member and its abort handles share.
#[derive(Debug)]
pub(super) struct SharedGroup {
    pub(super) members: Members,
    pub(super) memory: Memory,
    /// By member.
    pub(super) bells: Box<[Bell]>,
    /// Why the group is dead, as far as this member knows; where no other member can write it.
    why: OnceLock<String>,
}

impl SharedGroup {
    /// What the member that has this memory shares.
    pub(super) fn new(made: GroupMemory) -> Self {
        let GroupMemory { members, memory } = made;
        let bell = |at| Bell::at(memory.region(), memory.bell_at(at));
        Self {
            bells: (0..members.ranks().len()).map(bell).collect(),
            members,
            memory,
            why: OnceLock::new(),
        }
    }

    /// Ends the group; the first reason stays.
    pub(super) fn end(&self, why: &str) {
        let _ = self.why.set(why.to_owned());
        self.memory.life().end(why);
        self.bells.iter().for_each(Bell::ring);
    }

    /// An error once the group is dead.
    #[inline]
    pub(super) fn check(&self) -> Result<(), TransportError> {
        if self.why.get().is_none() && !self.memory.life().has_ended() {
            return Ok(());
        }
        Err(self.aborted())
    }

    #[cold]
    fn aborted(&self) -> TransportError {
        self.ended(self.why.get_or_init(|| self.memory.life().why()).clone())
    }

    fn ended(&self, why: String) -> TransportError {
        let what = format!("group {}", self.members);
        TransportError::Aborted { what, why }
    }

    pub(super) fn ring_others(&self) {
        let own = self.members.own_place();
        let others = self.bells.iter().enumerate().filter(|(at, _)| *at != own);
        others.for_each(|(_, bell)| bell.ring());
    }
}

/// Ends a group from any thread. Clones are for the same group.
#[derive(Clone, Debug)]
pub struct GroupAbort(pub(super) Arc<SharedGroup>);

impl GroupAbort {
    /// Ends the group for all members: a call that waits returns an error, and so does every later one. The first reason
    /// stays. Never waits.
    pub fn abort(&self, why: &str) {
        self.0.end(why);
    }

    /// The call in which this member waits for another to come, and that other. Never waits.
    #[must_use]
    pub fn waits(&self) -> Option<(String, Rank)> {
        let members = &self.0.members;
        let mut first = None;
        for_each_awaited(&self.0.memory, members.own_place(), |other, call| {
            first.get_or_insert((other, call));
        });
        let (other, call) = first?;
        let call = format!("{}, in {members}", in_words(call, members));
        Some((call, members.ranks()[other]))
    }

    /// Says whether the group has ended, by this or by a failure.
    #[must_use]
    pub fn is_aborted(&self) -> bool {
        self.0.check().is_err()
    }
}

/// The memory of a group, on its way to the members.
#[derive(Debug)]
pub struct GroupMemory {
    pub(super) members: Members,
    pub(super) memory: Memory,
}

impl GroupMemory {
    /// Makes it; the leader does.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub(in crate::host) fn create(members: &Members) -> Result<Self, TransportError> {
        Ok(Self {
            members: members.clone(),
            memory: Memory::create(members.ranks().len())?,
        })
    }

    /// What the leader passed.
    ///
    /// # Errors
    /// It is something else.
    pub(in crate::host) fn open(members: &Members, fd: OwnedFd) -> Result<Self, TransportError> {
        Ok(Self {
            members: members.clone(),
            memory: Memory::open(fd, members.ranks().len())?,
        })
    }
}

impl AsFd for GroupMemory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.region().fd()
    }
}

impl SharedGroup {
    #[cold]
    pub(super) fn explain(&self, own: Option<Waiting>, stop: Stop) -> TransportError {
        let member = match stop {
            Stop::Other { member, call } => {
                let own = own.unwrap_or(Waiting::Collective(call));
                return self.differ(own, member, Waiting::Collective(call));
            }
            Stop::OtherBytes { member, bytes } => {
                let Some(Waiting::Transfer { side, .. }) = own else {
                    unreachable!("only a transfer has two counts of bytes");
                };
                let theirs = Waiting::Transfer {
                    side: side.opposite(),
                    other: self.members.own_place(),
                    bytes,
                };
                return self.differ(own.unwrap_or(theirs), member, theirs);
            }
            Stop::Left { member } => {
                let rank = rank_at(&self.members, member);
                let doing = own.map_or_else(String::new, |own| in_words(own, &self.members));
                let why = format!(
                    "{rank} has left it, and rank {} waits in {doing}",
                    self.members.own()
                );
                return self.ended(why);
            }
            Stop::InvalidWord { member, .. } => member,
        };
        crate::error::misbehaved(
            self.members.ranks()[member],
            format!("{stop:?} in group {}", self.members),
        )
    }

    /// Two members that wait for each other in calls that do not go together.
    #[cold]
    pub(super) fn differ(&self, own: Waiting, member: usize, theirs: Waiting) -> TransportError {
        let (here, there) = (self.members.own(), rank_at(&self.members, member));
        let (own, theirs) = (
            in_words(own, &self.members),
            in_words(theirs, &self.members),
        );
        let parts = if own == theirs {
            ", in other parts"
        } else {
            ""
        };
        self.ended(format!(
            "rank {here} is in {own}, and {there} in {theirs}{parts}; \
             all members make the same calls in the same order"
        ))
    }
}
