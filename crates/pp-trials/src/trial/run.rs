//! Trials are chosen, run side by side, judged and told.

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::time::Instant;

use anyhow::Context;
use pp_command::{print, whole};
use pp_contract::FaultKind;
use pp_job::Error;
use serde::Serialize;

use super::job::{Ground, Transport, need_gpus};
use super::left::Machine;
use super::told::Told;
use super::work::{Work, play_all};

/// Jobs side by side; they mostly wait. Real GPUs are not shared.
const JOBS: u32 = 4;

/// The arguments of a command that runs trials.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct TrialArgs {
    /// Only the trials whose name has one of these in it, like "OM-13" or "/killed/".
    #[arg(long, value_name = "TEXT", num_args = 1..)]
    only: Vec<String>,
    /// Name the trials, and those that cannot be run here with the reason; run none.
    #[arg(long)]
    list: bool,
    /// Run a part: each feature once, and a few trials more. The text, like a commit's hash, chooses which.
    #[arg(long, value_name = "SEED")]
    part: Option<String>,
    /// What carries the payloads of the jobs.
    #[arg(long, value_enum, default_value = "host")]
    transport: Transport,
    /// Trials at a time, 1 to 64; by default 4, and 1 on GPUs.
    #[arg(long, value_name = "N", value_parser = whole(1..=64_u32))]
    jobs: Option<u32>,
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
}

/// For so many trials that bring a feature a part has one more.
const MORE: usize = 8;

/// One thing to try.
pub(crate) trait Trial: Sync {
    fn name(&self) -> String;

    /// What a part must have at least once.
    fn features(&self) -> Vec<String>;

    /// What it is, for a person.
    fn means(&self, ground: Ground) -> String;

    /// Why it cannot be run on this ground.
    fn not_here(&self, ground: Ground) -> Option<&'static str>;
}

#[derive(Serialize)]
struct Report {
    what: &'static str,
    ground: &'static str,
    trials: Vec<Told>,
    /// What all of them left on the machine.
    left: Vec<String>,
    seconds: f64,
}

impl Report {
    fn count(&self, is: fn(&Told) -> bool) -> usize {
        self.trials.iter().filter(|told| is(told)).count()
    }

    fn wrong(&self) -> usize {
        self.count(|told| !told.wrong.is_empty())
    }

    fn late(&self) -> usize {
        self.count(Told::is_late)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for what in &self.left {
            writeln!(f, "    LEFT: {what}")?;
        }
        writeln!(
            f,
            "{} {} on {}: {} run, {} did not end as they must, {} late; {:.1} s",
            self.trials.len(),
            self.what,
            self.ground,
            self.count(|told| told.not_run.is_none()),
            self.wrong(),
            self.late(),
            self.seconds,
        )
    }
}

impl TrialArgs {
    pub(crate) fn ground(&self) -> Ground {
        Ground::of(self.transport)
    }

    /// Runs those that were chosen, each in a folder of its own; or names them. On GPUs they take so many GPUs.
    pub(crate) fn run<T: Trial>(
        &self,
        what: &'static str,
        gpus: u32,
        mut trials: Vec<T>,
        play: impl Fn(&T, &Path, &mut Told) + Sync,
    ) -> Result<(), Error> {
        let (ground, only) = (self.ground(), &self.only);
        trials.retain(|trial| {
            let name = trial.name();
            only.is_empty() || only.iter().any(|text| name.contains(text))
        });
        if let Some(seed) = &self.part {
            trials.retain(|trial| trial.not_here(ground).is_none());
            choose(&mut trials, seed);
        }
        if trials.is_empty() {
            return Err(Error::Usage(format!(
                "none of the {what} has {only:?} in its name; --list names them"
            )));
        }
        let begin = |trial: &T| Told {
            name: trial.name(),
            means: trial.means(ground),
            not_run: trial.not_here(ground).map(str::to_owned),
            ..Told::default()
        };
        if self.list {
            let line = |told: Told| match told.not_run {
                Some(_) => told.to_string(),
                None => format!("{:<40} {}\n", told.name, told.means),
            };
            return print(&trials.iter().map(begin).map(line).collect::<String>());
        }
        let on_gpus = ground.is_real();
        if on_gpus {
            need_gpus(gpus, ground)?;
        }
        let work = Work::new(what)?;
        let started = Instant::now();
        let before = Machine::look(on_gpus);
        let jobs = self.jobs.unwrap_or(if on_gpus { 1 } else { JOBS });
        let told = play_all(&trials, jobs as usize, |trial| {
            let mut told = begin(trial);
            if told.not_run.is_none() {
                let folder = work.path().join(told.name.replace('/', "-"));
                play(trial, &folder, &mut told);
                let _ = std::fs::remove_dir_all(folder);
            }
            if !self.json {
                let _ = print(&told.to_string());
            }
            told
        });
        drop(work);
        let report = Report {
            what,
            ground: ground.name(),
            trials: told,
            left: Machine::left_since(&before, on_gpus),
            seconds: started.elapsed().as_secs_f64(),
        };
        let text = if self.json {
            serde_json::to_string(&report).context("cannot write the report")? + "\n"
        } else {
            report.to_string()
        };
        print(&text)?;
        let (all, late) = (report.trials.len(), report.late());
        // What is left on the machine counts like a bad trial.
        let bad = report.wrong() + report.left.len();
        if bad > 0 {
            return Err(anyhow::anyhow!("{bad} of {all} {what} did not end as they must").into());
        }
        if late > 0 {
            let why = format!(
                "{late} of {all} {what} took longer than their bound; run them where nothing else runs"
            );
            return Err(Error::local(FaultKind::TimedOut, "end jobs", why));
        }
        Ok(())
    }
}

/// Keeps a part of the trials that has each feature. The seed gives their order, and so decides between equals.
pub(crate) fn choose<T: Trial>(trials: &mut Vec<T>, seed: &str) {
    trials.sort_by_cached_key(|trial| {
        let mut digest = DefaultHasher::new();
        (seed, trial.name()).hash(&mut digest);
        digest.finish()
    });
    let with_features = trials.drain(..).map(|trial| (trial.features(), trial));
    let mut others: Vec<_> = with_features.collect();
    let mut seen = BTreeSet::new();
    loop {
        let new = |(features, _): &(Vec<String>, T)| {
            let new = features.iter().filter(|feature| !seen.contains(*feature));
            new.count()
        };
        let most = others.iter().map(new).enumerate();
        let most = most.max_by_key(|(at, new)| (*new, Reverse(*at)));
        let Some((at, 1..)) = most else { break };
        let (features, trial) = others.remove(at);
        seen.extend(features);
        trials.push(trial);
    }
    let more = trials.len() / MORE;
    trials.extend(others.into_iter().map(|(_, trial)| trial).take(more));
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Trial for u32 {
        fn name(&self) -> String {
            self.to_string()
        }

        fn features(&self) -> Vec<String> {
            vec![format!("tens {}", self / 10), format!("ones {}", self % 10)]
        }

        fn means(&self, _: Ground) -> String {
            String::new()
        }

        fn not_here(&self, _: Ground) -> Option<&'static str> {
            None
        }
    }

    #[test]
    fn a_part_has_each_feature_and_follows_from_its_seed() {
        let part = |seed| {
            let mut all = (0..100).collect();
            choose(&mut all, seed);
            all
        };
        let features: BTreeSet<_> = part("a").iter().flat_map(Trial::features).collect();
        assert_eq!(features.len(), 20);
        assert_eq!(part("a").len(), 10 + 10 / MORE);
        assert_eq!(part("a"), part("a"));
        let sorted = |seed| part(seed).into_iter().collect::<BTreeSet<_>>();
        assert_ne!(sorted("a"), sorted("b"));
    }
}
