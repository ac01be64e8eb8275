//! `pp plugin check`: tests a plugin against the ABI, check by check. And what a plugin says about itself, for commands
//! that must know its stages before a rank loads it.
//!
//! Hazard: a plugin that is being written crashes, hangs or calls `exit`, and takes along the process that loaded it.
//! So this process does not load the plugin. It starts a worker, a child process that loads the plugin, describes it and
//! runs the checks; the worker says which check begins and how it ended, and this process prints that at once. A check
//! that fails, crashes or takes too long ends its worker, and the next check begins in a new worker: no check sees what
//! a failed one left behind, and a sound plugin is loaded once.
//!
//! This process handles no signal. When it ends, for whatever reason, the kernel kills the worker.

mod worker;

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use pp_command::env::Env;
use pp_command::print;
use pp_contract::FaultKind;
use pp_kernels::Description;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use serde::Serialize;

use crate::args::{PluginArgs, check_plugin_args};
use pp_job::Error;
use pp_job::command_line::{SUPERVISOR, stuck_after};
use worker::Word;
pub(crate) use worker::work;

/// What a plugin says about itself.
///
/// # Errors
/// The plugin does not load, crashes or hangs.
pub(crate) fn describe(file: &Path, env: &Env) -> Result<Description, Error> {
    let limit = stuck_after(env.lookup())?;
    let mut worker = Worker::start(file, &[])?;
    let (kind, why) = loop {
        match worker.hear(limit)? {
            Heard::Word(Word::Loaded(about)) => {
                worker.end()?;
                return Ok(about);
            }
            Heard::Word(Word::Failed(why)) => break (FaultKind::Plugin, why),
            Heard::Word(Word::NoGpu(why)) => break (FaultKind::Device, why),
            // What else there is to say is of checks.
            Heard::Word(_) => {}
            Heard::Ended(status) => {
                let why = format!("{}: {}", file.display(), why_ended(status));
                break (FaultKind::Plugin, why);
            }
            Heard::Late(limit) => {
                let why = format!("{}: {}", file.display(), why_late(limit));
                break (FaultKind::Plugin, why);
            }
        }
    };
    worker.end()?;
    Err(Error::local(kind, "load kernels", why))
}

/// Checks a plugin, and prints what it found.
pub(crate) fn check(args: &PluginArgs, env: &Env) -> Result<(), Error> {
    check_plugin_args(&args.plugin_args)?;
    let file = &args.file;
    let refuse = |kind, why: String| Err(Error::local(kind, "plugin check", why));
    let limit = stuck_after(env.lookup())?;
    let mut report = PluginReport {
        json: args.json,
        ..PluginReport::default()
    };
    let ended = loop {
        match watch(args, limit, &mut report)? {
            Outcome::Again => {}
            ended => break ended,
        }
    };
    if args.json {
        let text = serde_json::to_string(&report).map_err(anyhow::Error::new)?;
        print(&format!("{text}\n"))?;
    }
    if let Outcome::NoGpu(why) = ended {
        return refuse(FaultKind::Device, why);
    }
    let failed = report.checks.iter().filter(|done| !done.passed).count();
    if failed == 0 {
        return Ok(());
    }
    let (file, all) = (file.display(), report.checks.len());
    let why = format!("{file}: {failed} of {all} checks failed");
    refuse(FaultKind::Plugin, why)
}

/// How a worker ended.
enum Outcome {
    /// Checks may be left.
    Again,
    Done,
    /// The plugin needs a GPU, and there is none.
    NoGpu(String),
}

/// Starts a worker and prints what it does, until its end.
fn watch(
    args: &PluginArgs,
    limit: Option<Duration>,
    report: &mut PluginReport,
) -> Result<Outcome, Error> {
    let from = report.begun;
    let mut options = vec![format!("--from={from}")];
    if let (Some(width), Some(height)) = (args.width, args.height) {
        options.extend([format!("--width={width}"), format!("--height={height}")]);
    }
    let plugin_args = args.plugin_args.iter();
    options.extend(plugin_args.map(|(key, value)| format!("--plugin-arg={key}={value}")));
    let mut worker = Worker::start(&args.file, &options)?;
    report.otherwise = "load, once more";
    if from == 0 {
        report.begin("load")?;
    }
    let (mut is_last, mut has_failed) = (false, false);
    let failure = loop {
        match worker.hear(limit)? {
            Heard::Word(Word::Loaded(_)) => {
                report.otherwise = "between two checks";
                if from == 0 {
                    report.end(Ok("ok".into()))?;
                }
            }
            Heard::Word(Word::Begins(check)) => {
                report.begun += 1;
                report.begin(&check)?;
            }
            Heard::Word(Word::Calls(call)) => report.call = Some(call),
            Heard::Word(Word::Ended(outcome)) => {
                has_failed |= outcome.is_err();
                report.end(outcome)?;
            }
            Heard::Word(Word::Failed(why)) => {
                has_failed = true;
                report.end(Err(why))?;
            }
            Heard::Word(Word::Note(text)) => report.note(text)?,
            Heard::Word(Word::NoGpu(why)) => {
                if report.open.is_some() {
                    report.end(Err("the NVIDIA driver is missing".into()))?;
                }
                return Ok(Outcome::NoGpu(why));
            }
            Heard::Word(Word::Ends) => {
                is_last = true;
                report.begin("the process that used it ends without a fault")?;
            }
            Heard::Ended(status) if status.success() && (is_last || has_failed) => {
                if is_last {
                    report.end(Ok("ok".into()))?;
                }
                break None;
            }
            Heard::Ended(status) => break Some(why_ended(status)),
            Heard::Late(limit) => break Some(why_late(limit)),
        }
    };
    if let Some(why) = failure {
        let call = report.call.take();
        let call = call.map_or_else(String::new, |call| format!("; its last call was {call}"));
        report.end(Err(why + &call))?;
    }
    if is_last {
        return Ok(Outcome::Done);
    }
    if report.begun == from {
        // The next worker would get no further.
        report.note("the other checks were not run".into())?;
        return Ok(Outcome::Done);
    }
    Ok(Outcome::Again)
}

/// What a worker's end means that did not come by itself.
fn why_ended(status: ExitStatus) -> String {
    match status.signal() {
        Some(_) => format!("the plugin crashed, {status}"),
        None => format!("the plugin called exit, {status}"),
    }
}

fn why_late(limit: Duration) -> String {
    let seconds = limit.as_secs_f64();
    format!("not done after {seconds} s; PP_STUCK_MS sets how long it may take")
}

/// What was found, and is printed at once, or at the end as one JSON object.
#[derive(Default, Serialize)]
struct PluginReport {
    /// All that ended.
    checks: Vec<CheckDone>,
    notes: Vec<String>,
    #[serde(skip)]
    json: bool,
    /// Checks that a worker began.
    #[serde(skip)]
    begun: usize,
    /// The check that began last, while it has no outcome.
    #[serde(skip)]
    open: Option<String>,
    /// The last call that was told of the check under way.
    #[serde(skip)]
    call: Option<String>,
    /// What an outcome is of when no check is open.
    #[serde(skip)]
    otherwise: &'static str,
}

/// A check that ended.
#[derive(Serialize)]
struct CheckDone {
    check: String,
    passed: bool,
    /// What it found, or why it failed.
    outcome: String,
}

impl PluginReport {
    fn say(&self, text: &str) -> Result<(), Error> {
        match self.json {
            true => Ok(()),
            false => print(text),
        }
    }

    fn begin(&mut self, check: &str) -> Result<(), Error> {
        self.open = Some(check.into());
        self.say(&format!("{check} ... "))
    }

    fn end(&mut self, outcome: Result<String, String>) -> Result<(), Error> {
        if self.open.is_none() {
            self.begin(self.otherwise)?;
        }
        self.call = None;
        let passed = outcome.is_ok();
        let outcome = outcome.unwrap_or_else(|why| why);
        let failed = if passed { "" } else { "FAILED: " };
        self.say(&format!("{failed}{outcome}\n"))?;
        self.checks.push(CheckDone {
            check: self.open.take().unwrap_or_default(),
            passed,
            outcome,
        });
        Ok(())
    }

    fn note(&mut self, text: String) -> Result<(), Error> {
        self.say(&format!("{text}\n"))?;
        self.notes.push(text);
        Ok(())
    }
}

/// The process that loads the plugin.
struct Worker {
    process: Child,
    pipe: ChildStdout,
    /// Bytes that came and are no whole line yet.
    bytes: Vec<u8>,
}

enum Heard {
    Word(Word),
    Ended(ExitStatus),
    /// The worker did not say a word for so long, and was killed.
    Late(Duration),
}

impl Worker {
    fn start(file: &Path, options: &[String]) -> Result<Self, Error> {
        let mut process = Command::new("/proc/self/exe")
            .args(["plugin", "worker"])
            .args(options)
            .arg("--")
            .arg(file)
            .env(SUPERVISOR, std::process::id().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a process for the plugin")?;
        let pipe = process.stdout.take().context("the child has no pipe")?;
        Ok(Self {
            process,
            pipe,
            bytes: Vec::new(),
        })
    }

    /// The worker's next word, or its end.
    fn hear(&mut self, limit: Option<Duration>) -> Result<Heard, Error> {
        let until = limit.map(|limit| Instant::now() + limit);
        loop {
            if let Some(end) = self.bytes.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.bytes.drain(..=end).collect();
                match serde_json::from_slice(&line) {
                    Ok(word) => return Ok(Heard::Word(word)),
                    // What the plugin wrote into the pipe is no word.
                    Err(_) => continue,
                }
            }
            if !self.is_readable(until)? {
                // Where a child of the plugin holds the pipe, the worker may have ended.
                let ended = self
                    .process
                    .try_wait()
                    .context("cannot wait for the process that checks the plugin")?;
                let status = self.end()?;
                return Ok(match (ended, limit) {
                    (None, Some(limit)) => Heard::Late(limit),
                    _ => Heard::Ended(status),
                });
            }
            let mut block = [0; 4096];
            match self
                .pipe
                .read(&mut block)
                .context("cannot read from the process that checks the plugin")?
            {
                0 => return Ok(Heard::Ended(self.end()?)),
                bytes => self.bytes.extend_from_slice(&block[..bytes]),
            }
        }
    }

    /// Waits for bytes or the end of the pipe; false when neither came in time.
    fn is_readable(&self, until: Option<Instant>) -> Result<bool, Error> {
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut pipe = [PollFd::new(&self.pipe, PollFlags::IN)];
            match poll(&mut pipe, left.as_ref()) {
                Ok(ready) => return Ok(ready > 0),
                Err(Errno::INTR) => {}
                Err(error) => return Err(anyhow::Error::new(error).into()),
            }
        }
    }

    /// How the process ended. A process that did not is killed; the status of one that is about to end stays its own.
    fn end(&mut self) -> Result<ExitStatus, Error> {
        let _ = self.process.kill();
        Ok(self
            .process
            .wait()
            .context("cannot wait for the process that checks the plugin")?)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // A worker that has only begun would find this process gone, and say so.
        let _ = self.end();
    }
}
