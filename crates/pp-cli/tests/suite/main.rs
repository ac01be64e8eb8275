//! The program `pp`, as its users start it.

#[path = "../../../pp-kernels/tests/common/mod.rs"]
mod build;
mod common;
mod restart_support;

mod bad_input;
mod data;
mod habits;
mod installed;
mod interrupt;
mod job;
mod kept;
mod launchers;
mod live;
mod missed;
mod nccl_fake;
mod page;
mod pipeline;
mod plan;
mod plugins;
mod restart;
mod restart_ends;
mod schedule;
mod secrets;
mod seen;
mod stages;
