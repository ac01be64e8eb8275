//! What a peer on another host says on the lane of headers and credits.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pp_transport::fuzz::lane(bytes));
