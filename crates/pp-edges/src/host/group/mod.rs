//! A group whose members are ranks of one host: collectives through memory that they share.
//!
//! Hazard: members diverge, so that one sums while another broadcasts, or all wait for ever; or a member is gone.
//! Guarantee: no byte moves before all members are in the same call, with the same sizes, type and root. A member in
//! another call ends the group at once, with an error that names both. [`GroupAbort::abort`] frees every member from
//! any call. All members get the same bits of a sum.
//!
//! Choices: the leader makes the memory and passes it over the authenticated channels. Payloads go through a bounded
//! staging buffer of each member in pieces, so that one member copies in while another copies out (`pp_words::group`). A call
//! spins for a short time, then sleeps on the member's bell.
//!
//! A transfer between two members is done when the receiver has all of it. So two members that both send first never
//! proceed, and both get an error; one of them has to receive first. The same holds for a longer circle of members.

mod call;
mod memory;
mod shared;
mod sum;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use pp_contract::{DType, Generation};

use self::call::Kind;
use self::memory::{Memory, PIECE};
use self::shared::SharedGroup;
pub use self::shared::{GroupAbort, GroupMemory};
use self::sum::{BLOCK, Sum};
use crate::edge::GroupEnd;
use crate::error::TransportError;
use crate::flight::{self, FlightRecorder, GroupLog, State};
use crate::group::Members;
use crate::times::MEMBER_SLEEPS;
use pp_words::group::{Call, Counts, SLOTS, Side, Stop, Waiting};

/// Number of looks before a member listens to its bell. They take a few microseconds.
const LOOKS: u32 = 200;
/// The element type of calls that move plain bytes.
const BYTES: DType = DType::U8;

/// One member of a group in host memory. One thread at a time uses it. All members call the same functions in the same
/// order; a transfer is called only by its two members. Roots and other members are named by their place in the group.
///
/// An error of a call ends the group for all members, unless the error says that an argument is wrong. Such a call was
/// not entered.
///
/// # If dropped
/// The others learn that this member has left when they wait for it. A drop in the middle of a call, by a panic, ends
/// the group.
#[derive(Debug)]
pub struct HostGroup {
    shared: Arc<SharedGroup>,
    counts: Counts<Memory>,
    log: GroupLog,
    sums: Vec<(DType, Sum)>,
    spins: bool,
    is_in_call: bool,
    waited: Duration,
}

impl HostGroup {
    /// Returns this rank's member of the group that has this memory. The member records its operations.
    pub(super) fn new(
        made: GroupMemory,
        recorder: &FlightRecorder,
        generation: Generation,
    ) -> Self {
        let shared = Arc::new(SharedGroup::new(made));
        let (name, ranks) = (shared.members.name(), shared.members.ranks());
        let log = GroupLog::new(recorder, name, ranks, generation);
        Self {
            counts: Counts::new(shared.memory.clone(), shared.members.own_place()),
            shared,
            log,
            sums: Vec::new(),
            spins: std::thread::available_parallelism().map_or(1, usize::from) > 1,
            is_in_call: false,
            waited: Duration::ZERO,
        }
    }

    /// Returns all members of a group in one process, in the order of their places.
    ///
    /// # Errors
    /// A rank is a member twice; the kernel has no memory.
    pub fn of_threads(
        name: &str,
        ranks: &[pp_contract::Rank],
    ) -> Result<Vec<Self>, TransportError> {
        let leader = Memory::create(ranks.len())?;
        let member = |rank: &pp_contract::Rank| {
            let members = Members::new(name, ranks, *rank)?;
            let fd = leader.region().fd().try_clone_to_owned();
            let fd = fd.map_err(|error| TransportError::Shared {
                what: "cannot pass the memory of a group".into(),
                source: rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO),
            })?;
            let memory = GroupMemory::open(&members, fd)?;
            Ok(Self::new(
                memory,
                &FlightRecorder::off(),
                Generation::new(0),
            ))
        };
        ranks.iter().map(member).collect()
    }

    /// Returns the members of the group.
    #[must_use]
    pub fn members(&self) -> &Members {
        &self.shared.members
    }

    /// Returns a handle that aborts the group from any thread.
    #[must_use]
    pub fn abort_handle(&self) -> GroupAbort {
        GroupAbort(Arc::clone(&self.shared))
    }

    /// Copies the bytes of member `root` to all members.
    ///
    /// # Errors
    /// A member is in another call, or has left; the group was aborted; there is no such member.
    pub fn broadcast(&mut self, data: &mut [u8], root: u32) -> Result<(), TransportError> {
        let (from, _) = self.members().at(root)?;
        let call = Kind::Broadcast.call(root, BYTES, data.len() as u64, &[]);
        self.collective(Kind::Broadcast, call, Some(from), BYTES, |group| {
            for piece in data.chunks_mut(PIECE) {
                if from == group.own() {
                    group.publish(piece)?;
                } else {
                    group.publish(&[])?;
                    group.take(from, 0, piece)?;
                }
                group.consume();
            }
            Ok(())
        })
    }

    /// Splits `from` of member `root` into parts: part `i` is `parts[i]` bytes long and goes to `to` of member `i`. The
    /// parts lie one behind the other. Only the root needs `from`.
    ///
    /// # Errors
    /// The errors of [`HostGroup::broadcast`]; a slice has another length than the parts say.
    pub fn scatter(
        &mut self,
        from: &[u8],
        parts: &[u64],
        to: &mut [u8],
        root: u32,
    ) -> Result<(), TransportError> {
        let one = ("the part to write", to.len());
        let all = ("what is scattered", from.len());
        let ((source, _), start, total) = self.members().shares(root, parts, one, all)?;
        let is_root = source == self.own();
        let call = Kind::Scatter.call(root, BYTES, total, parts);
        let (start, total) = (start as usize, total as usize);
        self.collective(Kind::Scatter, call, Some(source), BYTES, |group| {
            if is_root {
                to.copy_from_slice(&from[start..start + to.len()]);
            }
            for at in (0..total).step_by(PIECE) {
                let until = total.min(at + PIECE);
                if is_root {
                    group.publish(&from[at..until])?;
                } else {
                    group.publish(&[])?;
                    let own = start.max(at)..(start + to.len()).min(until);
                    let into = match own.is_empty() {
                        true => &mut [],
                        false => &mut to[own.start - start..own.end - start],
                    };
                    group.take(source, own.start.saturating_sub(at).min(PIECE), into)?;
                }
                group.consume();
            }
            Ok(())
        })
    }

    /// Joins `from` of all members in `to` of member `root`: the `parts[i]` bytes of member `i` become part `i`. The
    /// parts lie one behind the other. Only the root needs `to`.
    ///
    /// # Errors
    /// As [`HostGroup::scatter`].
    pub fn gather(
        &mut self,
        from: &[u8],
        parts: &[u64],
        to: &mut [u8],
        root: u32,
    ) -> Result<(), TransportError> {
        let one = ("the part to read", from.len());
        let all = ("where all is gathered", to.len());
        let ((target, _), start, total) = self.members().shares(root, parts, one, all)?;
        let is_root = target == self.own();
        let call = Kind::Gather.call(root, BYTES, total, parts);
        self.collective(Kind::Gather, call, Some(target), BYTES, |group| {
            if is_root {
                to[start as usize..][..from.len()].copy_from_slice(from);
            }
            let others = parts.iter().enumerate().filter(|(at, _)| *at != target);
            let most = others.map(|(_, part)| *part as usize).max().unwrap_or(0);
            for at in (0..most).step_by(PIECE) {
                if !is_root {
                    group.publish(&from[from.len().min(at)..from.len().min(at + PIECE)])?;
                    group.consume();
                    continue;
                }
                group.publish(&[])?;
                let mut rest = &mut *to;
                for (member, part) in parts.iter().enumerate() {
                    let (part, behind) = rest.split_at_mut(*part as usize);
                    rest = behind;
                    let end = part.len().min(at + PIECE);
                    if member != target && at < end {
                        group.take(member, 0, &mut part[at..end])?;
                    }
                }
                group.consume();
            }
            Ok(())
        })
    }

    /// Replaces each element by its sum over all members, added in the order of their places. All members get the same
    /// bits. Integers wrap. bf16 and f16 are added as f32 and rounded once. Every sum that is not a number is the same
    /// NaN.
    ///
    /// # Errors
    /// As [`HostGroup::broadcast`]; the type is not summed ([`DType::is_summed`]), or the slice is no whole number of elements.
    pub fn all_reduce_sum(&mut self, data: &mut [u8], dtype: DType) -> Result<(), TransportError> {
        let mut sum = self.sum_of(dtype, data.len())?;
        let call = Kind::AllReduce.call(0, dtype, data.len() as u64, &[]);
        let done = self.collective(Kind::AllReduce, call, None, dtype, |group| {
            let members = group.members().ranks().len();
            if members == 1 {
                return Ok(());
            }
            let mut block = [0; BLOCK];
            let mut given = 0;
            for at in (0..data.len()).step_by(PIECE) {
                // Publishes as many pieces ahead as there is room for, so that members wait less for each other.
                while given < data.len() && (given <= at || group.may_publish()?) {
                    let until = data.len().min(given + PIECE);
                    group.publish(&data[given..until])?;
                    given = until;
                }
                let until = data.len().min(at + PIECE);
                let piece = &mut data[at..until];
                for member in group.counts.others() {
                    group.wait(None, |counts| counts.has_published(member))?;
                }
                for (number, part) in piece.chunks_mut(BLOCK).enumerate() {
                    for member in 0..members {
                        let found = &mut block[..part.len()];
                        if member == group.own() {
                            found.copy_from_slice(part);
                        } else {
                            let slot = group.counts.slot();
                            group.shared.memory.get(member, slot, number * BLOCK, found);
                        }
                        match member {
                            0 => sum.set(found),
                            _ => sum.add(found),
                        }
                    }
                    sum.write(part);
                }
                group.consume();
            }
            Ok(())
        });
        self.sums.push((dtype, sum));
        done
    }

    /// Sends bytes to another member, which receives as many. Returns when the other member has them.
    ///
    /// # Errors
    /// The other member is in another call that needs this one, or has left, or receives another number of bytes; the
    /// group was aborted; there is no such member, or it is this one.
    pub fn send(&mut self, from: &[u8], to: u32) -> Result<(), TransportError> {
        let (other, _) = self.members().other_at(to)?;
        self.transfer(Side::Sender, other, from.len(), |group, piece| {
            let at = piece * PIECE;
            let slot = piece as u64 % SLOTS;
            let bytes = &from[from.len().min(at)..from.len().min(at + PIECE)];
            group.shared.memory.put(group.own(), slot, bytes);
        })
    }

    /// Receives bytes from another member, which sends as many.
    ///
    /// # Errors
    /// As [`HostGroup::send`].
    pub fn receive(&mut self, to: &mut [u8], from: u32) -> Result<(), TransportError> {
        let (other, _) = self.members().other_at(from)?;
        let len = to.len();
        self.transfer(Side::Receiver, other, len, |group, piece| {
            let at = piece * PIECE;
            let slot = piece as u64 % SLOTS;
            let bytes = &mut to[len.min(at)..len.min(at + PIECE)];
            group.shared.memory.get(other, slot, 0, bytes);
        })
    }

    /// Returns when all members have reached the barrier.
    ///
    /// # Errors
    /// As [`HostGroup::broadcast`].
    pub fn barrier(&mut self) -> Result<(), TransportError> {
        let call = Kind::Barrier.call(0, BYTES, 0, &[]);
        self.collective(Kind::Barrier, call, None, BYTES, |_| Ok(()))
    }

    fn own(&self) -> usize {
        self.shared.members.own_place()
    }

    /// Returns the sum for elements of this type, made at its first use.
    fn sum_of(&mut self, dtype: DType, bytes: usize) -> Result<Sum, TransportError> {
        self.members().check_sum(dtype, bytes as u64)?;
        let at = self.sums.iter().position(|(of, _)| *of == dtype);
        Ok(match at {
            Some(at) => self.sums.swap_remove(at).1,
            None => Sum::new(dtype),
        })
    }

    /// Runs a collective from the moment when all members are in it.
    fn collective(
        &mut self,
        kind: Kind,
        call: Call,
        root: Option<usize>,
        dtype: DType,
        run: impl FnOnce(&mut Self) -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        self.call(kind.recorded(), root, call.bytes, dtype, |group| {
            group.counts.enter(call);
            group.shared.ring_others();
            for member in group.counts.others() {
                let own = Waiting::Collective(call);
                group.wait(Some(own), |counts| counts.has_entered(member))?;
            }
            run(group)
        })
    }

    /// Runs a transfer with another member, piece by piece. A transfer without bytes has one piece too, so that each
    /// member has seen the other before one goes on.
    fn transfer(
        &mut self,
        side: Side,
        other: usize,
        bytes: usize,
        mut run: impl FnMut(&mut Self, usize),
    ) -> Result<(), TransportError> {
        let kind = match side {
            Side::Sender => flight::Kind::GroupSend,
            Side::Receiver => flight::Kind::GroupReceive,
        };
        self.call(kind, Some(other), bytes as u64, BYTES, |group| {
            let (pieces, bytes) = (bytes.div_ceil(PIECE).max(1) as u64, bytes as u64);
            let own = Waiting::Transfer { side, other, bytes };
            group.counts.begin(side, other, bytes);
            group.shared.bells[other].ring();
            group.wait(Some(own), |counts| counts.has_begun(side, other, bytes))?;
            for piece in 0..pieces {
                group.wait(None, |counts| counts.may_move(side, other, piece))?;
                run(group, piece as usize);
                group.counts.has_moved(side, other, piece);
                group.shared.bells[other].ring();
            }
            group.wait(None, |counts| counts.finish(side, other, pieces))
        })
    }

    /// Runs a call: records it, and ends the group if it fails.
    fn call(
        &mut self,
        kind: flight::Kind,
        peer: Option<usize>,
        bytes: u64,
        dtype: DType,
        run: impl FnOnce(&mut Self) -> Result<(), TransportError>,
    ) -> Result<(), TransportError> {
        self.shared.check()?;
        let peer = peer.map(|place| (place, self.members().ranks()[place]));
        let record = self.log.begin(kind, peer, bytes, dtype);
        record.reached(State::Committed);
        self.is_in_call = true;
        let done = run(self);
        self.is_in_call = false;
        record.end(if done.is_ok() {
            State::Done
        } else {
            State::Poisoned
        });
        done.inspect_err(|error| match error {
            TransportError::Aborted { why, .. } => self.shared.end(why),
            error => self.shared.end(&pp_contract::with_source(error)),
        })
    }

    /// Tells whether the next piece has a free slot now.
    fn may_publish(&mut self) -> Result<bool, TransportError> {
        let free = self.counts.may_publish();
        free.map_err(|stop| self.shared.explain(None, stop))
    }

    /// Copies the next piece into its slot and publishes it.
    fn publish(&mut self, piece: &[u8]) -> Result<(), TransportError> {
        self.wait(None, Counts::may_publish)?;
        let slot = self.counts.free_slot();
        self.shared.memory.put(self.own(), slot, piece);
        self.counts.publish();
        self.shared.ring_others();
        Ok(())
    }

    /// Copies bytes out of a member's piece of this step, starting at offset `at`.
    fn take(&mut self, member: usize, at: usize, bytes: &mut [u8]) -> Result<(), TransportError> {
        self.wait(None, |counts| counts.has_published(member))?;
        self.shared
            .memory
            .get(member, self.counts.slot(), at, bytes);
        Ok(())
    }

    /// Marks that this member is done with this step.
    fn consume(&mut self) {
        self.counts.consume();
        self.shared.ring_others();
    }
}

impl HostGroup {
    /// Waits until the condition `is_so` holds, and adds the time that took if it did not hold at once. `meets` is the
    /// call of this member while it waits for others to enter theirs. Members that wait for each other in such calls
    /// get an error.
    fn wait(
        &mut self,
        meets: Option<Waiting>,
        mut is_so: impl FnMut(&mut Counts<Memory>) -> Result<bool, Stop>,
    ) -> Result<(), TransportError> {
        let (shared, counts) = (&self.shared, &mut self.counts);
        let bell = &shared.bells[shared.members.own_place()];
        let mut looks = if self.spins { LOOKS } else { 0 };
        let mut since = None;
        loop {
            let listening = (looks == 0).then(|| bell.listen());
            match is_so(counts) {
                Ok(true) => {
                    self.waited += since.map_or(Duration::ZERO, |since: Instant| since.elapsed());
                    return Ok(());
                }
                Ok(false) => shared.check()?,
                Err(stop) => {
                    // A member that has ended the group may have left it since then.
                    shared.check()?;
                    return Err(shared.explain(meets, stop));
                }
            }
            since.get_or_insert_with(Instant::now);
            let Some(listening) = listening else {
                looks -= 1;
                std::hint::spin_loop();
                continue;
            };
            if let Some(own) = meets
                && let Some((member, theirs)) = counts.stuck_with()
            {
                shared.check()?;
                return Err(shared.differ(own, member, theirs));
            }
            listening.wait(Instant::now() + MEMBER_SLEEPS);
        }
    }
}

/// Uses the default `look`: a call that waits sees by itself that the group has failed. No member waits for others at
/// the end.
impl GroupEnd for HostGroup {
    fn waited_ns(&self) -> u64 {
        self.waited.as_nanos() as u64
    }
}

impl Drop for HostGroup {
    fn drop(&mut self) {
        if self.is_in_call {
            let own = self.members().own();
            self.shared
                .end(&format!("rank {own} was lost in the middle of a call"));
        }
        self.counts.leave();
        self.shared.ring_others();
    }
}
