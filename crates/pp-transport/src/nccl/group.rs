//! Operations among the members of a group, which owns their buffers until they are done.
//!
//! Hazard: inside an NCCL group nothing happens before its end, so a buffer that only the call
//! borrows is free again before the operation has begun; and an operation among the wrong ranks
//! hangs all of them. Guarantee: buffers move into the group, and come back only through what
//! [`Group::commit`] gives for each; ranks, sizes and devices are checked against the group before
//! NCCL sees any of them.

use std::sync::Arc;

use nccl_sys::{ncclDataType_t, ncclRedOp_t};
use pp_contract::{CacheEpoch, CallId, ChunkIndex, DType, Rank};

use super::calls::Operation;
use super::communicator::{Communicator, Flights};
use super::life::Life;
use crate::error::TransportError;
use crate::flight::{self, Record, State};
use crate::gpu::{EdgesLife as _, Remains};
use crate::in_flight::{InFlight, Submission};
use pp_device::{DeviceBuffer, Stream};

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

pub(super) fn raw_type(dtype: DType) -> ncclDataType_t {
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
    /// the buffers are leaked, since it is not known what works on them.
    pub buffers: Vec<GroupBuffer>,
    /// Why.
    pub error: TransportError,
}

impl Communicator {
    /// Begins a group of operations. Nothing is issued before [`Group::commit`].
    pub fn group(&mut self) -> Group<'_> {
        self.flights.sweep();
        Group {
            comm: self,
            operations: Vec::new(),
            about: None,
        }
    }

    /// Begins the record of an operation.
    fn begin_record(
        &mut self,
        operation: Operation,
        buffer: &GroupBuffer,
        about: Option<About>,
    ) -> Record {
        let member = |place: u32| self.members.at(place).ok();
        let (kind, peer) = match operation {
            Operation::Send { to } => (flight::Kind::GroupSend, member(to)),
            Operation::Recv { from } => (flight::Kind::GroupReceive, member(from)),
            Operation::AllReduce(_) => (flight::Kind::AllReduce, None),
            Operation::Broadcast { root } => (flight::Kind::Broadcast, member(root)),
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
    operations: Vec<(Operation, GroupBuffer)>,
    about: Option<About>,
}

/// The call that operations are a part of.
type About = (CallId, ChunkIndex, CacheEpoch);

impl Group<'_> {
    /// Says of which call the operations are a part, for the log.
    pub fn about(&mut self, call: CallId, chunk: ChunkIndex, epoch: CacheEpoch) {
        self.about = Some((call, chunk, epoch));
    }

    /// Sends the buffer to a member.
    ///
    /// # Errors
    /// The rank is no other member of this group, or the buffer lies on another device.
    pub fn send(&mut self, buffer: GroupBuffer, to: Rank) -> Result<(), Box<Refused>> {
        let place = self.comm.other(to);
        self.add(buffer, place.map(|to| Operation::Send { to }))
    }

    /// Receives from a member, as many elements as it sends.
    ///
    /// # Errors
    /// As [`Group::send`].
    pub fn recv(&mut self, buffer: GroupBuffer, from: Rank) -> Result<(), Box<Refused>> {
        let place = self.comm.other(from);
        self.add(buffer, place.map(|from| Operation::Recv { from }))
    }

    /// Reduces the buffers of all members, element by element; each has the result in its place.
    ///
    /// # Errors
    /// The buffer lies on another device.
    pub fn all_reduce(&mut self, buffer: GroupBuffer, reduce: Reduce) -> Result<(), Box<Refused>> {
        self.add(buffer, Ok(Operation::AllReduce(reduce.raw())))
    }

    /// Copies the buffer of the member `root` to all others.
    ///
    /// # Errors
    /// The rank is no member of this group, or the buffer lies on another device.
    pub fn broadcast(&mut self, buffer: GroupBuffer, root: Rank) -> Result<(), Box<Refused>> {
        let place = self.comm.place_of(root);
        self.add(buffer, place.map(|root| Operation::Broadcast { root }))
    }

    fn add(
        &mut self,
        buffer: GroupBuffer,
        operation: Result<Operation, TransportError>,
    ) -> Result<(), Box<Refused>> {
        let on = buffer.memory.device().about().ordinal;
        match self.comm.check_device(on, "a buffer").and(operation) {
            Ok(operation) => {
                self.operations.push((operation, buffer));
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
        let refuse = |operations: Vec<(Operation, GroupBuffer)>, error| {
            let buffers = operations.into_iter().map(|(_, buffer)| buffer).collect();
            Err(CommitError { buffers, error })
        };
        let life = Arc::clone(&comm.life);
        let on = stream.device().about().ordinal;
        let entered = comm
            .check_device(on, "a stream")
            .and_then(|()| life.enter());
        let _turn = match entered {
            Ok(turn) => turn,
            Err(error) => return refuse(operations, error),
        };
        // Before NCCL has any of them: it may not come back. And before the group begins: the thread
        // that ends the communicator waits for what is between the begin of a group and its end.
        let records: Vec<Record> = operations
            .iter()
            .map(|(operation, buffer)| comm.begin_record(*operation, buffer, about))
            .collect();
        let all = |state: State| records.iter().for_each(|record| record.reached(state));
        all(State::Committed);
        let raw = comm.comm;
        // SAFETY: in the turn of the thread that issues, and the thread that ends the communicator waits for
        // the end of the group. Each buffer has room for the elements (checked by `GroupBuffer::new`) and is
        // owned by its operation until the stream has passed it.
        let issued = life.call(|call| unsafe {
            call.group(raw, |call| {
                operations.iter().try_for_each(|(operation, buffer)| {
                    let place = (buffer.memory.ptr(), raw_type(buffer.dtype), buffer.count);
                    call.issue(raw, *operation, place, stream)
                })
            })
        });
        let noted = match issued {
            // The communicator was given up before.
            Ok(None) => {
                all(State::Poisoned);
                return refuse(operations, life.aborted());
            }
            Ok(Some(())) => operations
                .iter()
                .try_for_each(|(_, buffer)| Ok(buffer.memory.used_by(stream)?)),
            Err(source) => {
                let doing = format!("operations of group {}", comm.name());
                Err(life.explain(TransportError::Nccl { doing, source }))
            }
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
                life.kill(&error.to_string());
                for flight in flights {
                    drop(flight.abort());
                }
                let buffers = Vec::new();
                Err(CommitError { buffers, error })
            }
        }
    }
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
