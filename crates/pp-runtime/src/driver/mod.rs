//! The driver: the one loop that moves chunks, on the thread that owns the edges of a rank.
//!
//! It takes in frames, asks the core what to do, does it, and sleeps on the bell when there is
//! nothing. Stages run inline: handing a chunk to the backend costs no thread switch, and the
//! backend moves payloads while a stage computes. What must go on meanwhile (listening for the
//! death of a peer) is the watchdog's. Where a device does the work, the stages only issue it,
//! and the loop looks after what is under way.

mod accept;
mod blame;
mod chunk;
mod drive;
mod hand_on;
mod idle;
mod inbox;
mod listen;
mod look;
mod options;
mod outbox;
mod payload;
mod rank;
mod retained;
mod session;
mod source;
mod stages;
mod tap;
mod work;

pub use self::drive::Driven;
pub use self::options::RankOptions;
pub use self::rank::{RankRun, Summary, of_all_clients};
pub use self::tap::Tap;
pub use self::work::{BoxedStage, Stages};
