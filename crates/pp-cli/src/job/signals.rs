//! SIGINT and SIGTERM: the first drains, the second aborts.

use std::sync::OnceLock;

use pp_runtime::switch::Switch;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use super::seat::end_with;
use super::{FRONT, GRACE};

/// Where the signal thread finds the switch of this rank, once there is one.
static SWITCH: OnceLock<Switch> = OnceLock::new();

/// Starts the thread that turns signals into drains and aborts. Until [`attach`] names a switch,
/// a signal ends the process: nothing has been admitted that could be drained.
pub(crate) fn start() -> std::io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    std::thread::Builder::new()
        .name("pp-signals".into())
        .spawn(move || {
            let mut seen = 0;
            for _ in &mut signals {
                let Some(switch) = SWITCH.get() else {
                    std::process::exit(130);
                };
                seen += 1;
                if seen == 1 {
                    // The other ranks follow the front: it will tell them when it has drained.
                    if switch.rank() == FRONT {
                        switch.request_drain();
                    }
                } else {
                    switch.abort();
                    // A rank that is alone has no watchdog that would end a stuck driver.
                    std::thread::sleep(GRACE * 2);
                    if let Some(fault) = switch.fault() {
                        end_with(fault);
                    }
                    std::process::exit(130);
                }
            }
        })?;
    Ok(())
}

/// From now on signals go to this switch.
pub(crate) fn attach(switch: &Switch) {
    // A process has one rank; a second switch (one process that runs all stages) adds nothing.
    let _ = SWITCH.set(switch.clone());
}
