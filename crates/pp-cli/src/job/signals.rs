//! SIGINT, SIGTERM and SIGHUP: the first drains, the second aborts. SIGUSR1 writes a flight recording,
//! and the job goes on. SIGHUP stays without effect where whoever started this process wants it so.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pp_contract::{Fault, FaultKind, Rank};
use pp_runtime::switch::Switch;
use pp_transport::control::{ControlSender, Message};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use super::seat::end_with;
use super::{FRONT, GRACE};
use crate::exit::{code_of, end_now};
use crate::flight;

/// Time for a peer to take in why this rank ends.
const TOLD_WITHIN: Duration = Duration::from_millis(50);

/// Who is to hear of a signal.
#[derive(Debug)]
enum Hearer {
    /// Nobody yet: nothing has been admitted that could be drained.
    Nobody,
    /// The peer, with which nothing has been admitted either.
    Peer(Rank, ControlSender),
    /// The switch of this rank.
    Switch(Switch),
    /// The front, which waits for another Phase B.
    Between,
}

/// What the signal thread and the driver's both know.
#[derive(Debug)]
struct State {
    hearer: Hearer,
    /// A drain was asked for, of whatever switch there was or comes.
    drain: bool,
}

static STATE: Mutex<State> = Mutex::new(State {
    hearer: Hearer::Nobody,
    drain: false,
});

fn with_state<R>(act: impl FnOnce(&mut State) -> R) -> R {
    // Every critical section is one assignment or a look.
    act(&mut STATE.lock().unwrap_or_else(PoisonError::into_inner))
}

/// The signals that this process does something about.
pub(super) fn heard() -> Vec<i32> {
    let mut heard = vec![SIGINT, SIGTERM, SIGUSR1];
    if !ignores_hangup() {
        heard.push(SIGHUP);
    }
    heard
}

/// Whether this process was started so that it outlives its terminal, as `nohup` does it.
pub(crate) fn ignores_hangup() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    ignored.is_some_and(|mask| mask & (1 << (SIGHUP - 1)) != 0)
}

/// Starts the thread that turns signals into drains and aborts. Until [`attach`] names a switch,
/// a signal ends the process: nothing has been admitted that could be drained.
pub(crate) fn start() -> std::io::Result<()> {
    let mut signals = Signals::new(heard())?;
    std::thread::Builder::new()
        .name("pp-signals".into())
        .spawn(move || {
            let mut seen = 0;
            for signal in &mut signals {
                if signal == SIGUSR1 {
                    // On a thread of its own: a disk that is away must not keep an abort waiting.
                    let asked = std::thread::Builder::new().name("pp-flight".into());
                    let _ = asked.spawn(flight::write_on_request);
                    continue;
                }
                seen += 1;
                if seen == 1 {
                    with_state(drain);
                } else {
                    abort();
                }
            }
        })?;
    Ok(())
}

fn drain(state: &mut State) {
    match &state.hearer {
        Hearer::Nobody => signal_hook::low_level::exit(130),
        Hearer::Peer(rank, peer) => {
            let what = "interrupted before the ranks were ready";
            let fault = Fault::new(FaultKind::Interrupted, *rank, "set up", what);
            let deadline = Instant::now() + TOLD_WITHIN;
            // One that cannot be told notices the end of the connection.
            let _ = peer.send(&Message::Abort(fault.clone()), deadline);
            end_with(&fault);
        }
        // The other ranks follow the front: it will tell them when it has drained.
        Hearer::Switch(switch) if switch.rank() == FRONT => switch.request_drain(),
        Hearer::Switch(_) | Hearer::Between => {}
    }
    state.drain = true;
}

fn abort() {
    let aborted = with_state(|state| match &state.hearer {
        Hearer::Switch(switch) => {
            switch.abort();
            Some(switch.clone())
        }
        Hearer::Nobody | Hearer::Peer(..) | Hearer::Between => None,
    });
    if let Some(switch) = aborted {
        // A rank that is alone has no watchdog that would end a stuck driver.
        std::thread::sleep(GRACE * 2);
        if let Some(fault) = switch.fault() {
            end_with(fault);
        }
        end_now(code_of(FaultKind::Interrupted));
    }
    // No driver runs that could see it.
    let what =
        "aborted by a second interrupt, while Phase B was awaited; what was in flight is lost";
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
    with_state(|state| {
        if state.drain && switch.rank() == FRONT {
            switch.request_drain();
        }
        state.hearer = Hearer::Switch(switch.clone());
    });
}

/// The switch is out of service, and another will come: until then a drain is kept, and an abort
/// ends the process.
pub(crate) fn between() {
    with_state(|state| state.hearer = Hearer::Between);
}
