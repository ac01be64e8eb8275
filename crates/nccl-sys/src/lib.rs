//! NCCL by its C interface, found and loaded at run time.
//!
//! [`Nccl::load`] finds a library, checks that it can be used, and never unloads it. [`Nccl::functions`] then has every
//! function this project needs as a plain pointer, and those that only newer libraries have as an `Option`. Nothing here
//! panics when a library or a symbol is missing.
//!
//! Types and constants keep the names of `nccl.h`. Enums are newtypes over integers, so that a value which a newer library
//! returns is a value here too, and no undefined behaviour.
//!
//! `src/bindings.rs` is generated: `cargo xtask nccl-bindings`.

#[rustfmt::skip]
#[expect(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    reason = "the names and the documentation are those of nccl.h"
)]
mod bindings;
mod config;
mod error;
mod functions;
mod library;
mod load;
mod result;
mod table;

pub use bindings::*;
pub use config::{CONFIG_MAGIC, UNDEFINED_INT};
pub use error::{LoadError, NcclError, Reason, Rejected};
pub use functions::Functions;
pub use library::{LIBRARY_VARIABLE, MINIMUM, Origin, Version};
pub use load::Nccl;
