//! How a process ends: with an exit code, without what was not finished, and within a bound.
//!
//! A process has one standard error and ends once, so what is known here is known to the process.

use std::io::{IsTerminal as _, Write as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use pp_transport::backend::{are_ends_left_to_process, leave_ends_to_process};

use crate::output::{discard_hidden, has_hidden};
use crate::reports::{EXITED, report_exit};

/// Whether the libraries of the backends that were used are at rest.
static AT_REST: Mutex<Vec<fn() -> bool>> = Mutex::new(Vec::new());

/// A backend of this process: while its library is at work on a thread that was left behind, the handlers that the
/// library registered for the exit of the process do not run, since they would take from that thread what it uses.
pub(crate) fn at_rest(is_at_rest: fn() -> bool) {
    let mut all = AT_REST.lock().unwrap_or_else(PoisonError::into_inner);
    if !all
        .iter()
        .any(|known| std::ptr::fn_addr_eq(*known, is_at_rest))
    {
        all.push(is_at_rest);
    }
}

/// This process ends because its own code says so.
static IS_LEAVING: AtomicBool = AtomicBool::new(false);

/// To be called when `exit` ends the process. If other code called it, such as a plugin, this says so and ends the process
/// with exit code 5. A process that calls `_exit` is not noticed.
pub fn note_exit() {
    if !IS_LEAVING.load(Ordering::Relaxed) {
        discard();
        if !report_exit() {
            say(format!("pp: error: {EXITED}"));
        }
        end_now(5);
    }
}

/// This process ends with its job: [`main`](crate::main) runs it.
static ENDS_WITH_JOB: AtomicBool = AtomicBool::new(false);

/// From now on this process ends with the job that it runs.
pub(crate) fn end_with_job() {
    ENDS_WITH_JOB.store(true, Ordering::Relaxed);
}

/// Says whether this process ends with the job that it runs.
pub(crate) fn ends_with_job() -> bool {
    ENDS_WITH_JOB.load(Ordering::Relaxed)
}

/// True for the first caller: it is to say why this process ends.
pub(crate) fn says_why() -> bool {
    static IS_SAID: AtomicBool = AtomicBool::new(false);
    !IS_SAID.swap(true, Ordering::Relaxed)
}

/// Another job of this process has failed, and the program begins one more: waits until the libraries are at rest, as the end of
/// that job did not.
pub(crate) fn go_on_behind_failure() {
    if !are_ends_left_to_process() {
        return;
    }
    leave_ends_to_process(false);
    let until = Instant::now() + crate::times::EDGES_ABORTED_WITHIN;
    while !are_at_rest() && Instant::now() < until {
        std::thread::sleep(crate::times::LOOK_EVERY);
    }
}

fn are_at_rest() -> bool {
    let all = AT_REST.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter().all(|is_at_rest| is_at_rest())
}

/// Ends this process, from the thread that did its work.
pub(crate) fn leave(code: u8) -> ! {
    IS_LEAVING.store(true, Ordering::Relaxed);
    discard();
    wait_for_unsaid();
    if are_at_rest() {
        std::process::exit(code.into())
    }
    end_now(code)
}

/// Removes files that were not finished: a thread that is left behind drops none.
fn discard() {
    if !has_hidden() {
        return;
    }
    let (done, is_done) = sync_channel::<()>(1);
    let thread = std::thread::Builder::new().name("pp-discard".into());
    let started = thread.spawn(move || {
        discard_hidden(Path::new(""));
        drop(done);
    });
    if started.is_ok() {
        let _ = is_done.recv_timeout(crate::times::DISCARDED_WITHIN);
    }
}

/// Writes a line to standard error. Returns false if the line is not written within 2 s. If standard
/// error is closed, the line is lost, and the function returns true.
pub fn say(line: String) -> bool {
    let (say, said) = sync_channel(1);
    let again = line.clone();
    let thread = std::thread::Builder::new().name("pp-say".into());
    let started = thread.spawn(move || {
        let _ = writeln!(std::io::stderr(), "{line}");
        let _ = say.send(());
    });
    if started.is_err() {
        // No thread is to be had, and the line is worth the wait.
        let _ = writeln!(std::io::stderr(), "{again}");
        return true;
    }
    said.recv_timeout(crate::times::SAID_WITHIN).is_ok()
}

/// Notes and progress are left out.
static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// From now on this process writes no note and no progress to standard error, and still each error.
pub fn be_quiet() {
    IS_QUIET.store(true, Ordering::Relaxed);
}

/// Says whether [`be_quiet`] was called.
pub fn is_quiet() -> bool {
    IS_QUIET.load(Ordering::Relaxed)
}

/// Writes a line as [`say`] does, unless this process is quiet.
pub fn say_note(line: String) {
    if !is_quiet() {
        say(line);
    }
}

/// Lines that were given to [`aside`] and are not written yet.
static UNSAID: AtomicUsize = AtomicUsize::new(0);

/// Writes a note to standard error without waiting, unless this process is quiet: a program that does not read it may hold
/// standard error.
pub fn say_aside(line: String) {
    if is_quiet() {
        return;
    }
    // A progress bar may stand in the last row of a terminal.
    let clear = match std::io::stderr().is_terminal() {
        true => "\r\x1b[K",
        false => "",
    };
    aside(move || {
        // In one piece: another process may write to the same place.
        let _ = std::io::stderr().write_all(format!("{clear}{line}\n").as_bytes());
    });
}

/// Logs, without waiting, on a thread that nothing watches: a program that does not read it may hold standard error.
pub(crate) fn log_aside(log: impl FnOnce() + Send + 'static) {
    // The level and the module are those of the event, which the closure alone knows.
    if tracing::dispatcher::has_been_set() {
        aside(log);
    }
}

fn aside(write: impl FnOnce() + Send + 'static) {
    UNSAID.fetch_add(1, Ordering::Relaxed);
    let thread = std::thread::Builder::new().name("pp-say".into());
    let started = thread.spawn(move || {
        write();
        UNSAID.fetch_sub(1, Ordering::Relaxed);
    });
    if started.is_err() {
        // Without a thread to be had the line is lost, and the work goes on.
        UNSAID.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Waits for the lines of [`aside`], for a bounded time.
fn wait_for_unsaid() {
    let until = Instant::now() + crate::times::SAID_WITHIN;
    while UNSAID.load(Ordering::Relaxed) > 0 && Instant::now() < until {
        std::thread::sleep(crate::times::LOOK_EVERY);
    }
}

/// Ends this process beside a thread that goes on, without what libraries do at exit.
pub fn end_now(code: u8) -> ! {
    discard();
    // No other code flushes it. If the pipe is closed, the rest is lost.
    let _ = std::io::stdout().flush();
    signal_hook::low_level::exit(code.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_job_of_a_backend_keeps_nothing_more() {
        fn is_idle() -> bool {
            true
        }
        at_rest(is_idle);
        at_rest(is_idle);
        // Other tests may have jobs of other backends.
        let is_it = |known: &&fn() -> bool| std::ptr::fn_addr_eq(**known, is_idle as fn() -> bool);
        assert_eq!(AT_REST.lock().unwrap().iter().filter(is_it).count(), 1);
    }
}
