//! The control channel, the backends as a rank uses them, lanes and the flight recorder.

#[path = "../control_support/mod.rs"]
mod control_support;
#[path = "../edges_support/mod.rs"]
mod edges_support;
#[path = "../two_way/mod.rs"]
mod two_way;

mod control;
mod edges;
mod flight;
mod groups;
mod lane;
mod reach;
mod resend;
