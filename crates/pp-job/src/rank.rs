//! A rank of a job, from its first step to its last chunk.

mod alone;
mod connect;
mod failover;
pub(crate) mod join;
pub(crate) mod parts;
mod restart;

use std::sync::Arc;

use pp_contract::{Generation, Plan};
use pp_runtime::driver::{FrontOptions, run_phase_b};
use pp_runtime::stage::{FrontStages, PhaseBStages};
use pp_transport::backend::Backend;
use pp_transport::bell::Bell;
use pp_transport::link::Link;
use serde::Serialize;
use serde::de::DeserializeOwned;

use self::failover::{Failover, is_worth_a_restart};
use self::join::{JoinError, Member, Profile, join, join_to_abort};
use self::parts::{Finished, FrontPart, PhaseBPart, Ranks};
use crate::error::Error;
use crate::job::ThisRank;
use crate::reports::TargetProcess;
use crate::{FRONT, PHASE_B};

/// The leases of a backend.
type TxOf<B> = <<B as Backend>::Link as Link>::Tx;
type RxOf<B> = <<B as Backend>::Link as Link>::Rx;

impl ThisRank<'_> {
    /// Runs this rank to its end: meets the other rank, compares plan, profile and backend, connects, and runs its
    /// stages.
    ///
    /// # Errors
    /// The first fault of the job, or the error of a closure; the other rank is told.
    pub fn run<B, F, S, T>(
        self,
        mut backend: B,
        profile: Profile,
        ranks: Ranks<
            impl FnOnce(Bell) -> Result<FrontPart<F, T>, Error>,
            impl FnOnce(T) -> Result<PhaseBPart<S>, Error>,
            impl FnOnce(F, Finished) -> Result<(), Error>,
        >,
    ) -> Result<(), Error>
    where
        B: Backend,
        F: FrontStages<TxOf<B>, RxOf<B>>,
        S: PhaseBStages<TxOf<B>, RxOf<B>, Plan = F::Plan>,
        T: Serialize + DeserializeOwned,
    {
        crate::end::at_rest(B::is_at_rest);
        let heartbeat = self.context.config.heartbeat.unwrap_or_default();
        let profile = profile
            .set("heartbeat_ms", heartbeat.as_millis())
            .set("restarts", self.restarts);
        if self.rank() == FRONT {
            let (front, finished) = self.run_front(&mut backend, &profile, ranks.front)?;
            self.context.signals.finished(finished.interrupted);
            return (ranks.finish)(front, finished);
        }
        self.run_phase_b::<B, F::Plan, S, T>(&mut backend, &profile, ranks.phase_b)
    }

    fn run_front<B, F, T>(
        &self,
        backend: &mut B,
        profile: &Profile,
        open: impl FnOnce(Bell) -> Result<FrontPart<F, T>, Error>,
    ) -> Result<(F, Finished), Error>
    where
        B: Backend,
        F: FrontStages<TxOf<B>, RxOf<B>>,
        T: Serialize,
    {
        let (context, launch) = (self.context, self.launch);
        let bell = self.bell()?;
        let join_within =
            |backend: &B, within| join::<F::Plan>(context, launch, backend, profile, within);
        let mut member = match join_within(backend, context.config.meet_within) {
            // It came and went; another may come while the input is looked at.
            Err(JoinError {
                error: Error::Fault(fault),
                is_timeout: false,
                ..
            }) if self.restarts > 0 && is_worth_a_restart(&fault) => None,
            joined => Some(joined.map_err(|failed| failed.error)?),
        };
        if let Some(member) = member.as_ref().filter(|_| self.restarts > 0) {
            member.survive_peer_loss();
        }
        let FrontPart {
            mut stages,
            edges,
            context_chunks,
            shape,
        } = match open(bell.clone()).and_then(|part| part.depth().map(|_| part)) {
            Ok(part) => part,
            Err(error) => {
                return Err(match member {
                    Some(member) => member.give_up(error),
                    None => join_to_abort(launch, error),
                });
            }
        };
        let options = FrontOptions {
            restarts: self.restarts,
            context_chunks,
            ..FrontOptions::new(PHASE_B, edges.down.depth)
        };
        let meet = |generation: Generation, failover: Option<&Arc<Failover>>| {
            let again = || join_within(backend, context.config.rejoin_within);
            let mut member: Member = member.take().map_or_else(again, Ok)?;
            if let Some(failover) = failover {
                member = member.with_failover(generation, failover);
            }
            let pid = member.peer_pid;
            let phase_b = pid.map_or(TargetProcess::Unknown, TargetProcess::This);
            let missed = |error: Error| JoinError {
                phase_b,
                ..error.into()
            };
            if let Err(error) = member.tell_shape(&(generation.get(), &shape)) {
                return Err(missed(member.give_up(error)));
            }
            let ready = member.connect(backend, edges, bell.clone());
            Ok((ready.map_err(missed)?, phase_b))
        };
        let finished = restart::run(context, &mut stages, options, meet)?;
        Ok((stages, finished))
    }

    /// What wakes the driver of this rank.
    fn bell(&self) -> Result<Bell, Error> {
        let made = Bell::new().map_err(anyhow::Error::new);
        made.map_err(|error| self.decline(error.into()))
    }

    fn run_phase_b<B, P, S, T>(
        &self,
        backend: &mut B,
        profile: &Profile,
        open: impl FnOnce(T) -> Result<PhaseBPart<S>, Error>,
    ) -> Result<(), Error>
    where
        B: Backend,
        P: Plan,
        S: PhaseBStages<TxOf<B>, RxOf<B>, Plan = P>,
        T: DeserializeOwned,
    {
        let context = self.context;
        let bell = self.bell()?;
        if self.restarts > 0 {
            backend.load_ahead();
        }
        let within = context.config.meet_within;
        let joined = join::<P>(context, self.launch, backend, profile, within);
        let mut member = joined.map_err(|failed| failed.error)?;
        let (generation, shape): (u32, T) = match member.hear_shape() {
            Ok(heard) => heard,
            Err(error) => return Err(member.give_up(error)),
        };
        let generation = Generation::new(generation);
        member.generation = generation;
        let PhaseBPart { mut stages, edges } = match open(shape) {
            Ok(part) => part,
            Err(error) => return Err(member.give_up(error)),
        };
        let (link, switch, watch) = member.connect(backend, edges, bell)?;
        context.attach(&switch);
        let link = context.flight.record(link, FRONT, generation);
        let result = run_phase_b(link, &mut stages, &switch, FRONT, edges.down.depth);
        watch.close();
        result?;
        Ok(())
    }
}
