//! `pp bench`: measurements of the runtime itself.

mod against;
mod hop;
mod kernels;
mod layout;
mod link;
mod on_gpu;
mod paced;
mod plan;
mod report;
mod simulate;
mod stages;
mod video;

use std::io::Write as _;
use std::time::Duration;

use pp_command::backend::{self, Backend, GpuBackend};
use pp_command::env::Env;
use pp_command::{TransportChoice, print_result, write_pictures};
use pp_contract::Rank;
use pp_contract::pipeline::StageSpec;
use pp_device::Device;
use pp_job::{Config, Error, Finished, Job, Opened, Profile, Program};
use pp_kernels::synthetic::Rate;
use pp_runtime::core::Late;
use pp_runtime::report::{Measures, View};
use pp_transport::host::Host;

use self::against::{Payloads, most_bytes};
pub(crate) use self::kernels::kernels;
use self::layout::{Stages, chunks};
pub(crate) use self::link::link;
use self::on_gpu::{GpuSink, GpuSource, GpuStage};
use self::paced::Paced;
use self::plan::SOURCE;
use self::report::Overlap;
use self::simulate::Work;
pub use self::simulate::{sharpen_timers, sleep_exactly};
use self::stages::{BenchSink, BenchSource};
pub(crate) use self::video::video;
use crate::args::{OverlapArgs, Simulate};
use pp_job::output::one_file_each;

/// Chunks that warm the pipeline up and are not counted, at most.
const WARM_UP: u64 = 50;

/// Runs the whole job, or this process's rank of it.
pub(crate) fn overlap(args: &OverlapArgs, env: &Env) -> Result<(), Error> {
    let (trace, timeline) = (args.trace.as_deref(), args.timeline.as_deref());
    one_file_each(&[], &[("--trace", trace), ("--timeline", timeline)])?;
    check(args)?;
    backend::check_transport(args.transport, &args.devices)?;
    let stages = &Stages::of(args)?;
    let config = Config::from_env(env.lookup())?;
    let job = Job::new(&config, &stages.pipeline)
        .depth(stages.depth)
        .devices(&args.devices);
    job.run(|rank| {
        let payloads = Payloads::of(args)?;
        let (backend, choice) = backend::choose_transport(args.transport, rank, env)?;
        let is_first = rank.rank() == Rank::new(0);
        if is_first {
            backend::say(choice.as_deref());
        }
        // What the stages do with their time in this memory. A rank in host memory beside GPUs cannot do their work.
        let how = match (&backend, args.simulate) {
            (Backend::Host, None | Some(Simulate::GpuSpin | Simulate::Gemm | Simulate::Hbm)) => {
                Simulate::Sleep
            }
            (Backend::Gpu(_), None | Some(Simulate::Spin)) => Simulate::GpuSpin,
            (_, Some(how)) => how,
        };
        let mut profile = Profile::new()
            .set("bytes", args.bytes)
            .set("against", format_args!("{:?}", args.against))
            .set("touch", args.touch)
            .set("simulate", format_args!("{:?}", args.simulate));
        // A setting has a bound, and there may be many stages.
        for (at, ms) in stages.ms.chunks(8).enumerate() {
            profile = profile.set(&format!("stages_ms {at}"), format_args!("{ms:?}"));
        }
        profile.chunks = Some(chunks(args, stages));
        profile.choice = choice;
        let core_hop_us = is_first.then(hop::core_hop_us).flatten();
        let run = Run {
            args,
            stages,
            how,
            core_hop_us,
        };
        match backend {
            Backend::Host => {
                simulate::sharpen_timers();
                rank.run(Host, profile, run.on_host(payloads))
            }
            Backend::Gpu(gpu) => {
                let program = run.on_gpus(payloads, gpu.device.clone(), rank.rank());
                rank.run(*gpu, profile, program)
            }
        }
    })
}

/// What the programs on the host and on GPUs have in common.
#[derive(Clone, Copy)]
struct Run<'a> {
    args: &'a OverlapArgs,
    stages: &'a Stages,
    how: Simulate,
    core_hop_us: Option<f64>,
}

impl<'a> Run<'a> {
    /// The names of the stages behind the source; the last is the sink.
    fn names(self) -> (Vec<String>, String) {
        let last = self.stages.ms.len() - 1;
        let names = (1..last).map(|at| format!("s{at}"));
        (names.collect(), format!("s{last}"))
    }

    fn first_and_last(self) -> [&'a StageSpec; 2] {
        let stages = self.stages.pipeline.stages();
        [&stages[0], &stages[stages.len() - 1]]
    }

    fn on_host(self, payloads: Payloads) -> Program<'a, Host, BenchSource, ()> {
        let (args, stages) = (self.args, self.stages);
        let work = move |stage: &StageSpec| Work::new(self.how, stages.time_of(stage));
        let [first, last] = self.first_and_last();
        let (names, sink) = self.names();
        let program = Program::new(SOURCE, move |bell| {
            let left = chunks(args, stages);
            let paced = args.per_second.map(|rate| Paced::start(rate, left, bell));
            let mut opened = Opened::new(BenchSource {
                payloads,
                left,
                work: work(first),
                touch: args.touch,
                paced: paced.transpose().map_err(anyhow::Error::new)?,
                skipped: 0,
            });
            if args.per_second.is_some() {
                opened.late = Late::Drop;
            }
            let most = args
                .max_latency_ms
                .map(|ms| Duration::from_secs_f64(ms / 1e3));
            opened.max_latency = most;
            Ok(opened)
        });
        let mut program = program.payloads(move |_, ()| most_bytes(args));
        for name in &names {
            program = program.stage(name, move |stage, ()| {
                Ok(stages::between(work(stage), args.touch))
            });
        }
        let open = move |(): &(), _| Ok(BenchSink::new(work(last), args.touch));
        let program = program.sink(&sink, open);
        program.finish(move |_, finished| self.publish(&finished, None))
    }

    fn on_gpus(
        self,
        payloads: Payloads,
        on: Device,
        rank: Rank,
    ) -> Program<'a, GpuBackend, GpuSource, ()> {
        let (args, stages) = (self.args, self.stages);
        let open = move |stage: &StageSpec| {
            let time = stages.time_of(stage);
            let opened = GpuStage::open(&on, self.how, time, stages.depth);
            let opened = opened.map_err(|error| Error::from(error.into_fault(rank)))?;
            tell_load(&format!("{} on rank {rank}", stage.name), &opened);
            Ok::<_, Error>(opened)
        };
        let [first, last] = self.first_and_last();
        let (names, sink) = self.names();
        let source = open.clone();
        let program = Program::new(SOURCE, move |_| {
            let chunks = chunks(args, stages);
            Ok(Opened::new(GpuSource::new(
                payloads,
                chunks,
                source(first)?,
            )))
        });
        let mut program = program.payloads(move |_, ()| most_bytes(args));
        for name in &names {
            let open = open.clone();
            program = program.stage(name, move |stage, ()| open(stage));
        }
        let program = program.sink(&sink, move |(), _| Ok(GpuSink(open(last)?)));
        program.finish(move |source: GpuSource, finished| {
            self.publish(&finished, source.memory_grown())
        })
    }
}

/// Refuses work that cannot be done where the payloads lie.
fn check(args: &OverlapArgs) -> Result<(), Error> {
    against::check(args)?;
    paced::check(args)?;
    let refuse = |what: &str| Err(Error::Usage(what.into()));
    let of_gpus = TransportChoice::OF_GPUS;
    match (args.transport, args.simulate) {
        (TransportChoice::Host, Some(Simulate::GpuSpin | Simulate::Gemm | Simulate::Hbm)) => {
            refuse(&format!(
                "this work is done on GPUs; use it with --transport {of_gpus}, or --simulate sleep or spin"
            ))
        }
        (gpus, Some(Simulate::Spin))
            if gpus.is_on_gpus() && args.devices.iter().all(|device| device.is_gpu()) =>
        {
            refuse(
                "--simulate spin keeps a core busy, and no rank is on a CPU; use gpu-spin, gemm, hbm or sleep, or name a cpu in \
                 --devices",
            )
        }
        (gpus, _) if gpus.is_on_gpus() && args.touch => {
            refuse("--touch writes and reads host memory; use it with --transport host")
        }
        (TransportChoice::Auto, _) if args.touch || args.simulate.is_some() => refuse(&format!(
            "--simulate and --touch depend on where payloads lie; say --transport host, {of_gpus}"
        )),
        _ => Ok(()),
    }
}

/// Says what one piece of simulated work takes on this GPU.
fn tell_load(who: &str, stage: &GpuStage) {
    if let Some(calibration) = &stage.calibration {
        // If standard error is closed, the line is lost.
        let _ = writeln!(
            std::io::stderr(),
            "pp: {who}: {:.1} µs of work asked for, {:.1} µs achieved in {} kernels{}",
            calibration.target.as_secs_f64() * 1e6,
            calibration.achieved.as_secs_f64() * 1e6,
            calibration.repetitions,
            match calibration.rate {
                Some(Rate::BytesPerSecond(rate)) => format!(" at {:.0} GB/s", rate / 1e9),
                Some(Rate::FlopsPerSecond(rate)) => format!(" at {:.0} TFLOP/s", rate / 1e12),
                None => String::new(),
            }
        );
    }
}

impl Run<'_> {
    fn publish(
        self,
        finished: &Finished,
        device_memory_grown_bytes: Option<i64>,
    ) -> Result<(), Error> {
        let (args, stages) = (self.args, self.stages);
        let recorder = &finished.summary.recorder;
        let warm_up = WARM_UP.min(recorder.totals().chunks / 4);
        let mut measures = Measures::of(recorder, warm_up, &[]);
        if stages.longest_ms() == 0.0 {
            measures.forget_work();
        }
        let result = Overlap {
            args,
            stages,
            transport: finished.summary.transport,
            how: self.how,
            measures,
            against: args
                .against
                .and_then(|bytes| against::against(bytes, recorder.records())),
            core_hop_us: self.core_hop_us,
            device_memory_grown_bytes,
        };
        let view = View {
            title: format!(
                "pp bench overlap, {} of {} ms, {} bytes, depth {}",
                stages.pipeline,
                result.asked_ms(),
                args.bytes,
                stages.depth
            ),
            ..View::default()
        };
        write_pictures(
            args.trace.as_deref(),
            args.timeline.as_deref(),
            recorder,
            &result.measures,
            &view,
        )?;
        print_result(&result, args.json)
    }
}
