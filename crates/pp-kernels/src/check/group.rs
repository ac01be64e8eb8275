//! A group whose members are threads of this process. Its collectives are made of letters: bytes that one member sends to
//! another, or to itself. In the memory of a device each member has streams of its own, and copies are enqueued there: only
//! sums wait for it.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use half::{bf16, f16};
use pp_contract::DType;
use pp_device::{DevicePtr, Event, Stream, StreamBuffer};

use crate::error::Failure;
use crate::group::Collectives;

/// One member. When it is dropped, members that wait for a letter of it get an error.
pub(super) struct Member {
    member: u32,
    to: Vec<Sender<Letter>>,
    from: Vec<Receiver<Letter>>,
    /// Of a device: the stream of the session, and that of its results.
    pub(super) streams: Option<[Stream; 2]>,
}

/// Makes the members of a group, on the host as long as they have no streams.
pub(super) fn members(count: u32) -> Vec<Member> {
    let member = |member| Member {
        member,
        to: Vec::new(),
        from: Vec::new(),
        streams: None,
    };
    let mut members: Vec<Member> = (0..count).map(member).collect();
    for from in 0..members.len() {
        for to in 0..members.len() {
            let (sender, receiver) = channel();
            members[from].to.push(sender);
            members[to].from.push(receiver);
        }
    }
    members
}

/// The streams of a member: of transfers, and of results.
const TRANSFERS: usize = 0;
const RESULTS: usize = 1;

impl Member {
    fn stream(&self, which: usize) -> Option<&Stream> {
        self.streams.as_ref().map(|streams| &streams[which])
    }

    /// Sends bytes to a member.
    ///
    /// # Safety
    /// So many readable bytes of the session's space, behind the work of the stream.
    unsafe fn post(
        &self,
        which: usize,
        from: *const u8,
        bytes: u64,
        to: u32,
    ) -> Result<(), Failure> {
        // SAFETY: the caller's duty.
        let letter = unsafe { Letter::copied(self.stream(which), from, bytes as usize) }?;
        if let Some(to) = self.to.get(to as usize) {
            // To a member that is gone nothing is sent; a member that waits for its letters is told.
            let _ = to.send(letter);
        }
        Ok(())
    }

    /// Waits for the next letter of a member, which must have so many bytes.
    fn take(&self, from: u32, bytes: u64) -> Result<Letter, Failure> {
        let me = self.member;
        match self.from.get(from as usize).map(Receiver::recv) {
            Some(Ok(letter)) if letter.len() as u64 == bytes => Ok(letter),
            Some(Ok(letter)) => Err(Failure::invalid(format!(
                "member {me} takes {bytes} bytes, member {from} sent {}",
                letter.len()
            ))),
            _ => Err(Failure::error(format!(
                "member {from} sends nothing more to member {me}"
            ))),
        }
    }
}

/// Gives member, start and length of each part of a range. The parts lie one behind the other.
fn parts(bytes: &[u64]) -> impl Iterator<Item = (u32, usize, u64)> {
    let mut end = 0;
    (0..).zip(bytes).map(move |(member, bytes)| {
        let start = end;
        end += *bytes as usize;
        (member, start, *bytes)
    })
}

enum Letter {
    Host(Vec<u8>),
    /// In memory of its own, which the stream that wrote it frees; behind the event it is written.
    Device(StreamBuffer, Stream, Event),
}

impl Letter {
    /// # Safety
    /// As [`Member::post`].
    unsafe fn copied(
        on: Option<&Stream>,
        from: *const u8,
        bytes: usize,
    ) -> Result<Letter, Failure> {
        let Some(stream) = on.filter(|_| bytes > 0) else {
            let mut copy = vec![0; bytes];
            // SAFETY: the caller's duty; without bytes there is nothing to read.
            unsafe { std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), bytes) };
            return Ok(Letter::Host(copy));
        };
        let memory = StreamBuffer::new(stream, bytes)?;
        // SAFETY: the caller's duty; the letter's memory is its own.
        unsafe { stream.copy(on_device(from, bytes), memory.ptr()) }?;
        let written = Event::new(stream.device())?;
        written.record(stream)?;
        Ok(Letter::Device(memory, stream.clone(), written))
    }

    fn len(&self) -> usize {
        match self {
            Letter::Host(bytes) => bytes.len(),
            Letter::Device(memory, ..) => memory.len(),
        }
    }

    /// Gives the bytes; waits for a device.
    fn read(self) -> Result<Vec<u8>, Failure> {
        match self {
            Letter::Host(bytes) => Ok(bytes),
            Letter::Device(memory, ..) => Ok(memory.read(Duration::MAX)?),
        }
    }

    /// Copies the bytes to an address of the session's space.
    ///
    /// # Safety
    /// As many writable bytes, behind the work of the stream.
    unsafe fn put(self, on: Option<&Stream>, to: *mut u8) -> Result<(), Failure> {
        match (self, on) {
            (Letter::Host(bytes), Some(stream)) if !bytes.is_empty() => {
                let memory = StreamBuffer::new(stream, bytes.len())?;
                let to = on_device(to, bytes.len());
                memory.fill_with(bytes)?;
                // SAFETY: the caller's duty; the memory is this call's, and is freed behind the copy.
                unsafe { stream.copy(memory.ptr(), to) }?;
            }
            (Letter::Host(bytes), _) => {
                // SAFETY: the caller's duty; without bytes there is nothing to write.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
            }
            (Letter::Device(memory, from, written), Some(stream)) => {
                stream.wait(&written)?;
                // SAFETY: the caller's duty; the letter was written, and is freed behind the copy.
                unsafe { stream.copy(memory.ptr(), on_device(to, memory.len())) }?;
                let read = Event::new(stream.device())?;
                read.record(stream)?;
                from.wait(&read)?;
            }
            (Letter::Device(..), None) => {
                return Err(Failure::invalid("a member on a device and one on the host"));
            }
        }
        Ok(())
    }
}

/// A range in the memory of a device.
fn on_device(at: *const u8, len: usize) -> DevicePtr {
    let address = at.addr() as u64;
    DevicePtr { address, len }
}

/// Adds element by element; floats of two bytes through f32.
fn add(sum: &mut [u8], more: &[u8], dtype: DType) {
    macro_rules! add {
        ($type:ty, $plus:expr) => {{
            let read = |bytes: &[u8]| <$type>::from_le_bytes(bytes.try_into().expect("an element"));
            let more = more.chunks_exact(size_of::<$type>());
            for (a, b) in sum.chunks_exact_mut(size_of::<$type>()).zip(more) {
                let total: $type = $plus(read(a), read(b));
                a.copy_from_slice(&total.to_le_bytes());
            }
        }};
    }
    match dtype {
        DType::I32 => add!(i32, i32::wrapping_add),
        DType::I64 => add!(i64, i64::wrapping_add),
        DType::F32 => add!(f32, |a, b| a + b),
        DType::Bf16 => add!(bf16, |a, b| a + b),
        DType::F16 => add!(f16, |a, b| a + b),
        other => unreachable!("{other} is not summed"),
    }
}

impl Collectives for Member {
    unsafe fn broadcast(&mut self, data: *mut u8, bytes: u64, root: u32) -> Result<(), Failure> {
        let all = 0..self.to.len() as u32;
        for to in all.filter(|to| self.member == root && *to != root) {
            // SAFETY: the caller's duty.
            unsafe { self.post(TRANSFERS, data, bytes, to) }?;
        }
        match self.member == root {
            true => Ok(()),
            // SAFETY: the caller's duty.
            false => unsafe { self.receive(data, bytes, root) },
        }
    }

    unsafe fn scatter(
        &mut self,
        from: *const u8,
        bytes: &[u64],
        to: *mut u8,
        root: u32,
    ) -> Result<(), Failure> {
        for (member, start, bytes) in parts(bytes).filter(|_| self.member == root) {
            // SAFETY: the caller's duty.
            unsafe { self.post(TRANSFERS, from.wrapping_add(start), bytes, member) }?;
        }
        // SAFETY: the caller's duty.
        unsafe { self.receive(to, bytes[self.member as usize], root) }
    }

    unsafe fn gather(
        &mut self,
        from: *const u8,
        bytes: &[u64],
        to: *mut u8,
        root: u32,
    ) -> Result<(), Failure> {
        // SAFETY: the caller's duty.
        unsafe { self.post(RESULTS, from, bytes[self.member as usize], root) }?;
        for (member, start, bytes) in parts(bytes).filter(|_| self.member == root) {
            let letter = self.take(member, bytes)?;
            // SAFETY: the caller's duty.
            unsafe { letter.put(self.stream(RESULTS), to.wrapping_add(start)) }?;
        }
        Ok(())
    }

    unsafe fn all_reduce_sum(
        &mut self,
        data: *mut u8,
        count: u64,
        dtype: DType,
    ) -> Result<(), Failure> {
        if !dtype.is_summed() {
            return Err(Failure::unsupported(format!(
                "elements of type {dtype} are not summed; use i32, i64, bf16, f16 or f32"
            )));
        }
        let bytes = count * dtype.size_bytes();
        // SAFETY: the caller's duty.
        unsafe { self.post(TRANSFERS, data, bytes, 0) }?;
        if self.member == 0 {
            let mut sum = self.take(0, bytes)?.read()?;
            for member in 1..self.to.len() as u32 {
                add(&mut sum, &self.take(member, bytes)?.read()?, dtype);
            }
            for to in &self.to {
                let _ = to.send(Letter::Host(sum.clone()));
            }
        }
        // SAFETY: the caller's duty.
        unsafe { self.receive(data, bytes, 0) }
    }

    unsafe fn send(&mut self, from: *const u8, bytes: u64, to: u32) -> Result<(), Failure> {
        // SAFETY: the caller's duty.
        unsafe { self.post(TRANSFERS, from, bytes, to) }
    }

    unsafe fn receive(&mut self, to: *mut u8, bytes: u64, from: u32) -> Result<(), Failure> {
        let letter = self.take(from, bytes)?;
        // SAFETY: the caller's duty.
        unsafe { letter.put(self.stream(TRANSFERS), to) }
    }

    fn barrier(&mut self) -> Result<(), Failure> {
        // SAFETY: there are no elements.
        unsafe { self.all_reduce_sum([].as_mut_ptr(), 0, DType::I32) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs three members; gives what each returns.
    fn three<T: Send>(call: impl Fn(u32, &mut Member) -> T + Sync) -> Vec<T> {
        let call = &call;
        std::thread::scope(|scope| {
            let members = members(3).into_iter();
            let calls: Vec<_> = members
                .map(|mut member| scope.spawn(move || call(member.member, &mut member)))
                .collect();
            calls.into_iter().map(|call| call.join().unwrap()).collect()
        })
    }

    #[test]
    fn unequal_parts_go_out_and_come_back_and_sums_are_the_same_for_all() {
        let found = three(|at, member| {
            let (from, mut part, mut back) = ([1u8, 2, 3, 4, 5, 6], [0u8; 4], [0u8; 6]);
            let mut sum = [at as f32 + 0.5, 1.0];
            // SAFETY: all ranges are as long as the calls say.
            unsafe {
                member
                    .scatter(from.as_ptr(), &[1, 4, 1], part.as_mut_ptr(), 1)
                    .unwrap();
                member
                    .gather(part.as_ptr(), &[1, 4, 1], back.as_mut_ptr(), 2)
                    .unwrap();
                let data = sum.as_mut_ptr().cast();
                member.all_reduce_sum(data, 2, DType::F32).unwrap();
            }
            member.barrier().unwrap();
            (part, back, sum)
        });
        assert_eq!(found[0].0, [1, 0, 0, 0]);
        assert_eq!(found[1].0, [2, 3, 4, 5]);
        assert_eq!(found[2].1, [1, 2, 3, 4, 5, 6]);
        assert!(found.iter().all(|(_, _, sum)| *sum == [4.5, 3.0]));
    }

    #[test]
    fn a_member_that_leaves_leaves_nobody_waiting() {
        let found = three(|at, member| match at {
            0 => Ok(()),
            _ => member.barrier(),
        });
        assert!(found[1].is_err() && found[2].is_err());
    }
}
