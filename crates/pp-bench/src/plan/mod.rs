//! `pp plan`: which ranks the stages of a pipeline are to stand on, on this machine.
//!
//! *Hazard.* A prediction that nobody checked. *Choices.* Every figure comes from a job that this command starts: one on one
//! rank for each number of parts, which gives the work of each stage; one that only hands payloads over; and the proposal
//! itself. What the members of a group tell each other is not known before they run, so groups are not predicted: a few are
//! run beside the best chain. Where there are fewer GPUs than ranks, the best chain on GPUs, the best one on CPUs, and one of both are
//! predicted and run. What cannot run is left out, by name. With `--all` every placement is run, so that a reader sees how good the
//! proposal is.

mod report;
mod search;
mod subject;

use std::path::Path;

use pp_command::env::Env;
use pp_command::print_result;
use pp_contract::{DeviceName, FaultKind};
use pp_job::Error;
use pp_job::command_line::say_note;
use pp_kernels::Description;
use pp_transport::launch::Launcher;

use self::report::{Alone, LeftOut, Outcome, PlanReport};
use self::search::{Chain, Placement};
use self::subject::{Candidate, Failed, Seen, Subject};
use crate::args::PlanArgs;

/// The most placements that `--all` runs.
const MOST_RUN: usize = 1_000;
/// The devices of two ranks whose edge is measured.
const ON_CPUS: &str = "cpu,cpu";
const ON_BOTH: &str = "cpu,cuda:0";

/// Performs `pp plan`: measures, proposes, runs the proposal and prints. `describe` says what a plugin says about itself.
///
/// # Errors
/// A launcher started this process, there is nothing that can be placed, or a job that is measured fails.
pub fn plan(
    args: &PlanArgs,
    env: &Env,
    describe: impl Fn(&Path) -> Result<Description, Error>,
) -> Result<(), Error> {
    if pp_job::command_line::world(env.lookup())?.is_some() {
        return Err(Error::Usage(format!(
            "pp plan starts its own jobs on this machine, and a launcher has started this process; start it without \
             one, or {}",
            Launcher::unset_all()
        )));
    }
    let subject = Subject::open(args, describe)?;
    let all = every_placement(args, &subject)?;
    let mut measured = Measured::of(args, &subject)?;
    let candidates = measured.candidates(all)?;
    let (placements, not_run) = outcomes(args, &subject, candidates)?;
    measured.left_out.extend(not_run);
    if let Some(note) = placements.first().and_then(Outcome::note) {
        say_note(note);
    }
    print_result(&measured.report(placements)?, args.json)
}

/// What was measured before anything is placed.
struct Measured<'a> {
    args: &'a PlanArgs,
    subject: &'a Subject<'a>,
    cores: u32,
    /// All stages on one rank, for each number of parts.
    on_one_rank: Vec<String>,
    alone: Vec<Seen>,
    /// The GPUs of this machine.
    gpus: u32,
    /// What an edge costs each of its ranks, and how long a payload is on its way, in milliseconds.
    edge: [f64; 2],
    left_out: Vec<LeftOut>,
}

impl<'a> Measured<'a> {
    fn of(args: &'a PlanArgs, subject: &'a Subject<'a>) -> Result<Self, Error> {
        let parts = 1..=subject.most_parts();
        let on_one_rank: Vec<String> = parts
            .map(|parts| subject.text(parts, &vec![0; subject.count(parts)]))
            .collect();
        let alone = alone_on(args, subject, &on_one_rank, None)?.map_err(Failed::into_error)?;
        let mut measured = Self {
            args,
            subject,
            cores: std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32),
            on_one_rank,
            alone,
            gpus: subject.gpus(),
            edge: [0.0; 2],
            left_out: Vec::new(),
        };
        if args.ranks > 1 && !(measured.are_few() && measured.gpus == 1) {
            let devices = measured.is_on_host().then_some(ON_CPUS);
            measured.edge = measured.edge_ms(devices)?.map_err(Failed::into_error)?;
        }
        Ok(measured)
    }

    fn is_on_host(&self) -> bool {
        self.alone[0].is_on_host
    }

    /// Says whether there are GPUs, and fewer than ranks.
    fn are_few(&self) -> bool {
        !self.is_on_host() && (1..self.args.ranks).contains(&self.gpus)
    }

    fn edge_ms(&self, devices: Option<&str>) -> Result<Result<[f64; 2], Failed>, Error> {
        self.subject.edge_ms(self.alone[0].bytes, devices)
    }

    fn chains(&self, alone: &[Seen], edge: [f64; 2]) -> Vec<Chain> {
        let (subject, cores) = (self.subject, self.cores);
        let chain =
            |(parts, seen): (u32, &Seen)| chain(seen, edge, subject.cores(parts, cores), cores);
        (1..).zip(alone).map(chain).collect()
    }

    fn candidate(&self, (parts, placed): &(u32, Placement)) -> Candidate {
        Candidate {
            predicted_ms: Some(placed.period_ms),
            // Else some ranks would be on GPUs.
            devices: (self.is_on_host() && self.gpus > 0).then(|| devices(placed, 0)),
            ..Candidate::of(self.subject.text(*parts, &placed.ranks))
        }
    }

    /// What is run: the best chain, those with CPUs where there are few GPUs, else groups, and all other placements with `--all`.
    fn candidates(&mut self, all: Vec<Vec<Vec<u32>>>) -> Result<Vec<Candidate>, Error> {
        let chains = self.chains(&self.alone, self.edge);
        let are_few = self.are_few();
        let best = best(&chains, if are_few { self.gpus } else { self.args.ranks });
        let mut candidates = vec![self.candidate(&best)];
        match are_few {
            true => candidates.extend(self.with_cpus()?),
            false => candidates.extend(self.subject.groups().into_iter().map(Candidate::of)),
        }
        for ((parts, chain), placements) in (1..).zip(&chains).zip(all) {
            let placed = placements.into_iter().map(|ranks| (parts, chain.on(ranks)));
            let others = placed.filter(|placed| *placed != best).map(|placed| {
                let candidate = self.candidate(&placed);
                Candidate {
                    // What is on a CPU takes longer than this chain says.
                    predicted_ms: candidate.predicted_ms.filter(|_| !are_few),
                    is_proposable: false,
                    ..candidate
                }
            });
            candidates.extend(others);
        }
        Ok(candidates)
    }

    /// The best chain on CPUs, and the best one with source and sink on a CPU beside GPUs.
    fn with_cpus(&mut self) -> Result<Vec<Candidate>, Error> {
        let on_one = |devices: &str, pipelines: &[String]| Candidate {
            devices: Some(devices.to_owned()),
            ..Candidate::of(pipelines[0].clone())
        };
        let alone = match alone_on(self.args, self.subject, &self.on_one_rank, Some("cpu"))? {
            Ok(alone) => alone,
            Err(failed) => {
                let candidate = on_one("cpu", &self.on_one_rank);
                self.left_out.push(LeftOut::of(candidate, &failed));
                return Ok(Vec::new());
            }
        };
        let between_cpus = self.edge_ms(Some(ON_CPUS))?.map_err(Failed::into_error)?;
        let on_cpus = self.chains(&alone, between_cpus);
        let mut placed = vec![(best(&on_cpus, self.args.ranks), 0)];
        match self.edge_ms(Some(ON_BOTH))? {
            Err(failed) => {
                let candidate = on_one(ON_BOTH, &self.on_one_rank);
                self.left_out.push(LeftOut::of(candidate, &failed));
            }
            Ok(between) => {
                self.edge = between;
                let on_gpus = self.chains(&self.alone, between);
                let both = (1..).zip(on_gpus.iter().zip(&on_cpus));
                let both = both
                    .filter_map(|(parts, (gpu, cpu))| Some((parts, on_both(gpu, cpu, self.gpus)?)));
                placed.extend(both.reduce(better).map(|both| (both, self.gpus)));
            }
        }
        let candidates = placed.iter().rev().map(|(placed, gpus)| Candidate {
            devices: Some(devices(&placed.1, *gpus)),
            ..self.candidate(placed)
        });
        Ok(candidates.collect())
    }

    /// Proposes the pipeline with the shortest measured period.
    fn report(self, mut placements: Vec<Outcome>) -> Result<PlanReport, Error> {
        let (on_host, are_few) = (self.is_on_host(), self.are_few());
        let shorter = |a: &&Outcome, b: &&Outcome| a.measured_ms.total_cmp(&b.measured_ms);
        let is_proposable = |outcome: &&Outcome| outcome.candidate.is_proposable;
        let proposable: Vec<Outcome> = placements.iter().filter(is_proposable).cloned().collect();
        let Some(proposal) = proposable.iter().min_by(shorter).cloned() else {
            let what = format!("no pipeline that was tried can run: {}", self.left_out[0]);
            return Err(Error::local(FaultKind::BadInput, "plan", what));
        };
        placements.sort_by(|a, b| shorter(&a, &b));
        let on_one_rank = self.on_one_rank.iter().zip(&self.alone);
        let busy = self.subject.cores(1, self.cores).into_iter();
        Ok(PlanReport {
            most_ranks: self.args.ranks,
            rounds: self.args.rounds,
            cores: self.cores,
            gpus: are_few.then_some(self.gpus),
            on_host,
            cores_of_a_stage: busy.max().unwrap_or(1),
            bytes: self.alone[0].bytes,
            edge_us: self.edge[0] * 1e3,
            link_us: self.edge[1] * 1e3,
            over_predicted: proposal.over_predicted(),
            over_best: self
                .args
                .all
                .then(|| proposal.measured_ms / placements[0].measured_ms - 1.0),
            proposal,
            chain_and_groups: proposable,
            on_one_rank: on_one_rank
                .map(|(text, seen)| Alone::of(text, seen))
                .collect(),
            left_out: self.left_out,
            placements: if self.args.all {
                placements
            } else {
                Vec::new()
            },
        })
    }
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

/// Places the stages between source and sink on so many GPUs, and source and sink on a CPU, rank 0. None if there is no stage between.
fn on_both(gpu: &Chain, cpu: &Chain, gpus: u32) -> Option<Placement> {
    let last = gpu.work_ms.len() - 1;
    if last < 2 {
        return None;
    }
    let between = Chain {
        work_ms: gpu.work_ms[1..last].to_vec(),
        ..gpu.clone()
    };
    let placed = between.place(gpus);
    let ranks = placed.ranks.iter().map(|rank| rank + 1);
    let ranks: Vec<u32> = [0].into_iter().chain(ranks).chain([0]).collect();
    let ends = [cpu.work_ms[0], cpu.work_ms[last]];
    let whole = Chain {
        work_ms: [&ends[..1], &between.work_ms, &ends[1..]].concat(),
        ..gpu.clone()
    };
    Some(whole.on(ranks))
}

/// The devices of ranks of which so many, behind rank 0, are on GPUs; all on CPUs if there are none.
fn devices(placed: &Placement, gpus: u32) -> String {
    let ranks = 0..=placed.ranks.iter().copied().max().unwrap_or(0);
    let devices = ranks.map(|rank| match rank.checked_sub(1) {
        Some(gpu) if gpu < gpus => DeviceName::Cuda(gpu),
        _ => DeviceName::Cpu,
    });
    DeviceName::list(&devices.collect::<Vec<_>>())
}

/// The better of two placements, with their numbers of parts.
fn better(best: (u32, Placement), other: (u32, Placement)) -> (u32, Placement) {
    match other.1.is_better_than(&best.1) {
        true => other,
        false => best,
    }
}

/// Finds the number of parts and the placement that are to have the shortest period; the chains have 1, 2, 3 ... parts.
fn best(chains: &[Chain], most_ranks: u32) -> (u32, Placement) {
    let placed = (1..)
        .zip(chains)
        .map(|(parts, chain)| (parts, chain.place(most_ranks)));
    let best = placed.reduce(better);
    best.expect("there is one part at least")
}

/// Runs pipelines. Gives those that ran, and those that did not.
fn outcomes(
    args: &PlanArgs,
    subject: &Subject<'_>,
    candidates: Vec<Candidate>,
) -> Result<(Vec<Outcome>, Vec<LeftOut>), Error> {
    let seen = runs(args, subject, &candidates)?;
    let (mut outcomes, mut left_out) = (Vec::new(), Vec::new());
    for (candidate, seen) in candidates.into_iter().zip(seen) {
        match seen {
            Ok(seen) => outcomes.push(Outcome {
                candidate,
                measured_ms: seen.period_ms,
            }),
            Err(failed) => left_out.push(LeftOut::of(candidate, &failed)),
        }
    }
    Ok((outcomes, left_out))
}

/// Runs all stages on one rank, on this device or where it finds itself, for each number of parts.
fn alone_on(
    args: &PlanArgs,
    subject: &Subject<'_>,
    pipelines: &[String],
    device: Option<&str>,
) -> Result<Result<Vec<Seen>, Failed>, Error> {
    let candidates = pipelines.iter().cloned().map(|pipeline| Candidate {
        devices: device.map(str::to_owned),
        ..Candidate::of(pipeline)
    });
    let seen = runs(args, subject, &candidates.collect::<Vec<_>>())?;
    Ok(seen.into_iter().collect())
}

/// Runs each pipeline once a round, so that a change of the machine's state meets all of them. Gives the medians. One that fails is
/// not run again.
fn runs(
    args: &PlanArgs,
    subject: &Subject<'_>,
    candidates: &[Candidate],
) -> Result<Vec<Result<Seen, Failed>>, Error> {
    let mut seen: Vec<Result<Vec<Seen>, Failed>> = Vec::new();
    seen.resize_with(candidates.len(), || Ok(Vec::new()));
    for round in 1..=args.rounds {
        for (candidate, seen) in candidates.iter().zip(&mut seen) {
            let Ok(rounds) = seen else {
                continue;
            };
            say_note(format!("pp: round {round} of {}: {candidate}", args.rounds));
            match subject.run(candidate)? {
                Ok(figures) => rounds.push(figures),
                Err(failed) => *seen = Err(failed),
            }
        }
    }
    let seen = seen.into_iter();
    Ok(seen
        .map(|seen| seen.map(|rounds| median_of(&rounds)))
        .collect())
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
