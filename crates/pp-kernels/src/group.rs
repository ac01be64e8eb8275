//! The collectives of a group of members that run a stage together: one trait on both sides of the table of functions.
//!
//! The runtime implements [`Collectives`], and a session of a member is run with it. Through the table it reaches the
//! kernels as the same trait.

use std::ffi::c_void;

use pp_contract::DType;

use crate::abi::{self, ErrorText};
use crate::border::{called, guarded};
use crate::convert;
use crate::error::Failure;

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
    pub(crate) fn table(&mut self) -> abi::PpGroup {
        abi::PpGroup {
            struct_size: abi::size::<abi::PpGroup>(),
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

/// An argument of a collective, in the trait and in the table of a group of so many members.
trait Argument: Sized {
    type InTable;

    fn into_table(self, members: u32) -> Result<Self::InTable, Failure>;

    /// # Safety
    /// It keeps to the rules of the ABI, and its call is under way as long as the result lives.
    unsafe fn from_table(raw: Self::InTable, members: u32) -> Result<Self, Failure>;
}

macro_rules! as_it_is {
    ($($type:ty)*) => {$(
        impl Argument for $type {
            type InTable = Self;

            fn into_table(self, _: u32) -> Result<Self, Failure> {
                Ok(self)
            }

            unsafe fn from_table(raw: Self, _: u32) -> Result<Self, Failure> {
                Ok(raw)
            }
        }
    )*};
}
as_it_is!(*const u8 *mut u8 u32 u64);

/// Bytes by member.
impl Argument for &[u64] {
    type InTable = *const u64;

    fn into_table(self, members: u32) -> Result<*const u64, Failure> {
        match self.len() {
            parts if parts == members as usize => Ok(self.as_ptr()),
            parts => Err(Failure::invalid(format!(
                "{parts} parts for {members} members"
            ))),
        }
    }

    unsafe fn from_table(raw: *const u64, members: u32) -> Result<Self, Failure> {
        // SAFETY: the caller's duty; the ABI asks for an element for each member.
        Ok(unsafe { std::slice::from_raw_parts(raw, members as usize) })
    }
}

impl Argument for DType {
    type InTable = u32;

    fn into_table(self, _: u32) -> Result<u32, Failure> {
        Ok(abi::dtype_code(self))
    }

    unsafe fn from_table(raw: u32, _: u32) -> Result<Self, Failure> {
        convert::dtype(raw)
            .ok_or_else(|| Failure::invalid(format!("a sum of the unknown dtype {raw}")))
    }
}

/// Makes of each collective the function that the host's table has, and the method of [`Borrowed`] that calls it.
macro_rules! forward {
    ($($([$unsafe:tt])? $name:ident($($arg:ident: $type:ty),*);)*) => {
        $(unsafe extern "C" fn $name(
            context: *mut c_void,
            $($arg: <$type as Argument>::InTable,)*
            error: *mut ErrorText,
        ) -> u32 {
            // SAFETY: the rules of the ABI, which are those of the trait.
            unsafe {
                lent(context, error, |lent| {
                    $(let $arg = Argument::from_table($arg, lent.members)?;)*
                    lent.collectives.$name($($arg),*)
                })
            }
        })*

        impl Collectives for Borrowed<'_> {
            $($($unsafe)? fn $name(&mut self, $($arg: $type),*) -> Result<(), Failure> {
                $(let $arg = $arg.into_table(self.members)?;)*
                // SAFETY: the host's function with its own context; the ranges are the caller's duty.
                self.call(self.table.$name, |f, context, error| unsafe {
                    f(context, $($arg,)* error)
                })
            })*
        }
    };
}

forward! {
    [unsafe] broadcast(data: *mut u8, bytes: u64, root: u32);
    [unsafe] scatter(from: *const u8, bytes: &[u64], to: *mut u8, root: u32);
    [unsafe] gather(from: *const u8, bytes: &[u64], to: *mut u8, root: u32);
    [unsafe] all_reduce_sum(data: *mut u8, count: u64, dtype: DType);
    [unsafe] send(from: *const u8, bytes: u64, to: u32);
    [unsafe] receive(to: *mut u8, bytes: u64, from: u32);
    barrier();
}

/// The collectives of a table, on the side of the kernels.
pub(crate) struct Borrowed<'a> {
    table: &'a abi::PpGroup,
    members: u32,
}

impl<'a> Borrowed<'a> {
    /// The table has been checked to be as long as its type, and is of a group of so many members.
    pub(crate) fn new(table: &'a abi::PpGroup, members: u32) -> Self {
        Borrowed { table, members }
    }

    /// Calls a function of the table.
    fn call<F>(
        &self,
        entry: Option<F>,
        call: impl FnOnce(F, *mut c_void, *mut ErrorText) -> u32,
    ) -> Result<(), Failure> {
        let entry = entry.ok_or_else(|| Failure::unsupported("the group lacks this collective"))?;
        called(|error| call(entry, self.table.context, error))
    }
}
