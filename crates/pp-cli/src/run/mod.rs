//! `pp run`: a video through encode@0 → phase_b@1 → decode@0.

mod again;
mod codec;
mod front;
mod input;
mod noise;
mod on_gpu;
mod on_host;
mod open;
mod phase_b;
mod progress;
mod report;
mod restart;
mod shape;
pub(crate) use self::input::{QUEUE, io_threads};
pub(crate) use self::report::write_pictures;
mod verify;

use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use pp_contract::{Fault, FaultKind, Generation, Rank, Settings, VideoPlan, plan_digest};
use pp_kernels::Description;
use pp_runtime::driver::{FrontOptions, FrontSummary, run_front, run_phase_b};
use pp_runtime::stage::FrontStages;
use pp_runtime::switch::Switch;
use pp_transport::bell::Bell;
use pp_transport::host::{EdgeShape, HostLink};
use pp_transport::launch::Launch;
use pp_transport::link::Link;

use self::codec::{Codec, Generator, Geometry};
use self::front::VideoFront;
use self::input::Input;
use self::on_gpu::{Blame, GpuFront, GpuPhaseB};
use self::open::{config, host_kernels, kernel_fault, load_for_host, slot_bytes};
use self::phase_b::VideoPhaseB;
use self::report::Finished;
use self::restart::{Met, Missed};
use self::shape::Shape;
use self::verify::{digest_of_kernels, prepared};
use crate::args::{CutChoice, KernelChoice, RunArgs, TransportChoice};
use crate::backend::{self, Backend, Choice};
use crate::exit::{Failure, is_worth_a_restart, say};
use crate::fault::{self, Breakable, Faulty, FaultyFront, FaultyPhaseB, Hook};
use crate::flight;
use crate::job::edges::{Edges, Ready};
use crate::job::reports::Meant;
use crate::job::seat::{Profile, Seat, Unmet, end_with};
use crate::job::survival::Survival;
use crate::job::{
    self, FRONT, GRACE, PHASE_B, heartbeat, meet_within, rejoin_within, restart_within, signals,
};
use crate::video::error::Shown;

impl Shape {
    /// Bytes of the largest slot.
    fn largest(self) -> u64 {
        self.forward_bytes.max(self.backward_bytes)
    }

    fn geometry(self) -> Geometry {
        Geometry {
            width: self.width,
            height: self.height,
            chroma: self.planes,
            frame_bytes: self.frame_bytes as usize,
        }
    }
}

/// Runs the whole job, or this process's rank of it.
pub(crate) fn run(args: &RunArgs) -> Result<(), Failure> {
    input::check_files(args)?;
    backend::check(&args.kernels, args.transport)?;
    if args.ranks == 1 {
        if args.restarts > 0 {
            return Err(Failure::Usage(
                "--restarts starts the process of Phase B again; leave --ranks 1 out".into(),
            ));
        }
        fault::refuse_alone()?;
        alone_in_the_world()?;
        backend::find_plugin(&args.kernels)?;
        signals::start().context("cannot handle signals")?;
        return run_alone(args).and_then(job::unless_interrupted);
    }
    let transport = match (args.transport, &args.kernels) {
        (TransportChoice::Host, _) | (TransportChoice::Auto, KernelChoice::Cpu) => Some("host"),
        (TransportChoice::Nccl, _) | (TransportChoice::Auto, KernelChoice::Ptx) => Some("nccl"),
        (TransportChoice::Auto, _) => None,
    };
    fault::refuse_in_vain(transport, args.recompute, args.cuts == CutChoice::Hard)?;
    // A rank of a launcher tells its peer, whose machine may have the file.
    if job::world()?.is_none() {
        backend::find_plugin(&args.kernels)?;
    }
    job::run_with_restarts(
        args.restarts,
        |launch| run_front_rank(args, launch),
        |launch| run_phase_b_rank(args, launch),
    )
}

/// Refuses to run the whole pipeline once for each process that a launcher started.
fn alone_in_the_world() -> Result<(), Failure> {
    // A world that cannot be read is no reason to refuse: this process needs no other.
    match job::world().ok().flatten() {
        Some(world) if world > 1 => Err(Failure::Usage(format!(
            "--ranks 1 runs everything in one process, and the launcher started {world}, which \
             would all write the same output; start one, or leave --ranks out"
        ))),
        _ => Ok(()),
    }
}

fn run_front_rank(args: &RunArgs, launch: &Launch) -> Result<(), Failure> {
    let Choice {
        kernels,
        backend,
        said,
    } = choose(args, launch)?;
    let about = kernels.describe();
    let seat = match take_seat(args, launch, &backend, about, meet_within()?) {
        // It came and went; another may come while the input is looked at.
        Err(Unmet {
            failure: Failure::Fault(fault),
            is_timeout: false,
        }) if args.restarts > 0 && is_worth_a_restart(&fault) => None,
        seat => {
            let explained = |unmet: Unmet| backend::explain(unmet.failure, launch, said.as_deref());
            Some(seat.map_err(explained)?)
        }
    };
    if let Some(seat) = seat.as_ref().filter(|_| args.restarts > 0) {
        seat.live_on();
    }
    if std::io::stderr().is_terminal() {
        backend::say(said.as_deref());
    }
    let within = rejoin_within()?;
    let again = || take_seat(args, launch, &backend, about, within);
    let end = FrontEnd {
        args,
        about,
        said,
        launch,
        again: &again,
    };
    match &backend {
        Backend::Host => end.run(
            seat,
            "host (shared memory, 2 processes)".into(),
            |geometry| host_kernels(args, &kernels, geometry, FRONT, 1),
            Seat::connect_host,
        ),
        Backend::Gpu(gpu) => end.run(
            seat,
            format!("nccl {} (2 processes)", gpu.nccl.version()),
            |geometry| {
                GpuFront::open(
                    gpu,
                    &kernels,
                    &config(args, geometry, 1),
                    geometry,
                    args.depth,
                    Blame::of(&args.kernels),
                )
                .map_err(|e| e.into_fault(FRONT).into())
            },
            |seat, edges, bell, heartbeat| seat.connect_nccl(gpu, edges, bell, heartbeat),
        ),
    }
}

/// The front of a job of two ranks, wherever its kernels run.
struct FrontEnd<'a> {
    args: &'a RunArgs,
    about: &'a Description,
    said: Option<String>,
    launch: &'a Launch,
    /// Meets another Phase B.
    again: &'a dyn Fn() -> Result<Seat, Unmet>,
}

impl FrontEnd<'_> {
    fn run<C, L>(
        self,
        mut seat: Option<Seat>,
        transport: String,
        open: impl FnOnce(Geometry) -> Result<C, Failure>,
        connect: impl Fn(Seat, Edges, Bell, Option<Duration>) -> Result<Ready<L>, Failure>,
    ) -> Result<(), Failure>
    where
        C: Codec,
        L: Breakable<Tx = C::Tx, Rx = C::Rx>,
    {
        let Self {
            args,
            about,
            said,
            launch,
            again,
        } = self;
        let bell = Bell::new().map_err(anyhow::Error::new)?;
        let prepared = Input::open(args)
            .and_then(|input| Ok((open(input.geometry())?, input)))
            .and_then(|(codec, input)| {
                VideoFront::open(args, input, codec, about.context_frames, bell.clone())
            });
        let mut front = match prepared {
            Ok(front) => front,
            Err(failure) => {
                return Err(match seat {
                    Some(seat) => seat.give_up(failure),
                    None => Seat::decline(launch, failure),
                });
            }
        };
        let (shape, edges) = (front.shape(), front.edges(args.depth));
        let heartbeat = heartbeat()?;
        let meet = |generation: Generation, survival: Option<&Arc<Survival>>| {
            let mut seat = seat.take().map_or_else(again, Ok)?;
            if let Some(survival) = survival {
                seat = seat.surviving(generation, survival);
            }
            let phase_b = seat.peer_pid().map_or(Meant::Unknown, Meant::This);
            let missed = |failure: Failure| Missed {
                unmet: failure.into(),
                phase_b,
            };
            if let Err(failure) = seat.tell_shape(&(generation.get(), shape)) {
                return Err(missed(seat.give_up(failure)));
            }
            let ready = connect(seat, edges, bell.clone(), heartbeat).map_err(missed)?;
            Ok(Met { ready, phase_b })
        };
        let options = front.options(PHASE_B);
        let within = restart_within()?;
        let finished = match Hook::from_env()? {
            None => restart::run(&mut front, options, within, meet, |link, generation| {
                flight::record(link, PHASE_B, generation)
            }),
            Some(hook) => {
                let arm = hook.arm(FRONT, Generation::new(0));
                let mut front = FaultyFront::new(&mut front, &arm);
                restart::run(&mut front, options, within, meet, |link, generation| {
                    let link = Faulty::new(link, &hook.arm(FRONT, generation));
                    flight::record(link, PHASE_B, generation)
                })
            }
        };
        let labels = Labels {
            transport,
            kernels: label(args, about),
            choice: said,
        };
        finish(args, front, finished?, &labels)
    }
}

/// What the report calls the parts that were chosen.
pub(super) struct Labels {
    transport: String,
    kernels: String,
    /// What was found and chosen, where that was left to us.
    choice: Option<String>,
}

fn label(args: &RunArgs, about: &Description) -> String {
    match &args.kernels {
        KernelChoice::File(path) => path.display().to_string(),
        _ => about.name.clone(),
    }
}

fn run_to_the_end<S, L>(
    front: &mut S,
    link: L,
    switch: &Switch,
    peer: Rank,
    depth: u32,
) -> Result<Finished, Failure>
where
    S: FrontStages<L::Tx, L::Rx>,
    L: Link,
{
    signals::attach(switch);
    let start = Instant::now();
    let options = FrontOptions::new(peer, depth);
    let summary: FrontSummary = run_front(link, front, switch, options)?;
    Ok(Finished {
        summary,
        restarts: 0,
        wall: start.elapsed(),
        interrupted: switch.drain_signal(),
    })
}

fn finish<C: Codec>(
    args: &RunArgs,
    mut front: VideoFront<C>,
    finished: Finished,
    labels: &Labels,
) -> Result<(), Failure> {
    signals::finished(finished.interrupted);
    if finished.interrupted.is_some() && finished.summary.counts.emitted == 0 {
        let what = "interrupted before the first chunk was done; nothing was written";
        return Err(Fault::new(FaultKind::Interrupted, FRONT, "run", what).into());
    }
    let written = front.commit()?;
    report::publish(args, &front, &finished, written, labels)?;
    let done = written.unwrap_or(finished.summary.recorder.totals().frames);
    let what_became = match &args.output {
        Some(path) => format!("frames were written to {}", Shown::from(&**path)),
        None => "frames were processed".into(),
    };
    if let Some(error) = front.broken() {
        let detail = format_args!("{error}; {done} {what_became}");
        return Err(Fault::new(error.kind(), FRONT, "read input", detail).into());
    }
    if let Some(signal) = finished.interrupted {
        let of = front.frames_in_input();
        let of = of.map_or_else(String::new, |frames| format!(" of {frames}"));
        let name = signals::name(signal);
        say(format!(
            "pp: interrupted by {name}: {done}{of} {what_became}"
        ));
    }
    Ok(())
}

fn run_phase_b_rank(args: &RunArgs, launch: &Launch) -> Result<(), Failure> {
    let Choice {
        kernels,
        backend,
        said,
    } = choose(args, launch)?;
    let issuer = match &backend {
        Backend::Gpu(gpu) if args.restarts > 0 => gpu.warm_up(),
        _ => None,
    };
    let mut seat = take_seat(args, launch, &backend, kernels.describe(), meet_within()?)
        .map_err(|unmet| backend::explain(unmet.failure, launch, said.as_deref()))?;
    let (generation, shape): (u32, Shape) = seat.hear_shape()?;
    let generation = Generation::new(generation);
    seat.generation = generation;
    seat.issuer = issuer;
    let geometry = shape.geometry();
    match backend {
        Backend::Host => phase_b_rank(
            args,
            shape,
            seat,
            || host_kernels(args, &kernels, geometry, PHASE_B, args.threads),
            Seat::connect_host,
        ),
        Backend::Gpu(gpu) => phase_b_rank(
            args,
            shape,
            seat,
            || {
                GpuPhaseB::open(
                    &gpu,
                    &kernels,
                    &config(args, geometry, 1),
                    args.depth,
                    Blame::of(&args.kernels),
                )
                .map_err(|e| e.into_fault(PHASE_B).into())
            },
            |seat, edges, bell, heartbeat| seat.connect_nccl(&gpu, edges, bell, heartbeat),
        ),
    }
}

/// Phase B of a job of two ranks, wherever its kernels run.
fn phase_b_rank<G, L>(
    args: &RunArgs,
    shape: Shape,
    seat: Seat,
    open: impl FnOnce() -> Result<G, Failure>,
    connect: impl FnOnce(Seat, Edges, Bell, Option<Duration>) -> Result<Ready<L>, Failure>,
) -> Result<(), Failure>
where
    G: Generator,
    L: Breakable<Tx = G::Tx, Rx = G::Rx>,
{
    let generation = seat.generation;
    let prepare = |generator| prepared(generator, G::notary, args, shape.largest(), PHASE_B);
    let generator = match open().and_then(prepare) {
        Ok(generator) => generator,
        Err(failure) => return Err(seat.give_up(failure)),
    };
    let bell = Bell::new().map_err(anyhow::Error::new)?;
    let edges = Edges {
        depth: args.depth,
        forward_depth: shape.forward_slots,
        forward_bytes: shape.forward_bytes,
        backward_bytes: shape.backward_bytes,
    };
    let Ready {
        link,
        switch,
        watch,
    } = connect(seat, edges, bell, heartbeat()?)?;
    signals::attach(&switch);
    let mut stage = VideoPhaseB::new(generator, args.frames_per_chunk, args.verify);
    let result = match Hook::from_env()? {
        None => {
            let link = flight::record(link, FRONT, generation);
            run_phase_b(link, &mut stage, &switch, FRONT, args.depth)
        }
        Some(hook) => {
            let arm = hook.arm(PHASE_B, generation);
            let mut stage = FaultyPhaseB::new(&mut stage, &arm);
            let link = flight::record(Faulty::new(link, &arm), FRONT, generation);
            run_phase_b(link, &mut stage, &switch, FRONT, args.depth)
        }
    };
    watch.close();
    result?;
    Ok(())
}

/// Every stage in this process: the same drivers on two threads.
fn run_alone(args: &RunArgs) -> Result<(), Failure> {
    let kernels = load_for_host(args)?;
    let about = kernels.describe();
    let bell = Bell::new().map_err(anyhow::Error::new)?;
    let input = Input::open(args)?;
    let geometry = input.geometry();
    let codec = host_kernels(args, &kernels, geometry, FRONT, 1)?;
    let mut front = VideoFront::open(args, input, codec, about.context_frames, bell.clone())?;
    let shape = front.shape();
    let generator = host_kernels(args, &kernels, geometry, FRONT, args.threads)?;
    let edge = |slot_bytes| EdgeShape {
        depth: args.depth,
        slot_bytes,
    };
    let (up, down) = (edge(shape.forward_bytes), edge(shape.backward_bytes));
    let (front_link, back_link) =
        HostLink::pair(up, down, bell.clone()).map_err(anyhow::Error::new)?;
    let switch = Switch::new(FRONT, bell).map_err(anyhow::Error::new)?;
    let back_bell = pp_transport::link::Link::bell(&back_link).clone();
    let back_switch = Switch::new(FRONT, back_bell).map_err(anyhow::Error::new)?;
    let finished = std::thread::scope(|scope| {
        let back = scope.spawn(|| {
            let _tell = TellPanic(&switch);
            let mut stage = VideoPhaseB::new(generator, args.frames_per_chunk, args.verify);
            let result = run_phase_b(back_link, &mut stage, &back_switch, FRONT, args.depth);
            if let Err(fault) = &result {
                switch.raise(fault.clone());
            }
            result
        });
        let tell = TellPanic(&back_switch);
        let finished = run_to_the_end(&mut front, front_link, &switch, FRONT, args.depth);
        drop(tell);
        if let Some(fault) = switch.fault() {
            back_switch.raise(fault.clone());
            // As the watchdog does between ranks: a stage that does not come back is left behind.
            let deadline = Instant::now() + GRACE;
            while !back.is_finished() {
                if Instant::now() > deadline {
                    end_with(fault);
                }
                std::thread::sleep(GRACE / 40);
            }
        }
        let _ = back.join();
        finished
    });
    let labels = Labels {
        transport: "none (1 process)".into(),
        kernels: label(args, about),
        choice: None,
    };
    finish(args, front, finished?, &labels)
}

/// Ends the other driver when this thread panics: in one process there is no watchdog between them.
struct TellPanic<'a>(&'a Switch);

impl Drop for TellPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let what = "a thread of the pipeline panicked; its message stands above";
            let fault = Fault::new(FaultKind::Internal, FRONT, "run", what);
            self.0.raise(fault);
        }
    }
}

/// Chooses kernels and transport.
fn choose(args: &RunArgs, launch: &Launch) -> Result<Choice, Failure> {
    let mut choice = backend::choose(&args.kernels, args.transport, launch)
        .map_err(|failure| Seat::decline(launch, failure))?;
    if let Backend::Gpu(gpu) = &mut choice.backend {
        // Only communicators that do not block can be given up while they are made, when a Phase B
        // that has come again goes again.
        gpu.blocking = args.restarts == 0;
    }
    Ok(choice)
}

/// Meets the other rank, with what was chosen before.
fn take_seat(
    args: &RunArgs,
    launch: &Launch,
    backend: &Backend,
    about: &Description,
    within: Duration,
) -> Result<Seat, Unmet> {
    let mut settings = Settings::new();
    let entries = [
        ("depth", args.depth.to_string()),
        ("frames_per_chunk", args.frames_per_chunk.to_string()),
        ("denoise_steps", args.denoise_steps.to_string()),
        ("restarts", args.restarts.to_string()),
        ("recompute", args.recompute.to_string()),
        ("strength", format!("--strength {}", args.strength)),
        ("cuts", format!("{:?}", args.cuts)),
        ("seed", args.seed.to_string()),
        ("verify", args.verify.to_string()),
        (
            "plan_fields",
            format!("{:016x}", plan_digest::<VideoPlan>()),
        ),
        (
            "heartbeat_ms",
            heartbeat()?.map_or(0, |d| d.as_millis()).to_string(),
        ),
    ];
    let entries = entries.map(|(key, value)| (key.to_owned(), value));
    let fault = Hook::from_env()?.map(|hook| ("fault".to_owned(), hook.to_string()));
    let entries = entries.into_iter().chain(fault);
    for (key, value) in entries.chain(backend.settings()) {
        settings.set(&key, value).map_err(anyhow::Error::new)?;
    }
    let profile = Profile {
        settings,
        chunks: args.chunks,
        kernels: format!("{} {}", about.name, about.version),
        kernels_digest: fault::digest_of_kernels(
            digest_of_kernels(&args.kernels, about)?,
            launch.rank(),
        )?,
        device: backend.device(),
    };
    Seat::take_within::<VideoPlan>(launch, profile, within)
}
