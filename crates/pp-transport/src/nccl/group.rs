//! Operations among the members of a group, which owns their buffers until they are done.
//!
//! Hazard: inside an NCCL group nothing happens before its end, so a buffer that only the call
//! borrows is free again before the operation has begun; and an operation among the wrong ranks
//! hangs all of them. Guarantee: buffers move into the group, and come back only through what
//! [`Group::commit`] gives for each; ranks, sizes and devices are checked against the group before
//! NCCL sees any of them.

use std::sync::Arc;

use nccl_sys::{NcclError, ncclDataType_t, ncclRedOp_t};
use pp_contract::{CacheEpoch, CallId, ChunkIndex, DType, Rank};

use super::calls::{Call, Comm};
use super::communicator::{Communicator, Flights};
use super::life::{Life, Remains};
use crate::cuda::{DeviceBuffer, Stream};
use crate::error::TransportError;
use crate::flight::{self, Record, State};
use crate::in_flight::{InFlight, Submission};

/// How values of several ranks become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    /// Their sum.
    Sum,
    /// Their product.
    Product,
    /// The greatest.
    Max,
    /// The least.
    Min,
    /// Their mean.
    Average,
}

impl Reduce {
    fn raw(self) -> ncclRedOp_t {
        match self {
            Self::Sum => ncclRedOp_t::ncclSum,
            Self::Product => ncclRedOp_t::ncclProd,
            Self::Max => ncclRedOp_t::ncclMax,
            Self::Min => ncclRedOp_t::ncclMin,
            Self::Average => ncclRedOp_t::ncclAvg,
        }
    }
}

fn raw_type(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::U8 => ncclDataType_t::ncclUint8,
        DType::I32 => ncclDataType_t::ncclInt32,
        DType::I64 => ncclDataType_t::ncclInt64,
        DType::Bf16 => ncclDataType_t::ncclBfloat16,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::F32 => ncclDataType_t::ncclFloat32,
    }
}

/// Device memory with what its first bytes mean.
#[derive(Debug)]
pub struct GroupBuffer {
    memory: DeviceBuffer,
    dtype: DType,
    count: usize,
}

impl GroupBuffer {
    /// So many elements of this type, at the start of the memory.
    ///
    /// # Errors
    /// The memory comes back when they do not fit it.
    pub fn new(memory: DeviceBuffer, dtype: DType, count: usize) -> Result<Self, DeviceBuffer> {
        let bytes = (count as u64).checked_mul(dtype.size_bytes());
        if bytes.is_none_or(|bytes| bytes > memory.len() as u64) {
            return Err(memory);
        }
        Ok(Self {
            memory,
            dtype,
            count,
        })
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &DeviceBuffer {
        &self.memory
    }

    /// The memory, for another use.
    #[must_use]
    pub fn into_memory(self) -> DeviceBuffer {
        self.memory
    }
}

/// An operation that was refused, with the buffer the caller gets back.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Refused {
    /// The buffer, as it was.
    pub buffer: GroupBuffer,
    /// Why.
    pub error: TransportError,
}

/// A group that was not issued.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct CommitError {
    /// The buffers, in the order of the operations. Empty when some operations may have begun: then
    /// the buffers are leaked, since nobody knows who works on them.
    pub buffers: Vec<GroupBuffer>,
    /// Why.
    pub error: TransportError,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Send { to: u32 },
    Recv { from: u32 },
    AllReduce(Reduce),
    Broadcast { root: u32 },
}

impl Communicator {
    /// Begins a group of operations. Nothing is issued before [`Group::commit`].
    pub fn group(&mut self) -> Group<'_> {
        self.flights.sweep();
        Group::new(self)
    }

    /// Begins the record of an operation.
    fn begin_record(&mut self, kind: Kind, buffer: &GroupBuffer, about: Option<About>) -> Record {
        let member = |place: u32| {
            let rank = self.members().get(place as usize).copied();
            rank.map(|rank| (place as usize, rank))
        };
        let (kind, peer) = match kind {
            Kind::Send { to } => (flight::Kind::GroupSend, member(to)),
            Kind::Recv { from } => (flight::Kind::GroupReceive, member(from)),
            Kind::AllReduce(_) => (flight::Kind::AllReduce, None),
            Kind::Broadcast { root } => (flight::Kind::Broadcast, member(root)),
        };
        // As `GroupBuffer::new` has checked.
        let bytes = buffer.count as u64 * buffer.dtype.size_bytes();
        let what = if kind.is_collective() {
            "collective entered"
        } else {
            "transfer of a group issued"
        };
        tracing::debug!(
            call_id = about.map(|(call, ..)| call.get()),
            chunk_index = about.map(|(_, chunk, _)| chunk.get()),
            cache_epoch = about.map(|(.., epoch)| epoch.get()),
            group = self.name(),
            peer = %peer.map_or_else(|| "all".to_owned(), |(_, rank)| rank.to_string()),
            bytes,
            "{what}"
        );
        self.log.begin(kind, peer, bytes, buffer.dtype)
    }
}

/// Operations that begin together. It owns their buffers.
///
/// # If dropped
/// Nothing was issued, and the buffers are dropped.
#[must_use = "nothing is issued before `commit`"]
#[derive(Debug)]
pub struct Group<'c> {
    comm: &'c mut Communicator,
    operations: Vec<(Kind, GroupBuffer)>,
    about: Option<About>,
}

/// The call that operations are a part of.
type About = (CallId, ChunkIndex, CacheEpoch);

impl<'c> Group<'c> {
    pub(super) fn new(comm: &'c mut Communicator) -> Self {
        Self {
            comm,
            operations: Vec::new(),
            about: None,
        }
    }

    /// Says of which call the operations are a part, for the log.
    pub fn about(&mut self, call: CallId, chunk: ChunkIndex, epoch: CacheEpoch) {
        self.about = Some((call, chunk, epoch));
    }

    /// Sends the buffer to a member.
    ///
    /// # Errors
    /// The rank is no other member of this group, or the buffer lies on another device.
    pub fn send(&mut self, buffer: GroupBuffer, to: Rank) -> Result<(), Box<Refused>> {
        self.add(buffer, |group| {
            Ok(Kind::Send {
                to: group.other(to)?,
            })
        })
    }

    /// Receives from a member, as many elements as it sends.
    ///
    /// # Errors
    /// As [`Group::send`].
    pub fn recv(&mut self, buffer: GroupBuffer, from: Rank) -> Result<(), Box<Refused>> {
        self.add(buffer, |group| {
            Ok(Kind::Recv {
                from: group.other(from)?,
            })
        })
    }

    /// Reduces the buffers of all members, element by element; each has the result in its place.
    ///
    /// # Errors
    /// The buffer lies on another device.
    pub fn all_reduce(&mut self, buffer: GroupBuffer, reduce: Reduce) -> Result<(), Box<Refused>> {
        self.add(buffer, |_| Ok(Kind::AllReduce(reduce)))
    }

    /// Copies the buffer of the member `root` to all others.
    ///
    /// # Errors
    /// The rank is no member of this group, or the buffer lies on another device.
    pub fn broadcast(&mut self, buffer: GroupBuffer, root: Rank) -> Result<(), Box<Refused>> {
        self.add(buffer, |group| {
            Ok(Kind::Broadcast {
                root: group.place_of(root)?,
            })
        })
    }

    fn add(
        &mut self,
        buffer: GroupBuffer,
        kind: impl FnOnce(&Communicator) -> Result<Kind, TransportError>,
    ) -> Result<(), Box<Refused>> {
        let kind = self
            .comm
            .check_device(buffer.memory.device().about().ordinal, "a buffer")
            .and_then(|()| kind(self.comm));
        match kind {
            Ok(kind) => {
                self.operations.push((kind, buffer));
                Ok(())
            }
            Err(error) => Err(Box::new(Refused { buffer, error })),
        }
    }

    /// Issues all operations to the stream, behind what was issued there before. Each buffer comes
    /// back through its [`InFlight`], in the order of the operations.
    ///
    /// # Errors
    /// The buffers come back if nothing was issued. If something may have been, the generation is
    /// given up.
    pub fn commit(self, stream: &Stream) -> Result<Vec<InFlight<GroupOp>>, CommitError> {
        let Self {
            comm,
            operations,
            about,
        } = self;
        let refuse = |operations: Vec<(Kind, GroupBuffer)>, error| {
            let buffers = operations.into_iter().map(|(_, buffer)| buffer).collect();
            Err(CommitError { buffers, error })
        };
        let life = comm.life();
        let on = stream.device().about().ordinal;
        let entered = comm
            .check_device(on, "a stream")
            .and_then(|()| life.enter());
        let _turn = match entered {
            Ok(turn) => turn,
            Err(error) => return refuse(operations, error),
        };
        let name = comm.name();
        let failed = |source| TransportError::Nccl {
            doing: format!("operations of group {name}"),
            source,
        };
        // Before NCCL has any of them: it may not come back. And before the group begins: whoever ends
        // the communicator waits for what is between its begin and its end.
        let records: Vec<Record> = operations
            .iter()
            .map(|(kind, buffer)| comm.begin_record(*kind, buffer, about))
            .collect();
        let all = |state: State| records.iter().for_each(|record| record.reached(state));
        all(State::Committed);
        let issued = life.call(|call| issue(call, comm.raw(), &operations, stream));
        let noted = match issued {
            Ok(Begun::No) => {
                all(State::Poisoned);
                return refuse(operations, life.aborted());
            }
            Ok(Begun::Yes) => operations
                .iter()
                .try_for_each(|(_, buffer)| Ok(buffer.memory.used_by(stream)?)),
            Err(source) => Err(life.explain(failed(source))),
        };
        if noted.is_ok() {
            all(State::Started);
        }
        let flights = operations
            .into_iter()
            .zip(records)
            .map(|((_, buffer), record)| {
                InFlight::new(GroupOp {
                    life: Arc::clone(&life),
                    flights: comm.begin_flight(),
                    buffer,
                    record,
                })
            });
        let flights: Vec<_> = flights.collect();
        match noted {
            Ok(()) => Ok(flights),
            Err(error) => {
                life.break_off(&error);
                for flight in flights {
                    drop(flight.abort());
                }
                let buffers = Vec::new();
                Err(CommitError { buffers, error })
            }
        }
    }
}

/// Whether NCCL has anything of a group.
enum Begun {
    Yes,
    /// The communicator was given up before.
    No,
}

/// Issues the operations as a group, which is ended whatever happens.
fn issue(
    call: &Call<'_>,
    comm: Comm,
    operations: &[(Kind, GroupBuffer)],
    stream: &Stream,
) -> Result<Begun, NcclError> {
    let Some(group) = call.begin_group()? else {
        return Ok(Begun::No);
    };
    let added = group.add(|call| {
        operations.iter().try_for_each(|(kind, buffer)| {
            let (place, count) = (buffer.memory.ptr(), buffer.count);
            let dtype = raw_type(buffer.dtype);
            // SAFETY: in the turn of the thread that issues, and whoever ends the communicator waits
            // for the end of the group. The buffer has room for the elements (checked by
            // `GroupBuffer::new`) and is owned by the operation until the stream has passed it.
            unsafe {
                match *kind {
                    Kind::Send { to } => call.send(comm, place, dtype, count, to, stream),
                    Kind::Recv { from } => call.recv(comm, place, dtype, count, from, stream),
                    Kind::AllReduce(reduce) => {
                        call.all_reduce(comm, place, dtype, count, reduce.raw(), stream)
                    }
                    Kind::Broadcast { root } => {
                        call.broadcast(comm, place, dtype, count, root, stream)
                    }
                }
            }
        })
    });
    // SAFETY: as above, of every operation in the group.
    let ended = unsafe { call.end_group(group, &[comm]) };
    added.and(ended).map(|()| Begun::Yes)
}

/// An operation of a group, with its buffer.
#[derive(Debug)]
pub struct GroupOp {
    life: Arc<Life>,
    flights: Arc<Flights>,
    buffer: GroupBuffer,
    record: Record,
}

impl GroupOp {
    fn look(&self) -> Result<bool, TransportError> {
        self.life.check()?;
        if self.buffer.memory.is_idle()? {
            // An abort makes the device say so too, and is marked before.
            return self.life.check().map(|()| true);
        }
        self.life.poll().map(|()| false)
    }
}

impl Submission for GroupOp {
    type Buffer = GroupBuffer;

    fn is_done(&self) -> Result<bool, TransportError> {
        let done = self.look();
        self.record.look(&done);
        done
    }

    fn into_buffer(self) -> GroupBuffer {
        self.record.end(State::Done);
        self.flights.end();
        self.buffer
    }

    fn orphan(self) {
        self.record.end(State::Left);
        self.flights.adopt(self.buffer.memory);
    }

    fn quarantine(self) {
        // Of an operation that was cut short the device says that it is done.
        self.life.bury(Remains {
            buffer: self.buffer.memory,
            events: Vec::new(),
            stream: None,
        });
    }
}
