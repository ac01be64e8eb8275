//! SIGINT, SIGTERM and SIGHUP: the first drains the job, the second aborts it. SIGUSR1 writes a flight recording,
//! and the job goes on.
//!
//! A signal that was ignored when this process began stays ignored, as `nohup` wants it of SIGHUP and a shell of the
//! SIGINT of its background jobs. A process has signals once, so what is known of them is known to the process.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Rank};
use pp_runtime::switch::Switch;
use pp_transport::control::{ControlSender, Message};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use super::seat::end_with;
use super::supervise::is_supervised;
use super::{FRONT, GRACE, start_thread};
use crate::exit::{code_of, end_now, log_aside, say_aside};
use crate::flight;

/// Time for a peer to take in why this rank ends.
const TOLD_WITHIN: Duration = Duration::from_millis(50);

/// Who is to hear of a signal.
#[derive(Clone, Debug)]
enum Hearer {
    /// Nobody yet: nothing has been admitted that could be drained.
    Nobody,
    /// The peer, with which nothing has been admitted either.
    Peer(Rank, ControlSender),
    /// The switch of this rank.
    Switch(Switch),
    /// The front, which waits for another Phase B.
    Between,
    /// The front, whose last frame is on its way into the output. This signal ended the job early, if any.
    Finished(Option<u8>),
}

/// What the signal thread and the driver's both know.
#[derive(Debug)]
struct State {
    hearer: Hearer,
    /// The first signal. It asks for a drain, of whatever switch there is or comes.
    first: Option<u8>,
    /// When that came.
    since: Option<Instant>,
}

static STATE: Mutex<State> = Mutex::new(State {
    hearer: Hearer::Nobody,
    first: None,
    since: None,
});

fn with_state<R>(act: impl FnOnce(&mut State) -> R) -> R {
    // Every critical section is a few assignments, or a look.
    act(&mut STATE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The signals that this process does something about.
pub(super) fn heard() -> Vec<i32> {
    let mut heard = asking();
    heard.push(SIGUSR1);
    heard
}

/// Those that ask for an end and were not ignored when this process began.
pub(crate) fn asking() -> Vec<i32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let is_ignored = |signal: &i32| ignored.unwrap_or(0) & (1 << (signal - 1)) != 0;
    let mut asking = vec![SIGINT, SIGTERM, SIGHUP];
    asking.retain(|signal| !is_ignored(signal));
    asking
}

/// As it is written everywhere: `SIGTERM`.
pub(crate) fn name(signal: u8) -> String {
    let name = signal_hook::low_level::signal_name(signal.into());
    name.map_or_else(|| format!("signal {signal}"), str::to_owned)
}

/// Notes a signal that asks for an end; true for the first.
pub(crate) fn note(signal: u8) -> bool {
    with_state(|state| {
        let is_first = state.first.is_none();
        if is_first {
            (state.first, state.since) = (Some(signal), Some(Instant::now()));
        }
        is_first
    })
}

/// The first signal that asked for an end, and how long ago it came.
fn first() -> Option<(u8, Duration)> {
    with_state(|state| Some((state.first?, state.since?.elapsed())))
}

/// How long after the first signal the same one counts as that one.
const ECHO_WITHIN: Duration = Duration::from_millis(50);

/// Whether this is the first signal again: `timeout` and others send one to a process, and at once to its group. `first`
/// is that signal, and how long ago it came.
pub(super) fn is_echo_of(first: Option<(u8, Duration)>, signal: u8) -> bool {
    first.is_some_and(|(first, since)| signal == first && since < ECHO_WITHIN)
}

/// The signal that ended the job early, if one has: it came to this rank, or to another.
pub(crate) fn interrupted_by() -> Option<u8> {
    with_state(|state| match &state.hearer {
        Hearer::Switch(switch) => switch.drain_signal(),
        Hearer::Finished(signal) => *signal,
        Hearer::Nobody | Hearer::Peer(..) | Hearer::Between => state.first,
    })
}

/// Exit code of a process that a signal interrupted: of the first that came to it, or of a Ctrl-C that came elsewhere.
pub(crate) fn interrupted_code() -> u8 {
    128 + interrupted_by().unwrap_or(SIGINT as u8)
}

/// Says at the first signal what happens now.
pub(super) fn say_that_it_drains(signal: u8) {
    say_aside(format!(
        "pp: {}: finishing the chunks in flight; a second signal ends at once",
        name(signal)
    ));
}

/// Starts the thread that turns signals into drains and aborts. Until [`attach`] names a switch,
/// a signal ends the process: nothing has been admitted that could be drained.
pub(crate) fn start() -> std::io::Result<()> {
    let mut signals = Signals::new(heard())?;
    start_thread("pp-signals", move || {
        for signal in &mut signals {
            if signal == SIGUSR1 {
                // On a thread of its own: a disk that is away must not keep an abort waiting.
                let asked = std::thread::Builder::new().name("pp-flight".into());
                let _ = asked.spawn(flight::write_on_request);
            // A supervisor has left out what is an echo. What it passes on counts, however late the first was heard.
            } else if is_supervised() || !is_echo_of(first(), signal as u8) {
                match note(signal as u8) {
                    true => drain(signal as u8),
                    false => abort(),
                }
            }
        }
    })
}

fn drain(signal: u8) {
    let (rank, peer) = match with_state(|state| state.hearer.clone()) {
        Hearer::Nobody => (FRONT, None),
        Hearer::Peer(rank, peer) => (rank, Some(peer)),
        // The watch thread tells the other ranks: the front drains, and they follow it.
        Hearer::Switch(switch) => {
            // First: the drain may be done, and the process over, in no time.
            say_once(signal, switch.rank());
            return switch.request_drain(signal);
        }
        Hearer::Between | Hearer::Finished(_) => return say_once(signal, FRONT),
    };
    let what = "interrupted before the ranks were ready";
    let fault = Fault::new(FaultKind::Interrupted, rank, "set up", what);
    if let Some(peer) = peer {
        let deadline = Instant::now() + TOLD_WITHIN;
        // One that cannot be told notices the end of the connection.
        let _ = peer.send(&Message::Abort(fault.clone()), deadline);
    }
    end_with(&fault);
}

/// The front says it for all ranks, and a supervisor for its front.
fn say_once(signal: u8, rank: Rank) {
    if rank == FRONT && !is_supervised() {
        say_that_it_drains(signal);
    }
}

fn abort() {
    let hearer = with_state(|state| {
        if let Hearer::Finished(signal) = &mut state.hearer {
            // No signal ended the work early. These end what is left of it, and the code says so.
            *signal = signal.or(state.first);
        }
        state.hearer.clone()
    });
    if let Hearer::Switch(switch) = hearer {
        switch.abort();
        // A rank that is alone has no watchdog that would end a stuck driver.
        std::thread::sleep(GRACE * 2);
        if let Some(fault) = switch.fault() {
            end_with(fault);
        }
        end_now(code_of(FaultKind::Interrupted));
    }
    // No driver runs that could see it.
    let what = match hearer {
        Hearer::Finished(_) => "aborted by a second interrupt while the results were written",
        _ => "aborted by a second interrupt, while Phase B was awaited; what was in flight is lost",
    };
    end_with(&Fault::new(FaultKind::Interrupted, FRONT, "run", what));
}

/// Until [`attach`] names a switch, a signal ends the process, and the peer is told.
pub(super) fn set_up(rank: Rank, peer: &ControlSender) {
    with_state(|state| {
        // A front that waits for another Phase B has something to drain. One that met a Phase B which
        // went before they were connected has met another since.
        if matches!(state.hearer, Hearer::Nobody | Hearer::Peer(..)) {
            state.hearer = Hearer::Peer(rank, peer.clone());
        }
    });
}

/// From now on signals go to this switch; so does a drain that was asked for before.
pub(crate) fn attach(switch: &Switch) {
    log_aside(|| tracing::info!("the ranks are connected"));
    with_state(|state| {
        if let Some(signal) = state.first {
            switch.request_drain(signal);
        }
        state.hearer = Hearer::Switch(switch.clone());
    });
}

/// The front has emitted its last frame, early because of this signal, if any: a first signal that comes now changes nothing.
pub(crate) fn finished(interrupted: Option<u8>) {
    with_state(|state| state.hearer = Hearer::Finished(interrupted));
}

/// The switch is out of service, and another will come: until then a drain is kept, and an abort
/// ends the process.
pub(crate) fn between() {
    with_state(|state| {
        if let Hearer::Switch(switch) = &state.hearer {
            state.first = state.first.or(switch.drain_signal());
        }
        state.hearer = Hearer::Between;
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_signal_at_once_is_one() {
        let term = |ms| Some((15, Duration::from_millis(ms)));
        assert!(is_echo_of(term(0), 15));
        assert!(is_echo_of(term(49), 15));
        assert!(!is_echo_of(term(50), 15));
        assert!(!is_echo_of(term(0), 2));
        assert!(!is_echo_of(None, 15));
    }
}
