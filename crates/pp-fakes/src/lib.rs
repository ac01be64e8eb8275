//! A fake NVIDIA driver and a fake NCCL, in C, for machines without a GPU.
//!
//! The build compiles them. A test loads them into its process ([`Fakes::load`]) or gives them to child processes
//! ([`Fakes::give_to`]). Streams run on threads of their own, bytes move between processes, and every call that matters
//! to order or lifetime is written to a recording, which [`check`] judges. `fake.h` and `record.c` say what they promise.
//! No product crate depends on this one.

#![allow(
    clippy::macro_metavars_in_unsafe,
    reason = "tests give pointers and numbers to `raw!` and `ok!`"
)]

pub mod check;
mod libraries;
pub mod raw;

pub use libraries::{Fakes, Loaded};
