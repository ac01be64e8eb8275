//! The inbox of a rank: all edges that bring messages from other ranks to its stages.

use std::collections::VecDeque;

use pp_contract::pipeline::{EdgeKind, EdgeSpec};
use pp_contract::{
    Action as Wanted, Fault, FaultKind, Lockstep, MAX_FRAME_BYTES, Message, Pipeline, Plan, Rank,
    StageReport, Stamp,
};
use pp_transport::backend::End;
use pp_transport::edge::{EdgeRx as _, Edges};
use pp_transport::flight::EdgeLog;

use super::blame::Blame;
use super::options::RankOptions;
use super::outbox::has_payloads;
use super::payload::{Payload, post_receive};
use crate::core::{FixedOrder, LAP, LocalStage, ONWARD, TooMany, Wire};
use crate::progress::Doing;
use crate::switch::Switch;

/// Describes an edge from another rank.
pub(super) struct Incoming<E: Edges> {
    number: usize,
    pub(super) peer: Rank,
    /// Tells which kind of message comes over the edge.
    pub(super) kind: EdgeKind,
    /// Names the stage at the end of the edge, and the input there. The source gets acceptances over such an edge, and a
    /// stage that this rank leads gets the reports of the other members.
    pub(super) to: (usize, usize),
    /// Names the stage that made the tensors that the messages describe.
    maker: usize,
    /// Holds this rank's end of the edge, and the log of the edge; `None` while the rank at the other end is being replaced.
    end: Option<(E::In, EdgeLog)>,
    lockstep: Lockstep,
    /// Tells whether the sender has said that nothing more comes.
    is_closed: bool,
    /// Holds the reports of a member that the leader has not used yet, the oldest first.
    pub(super) reports: VecDeque<(Stamp, StageReport)>,
    /// Bounds the payload that a message on this edge may announce: the leader's slot has this many bytes.
    slot_bytes: u64,
    laps: u16,
    /// Lists the chunks of a step in their order of arrival; empty if their numbers rise.
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

    /// Tells whether payloads come over this edge.
    pub(super) fn has_payloads(&self) -> bool {
        has_payloads(self.kind)
    }
}

/// Gives the result of judging a frame, with the stamp of the frame.
pub(super) enum Heard<E: Edges, P: Plan> {
    /// The frame asks for no action now.
    Nothing,
    /// A chunk has arrived for a stage. Its payload is here or still on its way.
    Chunk(Stamp, Message<P>, Payload<E::Receiving>),
    /// The sink has a chunk.
    Accepted(Stamp, Message<P>),
    /// Nothing more comes over this edge.
    Closed(Stamp),
}

/// Gathers the facts that a rank needs to judge a frame.
pub(super) struct Judge<'a> {
    pub(super) options: &'a RankOptions,
    pub(super) places: &'a [LocalStage],
    pub(super) switch: &'a Switch,
    pub(super) blame: Blame,
}

/// Holds all edges from other ranks. Their order has no meaning.
pub(super) struct Inbox<E: Edges> {
    inputs: Vec<Incoming<E>>,
    /// Holds the frame that was copied last.
    frame: Vec<u8>,
    /// Names the input of the frame in `held_frame`, which is taken in later.
    held: Option<usize>,
    held_frame: Vec<u8>,
}

impl<E: Edges> Inbox<E> {
    /// Makes the inputs of these stages. No edge has an end yet.
    pub(super) fn new(pipeline: &Pipeline, stages: &[LocalStage], steps: u16) -> Self {
        let edges: Vec<_> = pipeline.edges().collect();
        let mut inputs = Vec::new();
        for (place, stage) in stages.iter().enumerate() {
            let reports = edges.iter().enumerate().filter(|(_, edge)| {
                let is_within = (edge.from, edge.to) == (stage.at, stage.at);
                stage.followers() > 0 && is_within && edge.kind != EdgeKind::Follow
            });
            let report = |(number, edge)| Incoming::new(number, edge, (place, ONWARD), stage.at, 1);
            inputs.extend(reports.map(report));
            for input in [ONWARD, LAP] {
                let Wire::Edge(number) = stage.inputs[input] else {
                    continue;
                };
                let maker = match edges[number].kind {
                    // The leader sends the output of the previous stage.
                    EdgeKind::Follow => stage.at - 1,
                    _ => edges[number].from,
                };
                // A chunk crosses an edge inside a ring once per lap.
                let ring = pipeline.ring_at(maker);
                let ring = ring.filter(|ring| (ring.first..=ring.last).contains(&stage.at));
                let laps = ring.map_or(1, |_| pipeline.laps(maker, steps));
                let to = (place, input);
                inputs.push(Incoming::new(number, &edges[number], to, maker, laps));
            }
        }
        Self {
            inputs,
            frame: Vec::with_capacity(MAX_FRAME_BYTES),
            held: None,
            held_frame: Vec::with_capacity(MAX_FRAME_BYTES),
        }
    }

    /// Sets the order in which the chunks come.
    pub(super) fn expect(&mut self, order: &FixedOrder, stages: &[LocalStage]) {
        for input in &mut self.inputs {
            input.order = order.arrivals_at(stages[input.to.0].at);
            input.begin();
        }
    }

    /// Returns all edges from other ranks.
    pub(super) fn inputs(&self) -> &[Incoming<E>] {
        &self.inputs
    }

    /// Sets the largest payload that the leader may announce to a member of its group; a message that announces more is
    /// refused. `stage` is the place of the stage among those of the rank.
    pub(super) fn leader_holds(&mut self, stage: usize, slot_bytes: u64) {
        for input in &mut self.inputs {
            if input.kind == EdgeKind::Follow && input.to.0 == stage {
                input.slot_bytes = slot_bytes;
            }
        }
    }

    /// Copies the next frame of an input. Returns false if there is none.
    pub(super) fn poll(&mut self, input: usize, blame: Blame) -> Result<bool, Fault> {
        let Some((end, _)) = &mut self.inputs[input].end else {
            return Ok(false);
        };
        let polled = end.poll_frame(&mut self.frame);
        polled.map_err(|e| blame.transport("receive header", e))
    }

    /// Sets aside the frame that was copied last, or brings it back. Between two calls another frame may be copied and taken
    /// in.
    pub(super) fn swap(&mut self) {
        std::mem::swap(&mut self.frame, &mut self.held_frame);
    }

    /// Keeps the frame that was set aside for later, and notes its input.
    pub(super) fn hold(&mut self, input: usize) {
        self.held = Some(input);
    }

    /// Brings back the frame that was kept, and returns its input.
    pub(super) fn take_held(&mut self) -> Option<usize> {
        let input = self.held.take()?;
        self.swap();
        Some(input)
    }

    /// Judges the frame that was copied last from this input, and posts the receive for its payload.
    pub(super) fn take_in<P: Plan>(
        &mut self,
        input: usize,
        judge: &Judge<'_>,
    ) -> Result<Heard<E, P>, Fault> {
        let port = &mut self.inputs[input];
        let (options, blame) = (judge.options, judge.blame);
        let Some((end, log)) = &mut port.end else {
            return Ok(Heard::Nothing);
        };
        let matched = port.lockstep.admit(&self.frame);
        let matched = matched.map_err(|e| blame.body("receive header", &e))?;
        let header = *matched.header();
        let record = log.hears(&header);
        let stamp = Stamp::of(&header);
        match header.action() {
            Wanted::Infer => {}
            Wanted::Shutdown => {
                port.is_closed = true;
                return Ok(Heard::Closed(stamp));
            }
            Wanted::Noop => return Ok(Heard::Nothing),
        }
        let (pipeline, at) = (&options.pipeline, judge.places[port.to.0].at);
        // The message is judged before the receive is posted, so no payload is received for a bad message.
        let message = match port.kind {
            EdgeKind::Follow => matched.followed(pipeline, at, port.slot_bytes),
            EdgeKind::Report => matched.reported(pipeline, at, port.peer),
            _ => matched.message(pipeline, port.maker),
        };
        let message = message.map_err(|e| blame.body("decode message", &e))?;
        let payload = match port.kind {
            EdgeKind::Report => {
                let depth = options.depth;
                if port.reports.len() >= depth as usize {
                    let chunk = header.chunk_index();
                    return Err(blame.body("receive report", &TooMany { chunk, depth }));
                }
                let report = message.trail().of(pipeline, at).first().copied();
                port.reports.extend(report.map(|report| (stamp, report)));
                return Ok(Heard::Nothing);
            }
            EdgeKind::Accept => return Ok(Heard::Accepted(stamp, message)),
            // The payload stays with the leader.
            EdgeKind::Follow => Payload::None,
            EdgeKind::Onward | EdgeKind::Lap => {
                judge.switch.progress().at(Doing::Receive);
                let payload_moves = options.capabilities.payload_moves;
                post_receive(end, &matched, blame, (record, payload_moves))?
            }
        };
        Ok(Heard::Chunk(stamp, message, payload))
    }

    /// Tells whether every other member of this stage's group has reported on the chunk that is concluded next.
    pub(super) fn have_reported(&self, stage: usize) -> bool {
        let mut inputs = self.inputs.iter();
        inputs.all(|input| !is_report(input, stage) || !input.reports.is_empty())
    }

    /// Appends the reports of the other members of a group to the report of its leader.
    pub(super) fn take_reports<P: Plan>(
        &mut self,
        stage: usize,
        stamp: Stamp,
        mut message: Message<P>,
    ) -> Result<Message<P>, Fault> {
        for input in &mut self.inputs {
            if !is_report(input, stage) {
                continue;
            }
            let (of, report) = input.reports.pop_front().expect("each member has reported");
            if (of.chunk_index, of.attempt) != (stamp.chunk_index, stamp.attempt) {
                let detail = format!(
                    "a report on chunk {} of attempt {} came, that on chunk {} of attempt {} was due",
                    of.chunk_index, of.attempt, stamp.chunk_index, stamp.attempt
                );
                let kind = FaultKind::PeerMisbehaved;
                return Err(Fault::new(kind, input.peer, "receive report", detail));
            }
            message = message.joined(&report);
        }
        Ok(message)
    }

    /// Tells whether more messages can come from this rank.
    pub(super) fn is_open_from(&self, peer: Rank) -> bool {
        let mut inputs = self.inputs.iter();
        inputs.any(|input| input.peer == peer && !input.is_closed)
    }

    /// Attaches the end of a new edge. `log` makes the log of the messages from a rank.
    ///
    /// # Panics
    /// If this rank has no such end.
    pub(super) fn attach(&mut self, number: usize, end: E::In, log: impl FnOnce(Rank) -> EdgeLog) {
        let mut inputs = self.inputs.iter_mut();
        let input = inputs.find(|input| input.number == number);
        let input = input.expect("the edge ends on this rank");
        input.end = Some((end, log(input.peer)));
        input.begin();
        input.is_closed = false;
        input.reports.clear();
    }

    /// Takes out the ends of all edges, and discards the frame that was kept.
    pub(super) fn detach(&mut self) -> impl Iterator<Item = End<E>> {
        self.held = None;
        let inputs = self.inputs.iter_mut();
        inputs.filter_map(|input| input.end.take().map(|(end, _)| End::In(end)))
    }

    /// Tells every edge that its peer takes no part in ending the edge.
    pub(super) fn peers_are_gone(&mut self) {
        let ends = self
            .inputs
            .iter_mut()
            .filter_map(|input| input.end.as_mut());
        ends.for_each(|(end, _)| end.peer_is_gone());
    }
}

/// Tells whether this input brings the reports of a member of the group that this rank leads in this stage.
fn is_report<E: Edges>(input: &Incoming<E>, stage: usize) -> bool {
    input.kind == EdgeKind::Report && input.to.0 == stage
}
