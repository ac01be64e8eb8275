//! The memory that two ranks share, written by somebody at any moment.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pp_transport::fuzz::region(bytes));
