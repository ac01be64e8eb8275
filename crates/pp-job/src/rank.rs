//! A rank of a job, from its first step to its last chunk.

mod connect;
mod failover;
pub(crate) mod join;
mod live;
mod memory;
mod restart;

use std::sync::atomic::Ordering;

use pp_contract::pipeline::EdgeKind;
use pp_contract::{DeviceName, Fault, Pipeline, Plan, Rank, digest};
use pp_runtime::core::{FixedOrder, LiveOptions, Order};
use pp_runtime::driver::{RankOptions, RankRun, Stages};
use pp_runtime::schedule::Runnable;
use pp_runtime::stage::Source;
use pp_transport::backend::{Backend, EdgeEnd};
use pp_transport::bell::Bell;
use pp_transport::edge::Capabilities;
use pp_transport::host::EdgeShape;
use serde::Serialize;
use serde::de::DeserializeOwned;

use self::join::{Briefing, JoinError, JoinedRank, Profile};
use self::memory::Need;
use crate::RANK_0;
use crate::error::{Error, caught};
use crate::job::ThisRank;
use crate::program::{Finished, Opened, Program};
use crate::seen::Viewer;

impl ThisRank<'_> {
    /// Runs this rank to its end: meets the other ranks, compares plan, profile and backend, connects, and runs its
    /// stages.
    ///
    /// # Errors
    /// The first fault of the job, or the error of a closure; the other ranks are told.
    pub fn run<'p, B, S, T>(
        self,
        mut backend: B,
        profile: Profile,
        mut program: Program<'p, B, S, T>,
    ) -> Result<(), Error>
    where
        B: Backend,
        S: Source<B::Tx>,
        S::Plan: 'p,
        T: Serialize + DeserializeOwned,
    {
        let pipeline = &self.job.pipeline;
        crate::end::at_rest(B::is_at_rest);
        program.check(pipeline)?;
        let profile = self.profile(profile);
        let bell = Bell::new().map_err(anyhow::Error::new)?;
        let (joined, briefed) = self.meet::<S::Plan, B, T>(&mut backend, &profile)?;
        let who = format!("rank {}", self.rank());
        let opened = caught(who, || self.open(briefed, &mut program, &bell));
        let (stages, generation, briefing, live) = match opened {
            Ok(opened) => opened,
            Err(error) => return Err(give_up(joined, error)),
        };
        let options = RankOptions {
            tap: self.context.viewer.as_ref().map(Viewer::tap),
            has_failed: B::has_failed_for_all,
            live,
            ..self.options(&briefing, backend.capabilities())
        };
        let shapes = self.shapes(briefing.context_chunks);
        let slot_bytes =
            |from: usize, to: usize| program.slot_bytes(pipeline, [from, to], &briefing.shape);
        let edges = self.edges(&shapes, slot_bytes);
        let of_first = joined.as_ref().filter(|_| generation == 0);
        let checked = self.check_memory(&backend, of_first, &edges, &shapes, slot_bytes);
        let run = checked.and_then(|()| {
            let run = RankRun::new(self.rank(), stages, options, |from, to| {
                backend.local(shapes.local((from, to), slot_bytes(from, to)))
            });
            run.map_err(|error| {
                let text = pp_contract::with_source(&error);
                Fault::new(error.fault_kind(), self.rank(), "lay out the edges", text)
            })
        });
        let mut run: RankRun<'_, B, S> = match run {
            Err(fault) => return Err(give_up(joined, fault.into())),
            Ok(run) => run,
        };
        let behind = pipeline.stages_at(self.rank());
        for (at, _) in behind.filter(|(at, _)| *at > 0) {
            run.leader_holds(at, slot_bytes(at - 1, at));
        }
        let finished = restart::run(
            &self,
            &mut run,
            &mut backend,
            restart::Meeting {
                profile: &profile,
                briefing: &briefing,
                edges: &edges,
                bell: &bell,
                first: joined,
                generation,
                on_device: Vec::new(),
                ahead: Vec::new(),
            },
        )?;
        self.context.signals.finished(finished.interrupted);
        let (source, mut summary) = run.finish();
        // What carried them is known once they are connected.
        summary.transport = backend.capabilities().name;
        match source {
            Some(source) => (program.finish)(
                source,
                Finished {
                    pipeline: pipeline.clone(),
                    summary,
                    restarts: finished.restarts,
                    wall: finished.wall,
                    interrupted: finished.interrupted,
                    shared_devices: std::mem::take(&mut *self.context.lock_shared()),
                    training: self.context.viewer.as_ref().and_then(Viewer::training),
                },
            ),
            None => Ok(()),
        }
    }

    /// How this rank runs, as the job and its source have it.
    fn options<T>(&self, briefing: &Briefing<T>, capabilities: Capabilities) -> RankOptions {
        RankOptions {
            restarts: self.job.restarts,
            context_chunks: briefing.context_chunks,
            steps: briefing.steps,
            order: self.order(),
            flight: self.context.flight.recorder(),
            say: crate::end::say_aside,
            ..RankOptions::new(self.job.pipeline.clone(), self.job.depth, capabilities)
        }
    }

    /// The settings that all ranks must have, with those of the job.
    fn profile(&self, profile: Profile) -> Profile {
        let heartbeat = self.context.config.heartbeat.unwrap_or_default();
        let profile = profile
            .set("heartbeat_ms", heartbeat.as_millis())
            .set("restarts", self.job.restarts)
            .set("depth", self.job.depth)
            .set("pipeline", setting(&self.job.pipeline));
        let profile = match &self.job.devices[..] {
            [] => profile,
            devices => profile.set("devices", of_devices(devices)),
        };
        match &self.job.schedule {
            Some(schedule) => profile.set("schedule", schedule),
            None => profile,
        }
    }

    /// Meets the other ranks for the first time. Gives none of them if one came and went that may be started again.
    fn meet<P: Plan, B: Backend, T: DeserializeOwned>(
        &self,
        backend: &mut B,
        profile: &Profile,
    ) -> Result<(Option<JoinedRank>, Option<Briefed<T>>), Error> {
        self.context.signs.start(backend.memory_probe());
        if self.job.restarts > 0 && self.rank() != RANK_0 {
            backend.load_ahead();
        }
        let within = self.context.config.meet_within;
        loop {
            let joined = join::join::<P, B>(self, backend, profile, within);
            match joined.and_then(|joined| self.hear_briefing(joined)) {
                // It came and went; another may come while the input is looked at.
                Err(JoinError {
                    error: Error::Fault(fault),
                    is_timeout: false,
                    ..
                }) if self.is_worth_a_restart(&fault) => {
                    if self.rank() == RANK_0 {
                        self.context.is_met.store(false, Ordering::Relaxed);
                        return Ok((None, None));
                    }
                }
                // Rank 0 asks for another process of the rank that did not come, and meets all again, or ends the job.
                Err(JoinError {
                    is_dismissed: true, ..
                }) if self.job.restarts > 0 && self.is_supervised() => {}
                briefed => {
                    let (joined, briefed) = briefed.map_err(|failed| failed.error)?;
                    return Ok((Some(joined), briefed));
                }
            }
        }
    }

    /// The shapes of the edges, where the source keeps so many chunks as context for a restart.
    fn shapes(&self, context_chunks: u32) -> Shapes<'_> {
        let keeps = self.job.restarts > 0;
        let schedule = self.job.schedule.as_ref();
        Shapes {
            pipeline: &self.job.pipeline,
            depth: schedule.map_or(self.job.depth, Runnable::depth),
            slots: schedule.map_or(self.job.depth, Runnable::slots),
            keeps,
            context: if keeps { context_chunks } else { 0 },
        }
    }

    /// In which order this rank works.
    fn order(&self) -> Order {
        let schedule = self.job.schedule.as_ref();
        let order = schedule.and_then(|schedule| schedule.orders().get(self.rank().get() as usize));
        order.map_or(Order::Streaming, |order: &FixedOrder| {
            Order::Fixed(order.clone())
        })
    }

    /// What rank 0 tells this rank, if this is another one. From now on the loss of a rank that is started again does not
    /// end this process: all meet again.
    fn hear_briefing<T: DeserializeOwned>(
        &self,
        mut joined: JoinedRank,
    ) -> Result<(JoinedRank, Option<Briefed<T>>), JoinError> {
        if self.job.restarts > 0 {
            joined.survive_loss();
        }
        if self.rank() == RANK_0 {
            return Ok((joined, None));
        }
        match joined.hear_briefing() {
            Ok(briefed) => Ok((joined, Some(briefed))),
            Err(error) => Err(joined.give_up(error).into()),
        }
    }

    /// Opens the stages of this rank: rank 0 its source first, which says what the others must know.
    #[expect(clippy::type_complexity, reason = "values that the caller takes apart")]
    fn open<'p, B, S, T>(
        &self,
        briefed: Option<Briefed<T>>,
        program: &mut Program<'p, B, S, T>,
        bell: &Bell,
    ) -> Result<
        (
            Stages<'p, B::Tx, B::Rx, B::Group, S>,
            u32,
            Briefing<T>,
            LiveOptions,
        ),
        Error,
    >
    where
        B: Backend,
        S: Source<B::Tx>,
        S::Plan: 'p,
        T: Serialize + DeserializeOwned,
    {
        let mut live = LiveOptions::default();
        let (mut stages, generation, briefing) = match briefed {
            Some((generation, briefing)) => (Stages::new(None), generation, briefing),
            None => {
                let open = std::mem::replace(
                    &mut program.source,
                    Box::new(|_| unreachable!("a source is opened once")),
                );
                let Opened {
                    source,
                    context_chunks,
                    steps,
                    shape,
                    late,
                    max_latency,
                    steps_range,
                } = open(bell.clone()).map_err(|error| {
                    let label = self.job.pipeline.stages()[0].label();
                    error.of_opening(self.rank(), &label)
                })?;
                let briefing = Briefing {
                    context_chunks,
                    steps,
                    shape,
                };
                live = LiveOptions {
                    late,
                    max_latency_ns: max_latency.map(|most| most.as_nanos() as u64),
                    steps: steps_range,
                };
                live::check(&self.job.pipeline, self.job.schedule.is_some(), live)?;
                (Stages::new(Some(source)), 0, briefing)
            }
        };
        for (at, stage) in self.job.pipeline.stages_at(self.rank()) {
            if at > 0 {
                let mut members = stage.ranks.iter();
                let member = members.position(|rank| *rank == self.rank());
                let member = member.expect("the stage stands on this rank");
                let opened = program.open((stage, member), &briefing.shape, bell);
                let opened =
                    opened.map_err(|error| error.of_opening(self.rank(), &stage.label()))?;
                stages.push(opened);
            }
        }
        self.check_slots(briefing.steps, |from, to| {
            program.slot_bytes(&self.job.pipeline, [from, to], &briefing.shape)
        })?;
        Ok((stages, generation, briefing, live))
    }

    /// Refuses slots without bytes behind the stages of this rank: a stage would wait for one for ever.
    fn check_slots(
        &self,
        steps: u16,
        slot_bytes: impl Fn(usize, usize) -> u64,
    ) -> Result<(), Error> {
        let stages = self.job.pipeline.stages();
        for (at, from) in self.job.pipeline.stages_at(self.rank()) {
            for (kind, to) in self.job.pipeline.next(at) {
                let is_taken = kind == EdgeKind::Onward || self.job.pipeline.laps(at, steps) > 1;
                if is_taken && from.leader() == self.rank() && slot_bytes(at, to) == 0 {
                    let (from, to) = (from.label(), stages[to].label());
                    return Err(Error::Usage(format!(
                        "{from} -> {to} has no payload slots: call .payloads() with a closure that gives their bytes, 1 \
                         or more"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Refuses slots of this rank that take more than is free on its device, before the first connection. Ranks that share a
    /// device are added up later.
    fn check_memory(
        &self,
        backend: &impl Backend,
        joined: Option<&JoinedRank>,
        edges: &[(Rank, Vec<EdgeEnd>)],
        shapes: &Shapes<'_>,
        slot_bytes: impl Fn(usize, usize) -> u64,
    ) -> Result<(), Fault> {
        let is_alone = joined.is_some_and(JoinedRank::is_alone);
        let Some((device, _)) = backend.device().filter(|_| is_alone) else {
            return Ok(());
        };
        let (own, stages) = (self.rank(), self.job.pipeline.stages());
        let is_led = |at: usize| stages[at].leader() == own;
        let within = (0..stages.len()).filter(|from| is_led(*from));
        let within =
            within.flat_map(|from| self.job.pipeline.next(from).map(move |(_, to)| (from, to)));
        let within = within.filter(|(_, to)| is_led(*to));
        let within =
            within.map(|(from, to)| shapes.local((from, to), slot_bytes(from, to)).bytes());
        let slots = within.fold(memory::bytes_of(edges), u64::saturating_add);
        let need = Need {
            slots,
            free: backend.free_memory(),
            looked_ns: 0,
            is_under_mps: backend.capabilities().is_under_mps,
        };
        memory::check(&device, &[(own, need)])
    }

    /// The ends of all edges between this rank and each other one, in the order in which they are connected: the same
    /// all over the job.
    fn edges(
        &self,
        shapes: &Shapes<'_>,
        slot_bytes: impl Fn(usize, usize) -> u64,
    ) -> Vec<(Rank, Vec<EdgeEnd>)> {
        let own = self.rank();
        let mut by_peer: Vec<(Rank, Vec<EdgeEnd>)> = Vec::new();
        for (number, edge) in self.job.pipeline.edges().enumerate() {
            let (is_sender, peer) = match (edge.source == own, edge.target == own) {
                (true, _) => (true, edge.target),
                (_, true) => (false, edge.source),
                _ => continue,
            };
            let bytes = match edge.kind {
                EdgeKind::Onward | EdgeKind::Lap => slot_bytes(edge.from, edge.to),
                _ => 0,
            };
            let end = EdgeEnd {
                edge: number as u32,
                shape: shapes.of(edge.from, bytes),
                is_sender,
            };
            match by_peer.iter_mut().find(|(known, _)| *known == peer) {
                Some((_, ends)) => ends.push(end),
                None => by_peer.push((peer, vec![end])),
            }
        }
        by_peer.sort_by_key(|(peer, _)| (own.min(*peer), own.max(*peer)));
        by_peer
    }

    /// Says whether another process may take the place of the rank that this fault names.
    fn is_worth_a_restart(&self, fault: &Fault) -> bool {
        self.job.restarts > 0
            && self.job.pipeline.may_restart(fault.rank)
            && fault.kind.is_worth_a_restart()
    }
}

/// Ends the job before it began: tells the ranks why that were met.
fn give_up(joined: Option<JoinedRank>, error: Error) -> Error {
    match joined {
        Some(joined) => joined.give_up(error),
        None => error,
    }
}

/// Which attempt to connect all ranks this is, and what rank 0 tells the others.
type Briefed<T> = (u32, Briefing<T>);

/// The shapes of the edges.
struct Shapes<'a> {
    pipeline: &'a Pipeline,
    depth: u32,
    /// Slots of an edge to another rank; within a rank as many as the depth.
    slots: u32,
    /// The source keeps what it sent.
    keeps: bool,
    /// Chunks whose payloads the source keeps as context.
    context: u32,
}

impl Shapes<'_> {
    /// An edge behind this stage, to another rank.
    fn of(&self, from: usize, slot_bytes: u64) -> EdgeShape {
        debug_assert!(from < self.pipeline.stages().len());
        EdgeShape {
            depth: self.slots + if from == 0 { self.context } else { 0 },
            slot_bytes,
        }
    }

    /// Slots between this stage and the next one on the same rank. They last for the whole run: what the source keeps of
    /// an older attempt is still there while it sends the first chunk again. A stage that is a ring of its own writes into
    /// one of these slots while it reads another one.
    fn local(&self, (from, to): (usize, usize), slot_bytes: u64) -> EdgeShape {
        let slots = self.depth;
        let mut shape = Shapes { slots, ..*self }.of(from, slot_bytes);
        shape.depth += u32::from(from == 0 && self.keeps) + u32::from(from == to);
        shape
    }
}

/// The devices of the ranks as a setting of the handshake.
fn of_devices(devices: &[DeviceName]) -> String {
    let text = DeviceName::list(devices);
    let all = digest(text.as_bytes());
    text_or_digest(text, all, format_args!("{} devices", devices.len()))
}

/// The pipeline as a setting of the handshake.
fn setting(pipeline: &Pipeline) -> String {
    let stages = pipeline.stages().len();
    text_or_digest(
        pipeline.to_string(),
        pipeline.digest(),
        format_args!("{stages} stages"),
    )
}

/// A text as a setting of the handshake, or its digest and what it lists where that is too long.
fn text_or_digest(text: String, digest: u64, lists: std::fmt::Arguments<'_>) -> String {
    match text.len() {
        0..=256 => text,
        _ => format!("{digest:016x} ({lists})"),
    }
}
