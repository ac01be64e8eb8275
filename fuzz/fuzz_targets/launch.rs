//! The environment that a launcher gives to a rank.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pp_transport::fuzz::launch(bytes));
