//! A group whose members are threads of this process: its collectives copy bytes from mailbox to mailbox. In the memory of
//! a device each member has a stream of its own, and copies are enqueued there: only sums wait for it.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use half::{bf16, f16};
use pp_contract::DType;
use pp_device::{DevicePtr, Event, Stream, StreamBuffer};

use crate::error::Failure;
use crate::group::Collectives;

/// Where the members of one call meet.
#[derive(Debug, Default)]
pub(super) struct Hall {
    mail: Mutex<Mail>,
    bell: Condvar,
}

#[derive(Debug, Default)]
struct Mail {
    /// From whom to whom.
    boxes: HashMap<(u32, u32), VecDeque<Letter>>,
    /// Members whose call has ended.
    gone: Vec<u32>,
}

impl Hall {
    fn mail(&self) -> MutexGuard<'_, Mail> {
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One member. When it is dropped, members that wait for it get an error.
#[derive(Debug)]
pub(super) struct Member<'a> {
    hall: &'a Hall,
    member: u32,
    members: u32,
    /// That of a session in the memory of a device, and that of its results.
    stream: Option<Stream>,
    results: Option<Stream>,
}

impl<'a> Member<'a> {
    pub(super) fn new(
        hall: &'a Hall,
        member: u32,
        members: u32,
        (stream, results): (Option<Stream>, Option<Stream>),
    ) -> Self {
        Member {
            hall,
            member,
            members,
            stream,
            results,
        }
    }

    /// # Safety
    /// So many readable bytes of the session's space, behind the work of the stream.
    unsafe fn copied(
        on: Option<&Stream>,
        from: *const u8,
        bytes: usize,
    ) -> Result<Letter, Failure> {
        let Some(stream) = on.filter(|_| bytes > 0) else {
            let mut copy = vec![0; bytes];
            // SAFETY: the caller's duty; without bytes there is nothing to read.
            unsafe { std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), bytes) };
            return Ok(Letter::Bytes(copy));
        };
        let memory = StreamBuffer::new(stream, bytes)?;
        let to = on_device(pointer(memory.address()), bytes);
        // SAFETY: the caller's duty; the letter's memory is its own.
        unsafe { stream.copy(on_device(from, bytes), to) }?;
        Letter::on_device(memory, stream)
    }

    /// # Safety
    /// As many writable bytes of the session's space, behind the work of the stream.
    unsafe fn put(on: Option<&Stream>, to: *mut u8, letter: Letter) -> Result<(), Failure> {
        let letter = match (letter, on) {
            (Letter::Bytes(bytes), Some(stream)) if !bytes.is_empty() => {
                let memory = StreamBuffer::new(stream, bytes.len())?;
                memory.fill_with(bytes)?;
                Letter::on_device(memory, stream)?
            }
            (letter, _) => letter,
        };
        match (letter, on) {
            (Letter::Bytes(bytes), _) => {
                // SAFETY: the caller's duty; without bytes there is nothing to write.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
            }
            (
                Letter::OnDevice {
                    memory,
                    from,
                    written,
                },
                Some(stream),
            ) => {
                stream.wait(&written)?;
                let bytes = memory.len();
                // SAFETY: the caller's duty; the letter was written, and is freed behind the copy.
                unsafe {
                    stream.copy(
                        on_device(pointer(memory.address()), bytes),
                        on_device(to, bytes),
                    )
                }?;
                let read = Event::new(stream.device())?;
                read.record(stream)?;
                from.wait(&read)?;
            }
            (Letter::OnDevice { .. }, None) => {
                return Err(Failure::invalid("a member on a device and one on the host"));
            }
        }
        Ok(())
    }

    fn post(&self, to: u32, letter: Letter) {
        let mut mail = self.hall.mail();
        (mail.boxes.entry((self.member, to)).or_default()).push_back(letter);
        self.hall.bell.notify_all();
    }

    fn take(&self, from: u32, bytes: usize) -> Result<Letter, Failure> {
        let mut mail = self.hall.mail();
        let found = loop {
            let waiting = mail.boxes.get_mut(&(from, self.member));
            if let Some(found) = waiting.and_then(VecDeque::pop_front) {
                break found;
            }
            if from >= self.members || mail.gone.contains(&from) {
                return Err(Failure::error(format!(
                    "member {from} sends nothing more to member {}",
                    self.member
                )));
            }
            let woken = self.hall.bell.wait(mail);
            mail = woken.unwrap_or_else(PoisonError::into_inner);
        };
        if found.len() != bytes {
            return Err(Failure::invalid(format!(
                "member {} takes {bytes} bytes, member {from} sent {}",
                self.member,
                found.len()
            )));
        }
        Ok(found)
    }

    /// Where each part begins.
    fn starts(bytes: &[u64]) -> impl Iterator<Item = usize> + '_ {
        bytes.iter().scan(0, |end, bytes| {
            let start = *end;
            *end += *bytes as usize;
            Some(start)
        })
    }
}

impl Drop for Member<'_> {
    fn drop(&mut self) {
        self.hall.mail().gone.push(self.member);
        self.hall.bell.notify_all();
    }
}

/// What one member sends to another.
#[derive(Debug)]
enum Letter {
    Bytes(Vec<u8>),
    /// In memory of its own, which the sender's stream frees.
    OnDevice {
        memory: StreamBuffer,
        from: Stream,
        written: Event,
    },
}

impl Letter {
    /// The stream has what writes the memory.
    fn on_device(memory: StreamBuffer, stream: &Stream) -> Result<Letter, Failure> {
        let written = Event::new(stream.device())?;
        written.record(stream)?;
        Ok(Letter::OnDevice {
            memory,
            from: stream.clone(),
            written,
        })
    }

    fn len(&self) -> usize {
        match self {
            Letter::Bytes(bytes) => bytes.len(),
            Letter::OnDevice { memory, .. } => memory.len(),
        }
    }

    /// The bytes; waits for a device.
    fn bytes(self) -> Result<Vec<u8>, Failure> {
        match self {
            Letter::Bytes(bytes) => Ok(bytes),
            Letter::OnDevice { memory, .. } => Ok(memory.read(Duration::MAX)?),
        }
    }
}

/// A device address in the shape that the collectives have for it.
fn pointer(address: u64) -> *const u8 {
    std::ptr::without_provenance(address as usize)
}

/// A range in the memory of a device.
fn on_device(at: *const u8, len: usize) -> DevicePtr {
    let address = at.addr() as u64;
    DevicePtr { address, len }
}

/// Adds element by element; floats of two bytes through f32.
fn add(sum: &mut [u8], more: &[u8], dtype: DType) -> Result<(), Failure> {
    macro_rules! add {
        ($type:ty, $plus:expr) => {
            for (a, b) in (sum.chunks_exact_mut(size_of::<$type>()))
                .zip(more.chunks_exact(size_of::<$type>()))
            {
                let read = |bytes: &[u8]| {
                    <$type>::from_le_bytes(bytes.try_into().expect("an element has its size"))
                };
                let total: $type = $plus(read(a), read(b));
                a.copy_from_slice(&total.to_le_bytes());
            }
        };
    }
    match dtype {
        DType::I32 => add!(i32, i32::wrapping_add),
        DType::I64 => add!(i64, i64::wrapping_add),
        DType::F32 => add!(f32, |a, b| a + b),
        DType::Bf16 => add!(bf16, |a, b| a + b),
        DType::F16 => add!(f16, |a, b| a + b),
        other => {
            return Err(Failure::unsupported(format!(
                "sums of {other} are not made"
            )));
        }
    }
    Ok(())
}

impl Collectives for Member<'_> {
    unsafe fn broadcast(&mut self, data: *mut u8, bytes: u64, root: u32) -> Result<(), Failure> {
        if self.member == root {
            for to in (0..self.members).filter(|to| *to != root) {
                // SAFETY: the caller's duty.
                self.post(to, unsafe {
                    Self::copied(self.stream.as_ref(), data, bytes as usize)
                }?);
            }
            return Ok(());
        }
        let found = self.take(root, bytes as usize)?;
        // SAFETY: the caller's duty.
        unsafe { Self::put(self.stream.as_ref(), data, found) }
    }

    unsafe fn scatter(
        &mut self,
        from: *const u8,
        bytes: &[u64],
        to: *mut u8,
        root: u32,
    ) -> Result<(), Failure> {
        if self.member == root {
            for ((member, start), bytes) in (0..).zip(Self::starts(bytes)).zip(bytes) {
                // SAFETY: the caller's duty.
                let part = unsafe {
                    Self::copied(
                        self.stream.as_ref(),
                        from.wrapping_add(start),
                        *bytes as usize,
                    )
                }?;
                self.post(member, part);
            }
        }
        let found = self.take(root, bytes[self.member as usize] as usize)?;
        // SAFETY: the caller's duty.
        unsafe { Self::put(self.stream.as_ref(), to, found) }
    }

    unsafe fn gather(
        &mut self,
        from: *const u8,
        bytes: &[u64],
        to: *mut u8,
        root: u32,
    ) -> Result<(), Failure> {
        // SAFETY: the caller's duty.
        let own = unsafe {
            Self::copied(
                self.results.as_ref(),
                from,
                bytes[self.member as usize] as usize,
            )
        }?;
        self.post(root, own);
        if self.member == root {
            for ((member, start), bytes) in (0..).zip(Self::starts(bytes)).zip(bytes) {
                let found = self.take(member, *bytes as usize)?;
                // SAFETY: the caller's duty.
                unsafe { Self::put(self.results.as_ref(), to.wrapping_add(start), found) }?;
            }
        }
        Ok(())
    }

    unsafe fn all_reduce_sum(
        &mut self,
        data: *mut u8,
        count: u64,
        dtype: DType,
    ) -> Result<(), Failure> {
        let bytes = (count * dtype.size_bytes()) as usize;
        // SAFETY: the caller's duty.
        let mut sum = unsafe { Self::copied(self.stream.as_ref(), data, bytes) }?.bytes()?;
        if self.member == 0 {
            for member in 1..self.members {
                add(&mut sum, &self.take(member, bytes)?.bytes()?, dtype)?;
            }
        } else {
            self.post(0, Letter::Bytes(sum.clone()));
        }
        // SAFETY: the caller's duty, and the copy is another range.
        unsafe {
            Self::put(self.stream.as_ref(), data, Letter::Bytes(sum))?;
            self.broadcast(data, bytes as u64, 0)
        }
    }

    unsafe fn send(&mut self, from: *const u8, bytes: u64, to: u32) -> Result<(), Failure> {
        // SAFETY: the caller's duty.
        let letter = unsafe { Self::copied(self.stream.as_ref(), from, bytes as usize) }?;
        self.post(to, letter);
        Ok(())
    }

    unsafe fn receive(&mut self, to: *mut u8, bytes: u64, from: u32) -> Result<(), Failure> {
        let found = self.take(from, bytes as usize)?;
        // SAFETY: the caller's duty.
        unsafe { Self::put(self.stream.as_ref(), to, found) }
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
    fn three<T: Send>(call: impl Fn(u32, &mut Member<'_>) -> T + Sync) -> Vec<T> {
        let hall = Hall::default();
        let (hall, call) = (&hall, &call);
        std::thread::scope(|scope| {
            let members = (0..3)
                .map(|at| {
                    scope.spawn(move || call(at, &mut Member::new(hall, at, 3, (None, None))))
                })
                .collect::<Vec<_>>();
            members.into_iter().map(|m| m.join().unwrap()).collect()
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
