//! The inputs and outputs of the stages of one rank: edges to other ranks, and slots that stay here.

use std::collections::VecDeque;
use std::time::Instant;

use pp_contract::pipeline::{EdgeKind, EdgeSpec};
use pp_contract::{
    Composer, Fault, FaultKind, Generation, Lockstep, Pipeline, PrepareError, Prepared, Rank,
    StageReport, Stamp, with_source,
};
use pp_transport::backend::End;
use pp_transport::edge::{EdgeLocal, EdgeTx, Edges, Sent};
use pp_transport::error::TransportError;
use pp_transport::flight::{EdgeLog, FlightRecorder, Record, State};
use pp_transport::in_flight::InFlight;

use super::blame::{Blame, log_commitment};
use crate::core::{FixedOrder, LAP, LocalStage, ONWARD, Sends, Wire};
use crate::switch::Switch;
use crate::times::FULL_LANE_RETRY;

/// Where the chunks of a stage go by one of its outputs.
pub(super) enum Output<E: Edges> {
    /// There is none.
    None,
    /// To the source, which stands on this rank: an acceptance.
    Source,
    /// To another stage of this rank.
    Local {
        edge: E::Local,
        /// The stage, and its input.
        to: (usize, usize),
        /// A slot leased ahead: having it is the credit.
        spare: Option<E::Tx>,
    },
    /// To another rank.
    Edge(Outgoing<E>),
}

/// An edge to another rank.
pub(super) struct Outgoing<E: Edges> {
    pub(super) number: usize,
    pub(super) peer: Rank,
    /// With what records it; `None` while the rank at its other end is being replaced.
    pub(super) end: Option<(E::Out, EdgeLog)>,
    /// A slot leased ahead: having it is the credit.
    pub(super) spare: Option<E::Tx>,
    /// Whether payloads go over it.
    has_payloads: bool,
    /// Sends under way.
    pub(super) sends: Sends<InFlight<E::Sending>>,
}

fn has_payloads(kind: EdgeKind) -> bool {
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

    /// Gives up all sends.
    fn poison(&mut self) {
        self.sends.drain().for_each(|send| drop(send.abort()));
    }

    /// Sends one message, waiting while the lane is full. Where that fails the payload stays in
    /// `payload`, unless the edge lost it. `what` is logged once the header has left.
    pub(super) fn send(
        &mut self,
        (switch, blame): (&Switch, Blame),
        composer: &mut Composer,
        stamp: Stamp,
        payload: &mut Option<E::Tx>,
        what: &'static str,
        prepare: impl for<'a> Fn(&'a mut Composer) -> Result<Prepared<'a>, PrepareError>,
    ) -> Result<Option<InFlight<E::Sending>>, Fault> {
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
            // Room in the ring has no bell of its own; a peer that is behind rings for the credits it
            // gives back on its way.
            switch
                .bell()
                .listen()
                .wait(Instant::now() + FULL_LANE_RETRY);
        }
    }
}

impl<E: Edges> Output<E> {
    /// Leases a slot ahead, if one is free and none is leased.
    pub(super) fn lease(&mut self, blame: Blame) -> Result<(), Fault> {
        let failed = |e: TransportError| blame.transport("lease a slot", e);
        match self {
            Self::Local { edge, spare, .. } if spare.is_none() => {
                *spare = edge.try_lease().map_err(failed)?;
            }
            Self::Edge(out) if out.has_payloads => {
                let blame = blame.on(out.peer);
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

    /// Whether a chunk can go this way now.
    pub(super) fn is_free(&self) -> bool {
        match self {
            Self::None => false,
            Self::Source => true,
            Self::Local { spare, .. } => spare.is_some(),
            Self::Edge(out) => out.end.is_some() && (out.spare.is_some() || !out.has_payloads),
        }
    }

    /// The slot that was leased ahead, if there is one.
    pub(super) fn spare(&mut self) -> Option<&mut Option<E::Tx>> {
        match self {
            Self::Local { spare, .. } => Some(spare),
            Self::Edge(out) => Some(&mut out.spare),
            Self::None | Self::Source => None,
        }
    }
}

/// An edge from another rank.
pub(super) struct Incoming<E: Edges> {
    pub(super) number: usize,
    pub(super) peer: Rank,
    /// What comes.
    pub(super) kind: EdgeKind,
    /// The stage that it leads to, and the input there. To the source come acceptances, and to a stage that this rank leads
    /// the reports of the other members.
    pub(super) to: (usize, usize),
    /// The stage that sends over it.
    pub(super) maker: usize,
    /// As [`Outgoing::end`].
    pub(super) end: Option<(E::In, EdgeLog)>,
    pub(super) lockstep: Lockstep,
    /// Nothing more comes.
    pub(super) is_closed: bool,
    /// Reports of a member that the leader has not looked at, the oldest first.
    pub(super) reports: VecDeque<(Stamp, StageReport)>,
    /// What a slot of the leader holds that tells of a payload over this edge.
    pub(super) slot_bytes: u64,
    laps: u16,
    /// The chunks of a step, in the order in which they come; none where they rise.
    order: Vec<u64>,
}

impl<E: Edges> Incoming<E> {
    fn new(number: usize, edge: &EdgeSpec, to: (usize, usize), maker: usize, laps: u16) -> Self {
        Self {
            number,
            peer: edge.source,
            kind: edge.kind,
            to,
            maker,
            end: None,
            lockstep: Lockstep::with_laps(laps),
            is_closed: false,
            reports: VecDeque::new(),
            slot_bytes: u64::MAX,
            laps,
            order: Vec::new(),
        }
    }

    fn begin(&mut self) {
        self.lockstep = match self.order.is_empty() {
            true => Lockstep::with_laps(self.laps),
            false => Lockstep::in_order(self.order.clone()),
        };
    }

    /// Whether payloads come.
    pub(super) fn has_payloads(&self) -> bool {
        has_payloads(self.kind)
    }
}

/// All of them. By stage of this rank, the outputs, and the edges to the other members of the group that this rank leads;
/// and the inputs in any order.
pub(super) struct Ports<E: Edges> {
    pub(super) outputs: Vec<[Output<E>; 2]>,
    pub(super) followers: Vec<Vec<Outgoing<E>>>,
    pub(super) inputs: Vec<Incoming<E>>,
}

impl<E: Edges> Ports<E> {
    /// The ports of these stages. No edge to another rank has an end yet. `local` makes the slots between two stages of
    /// this rank, which are named by their places in the pipeline.
    pub(super) fn new(
        pipeline: &Pipeline,
        stages: &[LocalStage],
        steps: u16,
        mut local: impl FnMut(usize, usize) -> Result<E::Local, TransportError>,
    ) -> Result<Self, TransportError> {
        let edges: Vec<_> = pipeline.edges().collect();
        let mut outputs = Vec::new();
        let mut followers = Vec::new();
        let mut inputs = Vec::new();
        for (place, stage) in stages.iter().enumerate() {
            let mut output = |which: usize| {
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
            outputs.push([output(ONWARD)?, output(LAP)?]);
            let of_group = edges.iter().enumerate().filter(|(_, edge)| {
                stage.followers() > 0 && (edge.from, edge.to) == (stage.at, stage.at)
            });
            let mut led = Vec::new();
            for (number, edge) in of_group {
                match edge.kind {
                    EdgeKind::Follow => led.push(Outgoing::new(number, edge)),
                    _ => inputs.push(Incoming::new(number, edge, (place, ONWARD), stage.at, 1)),
                }
            }
            followers.push(led);
            for input in [ONWARD, LAP] {
                let Wire::Edge(number) = stage.inputs[input] else {
                    continue;
                };
                let maker = match edges[number].kind {
                    // The leader sends what the stage before has made.
                    EdgeKind::Follow => stage.at - 1,
                    _ => edges[number].from,
                };
                // Within a ring a chunk comes once a lap.
                let ring = pipeline.ring_at(maker);
                let ring = ring.filter(|ring| (ring.first..=ring.last).contains(&stage.at));
                let laps = ring.map_or(1, |_| pipeline.laps(maker, steps));
                inputs.push(Incoming::new(
                    number,
                    &edges[number],
                    (place, input),
                    maker,
                    laps,
                ));
            }
        }
        Ok(Self {
            outputs,
            followers,
            inputs,
        })
    }

    /// The chunks come in this order.
    pub(super) fn expect(&mut self, order: &FixedOrder, stages: &[LocalStage]) {
        for input in &mut self.inputs {
            input.order = order.arrivals_at(stages[input.to.0].at);
            input.begin();
        }
    }

    /// The edges by which the other members of the group of this stage report.
    pub(super) fn reports_for(&self, stage: usize) -> impl Iterator<Item = &Incoming<E>> {
        let inputs = self.inputs.iter();
        inputs.filter(move |input| input.kind == EdgeKind::Report && input.to.0 == stage)
    }

    /// As [`Ports::reports_for`].
    pub(super) fn reports_for_mut(
        &mut self,
        stage: usize,
    ) -> impl Iterator<Item = &mut Incoming<E>> {
        let inputs = self.inputs.iter_mut();
        inputs.filter(move |input| input.kind == EdgeKind::Report && input.to.0 == stage)
    }

    /// The ranks at the other ends, each once.
    pub(super) fn peers(&self) -> Vec<Rank> {
        let outgoing = self.outgoing().map(|out| out.peer);
        let incoming = self.inputs.iter().map(|input| input.peer);
        let mut peers: Vec<Rank> = outgoing.chain(incoming).collect();
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// All edges of this rank to other ranks.
    pub(super) fn outgoing(&self) -> impl Iterator<Item = &Outgoing<E>> {
        let onward = self.outputs.iter().flatten().filter_map(Output::edge);
        onward.chain(self.followers.iter().flatten())
    }

    pub(super) fn outgoing_mut(&mut self) -> impl Iterator<Item = &mut Outgoing<E>> {
        let onward = self.outputs.iter_mut().flatten();
        let onward = onward.filter_map(Output::edge_mut);
        onward.chain(self.followers.iter_mut().flatten())
    }

    /// Those of one stage.
    pub(super) fn outgoing_of(&mut self, stage: usize) -> impl Iterator<Item = &mut Outgoing<E>> {
        let onward = self.outputs[stage].iter_mut().filter_map(Output::edge_mut);
        onward.chain(&mut self.followers[stage])
    }

    /// Puts in the end of an edge, new from its beginning, whose messages are recorded under this generation.
    ///
    /// # Panics
    /// If this rank has no such end.
    pub(super) fn attach(
        &mut self,
        number: usize,
        end: End<E>,
        recorder: &FlightRecorder,
        generation: Generation,
    ) {
        let log = |peer| EdgeLog {
            recorder: recorder.clone(),
            peer,
            generation,
            edge: number as u32,
        };
        match end {
            End::Out(end) => {
                let out = self.outgoing_mut().find(|out| out.number == number);
                let out = out.expect("the edge begins on this rank");
                out.end = Some((end, log(out.peer)));
            }
            End::In(end) => {
                let mut inputs = self.inputs.iter_mut();
                let input = inputs.find(|input| input.number == number);
                let input = input.expect("the edge ends on this rank");
                input.end = Some((end, log(input.peer)));
                input.begin();
                input.is_closed = false;
                input.reports.clear();
            }
        }
    }

    /// Takes out the ends of all edges, and poisons what was sent.
    pub(super) fn detach(&mut self) -> Vec<End<E>> {
        let mut old = Vec::new();
        for out in self.outgoing_mut() {
            out.spare = None;
            out.poison();
            old.extend(out.end.take().map(|(end, _)| End::Out(end)));
        }
        for input in &mut self.inputs {
            old.extend(input.end.take().map(|(end, _)| End::In(end)));
        }
        old
    }

    /// What was sent is given up.
    pub(super) fn abandon(&mut self) {
        self.outgoing_mut().for_each(Outgoing::poison);
    }
}
