//! What the tests of several crates, and the trials, share. No product crate depends on it.

mod barrier;
mod files;
mod messages;
pub mod net;
mod plan;
pub mod process;
mod random;
mod ranks;
#[cfg(feature = "runtime")]
mod stages;
mod text;
mod video;
#[cfg(feature = "runtime")]
mod world;

pub use self::barrier::Barrier;
pub use self::files::{Folder, c_library};
pub use self::messages::{
    HANG, bytes, message, number, pattern, pipeline, prepare, until, until_some, wait_for,
};
pub use self::plan::{Toy, ToyParts};
pub use self::random::Random;
pub use self::ranks::{channels, edge};
#[cfg(feature = "runtime")]
pub use self::stages::{ToySink, ToySource, done};
pub use self::text::{assert_has, read_json, rows, words};
pub use self::video::{scenes, video};
#[cfg(feature = "runtime")]
pub use self::world::{
    Seat, TellPanic, capabilities, local, options, run_ranks, run_schedule, seats,
};
