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
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, SystemTime};

use pp_contract::{Fault, Generation, List, Rank, Text, WorldSize, digest};
use pp_runtime::clock::now_ns;
use pp_runtime::switch::Switch;
use pp_transport::flight::{
    DEFAULT_OPERATIONS, FlightRecorder, MAX_OPERATIONS, Moment, Reason, Recorded, Recording,
};
use pp_transport::launch::Launch;
use pp_transport::link::Link;

use crate::exit::Failure;
use crate::job::reports;

/// How long a writer waits for another one of this process.
const TURN_WITHIN: Duration = Duration::from_millis(100);

/// The recorder of this rank; there is none in a supervisor.
static OWN: OnceLock<Own> = OnceLock::new();
/// The job whose ranks this process supervises, and where their recordings lie.
static SUPERVISED: OnceLock<(u64, PathBuf)> = OnceLock::new();
/// Why a rank, this one or one that this process supervises, could not write its recording.
static FAILED: OnceLock<String> = OnceLock::new();

struct Own {
    recorder: FlightRecorder,
    job: u64,
    rank: Rank,
    world_size: WorldSize,
    host: Text<64>,
    boot: Text<64>,
    folder: PathBuf,
    /// That of the driver that runs now. Never waited for: held only to look and to replace.
    switch: Mutex<Option<Switch>>,
    /// A thread is writing.
    busy: AtomicBool,
    /// There is a file.
    written: AtomicBool,
}

/// Opens the recorder of this rank.
pub(crate) fn open(launch: &Launch) -> Result<(), Failure> {
    let own = Own {
        recorder: FlightRecorder::new(operations()?),
        job: digest(launch.job_id().as_bytes()),
        rank: launch.rank(),
        world_size: WorldSize::new(launch.world_size().get()).map_err(anyhow::Error::new)?,
        host: Text::truncated(&rustix::system::uname().nodename().to_string_lossy()),
        boot: boot(),
        folder: folder::path(),
        switch: Mutex::new(None),
        busy: AtomicBool::new(false),
        written: AtomicBool::new(false),
    };
    if OWN.set(own).is_ok() {
        write_on_panic();
    }
    Ok(())
}

/// The supervisor's part: only to know where the ranks write.
pub(crate) fn supervise(job_id: &str) {
    let _ = SUPERVISED.set((digest(job_id.as_bytes()), folder::path()));
}

/// Operations to keep, from `PP_FLIGHT_OPS`; 0 records nothing.
pub(crate) fn operations() -> Result<usize, Failure> {
    let Ok(text) = std::env::var("PP_FLIGHT_OPS") else {
        return Ok(DEFAULT_OPERATIONS);
    };
    let number = text.parse::<usize>().ok();
    number.filter(|n| *n <= MAX_OPERATIONS).ok_or_else(|| {
        Failure::Usage(format!(
            "PP_FLIGHT_OPS is {text:?}; it takes how many operations to keep, up to \
             {MAX_OPERATIONS}, or 0 for none"
        ))
    })
}

/// The recorder of this process; one that records nothing where none was opened.
pub(crate) fn recorder() -> FlightRecorder {
    OWN.get()
        .map_or_else(FlightRecorder::off, |own| own.recorder.clone())
}

/// A link to this peer whose operations this process records.
pub(crate) fn record<L: Link>(link: L, peer: Rank, generation: Generation) -> Recorded<L> {
    Recorded::new(link, &recorder(), peer, generation)
}

/// From now on a recording says what the driver of this switch is inside of.
pub(crate) fn follow(switch: &Switch) {
    if let Some(own) = OWN.get()
        && let Ok(mut place) = own.switch.lock()
    {
        *place = Some(switch.clone());
    }
}

/// What is logged once this process knows of a fault.
pub(crate) const NOTICED: &str = "a fault is noticed";

/// Writes down what happened before a fault, if an operation has begun. For the thread beside the watchdog.
pub(crate) fn write_for_fault(fault: &Fault) {
    let at_ns = now_ns();
    if let Some(own) = OWN.get().filter(|own| own.recorder.begun() > 0)
        && let Err(why) = own.write(Reason::Fault(fault.clone()))
    {
        // The line that tells the fault says it, in the supervisor if there is one.
        reports::not_recorded(own.rank, &why);
        not_recorded(why);
    }
    // Last: standard error may be held by a thread that is stuck.
    tracing::error!(at_ns, %fault, "{NOTICED}");
}

/// A recording could not be written.
pub(crate) fn not_recorded(why: String) {
    // The first reason is as good as another.
    let _ = FAILED.set(why);
}

/// Writes down what goes on, and says where.
pub(crate) fn write_on_request() {
    let said = match OWN.get().map(|own| (own.rank, own.write(Reason::Asked))) {
        Some((rank, Ok(path))) => {
            format!("pp: rank {rank}: flight recording: {}", path.display())
        }
        Some((rank, Err(why))) => format!("pp: rank {rank}: no flight recording: {why}"),
        None => "pp: no flight recording: one process that runs every stage sends nothing that could be recorded"
            .to_owned(),
    };
    // Without a standard error nobody wants to read it.
    let _ = writeln!(std::io::stderr(), "{said}");
}

/// A panic writes the recording before it says anything: whoever holds standard error may be why.
fn write_on_panic() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if let Some(own) = OWN.get().filter(|own| own.recorder.begun() > 0) {
            let place = info.location().map(ToString::to_string);
            let what = info.payload_as_str().unwrap_or("a panic");
            let text = format!(
                "{what} at {}",
                place.as_deref().unwrap_or("an unknown place")
            );
            let _ = own.write(Reason::Panic(Text::truncated(&text)));
        }
        before(info);
    }));
}

/// What to add to the line that tells a fault: how to read what the ranks recorded, or why they could
/// not. Empty where nothing was to be.
pub(crate) fn hint() -> String {
    let written = match (SUPERVISED.get(), OWN.get()) {
        (Some((job, folder)), _) => folder::of_job(folder, *job),
        (None, Some(own)) if own.written.load(Ordering::Acquire) => Some(own.path()),
        (None, _) => None,
    };
    match (written, FAILED.get()) {
        (Some(path), _) => {
            let path = folder::for_a_shell(&path);
            format!(" (what the ranks did last: pp flight {path})")
        }
        (None, Some(why)) => format!(" (no recording: {why})"),
        (None, None) => String::new(),
    }
}

impl Own {
    fn path(&self) -> PathBuf {
        let name = folder::name(self.job, self.rank, std::process::id());
        self.folder.join(name)
    }

    fn write(&self, reason: Reason) -> Result<PathBuf, String> {
        if !self.recorder.is_on() {
            return Err("PP_FLIGHT_OPS is 0".into());
        }
        let _turn = Turn::take(&self.busy).ok_or("another thread is writing it")?;
        let bytes = self.recording(reason).encode().map_err(|e| e.to_string())?;
        let path = self.path();
        folder::keep(&path, &bytes).map_err(|e| format!("{}: {e}", path.display()))?;
        self.written.store(true, Ordering::Release);
        Ok(path)
    }

    fn recording(&self, reason: Reason) -> Recording {
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        // Whoever holds it is about to let go, and a recording without it is better than none.
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
        let deadline = now_ns() + TURN_WITHIN.as_nanos() as u64;
        while busy.swap(true, Ordering::Acquire) {
            if now_ns() > deadline {
                return None;
            }
            std::thread::sleep(TURN_WITHIN / 100);
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
