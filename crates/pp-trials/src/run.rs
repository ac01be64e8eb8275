//! `pp-trials run`: what `pp run` does, with the fault that PP_FAULT names.

use std::ffi::OsString;
use std::rc::Rc;

use pp_cli::args::{CutChoice, KernelChoice, RunArgs, TransportChoice};
use pp_cli::backend::Backend;
use pp_cli::env::Env;
use pp_cli::{Front, Shape, VideoJob, check};
use pp_contract::VideoPlan;
use pp_job::{Error, FRONT, Finished, FrontPart, Job, PhaseBPart, Profile, Ranks, ThisRank};
use pp_kernels::Description;
use pp_runtime::stage::PhaseBStages;
use pp_transport::backend::Backend as Connects;
use pp_transport::bell::Bell;
use pp_transport::host::Host;
use pp_transport::link::Link;

use crate::hook::{
    Breakable, Elsewhere, FaultyBackend, FaultyFront, FaultyPhaseB, Hook, Need, VARIABLE,
};

type Tx<B> = <<B as Connects>::Link as Link>::Tx;
type Rx<B> = <<B as Connects>::Link as Link>::Rx;

/// Runs the whole job, or this process's rank of it, with this fault.
pub(crate) fn run(args: &RunArgs, env: &Env, fault: OsString) -> Result<(), Error> {
    let hook = Hook::read(&fault)?;
    let Some(config) = check(args, env)? else {
        return Err(Error::Usage(format!(
            "{VARIABLE} is about two ranks; unset it, or leave --ranks 1 out"
        )));
    };
    refuse_in_vain(hook, args)?;
    Job::new(&config).restarts(args.restarts).run(|rank| {
        let (job, backend) = VideoJob::choose(rank, args, env)?;
        let arm = hook.arm(rank.rank());
        let mut profile = job.profile()?.set("fault", hook);
        profile.kernels_digest ^= u64::from(arm.changes_weights());
        match backend {
            Backend::Host => run_rank(
                rank,
                FaultyBackend { inner: Host, arm },
                profile,
                &job,
                |bell| job.front_on_host(bell),
                |shape| job.phase_b_on_host(shape, rank.rank()),
            ),
            Backend::Nccl(nccl) => {
                let device = nccl.device.clone();
                run_rank(
                    rank,
                    FaultyBackend { inner: *nccl, arm },
                    profile,
                    &job,
                    |bell| job.front_on_gpu(&device, bell),
                    |shape| job.phase_b_on_gpu(&device, shape),
                )
            }
        }
    })
}

fn run_rank<B, F, S>(
    rank: ThisRank<'_>,
    backend: FaultyBackend<B>,
    profile: Profile,
    job: &VideoJob<'_>,
    front: impl FnOnce(Bell) -> Result<FrontPart<F, Shape>, Error>,
    phase_b: impl FnOnce(Shape) -> Result<PhaseBPart<S>, Error>,
) -> Result<(), Error>
where
    B: Connects<Link: Breakable>,
    F: Front<Tx<B>, Rx<B>>,
    S: PhaseBStages<Tx<B>, Rx<B>, Plan = VideoPlan>,
{
    let arm = Rc::clone(&backend.arm);
    if rank.rank() == FRONT {
        let ranks = Ranks {
            front: |bell| {
                let FrontPart {
                    stages: inner,
                    edges,
                    context_chunks,
                    shape,
                } = front(bell)?;
                Ok(FrontPart {
                    stages: FaultyFront { inner, arm },
                    edges,
                    context_chunks,
                    shape,
                })
            },
            phase_b: |_| -> Result<PhaseBPart<Elsewhere>, Error> { unreachable!("another rank") },
            finish: |front: FaultyFront<F>, finished: Finished| front.inner.finish(job, finished),
        };
        return rank.run(backend, profile, ranks);
    }
    let ranks = Ranks {
        front,
        phase_b: |shape| {
            let PhaseBPart {
                stages: inner,
                edges,
            } = phase_b(shape)?;
            Ok(PhaseBPart {
                stages: FaultyPhaseB { inner, arm },
                edges,
            })
        },
        finish: |front: F, finished: Finished| front.finish(job, finished),
    };
    rank.run(backend, profile, ranks)
}

/// Refuses a fault that cannot happen in this run. What carries the payloads may not be known yet.
fn refuse_in_vain(hook: Hook, args: &RunArgs) -> Result<(), Error> {
    let works = |there: fn(&Description) -> bool| match &args.kernels {
        KernelChoice::BuiltIn(set) => there(set.describe()),
        _ => true,
    };
    let is_met = match hook.need() {
        None => true,
        Some(Need::Host) => args.transport != TransportChoice::Nccl && works(|k| k.host),
        Some(Need::Nccl) => args.transport != TransportChoice::Host && works(|k| k.cuda),
        Some(Need::Recompute) => args.recompute,
        Some(Need::HardCuts) => args.cuts == CutChoice::Hard,
    };
    if is_met {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "{VARIABLE}={} cannot strike in this run: it needs {}",
        hook.name(),
        hook.need().map_or("", Need::option)
    )))
}
