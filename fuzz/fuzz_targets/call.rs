//! What a stranger says to the rank that others meet.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pp_transport::fuzz::call(bytes));
