//! The overlap runtime: it moves chunks between the stages of a pipeline so that every transfer
//! hides behind work.
//!
//! Hazard: a scheduler that waits in the wrong order hides nothing, and one that does not know
//! what is in flight loses a chunk, doubles one, or decodes what a cut made worthless.
//! Guarantee: what happens next is decided by a pure [`core`] that is walked through completely
//! for small cases; a run ends with every admitted chunk emitted or, after a hard cut, dropped,
//! or with one fault that names the rank and the operation.
//!
//! Choices: one [`driver`] loop on one thread, which calls the [`stage`]s inline; the
//! [`watch`]dog on a second. It meets compute through the stage traits and the wire through
//! `pp_transport::edge::Edges`, and never names a device.

#![forbid(unsafe_code)]

pub mod clock;
pub mod core;
pub mod drift;
pub mod driver;
pub mod progress;
pub mod report;
pub mod schedule;
pub mod stage;
pub mod switch;
pub mod times;
pub mod watch;
