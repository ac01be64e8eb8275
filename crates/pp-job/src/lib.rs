//! A job: ranks that start, meet, agree, connect, run, restart and end together.
//!
//! A program brings a plan, the stages of each rank and a backend; this crate makes a job of them. It starts the ranks
//! as processes of the same command line, or is one of those that a launcher (torchrun, Slurm, MPI) started; lets them
//! authenticate each other and compare how they were started; connects them; watches them; starts Phase B again when it
//! is lost; and ends all of them within a second of a failure, with one line that names the rank and the operation.
//!
//! The whole program of a user is short. This one is `examples/downstream`, which streams a spectrogram through a
//! vocoder on the other rank:
//!
//! ```no_run
#![doc = include_str!("../../../examples/downstream/src/main.rs")]
//! ```
//!
//! # What runs where
//! [`Job::run`] calls its closure in the processes of the two ranks, and in no other. There [`ThisRank::run`] calls
//! `front` on rank 0 alone, `phase_b` on rank 1 alone, and `finish` on rank 0 once everything is emitted. The process
//! that the user started runs none of them: it supervises.
//!
//! # Process-wide state
//! Two jobs in one process share only process-wide state: signal handlers, standard error, exit and the list of
//! unfinished output files, the panic hook, the allocator ([`report_out_of_memory`]) and the devices.

mod config;
mod context;
mod end;
mod error;
mod flight;
mod interrupt;
mod job;
pub mod output;
pub mod prelude;
mod rank;
mod recordings;
mod reports;
mod signal_names;
mod signals;
mod supervisor;
mod threads;
mod times;

use pp_contract::Rank;

pub use crate::config::{Config, REPORT_FD, SUPERVISOR, stuck_after, world};
pub use crate::end::{end_now, note_exit, say, say_aside};
pub use crate::error::{Error, code_of};
pub use crate::flight::NOTICED;
pub use crate::job::{Job, ThisRank, main};
pub use crate::rank::join::Profile;
pub use crate::rank::parts::{Finished, FrontPart, PhaseBPart, Ranks};
pub use crate::recordings::Analysis;
pub use crate::reports::report_out_of_memory;
pub use crate::signal_names::{asking, name as signal_name};
pub use crate::supervisor::bind_to_parent;
pub use crate::times::GRACE;

/// The number of ranks of a job.
pub const WORLD: u32 = 2;
/// The rank that reads, encodes, decodes and writes.
pub const FRONT: Rank = Rank::new(0);
/// The rank that runs Phase B.
pub const PHASE_B: Rank = Rank::new(1);
