//! A ring of headers whose words and bytes a peer writes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pp_transport::fuzz::ring(bytes));
