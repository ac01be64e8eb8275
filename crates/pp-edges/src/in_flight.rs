//! Buffers that a backend still works on, as types that cannot be misused.
//!
//! Hazard: the race that six projects shipped. A buffer is freed or overwritten while an asynchronous send still reads
//! it, or it is read before a receive has filled it, or after the receive has failed. Guarantee: handing a buffer to a
//! backend moves it into [`InFlight`], through which it can be neither read nor written. The buffer comes back only
//! through its completion. After an abort it is [`Poisoned`], and no code can read it. A sent buffer that is not
//! poisoned can be copied into another slot ([`Resend`]), because everyone else only reads it.
//!
//! Choices: `InFlight` is neither `Clone` nor `Deref`. Dropping it leaves the buffer to the backend, which gives it out
//! again only when the operation is done. `mem::forget` leaks the buffer and never frees it. This module never waits: a
//! completion is polled, or a caller with a clock waits for it with a deadline.

use crate::error::TransportError;
use crate::flight::{Record, State};

/// One operation of a backend, together with the buffer that the backend owns meanwhile.
///
/// Implemented by backends; users see [`InFlight`].
pub trait Submission {
    /// The buffer that comes back when the operation is done.
    type Buffer;

    /// Tells whether the operation is done, without waiting.
    ///
    /// # Errors
    /// The backend says that the operation failed. The content of the buffer is then undefined.
    fn is_done(&self) -> Result<bool, TransportError>;

    /// Returns the buffer. Called only after [`Submission::is_done`] has returned true.
    fn into_buffer(self) -> Self::Buffer;

    /// Leaves the buffer to the backend, which takes it back by itself once the operation is done. No caller waits any
    /// more.
    fn orphan(self);

    /// Takes the buffer out of use for good, even when the operation ends.
    fn quarantine(self);
}

/// A piece of a sent payload, and its destination in another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its first byte in the payload that was sent.
    pub from: u64,
    /// Its first byte in the slot it is copied into.
    pub to: u64,
    /// How many bytes.
    pub bytes: u64,
}

impl Part {
    /// Returns both offsets and the length, if the piece lies inside both slots.
    pub fn within(self, sent: usize, slot: usize) -> Result<(usize, usize, usize), TransportError> {
        let Self { from, to, bytes } = self;
        let ends_in = |start: u64, capacity: usize| {
            start
                .checked_add(bytes)
                .is_some_and(|end| end <= capacity as u64)
        };
        if ends_in(from, sent) && ends_in(to, slot) {
            return Ok((from as usize, to as usize, bytes as usize));
        }
        Err(TransportError::PayloadMismatch {
            payload_bytes: bytes,
            with: format!(
                "a copy from byte {from} of a slot of {sent} to byte {to} of a slot of {slot}"
            ),
        })
    }
}

/// A send whose payload can be sent again, to a restarted peer.
///
/// No process writes a payload that was sent: this side has handed over its slot, and the peer and the device only
/// read. So its bytes stay the same for as long as the submission is held, even after the generation that sent them was
/// aborted. A restart needs no other copy.
pub trait Resend: Submission {
    /// Copies these parts of the payload into a slot, which mostly belongs to a later generation. On a device the copy
    /// is only issued. The send of `slot` is ordered behind the copy, and the memory of this payload is not used again
    /// before the copy is done.
    ///
    /// # Errors
    /// A part does not lie inside both slots; the driver refuses.
    fn copy_into(&self, parts: &[Part], slot: &mut Self::Buffer) -> Result<(), TransportError>;

    /// Turns a written buffer that could not be sent, because its edge broke, into a submission like that of a sent
    /// one. Its slot does not come back.
    fn unsent(buffer: Self::Buffer) -> Self;
}

/// A buffer that a backend holds.
///
/// # If dropped
/// Does not wait. The buffer goes back to its pool when the operation is done, and never before.
#[must_use = "dropping it gives the buffer back to its pool some time later"]
#[derive(Debug)]
pub struct InFlight<S: Submission> {
    submission: Option<S>,
    record: Record,
}

impl<S: Submission> InFlight<S> {
    /// Wraps a submission. For backends.
    pub fn new(submission: S) -> Self {
        Self {
            submission: Some(submission),
            record: Record::default(),
        }
    }

    /// Makes `record` note how the operation ends.
    pub fn recorded(mut self, record: Record) -> Self {
        self.record = record;
        self
    }

    fn submission(&self) -> &S {
        self.submission.as_ref().expect("present until consumed")
    }

    fn take(mut self) -> S {
        self.submission.take().expect("present until consumed")
    }

    /// Tells whether [`InFlight::complete`] would return the buffer now.
    ///
    /// # Errors
    /// The operation failed.
    pub fn is_done(&self) -> Result<bool, TransportError> {
        let done = self.submission().is_done();
        self.record.look(&done);
        done
    }

    /// Returns the buffer if the operation is done, else this value again. A failed operation returns neither: its
    /// buffer is poisoned.
    ///
    /// # Errors
    /// The operation failed. The error holds the poisoned buffer.
    pub fn complete(self) -> Result<Completion<S>, Failed<S>> {
        match self.is_done() {
            Ok(true) => Ok(Completion::Done(self.take().into_buffer())),
            Ok(false) => Ok(Completion::Pending(self)),
            Err(error) => Err(Failed {
                buffer: self.abort(),
                error,
            }),
        }
    }

    /// Gives the operation up. From now on no code can read the buffer.
    pub fn abort(self) -> Poisoned<S> {
        self.record.end(State::Poisoned);
        Poisoned(Some(self.take()))
    }
}

impl<S: Resend> InFlight<S> {
    /// Copies parts of the sent payload into another slot. There is no other access to a buffer in flight.
    ///
    /// # Errors
    /// As [`Resend::copy_into`].
    pub fn copy_into(&self, parts: &[Part], slot: &mut S::Buffer) -> Result<(), TransportError> {
        self.submission().copy_into(parts, slot)
    }
}

impl<S: Submission> Drop for InFlight<S> {
    fn drop(&mut self) {
        if let Some(submission) = self.submission.take() {
            self.record.end(State::Left);
            submission.orphan();
        }
    }
}

/// The result of [`InFlight::complete`].
#[derive(Debug)]
pub enum Completion<S: Submission> {
    /// The operation is done, and the caller owns the buffer again.
    Done(S::Buffer),
    /// The operation is not done yet.
    Pending(InFlight<S>),
}

/// An operation that failed, and what is left of its buffer.
#[derive(Debug)]
pub struct Failed<S: Submission> {
    /// The buffer, which cannot be read.
    pub buffer: Poisoned<S>,
    /// What went wrong.
    pub error: TransportError,
}

/// A buffer whose operation was given up. Its content means nothing, even if the device reports success.
///
/// # If dropped
/// The buffer is quarantined: it stays allocated for good, and no pool gives it out.
#[derive(Debug)]
pub struct Poisoned<S: Submission>(Option<S>);

impl<S: Submission> Drop for Poisoned<S> {
    fn drop(&mut self) {
        if let Some(submission) = self.0.take() {
            submission.quarantine();
        }
    }
}

/// A send that was refused, and the buffer that the caller gets back.
#[derive(Debug)]
pub struct Rejected<B> {
    /// The buffer. It was not sent, and the caller still owns it.
    pub buffer: Option<B>,
    /// The reason.
    pub error: TransportError,
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// An operation whose device fails, and what becomes of it.
    #[derive(Debug)]
    struct Failing<'a>(&'a Cell<&'static str>);

    impl Submission for Failing<'_> {
        type Buffer = ();
        fn is_done(&self) -> Result<bool, TransportError> {
            Err(TransportError::BadRegion {
                why: "broken".into(),
            })
        }
        fn into_buffer(self) {
            self.0.set("returned");
        }
        fn orphan(self) {
            self.0.set("orphaned");
        }
        fn quarantine(self) {
            self.0.set("quarantined");
        }
    }

    #[test]
    fn a_part_lies_inside_both_slots_or_is_refused() {
        let part = |from, to, bytes| Part { from, to, bytes };
        assert_eq!(part(4, 0, 6).within(10, 6).unwrap(), (4, 0, 6));
        for bad in [
            part(5, 0, 6),
            part(0, 1, 6),
            part(u64::MAX, 0, 2),
            part(0, u64::MAX, 2),
        ] {
            let error = bad.within(10, 6).unwrap_err().to_string();
            assert!(error.contains("of a slot of 10"), "{error}");
        }
    }

    #[test]
    fn a_failed_operation_quarantines_its_buffer() {
        let fate = Cell::new("");
        drop(InFlight::new(Failing(&fate)).complete().unwrap_err());
        assert_eq!(fate.get(), "quarantined");
    }
}
