//! What a process can have behind it before it connects.
//!
//! The first communicator of a process loads NCCL's kernels onto the device, which takes 0.3 s of
//! the 0.5 that connecting does. Where a rank has to wait for its peer anyway, one of its own alone
//! does that meanwhile. It is never ended, since NCCL takes half a second for it: it goes with the
//! process, which is therefore never at rest again and leaves without what libraries do at exit.

use std::sync::Arc;
use std::time::Instant;

use super::connect::{ConnectProgress, Unmade, all_pairs, join};
use super::id::UniqueId;
use super::issuer::{ConnectWait, Issuer};
use super::life::Life;
use pp_edges::error::TransportError;

/// Begins to load what NCCL needs on the issuer's device, on a thread of its own; a thread that
/// connects with this issuer then waits for it. If it fails, the connection fails too, and says
/// why. Once in a process.
///
/// # Errors
/// The issuer is in use, or the library makes no id.
pub fn warm_up(issuer: &Issuer, deadline: Instant) -> Result<(), TransportError> {
    let id = UniqueId::new(issuer.nccl())?;
    let life = Arc::new(Life::new(&issuer.core, "the warm-up".into()));
    // Here, so that no connection comes before it.
    let wait = ConnectWait {
        deadline,
        is_wanted: &|| true,
    };
    let second = issuer.core.enter_to_connect(&life.what, &wait)?;
    let unmade = Unmade::new(life, second);
    let thread = std::thread::Builder::new().name("pp-nccl-warm".into());
    // Without a thread it is not made, and ends here.
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
