//! From a member to a running rank: the edges between the ranks, and the watchdog.

use std::sync::Arc;
use std::time::Instant;

use pp_contract::{Fault, with_source};
use pp_runtime::switch::Switch;
use pp_runtime::watch::{OnStuck, Watch};
use pp_transport::backend::{Backend, Connect, Edges, OnFrame};
use pp_transport::bell::Bell;
use pp_transport::error::TransportError;

use super::join::Member;
use crate::error::Error;

/// What a rank runs with.
pub(super) type Ready<L> = (L, Switch, Watch);

impl Member {
    /// Connects both ranks, under the eyes of the watchdog: a peer that dies meanwhile ends this rank, whatever a
    /// library waits for.
    pub(super) fn connect<B: Backend>(
        mut self,
        backend: &mut B,
        edges: Edges,
        bell: Bell,
    ) -> Result<Ready<B::Link>, Error> {
        let (agreed, on_frame) = match backend.agree(&mut self, edges, &bell) {
            Ok(agreed) => agreed,
            Err(fault) => return Err(self.give_up(fault.into())),
        };
        let (rank, generation) = (self.own, self.generation);
        let (failover, context) = (self.failover.clone(), self.context.clone());
        let (switch, watch) = self.watch(bell, on_frame)?;
        // Where this rank does not survive the loss of its peer, the watchdog ends the process.
        let recorder = context.flight.recorder();
        let is_wanted = || failover.is_none() || switch.fault().is_none();
        let how = Connect {
            generation,
            deadline: Instant::now() + crate::times::SET_UP_WITHIN,
            is_wanted: &is_wanted,
            recorder: &recorder,
        };
        let error = match backend.connect(agreed, how) {
            Ok(link) => {
                if let (Some(failover), Some(abort)) = (&failover, backend.abort(&link)) {
                    failover.hold(abort);
                }
                return Ok((link, switch, watch));
            }
            Err(error) => error,
        };
        let text = with_source(&error);
        let operation = format!("connect over {}", backend_name(backend));
        let fault = Fault::new(error.fault_kind(), rank, &operation, text);
        if let Some(failover) = &failover {
            // The backend may learn first that the peer is gone, and says it in words of its own.
            let _ = switch.verdict();
            failover.driver_is_back();
        }
        switch.raise(fault);
        watch.close();
        // The first fault counts: perhaps the peer's.
        let first = switch.fault().expect("just raised").clone();
        if let TransportError::NotInTime { .. } | TransportError::LeftBehind { .. } = error {
            // A thread is still inside the library, and what runs at exit would wait for it.
            match &failover {
                None => context.end_with(&first),
                Some(failover) => failover.leave_behind(),
            }
        }
        Err(first.into())
    }

    fn watch(self, bell: Bell, on_frame: Option<OnFrame>) -> Result<(Switch, Watch), Error> {
        let internal = |e: std::io::Error| Error::from(anyhow::Error::new(e));
        let switch = Switch::new(self.own, bell).map_err(internal)?;
        let context = Arc::clone(&self.context);
        let on_stuck = self.failover.map(|failover| -> OnStuck {
            Box::new(move |fault| failover.on_stuck_driver(&context, fault))
        });
        self.context.flight.follow(&switch);
        let watch = self.set_up.run(switch.clone(), on_frame, on_stuck)?;
        Ok((switch, watch))
    }
}

/// The backend's short name, as it stands in its settings.
fn backend_name(backend: &impl Backend) -> String {
    let settings = backend.settings();
    let name = settings.into_iter().find(|(name, _)| name == "transport");
    name.map_or_else(String::new, |(_, value)| value)
}
