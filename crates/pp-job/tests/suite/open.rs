//! A job with rank 0 in the process of its caller, which nothing ends.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use pp_job::prelude::*;
use pp_job::seen::Viewer;
use pp_job::{Running, ThisRank};
use pp_testing::{Folder, Toy, ToySink, ToySource, done, until};
use rustix::process::{Signal, getpid, kill_process};

/// Names the folder of a test, as an argument that the harness of the tests takes.
const FOLDER: &str = "--skip=";

/// What a stage does at chunk 2, once: the name of a file in the folder of the test.
#[derive(Clone, Copy)]
pub(crate) enum At2 {
    /// The process of rank 1 is killed.
    Kill,
    /// The stage on rank 1 fails.
    Fail,
    /// The stage on rank 1 sleeps for ever.
    Stick,
    /// The sink on rank 0 sleeps for ever.
    StickHere,
    /// The source has nothing more until the job ends.
    Wait,
}

/// Runs this rank: six chunks through a stage. The sink sends their numbers.
fn rank(this: ThisRank<'_>, folder: &Path, taken: Option<Sender<u64>>) -> Result<(), Error> {
    let is_to = |what: At2| folder.join((what as u8).to_string()).exists();
    let open = |_| {
        let mut offered = 0;
        let poll = move || {
            offered += 1;
            match offered {
                3.. if is_to(At2::Wait) => Offer::Later,
                7.. => Offer::End,
                _ => Offer::Chunk(Cut::None),
            }
        };
        let build = |place: Place, _: &mut TxLease| {
            Built::new(Toy(place.chunk.get()), Manifest::empty(), ())
        };
        Ok(Opened::new(ToySource::new(poll, build)))
    };
    let take = move |chunk: Chunk<'_, Toy>, _: &[u8]| {
        if chunk.message.plan().0 == 2 && is_to(At2::StickHere) {
            std::thread::sleep(Duration::MAX);
        }
        if let Some(taken) = &taken {
            let _ = taken.send(chunk.message.plan().0);
        }
        Ok(())
    };
    let stage = |_: &StageSpec, (): &()| {
        Ok(OnHost::new(
            |chunk: Chunk<'_, Toy>, _: &[u8], _: &mut [u8]| {
                let once = folder.join("once");
                if chunk.message.plan().0 == 2 && !once.exists() {
                    std::fs::write(&once, "")?;
                    if is_to(At2::Kill) {
                        kill_process(getpid(), Signal::KILL).unwrap();
                    }
                    if is_to(At2::Stick) {
                        std::thread::sleep(Duration::MAX);
                    }
                    if is_to(At2::Fail) {
                        let what = "out of cheese";
                        return Err(StageError::new(FaultKind::BadInput, "denoise", what));
                    }
                }
                Ok(done(chunk.message, Manifest::empty()))
            },
        ))
    };
    let program = Program::<Host, _, _>::new("a", open)
        .payloads(|_, ()| 64)
        .stage("b", stage)
        .sink("c", |(), _| Ok(ToySink::<Toy, _>::new(take)));
    this.run(Host, Profile::new(), program)
}

#[test]
#[ignore = "the ranks that the other tests start"]
fn program() {
    let config = Config::from_env(|name| patient(name).or_else(|| std::env::var_os(name))).unwrap();
    let folder = std::env::args().find_map(|arg| Some(arg.strip_prefix(FOLDER)?.into()));
    let folder: PathBuf = folder.unwrap();
    pp_job::main(|| {
        // The second of them is that of the test, or none is numbered.
        let first = Job::new(&config, &"a@0 -> b@1 -> c@0".parse()?)
            .number(1)
            .open(|_| Err(Error::Usage("it is passed over".into())))?;
        let is_passed_over = first.is_passed_over();
        first.wait()?;
        assert!(is_passed_over);
        open(&config, &folder, None, None)?.wait()
    });
}

pub(crate) fn open(
    config: &Config,
    folder: &Path,
    taken: Option<Sender<u64>>,
    show: Option<Sender<Viewer>>,
) -> Result<Running, Error> {
    let program = std::env::current_exe()?.into_os_string();
    let args = ["open::program", "--exact", "--ignored", "--nocapture"];
    let skip = format!("{FOLDER}{}", folder.display());
    let args = args.into_iter().map(OsString::from).chain([skip.into()]);
    let command: Vec<OsString> = [program].into_iter().chain(args).collect();
    let pipeline = "a@0 -> b@1 -> c@0".parse()?;
    let folder = folder.to_owned();
    Job::new(config, &pipeline)
        .number(2)
        .restarts(folder.join("restarts").exists().into())
        .command(&command)
        .open(move |this| {
            if let (Some(show), Some(viewer)) = (show, this.viewer()) {
                show.send(viewer).unwrap();
            }
            rank(this, &folder, taken)
        })
}

/// What every rank is told. A rank that a busy machine holds up is not lost.
fn patient(name: &str) -> Option<OsString> {
    (name == "PP_HEARTBEAT_MS").then(|| "3000".into())
}

/// Settings of a process that starts its ranks.
pub(crate) fn config() -> Config {
    Config::alone(patient).unwrap()
}

/// The same, where a stage is stuck after a second.
fn impatient() -> Config {
    let stuck = |name: &str| (name == "PP_STUCK_MS").then(|| "1000".into());
    Config::alone(|name| stuck(name).or_else(|| patient(name))).unwrap()
}

/// Opens a job whose rank does this at chunk 2.
fn begin(what: Option<At2>, restarts: bool) -> (Folder, Result<Running, Error>, Receiver<u64>) {
    let folder = Folder::scratch();
    if let Some(what) = what {
        folder.write(&(what as u8).to_string(), b"");
    }
    if restarts {
        folder.write("restarts", b"");
    }
    let (taken, is_taken) = channel();
    let config = match what {
        Some(At2::Stick | At2::StickHere) => impatient(),
        _ => config(),
    };
    let running = open(&config, folder.path(), Some(taken), None);
    (folder, running, is_taken)
}

#[test]
fn rank_0_is_in_the_caller_and_another_rank_is_started_again() {
    for what in [None, Some(At2::Kill)] {
        let (_folder, running, taken) = begin(what, true);
        running.unwrap().wait().unwrap();
        assert_eq!(taken.iter().collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    }
}

#[test]
fn a_fault_of_any_rank_is_an_error_of_the_caller() {
    for (what, code, words) in [
        (
            At2::Kill,
            7,
            "peer died: rank 1: run: the process was ended by signal 9",
        ),
        (At2::Fail, 3, "bad input: rank 1: denoise: out of cheese"),
        (At2::StickHere, 9, "timed out: rank 0: c: no progress"),
    ] {
        let (_folder, running, _taken) = begin(Some(what), false);
        let error = running.unwrap().wait().unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(error.code(), code, "{error}");
    }
}

#[test]
fn a_stage_that_is_stuck_elsewhere_is_an_error_of_the_caller() {
    let (_folder, running, _taken) = begin(Some(At2::Stick), false);
    let error = running.unwrap().wait().unwrap_err();
    assert!(error.to_string().contains("timed out: rank 1: "), "{error}");
}

#[test]
fn the_caller_drains_a_job_or_aborts_it() {
    let (_folder, running, taken) = begin(Some(At2::Wait), false);
    let mut running = running.unwrap();
    assert_eq!([taken.recv(), taken.recv()], [Ok(0), Ok(1)]);
    assert!(running.wait_for(Duration::ZERO).is_none());
    running.drain();
    let ended = running.wait().unwrap_err();
    assert!(matches!(ended, Error::Interrupted(2)), "{ended:?}");

    // A stage that never returns: the job cannot drain.
    let folder = Folder::scratch();
    folder.write(&(At2::Stick as u8).to_string(), b"");
    let running = open(&config(), folder.path(), None, None).unwrap();
    until(|| folder.path().join("once").exists());
    running.abort();
    let ended = running.wait().unwrap_err();
    assert_eq!(ended.code(), 130, "{ended:?}");
    assert!(
        ended.to_string().contains("aborted by a second interrupt"),
        "{ended}"
    );

    let (folder, running, taken) = begin(Some(At2::Wait), false);
    assert_eq!([taken.recv(), taken.recv()], [Ok(0), Ok(1)]);
    drop(running);
    assert_eq!(taken.iter().next(), None, "{folder:?}");
}

#[test]
fn a_job_of_one_process_has_a_caller_too() {
    let folder = Folder::scratch();
    folder.write(&(At2::StickHere as u8).to_string(), b"");
    let path = folder.path().to_owned();
    let pipeline = "a@0 -> b@0 -> c@0".parse().unwrap();
    let config = impatient();
    let job = Job::new(&config, &pipeline);
    let running = job.open(move |this| rank(this, &path, None)).unwrap();
    let error = running.wait().unwrap_err();
    assert!(
        error
            .to_string()
            .contains("timed out: rank 0: c: no progress"),
        "{error}"
    );
}

#[test]
fn ctrl_c_drains_and_is_the_programs_again() {
    if !pp_testing::alone!() {
        return;
    }
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    // As an interpreter does it, whose handler notes the signal.
    let seen = Arc::new(AtomicUsize::new(0));
    let noted = Arc::clone(&seen);
    let note = move || _ = noted.fetch_add(1, Ordering::SeqCst);
    // SAFETY: the handler adds to an atomic number, which a signal handler may do.
    unsafe { signal_hook::low_level::register(signal_hook::consts::SIGTERM, note) }.unwrap();
    let before = handled();
    for round in 1..3 {
        let (_folder, running, taken) = begin(Some(At2::Wait), false);
        let running = running.unwrap();
        assert_eq!(taken.recv(), Ok(0));
        assert_ne!(handled(), before);
        kill_process(getpid(), Signal::TERM).unwrap();
        let ended = running.wait().unwrap_err();
        assert!(matches!(ended, Error::Interrupted(15)), "{ended:?}");
        assert_eq!(handled(), before);
        until(|| seen.load(Ordering::SeqCst) == round);
    }
    // The thread that hears signals for jobs may hear this one late. A job behind it would drain, so none comes.
    kill_process(getpid(), Signal::TERM).unwrap();
    until(|| seen.load(Ordering::SeqCst) == 3);
}

/// The signals that this process handles, as the kernel says it.
fn handled() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find(|line| line.starts_with("SigCgt"));
    mask.unwrap().to_owned()
}

#[test]
fn a_driver_that_is_left_behind_takes_no_signals() {
    if !pp_testing::alone!() {
        return;
    }
    let folder = Folder::scratch();
    folder.write(&(At2::StickHere as u8).to_string(), b"");
    let path = folder.path().to_owned();
    let pipeline = "a@0 -> b@0 -> c@0".parse().unwrap();
    let (config, before) = (impatient(), handled());
    let job = Job::new(&config, &pipeline);
    let running = job.open(move |this| rank(this, &path, None)).unwrap();
    running.wait().unwrap_err();
    assert_eq!(handled(), before);
}
