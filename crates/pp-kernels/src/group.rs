//! The collectives of a group of members that run a stage together: one trait on both sides of the table of functions.
//!
//! The runtime implements [`Collectives`], and a session of a member is run with it. Through the table it reaches the
//! kernels as the same trait.

use std::ffi::c_void;

use pp_contract::DType;

use crate::abi::{self, ErrorText};
use crate::border::guarded;
use crate::convert;
use crate::error::{Failure, Status};

/// What the members of a group do together. All call the same functions in the same order.
///
/// Addresses are of the session's space: pointers to host memory, where a call is done when it returns, or device
/// addresses, where it is enqueued on the session's stream, and a gather on that of its results
/// ([`RawSession::results`](crate::RawSession::results)).
///
/// # Safety
/// Of every function with an address: the ranges are memory of the session's space, as long as the call says, and do
/// not overlap. What is written is used by nothing else, and what is read is written by nothing, until the call is
/// done: when it returns, or when the stream has passed it.
pub trait Collectives {
    /// `bytes` bytes of member `root` to all.
    ///
    /// # Safety
    /// That of the trait.
    ///
    /// # Errors
    /// A member that is gone, or a device that failed.
    unsafe fn broadcast(&mut self, data: *mut u8, bytes: u64, root: u32) -> Result<(), Failure>;

    /// Part `i` of `from`, `bytes[i]` long, the parts one behind the other, goes from `root` to `to` of member `i`. Only
    /// `root` needs `from`.
    ///
    /// # Safety
    /// That of the trait.
    ///
    /// # Errors
    /// As [`Collectives::broadcast`].
    unsafe fn scatter(
        &mut self,
        from: *const u8,
        bytes: &[u64],
        to: *mut u8,
        root: u32,
    ) -> Result<(), Failure>;

    /// `bytes[i]` bytes at `from` of member `i` become part `i` of `to`, which only `root` needs.
    ///
    /// # Safety
    /// That of the trait.
    ///
    /// # Errors
    /// As [`Collectives::broadcast`].
    unsafe fn gather(
        &mut self,
        from: *const u8,
        bytes: &[u64],
        to: *mut u8,
        root: u32,
    ) -> Result<(), Failure>;

    /// `count` elements become their sums over all members, in place, the same bytes for all.
    ///
    /// # Safety
    /// That of the trait.
    ///
    /// # Errors
    /// As [`Collectives::broadcast`]; a type that is not summed.
    unsafe fn all_reduce_sum(
        &mut self,
        data: *mut u8,
        count: u64,
        dtype: DType,
    ) -> Result<(), Failure>;

    /// Bytes to another member, which receives as many.
    ///
    /// # Safety
    /// That of the trait.
    ///
    /// # Errors
    /// As [`Collectives::broadcast`].
    unsafe fn send(&mut self, from: *const u8, bytes: u64, to: u32) -> Result<(), Failure>;

    /// Bytes from another member, which sends as many.
    ///
    /// # Safety
    /// That of the trait.
    ///
    /// # Errors
    /// As [`Collectives::broadcast`].
    unsafe fn receive(&mut self, to: *mut u8, bytes: u64, from: u32) -> Result<(), Failure>;

    /// Nothing behind it begins before all members have come to it.
    ///
    /// # Errors
    /// As [`Collectives::broadcast`].
    fn barrier(&mut self) -> Result<(), Failure>;
}

/// The host's collectives, for the time of a call.
pub(crate) struct Lent<'a> {
    pub(crate) collectives: &'a mut dyn Collectives,
    pub(crate) members: u32,
}

impl Lent<'_> {
    /// The table that lends them to the kernels; valid as long as `self` stays where it is.
    pub(crate) fn table(&mut self) -> abi::Group {
        abi::Group {
            struct_size: abi::size::<abi::Group>(),
            reserved: 0,
            context: (&raw mut *self).cast(),
            broadcast: Some(broadcast),
            scatter: Some(scatter),
            gather: Some(gather),
            all_reduce_sum: Some(all_reduce_sum),
            send: Some(send),
            receive: Some(receive),
            barrier: Some(barrier),
        }
    }
}

/// Calls the collectives behind `context`; a panic in them is stopped here, since the kernels may be in C.
///
/// # Safety
/// `context` is a [`Lent`] whose call is under way, and `error` is null or valid for the call.
unsafe fn lent(
    context: *mut c_void,
    error: *mut ErrorText,
    call: impl FnOnce(&mut Lent<'_>) -> Result<(), Failure>,
) -> u32 {
    // SAFETY: the caller's duty; the kernels make one call at a time, so nothing else uses it.
    unsafe { guarded(error, || call(&mut *context.cast::<Lent<'_>>())) }
}

unsafe extern "C" fn broadcast(
    context: *mut c_void,
    data: *mut u8,
    bytes: u64,
    root: u32,
    error: *mut ErrorText,
) -> u32 {
    // SAFETY: the rules of the ABI, which are those of the trait.
    unsafe {
        lent(context, error, |l| {
            l.collectives.broadcast(data, bytes, root)
        })
    }
}

unsafe extern "C" fn scatter(
    context: *mut c_void,
    from: *const u8,
    bytes: *const u64,
    to: *mut u8,
    root: u32,
    error: *mut ErrorText,
) -> u32 {
    // SAFETY: as in `broadcast`; `bytes` has an element for each member.
    unsafe {
        lent(context, error, |l| {
            let bytes = std::slice::from_raw_parts(bytes, l.members as usize);
            l.collectives.scatter(from, bytes, to, root)
        })
    }
}

unsafe extern "C" fn gather(
    context: *mut c_void,
    from: *const u8,
    bytes: *const u64,
    to: *mut u8,
    root: u32,
    error: *mut ErrorText,
) -> u32 {
    // SAFETY: as in `scatter`.
    unsafe {
        lent(context, error, |l| {
            let bytes = std::slice::from_raw_parts(bytes, l.members as usize);
            l.collectives.gather(from, bytes, to, root)
        })
    }
}

unsafe extern "C" fn all_reduce_sum(
    context: *mut c_void,
    data: *mut u8,
    count: u64,
    dtype: u32,
    error: *mut ErrorText,
) -> u32 {
    // SAFETY: as in `broadcast`.
    unsafe {
        lent(context, error, |l| {
            let dtype = convert::dtype(dtype)
                .ok_or_else(|| Failure::invalid(format!("a sum of the unknown dtype {dtype}")))?;
            l.collectives.all_reduce_sum(data, count, dtype)
        })
    }
}

unsafe extern "C" fn send(
    context: *mut c_void,
    from: *const u8,
    bytes: u64,
    to: u32,
    error: *mut ErrorText,
) -> u32 {
    // SAFETY: as in `broadcast`.
    unsafe { lent(context, error, |l| l.collectives.send(from, bytes, to)) }
}

unsafe extern "C" fn receive(
    context: *mut c_void,
    to: *mut u8,
    bytes: u64,
    from: u32,
    error: *mut ErrorText,
) -> u32 {
    // SAFETY: as in `broadcast`.
    unsafe { lent(context, error, |l| l.collectives.receive(to, bytes, from)) }
}

unsafe extern "C" fn barrier(context: *mut c_void, error: *mut ErrorText) -> u32 {
    // SAFETY: as in `broadcast`.
    unsafe { lent(context, error, |l| l.collectives.barrier()) }
}

/// The collectives of a table, on the side of the kernels.
pub(crate) struct Borrowed<'a> {
    table: &'a abi::Group,
    members: u32,
}

impl<'a> Borrowed<'a> {
    /// The table has been checked to be as long as its type, and is of a group of so many members.
    pub(crate) fn new(table: &'a abi::Group, members: u32) -> Self {
        Borrowed { table, members }
    }

    /// Calls a function of the table.
    fn call<F>(
        &self,
        entry: Option<F>,
        call: impl FnOnce(F, *mut c_void, *mut ErrorText) -> u32,
    ) -> Result<(), Failure> {
        let entry = entry.ok_or_else(|| Failure::unsupported("the group lacks this collective"))?;
        let mut text = [0; 256];
        let mut error = ErrorText {
            struct_size: abi::size::<ErrorText>(),
            reserved: 0,
            text: text.as_mut_ptr(),
            capacity: text.len() as u64,
            length: 0,
        };
        match call(entry, self.table.context, &raw mut error) {
            abi::OK => Ok(()),
            status => {
                let length = (error.length as usize).min(text.len());
                Err(Failure {
                    status: Status::from_code(status),
                    message: String::from_utf8_lossy(&text[..length]).into_owned(),
                })
            }
        }
    }

    fn check_parts(&self, bytes: &[u64]) -> Result<(), Failure> {
        if bytes.len() == self.members as usize {
            return Ok(());
        }
        Err(Failure::invalid(format!(
            "{} parts for {} members",
            bytes.len(),
            self.members
        )))
    }
}

impl Collectives for Borrowed<'_> {
    unsafe fn broadcast(&mut self, data: *mut u8, bytes: u64, root: u32) -> Result<(), Failure> {
        // SAFETY: the host's function with its own context; the range is the caller's duty.
        self.call(self.table.broadcast, |f, context, error| unsafe {
            f(context, data, bytes, root, error)
        })
    }

    unsafe fn scatter(
        &mut self,
        from: *const u8,
        bytes: &[u64],
        to: *mut u8,
        root: u32,
    ) -> Result<(), Failure> {
        self.check_parts(bytes)?;
        // SAFETY: as in `broadcast`; there is an element for each member.
        self.call(self.table.scatter, |f, context, error| unsafe {
            f(context, from, bytes.as_ptr(), to, root, error)
        })
    }

    unsafe fn gather(
        &mut self,
        from: *const u8,
        bytes: &[u64],
        to: *mut u8,
        root: u32,
    ) -> Result<(), Failure> {
        self.check_parts(bytes)?;
        // SAFETY: as in `scatter`.
        self.call(self.table.gather, |f, context, error| unsafe {
            f(context, from, bytes.as_ptr(), to, root, error)
        })
    }

    unsafe fn all_reduce_sum(
        &mut self,
        data: *mut u8,
        count: u64,
        dtype: DType,
    ) -> Result<(), Failure> {
        // SAFETY: as in `broadcast`.
        self.call(self.table.all_reduce_sum, |f, context, error| unsafe {
            f(context, data, count, abi::dtype_code(dtype), error)
        })
    }

    unsafe fn send(&mut self, from: *const u8, bytes: u64, to: u32) -> Result<(), Failure> {
        // SAFETY: as in `broadcast`.
        self.call(self.table.send, |f, context, error| unsafe {
            f(context, from, bytes, to, error)
        })
    }

    unsafe fn receive(&mut self, to: *mut u8, bytes: u64, from: u32) -> Result<(), Failure> {
        // SAFETY: as in `broadcast`.
        self.call(self.table.receive, |f, context, error| unsafe {
            f(context, to, bytes, from, error)
        })
    }

    fn barrier(&mut self) -> Result<(), Failure> {
        // SAFETY: as in `broadcast`; it has no range.
        self.call(self.table.barrier, |f, context, error| unsafe {
            f(context, error)
        })
    }
}
