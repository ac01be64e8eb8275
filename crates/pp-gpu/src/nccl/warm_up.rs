//! The warm-up of NCCL, before a process connects.
//!
//! The first communicator of a process loads NCCL's kernels onto the device. That takes 0.3 s of the 0.5 s that
//! connecting takes. While a rank waits for its peer, a communicator of this rank alone can load them. This
//! communicator is never ended, since that takes NCCL half a second. It lives as long as the process, so the process is
//! never at rest again, and it exits without running the exit handlers of libraries.

use std::sync::Arc;
use std::time::Instant;

use super::connect::{ConnectProgress, Unmade, all_pairs, join};
use super::id::UniqueId;
use super::issuer::{ConnectWait, Issuer};
use super::life::Life;
use pp_edges::error::TransportError;

/// Begins to load NCCL's kernels onto the issuer's device, on a thread of its own. A thread that connects with this
/// issuer then waits for the load. If the load fails, the connection fails too and states the reason. Call this once in
/// a process.
///
/// # Errors
/// The issuer is in use, or the library makes no id.
pub fn warm_up(issuer: &Issuer, deadline: Instant) -> Result<(), TransportError> {
    let id = UniqueId::new(issuer.nccl())?;
    let life = Arc::new(Life::new(&issuer.core, "the warm-up".into()));
    // The slot is claimed here and not on the new thread, so that no connection comes first.
    let wait = ConnectWait {
        deadline,
        is_wanted: &|| true,
    };
    let second = issuer.core.enter_to_connect(&life.what, &wait)?;
    let unmade = Unmade::new(life, second);
    let thread = std::thread::Builder::new().name("pp-nccl-warm".into());
    // If no thread can be started, `unmade` is dropped here and the warm-up ends.
    let _ = thread.spawn(move || {
        let (life, begun) = (&unmade.life, Instant::now());
        let progress = ConnectProgress::new(life);
        let made = life.core.device.bind().map_err(Into::into).and_then(|()| {
            let comms = join(life, &[id], (0, 1), true)?;
            let mut comms = comms.into_iter();
            comms.try_for_each(|comm| all_pairs(life, &progress, comm, 0, 1))
        });
        match made {
            Ok(()) => {
                std::mem::forget(Arc::clone(life));
                unmade.taken();
                let ms = begun.elapsed().as_millis();
                tracing::debug!(ms, "NCCL is loaded");
            }
            Err(error) => tracing::debug!(?error, "NCCL was not loaded ahead"),
        }
    });
    Ok(())
}
