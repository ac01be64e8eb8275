//! What the system denies this process, told as an error and not by a signal or a panic: a standard stream that is
//! closed, a file that has reached its limit, memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pp_contract::FaultKind;
use pp_job::Error;
use pp_job::command_line::{code_of, report_out_of_memory};
use rustix::fs::{AtFlags, CWD, statat};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use signal_hook::consts::SIGXFSZ;

use pp_job::output::{is_stdout, stdout};

/// Whether standard input and output were closed when this process began.
static CLOSED: [AtomicBool; 2] = [const { AtomicBool::new(false) }; 2];

/// The standard library opens `/dev/null` in place of what is closed, before `main`.
extern "C" fn look_at_streams() {
    for (closed, path) in CLOSED.iter().zip([c"/proc/self/fd/0", c"/proc/self/fd/1"]) {
        let about = statat(CWD, path, AtFlags::SYMLINK_NOFOLLOW);
        closed.store(about.err() == Some(Errno::NOENT), Ordering::Relaxed);
    }
}

// SAFETY: the C library calls each pointer of this section before `main`, on the only thread, with arguments that the C
// calling convention lets the function ignore. The function makes system calls and stores to atomics: nothing in it needs
// what the standard library sets up later.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK: extern "C" fn() = look_at_streams;

/// Says whether standard input (0) or output (1) was closed when this process began.
pub(crate) fn is_closed(stream: usize) -> bool {
    CLOSED[stream].load(Ordering::Relaxed)
}

/// From now on a write beyond the limit on file sizes is an error, and does not end the process.
pub(crate) fn take_file_size_errors() {
    // Where it cannot be handled the signal ends the process, as it would have.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
}

/// Address space that a job needs besides its payloads: stacks of its threads, libraries, the heap.
const LEAST_ADDRESS_SPACE: u64 = 128 << 20;

/// Refuses a limit on memory under which threads could not start. The standard library panics where a thread finds no room
/// for the stack of its signal handlers.
///
/// # Errors
/// What is there, what is needed, and the remedy.
pub(crate) fn check_address_space() -> Result<(), Error> {
    let Some(limit) = getrlimit(Resource::As).current else {
        return Ok(());
    };
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = pages
        .split(' ')
        .next()
        .and_then(|pages| pages.parse::<u64>().ok());
    let mapped = pages.unwrap_or(0) * rustix::param::page_size() as u64;
    let left = limit.saturating_sub(mapped);
    if left < LEAST_ADDRESS_SPACE {
        return Err(Error::Refused(format!(
            "this process may map {} MB of memory more, and a rank needs {} at least; raise the limit (ulimit -v)",
            left >> 20,
            LEAST_ADDRESS_SPACE >> 20
        )));
    }
    // The C library would reserve 64 MB for the heap of each thread.
    #[cfg(target_env = "gnu")]
    // SAFETY: the call changes a number that the allocator reads, and takes its lock for it.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 2);
    }
    Ok(())
}

/// Refuses standard streams that are closed, and video from or to a terminal. `results` holds flags and paths.
///
/// # Errors
/// What is wrong, and the remedy.
pub(crate) fn check_streams(
    input: Option<&Path>,
    results: &[(&str, Option<&Path>)],
) -> Result<(), Error> {
    if input == Some(Path::new("-")) {
        if is_closed(0) {
            let what = "standard input is closed; name a file, or pipe one in";
            return Err(Error::local(FaultKind::Io, "read input", what));
        }
        if rustix::termios::isatty(std::io::stdin()) {
            return Err(Error::Usage(
                "no --input, and standard input is a terminal; name a .y4m file, or pipe one in: \
                 ffmpeg -i VIDEO -pix_fmt yuv420p -f yuv4mpegpipe - | pp run --input - --output OUT.y4m"
                    .into(),
            ));
        }
    }
    for (flag, path) in results {
        if !path.is_some_and(is_stdout) {
            continue;
        }
        if is_closed(1) {
            let what = format!(
                "{flag}: standard output is closed; name a file, or pipe it into a program"
            );
            return Err(Error::local(FaultKind::Io, "write output", what));
        }
        if *flag == "--output" && rustix::termios::isatty(stdout()) {
            return Err(Error::Usage(
                "--output is standard output, and that is a terminal; name a .y4m file, or pipe it into a program: \
                 pp run --input IN.y4m --output - | ffmpeg -i - OUT.mp4"
                    .into(),
            ));
        }
    }
    Ok(())
}

/// The system's allocator; where that has no memory, the process ends with a line and the right code.
pub(crate) struct Allocator;

/// Ends the process. Nothing here allocates, and no thread is waited for.
fn out_of_memory(bytes: usize) -> ! {
    if report_out_of_memory() {
        signal_hook::low_level::exit(code_of(FaultKind::Io).into());
    }
    let mut line = [0; 160];
    let mut rest = &mut line[..];
    let _ = writeln!(
        rest,
        "pp: error: out of memory: {bytes} bytes were refused; free memory, raise the limit on it (ulimit -v), or lower \
         --depth"
    );
    let written = 160 - rest.len();
    let _ = rustix::io::write(std::io::stderr(), &line[..written]);
    signal_hook::low_level::exit(code_of(FaultKind::Io).into());
}

// SAFETY: every call goes to the system's allocator with what came, and its answer comes back unless it is null, in which
// case the call does not return. So what holds of the system's allocator holds of this one.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise about the layout is the one that the system's allocator needs.
        checked(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`.
        checked(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        // SAFETY: the caller's promises about the block, its layout and the new size are those that the system's
        // allocator needs, and it made the block.
        checked(unsafe { System.realloc(at, layout, bytes) }, bytes)
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as in `realloc`.
        unsafe { System.dealloc(at, layout) }
    }
}

fn checked(block: *mut u8, bytes: usize) -> *mut u8 {
    if block.is_null() {
        out_of_memory(bytes)
    }
    block
}
