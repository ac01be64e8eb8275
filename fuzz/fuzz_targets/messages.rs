//! What a peer sends on the control channel: messages, descriptors, and bytes that are not sealed.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pp_transport::fuzz::messages(bytes));
