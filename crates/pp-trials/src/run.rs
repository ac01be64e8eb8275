//! `pp-trials run`: what `pp run` does, with the fault that PP_FAULT names.

use std::ffi::OsString;
use std::rc::Rc;

use pp_cli::args::{CutChoice, RunArgs};
use pp_cli::{Kernels, Memory, OnGpu, OnHost, Shape, VideoJob, check};
use pp_command::backend::Backend;
use pp_command::env::Env;
use pp_command::{KernelChoice, TransportChoice};
use pp_contract::StageSpec;
use pp_job::{Error, Opened, Program, ThisRank};
use pp_transport::host::Host;

use crate::hook::{Breakable, Faulty, FaultyBackend, Hook, Need, VARIABLE};

/// Runs the whole job, or this process's rank of it, with this fault.
pub(crate) fn run(args: &RunArgs, env: &Env, fault: OsString) -> Result<(), Error> {
    let checked = check(args, env)?;
    let hook = Hook::read(&fault, &checked.pipeline)?;
    refuse_in_vain(hook, args)?;
    let mut _serving = None;
    checked.job(args).run(|rank| {
        _serving = args.serve.serve(rank)?;
        let (job, backend) = VideoJob::choose(rank, args, &checked, env)?;
        let arm = hook.arm(rank.rank(), &checked.pipeline);
        let run = Run {
            rank,
            hook,
            job: &job,
        };
        match backend {
            Backend::Host => run.on(&OnHost, FaultyBackend { inner: Host, arm }),
            Backend::Gpu(gpu) => {
                let device = gpu.device.clone();
                run.on(&OnGpu { device }, FaultyBackend { inner: *gpu, arm })
            }
        }
    })
}

struct Run<'r, 'a> {
    rank: ThisRank<'r>,
    hook: Hook,
    job: &'r VideoJob<'a>,
}

impl Run<'_, '_> {
    /// Runs the stages of this rank, each with the hook.
    fn on<M: Memory, B>(self, memory: &M, backend: FaultyBackend<B>) -> Result<(), Error>
    where
        B: Breakable,
        M::Kernels: Kernels<Tx = B::Tx, Rx = B::Rx, Group = B::Group>,
    {
        let (job, arm) = (self.job, Rc::clone(&backend.arm));
        let mut profile = job.profile()?.set("fault", self.hook);
        for name in job.between().filter(|_| arm.changes_weights()) {
            profile = profile.kernels(name, "changed", 0);
        }
        let [first, last] = job.ends();
        let mut program = Program::new(first, |bell| {
            let opened = job.source(memory, bell)?;
            Ok(Opened {
                source: Faulty::new(opened.source, &arm, 0),
                context_chunks: opened.context_chunks,
                steps: opened.steps,
                shape: opened.shape,
                late: opened.late,
                max_latency: opened.max_latency,
                steps_range: opened.steps_range,
            })
        })
        .payloads(|between, _| job.slot_bytes(between));
        for name in job.between() {
            let open = |part: &StageSpec, member: usize, shape: &Shape| {
                let inner = job.stage(memory, (part, member), shape)?;
                Ok(Faulty::new(inner, &arm, arm.place_of(part)))
            };
            program = program
                .stage(name, move |part, shape| open(part, 0, shape))
                .group_stage(name, open);
        }
        let program = program
            .sink(last, |shape, bell| {
                let inner = job.sink(memory, shape, bell)?;
                Ok(Faulty::new(inner, &arm, arm.last()))
            })
            .finish(|source, finished| source.inner.finish(job, finished));
        self.rank.run(backend, profile, program)
    }
}

/// Refuses a fault that cannot happen in this run. What carries the payloads may not be known yet.
fn refuse_in_vain(hook: Hook, args: &RunArgs) -> Result<(), Error> {
    let has_gpu_kernels = args.kernels.iter().any(|choice| match choice {
        KernelChoice::BuiltIn(set) => set.describe().cuda,
        _ => true,
    });
    let is_met = match hook.need() {
        None => true,
        Some(Need::Nccl) => args.transport != TransportChoice::Host && has_gpu_kernels,
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
