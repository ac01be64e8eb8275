//! The small commands.

pub(crate) mod doctor;
pub(crate) mod faults;
pub(crate) mod flight;
pub(crate) mod plugin;
pub(crate) mod shutdown;
pub(crate) mod verify;
