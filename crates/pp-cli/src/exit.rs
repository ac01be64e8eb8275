//! The end of the process by other code.

use pp_command::env::Env;
use pp_job::command_line::{REPORT_FD, SUPERVISOR};

/// From now on it is an error if other code calls `exit`, such as a plugin. Of a process that checks a plugin its parent
/// says so.
pub(crate) fn note_other_exits(env: &Env) {
    extern "C" fn at_exit() {
        pp_job::command_line::note_exit();
    }
    if env.get(SUPERVISOR).is_none() || env.get(REPORT_FD).is_some() {
        // SAFETY: `at_exit` takes nothing, does not unwind into C, and lies in a program that is never unloaded.
        let _ = unsafe { libc::atexit(at_exit) };
    }
}
