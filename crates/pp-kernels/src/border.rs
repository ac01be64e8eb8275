//! Where a call crosses a C function: failures and panics become a status and a text.
//!
//! Hazard: a panic that crosses an `extern "C"` function aborts the process.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::abi;
use crate::error::{Failure, Status};

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
