//! The small commands.

pub(crate) mod doctor;
pub(crate) mod plugin;
