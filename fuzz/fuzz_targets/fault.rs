//! The reason that comes with an abort.
#![no_main]

#[path = "../../crates/pp-contract/tests/suite/support/decoders.rs"]
mod decoders;

#[global_allocator]
static COUNTING: decoders::Counting = decoders::Counting;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| decoders::fault(bytes));
