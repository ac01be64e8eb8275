//! A frame from the other end of an edge: header, order, and the message of the video plan.
#![no_main]

#[path = "../../crates/pp-contract/tests/suite/support/decoders.rs"]
mod decoders;

#[global_allocator]
static COUNTING: decoders::Counting = decoders::Counting;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| decoders::frame(bytes));
