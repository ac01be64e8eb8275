//! What the commands of `pp` share: the environment of the process, the choice of kernels and backend, real time, the time of work on
//! a GPU, and how results are printed.

pub mod backend;
mod choice;
pub mod env;
mod input;
mod live;
mod results;
pub mod timed;
mod whole;

pub use crate::choice::{KernelChoice, KernelChoices, TransportChoice, plugin_arg};
pub use crate::input::Input;
pub use crate::live::{Fill, LiveArgs};
pub use crate::results::{print, print_result, write_pictures};
pub use crate::whole::whole;
