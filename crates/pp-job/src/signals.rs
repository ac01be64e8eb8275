//! SIGINT, SIGTERM and SIGHUP: the first drains the job, the second aborts it. SIGUSR1 writes a flight recording,
//! and the job goes on.
//!
//! A signal that was ignored when this process began stays ignored, as `nohup` wants it of SIGHUP and a shell of the
//! SIGINT of its background jobs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pp_runtime::switch::Switch;
use pp_transport::control::ControlSender;
use signal_hook::consts::SIGINT;

use crate::end::{log_aside, say_aside};
use crate::signal_names::name;

/// What a signal acts on.
#[derive(Clone, Debug)]
pub(crate) enum SignalTarget {
    /// The process: nothing has been admitted that could be drained.
    Process,
    /// The switch of this rank.
    Switch(Switch),
    /// This rank waits for another that is started again.
    AwaitingReplacement,
    /// Rank 0, whose last results are on their way into the output. This signal ended the job early, if any.
    Finished(Option<u8>),
}

/// What the signal thread and the driver's both know.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) target: SignalTarget,
    /// The peers that this rank has met and is not connected with: they are told why the process ends.
    pub(crate) met: Vec<ControlSender>,
    /// The first signal. It asks for a drain, of whatever switch there is or comes.
    pub(crate) first: Option<u8>,
    /// When that came.
    since: Option<Instant>,
}

/// The signals of one job in this process.
#[derive(Clone, Debug)]
pub(crate) struct Signals(Arc<Mutex<State>>);

/// Says whether this is the first signal again: `timeout` and others send one to a process, and at once to its group. `first`
/// is that signal, and how long ago it came.
pub(crate) fn is_echo_of(first: Option<(u8, Duration)>, signal: u8) -> bool {
    first.is_some_and(|(first, since)| signal == first && since < crate::times::ECHO_WITHIN)
}

/// Says at the first signal what happens now.
pub(crate) fn say_that_it_drains(signal: u8) {
    say_aside(format!(
        "pp: {}: finishing the chunks in flight; a second signal ends at once",
        name(signal)
    ));
}

impl Signals {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(State {
            target: SignalTarget::Process,
            met: Vec::new(),
            first: None,
            since: None,
        })))
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        // Every critical section is a few assignments, or a look.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a signal that asks for an end; true for the first.
    pub(crate) fn note(&self, signal: u8) -> bool {
        let mut state = self.state();
        let is_first = state.first.is_none();
        if is_first {
            (state.first, state.since) = (Some(signal), Some(Instant::now()));
        }
        is_first
    }

    /// The first signal that asked for an end, and how long ago it came.
    pub(crate) fn first(&self) -> Option<(u8, Duration)> {
        let state = self.state();
        Some((state.first?, state.since?.elapsed()))
    }

    /// The signal that ended the job early, if one has: it came to this rank, or to another.
    pub(crate) fn interrupted_by(&self) -> Option<u8> {
        let state = self.state();
        match &state.target {
            SignalTarget::Switch(switch) => switch.drain_signal(),
            SignalTarget::Finished(signal) => *signal,
            SignalTarget::Process | SignalTarget::AwaitingReplacement => state.first,
        }
    }

    /// The signal that stopped the job at once: the first that came to this process, or a Ctrl-C elsewhere.
    pub(crate) fn aborted_by(&self) -> u8 {
        self.interrupted_by().unwrap_or(SIGINT as u8)
    }

    /// Until [`Signals::attach`] names a switch, these peers are told if a signal ends the process.
    pub(crate) fn set_up(&self, peers: Vec<ControlSender>) {
        self.state().met = peers;
    }

    /// This peer, too, is told.
    pub(crate) fn meet(&self, peer: &ControlSender) {
        self.state().met.push(peer.clone());
    }

    /// From now on signals go to this switch; so does a drain that was asked for before.
    pub(crate) fn attach(&self, switch: &Switch) {
        log_aside(|| tracing::info!("the ranks are connected"));
        let mut state = self.state();
        if let Some(signal) = state.first {
            switch.request_drain(signal);
        }
        state.target = SignalTarget::Switch(switch.clone());
        state.met.clear();
    }

    /// Rank 0 has its last result, early because of this signal, if any: a first signal that comes now changes
    /// nothing.
    pub(crate) fn finished(&self, interrupted: Option<u8>) {
        self.state().target = SignalTarget::Finished(interrupted);
    }

    /// Aborts what runs, if anything does.
    pub(crate) fn abort_switch(&self) {
        let target = self.state().target.clone();
        if let SignalTarget::Switch(switch) = target {
            switch.abort();
        }
    }

    /// The switch is out of service, and another will come: until then a drain is kept, and an abort ends the process.
    pub(crate) fn await_replacement(&self) {
        let mut state = self.state();
        if let SignalTarget::Switch(switch) = &state.target {
            state.first = state.first.or(switch.drain_signal());
        }
        state.target = SignalTarget::AwaitingReplacement;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_repeated_within_50_ms_counts_once() {
        let term = |ms| Some((15, Duration::from_millis(ms)));
        assert!(is_echo_of(term(0), 15));
        assert!(is_echo_of(term(49), 15));
        assert!(!is_echo_of(term(50), 15));
        assert!(!is_echo_of(term(0), 2));
        assert!(!is_echo_of(None, 15));
    }
}
