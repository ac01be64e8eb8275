//! What the tests of several crates share. A dev-dependency only: no product crate holds it.

mod files;
mod messages;
mod plan;
mod ranks;
mod stages;

pub use self::files::Folder;
pub use self::messages::{HANG, bytes, envelope, number, pattern, prepare, wait_for};
pub use self::plan::{Toy, ToyParts};
pub use self::ranks::{Pair, channels, edge};
pub use self::stages::{ToyFront, ToyPhaseB, computed};
