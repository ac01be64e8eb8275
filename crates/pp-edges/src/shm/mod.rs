//! Memory that two ranks of one host share: a region of it, and what lies where in the region.

pub mod layout;
pub mod memory;
pub(crate) mod parts;
pub mod region;
