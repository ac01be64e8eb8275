//! What is told of a trial.

use std::fmt;
use std::time::Duration;

use pp_testing::process::Process;
use serde::Serialize;

/// How the line of an error begins.
const ERROR: &str = "pp: error: ";

/// How a process ended, and what it said.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ended {
    /// The exit code, or a signal below zero; `None` where it did not end.
    pub(crate) code: Option<i32>,
    /// Each line of its standard error.
    pub(crate) lines: Vec<String>,
}

impl Ended {
    /// As far as it has.
    pub(crate) fn of(process: &Process) -> Self {
        let lines = process.lines().into_iter();
        Self {
            code: process.ended().map(|(_, code)| code),
            lines: lines.map(|(_, line)| line).collect(),
        }
    }

    /// Its errors.
    pub(crate) fn errors(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.lines.iter().filter_map(|l| l.strip_prefix(ERROR))
    }

    /// Holds its code against those that it may have.
    pub(crate) fn check(&self, wanted: &[i32]) -> Result<(), String> {
        match self.code {
            None => Err("it did not end".into()),
            Some(code) if wanted.contains(&code) => Ok(()),
            Some(code) => {
                let said: Vec<_> = self.errors().collect();
                Err(format!("it ended with {code}, not {wanted:?}: {said:?}"))
            }
        }
    }
}

/// Its end, and its last error without the hint: the recording that this names goes away with the job.
impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            Some(code @ 0..) => write!(f, "(exit {code})")?,
            Some(signal) => write!(f, "(signal {})", -signal)?,
            None => f.write_str("(lives)")?,
        }
        let Some(error) = self.errors().next_back() else {
            return Ok(());
        };
        let hint = error.find(" (what the ranks did last: ");
        write!(f, ": {}", &error[..hint.unwrap_or(error.len())])
    }
}

/// How long something took.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Time {
    what: &'static str,
    ms: f64,
    /// How long it may take.
    bound_ms: Option<f64>,
}

impl Time {
    pub(crate) fn new(what: &'static str, took: Duration, bound: Option<Duration>) -> Self {
        let ms = |time: Duration| (time.as_secs_f64() * 10_000.0).round() / 10.0;
        Self {
            what,
            ms: ms(took),
            bound_ms: bound.map(ms),
        }
    }

    pub(crate) fn is_late(&self) -> bool {
        self.bound_ms.is_some_and(|bound| self.ms > bound)
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:.0}", self.what, self.ms)?;
        if let Some(bound) = self.bound_ms {
            write!(f, " of {bound:.0}")?;
        }
        let late = if self.is_late() { " LATE" } else { "" };
        write!(f, " ms{late}")
    }
}

/// What is told of a trial.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Told {
    pub(crate) name: String,
    pub(crate) means: String,
    /// Why it was not run.
    pub(crate) not_run: Option<String>,
    /// What each process did.
    pub(crate) ended: Vec<String>,
    pub(crate) times: Vec<Time>,
    pub(crate) wrong: Vec<String>,
}

impl Told {
    /// It took longer than its bound.
    pub(crate) fn is_late(&self) -> bool {
        self.times.iter().any(Time::is_late)
    }
}

impl fmt::Display for Told {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, not_run, .. } = self;
        if let Some(why) = not_run {
            return writeln!(f, "{name:<40} not run: {why}");
        }
        let times: Vec<_> = self.times.iter().map(Time::to_string).collect();
        writeln!(f, "{name:<40} {}", times.join(", "))?;
        for ended in &self.ended {
            writeln!(f, "    {ended}")?;
        }
        for what in &self.wrong {
            writeln!(f, "    WRONG: {what}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_end_is_told_beside_the_outcome() {
        let second = Duration::from_secs(1);
        for (took, bound, text) in [
            (second, Some(second), "a 1000 of 1000 ms"),
            (2 * second, Some(second), "a 2000 of 1000 ms LATE"),
            (2 * second, None, "a 2000 ms"),
        ] {
            let time = Time::new("a", took, bound);
            assert_eq!(time.to_string(), text);
            assert_eq!(time.is_late(), text.ends_with("LATE"));
        }
    }
}
