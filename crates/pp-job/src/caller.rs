//! The process of a caller, as the rank in it sees it.
//!
//! Hazard: a rank ends its process when its driver is stuck, and here that process is the user's. Guarantee: nothing here
//! ends it. The driver has a thread of its own, and the caller gets the end of the rank from it, or the fault of a driver
//! that does not come back.
//!
//! Choices: a driver that does not come back is left behind with everything that it holds, since no thread can be stopped
//! from outside and its slots may be in use. The threads that would have ended the process sleep for ever then.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use signal_hook::consts::SIGINT;

use crate::config::Config;
use crate::error::{Error, caught};
use crate::hearing::Hearing;
use crate::threads::spawn;

/// Takes the end of a rank.
type Take = Box<dyn FnOnce(Result<(), Error>) + Send>;

/// A rank that takes signals.
pub(crate) trait Hears: Send + Sync {
    /// Does what a rank does at a signal. May never come back.
    fn take_signal(self: Arc<Self>, signal: i32);

    /// Says whether a signal asked for an end.
    fn has_heard(&self) -> bool;

    /// Aborts what runs, if anything does.
    fn abort(&self);
}

/// The process of a caller, as its rank sees it.
pub(crate) struct Caller(Mutex<Seat>);

struct Seat {
    /// `None` once the rank has ended.
    ended: Option<Take>,
    rank: Option<Arc<dyn Hears>>,
    /// Signals that came before it took any.
    early: Vec<i32>,
    /// It takes the signals of the process, if nobody else tells it of them.
    hearing: Option<Hearing>,
    /// The program asks for the end, and no user is told what happens now.
    is_quiet: bool,
}

impl Caller {
    /// A rank that was not begun. `ended` is called once.
    pub(crate) fn new(ended: impl FnOnce(Result<(), Error>) + Send + 'static) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Seat {
            ended: Some(Box::new(ended)),
            rank: None,
            early: Vec::new(),
            hearing: None,
            is_quiet: false,
        })))
    }

    fn state(&self) -> MutexGuard<'_, Seat> {
        // Every critical section is a few assignments.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on this rank takes signals, also those that came before.
    pub(crate) fn hears(&self, rank: Arc<dyn Hears>) {
        let mut state = self.state();
        state.rank = Some(rank);
        let early = std::mem::take(&mut state.early);
        drop(state);
        for signal in early {
            self.signal(signal);
        }
    }

    /// The rank takes the signals of the process until it has ended.
    pub(crate) fn listens(&self, hearing: Hearing) {
        let mut state = self.state();
        if state.ended.is_some() {
            state.hearing = Some(hearing);
        }
    }

    /// Does what a rank does at a signal, on a thread of its own, which may never come back.
    pub(crate) fn signal(&self, signal: i32) {
        let mut state = self.state();
        let rank = state.rank.clone();
        match rank {
            None => state.early.push(signal),
            Some(rank) => {
                let thread = std::thread::Builder::new().name("pp-signal".into());
                let _ = thread.spawn(move || rank.take_signal(signal));
            }
        }
    }

    /// The program asks for what this signal asks for: no user is told what happens now. A drain is asked for once.
    pub(crate) fn ask(&self, signal: i32) {
        let mut state = self.state();
        state.is_quiet = true;
        let has_heard = state.rank.as_ref().is_some_and(|rank| rank.has_heard());
        drop(state);
        if signal != SIGINT || !has_heard {
            self.signal(signal);
        }
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.state().is_quiet
    }

    /// The rank has ended. Later calls do nothing.
    pub(crate) fn end(&self, result: Result<(), Error>) {
        let mut state = self.state();
        let ended = state.ended.take();
        // Its threads and descriptors end with the last of its users.
        state.rank = None;
        let hearing = state.hearing.take();
        drop(state);
        drop(hearing);
        if let Some(ended) = ended {
            ended(result);
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.state().ended.is_none()
    }

    /// Leaves the driver behind, as `kill` ends a process. Returns false if the rank had ended.
    pub(crate) fn leave_behind(&self) -> bool {
        let mut state = self.state();
        let (ended, rank) = (state.ended.take(), state.rank.take());
        let hearing = state.hearing.take();
        drop(state);
        drop(hearing);
        if let Some(rank) = rank {
            // It may come to its end by itself.
            rank.abort();
        }
        ended.is_some()
    }
}

/// A rank that has not begun, in the process of its caller.
pub(crate) struct Here(pub(crate) Work);

/// Does the work of a rank. The settings have its launch. Without a caller a fault ends the process.
pub(crate) type Work = Box<dyn FnOnce(Config, Option<&Arc<Caller>>) -> Result<(), Error> + Send>;

impl Here {
    /// Starts the driver on a thread of its own. `config` has the launch of the rank and its supervisor.
    pub(crate) fn start(
        self,
        config: Config,
        ended: impl FnOnce(Result<(), Error>) + Send + 'static,
    ) -> Result<Arc<Caller>, Error> {
        let caller = Caller::new(ended);
        let own = Arc::clone(&caller);
        // A rank that a supervisor elsewhere has started ends its process at a fault.
        let may_end = config.supervisor.as_ref().is_some_and(|of| !of.is_here());
        spawn("pp-driver", move || {
            let caller = (!may_end).then_some(&own);
            own.end(caught("the driver", || (self.0)(config, caller)));
        })?;
        Ok(caller)
    }
}

impl fmt::Debug for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Caller").finish_non_exhaustive()
    }
}
