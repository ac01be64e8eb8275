//! The inputs and outputs of the stages of one rank: edges to other ranks, and slots that stay here.

use std::collections::VecDeque;

use pp_contract::pipeline::{EdgeKind, Laps};
use pp_contract::{Fault, Lockstep, Pipeline, Rank};
use pp_transport::backend::End;
use pp_transport::edge::{EdgeLocal, EdgeTx, Edges};
use pp_transport::error::TransportError;
use pp_transport::in_flight::InFlight;

use super::Blame;
use crate::core::{LAP, LocalStage, ONWARD, Wire};

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
    /// `None` while the rank at its other end is being replaced.
    pub(super) end: Option<E::Out>,
    /// A slot leased ahead: having it is the credit.
    pub(super) spare: Option<E::Tx>,
    /// Whether payloads go over it.
    has_payloads: bool,
    /// Sends under way; each is given up once it is done.
    pub(super) sendings: VecDeque<InFlight<E::Sending>>,
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
                while let Some(sending) = out.sendings.front()
                    && sending.is_done().map_err(|e| blame.transport("send", e))?
                {
                    // Its slot goes back to the pool, where the lease below finds it.
                    out.sendings.pop_front();
                }
                if let (None, Some(end)) = (&out.spare, &mut out.end) {
                    out.spare = end.try_lease().map_err(failed)?;
                }
            }
            _ => {}
        }
        Ok(())
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
    /// The stage that it leads to, and the input there. To the source come acceptances.
    pub(super) to: (usize, usize),
    /// The stage that sends over it.
    pub(super) maker: usize,
    /// `None` while the rank at its other end is being replaced.
    pub(super) end: Option<E::In>,
    pub(super) lockstep: Lockstep,
    /// Nothing more comes.
    pub(super) is_closed: bool,
    laps: u16,
}

/// All of them. By stage of this rank, the outputs; and the inputs in any order.
pub(super) struct Ports<E: Edges> {
    pub(super) outputs: Vec<[Output<E>; 2]>,
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
                    Wire::Edge(number) => Output::Edge(Outgoing {
                        number,
                        peer: edges[number].target,
                        end: None,
                        spare: None,
                        has_payloads: edges[number].kind != EdgeKind::Accept,
                        sendings: VecDeque::new(),
                    }),
                })
            };
            outputs.push([output(ONWARD)?, output(LAP)?]);
            for input in [ONWARD, LAP] {
                let Wire::Edge(number) = stage.inputs[input] else {
                    continue;
                };
                let maker = edges[number].from;
                // Within a ring a chunk comes once a lap.
                let ring = pipeline.ring_at(maker);
                let ring = ring.filter(|ring| (ring.first..=ring.last).contains(&stage.at));
                let laps = match ring.map(|ring| ring.laps) {
                    None => 1,
                    Some(Laps::Steps) => steps,
                    Some(Laps::Fixed(laps)) => laps,
                };
                inputs.push(Incoming {
                    number,
                    peer: edges[number].source,
                    to: (place, input),
                    maker,
                    end: None,
                    lockstep: Lockstep::with_laps(laps),
                    is_closed: false,
                    laps,
                });
            }
        }
        Ok(Self { outputs, inputs })
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

    pub(super) fn outgoing(&self) -> impl Iterator<Item = &Outgoing<E>> {
        self.outputs
            .iter()
            .flatten()
            .filter_map(|output| match output {
                Output::Edge(out) => Some(out),
                _ => None,
            })
    }

    pub(super) fn outgoing_mut(&mut self) -> impl Iterator<Item = &mut Outgoing<E>> {
        let outputs = self.outputs.iter_mut().flatten();
        outputs.filter_map(|output| match output {
            Output::Edge(out) => Some(out),
            _ => None,
        })
    }

    /// Puts in the end of an edge, new from its beginning.
    ///
    /// # Panics
    /// If this rank has no such end.
    pub(super) fn attach(&mut self, number: usize, end: End<E>) {
        match end {
            End::Out(end) => {
                let out = self.outgoing_mut().find(|out| out.number == number);
                out.expect("the edge begins on this rank").end = Some(end);
            }
            End::In(end) => {
                let mut inputs = self.inputs.iter_mut();
                let input = inputs.find(|input| input.number == number);
                let input = input.expect("the edge ends on this rank");
                input.end = Some(end);
                input.lockstep = Lockstep::with_laps(input.laps);
                input.is_closed = false;
            }
        }
    }

    /// Takes out the ends of all edges, and poisons what was sent.
    pub(super) fn detach(&mut self) -> Vec<End<E>> {
        let mut old = Vec::new();
        for out in self.outgoing_mut() {
            out.spare = None;
            for sending in out.sendings.drain(..) {
                drop(sending.abort());
            }
            old.extend(out.end.take().map(End::Out));
        }
        for input in &mut self.inputs {
            old.extend(input.end.take().map(End::In));
        }
        old
    }

    /// What was sent is given up.
    pub(super) fn abandon(&mut self) {
        for out in self.outgoing_mut() {
            for sending in out.sendings.drain(..) {
                drop(sending.abort());
            }
        }
    }
}
