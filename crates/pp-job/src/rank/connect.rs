//! How a rank that has joined connects: the edges to its neighbours, its groups, and the watchdog.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use pp_contract::pipeline::EdgeSpec;
use pp_contract::{Fault, Generation, Pipeline, Rank, with_source};
use pp_runtime::clock::now_ns;
use pp_runtime::driver::of_all_clients;
use pp_runtime::switch::Switch;
use pp_runtime::watch::{OnStuck, Watch};
use pp_transport::backend::{
    Ahead, Backend, Connect, EdgeEnd, End, Neighbours, OnFrame, Peer, compare,
};
use pp_transport::bell::Bell;
use pp_transport::control::{ControlSender, SocketKind};
use pp_transport::error::TransportError;
use pp_transport::group::Members;
use pp_transport::host::EdgeShape;

use super::failover::Aborts;
use super::join::JoinedRank;
use super::memory::{Need, bytes_of};
use crate::RANK_0;
use crate::error::Error;
use crate::seen::vitals::Towards;
use crate::times;

/// What a rank runs with: its edges, by number.
pub(super) struct Ready<B: Backend> {
    pub(super) ends: Vec<(u32, End<B>)>,
    /// Its members of groups, by the places of their stages in the pipeline.
    pub(super) groups: Vec<(usize, B::Group)>,
    pub(super) aborts: Arc<Aborts>,
    pub(super) switch: Switch,
    pub(super) watch: Watch,
}

/// What a rank and its neighbours agreed on: the edges, the groups with the places of their stages, and what is done with
/// headers from the control channel.
type Agreed<B> = (
    Vec<<B as Backend>::Agreed>,
    Vec<(usize, <B as Backend>::AgreedGroup)>,
    Option<OnFrame>,
);

impl JoinedRank {
    /// Connects this rank with its neighbours, under the eyes of the watchdog: a peer that dies meanwhile ends this rank,
    /// whatever a library waits for.
    pub(super) fn connect<B: Backend>(
        mut self,
        backend: &mut B,
        (pipeline, edges): (&Pipeline, &[(Rank, Vec<EdgeEnd>)]),
        bell: Bell,
    ) -> Result<Ready<B>, Error> {
        let (agreed, agreed_groups, on_frame) = match self.agree(backend, (pipeline, edges), &bell)
        {
            Ok(agreed) => agreed,
            Err(fault) => {
                let fault = of_all_clients(fault, self.own, B::has_failed_for_all);
                return Err(self.give_up(fault.into()));
            }
        };
        let (rank, generation) = (self.own, self.generation);
        let (failover, context) = (self.failover.clone(), self.context.clone());
        let (switch, watch) = self.watch(bell, on_frame)?;
        // Where this rank does not survive the loss of a peer, the watchdog ends the process.
        let recorder = context.flight.recorder();
        let is_wanted = || failover.is_none() || switch.fault().is_none();
        let how = || Connect {
            generation,
            deadline: Instant::now() + times::SET_UP_WITHIN,
            is_wanted: &is_wanted,
            recorder: &recorder,
        };
        let all = failover
            .as_ref()
            .map(|failover| Arc::clone(&failover.aborts));
        let all = all.unwrap_or_default();
        let mut ends = Vec::new();
        let mut groups = Vec::new();
        let (mut waits, mut aborts) = (Vec::new(), Vec::new());
        let connect_all = || -> Result<(), TransportError> {
            for with_peer in agreed {
                let connected = backend.connect(with_peer, how())?;
                connected
                    .abort
                    .into_iter()
                    .for_each(|abort| all.hold(abort));
                ends.extend(connected.ends);
            }
            for (at, with_members) in agreed_groups {
                let joined = backend.connect_group(with_members, how())?;
                let abort = Arc::new(joined.abort);
                let ranks = pipeline.stages()[at].ranks.clone();
                aborts.push((ranks, Arc::clone(&abort)));
                all.hold(Box::new(move |why, by| abort(why, by)));
                waits.extend(joined.waits);
                groups.push((at, joined.group));
            }
            Ok(())
        };
        if let Err(error) = connect_all() {
            let text = with_source(&error);
            let operation = format!("connect over {}", backend.capabilities().name);
            let fault = Fault::new(error.fault_kind(), rank, &operation, text);
            let fault = of_all_clients(fault, rank, B::has_failed_for_all);
            // The backend may learn first that a peer is gone, and says it in words of its own.
            let _ = switch.verdict();
            if let Some(failover) = &failover {
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
            return Err(first.into());
        }
        switch.watch_groups(waits, aborts);
        Ok(Ready {
            ends,
            groups,
            aborts: all,
            switch,
            watch,
        })
    }

    /// Exchanges with the neighbours what the edges and groups need.
    fn agree<B: Backend>(
        &mut self,
        backend: &mut B,
        (pipeline, edges): (&Pipeline, &[(Rank, Vec<EdgeEnd>)]),
        bell: &Bell,
    ) -> Result<Agreed<B>, Fault> {
        // Later, slots of the generation before may still be there.
        if self.generation == Generation::new(0) {
            self.add_up_memory(Need {
                slots: bytes_of(edges),
                free: backend.free_memory(),
                looked_ns: now_ns(),
                is_under_mps: backend.capabilities().is_under_mps,
            })?;
        }
        let mut agreed = Vec::new();
        let mut on_frames: Vec<(Rank, OnFrame)> = Vec::new();
        for (peer, ends) in edges {
            let mut neighbour = Neighbour {
                joined: self,
                rank: *peer,
            };
            neighbour.compare(pipeline, ends)?;
            let (with_peer, on_frame) = backend.agree(&mut neighbour, ends, bell)?;
            agreed.push(with_peer);
            on_frames.extend(on_frame.map(|on_frame| (*peer, on_frame)));
        }
        let mut groups = Vec::new();
        for (at, stage) in pipeline.stages_at(self.own) {
            if stage.ranks.len() == 1 {
                continue;
            }
            let members = Members::new(&stage.name, &stage.ranks, self.own);
            let members = members.expect("a pipeline names each rank of a group once");
            groups.push((at, backend.agree_on_group(&members, self)?));
        }
        let on_frame = (!on_frames.is_empty()).then(|| -> OnFrame {
            Box::new(move |rank, body| {
                let mut all = on_frames.iter_mut();
                match all.find(|(peer, _)| *peer == rank) {
                    Some((_, take)) => take(rank, body),
                    None => Err(TransportError::PeerMisbehaved {
                        rank,
                        why: "it sent a header over the control channel, and has other edges"
                            .into(),
                    }),
                }
            })
        });
        Ok((agreed, groups, on_frame))
    }

    fn watch(self, bell: Bell, on_frame: Option<OnFrame>) -> Result<(Switch, Watch), Error> {
        let switch = match Switch::new(self.own, bell) {
            Ok(switch) => switch,
            Err(error) => return Err(self.give_up(anyhow::Error::new(error).into())),
        };
        let context = Arc::clone(&self.context);
        let on_stuck = self.failover.map(|failover| -> OnStuck {
            Box::new(move |fault| failover.on_stuck_driver(&context, fault))
        });
        self.context.flight.follow(&switch);
        // Before the peers are heard: rank 0 asks for vital signs anew.
        let towards: Towards = match self.context.viewer.clone() {
            Some(viewer) => Arc::new(move |vitals| viewer.hear(RANK_0, vitals)),
            None => {
                let switch = switch.clone();
                Arc::new(move |vitals| switch.say(vitals))
            }
        };
        self.context.signs.attach(&switch, towards);
        let watch = self.set_up.run(switch.clone(), on_frame, on_stuck)?;
        Ok((switch, watch))
    }
}

/// Another rank, while the edges to it are made.
struct Neighbour<'a> {
    joined: &'a mut JoinedRank,
    rank: Rank,
}

impl Neighbour<'_> {
    /// Compares the slots of all edges with the other rank: each computes by itself where they lie in common memory.
    fn compare(&mut self, pipeline: &Pipeline, ends: &[EdgeEnd]) -> Result<(), Fault> {
        let all: Vec<EdgeSpec> = pipeline.edges().collect();
        let line = |end: &EdgeEnd| {
            let edge = all[end.edge as usize];
            let [from, to] = [edge.from, edge.to].map(|at| pipeline.stages()[at].label());
            let EdgeShape { depth, slot_bytes } = end.shape;
            format!("{from} -> {to} with {depth} slots of {slot_bytes} bytes")
        };
        let lines: Vec<String> = ends.iter().map(line).collect();
        let remedy =
            "let the stages on both ranks, or .payloads() of a program, agree on what goes over it";
        compare(self, ("compare edges", "an edge"), &lines, remedy)
    }
}

impl Neighbours for JoinedRank {
    fn neighbour(&mut self, rank: Rank) -> Box<dyn Peer + '_> {
        Box::new(Neighbour { joined: self, rank })
    }
}

impl Peer for Neighbour<'_> {
    fn own_rank(&self) -> Rank {
        self.joined.own
    }

    fn rank(&self) -> Rank {
        self.rank
    }

    fn shares_host(&self) -> bool {
        self.joined.set_up.socket_kind(self.rank) == SocketKind::Unix
    }

    fn is_on_device(&self) -> bool {
        self.joined.devices[self.rank.get() as usize].is_some()
    }

    fn sender(&self) -> &ControlSender {
        self.joined.set_up.sender(self.rank)
    }

    fn send(&self, body: &[u8]) -> Result<(), Fault> {
        self.joined.tell(self.rank, body)
    }

    fn receive(&mut self, operation: &'static str) -> Result<Vec<u8>, Fault> {
        self.joined.set_up.frame(self.rank, operation)
    }

    fn send_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<(), Fault> {
        let deadline = Instant::now() + times::SET_UP_WITHIN;
        let set_up = &self.joined.set_up;
        let send = |to: &ControlSender| to.send_fds(fds, deadline);
        set_up.send(self.rank, "pass shared memory", send)
    }

    fn receive_fds(&mut self) -> Result<Vec<OwnedFd>, Fault> {
        // The peer may load weights before it maps anything.
        let set_up = &mut self.joined.set_up;
        set_up.descriptors(self.rank, "receive shared memory")
    }

    fn ahead(&mut self) -> Option<Ahead> {
        let ahead = &mut self.joined.ahead;
        let at = ahead.iter().position(|(rank, _)| *rank == self.rank)?;
        Some(ahead.swap_remove(at).1)
    }
}
