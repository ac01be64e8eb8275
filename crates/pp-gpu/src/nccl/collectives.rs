//! Collectives on device memory that the caller keeps, on the caller's stream.
//!
//! Hazard: NCCL compares nothing. Members that call different functions, or use different sizes, hang or get wrong
//! bytes. Guarantee: roots, places and lengths are checked against the group before NCCL sees them. The flight
//! recording holds the calls of each member, so it shows which ranks have diverged.

use std::sync::Arc;

use nccl_sys::{NcclError, ncclDataType_t, ncclRedOp_t};
use pp_contract::{DType, Rank};

use super::calls::{Call, Comm, Operation};
use super::communicator::Communicator;
use crate::gpu::{EdgesLife as _, part};
use pp_device::{DevicePtr, Stream};
use pp_edges::error::TransportError;
use pp_edges::flight::{Kind, State};

/// Records that are kept until their operations are over. The oldest one is let go when there are more.
const RECORDS: usize = 64;

/// An operation: what is recorded of it, and what this rank copies for it on its own device.
struct About {
    kind: Kind,
    peer: Option<(usize, Rank)>,
    bytes: usize,
    dtype: DType,
    copy: Option<(DevicePtr, DevicePtr)>,
}

/// Bytes that are moved are `U8`; the other types are those that are summed.
fn raw_type(dtype: DType) -> ncclDataType_t {
    match dtype {
        DType::U8 => ncclDataType_t::ncclUint8,
        DType::I32 => ncclDataType_t::ncclInt32,
        DType::I64 => ncclDataType_t::ncclInt64,
        DType::Bf16 => ncclDataType_t::ncclBfloat16,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::F32 => ncclDataType_t::ncclFloat32,
        other => unreachable!("{other} is not summed"),
    }
}

/// The collectives of a group that runs a stage. All members call the same functions in the same order; a transfer is
/// called only by its two members. Roots and other members are named by their place in the group. A function returns
/// when its work is issued to the stream, behind earlier work on it. Gathers have a communicator of their own, so on
/// two streams a gather and other collectives run side by side.
///
/// # Safety
/// This applies to every function with an address. The ranges are memory of this rank's device and do not overlap.
/// Until the stream has passed the work, nothing else uses a range that is written, and nothing writes a range that is
/// read. After an error or an abort the ranges stay allocated until the abort of the group has returned without an
/// error; otherwise they stay allocated for good.
impl Communicator {
    /// Copies the bytes of member `root` to all members.
    ///
    /// # Safety
    /// As said above.
    ///
    /// # Errors
    /// There is no such member; the stream is of another device; the group was aborted; NCCL failed, which ends the group.
    pub unsafe fn broadcast(
        &mut self,
        data: DevicePtr,
        root: u32,
        stream: &Stream,
    ) -> Result<(), TransportError> {
        let peer = self.members.at(root)?;
        let operation = (Operation::Broadcast { root }, data);
        let about = bytes_of(Kind::Broadcast, Some(peer), data.len);
        // SAFETY: the caller's promise.
        unsafe { self.issue(&about, (self.comm, stream), |issue| issue(operation)) }
    }

    /// Splits `from` of member `root` into parts: part `i` is `parts[i]` bytes long and goes to `to` of member `i`. The
    /// parts lie one behind the other. Only the root needs `from`.
    ///
    /// # Safety
    /// As said above.
    ///
    /// # Errors
    /// As [`Communicator::broadcast`]; a range has another length than the parts say.
    pub unsafe fn scatter(
        &mut self,
        from: DevicePtr,
        parts: &[u64],
        to: DevicePtr,
        root: u32,
        stream: &Stream,
    ) -> Result<(), TransportError> {
        // SAFETY: the caller's promise.
        unsafe { self.share(Kind::Scatter, (to, from), parts, root, stream) }
    }

    /// Joins `from` of all members in `to` of member `root`: the `parts[i]` bytes of member `i` become part `i`. The
    /// parts lie one behind the other. Only the root needs `to`.
    ///
    /// # Safety
    /// As said above.
    ///
    /// # Errors
    /// As [`Communicator::scatter`].
    pub unsafe fn gather(
        &mut self,
        from: DevicePtr,
        parts: &[u64],
        to: DevicePtr,
        root: u32,
        stream: &Stream,
    ) -> Result<(), TransportError> {
        // SAFETY: the caller's promise.
        unsafe { self.share(Kind::Gather, (from, to), parts, root, stream) }
    }

    /// Moves the part `one` of each member: into the root's `all` for a gather, out of it for a scatter.
    ///
    /// # Safety
    /// As said above.
    unsafe fn share(
        &mut self,
        kind: Kind,
        (one, all): (DevicePtr, DevicePtr),
        parts: &[u64],
        root: u32,
        stream: &Stream,
    ) -> Result<(), TransportError> {
        let gathers = kind == Kind::Gather;
        let (comm, [what_one, what_all]) = match gathers {
            true => (self.gathers, ["the part to read", "where all is gathered"]),
            false => (self.comm, ["the part to write", "what is scattered"]),
        };
        let (one_has, all_has) = ((what_one, one.len), (what_all, all.len));
        let (peer, start, total) = self.members.shares(root, parts, one_has, all_has)?;
        let own = self.members.own_place();
        let is_root = peer.0 == own;
        let mut about = bytes_of(kind, Some(peer), total as usize);
        if is_root && one.len > 0 {
            let place = part(all, start as usize, one.len);
            about.copy = Some(if gathers { (one, place) } else { (place, one) });
        }
        let transfer = |sends, member| match sends {
            true => Operation::Send { to: member },
            false => Operation::Recv { from: member },
        };
        // SAFETY: the caller's promise; each part lies in its range, whose length was checked.
        unsafe {
            self.issue(&about, (comm, stream), |issue| {
                if !is_root {
                    return issue((transfer(gathers, root), one));
                }
                each_other(parts, own, |member, start, len| {
                    issue((transfer(!gathers, member), part(all, start, len)))
                })
            })
        }
    }

    /// Replaces each element by its sum over all members. All members get the same bits.
    ///
    /// # Safety
    /// As said above.
    ///
    /// # Errors
    /// As [`Communicator::broadcast`]; the type is not summed ([`DType::is_summed`]), or the range is no whole number of elements.
    pub unsafe fn all_reduce_sum(
        &mut self,
        data: DevicePtr,
        dtype: DType,
        stream: &Stream,
    ) -> Result<(), TransportError> {
        self.members.check_sum(dtype, data.len as u64)?;
        let about = About {
            dtype,
            ..bytes_of(Kind::AllReduce, None, data.len)
        };
        let operation = (Operation::AllReduce(ncclRedOp_t::ncclSum), data);
        // SAFETY: the caller's promise.
        unsafe { self.issue(&about, (self.comm, stream), |issue| issue(operation)) }
    }

    /// Sends bytes to another member, which receives as many.
    ///
    /// # Safety
    /// As said above.
    ///
    /// # Errors
    /// As [`Communicator::broadcast`]; the member is this one.
    pub unsafe fn send(
        &mut self,
        from: DevicePtr,
        to: u32,
        stream: &Stream,
    ) -> Result<(), TransportError> {
        let peer = self.members.other_at(to)?;
        let about = bytes_of(Kind::GroupSend, Some(peer), from.len);
        // SAFETY: the caller's promise.
        unsafe {
            self.issue(&about, (self.comm, stream), |issue| {
                issue((Operation::Send { to }, from))
            })
        }
    }

    /// Receives bytes from another member, which sends as many.
    ///
    /// # Safety
    /// As said above.
    ///
    /// # Errors
    /// As [`Communicator::send`].
    pub unsafe fn receive(
        &mut self,
        to: DevicePtr,
        from: u32,
        stream: &Stream,
    ) -> Result<(), TransportError> {
        let peer = self.members.other_at(from)?;
        let about = bytes_of(Kind::GroupReceive, Some(peer), to.len);
        // SAFETY: the caller's promise.
        unsafe {
            self.issue(&about, (self.comm, stream), |issue| {
                issue((Operation::Recv { from }, to))
            })
        }
    }

    /// Holds back later work on the stream until all members have reached the barrier.
    ///
    /// # Errors
    /// As [`Communicator::broadcast`].
    pub fn barrier(&mut self, stream: &Stream) -> Result<(), TransportError> {
        let word = self.last.as_ref().map(|last| last.word.ptr());
        let Some(word) = word else {
            return Err(self.life.aborted());
        };
        let operation = (Operation::AllReduce(ncclRedOp_t::ncclMax), word);
        let about = bytes_of(Kind::Barrier, None, 0);
        // SAFETY: the word is the group's own, holds nothing, and is kept until the communicator is gone.
        unsafe { self.issue(&about, (self.comm, stream), |issue| issue(operation)) }
    }

    /// Ends the records of operations that are over.
    fn end_records(&mut self) {
        let Some(last) = &mut self.last else {
            return;
        };
        if matches!(last.word.is_idle(), Ok(true)) {
            last.records
                .drain(..)
                .for_each(|record| record.end(State::Done));
        }
        while last.records.len() >= RECORDS {
            let oldest = last.records.pop_front();
            oldest
                .into_iter()
                .for_each(|record| record.end(State::Left));
        }
    }

    /// Issues operations on memory of these types as one group. Leaves out those without bytes.
    ///
    /// # Safety
    /// As for the functions above, for every operation.
    unsafe fn issue(
        &mut self,
        about: &About,
        (comm, stream): (Comm, &Stream),
        add: impl FnOnce(
            &dyn Fn((Operation, DevicePtr)) -> Result<(), NcclError>,
        ) -> Result<(), NcclError>,
    ) -> Result<(), TransportError> {
        self.check_device(stream.device().about().ordinal, "a stream")?;
        let life = Arc::clone(&self.life);
        let _turn = life.enter()?;
        self.end_records();
        let record = self
            .log
            .begin(about.kind, about.peer, about.bytes as u64, about.dtype);
        record.reached(State::Committed);
        let kind = raw_type(about.dtype);
        let size = about.dtype.size_bytes() as usize;
        let one = |call: &Call<'_>, (operation, place): (Operation, DevicePtr)| {
            if place.len == 0 {
                return Ok(());
            }
            let place = (place, kind, place.len / size);
            // SAFETY: in the turn of the thread that issues, and the call passes the gate; the rest is the caller's promise.
            unsafe { call.issue(comm, operation, place, stream) }
        };
        let copied = about.copy.map_or(Ok(()), |(from, to)| {
            // SAFETY: the caller's promise.
            unsafe { stream.copy(from, to) }
        });
        let result = copied.map_err(TransportError::from).and_then(|()| {
            let issued = life.call(|call| {
                // SAFETY: as above.
                unsafe { call.group(comm, |call| add(&|operation| one(call, operation))) }
            });
            match issued {
                Ok(Some(())) => {
                    let last = self.last.as_ref().expect("taken at the end");
                    last.word.used_by(stream).map_err(TransportError::from)
                }
                // The communicator was given up before the call.
                Ok(None) => Err(life.aborted()),
                Err(source) => {
                    let doing = format!("{} of group {}", about.kind, self.name());
                    Err(life.explain(TransportError::Nccl { doing, source }))
                }
            }
        });
        if let Err(error) = result {
            record.end(State::Poisoned);
            life.kill(&error.to_string());
            return Err(error);
        }
        record.started();
        let last = self.last.as_mut().expect("as above");
        last.records.push_back(record);
        Ok(())
    }
}

fn bytes_of(kind: Kind, peer: Option<(usize, Rank)>, bytes: usize) -> About {
    let dtype = DType::U8;
    About {
        kind,
        peer,
        bytes,
        dtype,
        copy: None,
    }
}

/// Calls `each` for every other member, with its place and the start and length of its part.
fn each_other(
    parts: &[u64],
    own: usize,
    mut each: impl FnMut(u32, usize, usize) -> Result<(), NcclError>,
) -> Result<(), NcclError> {
    let mut start = 0;
    // The sum of all parts was checked against memory that exists, so it fits.
    let parts = parts.iter().map(|len| *len as usize);
    for (member, len) in parts.enumerate() {
        if member != own {
            each(member as u32, start, len)?;
        }
        start += len;
    }
    Ok(())
}
