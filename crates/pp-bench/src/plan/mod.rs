//! `pp plan`: which ranks the stages of a pipeline are to stand on, on this machine.
//!
//! *Hazard.* A prediction that nobody checked. *Choices.* Every figure comes from a job that this command starts: one on one
//! rank for each number of parts, which gives the work of each stage; one that only hands payloads over; and the proposal
//! itself. What the members of a group tell each other is not known before they run, so groups are not predicted: a few are
//! run beside the best chain. With `--all` every placement is run, so that a reader sees how good the proposal is.

mod search;
mod subject;

use std::fmt;
use std::path::Path;

use pp_command::env::Env;
use pp_command::print_result;
use pp_contract::Pipeline;
use pp_job::Error;
use pp_job::internal::say;
use pp_kernels::Description;
use pp_transport::launch::Launcher;
use serde::Serialize;

use self::search::{Chain, Placement};
use self::subject::{Seen, Subject};
use crate::args::PlanArgs;

/// The most placements that `--all` runs.
const MOST_RUN: usize = 1_000;
/// A measured and a predicted period that differ by more than this share are worth a note.
const FAR: f64 = 0.2;

/// Performs `pp plan`: measures, proposes, runs the proposal and prints. `describe` says what a plugin says about itself.
///
/// # Errors
/// A launcher started this process, there is nothing that can be placed, or a job that is measured fails.
pub fn plan(
    args: &PlanArgs,
    env: &Env,
    describe: impl Fn(&Path) -> Result<Description, Error>,
) -> Result<(), Error> {
    if pp_job::internal::world(env.lookup())?.is_some() {
        return Err(Error::Usage(format!(
            "pp plan starts its own jobs on this machine, and a launcher has started this process; start it without \
             one, or {}",
            Launcher::unset_all()
        )));
    }
    let subject = Subject::open(args, describe)?;
    let all = every_placement(args, &subject)?;
    let parts = 1..=subject.most_parts();
    let on_one_rank: Vec<String> = parts
        .map(|parts| subject.text(parts, &vec![0; subject.count(parts)]))
        .collect();
    let alone = runs(args, &subject, &on_one_rank)?;
    let (bytes, is_on_host) = (alone[0].bytes, alone[0].is_on_host);
    let edge = match args.ranks {
        1 => [0.0; 2],
        _ => subject.edge_ms(bytes, is_on_host)?,
    };
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    let chains: Vec<Chain> = (1..)
        .zip(&alone)
        .map(|(parts, seen)| chain(seen, edge, subject.cores(parts, cores), cores))
        .collect();

    let best = best(&chains, args.ranks);
    let predicted = |(parts, placed): &(u32, Placement)| {
        let text = subject.text(*parts, &placed.ranks);
        (text, Some(placed.period_ms))
    };
    let mut candidates = vec![predicted(&best)];
    let groups = subject.groups();
    candidates.extend(groups.into_iter().map(|text| (text, None)));
    let proposable = candidates.len();
    for ((parts, chain), placements) in (1..).zip(&chains).zip(all) {
        let placed = placements.into_iter().map(|ranks| (parts, chain.on(ranks)));
        let others = placed.filter(|placed| *placed != best);
        candidates.extend(others.map(|placed| predicted(&placed)));
    }
    let mut placements = outcomes(args, &subject, candidates)?;
    if let Some(note) = placements[0].note() {
        say(note);
    }
    let shorter = |a: &&Outcome, b: &&Outcome| a.measured_ms.total_cmp(&b.measured_ms);
    let proposal = placements[..proposable].iter().min_by(shorter).cloned();
    let proposal = proposal.expect("the best chain was run");
    let chain_and_groups = placements[..proposable].to_vec();
    placements.sort_by(|a, b| shorter(&a, &b));
    let report = PlanReport {
        most_ranks: args.ranks,
        rounds: args.rounds,
        cores,
        on_host: is_on_host,
        cores_of_a_stage: subject.cores(1, cores).into_iter().max().unwrap_or(1),
        bytes,
        edge_us: edge[0] * 1e3,
        link_us: edge[1] * 1e3,
        over_predicted: proposal.over_predicted(),
        over_best: args
            .all
            .then(|| proposal.measured_ms / placements[0].measured_ms - 1.0),
        proposal,
        chain_and_groups,
        on_one_rank: on_one_rank
            .iter()
            .zip(&alone)
            .map(|(text, seen)| Alone::of(text, seen))
            .collect(),
        placements: if args.all { placements } else { Vec::new() },
    };
    print_result(&report, args.json)
}

/// With `--all`, gives every placement for each number of parts.
///
/// # Errors
/// There are too many to run.
fn every_placement(args: &PlanArgs, subject: &Subject<'_>) -> Result<Vec<Vec<Vec<u32>>>, Error> {
    if !args.all {
        return Ok(Vec::new());
    }
    let placements = |parts| search::all(subject.count(parts), args.ranks, MOST_RUN);
    let all: Option<Vec<_>> = (1..=subject.most_parts()).map(placements).collect();
    let all = all.filter(|all| all.iter().map(Vec::len).sum::<usize>() <= MOST_RUN);
    all.ok_or_else(|| {
        let what = "lower --ranks or --denoise-steps, give fewer --stages, or leave --all out";
        Error::Usage(format!(
            "--all: there are more than {MOST_RUN} placements on {} ranks; {what}",
            args.ranks
        ))
    })
}

/// Makes a chain of stages that were seen on one rank, and of which each keeps so many of all `cores` busy.
fn chain(seen: &Seen, [edge_ms, link_ms]: [f64; 2], busy: Vec<u32>, cores: u32) -> Chain {
    let busy = seen.work_ms.iter().zip(busy);
    let busy_ms: f64 = busy.map(|(ms, of)| ms * f64::from(of)).sum();
    Chain {
        work_ms: seen.work_ms.clone(),
        edge_ms,
        link_ms,
        least_ms: match seen.is_on_host {
            true => busy_ms / f64::from(cores),
            false => 0.0,
        },
    }
}

/// Finds the number of parts and the placement that are to have the shortest period; the chains have 1, 2, 3 ... parts.
fn best(chains: &[Chain], most_ranks: u32) -> (u32, Placement) {
    let placed = (1..)
        .zip(chains)
        .map(|(parts, chain)| (parts, chain.place(most_ranks)));
    let best = placed.reduce(|best, other| match other.1.is_better_than(&best.1) {
        true => other,
        false => best,
    });
    best.expect("there is one part at least")
}

/// Runs pipelines, each with its predicted period where there is one.
fn outcomes(
    args: &PlanArgs,
    subject: &Subject<'_>,
    candidates: Vec<(String, Option<f64>)>,
) -> Result<Vec<Outcome>, Error> {
    let texts: Vec<String> = candidates.iter().map(|(text, _)| text.clone()).collect();
    let seen = runs(args, subject, &texts)?;
    let outcomes = candidates.into_iter().zip(seen);
    let outcome = |((pipeline, predicted_ms), seen): (_, Seen)| Outcome {
        pipeline,
        predicted_ms,
        measured_ms: seen.period_ms,
    };
    Ok(outcomes.map(outcome).collect())
}

/// Runs each pipeline once a round, so that a change of the machine's state meets all of them. Gives the medians.
fn runs(args: &PlanArgs, subject: &Subject<'_>, pipelines: &[String]) -> Result<Vec<Seen>, Error> {
    let mut seen: Vec<Vec<Seen>> = vec![Vec::new(); pipelines.len()];
    for round in 1..=args.rounds {
        for (pipeline, seen) in pipelines.iter().zip(&mut seen) {
            say(format!("pp: round {round} of {}: {pipeline}", args.rounds));
            seen.push(subject.run(pipeline)?);
        }
    }
    Ok(seen.iter().map(|rounds| median_of(rounds)).collect())
}

/// The medians of the rounds of a pipeline.
fn median_of(rounds: &[Seen]) -> Seen {
    let median = |figure: &dyn Fn(&Seen) -> f64| {
        let mut figures: Vec<f64> = rounds.iter().map(figure).collect();
        figures.sort_by(f64::total_cmp);
        figures[figures.len() / 2]
    };
    let stages = 0..rounds[0].work_ms.len();
    Seen {
        period_ms: median(&|seen| seen.period_ms),
        work_ms: stages.map(|at| median(&|seen| seen.work_ms[at])).collect(),
        ..rounds[0].clone()
    }
}

/// The result of `pp plan`. Times are for one chunk, and medians of the rounds.
#[derive(Serialize)]
struct PlanReport {
    most_ranks: u32,
    rounds: u32,
    cores: u32,
    /// Payloads lie in host memory, and the ranks share its cores.
    on_host: bool,
    /// Cores that the stage with the most threads keeps busy.
    cores_of_a_stage: u32,
    /// The payload of the source.
    bytes: u64,
    /// What an edge costs each of its ranks.
    edge_us: f64,
    /// How long a payload is on its way over an edge.
    link_us: f64,
    /// The stages on one rank, for each number of parts.
    on_one_rank: Vec<Alone>,
    /// That of `chain_and_groups` with the shortest measured period.
    proposal: Outcome,
    /// The measured period of the proposal over the predicted one, less 1.
    over_predicted: Option<f64>,
    /// The chain with the shortest predicted period, then the groups that were run.
    chain_and_groups: Vec<Outcome>,
    /// The measured period of the proposal over that of the best placement, less 1; only with `--all`.
    over_best: Option<f64>,
    /// All placements, the shortest measured period first; only with `--all`.
    placements: Vec<Outcome>,
}

/// All stages on one rank.
#[derive(Serialize)]
struct Alone {
    pipeline: String,
    measured_ms: f64,
    stages: Vec<StageWork>,
}

#[derive(Serialize)]
struct StageWork {
    stage: String,
    work_ms: f64,
}

/// A placement that was run.
#[derive(Clone, Serialize)]
struct Outcome {
    pipeline: String,
    /// The periods. That of a group is not predicted.
    predicted_ms: Option<f64>,
    measured_ms: f64,
}

impl Outcome {
    fn over_predicted(&self) -> Option<f64> {
        let over = |predicted_ms| self.measured_ms / predicted_ms - 1.0;
        self.predicted_ms.map(over)
    }

    /// What is said of a prediction that is far off.
    fn note(&self) -> Option<String> {
        let over = self.over_predicted().filter(|over| over.abs() > FAR)?;
        Some(format!(
            "pp: note: the period of {} was measured {:+.0} % off the prediction (notes begin at {:.0} %): other programs \
             ran, or the stages slow each other down; raise --rounds or --chunks, or give --all",
            self.pipeline,
            100.0 * over,
            100.0 * FAR
        ))
    }
}

impl Alone {
    fn of(text: &str, seen: &Seen) -> Self {
        let pipeline: Pipeline = text.parse().expect("it has run");
        let stages = pipeline.stages().iter().zip(&seen.work_ms);
        Self {
            pipeline: text.to_owned(),
            measured_ms: seen.period_ms,
            stages: stages
                .map(|(stage, ms)| StageWork {
                    stage: stage.label(),
                    work_ms: *ms,
                })
                .collect(),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.predicted_ms {
            Some(ms) => write!(f, "period predicted {ms:.3} ms, ")?,
            None => f.write_str("period not predicted, ")?,
        }
        write!(f, "measured {:.3} ms: {}", self.measured_ms, self.pipeline)
    }
}

impl fmt::Display for PlanReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "on one rank, medians of {} rounds:", self.rounds)?;
        for alone in &self.on_one_rank {
            let works: Vec<String> = alone
                .stages
                .iter()
                .map(|work| format!("{} {:.3} ms", work.stage, work.work_ms))
                .collect();
            writeln!(
                f,
                "  {}; period {:.3} ms",
                works.join(", "),
                alone.measured_ms
            )?;
        }
        if self.most_ranks > 1 {
            writeln!(
                f,
                "an edge with {} bytes takes {:.2} µs of each of its ranks, and a payload is on its way {:.2} µs",
                self.bytes, self.edge_us, self.link_us
            )?;
        }
        match self.on_host {
            true => writeln!(
                f,
                "assumed: the ranks share the {} cores of this machine, and a stage keeps up to {} of them busy",
                self.cores, self.cores_of_a_stage
            )?,
            false => writeln!(f, "assumed: each rank has a GPU of its own")?,
        }
        if let (Some(over), Some(best)) = (self.over_best, self.placements.first()) {
            for placement in &self.placements {
                writeln!(f, "  {placement}")?;
            }
            writeln!(
                f,
                "the proposal takes {:.1} % longer than the best of {} placements, {}",
                100.0 * over,
                self.placements.len(),
                best.pipeline
            )?;
        }
        if let [_, _, ..] = self.chain_and_groups[..] {
            writeln!(f, "the best chain, and groups, which are not predicted:")?;
            for outcome in &self.chain_and_groups {
                writeln!(f, "  {outcome}")?;
            }
        }
        writeln!(f, "proposal for {} ranks at most:", self.most_ranks)?;
        writeln!(f, "  --pipeline \"{}\"", self.proposal.pipeline)?;
        match (self.proposal.predicted_ms, self.over_predicted) {
            (Some(predicted_ms), Some(over)) => writeln!(
                f,
                "  period predicted {predicted_ms:.3} ms, measured {:.3} ms ({:+.1} %)",
                self.proposal.measured_ms,
                100.0 * over
            ),
            _ => writeln!(f, "  period measured {:.3} ms", self.proposal.measured_ms),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prediction_that_is_far_off_is_noted() {
        let note = |predicted_ms, measured_ms| {
            let pipeline = "a@0 -> b@1".to_owned();
            let outcome = Outcome {
                pipeline,
                predicted_ms,
                measured_ms,
            };
            outcome.note()
        };
        assert_eq!(note(Some(10.0), 11.9), None);
        assert_eq!(note(Some(10.0), 8.1), None);
        assert_eq!(note(None, 8.1), None);
        for (measured_ms, words) in [(12.1, "+21 % off"), (7.0, "-30 % off")] {
            let said = note(Some(10.0), measured_ms).unwrap();
            assert!(
                said.contains("a@0 -> b@1") && said.contains(words),
                "{said}"
            );
        }
    }
}
