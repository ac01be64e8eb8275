//! A request of a viewer, behind the parser of HTTP.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pp_live::fuzz::request(bytes));
