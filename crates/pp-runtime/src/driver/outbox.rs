//! The outbox of a rank: everything that leaves its stages, over edges to other ranks and into slots of this rank.

use std::time::Instant;

use pp_contract::pipeline::{EdgeKind, EdgeSpec};
use pp_contract::{
    Bare, Composer, Fault, FaultKind, Message, Pipeline, Plan, PrepareError, Prepared, Rank, Stamp,
    with_source,
};
use pp_transport::backend::End;
use pp_transport::edge::{EdgeLocal, EdgeTx, Edges, Sent};
use pp_transport::error::TransportError;
use pp_transport::flight::{EdgeLog, Record, State};
use pp_transport::in_flight::InFlight;

use super::blame::{Blame, log_commitment};
use super::payload::Payload;
use crate::core::{LAP, LocalStage, ONWARD, Sends, Wire};
use crate::switch::Switch;
use crate::times::FULL_LANE_RETRY;

/// Holds the send of a payload that was handed on; `None` if the message had no payload.
pub(super) type Left<E> = Option<InFlight<<E as Edges>::Sending>>;

/// Tells where a chunk went.
pub(super) enum Handed<E: Edges> {
    /// The chunk went to another rank.
    Away(Left<E>),
    /// The chunk went to an input of a stage of this rank.
    Here {
        to: (usize, usize),
        payload: Payload<E::Receiving>,
        sending: Left<E>,
    },
}

/// Describes where one output of a stage leads.
enum Output<E: Edges> {
    /// The stage has no such output.
    None,
    /// The output leads to the source on this rank, and carries acceptances.
    Source,
    /// The output leads to another stage of this rank.
    Local {
        edge: E::Local,
        /// Names the stage that receives, and its input.
        to: (usize, usize),
        /// Holds a slot that was leased ahead. A leased slot is a credit.
        spare: Option<E::Tx>,
    },
    /// The output leads to another rank.
    Edge(Outgoing<E>),
}

/// Describes an edge to another rank.
struct Outgoing<E: Edges> {
    number: usize,
    peer: Rank,
    /// Holds this rank's end of the edge, and the log of the edge; `None` while the rank at the other end is being replaced.
    end: Option<(E::Out, EdgeLog)>,
    /// Holds a slot that was leased ahead. A leased slot is a credit.
    spare: Option<E::Tx>,
    /// Tells whether payloads go over the edge.
    has_payloads: bool,
    /// Holds the sends that are under way.
    sends: Sends<InFlight<E::Sending>>,
}

pub(super) fn has_payloads(kind: EdgeKind) -> bool {
    matches!(kind, EdgeKind::Onward | EdgeKind::Lap)
}

impl<E: Edges> Outgoing<E> {
    fn new(number: usize, edge: &EdgeSpec) -> Self {
        Self {
            number,
            peer: edge.target,
            end: None,
            spare: None,
            has_payloads: has_payloads(edge.kind),
            sends: Sends::default(),
        }
    }

    /// Aborts all sends, which poisons their payloads.
    fn poison(&mut self) {
        self.sends.drain().for_each(|send| drop(send.abort()));
    }

    /// Sends one message, and waits while the lane is full. If that fails, the payload stays in `payload`, unless the edge
    /// has lost it. `what` is logged once the header has left.
    fn send(
        &mut self,
        (switch, blame): (&Switch, Blame),
        composer: &mut Composer,
        stamp: Stamp,
        payload: &mut Option<E::Tx>,
        what: &'static str,
        prepare: impl for<'a> Fn(&'a mut Composer) -> Result<Prepared<'a>, PrepareError>,
    ) -> Result<Left<E>, Fault> {
        let blame = blame.on(self.peer);
        let (end, log) = self.end.as_mut().ok_or_else(|| blame.left_early())?;
        let mut record = None;
        loop {
            let prepared = prepare(composer).map_err(|e| {
                let (kind, operation) = (FaultKind::Internal, "prepare message");
                Fault::new(kind, blame.rank, operation, with_source(&e))
            })?;
            switch.progress().sends(self.peer);
            let record: &mut Record =
                record.get_or_insert_with(|| log.sends(prepared.payload_bytes(), stamp));
            let rejected = match end.send(prepared, stamp, payload.take()) {
                Ok(Sent { header, payload }) => {
                    record.left(&header);
                    log_commitment(what, &header, self.peer);
                    return Ok(payload.map(|sending| sending.recorded(std::mem::take(record))));
                }
                Err(rejected) => rejected,
            };
            *payload = rejected.buffer;
            if !rejected.error.is_backpressure() {
                record.reached(State::Poisoned);
                return Err(blame.transport("send", rejected.error));
            }
            if let Some(fault) = switch.fault() {
                return Err(fault.clone());
            }
            if switch.has_left(self.peer) {
                return Err(blame.left_early());
            }
            // Free room in the ring rings no bell. A peer that is behind rings when it returns credits.
            switch
                .bell()
                .listen()
                .wait(Instant::now() + FULL_LANE_RETRY);
        }
    }
}

impl<E: Edges> Output<E> {
    /// Leases a slot ahead if a slot is free and none is leased.
    fn lease(&mut self, blame: Blame) -> Result<(), Fault> {
        let failed = |e: TransportError| blame.transport("lease a slot", e);
        match self {
            Self::Local { edge, spare, .. } if spare.is_none() => {
                *spare = edge.try_lease().map_err(failed)?;
            }
            Self::Edge(out) if out.has_payloads => {
                let blame = blame.on(out.peer);
                if let Some((end, _)) = &mut out.end {
                    end.advance().map_err(|e| blame.transport("send", e))?;
                }
                let is_done = |send: &InFlight<E::Sending>| {
                    send.is_done().map_err(|e| blame.transport("send", e))
                };
                let lease = || match (out.spare.take(), &mut out.end) {
                    (None, Some((end, _))) => end.try_lease().map_err(failed),
                    (spare, _) => Ok(spare),
                };
                out.spare = out.sends.lease(is_done, lease)?;
            }
            _ => {}
        }
        Ok(())
    }

    fn edge(&self) -> Option<&Outgoing<E>> {
        match self {
            Self::Edge(out) => Some(out),
            _ => None,
        }
    }

    fn edge_mut(&mut self) -> Option<&mut Outgoing<E>> {
        match self {
            Self::Edge(out) => Some(out),
            _ => None,
        }
    }

    /// Tells whether a chunk can leave by this output now.
    fn is_free(&self) -> bool {
        match self {
            Self::None => false,
            Self::Source => true,
            Self::Local { spare, .. } => spare.is_some(),
            Self::Edge(out) => out.end.is_some() && (out.spare.is_some() || !out.has_payloads),
        }
    }

    /// Returns the place of the slot that is leased ahead; `None` for an output without slots.
    fn spare(&mut self) -> Option<&mut Option<E::Tx>> {
        match self {
            Self::Local { spare, .. } => Some(spare),
            Self::Edge(out) => Some(&mut out.spare),
            Self::None | Self::Source => None,
        }
    }
}

/// Holds all outputs of a rank: those of each stage, and the edges to the other members of the groups that this rank leads.
pub(super) struct Outbox<E: Edges> {
    outputs: Vec<[Output<E>; 2]>,
    followers: Vec<Vec<Outgoing<E>>>,
    composer: Composer,
}

impl<E: Edges> Outbox<E> {
    /// Makes the outputs of these stages. No edge to another rank has an end yet. `local` makes the slots between two stages
    /// of this rank; its arguments are the places of the two stages in the pipeline.
    pub(super) fn new(
        pipeline: &Pipeline,
        stages: &[LocalStage],
        mut local: impl FnMut(usize, usize) -> Result<E::Local, TransportError>,
    ) -> Result<Self, TransportError> {
        let edges: Vec<_> = pipeline.edges().collect();
        let mut output = |stage: &LocalStage, which: usize| {
            Ok::<_, TransportError>(match stage.outputs[which] {
                Wire::None => Output::None,
                Wire::Local(_) if stage.is_sink => Output::Source,
                Wire::Local(to) => Output::Local {
                    edge: local(stage.at, stages[to].at)?,
                    to: (to, which),
                    spare: None,
                },
                Wire::Edge(number) => Output::Edge(Outgoing::new(number, &edges[number])),
            })
        };
        let of_stage = |stage| Ok([output(stage, ONWARD)?, output(stage, LAP)?]);
        let outputs = stages
            .iter()
            .map(of_stage)
            .collect::<Result<_, TransportError>>()?;
        let followers = stages.iter().map(|stage| {
            let told = edges.iter().enumerate().filter(|(_, edge)| {
                let is_within = (edge.from, edge.to) == (stage.at, stage.at);
                stage.followers() > 0 && is_within && edge.kind == EdgeKind::Follow
            });
            told.map(|(number, edge)| Outgoing::new(number, edge))
                .collect()
        });
        Ok(Self {
            followers: followers.collect(),
            outputs,
            composer: Composer::new(),
        })
    }

    /// Leases a slot ahead for each output that has none, if a slot is free.
    pub(super) fn lease(&mut self, blame: Blame) -> Result<(), Fault> {
        let mut outputs = self.outputs.iter_mut().flatten();
        outputs.try_for_each(|output| output.lease(blame))
    }

    /// Tells whether a chunk of this stage can leave by this output now.
    pub(super) fn is_free(&self, stage: usize, output: usize) -> bool {
        self.outputs[stage][output].is_free()
    }

    /// Tells whether this output leads to another rank.
    pub(super) fn is_edge(&self, stage: usize, output: usize) -> bool {
        matches!(self.outputs[stage][output], Output::Edge(_))
    }

    /// Takes the slot that was leased ahead for an output.
    pub(super) fn take_slot(&mut self, stage: usize, output: usize) -> Option<E::Tx> {
        self.outputs[stage][output].spare()?.take()
    }

    /// Hands a chunk to the next stage. If that fails, the payload stays in `slot`, unless it is lost. A chunk without a
    /// payload needs no slot, so its slot becomes the one that is leased ahead.
    pub(super) fn hand_on<P: Plan>(
        &mut self,
        (switch, blame): (&Switch, Blame),
        (stage, output): (usize, usize),
        stamp: Stamp,
        message: &Message<P>,
        slot: &mut Option<E::Tx>,
    ) -> Result<Handed<E>, Fault> {
        let bytes = message.tensors().payload_bytes();
        let output = &mut self.outputs[stage][output];
        if bytes == 0
            && let (Some(spare), Some(unused)) = (output.spare(), slot.take())
        {
            *spare = Some(unused);
        }
        match output {
            Output::Local { edge, to, .. } => {
                let (sending, payload) = match slot.take() {
                    None => (None, Payload::None),
                    Some(full) => match edge.hand_on(full, bytes) {
                        Ok((sending, lease)) => (Some(sending), Payload::Here(lease)),
                        Err(rejected) => {
                            *slot = rejected.buffer;
                            return Err(blame.transport("hand on", rejected.error));
                        }
                    },
                };
                Ok(Handed::Here {
                    to: *to,
                    payload,
                    sending,
                })
            }
            Output::Edge(out) => {
                let by = (switch, blame);
                let sent = out.send(
                    by,
                    &mut self.composer,
                    stamp,
                    slot,
                    "message sent",
                    |composer| composer.prepare(message),
                );
                sent.map(Handed::Away)
            }
            Output::None | Output::Source => unreachable!("a chunk goes on to a stage"),
        }
    }

    /// Leaves a send to its edge, which reclaims the slot once the send is done.
    pub(super) fn leave(&mut self, stage: usize, output: usize, left: Left<E>) {
        if let (Some(sending), Output::Edge(out)) = (left, &mut self.outputs[stage][output]) {
            out.sends.push(sending);
        }
    }

    /// Tells the other members of the group that this rank begins with a chunk. This rank leads the group in this stage.
    pub(super) fn tell_followers<P: Plan>(
        &mut self,
        by: (&Switch, Blame),
        stage: usize,
        stamp: Stamp,
        message: &Message<P>,
    ) -> Result<(), Fault> {
        let composer = &mut self.composer;
        self.followers[stage].iter_mut().try_for_each(|out| {
            let sent = out.send(by, composer, stamp, &mut None, "member told", |composer| {
                composer.prepare_without_payload(message)
            });
            sent.map(drop)
        })
    }

    /// Sends SHUTDOWN over all edges of a stage, and to the other members of its group.
    pub(super) fn say_shutdown(
        &mut self,
        by: (&Switch, Blame),
        stage: usize,
        stamp: Stamp,
    ) -> Result<(), Fault> {
        let onward = self.outputs[stage].iter_mut().filter_map(Output::edge_mut);
        let mut all = onward.chain(&mut self.followers[stage]);
        let composer = &mut self.composer;
        let has_end = |out: &&mut Outgoing<E>| out.end.is_some();
        all.by_ref().filter(has_end).try_for_each(|out| {
            let sent = out.send(
                by,
                composer,
                stamp,
                &mut None,
                "shutdown sent",
                |composer| Ok(composer.prepare_bare(Bare::Shutdown)),
            );
            sent.map(drop)
        })
    }

    /// Tells whether a send is under way.
    pub(super) fn is_sending(&self) -> bool {
        self.outgoing().any(|out| !out.sends.is_empty())
    }

    /// Returns the ranks to which edges lead.
    pub(super) fn peers(&self) -> impl Iterator<Item = Rank> {
        self.outgoing().map(|out| out.peer)
    }

    /// Attaches the end of a new edge. `log` makes the log of the messages to a rank.
    ///
    /// # Panics
    /// If this rank has no such end.
    pub(super) fn attach(&mut self, number: usize, end: E::Out, log: impl FnOnce(Rank) -> EdgeLog) {
        let out = self.outgoing_mut().find(|out| out.number == number);
        let out = out.expect("the edge begins on this rank");
        out.end = Some((end, log(out.peer)));
    }

    /// Takes out the ends of all edges, and poisons all sends.
    pub(super) fn detach(&mut self) -> Vec<End<E>> {
        let take = |out: &mut Outgoing<E>| {
            out.spare = None;
            out.poison();
            out.end.take().map(|(end, _)| End::Out(end))
        };
        self.outgoing_mut().filter_map(take).collect()
    }

    /// Poisons all sends.
    pub(super) fn abandon(&mut self) {
        self.outgoing_mut().for_each(Outgoing::poison);
    }

    /// Tells every edge that its peer takes no part in ending the edge.
    pub(super) fn peers_are_gone(&mut self) {
        let ends = self.outgoing_mut().filter_map(|out| out.end.as_mut());
        ends.for_each(|(end, _)| end.peer_is_gone());
    }

    fn outgoing(&self) -> impl Iterator<Item = &Outgoing<E>> {
        let onward = self.outputs.iter().flatten().filter_map(Output::edge);
        onward.chain(self.followers.iter().flatten())
    }

    fn outgoing_mut(&mut self) -> impl Iterator<Item = &mut Outgoing<E>> {
        let onward = self.outputs.iter_mut().flatten();
        let onward = onward.filter_map(Output::edge_mut);
        onward.chain(self.followers.iter_mut().flatten())
    }
}
