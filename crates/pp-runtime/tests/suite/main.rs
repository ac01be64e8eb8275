//! The driver, restarts, the watchdog and training schedules. The walks of the core are `tests/sim`.

mod driver;
mod memory;
mod restart;
mod schedule;
mod watch;
