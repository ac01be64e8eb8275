//! What the tests of several crates, and the trials, share. No product crate depends on it.

mod files;
mod messages;
mod plan;
pub mod process;
mod random;
mod ranks;
mod stages;
mod video;

pub use self::files::{Folder, c_library};
pub use self::messages::{HANG, bytes, envelope, number, pattern, prepare, wait_for};
pub use self::plan::{Toy, ToyParts};
pub use self::random::Random;
pub use self::ranks::{Pair, channels, edge};
pub use self::stages::{ToyFront, ToyPhaseB, computed};
pub use self::video::{scenes, video};
