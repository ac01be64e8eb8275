//! The figures of a running job, for any thread that asks.
//!
//! Hazard: a viewer slows the job, or waits for a driver that is stuck. Guarantee: the driver gives each record away with one
//! `try_send`, and no viewer holds a lock that a driver or a watchdog takes for longer than an assignment.
//!
//! Choices: the records wait in a bounded queue until a viewer asks, or a thread empties it. Figures are computed only when a
//! viewer asks.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;
use std::{fmt, io};

use pp_contract::{Fault, Pipeline, Rank};
use pp_runtime::clock::now_ns;
use pp_runtime::driver::Tap;
use pp_runtime::report::{
    ChunkRecord, Measures, Recorder, Restart, Training, default_warm_up, write_json,
};
use pp_runtime::switch::Switch;
use pp_transport::control::Vitals;
use serde::Serialize;

use super::look::{self, Facts};
use super::snapshot::{AboutJob, HowEnded, JobState, Snapshot, Thumb, Thumbnail, TrainingView};
use super::vitals::{Signs, lock};
use crate::error::Error;
use crate::shared::SharedDevice;

/// Records that wait for a look: [`DRAINED_EVERY`](crate::times::DRAINED_EVERY) at 20,000 chunks a second.
const QUEUE: usize = 2_048;
/// Records that the report so far has.
const KEPT: usize = 1_024;
/// Records that medians of a snapshot are over.
const RECENT: usize = 128;

/// Shows a running job; on its rank 0. Clones show the same job, also after its end.
#[derive(Clone)]
pub struct Viewer(Arc<Inner>);

struct Inner {
    about: AboutJob,
    pipeline: Arc<Pipeline>,
    /// Of each rank, where the job names it.
    devices: Vec<String>,
    started_ns: u64,
    tap: Tap,
    /// Held while figures are computed: no driver and no watchdog takes it.
    window: Mutex<Window>,
    /// Held for assignments alone.
    life: Mutex<Life>,
    ended: OnceLock<(HowEnded, Option<Fault>, u64)>,
    /// How many look.
    watching: AtomicU32,
    /// Those of rank 0.
    signs: Signs,
    /// Held for assignments alone.
    thumbnails: Mutex<[Option<Arc<Thumbnail>>; 2]>,
    /// Held by those who look, and by the program between two steps.
    training: Mutex<Option<Training>>,
    /// When each was set last.
    pictured_ns: [AtomicU64; 2],
}

/// The records that were taken from the queue.
struct Window {
    records: Receiver<ChunkRecord>,
    kept: Recorder,
    recent: Recorder,
}

/// What changes with the generations of a job.
#[derive(Default)]
struct Life {
    is_connected: bool,
    /// The switch of the driver that runs now.
    switch: Option<Switch>,
    /// Losses that are not listed any more.
    forgotten: u64,
    restarts: Vec<Restart>,
    shared: Vec<SharedDevice>,
    /// What each rank said last, and when.
    vitals: BTreeMap<Rank, (Vitals, u64)>,
}

/// The job counts as watched as long as this value lives ([`Viewer::watch`]).
///
/// # If dropped
/// If no other one is left, pictures and vital signs stop.
#[derive(Debug)]
pub struct Watching(Viewer);

impl Viewer {
    pub(crate) fn new(
        about: AboutJob,
        pipeline: &Pipeline,
        devices: Vec<String>,
        signs: Signs,
    ) -> Self {
        let (tap, records) = Tap::new(QUEUE);
        let pipeline = Arc::new(pipeline.clone());
        Self(Arc::new(Inner {
            about,
            devices,
            started_ns: now_ns(),
            tap,
            window: Mutex::new(Window {
                records,
                kept: Recorder::with_capacity(Arc::clone(&pipeline), KEPT),
                recent: Recorder::with_capacity(Arc::clone(&pipeline), RECENT),
            }),
            life: Mutex::default(),
            ended: OnceLock::new(),
            watching: AtomicU32::new(0),
            signs,
            thumbnails: Mutex::default(),
            training: Mutex::default(),
            pictured_ns: Default::default(),
            pipeline,
        }))
    }

    /// What is run, and where.
    #[must_use]
    pub fn about(&self) -> &AboutJob {
        &self.0.about
    }

    /// The figures of the job now. Computes them, and waits only for other threads that ask for figures of this job.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let window = self.drained();
        let mut facts = self.facts();
        facts.training = lock(&self.0.training).as_ref().map(TrainingView::from);
        look::snapshot(&facts, &window.kept, &window.recent)
    }

    /// The report so far, as docs/report.md has it, of the latest 1,024 chunks. Its `run` is that of a library's report, and has
    /// `pp_version`, `state` and `lost_records`, too.
    ///
    /// # Errors
    /// What `out` returns.
    pub fn write_report(&self, mut out: impl io::Write) -> io::Result<()> {
        #[derive(Serialize)]
        struct SoFar<'a> {
            pp_version: &'a str,
            state: JobState,
            restarts: u64,
            wall_ms: f64,
            shared_devices: &'a [SharedDevice],
            interrupted_by: Option<u8>,
            lost_records: u64,
        }
        let window = self.drained();
        let facts = self.facts();
        let run = SoFar {
            pp_version: &facts.about.pp_version,
            state: facts.state,
            restarts: facts.forgotten + facts.restarts.len() as u64,
            wall_ms: facts.now_ns.saturating_sub(facts.started_ns) as f64 / 1e6,
            shared_devices: &facts.shared,
            interrupted_by: self.drain_signal(),
            lost_records: facts.lost_records,
        };
        let warm_up = default_warm_up(window.kept.totals().chunks);
        let mut measures = Measures::of(&window.kept, warm_up, &facts.restarts);
        measures.training = self.training().map(|training| training.measures());
        let mut report = Vec::new();
        write_json(&mut report, &run, &measures, &window.kept)?;
        // A writer that waits must hold up nobody else who looks.
        drop(window);
        out.write_all(&report)
    }

    /// The job is looked at as long as the value lives: pictures are made, and the other ranks send vital signs.
    #[must_use]
    pub fn watch(&self) -> Watching {
        let life = lock(&self.0.life);
        if self.0.watching.fetch_add(1, Ordering::Relaxed) == 0 {
            self.ask(&life);
        }
        drop(life);
        Watching(self.clone())
    }

    /// Says whether the job is watched.
    #[must_use]
    pub fn is_watched(&self) -> bool {
        self.0.watching.load(Ordering::Relaxed) > 0
    }

    /// Says whether a picture is wanted: the job is watched, and the last picture is a second old.
    #[must_use]
    pub fn wants(&self, which: Thumb) -> bool {
        let last_ns = self.0.pictured_ns[which as usize].load(Ordering::Relaxed);
        let every = crate::times::SEEN_EVERY.as_nanos() as u64;
        self.is_watched() && (last_ns == 0 || now_ns().saturating_sub(last_ns) >= every)
    }

    /// Sets the picture that viewers get, in place of the one before.
    ///
    /// # Panics
    /// If there are not three bytes for each pixel.
    pub fn set_thumbnail(&self, which: Thumb, picture: Thumbnail) {
        let pixels = picture.width as usize * picture.height as usize;
        assert_eq!(picture.rgb.len(), 3 * pixels, "three bytes for each pixel");
        self.0.pictured_ns[which as usize].store(now_ns(), Ordering::Relaxed);
        let picture = Some(Arc::new(picture));
        let before = std::mem::replace(&mut lock(&self.0.thumbnails)[which as usize], picture);
        drop(before);
    }

    /// The latest picture; none before the first.
    #[must_use]
    pub fn thumbnail(&self, which: Thumb) -> Option<Arc<Thumbnail>> {
        lock(&self.0.thumbnails)[which as usize].clone()
    }

    /// The job trains; in a job that is not told so, [`Viewer::trained`] does nothing.
    pub fn trains(&self, training: Training) {
        *lock(&self.0.training) = Some(training);
    }

    /// Takes in a step of the training, as [`Training::step`] does.
    pub fn trained(&self, loss: f64, seconds: &[f64]) {
        if let Some(training) = &mut *lock(&self.0.training) {
            training.step(loss, seconds);
        }
    }

    /// The training until now, if the job trains.
    #[must_use]
    pub fn training(&self) -> Option<Training> {
        lock(&self.0.training).clone()
    }

    /// What the driver gives the records to.
    pub(crate) fn tap(&self) -> Tap {
        self.0.tap.clone()
    }

    /// The ranks are connected; the driver of this switch runs.
    pub(crate) fn connected(&self, switch: &Switch, shared: &[SharedDevice]) {
        let shared = shared.to_vec();
        let mut life = lock(&self.0.life);
        life.shared = shared;
        life.is_connected = true;
        life.switch = Some(switch.clone());
        self.ask(&life);
    }

    /// A rank is lost, and another one is awaited.
    pub(crate) fn lost(&self, fault: &Fault) {
        let mut life = lock(&self.0.life);
        life.is_connected = false;
        if life.restarts.len() == Snapshot::RESTARTS {
            life.restarts.remove(0);
            life.forgotten += 1;
        }
        life.restarts.push(Restart {
            fault: fault.without_text(),
            lost_ns: now_ns(),
            chunk: None,
            sent_ns: None,
            served_ns: None,
            sent_again: 0,
        });
    }

    /// Why the rank of the latest loss was lost, as it turned out.
    pub(crate) fn explain(&self, why: &Fault) {
        if let Some(restart) = lock(&self.0.life).restarts.last_mut() {
            restart.fault = why.without_text();
        }
    }

    /// What a rank says of itself; lost where another thread is at what is known. Never waits.
    pub(crate) fn hear(&self, rank: Rank, vitals: Vitals) {
        if let Ok(mut life) = self.0.life.try_lock() {
            life.vitals.insert(rank, (vitals, now_ns()));
        }
    }

    /// The job has ended. The first call counts. Never waits.
    pub(crate) fn end(&self, result: Result<(), &Error>) {
        let ended = match result {
            Ok(()) => (HowEnded::default(), None),
            Err(error) => {
                let sentence = error.to_string();
                let code = error.code();
                let is_fault = !matches!(error, Error::Interrupted(_));
                let fault = is_fault.then(|| error.fault(crate::RANK_0, "run").without_text());
                (HowEnded { code, sentence }, fault)
            }
        };
        let _ = self.0.ended.set((ended.0, ended.1, now_ns()));
    }

    /// Says whether the job has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.0.ended.get().is_some()
    }

    /// If the job is watched, waits at most 200 ms until it is not: its viewers get the last snapshot, and leave.
    pub(crate) fn show_the_end(&self) {
        let until = Instant::now() + crate::times::LEFT_ALONE_WITHIN;
        while self.is_watched() && Instant::now() < until {
            std::thread::sleep(crate::times::LOOK_EVERY);
        }
    }

    /// Takes in the records that wait.
    pub(super) fn drain(&self) {
        drop(self.drained());
    }

    fn drained(&self) -> MutexGuard<'_, Window> {
        let mut window = lock(&self.0.window);
        let Window {
            records,
            kept,
            recent,
        } = &mut *window;
        // No more than wait now: a fast driver must not keep this going.
        for record in records.try_iter().take(QUEUE) {
            recent.push(record.clone());
            kept.push(record);
        }
        if let Some(restart) = lock(&self.0.life).restarts.last_mut() {
            let times = kept.records().map(|record| record.accepted_ns);
            let served = times.rev().take_while(|at| *at > restart.lost_ns).last();
            restart.served_ns = restart.served_ns.or(served);
        }
        window
    }

    fn drain_signal(&self) -> Option<u8> {
        lock(&self.0.life).switch.as_ref()?.drain_signal()
    }

    fn facts(&self) -> Facts<'_> {
        let inner = &*self.0;
        let ended = inner.ended.get();
        let life = lock(&inner.life);
        let is_draining = life.switch.as_ref().is_some_and(Switch::is_draining);
        let state = match (life.is_connected, ended) {
            (_, Some(_)) => JobState::Ended,
            (true, _) if is_draining => JobState::Draining,
            (true, _) => JobState::Running,
            (false, _) if life.switch.is_some() => JobState::Restarting,
            (false, _) => JobState::Starting,
        };
        Facts {
            about: &inner.about,
            pipeline: &inner.pipeline,
            devices: &inner.devices,
            started_ns: inner.started_ns,
            now_ns: ended.map_or_else(now_ns, |(_, _, at)| *at),
            state,
            ended,
            forgotten: life.forgotten,
            restarts: life.restarts.clone(),
            shared: life.shared.clone(),
            vitals: life.vitals.clone(),
            lost_records: inner.tap.lost(),
            training: None,
            thumbnails: [Thumb::Before, Thumb::After].map(|which| self.thumbnail(which).is_some()),
        }
    }

    /// Asks all ranks for their vital signs if the job is watched, and tells them to stop if not.
    fn ask(&self, life: &Life) {
        let is_watched = self.is_watched();
        if let Some(switch) = &life.switch {
            switch.set_watched(is_watched);
        }
        self.0.signs.ask(is_watched);
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let Viewer(inner) = &self.0;
        let life = lock(&inner.life);
        if inner.watching.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.0.ask(&life);
        }
    }
}

impl fmt::Debug for Viewer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Viewer").field(&self.0.about).finish()
    }
}
