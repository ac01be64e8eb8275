//! What a command line around jobs needs beside them, as `pp` does: the names of the environment variables that a supervisor sets,
//! lines on standard error that do not mix with those of a job, the end of the process, and the reading of flight files. A program
//! that runs jobs needs none of it.

pub use crate::arguments::{arguments, set_arguments};
pub use crate::config::{
    DEVICES, JOB, LOSSES_FD, REPORT_FD, SUPERVISOR, host_name, stuck_after, world,
};
pub use crate::end::{be_quiet, end_now, is_quiet, note_exit, say, say_aside, say_note};
pub use crate::error::code_of;
pub use crate::flight::NOTICED;
pub use crate::job::check_world;
pub use crate::recordings::Analysis;
pub use crate::reports::report_out_of_memory;
pub use crate::signal_names::{asking, name as signal_name};
pub use crate::supervisor::bind_to_parent;
pub use pp_transport::error::lift_limit;
