//! What a viewer gets of a running job: a page in a browser, metrics for Prometheus, and `pp top`.
//!
//! [`Live`] is what a program's `--live` says; [`Live::serve`] answers on rank 0 for all ranks, as long as the value that it
//! gives lives. `docs/live.md` has what is answered, and to whom.
//!
//! Hazard: what looks at a job slows it, or lets a stranger in. Guarantee: one thread at the lowest priority, which takes no
//! lock that a driver waits for and has a bound for everything that a caller can take; a caller gets nothing without the
//! token. Choices: HTTP is read by hyper, which many look after; small servers with threads are unmaintained, or bound no
//! time. tokio gives the deadlines, and is in no other crate.

mod access;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod listen;
mod metrics;
mod picture;
mod server;
mod shown;
mod token;
mod top;

pub use listen::{Live, Serving};
pub use top::Top;
