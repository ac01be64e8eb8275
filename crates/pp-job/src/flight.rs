//! The flight recorder of this process, and when it is written to a file.
//!
//! Hazard: the thread that could say what went wrong is the one that is stuck, and what is written
//! in the last moments of a process is cut off. Guarantee: a fault, a panic and SIGUSR1 write the
//! recording, from a thread that is not the driver; a file is there whole, under its name, or not at
//! all; nothing here waits for a lock that a stuck thread can hold.
//!
//! Choices: one file for each process, named after its job; a later recording of the same process
//! replaces the earlier one, whose operations it still has, unless the ring has turned. The folder is
//! `PP_FLIGHT_DIR`, or one of this user's alone below the folder for temporary files.

mod folder;

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Once, OnceLock, PoisonError, Weak};
use std::time::SystemTime;

use pp_contract::{Fault, FaultKind, List, Rank, Text, WorldSize, digest};
use pp_runtime::clock::now_ns;
use pp_runtime::switch::Switch;
use pp_transport::flight::{FlightRecorder, Moment, Reason, Recording};
use pp_transport::launch::Launch;

use self::folder::Folder;
use crate::config::{Config, host_name};
use crate::error::Error;
use crate::reports::{Report, Reporter};

/// What is logged once this process knows of a fault.
pub const NOTICED: &str = "a fault is noticed";

/// The recordings of the ranks that this process supervises.
pub(crate) struct Recordings {
    job: u64,
    folder: Folder,
    /// Why a rank could not write its recording.
    failed: Option<String>,
}

impl Recordings {
    pub(crate) fn new(job_id: &str, config: &Config) -> Self {
        Self {
            job: digest(job_id.as_bytes()),
            folder: Folder::new(config.flight_folder.as_deref()),
            failed: None,
        }
    }

    /// A rank could not write its recording. The first reason is as good as another.
    pub(crate) fn failed(&mut self, why: String) {
        self.failed.get_or_insert(why);
    }

    /// What to add to the line that tells a fault.
    pub(crate) fn hint(&self) -> Option<String> {
        hint(self.folder.of_job(self.job), self.failed.as_deref())
    }
}

/// How to read what the ranks recorded, or why they could not; `None` where nothing was to be.
fn hint(written: Option<PathBuf>, failed: Option<&str>) -> Option<String> {
    match (written, failed) {
        (Some(path), _) => {
            let path = folder::for_a_shell(&path);
            Some(format!(" (what the ranks did last: pp flight {path})"))
        }
        (None, why) => why.map(|why| format!(" (no recording: {why})")),
    }
}

/// The flight recorder of one rank.
#[derive(Clone)]
pub(crate) struct Flight(Arc<Own>);

struct Own {
    recorder: FlightRecorder,
    job: u64,
    rank: Rank,
    world_size: WorldSize,
    host: Text<64>,
    boot: Text<64>,
    folder: Folder,
    reporter: Reporter,
    /// Why the recording could not be written.
    failed: OnceLock<String>,
    /// The switch of the driver that runs now. Never waited for: held only to look and to replace.
    switch: Mutex<Option<Switch>>,
    /// A thread is writing.
    busy: AtomicBool,
    /// There is a file.
    written: AtomicBool,
    /// The file has the words of a panic, which say more than the fault that follows.
    panicked: AtomicBool,
}

impl Flight {
    /// Opens the recorder of this rank. A panic of this process writes its recording from now on.
    ///
    /// # Errors
    /// The size of the world is none that a recording can hold.
    pub(crate) fn open(
        launch: &Launch,
        config: &Config,
        reporter: &Reporter,
    ) -> Result<Self, Error> {
        let own = Arc::new(Own {
            recorder: FlightRecorder::new(config.flight_operations),
            job: digest(launch.job_id().as_bytes()),
            rank: launch.rank(),
            world_size: WorldSize::new(launch.world_size().get()).map_err(anyhow::Error::new)?,
            host: Text::truncated(&host_name()),
            boot: boot(),
            folder: Folder::new(config.flight_folder.as_deref()),
            reporter: reporter.clone(),
            failed: OnceLock::new(),
            switch: Mutex::new(None),
            busy: AtomicBool::new(false),
            written: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        });
        write_on_panic(Arc::downgrade(&own));
        Ok(Self(own))
    }

    /// The recorder of this rank.
    pub(crate) fn recorder(&self) -> FlightRecorder {
        self.0.recorder.clone()
    }

    /// From now on a recording says what the driver of this switch is inside of.
    pub(crate) fn follow(&self, switch: &Switch) {
        if let Ok(mut place) = self.0.switch.lock() {
            *place = Some(switch.clone());
        }
    }

    /// Writes down what happened before a fault, if an operation has begun. For the thread beside the watchdog.
    pub(crate) fn write_for_fault(&self, fault: &Fault) {
        let (at_ns, own) = (now_ns(), &self.0);
        if own.recorder.begun() > 0
            && !own.panicked.load(Ordering::Acquire)
            && let Err(why) = own.write(Reason::Fault(fault.without_text()))
        {
            // The line that tells the fault says it, in the supervisor if there is one.
            let (kind, operation) = (FaultKind::Io, "write a flight recording");
            let fault = Fault::new(kind, own.rank, operation, &why);
            own.reporter.tell(Report::NotRecorded(fault));
            let _ = own.failed.set(why);
        }
        // Last: standard error may be held by a thread that is stuck.
        tracing::error!(at_ns, %fault, "{NOTICED}");
    }

    /// Writes down what goes on, and says where.
    pub(crate) fn write_on_request(&self) {
        let rank = self.0.rank;
        let said = match self.0.write(Reason::Asked) {
            Ok(path) => format!("pp: rank {rank}: flight recording: {}", path.display()),
            Err(why) => format!("pp: rank {rank}: no flight recording: {why}"),
        };
        // If standard error is closed, the line is lost.
        let _ = writeln!(std::io::stderr(), "{said}");
    }

    /// What to add to the line that tells a fault.
    pub(crate) fn hint(&self) -> Option<String> {
        let own = &self.0;
        let is_written = own.written.load(Ordering::Acquire);
        hint(
            is_written.then(|| own.path()),
            own.failed.get().map(String::as_str),
        )
    }
}

/// The recordings of the jobs of this process.
static RECORDINGS: Mutex<Vec<Weak<Own>>> = Mutex::new(Vec::new());

/// A panic writes the recordings before it says anything: standard error may be why. The process has one hook for all
/// of its jobs.
fn write_on_panic(own: Weak<Own>) {
    static HOOK: Once = Once::new();
    let mut all = RECORDINGS.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|own| own.strong_count() > 0);
    all.push(own);
    drop(all);
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let place = info.location().map(ToString::to_string);
            let what = info.payload_as_str().unwrap_or("a panic");
            let place = place.as_deref().unwrap_or("an unknown place");
            let text = Text::truncated(&format!("{what} at {place}"));
            // A thread that holds the list does not panic, but another one may hold it.
            let all = RECORDINGS.lock().unwrap_or_else(PoisonError::into_inner);
            let all: Vec<_> = all.iter().filter_map(Weak::upgrade).collect();
            for own in all.iter().filter(|own| own.recorder.begun() > 0) {
                let is_written = own.write(Reason::Panic(text.clone())).is_ok();
                own.panicked.fetch_or(is_written, Ordering::AcqRel);
            }
            before(info);
        }));
    });
}

impl Own {
    fn path(&self) -> PathBuf {
        let name = folder::name(self.job, self.rank, std::process::id());
        self.folder.path.join(name)
    }

    fn write(&self, reason: Reason) -> Result<PathBuf, String> {
        if !self.recorder.is_on() {
            return Err("PP_FLIGHT_OPS is 0".into());
        }
        let _turn = Turn::take(&self.busy).ok_or("another thread is writing it")?;
        let bytes = self.recording(reason).encode().map_err(|e| e.to_string())?;
        let path = self.path();
        self.folder
            .keep(&path, &bytes)
            .map_err(|e| format!("{}: {e}", path.display()))?;
        self.written.store(true, Ordering::Release);
        Ok(path)
    }

    fn recording(&self, reason: Reason) -> Recording {
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        // The thread that holds the lock is about to release it, and a recording without the switch is better than
        // none.
        let switch = self.switch.try_lock().ok().and_then(|place| place.clone());
        let recording = Recording {
            job: self.job,
            rank: self.rank,
            world_size: self.world_size,
            pid: std::process::id(),
            host: self.host.clone(),
            boot: self.boot.clone(),
            written: Moment {
                monotonic_ns: now_ns(),
                realtime_ns: since_1970.map_or(0, |time| time.as_nanos() as u64),
            },
            reason,
            activity: switch.and_then(|switch| switch.activity()),
            capacity: 0,
            total: 0,
            groups: List::default(),
            operations: List::default(),
        };
        recording.with(&self.recorder)
    }
}

/// The right to write. Waited for with a deadline, unlike a lock's.
struct Turn<'a>(&'a AtomicBool);

impl<'a> Turn<'a> {
    fn take(busy: &'a AtomicBool) -> Option<Self> {
        let deadline = now_ns() + crate::times::TURN_WITHIN.as_nanos() as u64;
        while busy.swap(true, Ordering::Acquire) {
            if now_ns() > deadline {
                return None;
            }
            std::thread::sleep(crate::times::TURN_WITHIN / 100);
        }
        Some(Self(busy))
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// What tells one start of this machine from another.
fn boot() -> Text<64> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    Text::truncated(id.unwrap_or_default().trim())
}
