//! Processes of tests and trials: how they are started, what is seen of them, and how they end.

mod alone;
mod command;
mod held;
mod proc;
mod watched;

use std::time::Duration;

pub use self::alone::is_alone;
pub use self::command::{
    Ended, after, as_rank, finish, free_port, program, run, spawn, spawn_with_input, wait,
};
pub use self::held::{Held, KILL, Strike};
pub use self::proc::{
    Footprint, all_gone, children, is_alive, rank_of, ranks, ranks_of, signal, threads,
    wait_until_it_runs, with_variable,
};
pub use self::watched::{Output, Process, end_all};

/// What takes this long has hung.
pub const HANG: Duration = Duration::from_secs(120);
