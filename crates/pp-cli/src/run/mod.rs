//! `pp run`: a video through the stages of a set of kernels, on any ranks.

mod again;
mod check;
mod clean;
mod devices;
mod digests;
mod group;
mod input;
mod kept;
mod kernels;
mod live;
mod middle;
mod notes;
mod on_gpu;
mod on_host;
mod open;
mod placement;
mod progress;
mod report;
mod shape;
mod sink;
mod slots;
mod source;

use std::cell::{OnceCell, RefCell};
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io::IsTerminal as _;
use std::rc::Rc;
use std::time::SystemTime;

use pp_command::KernelChoice;
use pp_command::backend::{self, Backend};
use pp_command::env::Env;
use pp_contract::{DeviceName, Fault, FaultKind, Pipeline, StageSpec, VideoPlan, plan_digest};
use pp_job::command_line::{say, say_aside, signal_name};
use pp_job::output::Shown;
use pp_job::seen::Viewer;
use pp_job::{Error, Finished, Opened, Profile, Program, RANK_0, ThisRank};
use pp_kernels::{ChunkShape, KernelSet, SessionConfig};
use pp_runtime::drift::{Digester as _, Log, Verifier, Verify};
use pp_runtime::stage::StageResult;
use pp_transport::bell::Bell;
use pp_transport::edge::Edges;
use pp_transport::host::{Host, MAX_SLOTS};
use pp_video::origin::Origin;
use pp_video::source::Skip;

use self::check::check_stages;
pub use self::check::{Checked, check};
use self::clean::{CleanFrames, CleanStore};
pub use self::kernels::{Kernels, Memory};
use self::kernels::{Layouts, Opening, failed};
use self::middle::VideoStage;
pub use self::on_gpu::OnGpu;
pub use self::on_host::OnHost;
use self::open::{check_bits, digest_of_kernels, slot_bytes};
use self::placement::steps;
use self::report::Labels;
pub use self::shape::Shape;
use self::sink::VideoSink;
use self::source::{Settings, VideoSource};
use crate::args::{RunArgs, Strength, name_of};

/// Runs the whole job, or this process's rank of it.
pub(crate) fn run(args: &RunArgs, env: &Env) -> Result<(), Error> {
    let checked = check(args, env)?;
    let began = SystemTime::now();
    // Dropped behind the job, so that viewers are told how it ended.
    let mut _serving = None;
    let done = checked.job(args).run(|rank| {
        _serving = args.serve.serve(rank)?;
        let (job, backend) = VideoJob::choose(rank, args, &checked, env)?;
        let profile = job.profile()?;
        match backend {
            Backend::Host => rank.run(Host, profile, job.program(&OnHost)),
            Backend::Gpu(gpu) => {
                let memory = OnGpu {
                    device: gpu.device.clone(),
                };
                rank.run(*gpu, profile, job.program(&memory))
            }
        }
    });
    kept::tell(args, &checked, began);
    done
}

/// A video through its pipeline: the kernels, and what the stages of one rank share.
pub struct VideoJob<'a> {
    args: &'a RunArgs,
    pipeline: &'a Pipeline,
    depth: u32,
    /// Of each stage.
    kernels: Vec<KernelSet>,
    /// What was found and chosen, where that was left to us.
    choice: Option<String>,
    payloads: RefCell<slots::Payloads>,
    /// What decides the bytes of the output, as the profile has it.
    origin: OnceCell<Origin>,
    /// The clean frames of chunks, for a sink beside the source.
    clean: Rc<CleanStore>,
    /// Takes pictures of the video, on rank 0.
    viewer: Option<Viewer>,
}

impl<'a> VideoJob<'a> {
    /// Chooses kernels and a backend for this rank.
    ///
    /// # Errors
    /// There are none that go together, or the kernels cannot run the pipeline. The other ranks are told.
    pub fn choose(
        rank: ThisRank<'_>,
        args: &'a RunArgs,
        checked: &'a Checked,
        env: &Env,
    ) -> Result<(Self, Backend), Error> {
        let pipeline = &checked.pipeline;
        let devices = &checked.config.devices;
        let were_found = args.devices.is_empty() && !devices.is_empty();
        let choice = backend::choose(&args.kernels, args.transport, rank, env);
        let choice = choice.map_err(|error| match error {
            Error::Fault(fault) if were_found => {
                let detail = format!("{}; --transport host runs all ranks on CPUs", fault.detail);
                fault.with_detail(detail).into()
            }
            error => error,
        });
        let has_plugin = args.kernels.has_plugin();
        let choice = choice.and_then(|choice| {
            let about = choice.kernels.iter().map(|set| set.describe().clone());
            let checked = check_stages(args, pipeline, &about.collect::<Vec<_>>());
            match checked {
                // Under a launcher this is known only once the plugin is loaded. A fault is printed once, not by each rank.
                Err(Error::Usage(what)) if has_plugin => {
                    Err(Fault::new(FaultKind::Plugin, rank.rank(), "load kernels", what).into())
                }
                checked => checked.map(|()| choice),
            }
        });
        let mut choice = choice?;
        let is_on_gpu = matches!(choice.backend, Backend::Gpu(_));
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
        let ranks = pipeline.world_size().get();
        let faster = placement::faster(args, devices, ranks, (is_on_gpu, cores));
        if let Some(faster) = faster.filter(|_| rank.rank() == RANK_0 && !has_plugin) {
            say_aside(format!(
                "pp: note: rank 0 is mostly idle in {pipeline}; faster, with the same output: --pipeline \"{faster}\""
            ));
        }
        if were_found {
            let devices = DeviceName::list(devices);
            choice.said = Some(format!(
                "fewer GPUs than ranks, so some ranks are on CPUs, as with --devices {devices}"
            ));
        }
        if let Backend::Gpu(gpu) = &mut choice.backend {
            if let (Some(said), true) = (&mut choice.said, checked.is_on_the_only_gpu) {
                said.push_str(", the only GPU, so all stages are on one rank");
            }
            // Only communicators that do not block can be given up while they are made, when the rank that replaces
            // another one is lost too.
            gpu.blocking = args.restarts == 0;
        }
        let job = Self {
            args,
            pipeline,
            depth: checked.depth,
            kernels: choice.kernels,
            choice: choice.said,
            payloads: RefCell::default(),
            origin: OnceCell::new(),
            clean: Rc::default(),
            viewer: rank.viewer(),
        };
        Ok((job, choice.backend))
    }

    /// What all ranks must have alike.
    ///
    /// # Errors
    /// The file of a plugin cannot be read.
    pub fn profile(&self) -> Result<Profile, Error> {
        let args = self.args;
        let mut profile = Profile::new()
            .set("frames_per_chunk", args.frames_per_chunk)
            .set("denoise_steps", args.denoise_steps)
            .set("strength", format_args!("--strength {}", args.strength))
            .set("cuts", name_of(&args.cuts))
            .set("seed", args.seed)
            .set("add_noise", format_args!("{:?}", args.add_noise));
        for (key, value) in &args.plugin_args {
            profile = profile.set(&format!("plugin_arg {key}"), value);
        }
        // The file of a plugin may be large: it is read once.
        let mut digests = BTreeMap::new();
        for (stage, set) in self.pipeline.stages().iter().zip(&self.kernels) {
            let (about, choice) = (set.describe(), args.kernels.of(&stage.name));
            let digest = match digests.entry((choice.file(), &about.name)) {
                Entry::Occupied(known) => *known.get(),
                Entry::Vacant(new) => *new.insert(digest_of_kernels(choice, about)?),
            };
            let name = format!("{} {}", about.name, about.version);
            profile = profile.kernels(&stage.name, &name, digest);
        }
        // What stands above decides the bytes of the output.
        let settings = profile.settings().iter().cloned();
        let _ = self.origin.set(settings.collect());
        profile.chunks = args.chunks;
        profile.choice.clone_from(&self.choice);
        Ok(profile
            .set("recompute", args.recompute)
            .set("skip", args.going_on.skip)
            .set("verify", args.verify)
            .set("live", format_args!("{:?}", args.live))
            .set(
                "plan_fields",
                format_args!("{:016x}", plan_digest::<VideoPlan>()),
            ))
    }

    fn origin(&self) -> Origin {
        self.origin.get().cloned().unwrap_or_default()
    }

    /// The stages of this rank, on the memory of a backend.
    fn program<'p, M: Memory, B>(
        &'p self,
        memory: &'p M,
    ) -> Program<'p, B, VideoSource<'a, M::Kernels>, Shape>
    where
        B: Edges,
        M::Kernels: Kernels<Tx = B::Tx, Rx = B::Rx, Group = B::Group>,
    {
        let [source, sink] = self.ends();
        let mut program = Program::new(source, move |bell| self.source(memory, bell))
            .payloads(|between, _| self.slot_bytes(between));
        for name in self.between() {
            program = program
                .stage(name, move |part, shape| {
                    self.stage(memory, (part, 0), shape)
                })
                .group_stage(name, move |part, member, shape| {
                    self.stage(memory, (part, member), shape)
                });
        }
        program
            .sink(sink, move |shape, bell| self.sink(memory, shape, bell))
            .finish(|source, finished| source.finish(self, finished))
    }

    /// The names of source and sink.
    #[must_use]
    pub fn ends(&self) -> [&str; 2] {
        let stages = self.pipeline.stages();
        [&stages[0].name, &stages[stages.len() - 1].name]
    }

    /// The names of the stages between source and sink, each once.
    pub fn between(&self) -> impl Iterator<Item = &str> {
        let stages = self.pipeline.stages();
        let names = stages[1..stages.len() - 1].iter().map(|stage| &*stage.name);
        names.collect::<BTreeSet<&str>>().into_iter()
    }

    /// The bytes of a slot for what the first of two stages makes for the second one, on a rank with either of them: what
    /// a stage makes is what the next one gets.
    #[must_use]
    pub fn slot_bytes(&self, between: [&StageSpec; 2]) -> u64 {
        let [from, to] = between.map(|stage| self.place_of(stage));
        slots::bytes(self.pipeline, &self.payloads.borrow(), from, to)
    }

    /// Opens the source, with kernels on this memory.
    ///
    /// # Errors
    /// The input or the kernels cannot be opened.
    pub fn source<M: Memory>(
        &self,
        memory: &M,
        bell: Bell,
    ) -> Result<Opened<VideoSource<'a, M::Kernels>, Shape>, Error> {
        if std::io::stderr().is_terminal() {
            backend::say(self.choice.as_deref());
        }
        let args = self.args;
        let context_frames = self.context_frames();
        // With recompute every payload has its context with it.
        let context_chunks = match args.recompute {
            true => 0,
            false => context_frames.div_ceil(args.frames_per_chunk),
        };
        self.check_slots(context_chunks)?;
        let reader = input::open(args, self.pipeline, self.depth)?;
        let shape = Shape(reader.header.clone());
        let opened = self.opened((0, 0), &shape, memory);
        let encoder = opened.map_err(|error| error.into_fault(RANK_0))?;
        let settings = Settings {
            args,
            context_frames,
            skip: Skip {
                frames: args.going_on.skip,
                context: self.frames_looked_at().into(),
            },
            depth: self.depth,
            origin: self.origin(),
            sink: self.pipeline.sink(),
            is_gap_a_cut: self.is_gap_a_cut(),
            verifier: self.verifier(0),
            log: Log::new(args.verify, self.pipeline),
            clean: Rc::clone(&self.clean),
            viewer: self.viewer.clone(),
        };
        Ok(Opened {
            source: VideoSource::open(reader, encoder, settings, bell)?,
            context_chunks,
            steps: steps(args),
            shape,
            late: args.live.late,
            max_latency: args.live.max_latency,
            steps_range: (args.live.min_steps).map(|least| (least as u16, steps(args))),
        })
    }

    /// Opens a stage between source and sink, or a part of one, for this member of its group; 0 where one rank runs it.
    ///
    /// # Errors
    /// The kernels cannot be opened.
    pub fn stage<M: Memory>(
        &self,
        memory: &M,
        (stage, member): (&StageSpec, usize),
        shape: &Shape,
    ) -> Result<VideoStage<M::Kernels>, Error> {
        let at = self.place_of(stage);
        let opened = self.opened((at, member), shape, memory);
        let generator = opened.map_err(|error| error.into_fault(stage.ranks[member]))?;
        Ok(VideoStage {
            // A fault names it, so it lives as long as the process.
            name: String::leak(stage.name.to_string()),
            spec: stage.clone(),
            laps: self.laps(at),
            generator,
            max_frames: self.args.frames_per_chunk,
            verifier: self.verifier(at),
            layouts: Layouts::default(),
        })
    }

    /// Opens the sink.
    ///
    /// # Errors
    /// The output or the kernels cannot be opened.
    pub fn sink<M: Memory>(
        &self,
        memory: &M,
        shape: &Shape,
        bell: Bell,
    ) -> Result<VideoSink<M::Kernels>, Error> {
        let (args, rank) = (self.args, self.pipeline.sink());
        let at = self.pipeline.stages().len() - 1;
        let opened = self.opened((at, 0), shape, memory);
        let decoder = opened.map_err(|error| error.into_fault(rank))?;
        let clean = match args.add_noise {
            None => None,
            Some(_) if rank == RANK_0 => Some(CleanFrames::Here(Rc::clone(&self.clean))),
            Some(_) => {
                let again = CleanFrames::again(&args.input, shape);
                Some(again.map_err(|error| error.into_fault(rank))?)
            }
        };
        let verifier = self.verifier(at);
        let settings = (args, self.depth, self.viewer.clone());
        // A fault names it, so it lives as long as the process.
        let name = String::leak(self.pipeline.stages()[at].name.to_string());
        let opened = VideoSink::open(
            settings,
            self.origin(),
            shape,
            (name, decoder),
            (verifier, clean),
            bell,
        );
        opened.map_err(|error| error.into_fault(rank).into())
    }

    /// Opens the kernels of a member of stage `at`, and notes how large its payloads are.
    fn opened<M: Memory>(
        &self,
        (at, member): (usize, usize),
        shape: &Shape,
        memory: &M,
    ) -> StageResult<M::Kernels> {
        let (args, spec, header) = (self.args, &self.pipeline.stages()[at], &shape.0);
        check_bits(&spec.name, self.kernels[at].describe(), header)?;
        let (width, height) = (header.width(), header.height());
        let is_between = at > 0 && at + 1 < self.pipeline.stages().len();
        // Source and sink are light: the cores are those of the stages between.
        let threads = if is_between { args.threads } else { 1 };
        let config = SessionConfig {
            threads,
            noise_sigma: match args.strength {
                Strength::Auto => None,
                Strength::Sigma(sigma) => Some(sigma),
            },
            part: spec.part as u32,
            parts: spec.parts as u32,
            member: member as u32,
            members: spec.ranks.len() as u32,
            laps: self.laps(at).into(),
            bits: header.bits(),
            ..SessionConfig::host(width, height, header.chroma(), args.frames_per_chunk)
        };
        let choice = args.kernels.of(&spec.name);
        let mut kernels = memory.open(&Opening {
            kernels: &self.kernels[at],
            // A fault names it, so it lives as long as the process.
            stage: String::leak(spec.name.to_string()),
            config,
            args: &self.plugin_args(spec),
            depth: self.depth,
            blame: match choice {
                KernelChoice::File(_) => FaultKind::Plugin,
                _ => FaultKind::Device,
            },
        })?;
        let room = self.verifier(at).room();
        let mut sizes = Vec::new();
        for lap in 0..self.laps(at) {
            let shape = ChunkShape {
                frames: args.frames_per_chunk,
                steps: args.denoise_steps,
                context_frames: self.context_frames(),
            };
            let layout = kernels.layout(shape, lap);
            let layout = layout.map_err(failed(FaultKind::Plugin, "lay out a chunk"))?;
            let both = [&layout.inputs, &layout.outputs];
            sizes.push(both.map(|of| slot_bytes(of.payload_bytes() + room)));
        }
        let largest = sizes.iter().flatten().max().copied().unwrap_or(0);
        self.payloads.borrow_mut().insert(at, sizes);
        if args.verify != Verify::Off {
            // A stage between source and sink has three of each chunk that it works on.
            let tickets = 4 * self.depth as usize;
            kernels.digester().prepare(largest, tickets)?;
        }
        Ok(kernels)
    }

    /// The arguments of a stage's kernels. A key `STAGE.KEY` is for the plugin of that stage alone, before what all plugins get.
    fn plugin_args(&self, of: &StageSpec) -> Vec<(String, String)> {
        let kernels = &self.args.kernels;
        let stages = self.pipeline.stages();
        let is_stage = |name: &str| stages.iter().any(|stage| &*stage.name == name);
        // The built-in ones take none: those of a plugin are not theirs.
        if kernels.has_plugin() && kernels.of(&of.name).file().is_none() {
            return Vec::new();
        }
        let (mut all, mut own) = (BTreeMap::new(), BTreeMap::new());
        for (key, value) in &self.args.plugin_args {
            match key.split_once('.') {
                Some((stage, key)) if is_stage(stage) => {
                    if stage == &*of.name {
                        own.insert(key.to_owned(), value.clone());
                    }
                }
                _ => {
                    all.insert(key.clone(), value.clone());
                }
            }
        }
        all.append(&mut own);
        all.into_iter().collect()
    }

    /// Most frames of context that a payload carries.
    fn context_frames(&self) -> u32 {
        match self.args.recompute || self.args.restarts > 0 {
            true => self.frames_looked_at(),
            false => 0,
        }
    }

    /// The most frames before a chunk that stages between source and sink look at.
    fn frames_looked_at(&self) -> u32 {
        placement::context_frames(self.kernels.iter().map(KernelSet::describe))
    }

    /// Whether a stage remembers frames and cannot be told that some are missing.
    fn is_gap_a_cut(&self) -> bool {
        let mut stages = self.pipeline.stages().iter().zip(&self.kernels);
        self.args.live.has_gaps()
            && stages.any(|(stage, set)| !set.describe().takes_gaps([&*stage.name]))
    }

    /// Refuses chunks of context for which an edge has no slots.
    fn check_slots(&self, context_chunks: u32) -> Result<(), Error> {
        let slots = self.depth + context_chunks;
        if slots <= MAX_SLOTS {
            return Ok(());
        }
        let what = format!(
            "a depth of {} and {context_chunks} chunks of context for --restarts take {slots} slots, and an edge has \
             {MAX_SLOTS} at most; give a lower --depth, or with --restarts more --frames-per-chunk",
            self.depth
        );
        Err(Fault::new(FaultKind::BadInput, RANK_0, "lay out the edges", what).into())
    }

    /// How often a chunk goes through a stage.
    fn laps(&self, at: usize) -> u16 {
        self.pipeline.laps(at, steps(self.args))
    }

    fn verifier(&self, at: usize) -> Verifier {
        Verifier::new(self.args.verify, self.pipeline, at)
    }

    /// The place of a stage in the pipeline.
    fn place_of(&self, stage: &StageSpec) -> usize {
        let mut stages = self.pipeline.stages().iter();
        let place = stages.position(|of| of == stage);
        place.expect("the stage is one of the pipeline")
    }

    /// What the report calls the parts.
    fn labels(&self, finished: &Finished) -> Labels<'_> {
        let stages = self.pipeline.stages().iter().zip(&self.kernels);
        let mut kernels: Vec<(&str, String)> = stages
            .map(|(stage, set)| {
                let file = self.args.kernels.of(&stage.name).file();
                let name = || set.describe().name.clone();
                let label = file.map_or_else(name, |path| path.display().to_string());
                (&*stage.name, label)
            })
            .collect();
        kernels.dedup();
        let kernels = match kernels.iter().all(|(_, label)| *label == kernels[0].1) {
            true => kernels.swap_remove(0).1,
            false => {
                let each = kernels
                    .iter()
                    .map(|(stage, label)| format!("{stage}={label}"));
                each.collect::<Vec<_>>().join(",")
            }
        };
        Labels {
            args: self.args,
            pipeline: self.pipeline,
            depth: self.depth,
            transport: backend::label(finished.summary.transport, self.pipeline.world_size().get()),
            kernels,
            choice: self.choice.as_deref(),
        }
    }
}

impl<E: Kernels> VideoSource<'_, E> {
    /// Stores and prints the results, on rank 0.
    ///
    /// # Errors
    /// A result cannot be written, or the input was broken or interrupted before its end.
    pub fn finish(self, job: &VideoJob<'_>, finished: Finished) -> Result<(), Error> {
        let args = job.args;
        self.progress.end();
        if finished.interrupted.is_some() && finished.summary.counts.emitted == 0 {
            let what = "interrupted before the first chunk was done; nothing was written";
            return Err(Fault::new(FaultKind::Interrupted, RANK_0, "run", what).into());
        }
        report::publish(&job.labels(&finished), &self, &finished)?;
        let (done, made) = (finished.summary.recorder.totals().frames, self.made.frames);
        let what_became = match &args.output {
            Some(path) => format!("frames were written to {}", Shown::from(&**path)),
            None => "frames were processed".into(),
        };
        if let Some(error) = &self.broken {
            let detail = format_args!("{error}; {made} {what_became}");
            return Err(Fault::new(error.kind(), RANK_0, "read input", detail).into());
        }
        if let Some(signal) = finished.interrupted {
            let (dropped, repeats) = (self.live.kept_up.dropped, args.live.repeats());
            let done = done + if repeats { dropped } else { 0 };
            let is_known = repeats || !args.live.has_gaps();
            let of = self.frames_in_input.filter(|_| is_known);
            // As many of the output for each frame of the input as there are so far.
            let of = of.map(|frames| frames.saturating_mul(made) / done.max(1));
            let of = of.map_or_else(String::new, |frames| format!(" of {frames}"));
            let name = signal_name(signal);
            say(format!(
                "pp: interrupted by {name}: {made}{of} {what_became}"
            ));
        }
        Ok(())
    }
}
