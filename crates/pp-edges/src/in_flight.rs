//! Buffers that a backend still works on, as types that cannot be misused.
//!
//! Hazard: the race that six projects shipped. A buffer freed or overwritten while an
//! asynchronous send still reads it, or read before (or after a failed) receive has filled it.
//! Guarantee: handing a buffer to a backend moves it into [`InFlight`], which can be neither
//! read nor written; it comes back only through its completion. After an abort it is
//! [`Poisoned`], which nothing can read. What was sent, and is not poisoned, can be copied into
//! another slot ([`Resend`]): everybody else only reads it.
//!
//! Choices: `InFlight` is not `Clone` and not `Deref`; dropping it hands the buffer to the
//! backend's reaper, which gives it out again only when the operation is done; `mem::forget`
//! leaks the buffer and never frees it. What this does not do: wait. A completion is polled, or a
//! caller that owns a clock waits for it with a deadline.

use crate::error::TransportError;
use crate::flight::{Record, State};

/// One operation a backend was given, together with the buffer it owns meanwhile.
///
/// Implemented by backends; users see [`InFlight`].
pub trait Submission {
    /// What comes back when the operation is done.
    type Buffer;

    /// Whether the operation is done, without waiting.
    ///
    /// # Errors
    /// The backend says that it failed: the buffer's content is then undefined.
    fn is_done(&self) -> Result<bool, TransportError>;

    /// The buffer. Called only after [`Submission::is_done`] said yes.
    fn into_buffer(self) -> Self::Buffer;

    /// No caller waits any more: the backend takes the buffer back by itself once it is done.
    fn orphan(self);

    /// The buffer is not to be used again, not even when the operation ends.
    fn quarantine(self);
}

/// A piece of a payload that was sent, and where it goes in another.
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
    /// The two offsets and the length, if they lie inside both slots.
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

/// A send whose payload can be sent again, to a peer that was started anew.
///
/// No process writes a payload that was sent: this side has handed its slot over, the peer and the
/// device only read. So for as long as the submission is held its bytes are what they were, even
/// after the generation that sent them was aborted, and nothing has to be kept aside for a restart.
pub trait Resend: Submission {
    /// Copies these parts of the payload into a slot, of a later generation most of the time. On a
    /// device the copy is only issued: the send of `slot` is ordered behind it, and the memory of
    /// this payload is not used again before it is done.
    ///
    /// # Errors
    /// A part does not lie inside both slots; the driver refuses.
    fn copy_into(&self, parts: &[Part], slot: &mut Self::Buffer) -> Result<(), TransportError>;

    /// Holds a buffer that was written, and could not be sent because its edge broke, like one
    /// that was sent. Its slot does not come back.
    fn unsent(buffer: Self::Buffer) -> Self;
}

/// A buffer that a backend holds.
///
/// # If dropped
/// Does not wait. The buffer goes back to its pool when the operation is done, and not before.
#[must_use = "dropping it gives the buffer back to its pool some time later"]
#[derive(Debug)]
pub struct InFlight<S: Submission> {
    submission: Option<S>,
    record: Record,
}

impl<S: Submission> InFlight<S> {
    /// Wraps a submission; for backends.
    pub fn new(submission: S) -> Self {
        Self {
            submission: Some(submission),
            record: Record::default(),
        }
    }

    /// Notes from now on in `record` how the operation ends.
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

    /// Whether [`InFlight::complete`] would give the buffer now.
    ///
    /// # Errors
    /// The operation failed.
    pub fn is_done(&self) -> Result<bool, TransportError> {
        let done = self.submission().is_done();
        self.record.look(&done);
        done
    }

    /// The buffer if the operation is done; else itself again. A failed operation gives neither:
    /// its buffer is poisoned.
    ///
    /// # Errors
    /// The operation failed; the poisoned buffer goes with the error.
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

    /// Gives the operation up: whatever it did to the buffer, no code will read the buffer.
    pub fn abort(self) -> Poisoned<S> {
        self.record.end(State::Poisoned);
        Poisoned(Some(self.take()))
    }
}

impl<S: Resend> InFlight<S> {
    /// Copies parts of what was sent into another slot: the one way to look at a buffer in flight.
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

/// Gives the result of [`InFlight::complete`].
#[derive(Debug)]
pub enum Completion<S: Submission> {
    /// The operation is done and the buffer is the caller's again.
    Done(S::Buffer),
    /// Not yet.
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

/// A buffer whose operation was given up: its content means nothing, even where the device
/// reports success.
///
/// # If dropped
/// The buffer is quarantined: it stays allocated, and out of every pool, for good.
#[derive(Debug)]
pub struct Poisoned<S: Submission>(Option<S>);

impl<S: Submission> Drop for Poisoned<S> {
    fn drop(&mut self) {
        if let Some(submission) = self.0.take() {
            submission.quarantine();
        }
    }
}

/// A send that was refused, with the buffer the caller gets back.
#[derive(Debug)]
pub struct Rejected<B> {
    /// The buffer, unsent and still the caller's.
    pub buffer: Option<B>,
    /// Why.
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
