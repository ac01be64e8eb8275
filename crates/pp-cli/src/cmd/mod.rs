//! The small commands.

pub(crate) mod doctor;
pub(crate) mod faults;
pub(crate) mod plugin;
