//! (being written)

pub mod report;
