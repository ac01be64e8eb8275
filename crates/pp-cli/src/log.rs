//! The log on standard error, which `PP_LOG` switches on.

use std::fmt;
use std::io::IsTerminal as _;

use pp_bench::BenchCommand;
use pp_command::env::Env;
use pp_contract::Rank;
use pp_job::Error;
use pp_job::command_line::be_quiet;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime as Clock};

use crate::args::{Command, Loudness};

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// What says which level.
const VARIABLE: &str = "PP_LOG";

/// A target that users name, and the crates that it stands for.
const WHOLE: &str = "pp_transport";
const PARTS: [&str; 3] = ["pp_meet", "pp_edges", "pp_gpu"];

/// How each line begins: the time, and which process of the job this is.
struct Head(String);

impl FormatTime for Head {
    fn format_time(&self, to: &mut Writer<'_>) -> fmt::Result {
        Clock.format_time(to)?;
        write!(to, " {}", self.0)
    }
}

impl Loudness {
    /// Lets this process say as much as it is to. A `PP_LOG` that is set stays.
    pub(crate) fn apply(self, env: &mut Env) {
        if self.is_quiet {
            be_quiet();
        }
        match self.verbose {
            0 => {}
            1 => env.set_default(VARIABLE, "info"),
            _ => env.set_default(VARIABLE, "debug"),
        }
    }
}

/// Begins to log, if `PP_LOG` says so.
///
/// # Errors
/// `PP_LOG` is no level.
pub(crate) fn start(command: &Command, env: &Env) -> Result<(), Error> {
    let Some(text) = env.get(VARIABLE).filter(|text| !text.is_empty()) else {
        return Ok(());
    };
    let filter = text
        .to_str()
        .filter(|text| text.split(',').all(is_directive))
        .and_then(|text| EnvFilter::try_new(of_parts(text)).ok());
    let filter = filter.ok_or_else(|| {
        Error::Usage(format!(
            "PP_LOG is {text:?}; it takes {}, or TARGET=LEVEL (pp_transport=debug), or several of these with commas \
             between them",
            LEVELS.join(", ")
        ))
    })?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_timer(Head(process(command, env.rank())))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    Ok(())
}

/// `LEVEL` or `TARGET=LEVEL`: a target without a level would be everything of a target that is not there.
fn is_directive(text: &str) -> bool {
    let level = text.rsplit_once('=').map_or(text, |(_, level)| level);
    LEVELS.contains(&level.to_ascii_lowercase().as_str())
}

/// The directives, and those of pp_transport for its parts, too.
fn of_parts(text: &str) -> String {
    let mut all: Vec<String> = text.split(',').map(str::to_owned).collect();
    for directive in text.split(',').filter(|text| text.starts_with(WHOLE)) {
        all.extend(PARTS.map(|part| directive.replacen(WHOLE, part, 1)));
    }
    all.join(",")
}

/// What the process is called in the log.
fn process(command: &Command, launched_as: Option<Rank>) -> String {
    let has_ranks = match command {
        Command::Run(args) => args.world() > 1,
        Command::Bench(BenchCommand::Overlap(_) | BenchCommand::Link(_)) => true,
        _ => false,
    };
    match launched_as.filter(|_| has_ranks) {
        Some(rank) => format!("rank {rank}"),
        None if has_ranks => "supervisor".into(),
        None => "pp".into(),
    }
}
