//! Chunks that the program around a job pushes into its source, and results that it pulls from its sink.
//!
//! Hazard: results that nobody takes pile up, or hold up those of others; a wait for a job that is over never ends.
//! Guarantee: a stream has a bound for what waits in front of the job, and one for what is in the job or waits behind it. A
//! chunk is taken into the job only where its stream has room, so the sink never waits. Every wait ends with the job.
//!
//! Choices: a wait is a waker, so a thread and a task of an async runtime wait in the same way. Nothing here waits on the
//! thread of the driver.

mod ends;
mod queues;

pub use ends::{FromStream, Inlet, Outlet, Puller, Pusher, Refused};
pub use queues::Flow;
