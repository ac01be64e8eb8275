//! `pp run`: a video through encode@0 → phase_b@1 → decode@0.

mod again;
mod codec;
mod digests;
mod front;
mod input;
mod noise;
mod on_gpu;
mod on_host;
mod open;
mod phase_b;
mod progress;
mod report;
mod shape;
pub(crate) use self::input::{QUEUE, io_threads};
pub(crate) use self::report::write_pictures;

use std::io::IsTerminal as _;

use pp_contract::{Fault, FaultKind, Rank, VideoPlan, plan_digest};
use pp_device::Device;
use pp_job::{
    Config, Error, FRONT, Finished, FrontPart, Job, PHASE_B, PhaseBPart, Profile, Ranks, ThisRank,
    say, signal_name,
};
use pp_kernels::KernelSet;
use pp_runtime::stage::{FrontStages, PhaseBStages};
use pp_transport::bell::Bell;
use pp_transport::host::{Host, RxLease, TxLease};
use pp_transport::nccl::{DeviceRx, DeviceTx};

use self::codec::{Codec, Generator, Geometry};
use self::front::VideoFront;
use self::on_gpu::{GpuFront, GpuPhaseB, blame};
use self::open::{
    config, digest_of_kernels, host_kernels, kernel_fault, load_for_host, prepared, slot_bytes,
};
use self::phase_b::VideoPhaseB;
use self::report::Labels;
pub use self::shape::Shape;
use crate::args::{KernelChoice, RunArgs};
use crate::backend::{self, Backend};
use crate::env::Env;
use pp_job::output::Shown;

/// Runs the whole job, or this process's rank of it.
pub(crate) fn run(args: &RunArgs, env: &Env) -> Result<(), Error> {
    let Some(config) = check(args, env)? else {
        let config = Config::alone(env.lookup())?;
        let job = VideoJob {
            args,
            kernels: load_for_host(args)?,
            choice: None,
            transport: "none (1 process)".into(),
        };
        return Job::new(&config).run_alone(Ranks {
            front: |bell: Bell| job.front_on_host(bell),
            phase_b: |shape| job.phase_b_on_host(shape, FRONT),
            finish: |front: _, finished| Front::finish(front, &job, finished),
        });
    };
    Job::new(&config).restarts(args.restarts).run(|rank| {
        let (job, backend) = VideoJob::choose(rank, args, env)?;
        let profile = job.profile()?;
        match backend {
            Backend::Host => {
                let ranks = Ranks {
                    front: |bell: Bell| job.front_on_host(bell),
                    phase_b: |shape| job.phase_b_on_host(shape, PHASE_B),
                    finish: |front: _, finished| Front::finish(front, &job, finished),
                };
                rank.run(Host, profile, ranks)
            }
            Backend::Nccl(nccl) => {
                let device = nccl.device.clone();
                let ranks = Ranks {
                    front: |bell: Bell| job.front_on_gpu(&device, bell),
                    phase_b: |shape| job.phase_b_on_gpu(&device, shape),
                    finish: |front: _, finished| Front::finish(front, &job, finished),
                };
                rank.run(*nccl, profile, ranks)
            }
        }
    })
}

/// Refuses what cannot be run. Gives the settings of a job of two ranks; `None` where one process runs all stages.
///
/// # Errors
/// What is wrong with the command line or the environment, and the remedy.
pub fn check(args: &RunArgs, env: &Env) -> Result<Option<Config>, Error> {
    backend::check(&args.kernels, args.transport)?;
    let world = pp_job::world(env.lookup());
    if args.ranks == 1 {
        input::check_files(args, env, None)?;
        if args.restarts > 0 {
            return Err(Error::Usage(
                "--restarts starts the process of Phase B again; leave --ranks 1 out".into(),
            ));
        }
        // A world that cannot be read is no reason to refuse: this process needs no other.
        if let Some(world) = world.ok().flatten().filter(|world| *world > 1) {
            return Err(Error::Usage(format!(
                "--ranks 1 runs everything in one process, and the launcher started {world}, which \
                 would all write the same output; start one, or leave --ranks out"
            )));
        }
        backend::find_plugin(&args.kernels)?;
        return Ok(None);
    }
    let config = Config::from_env(env.lookup())?;
    input::check_files(args, env, Some(&config))?;
    // A rank of a launcher tells its peer, whose machine may have the file.
    if config.launch.is_none() {
        backend::find_plugin(&args.kernels)?;
    }
    Ok(Some(config))
}

/// The shipped pipeline in one process: its kernels, and the parts of both ranks.
pub struct VideoJob<'a> {
    args: &'a RunArgs,
    kernels: KernelSet,
    /// What was found and chosen, where that was left to us.
    choice: Option<String>,
    /// What the report calls the transport.
    transport: String,
}

impl<'a> VideoJob<'a> {
    /// Chooses kernels and a backend for this rank.
    ///
    /// # Errors
    /// There are none that go together. The other rank is told.
    pub fn choose(
        rank: ThisRank<'_>,
        args: &'a RunArgs,
        env: &Env,
    ) -> Result<(Self, Backend), Error> {
        let choice = backend::choose(&args.kernels, args.transport, rank, env);
        let mut choice = choice.map_err(|error| rank.decline(error))?;
        let transport = match &mut choice.backend {
            Backend::Host => "host (shared memory, 2 processes)".into(),
            Backend::Nccl(nccl) => {
                // Only communicators that do not block can be given up while they are made, when the replacement of a
                // Phase B is lost too.
                nccl.blocking = args.restarts == 0;
                format!("nccl {} (2 processes)", nccl.nccl.version())
            }
        };
        let job = Self {
            args,
            kernels: choice.kernels,
            choice: choice.said,
            transport,
        };
        Ok((job, choice.backend))
    }

    /// What both ranks must have alike.
    ///
    /// # Errors
    /// The file of a plugin cannot be read.
    pub fn profile(&self) -> Result<Profile, Error> {
        let (args, about) = (self.args, self.kernels.describe());
        let mut profile = Profile::new()
            .set("depth", args.depth)
            .set("frames_per_chunk", args.frames_per_chunk)
            .set("denoise_steps", args.denoise_steps)
            .set("recompute", args.recompute)
            .set("strength", format_args!("--strength {}", args.strength))
            .set("cuts", format_args!("{:?}", args.cuts))
            .set("seed", args.seed)
            .set("verify", args.verify)
            .set(
                "plan_fields",
                format_args!("{:016x}", plan_digest::<VideoPlan>()),
            );
        profile.chunks = args.chunks;
        profile.kernels = format!("{} {}", about.name, about.version);
        profile.kernels_digest = digest_of_kernels(&args.kernels, about)?;
        profile.choice.clone_from(&self.choice);
        Ok(profile)
    }

    /// The front, with kernels on host memory.
    ///
    /// # Errors
    /// The input, the output or the kernels cannot be opened.
    pub fn front_on_host(
        &self,
        bell: Bell,
    ) -> Result<FrontPart<impl Front<TxLease, RxLease>, Shape>, Error> {
        self.front(bell, |geometry| {
            host_kernels(self.args, &self.kernels, geometry, FRONT, 1)
        })
    }

    /// The front, with kernels on a GPU.
    ///
    /// # Errors
    /// As [`VideoJob::front_on_host`].
    pub fn front_on_gpu(
        &self,
        device: &Device,
        bell: Bell,
    ) -> Result<FrontPart<impl Front<DeviceTx, DeviceRx>, Shape>, Error> {
        let args = self.args;
        self.front(bell, |geometry| {
            let (config, blame) = (config(args, geometry, 1), blame(&args.kernels));
            GpuFront::open(device, &self.kernels, &config, geometry, args.depth, blame)
                .map_err(|e| e.into_fault(FRONT).into())
        })
    }

    fn front<C: Codec>(
        &self,
        bell: Bell,
        open: impl FnOnce(Geometry) -> Result<C, Error>,
    ) -> Result<FrontPart<VideoFront<C>, Shape>, Error> {
        if std::io::stderr().is_terminal() {
            backend::say(self.choice.as_deref());
        }
        let input = input::open(self.args)?;
        let codec = open(Geometry::of(&input.header))?;
        let context_frames = self.kernels.describe().context_frames;
        let front = VideoFront::open(self.args, input, codec, context_frames, bell)?;
        let shape = front.shape;
        Ok(FrontPart {
            edges: shape.edges(self.args.depth),
            context_chunks: front.context_chunks,
            stages: front,
            shape,
        })
    }

    /// Phase B, with kernels on host memory. `rank` is what a fault names.
    ///
    /// # Errors
    /// The kernels cannot be opened.
    pub fn phase_b_on_host(
        &self,
        shape: Shape,
        rank: Rank,
    ) -> Result<PhaseBPart<impl PhaseBStages<TxLease, RxLease, Plan = VideoPlan>>, Error> {
        let (args, geometry) = (self.args, shape.geometry());
        let kernels = host_kernels(args, &self.kernels, geometry, rank, args.threads)?;
        self.phase_b(shape, kernels)
    }

    /// Phase B, with kernels on a GPU.
    ///
    /// # Errors
    /// The kernels cannot be opened.
    pub fn phase_b_on_gpu(
        &self,
        device: &Device,
        shape: Shape,
    ) -> Result<PhaseBPart<impl PhaseBStages<DeviceTx, DeviceRx, Plan = VideoPlan>>, Error> {
        let args = self.args;
        let (config, blame) = (config(args, shape.geometry(), 1), blame(&args.kernels));
        let kernels = GpuPhaseB::open(device, &self.kernels, &config, args.depth, blame);
        self.phase_b(shape, kernels.map_err(|e| e.into_fault(PHASE_B))?)
    }

    fn phase_b<G: Generator>(
        &self,
        shape: Shape,
        generator: G,
    ) -> Result<PhaseBPart<VideoPhaseB<G>>, Error> {
        let args = self.args;
        let generator = prepared(generator, G::digester, args, shape.largest(), PHASE_B)?;
        Ok(PhaseBPart {
            stages: VideoPhaseB::new(generator, args.frames_per_chunk, args.verify),
            edges: shape.edges(args.depth),
        })
    }

    /// What the report calls the parts.
    fn labels(&self) -> Labels<'_> {
        let kernels = match &self.args.kernels {
            KernelChoice::File(path) => path.display().to_string(),
            _ => self.kernels.describe().name.clone(),
        };
        Labels {
            args: self.args,
            transport: &self.transport,
            kernels,
            choice: self.choice.as_deref(),
        }
    }
}

/// The front of the shipped pipeline.
pub trait Front<Tx, Rx>: FrontStages<Tx, Rx, Plan = VideoPlan> + Sized {
    /// Stores and prints the results, on rank 0.
    ///
    /// # Errors
    /// A result cannot be written, or the input was broken or interrupted before its end.
    fn finish(self, job: &VideoJob<'_>, finished: Finished) -> Result<(), Error>;
}

impl<C: Codec> Front<C::Tx, C::Rx> for VideoFront<C> {
    fn finish(mut self, job: &VideoJob<'_>, finished: Finished) -> Result<(), Error> {
        let args = job.args;
        if finished.interrupted.is_some() && finished.summary.counts.emitted == 0 {
            let what = "interrupted before the first chunk was done; nothing was written";
            return Err(Fault::new(FaultKind::Interrupted, FRONT, "run", what).into());
        }
        let written = self.commit()?;
        report::publish(&job.labels(), &self, &finished, written)?;
        let done = written.unwrap_or(finished.summary.recorder.totals().frames);
        let what_became = match &args.output {
            Some(path) => format!("frames were written to {}", Shown::from(&**path)),
            None => "frames were processed".into(),
        };
        if let Some(error) = &self.broken {
            let detail = format_args!("{error}; {done} {what_became}");
            return Err(Fault::new(error.kind(), FRONT, "read input", detail).into());
        }
        if let Some(signal) = finished.interrupted {
            let of = self.frames_in_input;
            let of = of.map_or_else(String::new, |frames| format!(" of {frames}"));
            let name = signal_name(signal);
            say(format!(
                "pp: interrupted by {name}: {done}{of} {what_became}"
            ));
        }
        Ok(())
    }
}
