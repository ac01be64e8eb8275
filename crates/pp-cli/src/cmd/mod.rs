//! The small commands.

pub(crate) mod doctor;
pub(crate) mod flight;
pub(crate) mod plugin;
pub(crate) mod shell;
pub(crate) mod top;
pub(crate) mod verify;
