//! The driver: the one loop that moves chunks, on the thread that owns the edges of a rank.
//!
//! It takes in frames, asks the core what to do, does it, and sleeps on the bell when there is
//! nothing. Stages run inline: handing a chunk to the backend costs no thread switch, and the
//! backend moves payloads while a stage computes. What must go on meanwhile (listening for the
//! death of a peer) is the watchdog's. Where a device does the work, the stages only issue it,
//! and the loop looks after what is under way.

mod awaited;
mod blame;
mod drive;
mod idle;
mod payload;
mod ports;
mod rank;
mod retained;
mod send;
mod session;
mod turns;
mod work;

pub use self::drive::Driven;
pub use self::rank::{RankOptions, RankRun, Summary};
pub use self::work::{BoxedStage, NoSource, Stages};
