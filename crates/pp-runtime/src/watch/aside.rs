//! What is done beside the watchdog, because it may wait.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

use pp_contract::{Fault, Rank};

use super::OnFault;

/// A thread that waits for the first fault, to do about it what may take as long as it likes. It is
/// there from the beginning: a machine that is in trouble may have no thread to give.
pub(super) struct Aside {
    fault: SyncSender<Fault>,
    done: Receiver<()>,
}

impl Aside {
    pub(super) fn start(rank: Rank, on_fault: Option<OnFault>) -> std::io::Result<Self> {
        let (fault, faults) = sync_channel::<Fault>(1);
        let (say, done) = sync_channel(1);
        std::thread::Builder::new()
            .name("pp-aside".into())
            .spawn(move || {
                // The other end is dropped where there was no fault.
                let Ok(fault) = faults.recv() else {
                    return;
                };
                if let Some(on_fault) = on_fault {
                    on_fault(&fault);
                }
                let _ = say.send(());
                tracing::error!(%rank, %fault, "the run ends");
            })?;
        Ok(Self { fault, done })
    }

    pub(super) fn begin(&self, fault: Fault) {
        // There is room for one, and one is sent.
        let _ = self.fault.try_send(fault);
    }

    /// Waits until what was begun is done, or the time is up.
    pub(super) fn finish(self, deadline: Instant) {
        // Where nothing was begun, nothing will be.
        drop(self.fault);
        let left = deadline.saturating_duration_since(Instant::now());
        // A thread that panicked is done.
        let _ = self.done.recv_timeout(left);
    }
}
