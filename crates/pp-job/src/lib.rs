//! A job: ranks that start, meet, agree, connect, run, restart and end together.
//!
//! A program brings a plan, the stages of each rank and a backend; this crate makes a job of them. It starts the ranks
//! as processes of the same command line, or of another one ([`Job::command`]), or is one of those that a launcher
//! (torchrun, Slurm, MPI) started; lets them authenticate each other and compare how they were started; connects them;
//! watches them; starts a rank again when it is lost; and ends all of them within a second of a failure, with one line
//! that names the rank and the operation.
//!
//! The whole program of a user is short. This one is `examples/downstream`, which streams a spectrogram through a
//! vocoder on three ranks:
//!
//! ```no_run
#![doc = include_str!("../../../examples/downstream/src/main.rs")]
//! ```
//!
//! Its stage on a GPU stands on `pp-device` and `pp-transport`, too:
//!
//! ```ignore
#![doc = include_str!("../../../examples/downstream/src/on_gpu.rs")]
//! ```
//!
//! # What runs where
//! [`Job::run`] calls its closure in the process of each rank. There [`ThisRank::run`] opens the stages that stand on the
//! rank, and no others: the source on rank 0, which tells the other ranks what it found. [`Program::finish`] runs on rank 0
//! once everything was taken. Where the pipeline has several ranks and no launcher started them, the process that the
//! user started runs none of this: it supervises. [`Job::open`] makes that process rank 0, on a thread beside the caller's.
//!
//! The ranks can be threads of one process, too: each takes the launch of its rank from one [`LocalJob`](prelude::LocalJob)
//! and puts it into [`Config::launch`].
//!
//! # Process-wide state
//! Two jobs in one process share only process-wide state: signal handlers, standard error, exit and the list of
//! unfinished output files, the panic hook, the allocator and the devices;
//! and standard output, where [`output::keep_stdout`] was called.

mod caller;
pub mod command_line;
mod config;
mod context;
mod decline;
mod end;
mod error;
mod flight;
pub mod flow;
mod handlers;
mod hearing;
mod interrupt;
mod job;
mod life;
pub mod output;
mod own_folder;
pub mod prelude;
mod program;
mod rank;
mod recordings;
mod reports;
mod running;
pub mod seen;
mod shared;
mod signal_names;
mod signals;
mod supervisor;
mod threads;
mod times;

#[doc = include_str!("../../../docs/library.md")]
pub mod guide {}

pub use crate::config::{Config, RANK_0};
pub use crate::error::Error;
pub use crate::job::{Job, ThisRank, main};
pub use crate::program::{Elsewhere, Finished, Opened, Program};
pub use crate::rank::join::Profile;
pub use crate::running::Running;
pub use crate::shared::SharedDevice;
