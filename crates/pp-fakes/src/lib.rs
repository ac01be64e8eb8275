//! A fake NVIDIA driver and a fake NCCL, in C, for machines without a GPU.
//!
//! Built once with `cc` into the target directory and loaded into this process ([`Fakes::load`]) or given to child
//! processes ([`Fakes::give_to`]). Streams run on threads of their own, bytes move between processes, and every call
//! that matters to order or lifetime is written to a recording. `fake.h` and `record.c` say what they promise.

#![allow(
    dead_code,
    unused_imports,
    unreachable_pub,
    reason = "each test uses the part it needs"
)]
#![allow(
    clippy::missing_transmute_annotations,
    reason = "a symbol becomes what the field is that it is for"
)]

pub mod check;
mod libraries;
pub mod raw;

pub use libraries::{Fakes, Loaded};
