//! The pure core: what a rank does next, as a state machine without threads, clocks or devices.
//!
//! Hazard: admission, credits, cuts, restarts and drain interleave over several stages and ranks, and each pair works
//! until the third comes in. Guarantee: [`RankCore`] is a value. Facts go in through `handle_*`, the next action comes
//! out of `poll`, and the same facts always give the same actions; so the simulator in `tests/sim` walks through every
//! interleaving of small pipelines and checks that no chunk is lost, doubled, reordered or taken after a cut, that
//! nothing is in flight beyond the depth, and that nothing waits for ever.
//!
//! Choices: an action is carried out to its end before the next `poll`, so "doing" needs no
//! state of its own. Time is no input: nothing here depends on how long anything takes.

mod closing;
mod decision;
mod ending;
mod layout;
mod ledger;
mod live;
mod order;
mod poll;
mod rank;
mod sends;
mod state;

pub use decision::{Decision, StageFacts, Ticket, TooMany};
pub use ending::{EndEvent, Ending};
pub use layout::{LAP, LocalStage, Membership, ONWARD, Wire, stages_of, way_out};
pub use ledger::{Counts, Cut, CutShort, Unexpected};
pub use live::{Late, LiveOptions, LivePolicy};
pub use order::{FixedOrder, Order, OrderError, Task, Turn};
pub use rank::RankCore;
pub use sends::Sends;
