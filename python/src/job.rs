//! A job with this process as rank 0, or as the rank that a launcher or a supervisor made it.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use pp_contract::pipeline::{Laps, Ring};
use pp_contract::{DeviceName, Pipeline, StageSpec};
use pp_job::seen::Viewer;
use pp_job::{Config, Error, Finished, Job, Opened, Profile, Program, ThisRank};
use pp_live::{Live, Serving};
use pp_runtime::core::Late;
use pp_runtime::progress::StuckLimits;
use pp_runtime::stage::StageResult;
use pp_transport::bell::Bell;
use pp_transport::gpu_backend::{GpuBackend, GpuTransport};
use pp_transport::host::Host;
use pp_transport::nccl::NcclBackend;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::error::{Raised, ended};
use crate::flow::Flow;
use crate::group::Member;
use crate::medium::{Medium, OnGpu, OnHost};
use crate::schedule::Schedule;
use crate::source::PySource;
use crate::stages::{Adapter, PyMember, PySink, PyStage};

/// What the package says of a job.
#[derive(FromPyObject)]
pub(crate) struct Terms {
    pipeline: String,
    devices: Vec<String>,
    depth: Option<u32>,
    restarts: u32,
    command: Vec<OsString>,
    number: u32,
    stuck_after: Option<f64>,
    first_after: f64,
    report: Option<PathBuf>,
    timeline: Option<PathBuf>,
    drops: bool,
    max_latency: Option<f64>,
    live: Option<String>,
    live_token_file: Option<PathBuf>,
    schedule: Option<Py<Schedule>>,
    settings: Vec<(String, String)>,
    place: Variables,
}

/// Variables that count instead of those of the environment.
type Variables = Vec<(String, String)>;

/// Chunks, restarts and seconds of a job that is done.
type Summary = (u64, u32, f64);

/// A job that runs.
///
/// The job is aborted if this is dropped before its end.
#[pyclass(frozen, module = "pp_pipeline._native")]
pub(crate) struct Running {
    /// The job, and what ended it.
    job: Mutex<(pp_job::Running, Option<Arc<Error>>)>,
    is_passed_over: bool,
    raised: Raised,
    summary: Arc<Mutex<Option<Summary>>>,
    serving: SharedServing,
    viewer: Arc<OnceLock<Viewer>>,
}

/// Shows the job until its end is known.
type SharedServing = Arc<Mutex<Option<Serving>>>;

#[pymethods]
impl Running {
    /// Waits `seconds`. Returns whether the job is over; raises what ended it, to each who asks.
    fn wait(&self, py: Python<'_>, seconds: f64) -> PyResult<bool> {
        let within = Duration::from_secs_f64(seconds.clamp(0.0, 3600.0));
        let ended = py.detach(|| {
            let (job, error) = &mut *self.lock();
            if error.is_none() {
                match job.wait_for(within)? {
                    Ok(()) => {}
                    Err(ended) => *error = Some(Arc::new(ended)),
                }
            }
            let serving = locked(&self.serving).take();
            drop(serving);
            Some(error.clone())
        });
        match ended {
            None => Ok(false),
            Some(None) => Ok(true),
            Some(Some(error)) => {
                let error = self::ended(&error);
                error.set_cause(py, self.raised.get(py));
                Err(error)
            }
        }
    }

    /// Lets the chunks in flight finish, and ends the job.
    fn drain(&self) {
        self.lock().0.drain();
    }

    /// Ends the job at once.
    fn abort(&self) {
        self.lock().0.abort();
    }

    /// Takes in a step of a job that trains: its loss, and the start and end of its actions in seconds, if they were measured. On
    /// other ranks than 0 it does nothing.
    fn trained(&self, py: Python<'_>, loss: f64, seconds: Vec<f64>) {
        if let Some(viewer) = self.viewer.get() {
            py.detach(|| viewer.trained(loss, &seconds));
        }
    }

    #[getter]
    fn is_passed_over(&self) -> bool {
        self.is_passed_over
    }

    /// Chunks, restarts and seconds, on rank 0 once the job is done.
    #[getter]
    fn summary(&self) -> Option<Summary> {
        *locked(&self.summary)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Running {
    fn lock(&self) -> MutexGuard<'_, (pp_job::Running, Option<Arc<Error>>)> {
        locked(&self.job)
    }
}

fn settings(instead: &Variables) -> PyResult<Config> {
    let given = |name: &str| instead.iter().find(|(known, _)| known == name);
    let value = |name: &str| given(name).map(|(_, value)| value.into());
    Config::from_env(|name| value(name).or_else(|| std::env::var_os(name)))
        .map_err(|error| ended(&error))
}

/// The rank that this process has and the number of all, where it has one.
#[pyfunction]
#[pyo3(signature = (instead = Vec::new()))]
pub(crate) fn place(instead: Variables) -> PyResult<Option<(u32, u32)>> {
    let launch = settings(&instead)?.launch;
    Ok(launch.map(|launch| (launch.rank().get(), launch.world_size().get())))
}

/// The ring of a stage: its first and its last stage, and its laps, if it says them.
type InRing = Option<(usize, usize, Option<u16>)>;

/// The stages of a pipeline, in its order: name, label, part, parts, ranks and ring of each.
#[pyfunction]
#[expect(clippy::type_complexity, reason = "a row of a table")]
pub(crate) fn stages(
    pipeline: &str,
) -> PyResult<Vec<(String, String, usize, usize, Vec<u32>, InRing)>> {
    let pipeline: Pipeline = pipeline.parse().map_err(|error| refused(&error))?;
    let laps = |ring: &Ring| match ring.laps {
        Laps::Steps => None,
        Laps::Fixed(laps) => Some(laps),
    };
    let row = |(at, stage): (usize, &StageSpec)| {
        let ranks = stage.ranks.iter().map(|rank| rank.get()).collect();
        let ring = pipeline.ring_at(at);
        (
            stage.name.to_string(),
            stage.label(),
            stage.part,
            stage.parts,
            ranks,
            ring.map(|ring| (ring.first, ring.last, laps(ring))),
        )
    };
    Ok(pipeline.stages().iter().enumerate().map(row).collect())
}

/// The most chunks in flight of a pipeline, if nothing else is said.
#[pyfunction]
pub(crate) fn default_depth(pipeline: &str) -> PyResult<u32> {
    let pipeline: Pipeline = pipeline.parse().map_err(|error| refused(&error))?;
    Ok(pipeline.default_depth())
}

/// Begins a job. `program` opens source, stages and sink, on the thread that works. On rank 0 the flow leads into the source, and
/// out of the sink where the caller takes its place.
#[pyfunction]
pub(crate) fn begin(
    py: Python<'_>,
    terms: Terms,
    program: Py<PyAny>,
    flow: Flow,
) -> PyResult<Running> {
    let mut config = settings(&terms.place)?;
    if let Some(limits) = &mut config.limits {
        limits.first = seconds_of(terms.first_after);
    }
    if let Some(seconds) = terms.stuck_after {
        let stage = seconds_of(seconds);
        config.limits = (!stage.is_zero()).then(|| StuckLimits {
            stage,
            transport: stage.min(Duration::from_secs(10)),
            first: seconds_of(terms.first_after),
        });
    }
    let pipeline: Pipeline = terms.pipeline.parse().map_err(|error| refused(&error))?;
    let devices: Result<Vec<DeviceName>, _> =
        terms.devices.iter().map(|name| name.parse()).collect();
    let devices = devices.map_err(|error| refused(&error))?;
    let live: Option<Live> = terms
        .live
        .map(|text| {
            let live = text.parse::<Live>();
            live.map_err(|why| PyValueError::new_err(format!("live={text:?}: {why}")))
        })
        .transpose()?;
    let live = live.map(|live| live.token_file(terms.live_token_file.as_deref()));
    let (raised, summary) = (Raised::default(), Arc::new(Mutex::new(None)));
    let serving = SharedServing::default();
    let viewer = Arc::new(OnceLock::new());
    let scheduled = terms.schedule.as_ref().map(|given| &given.get().runnable);
    let mut job = scheduled
        .map_or_else(
            || Job::new(&config, &pipeline),
            |runnable| Job::scheduled(&config, runnable),
        )
        .restarts(terms.restarts)
        .command(&terms.command)
        .number(terms.number);
    if !devices.is_empty() {
        job = job.devices(&devices);
    }
    if let Some(depth) = terms.depth {
        job = job.depth(depth);
    }
    let own = Own {
        program,
        pipeline: pipeline.clone(),
        raised: raised.clone(),
        summary: Arc::clone(&summary),
        report: terms.report,
        timeline: terms.timeline,
        schedule: terms.schedule.as_ref().map(|given| given.clone_ref(py)),
        viewer: Arc::clone(&viewer),
        late: if terms.drops { Late::Drop } else { Late::Block },
        max_latency: terms.max_latency.map(seconds_of),
        settings: terms.settings,
        flow: flow.clone(),
        live,
        serving: Arc::clone(&serving),
    };
    let opened = py.detach(|| {
        job.open_flow(&flow.inner, move |this| {
            let _driver = Driver::begins();
            // A thread that has been attached once is attached again for little.
            Python::attach(|py| own.within(py, this))
                .map_err(|error| Error::Other(own_error(error)))?
        })
    });
    let job = opened.map_err(|error| ended(&error))?;
    Ok(Running {
        is_passed_over: job.is_passed_over(),
        job: Mutex::new((job, None)),
        raised,
        summary,
        serving,
        viewer,
    })
}

/// The drivers of this process that have not come to their end.
static DRIVERS: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

/// A driver of this process.
struct Driver;

impl Driver {
    fn begins() -> Self {
        *Self::count() += 1;
        Self
    }

    fn count() -> MutexGuard<'static, usize> {
        DRIVERS.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        *Self::count() -= 1;
        DRIVERS.1.notify_all();
    }
}

/// Waits, at most `seconds`, until no driver works. Before version 3.14, Python ends a thread by force that wants its lock while
/// the interpreter ends, and the process with it if the thread is in a stage.
#[pyfunction]
pub(crate) fn rest(py: Python<'_>, seconds: f64) {
    py.detach(|| {
        let is_at_work = |count: &mut usize| *count > 0;
        let _ = DRIVERS
            .1
            .wait_timeout_while(Driver::count(), seconds_of(seconds), is_at_work);
    });
}

fn seconds_of(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO)
}

fn refused(error: &dyn std::error::Error) -> PyErr {
    PyValueError::new_err(error.to_string())
}

fn own_error(error: PyErr) -> anyhow::Error {
    anyhow::Error::msg(error.to_string())
}

/// The program of this rank.
struct Own {
    program: Py<PyAny>,
    pipeline: Pipeline,
    raised: Raised,
    summary: Arc<Mutex<Option<Summary>>>,
    report: Option<PathBuf>,
    timeline: Option<PathBuf>,
    schedule: Option<Py<Schedule>>,
    viewer: Arc<OnceLock<Viewer>>,
    late: Late,
    max_latency: Option<Duration>,
    settings: Vec<(String, String)>,
    flow: Flow,
    live: Option<Live>,
    serving: SharedServing,
}

impl Own {
    /// Prepares the thread, and runs the rank there.
    fn within(&self, py: Python<'_>, this: ThisRank<'_>) -> PyResult<Result<(), Error>> {
        let rank = this.rank().get();
        self.program.call_method1(py, "enter", (rank,))?;
        let ran = py.detach(|| self.run(this));
        let left = self.program.call_method1(py, "leave", (rank,));
        if ran.is_ok() {
            left?;
        }
        Ok(ran)
    }

    /// Opens a part of the program; an exception is a fault of this rank.
    fn open<T>(&self, act: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>) -> Result<T, Error> {
        Python::attach(|py| {
            act(self.program.bind(py)).map_err(|error| self.raised.fault(py, "open", error).into())
        })
    }

    /// Runs the rank in the memory of its device.
    fn run(&self, this: ThisRank<'_>) -> Result<(), Error> {
        if let Some(viewer) = this.viewer() {
            if let Some(schedule) = &self.schedule {
                viewer.trains(schedule.get().training());
            }
            if let Some(live) = &self.live {
                *locked(&self.serving) = Some(live.serve(viewer.clone())?);
            }
            let _ = self.viewer.set(viewer);
        }
        let number = match this.device() {
            None | Some(DeviceName::Cpu) => return self.run_on(this, Host, || Ok(OnHost)),
            Some(DeviceName::Cuda(number)) => number,
            Some(DeviceName::NextCuda) => this.gpus_before(),
        };
        let gpu = OnGpu::open(number)?;
        self.open(|program| {
            program
                .call_method1("enter_gpu", (number, gpu.stream.raw()))
                .map(drop)
        })?;
        let backend = NcclBackend::alone(gpu.device.clone());
        let backend = GpuBackend::new(backend, GpuTransport::Best, |_| {});
        self.run_on(this, backend, || Ok(gpu.clone()))
    }

    /// Opens the stage in this place of the pipeline, and this rank as a member of its group.
    fn open_stage<M: Medium>(
        &self,
        at: usize,
        rank: u32,
        medium: M,
    ) -> Result<(Adapter<M>, Py<Member>), Error> {
        self.open(|program| {
            let opened = program.call_method1("open_stage", (at, rank))?;
            let (stage, member): (Bound<'_, PyAny>, Py<Member>) = opened.extract()?;
            let adapter = Adapter::new(&stage, medium, &self.raised)?;
            let ring = self.pipeline.ring_at(at);
            Ok((adapter.in_ring(ring.map(|ring| ring.laps)), member))
        })
    }

    fn run_on<M: Medium>(
        &self,
        this: ThisRank<'_>,
        backend: M::Backend,
        medium: impl Fn() -> StageResult<M>,
    ) -> Result<(), Error> {
        let rank = this.rank().get();
        let place = |stage: &StageSpec| {
            self.pipeline
                .stages()
                .iter()
                .position(|known| known.label() == stage.label())
        };
        let source = |bell: Bell| {
            let medium = medium()?;
            self.open(|program| {
                let opened = program.call_method0("open_source")?;
                let (source, shape, steps, context_chunks): (Bound<'_, PyAny>, _, _, _) =
                    opened.extract()?;
                let adapter = Adapter::new(&source, medium, &self.raised)?;
                let inlet = self.flow.inner.inlet(bell);
                Ok(Opened {
                    source: PySource::new(inlet, adapter, (steps, context_chunks)),
                    context_chunks,
                    steps,
                    shape,
                    late: self.late,
                    max_latency: self.max_latency,
                    steps_range: None,
                })
            })
        };
        let stages = self.pipeline.stages();
        let mut program = Program::<M::Backend, _, _>::new(&stages[0].name, source).payloads(
            |[from, _], bytes: &Vec<u64>| {
                place(from)
                    .and_then(|at| bytes.get(at))
                    .copied()
                    .unwrap_or_default()
            },
        );
        let open_stage =
            |spec: &StageSpec| self.open_stage(place(spec).unwrap_or_default(), rank, medium()?);
        let mut named: Vec<&str> = Vec::new();
        for stage in &stages[1..stages.len() - 1] {
            if named.contains(&&*stage.name) {
                continue;
            }
            named.push(&stage.name);
            program = program
                .stage(&stage.name, |spec, _: &Vec<u64>| {
                    let ahead = VecDeque::new();
                    open_stage(spec).map(|(adapter, _)| PyStage { adapter, ahead })
                })
                .group_stage(&stage.name, |spec, _, _: &Vec<u64>| {
                    open_stage(spec).map(|(adapter, member)| PyMember { adapter, member })
                });
        }
        let sink = |_: &Vec<u64>, bell: Bell| {
            let medium = medium()?;
            let open = |program: &Bound<'_, PyAny>| {
                let opened = program.call_method1("open_sink", (rank,))?;
                let (sink, is_pulled): (Bound<'_, PyAny>, bool) = opened.extract()?;
                Ok((Adapter::new(&sink, medium, &self.raised)?, is_pulled))
            };
            let (adapter, is_pulled) = self.open(open)?;
            if let Some(lent) = &self.flow.lent {
                lent.rings(bell.clone());
            }
            Ok(PySink {
                adapter,
                results: is_pulled.then(|| self.flow.inner.outlet()),
                lent: self.flow.lent.clone().filter(|_| is_pulled),
                lent_so_far: 0,
                bell,
            })
        };
        let program = program
            .sink(&stages[stages.len() - 1].name, sink)
            .finish(|_, finished| self.finish(&finished));
        let set = |profile: Profile, (key, value): &(String, String)| profile.set(key, value);
        let profile = self.settings.iter().fold(Profile::new(), set);
        this.run(backend, profile, program)
    }

    fn finish(&self, finished: &Finished) -> Result<(), Error> {
        if let Some(report) = &self.report {
            finished.write_report(report)?;
        }
        if let Some(timeline) = &self.timeline {
            finished.write_timeline(timeline)?;
        }
        let chunks = finished.summary.recorder.totals().chunks;
        let summary = (chunks, finished.restarts, finished.wall.as_secs_f64());
        *locked(&self.summary) = Some(summary);
        Ok(())
    }
}
