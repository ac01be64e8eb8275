//! The pure core: what a rank does next, as state machines without threads, clocks or devices.
//!
//! Hazard: admission, credits, cuts and drain interleave, and each pair works until the third
//! comes in. Guarantee: [`FrontCore`] and [`PhaseBCore`] are values. Facts go in through
//! `handle_*`, the next action comes out of `poll`, and the same facts always give the same
//! actions; so the simulator in `tests/sim` walks through every interleaving of small cases and
//! checks that no chunk is lost, doubled, reordered or decoded after a cut, and that nothing
//! waits for ever.
//!
//! Choices: an action is carried out to its end before the next `poll`, so "doing" needs no
//! state of its own. Time is no input: nothing here depends on how long anything takes.

mod front;
mod phase_b;

pub use front::{Counts, Cut, Facts, FrontAction, FrontCore, Unexpected};
pub use phase_b::{PhaseBAction, PhaseBCore, TooMany};
