//! The child process that loads a plugin, describes it and runs the checks.

use std::fs::File;
use std::io::Write;
use std::mem::ManuallyDrop;

use anyhow::Context;
use pp_command::env::Env;
use pp_contract::with_source;
use pp_device::{Device, Stream};
use pp_kernels::check::{CHECKS, Subject};
use pp_kernels::{Description, KernelSet};
use serde::{Deserialize, Serialize};

use crate::args::PluginArgs;
use pp_job::Error;
use pp_job::command_line::{SUPERVISOR, bind_to_parent, end_now};

/// What a worker says, one JSON value a line.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Word {
    /// The plugin is loaded, and says this about itself.
    Loaded(Description),
    /// This check begins.
    Begins(String),
    /// This call of the plugin begins.
    Calls(String),
    /// How the check under way ended, as [`Check::run`](pp_kernels::check::Check::run) gives it.
    Ended(Result<String, String>),
    /// The plugin does not load.
    Failed(String),
    /// A line for the report.
    Note(String),
    /// The plugin needs a GPU, and there is none.
    NoGpu(String),
    /// All checks were begun; the worker ends, and with it the plugin's part in it.
    Ends,
}

/// Loads the plugin, describes it, and runs the checks from this one on, up to the first that fails.
pub(crate) fn work(args: &PluginArgs, from: Option<usize>, env: &Env) -> Result<(), Error> {
    let file = &args.file;
    if let Some(parent) = env.text(SUPERVISOR) {
        bind_to_parent(&parent)?;
    }
    let parent = Parent::open()?;
    let set = match KernelSet::load_untested(file) {
        Ok(set) => set,
        Err(error) if error.lacks_driver() => {
            return parent.tell(&Word::NoGpu(with_source(&error)));
        }
        Err(error) => return parent.tell(&Word::Failed(with_source(&error))),
    };
    let about = set.describe();
    parent.tell(&Word::Loaded(about.clone()))?;
    let Some(from) = from else {
        // Nothing of the plugin runs at exit.
        end_now(0);
    };
    let hears = |call: &str| {
        // A word that is text can always be written as JSON.
        let _ = parent.tell(&Word::Calls(call.into()));
    };
    let gpu = about.cuda.then(|| on_gpu(&set, args, &hears));
    let host = about
        .host
        .then(|| given(Subject::on_host(&set), args, &hears));
    let why_not = match &gpu {
        Some(Err(error)) => Some(format!("{error:#}")),
        _ => None,
    };
    if let (None, Some(why)) = (&host, &why_not) {
        let why = format!("{} works in GPU memory alone, and {why}", file.display());
        return parent.tell(&Word::NoGpu(why));
    }
    let mut subjects = Vec::new();
    subjects.extend(host.iter().map(|subject| ("host memory", subject)));
    let gpu = gpu.iter().flatten();
    subjects.extend(gpu.map(|(subject, _)| ("GPU memory", subject)));
    let mut notes: Vec<String> = Vec::new();
    notes.extend(why_not.map(|why| format!("GPU memory: not checked, {why}")));
    if subjects.len() > 1 && !args.plugin_args.is_empty() {
        // An argument may name what works in one memory alone.
        let refusals = subjects.iter().map(|(_, subject)| subject.refusal());
        let refusals: Vec<Option<String>> = refusals.collect();
        if let Some(at) = refusals.iter().position(Option::is_some)
            && refusals.contains(&None)
        {
            let (memory, _) = subjects.remove(at);
            let why = refusals.into_iter().flatten().next().unwrap_or_default();
            notes.push(format!(
                "{memory}: not checked, the kernels refuse it: {why}"
            ));
        }
    }
    let checks = subjects
        .into_iter()
        .flat_map(|(memory, subject)| CHECKS.iter().map(move |check| (memory, subject, check)));
    for (memory, subject, check) in checks.skip(from) {
        parent.tell(&Word::Begins(format!("{memory}: {}", check.name())))?;
        let outcome = check.run(subject);
        let has_failed = outcome.is_err();
        parent.tell(&Word::Ended(outcome))?;
        if has_failed {
            // What runs at exit runs below, after all checks.
            end_now(0);
        }
    }
    for note in notes {
        parent.tell(&Word::Note(note))?;
    }
    parent.tell(&Word::Ends)
}

/// Gives the subject what the user gave, and lets it tell of calls.
fn given<'a>(
    subject: Subject<'a>,
    args: &'a PluginArgs,
    hears: &'a (dyn Fn(&str) + Sync),
) -> Subject<'a> {
    let size = args.width.zip(args.height);
    subject.with(&args.plugin_args, size).heard_by(hears)
}

/// The first GPU, and a stream that outlives the subject.
fn on_gpu<'a>(
    set: &'a KernelSet,
    args: &'a PluginArgs,
    hears: &'a (dyn Fn(&str) + Sync),
) -> anyhow::Result<(Subject<'a>, Stream)> {
    let device = Device::open(0)?;
    device.bind()?;
    let stream = Stream::new(&device)?;
    // SAFETY: the context is the device's primary one, which lives as long as the process, and is current on this
    // thread, which runs all checks. The stream is kept beside the subject.
    let subject = unsafe { Subject::on_device(set, device.raw_context(), stream.raw()) }?;
    Ok((given(subject, args, hears), stream))
}

/// The way to the process that prints. The pipe is closed when this process ends, and not before: so the parent sees
/// its end.
struct Parent(ManuallyDrop<File>);

impl Parent {
    /// Writes to what was standard output when this process began.
    fn open() -> Result<Self, Error> {
        let pipe = pp_job::output::stdout().try_clone_to_owned();
        let pipe = pipe.context("cannot keep the pipe")?;
        Ok(Self(ManuallyDrop::new(File::from(pipe))))
    }

    /// Does not return when the parent is gone.
    fn tell(&self, word: &Word) -> Result<(), Error> {
        let mut line = serde_json::to_vec(word).map_err(anyhow::Error::new)?;
        line.push(b'\n');
        if (&*self.0).write_all(&line).is_err() {
            // The parent has ended, and has said why.
            end_now(1);
        }
        Ok(())
    }
}
