//! The schedule that a command looks at.

use std::fmt::{self, Display};
use std::io::{self, Read as _};
use std::path::Path;

use pp_contract::FaultKind;
use pp_job::Error;
use pp_runtime::schedule::{
    Cost, Costs, Kind, Limits, PerStage, Report, Schedule, TICKS, Timeline,
};
use pp_runtime::stage::StageError;
use serde::{Serialize, Serializer};

use crate::args::{MemoryArgs, SimulationArgs, SizeArgs, Subject, SubjectArgs};

/// A schedule, and what the user calls it.
pub(super) struct Loaded {
    pub(super) name: String,
    pub(super) schedule: Schedule,
}

impl SizeArgs {
    /// Builds a schedule of this size, or reads its file.
    pub(super) fn load(&self, subject: &Subject) -> Result<Loaded, Error> {
        match subject {
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
        let failed = |error| StageError::file("read schedule", Path::new(&name), &error);
        let bytes = bytes.map_err(failed)?;
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

impl SubjectArgs {
    /// Builds the schedule, or reads its file.
    pub(super) fn load(&self) -> Result<Loaded, Error> {
        self.size.load(&self.subject)
    }
}

impl SimulationArgs {
    /// The costs of so many stages or ranks, and microbatches.
    pub(super) fn costs(
        &self,
        count: usize,
        what: &str,
        microbatches: u32,
    ) -> Result<Costs, Error> {
        let of = |flag, list: &PerStage| {
            one_each(flag, list.0.len(), count, what)?;
            for (place, of_stage) in (1..).zip(&list.0) {
                let flag = format!("{flag}, at place {place} of its list,");
                one_each(&flag, of_stage.len(), microbatches as usize, "microbatches")?;
            }
            Ok::<_, Error>(list.clone())
        };
        Ok(Costs {
            forward: of("--forward", &self.forward)?,
            input: of("--input", &self.input)?,
            weight: of("--weight", &self.weight)?,
            transfer: of("--transfer", &self.transfer)?,
        })
    }
}

/// An option has one number for all, or one for each of so many.
fn one_each(flag: &str, given: usize, count: usize, what: &str) -> Result<(), Error> {
    match given {
        given if given == 1 || given == count => Ok(()),
        given => Err(Error::Usage(format!(
            "{flag} has {given} numbers, and there are {count} {what}; give one, or one for each"
        ))),
    }
}

/// By rank: the most bytes of activations at a time, if it is known what a stage keeps.
#[derive(Serialize)]
pub(super) struct PeakMemory {
    #[serde(skip_serializing_if = "Option::is_none")]
    activation_bytes: Option<Vec<u64>>,
}

impl Display for PeakMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(bytes) = &self.activation_bytes else {
            return Ok(());
        };
        let bytes: Vec<_> = bytes.iter().map(u64::to_string).collect();
        writeln!(f, "activation bytes by rank, at most: {}", bytes.join(", "))
    }
}

/// A number of millionths: a time in ticks, shown in the unit of the costs, or parts of a microbatch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Decimal(pub(super) u64);

impl Display for Decimal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (self.0 as f64 / TICKS as f64).fmt(f)
    }
}

impl Serialize for Decimal {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self.0.is_multiple_of(TICKS) {
            true => to.serialize_u64(self.0 / TICKS),
            false => to.serialize_f64(self.0 as f64 / TICKS as f64),
        }
    }
}

impl Loaded {
    /// Checks the schedule with so many slots on each edge, or finds how many it needs.
    pub(super) fn check(&self, slots: Option<u32>) -> Result<Report, Error> {
        self.schedule
            .check(Limits { slots })
            .map_err(|flaw| self.refused("check schedule", flaw))
    }

    /// What happens when, in ticks. It is checked, too.
    pub(super) fn simulate(&self, args: &SimulationArgs) -> Result<Timeline, Error> {
        let schedule = &self.schedule;
        let costs = args.costs(
            schedule.stages() as usize,
            "stages",
            schedule.microbatches(),
        )?;
        self.simulate_at(&costs, args.slots)
    }

    /// [`Loaded::simulate`], at other costs.
    pub(super) fn simulate_at(
        &self,
        costs: &impl Cost,
        slots: Option<u32>,
    ) -> Result<Timeline, Error> {
        let timeline = self.schedule.simulate(costs, Limits { slots });
        timeline.map_err(|flaw| self.refused("simulate schedule", flaw))
    }

    /// The bytes of its activations.
    pub(super) fn memory(&self, args: &MemoryArgs) -> Result<PeakMemory, Error> {
        let stages = self.schedule.stages() as usize;
        let size = args.activation_bytes.as_ref();
        if let Some(size) = size {
            one_each("--activation-bytes", size.0.len(), stages, "stages")?;
        }
        let bytes = |size: &PerStage| self.schedule.activations(|stage| size.of(stage, 0));
        Ok(PeakMemory {
            activation_bytes: size.map(bytes),
        })
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
