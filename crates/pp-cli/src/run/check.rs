//! What of a command line is decided before a rank starts: pipeline, kernels and devices.

use pp_command::env::Env;
use pp_command::{KernelChoice, TransportChoice, backend};
use pp_contract::{DeviceName, Pipeline, Rank};
use pp_job::command_line::check_world;
use pp_job::{Config, Error, Job};
use pp_kernels::{Description, KernelSet};

use super::placement::steps;
use super::{devices, input, live, placement};
use crate::args::{CutChoice, RunArgs, check_plugin_args};
use crate::cmd::plugin;

/// A command line that can be run.
#[derive(Clone, Debug)]
pub struct Checked {
    /// The settings of the job's processes. Its devices are those that are named, or that were found; none where each rank
    /// finds its own.
    pub config: Config,
    /// Which stages stand on which ranks.
    pub pipeline: Pipeline,
    /// Most chunks in flight.
    pub depth: u32,
    /// All stages stand on one rank, since this machine has one GPU.
    pub is_on_the_only_gpu: bool,
}

/// Refuses what cannot be run, before anything is started.
///
/// # Errors
/// What is wrong with the command line or the environment, and the remedy.
pub fn check(args: &RunArgs, env: &Env) -> Result<Checked, Error> {
    check_plugin_args(&args.plugin_args)?;
    if args.going_on.skip > 0 && args.cuts == CutChoice::Hard {
        return Err(Error::Usage(
            "--skip gives the bytes of the whole run, and --cuts hard drops frames as they come in time; choose --cuts \
             flush or off"
                .into(),
        ));
    }
    if args.going_on.skip > 0 && args.live.has_gaps() {
        return Err(Error::Usage(
            "--skip gives the bytes of the whole run, and with --late drop or --replay frames are missing; leave --skip out"
                .into(),
        ));
    }
    if args.live.fill.is_some() && !args.live.has_gaps() {
        return Err(Error::Usage(
            "--fill says what the output has in the place of frames that are dropped, and none are; give --late drop or \
             --replay, or leave it out"
                .into(),
        ));
    }
    let started = pp_job::command_line::world(env.lookup());
    let world = started.as_ref().ok().copied().flatten();
    let is_free = args.pipeline.is_none() && args.ranks_named().is_none();
    let is_on_the_only_gpu =
        is_free && matches!(started, Ok(None)) && is_on_the_only_gpu(args, env)?;
    let otherwise = if is_on_the_only_gpu { 1 } else { 2 };
    let pipeline = placement::pipeline(args, world.unwrap_or(otherwise))?;
    backend::check(&args.kernels, args.transport, &args.devices, &pipeline)?;
    placement::check_plugin_args(args, &pipeline)?;
    let has_plugin = args.kernels.has_plugin();
    let judged = || {
        let about = described(args, &pipeline, env)?;
        check_stages(args, &pipeline, &about)?;
        Ok::<_, Error>(about)
    };
    let mut about = (!has_plugin).then(judged).transpose()?;
    if let Some(started) = world {
        let instead = match args.pipeline {
            Some(_) => format!("give a --pipeline of {started} ranks or --ranks {started}"),
            None if args.ranks.is_none() && !args.devices.is_empty() => {
                format!("name {started} devices with --devices")
            }
            None => format!("give --ranks {started}"),
        };
        check_world(started, &pipeline, &instead)?;
    }
    let mut config = match pipeline.world_size().get() {
        // A world that cannot be read is no reason to refuse: one process needs no other.
        1 => Config::alone(env.lookup())?,
        _ => Config::from_env(env.lookup())?,
    };
    input::check_files(args, env, &config, &pipeline)?;
    // A rank of a launcher tells the other ranks, whose machines may have the file.
    if config.launch.is_none() && has_plugin {
        about = Some(judged()?);
    }
    match (&args.devices[..], about) {
        ([], Some(about)) if config.launch.is_none() && args.transport == TransportChoice::Auto => {
            config.devices = found_devices(args, &pipeline, &about);
        }
        // Those of the supervisor, if it has any.
        ([], _) => {}
        (named, _) => config.devices = named.to_vec(),
    }
    let depth = args.depth.unwrap_or(pipeline.default_depth());
    Ok(Checked {
        config,
        pipeline,
        depth,
        is_on_the_only_gpu,
    })
}

/// Says whether a job whose command line and launcher name no ranks has one, on the only GPU of this machine. A rank that
/// is to be started again stands beside that of the source.
fn is_on_the_only_gpu(args: &RunArgs, env: &Env) -> Result<bool, Error> {
    if args.transport != TransportChoice::Auto || args.restarts > 0 {
        return Ok(false);
    }
    for choice in args.kernels.iter() {
        if !describe(choice, env)?.cuda {
            return Ok(false);
        }
    }
    let set = KernelSet::for_host();
    let mut names = set.stages().iter().map(|stage| &*stage.name);
    let are_built_in = args.kernels.has_built_in(&mut names);
    Ok(backend::is_the_only_gpu_usable(are_built_in))
}

/// The devices of ranks of which some can be on the GPUs of this machine, and others not; none where all can, or none.
fn found_devices(args: &RunArgs, pipeline: &Pipeline, about: &[Description]) -> Vec<DeviceName> {
    let ranks = pipeline.world_size().get();
    let are_for_gpus = about.iter().filter(|of| of.cuda).count();
    if ranks == 1 || are_for_gpus == 0 {
        return Vec::new();
    }
    let gpus = backend::gpus().min(ranks);
    if gpus == 0 || gpus == ranks && are_for_gpus == about.len() {
        return Vec::new();
    }
    let devices = devices::mixed(pipeline, about, gpus).unwrap_or_default();
    // The built-in kernels want more of a GPU than a plugin may.
    let runs = |(rank, device): (u32, &DeviceName)| {
        let own = pipeline.stages_at(Rank::new(rank));
        let mut names = own.map(|(_, stage)| &*stage.name);
        match device {
            DeviceName::Cuda(number) if args.kernels.has_built_in(&mut names) => {
                backend::runs_built_in(*number)
            }
            _ => true,
        }
    };
    match (0..).zip(&devices).all(runs) {
        true => devices,
        false => Vec::new(),
    }
}

/// Describes kernels; a plugin is loaded in a process of its own.
fn describe(choice: &KernelChoice, env: &Env) -> Result<Description, Error> {
    backend::find_plugin(choice)?;
    match choice {
        // All that are built in have the same stages.
        KernelChoice::Auto => Ok(Description {
            cuda: true,
            ..KernelSet::for_host().describe().clone()
        }),
        KernelChoice::BuiltIn(set) => Ok(set.describe().clone()),
        KernelChoice::File(path) => plugin::describe(path, env),
    }
}

/// Describes the kernels of each stage.
fn described(args: &RunArgs, pipeline: &Pipeline, env: &Env) -> Result<Vec<Description>, Error> {
    let mut all: Vec<(&str, Description)> = Vec::new();
    for stage in pipeline.stages() {
        let same = all.iter().find(|(name, _)| *name == &*stage.name);
        let about = match same {
            Some((_, about)) => about.clone(),
            None => describe(args.kernels.of(&stage.name), env)?,
        };
        all.push((&stage.name, about));
    }
    Ok(all.into_iter().map(|(_, about)| about).collect())
}

/// Refuses a pipeline that these kernels, of each stage, cannot run.
pub(super) fn check_stages(
    args: &RunArgs,
    pipeline: &Pipeline,
    kernels: &[Description],
) -> Result<(), Error> {
    let is_given = args.pipeline.is_some();
    if args.recompute || args.restarts > 0 {
        placement::check_context(pipeline, kernels)?;
    }
    placement::check(pipeline, kernels, &args.devices, (steps(args), is_given))?;
    live::check_steps(args, pipeline, kernels)
}

impl Checked {
    /// The job of this command line.
    #[must_use]
    pub fn job(&self, args: &RunArgs) -> Job {
        Job::new(&self.config, &self.pipeline)
            .depth(self.depth)
            .restarts(args.restarts)
    }
}
