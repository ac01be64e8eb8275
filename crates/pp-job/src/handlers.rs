//! The program's own handlers of signals, while jobs take its signals.
//!
//! Hazard: a handler is the process's, and one that a job leaves behind takes signals from the program, and from each process
//! that it forks. Guarantee: what the program had is there again when no job runs, unless it has set something else meanwhile.
//!
//! Choices: signal-hook's handler is set once, calls what was there before it, and is never removed by signal-hook. It is set
//! again here for a later job, and calls then what was there before the first one.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;

use libc::sigaction;

/// One signal: what the program does at it, and what jobs do.
struct Handler {
    signal: i32,
    theirs: sigaction,
    ours: sigaction,
}

/// The signals that jobs take.
pub(crate) struct Handlers {
    taken: Vec<Handler>,
    /// The program ignores SIGCHLD: the kernel would keep no exit status of a rank.
    ignores_children: Option<sigaction>,
}

impl Handlers {
    /// Lets jobs take these signals for the first time: `set` sets their handlers.
    ///
    /// # Errors
    /// Those of `set`.
    pub(crate) fn first<T>(
        signals: &[i32],
        set: impl FnOnce() -> io::Result<T>,
    ) -> io::Result<(Self, T)> {
        let theirs: Vec<sigaction> = signals.iter().map(|signal| now(*signal)).collect();
        let made = set()?;
        let taken = signals.iter().zip(theirs);
        let taken = taken.map(|(signal, theirs)| Handler {
            signal: *signal,
            theirs,
            ours: now(*signal),
        });
        let handlers = Self {
            taken: taken.collect(),
            ignores_children: None,
        };
        Ok((handlers, made))
    }

    /// Lets jobs take the signals that were given back. What the program ignores by now stays ignored.
    pub(crate) fn take(&mut self) {
        for handler in &mut self.taken {
            let found = now(handler.signal);
            if found.sa_sigaction != handler.ours.sa_sigaction {
                handler.theirs = found;
                if found.sa_sigaction != libc::SIG_IGN {
                    set(handler.signal, &handler.ours);
                }
            }
        }
    }

    /// Lets the kernel keep the exit status of children, also where the program ignores SIGCHLD.
    pub(crate) fn keep_children(&mut self) {
        let found = now(libc::SIGCHLD);
        if found.sa_sigaction == libc::SIG_IGN {
            let kept = sigaction {
                sa_sigaction: libc::SIG_DFL,
                ..found
            };
            set(libc::SIGCHLD, &kept);
            self.ignores_children = Some(found);
        }
    }

    /// Gives the signals back to the program; those at which it does what is done by default only with `all`.
    pub(crate) fn give_back(&mut self, all: bool) {
        if let Some(theirs) = self.ignores_children.take()
            && now(libc::SIGCHLD).sa_sigaction == libc::SIG_DFL
        {
            set(libc::SIGCHLD, &theirs);
        }
        for handler in &self.taken {
            let is_ours = now(handler.signal).sa_sigaction == handler.ours.sa_sigaction;
            if is_ours && (all || self.is_the_programs(handler.signal)) {
                set(handler.signal, &handler.theirs);
            }
        }
    }

    /// Says whether the program handles or ignores the signal by itself.
    pub(crate) fn is_the_programs(&self, signal: i32) -> bool {
        let mut handlers = self.taken.iter();
        handlers.any(|known| known.signal == signal && known.theirs.sa_sigaction != libc::SIG_DFL)
    }
}

/// What the process does at a signal.
fn now(signal: i32) -> sigaction {
    let mut found = MaybeUninit::<sigaction>::zeroed();
    // SAFETY: it writes what is set for the signal, and changes nothing. Zeros are the default handler with no flags, if there
    // is no such signal.
    unsafe {
        libc::sigaction(signal, ptr::null(), found.as_mut_ptr());
        found.assume_init()
    }
}

/// Sets what was found once, or what is done by default.
fn set(signal: i32, action: &sigaction) {
    // SAFETY: a handler was set in this process before, so whoever set it answers for what it does; handlers are not unloaded.
    unsafe { libc::sigaction(signal, action, ptr::null_mut()) };
}
