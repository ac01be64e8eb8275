//! Where a call crosses a C function: failures and panics become a status and a text, and structs are as long as they say.
//!
//! Hazard: a panic that crosses an `extern "C"` function aborts the process.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pp_contract::VideoPlanParts;

use crate::error::{Failure, Status};
use crate::{abi, convert};

/// Runs one function of a table: a failure and a panic become a status and a text.
///
/// # Safety
/// `error` is null or valid for the call.
pub(crate) unsafe fn guarded(
    error: *mut abi::ErrorText,
    body: impl FnOnce() -> Result<(), Failure>,
) -> u32 {
    // Unwind safety: after a panic the host only destroys the session.
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return abi::OK,
        Ok(Err(failure)) => failure,
        Err(payload) => Failure::new(Status::Panic, panic_text(payload)),
    };
    // SAFETY: the caller's duty.
    unsafe { write_error(error, &failure.message) };
    failure.status.code()
}

/// Room for the text of an error, in bytes.
const TEXT_BYTES: usize = 16 << 10;

/// Calls one function of the other side's table: a status other than OK becomes a failure. In its text control characters other
/// than the end of a line and the tabulator, and what is not UTF-8, are replaced; a length that lies is cut.
pub(crate) fn called(call: impl FnOnce(*mut abi::ErrorText) -> u32) -> Result<(), Failure> {
    let mut text = [0; TEXT_BYTES];
    let mut error = abi::ErrorText {
        struct_size: abi::size::<abi::ErrorText>(),
        reserved: 0,
        text: text.as_mut_ptr(),
        capacity: text.len() as u64,
        length: 0,
    };
    let status = call(&raw mut error);
    if status == abi::OK {
        return Ok(());
    }
    let length = usize::try_from(error.length).unwrap_or(usize::MAX);
    let text = String::from_utf8_lossy(&text[..length.min(text.len())]);
    let visible = |c: char| match c {
        '\n' | '\t' => c,
        c if c.is_control() => ' ',
        c => c,
    };
    let message: String = text.chars().map(visible).collect();
    Err(Failure::new(
        Status::from_code(status),
        message.trim_end().to_owned(),
    ))
}

/// The text of a panic. A payload of another type is forgotten: dropping it could panic again.
pub(crate) fn panic_text(payload: Box<dyn Any + Send>) -> String {
    let payload = match payload.downcast::<String>() {
        Ok(text) => return *text,
        Err(payload) => payload,
    };
    match payload.downcast::<&str>() {
        Ok(text) => (*text).to_owned(),
        Err(payload) => {
            std::mem::forget(payload);
            "a panic without a text".to_owned()
        }
    }
}

/// # Safety
/// `error` is null, or valid and with `capacity` writable bytes at `text`.
unsafe fn write_error(error: *mut abi::ErrorText, message: &str) {
    // SAFETY: the caller's duty; the size is read first and covers what is used.
    unsafe {
        if error.is_null() || (*error).struct_size < abi::size::<abi::ErrorText>() {
            return;
        }
        let error = &mut *error;
        let capacity = usize::try_from(error.capacity).unwrap_or(0);
        let length = if error.text.is_null() {
            0
        } else {
            message.floor_char_boundary(capacity)
        };
        if length > 0 {
            std::ptr::copy_nonoverlapping(message.as_ptr(), error.text, length);
        }
        error.length = length as u64;
    }
}

/// Refuses a null pointer, and a struct that is shorter than version 2.0 has it. Later versions append only.
///
/// # Safety
/// `raw` is null, or points to a struct of the ABI that begins with its `struct_size` and is valid for as long as the
/// result lives.
pub(crate) unsafe fn sized<'a, T>(raw: *const T) -> Result<&'a T, Failure> {
    // SAFETY: the caller's duty; the size is read first, and the struct is as long as its type.
    unsafe { struct_size(raw, abi::size::<T>()).map(|_| &*raw) }
}

/// The size of a struct as the caller knows it. Refuses a null pointer, and a struct that is shorter than `least`.
///
/// # Safety
/// As [`sized`].
pub(crate) unsafe fn struct_size<T>(raw: *const T, least: u32) -> Result<u32, Failure> {
    if raw.is_null() {
        return Err(Failure::invalid("a struct is missing"));
    }
    // SAFETY: the caller's duty.
    let struct_size = unsafe { *raw.cast::<u32>() };
    if struct_size < least {
        return Err(Failure::invalid(format!(
            "a struct of {struct_size} bytes, this plugin needs {least}"
        )));
    }
    Ok(struct_size)
}

/// The plan of a call. That of a host before 2.4 is shorter, and tells of no gaps.
///
/// # Safety
/// As [`sized`].
pub(crate) unsafe fn plan_of(raw: *const abi::PpPlan) -> Result<VideoPlanParts, Failure> {
    // SAFETY: the caller's duty.
    let bytes = unsafe { struct_size(raw, abi::PLAN_REQUIRED_BYTES) }?;
    let bytes = bytes.min(abi::size::<abi::PpPlan>()) as usize;
    let mut plan = convert::raw_plan(&VideoPlanParts::first(1, 1, 0));
    // SAFETY: as above; a plan is of integers and floats alone, and both have at least so many bytes.
    unsafe { std::ptr::copy_nonoverlapping(raw.cast::<u8>(), (&raw mut plan).cast(), bytes) };
    convert::plan(&plan)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_of_an_older_host_tells_of_no_gaps() {
        let first = VideoPlanParts::first(16, 32, 1);
        let mut raw = convert::raw_plan(&first);
        // Behind the struct of such a host lies something else.
        raw.context_skipped = [9; _];
        raw.struct_size = abi::PLAN_REQUIRED_BYTES;
        // SAFETY: the struct lives here, here and below.
        assert_eq!(unsafe { plan_of(&raw const raw) }.unwrap(), first);
        raw.struct_size -= 1;
        // SAFETY: as above.
        let error = unsafe { plan_of(&raw const raw) }.unwrap_err().to_string();
        assert!(error.contains("63 bytes, this plugin needs 64"), "{error}");
    }
}
