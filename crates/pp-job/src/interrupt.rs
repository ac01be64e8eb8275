//! What a rank does at a signal: the first drains, the second aborts.

use std::sync::Arc;
use std::time::Instant;

use pp_contract::{Fault, FaultKind};
use pp_transport::control::Message;
use signal_hook::consts::{SIGTERM, SIGUSR1};

use crate::caller::Hears;
use crate::context::Context;
use crate::hearing::{Afterwards, Hearing, on_signals};
use crate::signals::{SignalTarget, is_echo_of, say_that_it_drains};
use crate::{RANK_0, times};

/// Turns signals into drains and aborts. Until [`Context::attach`] names a switch, a signal ends the process: nothing
/// has been admitted that could be drained.
///
/// Behind the job a program that goes on gets them back.
pub(crate) fn take_signals(context: &Arc<Context>, goes_on: bool) -> std::io::Result<Hearing> {
    let taking = Arc::clone(context);
    let afterwards = match &context.caller {
        Some(_) => Afterwards::Program,
        None if goes_on => Afterwards::Program,
        None if context.is_supervised() => Afterwards::Supervisor,
        None => Afterwards::Job,
    };
    on_signals(afterwards, move |signal| match &taking.caller {
        Some(caller) => caller.signal(signal),
        None => Arc::clone(&taking).take_signal(signal),
    })
}

impl Hears for Context {
    fn take_signal(self: Arc<Self>, signal: i32) {
        if signal == SIGUSR1 {
            let flight = self.flight.clone();
            // On a thread of its own: a disk that is away must not keep an abort waiting.
            let asked = std::thread::Builder::new().name("pp-flight".into());
            let _ = asked.spawn(move || flight.write_on_request());
            return;
        }
        let signal = signal as u8;
        // A supervisor has left out what is an echo. What it passes on counts, however late the first was heard.
        if self.is_supervised() || !is_echo_of(self.signals.first(), signal) {
            match self.signals.note(signal) {
                true => self.drain(signal),
                false => self.abort_or_end(),
            }
        }
    }

    fn has_heard(&self) -> bool {
        self.signals.first().is_some()
    }

    fn abort(&self) {
        self.signals.abort_switch();
    }
}

impl Context {
    fn drain(self: &Arc<Self>, signal: u8) {
        let target = self.signals.state().target.clone();
        match target {
            SignalTarget::Process => {
                self.end_interrupted("set up", "interrupted before the ranks were ready")
            }
            // The watch thread tells the other ranks: rank 0 drains, and they follow it.
            SignalTarget::Switch(switch) => {
                // First: the drain may be done, and the process over, in no time.
                self.say_once(signal);
                switch.request_drain(signal);
            }
            SignalTarget::AwaitingReplacement => {
                self.say_once(signal);
                self.end_if_terminated();
            }
            SignalTarget::Finished(_) => self.say_once(signal),
        }
    }

    /// This rank waits for another. A drain cannot happen without that one, and a launcher that ends the job starts none:
    /// SIGTERM ends the wait. A supervisor starts the rank again.
    pub(crate) fn end_if_terminated(self: &Arc<Self>) {
        let mut state = self.signals.state();
        let is_terminated = state.first == Some(SIGTERM as u8) && !self.is_supervised();
        if is_terminated && matches!(state.target, SignalTarget::AwaitingReplacement) {
            // The driver's thread and that of the signals may both be here; one ends the process.
            state.target = SignalTarget::Process;
            drop(state);
            let what =
                "interrupted by SIGTERM while a lost rank was awaited; what was in flight is lost";
            self.end_interrupted("run", what);
        }
    }

    /// Ends this process, whose ranks are not connected, and tells those that it has met.
    fn end_interrupted(self: &Arc<Self>, operation: &str, what: &str) -> ! {
        let peers = self.signals.state().met.clone();
        let rank = if peers.is_empty() { RANK_0 } else { self.rank };
        let fault = Fault::new(FaultKind::Interrupted, rank, operation, what);
        let deadline = Instant::now() + pp_runtime::times::SEND_WITHIN;
        for peer in peers {
            // One that cannot be told notices the end of the connection.
            let _ = peer.send(&Message::Abort(fault.clone()), deadline);
        }
        self.end_with(&fault);
    }

    /// Rank 0 says it for all ranks, and a supervisor for its rank 0.
    fn say_once(&self, signal: u8) {
        let is_quiet = self.caller.as_ref().is_some_and(|caller| caller.is_quiet());
        if self.rank == RANK_0 && !self.is_supervised() && !is_quiet {
            say_that_it_drains(signal);
        }
    }

    fn abort_or_end(self: &Arc<Self>) {
        let mut state = self.signals.state();
        let first = state.first;
        if let SignalTarget::Finished(signal) = &mut state.target {
            // No signal ended the work early. These end what is left of it, and the code says so.
            *signal = signal.or(first);
        }
        let target = state.target.clone();
        drop(state);
        if let SignalTarget::Switch(switch) = &target {
            switch.abort();
            // A rank that is alone has no watchdog that would end a stuck driver.
            std::thread::sleep(times::GRACE * 2);
            if self
                .caller
                .as_ref()
                .is_some_and(|caller| caller.has_ended())
            {
                return;
            }
            if let Some(fault) = switch.fault() {
                self.end_with(fault);
            }
        }
        // No driver runs that could see it.
        let what = match target {
            SignalTarget::Finished(_) => {
                "aborted by a second interrupt while the results were written"
            }
            _ => {
                "aborted by a second interrupt, while a lost rank was awaited; what was in flight is lost"
            }
        };
        self.end_interrupted("run", what);
    }
}
