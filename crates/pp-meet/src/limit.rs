//! Limits of the system on a process.

use rustix::io::Errno;

/// Says what to do where the system refuses something because of a limit on this process; `None` for any other error.
#[must_use]
pub fn lift_limit(error: Errno) -> Option<&'static str> {
    Some(match error {
        Errno::MFILE => "raise the limit on open files (ulimit -n)",
        Errno::NFILE => "the system has no open file left; end other programs",
        Errno::AGAIN => {
            "raise the limit on threads and processes (ulimit -u, a container's pids limit) or on memory (ulimit -v)"
        }
        Errno::NOMEM => "free memory, or raise the limit on it (ulimit -v)",
        Errno::FBIG => {
            "raise the limit on file sizes (ulimit -f), which holds for shared memory too"
        }
        _ => return None,
    })
}
