//! The trials themselves, and what needs a fault on purpose to be seen.

mod common;

mod faults;
mod flight;
mod restart;
mod schedules;
mod shutdown;
mod verify;
mod words;
