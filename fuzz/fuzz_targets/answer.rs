//! What a stranger answers to a rank that calls.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pp_transport::fuzz::answer(bytes));
