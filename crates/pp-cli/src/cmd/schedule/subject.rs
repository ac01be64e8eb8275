//! The schedule that a command looks at.

use std::fmt::Display;
use std::io::{self, Read as _};
use std::path::Path;

use pp_contract::FaultKind;
use pp_job::Error;
use pp_runtime::schedule::{Costs, Kind, Limits, Report, Schedule, Timeline};

use crate::args::{CostArgs, Subject, SubjectArgs};

/// A schedule, and what the user calls it.
pub(super) struct Loaded {
    pub(super) name: String,
    pub(super) schedule: Schedule,
}

impl SubjectArgs {
    /// Builds the schedule, or reads its file.
    pub(super) fn load(&self) -> Result<Loaded, Error> {
        match &self.subject {
            Subject::Built(kind) => self.build(*kind),
            Subject::File(path) => self.read(path),
        }
    }

    fn build(&self, kind: Kind) -> Result<Loaded, Error> {
        let name = kind.name();
        let (Some(ranks), Some(microbatches)) = (self.ranks, self.microbatches) else {
            let text = format!("{name}: give its size with --ranks and --microbatches");
            return Err(Error::Usage(text));
        };
        let needed = kind.stages_per_rank().unwrap_or(1);
        let stages_per_rank = self.stages_per_rank.unwrap_or(needed);
        let schedule = Schedule::build(kind, ranks, stages_per_rank, microbatches)
            .map_err(|error| Error::Usage(error.to_string()))?;
        Ok(Loaded {
            name: name.into(),
            schedule,
        })
    }

    fn read(&self, path: &Path) -> Result<Loaded, Error> {
        let is_stdin = path == Path::new("-");
        let name = match is_stdin {
            true => "standard input".into(),
            false => path.display().to_string(),
        };
        let is_bare = !is_stdin && !name.contains(['.', '/']);
        if let (true, Err(unknown)) = (is_bare && !path.exists(), name.parse::<Kind>()) {
            return Err(Error::Usage(format!("{name}: {unknown}")));
        }
        let sizes = [self.ranks, self.stages_per_rank, self.microbatches];
        if sizes.iter().any(Option::is_some) {
            let text = format!(
                "{name}: the file says the size; leave out --ranks, --stages-per-rank and --microbatches"
            );
            return Err(Error::Usage(text));
        }
        let bytes = if is_stdin {
            let mut bytes = Vec::new();
            io::stdin().read_to_end(&mut bytes).map(|_| bytes)
        } else {
            std::fs::read(path)
        };
        let bytes = bytes.map_err(|error| local(FaultKind::Io, &name, error))?;
        let text = std::str::from_utf8(&bytes).map_err(|_| {
            local(
                FaultKind::BadInput,
                &name,
                "the file is not UTF-8; save it as UTF-8",
            )
        })?;
        let schedule =
            Schedule::parse_csv(text).map_err(|error| local(FaultKind::BadInput, &name, error))?;
        Ok(Loaded { name, schedule })
    }
}

impl Loaded {
    /// Checks the schedule with so many slots on each edge, or finds how many it needs.
    pub(super) fn check(&self, slots: Option<u32>) -> Result<Report, Error> {
        self.schedule
            .check(Limits { slots })
            .map_err(|flaw| self.refused("check schedule", flaw))
    }

    /// What happens when, at these costs. It is checked, too.
    pub(super) fn simulate(&self, costs: &CostArgs) -> Result<Timeline, Error> {
        let CostArgs {
            forward,
            input,
            weight,
            transfer,
        } = *costs;
        let costs = Costs {
            forward,
            input,
            weight,
            backward: None,
            transfer,
        };
        let timeline = self.schedule.simulate(&costs, Limits::default());
        timeline.map_err(|flaw| self.refused("simulate schedule", flaw))
    }

    /// A refusal of the schedule.
    pub(super) fn refused(&self, operation: &str, why: impl Display) -> Error {
        let text = format!("{}: {why}", self.name);
        Error::local(FaultKind::BadInput, operation, text)
    }
}

fn local(kind: FaultKind, name: &str, why: impl Display) -> Error {
    Error::local(kind, "read schedule", format!("{name}: {why}"))
}
