//! Which stages stand on which ranks, and whether the kernels can do that.

use std::ops::Range;

use pp_contract::pipeline::{Laps, MAX_RANKS, Ring};
use pp_contract::{DeviceName, Pipeline, StageSpec};
use pp_job::Error;
use pp_kernels::{Description, StageInfo, StageKind};

use crate::args::RunArgs;

/// The pipeline of `--pipeline`; without it that of `--ranks` or `--devices`, else of so many ranks.
pub(super) fn pipeline(args: &RunArgs, otherwise: u32) -> Result<Pipeline, Error> {
    let Some(given) = &args.pipeline else {
        let ranks = args.ranks_named().unwrap_or(otherwise);
        return of_ranks(ranks.clamp(1, MAX_RANKS), args.denoise_steps);
    };
    if let (Some(ring), 0) = (given.rings().first(), args.denoise_steps) {
        let name = &given.stages()[ring.first].name;
        return Err(Error::Usage(format!(
            "--pipeline {given}: {name} stands in a ring, whose laps share the denoise steps, and --denoise-steps is 0; \
             raise --denoise-steps, or take {name} out of the ring"
        )));
    }
    let has = given.world_size().get();
    match args.ranks {
        Some(ranks) if ranks != has => Err(Error::Usage(format!(
            "--ranks {ranks}: the number of ranks of {given} is {has}; leave --ranks out"
        ))),
        _ => Ok(given.clone()),
    }
}

/// On one rank all stages. On more, `encode` and `decode` on rank 0, and a part of `phase_b` on each other rank.
fn of_ranks(ranks: u32, steps: u32) -> Result<Pipeline, Error> {
    let parts = steps.max(1);
    if ranks > 2 && ranks - 1 > parts {
        let most = (parts + 1).clamp(2, MAX_RANKS);
        return Err(Error::Usage(format!(
            "--ranks {ranks}: the parts of --denoise-steps {steps} are at most {parts}, so {most} ranks are the most; lower \
             --ranks or raise --denoise-steps"
        )));
    }
    let text = with_parts(1.min(ranks - 1)..ranks);
    Ok(text.parse().map_err(anyhow::Error::new)?)
}

/// `encode` and `decode` on rank 0, and a part of `phase_b` on each of these ranks.
fn with_parts(ranks: Range<u32>) -> String {
    let parts: String = ranks.map(|rank| format!(" -> phase_b@{rank}")).collect();
    format!("encode@0{parts} -> decode@0")
}

/// The pipeline that also gives rank 0 a part of `phase_b`, where no pipeline was asked for, each rank has a device or
/// cores of its own, and the longest part gets shorter.
pub(super) fn faster(
    args: &RunArgs,
    devices: &[DeviceName],
    ranks: u32,
    (is_on_gpu, cores): (bool, u32),
) -> Option<String> {
    let steps = args.denoise_steps;
    let is_alone = |device: &DeviceName| {
        let same = devices.iter().filter(|other| *other == device);
        *device == DeviceName::NextCuda || same.count() == 1
    };
    // A part on a CPU may give other bytes than one on a GPU.
    if devices.iter().any(|device| device.is_gpu() != is_on_gpu) {
        return None;
    }
    let has_own =
        is_on_gpu && devices.iter().all(is_alone) || (1..=cores / ranks).contains(&args.threads);
    let gets_shorter =
        (2..=steps).contains(&ranks) && steps.div_ceil(ranks) < steps.div_ceil(ranks - 1);
    (args.pipeline.is_none() && has_own && gets_shorter).then(|| with_parts(0..ranks))
}

/// Refuses a pipeline that these kernels, of each stage, cannot run.
///
/// # Errors
/// The stage, and the remedy.
pub(super) fn check(
    pipeline: &Pipeline,
    kernels: &[Description],
    devices: &[DeviceName],
    (steps, is_given): (u16, bool),
) -> Result<(), Error> {
    let refuse = |what: String| {
        let given = if is_given {
            "--pipeline"
        } else {
            "without --pipeline it is"
        };
        Err(Error::Usage(format!("{given} {pipeline}: {what}")))
    };
    check_memory(pipeline, kernels, devices)?;
    let stages = pipeline.stages();
    for (at, (stage, kernels)) in stages.iter().zip(kernels).enumerate() {
        let name = &*stage.name;
        let Some(info) = kernels.stages.iter().find(|info| info.name == name) else {
            return refuse(format!(
                "the kernels {} have no stage {name}; write --pipeline \"{}\", on ranks of your choice",
                kernels.name,
                all(kernels)
            ));
        };
        if stage.ranks.len() > 1 && !info.in_group {
            return refuse(format!(
                "the kernels {} have no collectives for {name}, so no group of ranks can run it; give {name} one rank",
                kernels.name
            ));
        }
        check_share(pipeline, at, (&kernels.name, info), steps).or_else(refuse)?;
    }
    let one = &kernels[0];
    if kernels.iter().any(|other| other.stages != one.stages) {
        return check_kinds(pipeline, kernels).or_else(refuse);
    }
    // Parts of a stage count once.
    let mut names: Vec<&str> = stages.iter().map(|stage| &*stage.name).collect();
    names.dedup();
    let wanted: Vec<&str> = one.stages.iter().map(|info| &*info.name).collect();
    if names != wanted {
        return refuse(format!(
            "the stages of the kernels {} are others or in another order; write --pipeline \"{}\", on ranks of your choice",
            one.name,
            all(one)
        ));
    }
    Ok(())
}

/// How often a chunk goes through a ring that is walked once for each step. The most steps are fewer than 16 bits hold.
pub(super) fn steps(args: &RunArgs) -> u16 {
    args.denoise_steps as u16
}

/// Refuses an argument for the plugin of a stage that has none.
pub(super) fn check_plugin_args(args: &RunArgs, pipeline: &Pipeline) -> Result<(), Error> {
    for (key, value) in &args.plugin_args {
        let Some((stage, own)) = key.split_once('.') else {
            continue;
        };
        let is_stage = pipeline.stages().iter().any(|of| &*of.name == stage);
        let is_for_it = args.kernels.of(stage).file().is_some() && !own.is_empty();
        if is_stage && !is_for_it {
            return Err(Error::Usage(format!(
                "--plugin-arg {key}={value}: {stage} is a stage whose kernels are no plugin, or the key is empty; it takes KEY=VALUE \
                 for all plugins, or STAGE.KEY=VALUE for that of one stage"
            )));
        }
    }
    Ok(())
}

/// The most frames before a chunk that stages between source and sink look at.
pub(super) fn context_frames<'a>(kernels: impl ExactSizeIterator<Item = &'a Description>) -> u32 {
    let between = kernels.len().saturating_sub(2);
    let between = kernels.skip(1).take(between);
    between.map(|of| of.context_frames).max().unwrap_or(0)
}

/// Refuses kernels that do not take as many frames of context as the stages between source and sink look at.
pub(super) fn check_context(pipeline: &Pipeline, kernels: &[Description]) -> Result<(), Error> {
    let wanted = context_frames(kernels.iter());
    let mut stages = pipeline.stages().iter().zip(kernels);
    let Some((stage, of)) = stages.find(|(_, of)| of.context_frames < wanted) else {
        return Ok(());
    };
    Err(Error::Usage(format!(
        "--restarts and --recompute send the {wanted} frames before a chunk that a stage looks at, and the kernels {} of {} take \
         {}; use kernels of one kind, or leave the option out",
        of.name, stage.name, of.context_frames
    )))
}

/// Refuses kernels that are not there for the memory of their ranks, and a stage that stands on CPUs and on GPUs, if that may
/// change its bytes.
fn check_memory(
    pipeline: &Pipeline,
    kernels: &[Description],
    devices: &[DeviceName],
) -> Result<(), Error> {
    let stages = pipeline.stages();
    let device = |stage: &StageSpec| devices.get(stage.leader().get() as usize);
    for (stage, kernels) in stages.iter().zip(kernels) {
        let (name, Some(one)) = (&stage.name, device(stage)) else {
            continue;
        };
        let is_there = if one.is_gpu() {
            kernels.cuda
        } else {
            kernels.host
        };
        if !is_there {
            let (memory, other) = match one.is_gpu() {
                true => ("host", "cpu"),
                false => ("GPU", "a GPU"),
            };
            let rank = stage.leader();
            return Err(Error::Usage(format!(
                "{name} has the kernels {}, which work in {memory} memory, and --devices gives rank {rank} {one}; give rank {rank} {other}, or \
                 {name} other kernels",
                kernels.name
            )));
        }
        let mut infos = kernels.stages.iter();
        if infos.any(|info| info.name == **name && info.same_bytes) {
            continue;
        }
        let mut parts = stages.iter().filter(|part| part.name == *name);
        let other = parts.find_map(|part| {
            let other = device(part).filter(|other| other.is_gpu() != one.is_gpu())?;
            Some((part.leader(), other))
        });
        if let Some((rank, other)) = other {
            let first = stage.leader();
            return Err(Error::Usage(format!(
                "--devices gives {name}@{first} {one} and {name}@{rank} {other}, and the kernels of {name} do not say that it gives \
                 the same bytes on a CPU and on a GPU; give all ranks of {name} GPUs, or all CPUs"
            )));
        }
    }
    Ok(())
}

/// Refuses a stage of some of the kernels where only one of another kind can stand.
fn check_kinds(pipeline: &Pipeline, kernels: &[Description]) -> Result<(), String> {
    let last = kernels.len() - 1;
    for (at, (stage, kernels)) in pipeline.stages().iter().zip(kernels).enumerate() {
        let mut infos = kernels.stages.iter();
        let kind = infos
            .find(|info| info.name == *stage.name)
            .map(|info| info.kind);
        let (is_there, place) = match kind {
            Some(StageKind::Source) => (at == 0, "is a source, which must stand first"),
            Some(StageKind::Sink) => (at == last, "is a sink, which must stand last"),
            _ => (0 < at && at < last, "must stand between source and sink"),
        };
        if !is_there {
            let (name, kernels) = (&stage.name, &kernels.name);
            return Err(format!(
                "{name} of the kernels {kernels} {place}; change the order in --pipeline"
            ));
        }
    }
    Ok(())
}

/// Refuses fewer steps than the stages have shares, and steps that are the laps of a ring.
pub(super) fn check_least(pipeline: &Pipeline, least: u16) -> Result<(), String> {
    for (at, stage) in pipeline.stages().iter().enumerate() {
        let name = &stage.name;
        if pipeline
            .ring_at(at)
            .is_some_and(|ring| ring.laps == Laps::Steps)
        {
            return Err(format!(
                "the steps of {name} are the laps of a ring, which all chunks walk alike; write a number of laps instead of \
                 *steps, or leave --min-steps out"
            ));
        }
        let shares = stage.parts * usize::from(pipeline.laps(at, least));
        if shares > usize::from(least.max(1)) {
            return Err(format!(
                "the parts and laps of {name} are {shares} shares of the steps; --min-steps is {shares} at least"
            ));
        }
    }
    Ok(())
}

/// Refuses parts and laps that the stage cannot have, and more of them than there are denoise steps.
fn check_share(
    pipeline: &Pipeline,
    at: usize,
    (kernels, info): (&str, &StageInfo),
    steps: u16,
) -> Result<(), String> {
    let (stages, ring) = (pipeline.stages(), pipeline.ring_at(at));
    let (name, parts) = (&stages[at].name, stages[at].parts);
    if parts > 1 && !info.in_parts {
        return Err(format!(
            "the kernels {kernels} cannot cut {name} into parts; name it once"
        ));
    }
    if ring.is_some() && !info.in_ring {
        return Err(format!(
            "{name} stands in a ring, and the kernels {kernels} cannot walk {name} in laps; take it out of the ring"
        ));
    }
    let mut others = (0..stages.len()).filter(|other| stages[*other].name == *name);
    if others.any(|other| pipeline.ring_at(other) != ring) {
        return Err(format!(
            "one part of {name} stands in a ring and another one does not stand in it; put all parts of {name} into \
             one ring, or none"
        ));
    }
    let most = usize::from(steps.max(1));
    let laps = pipeline.laps(at, steps);
    match ring {
        None if parts > most => Err(format!(
            "{steps} denoise steps cannot be cut into {parts} parts of {name}; the most is {most}: name it less often, \
             or raise --denoise-steps"
        )),
        Some(ring) if parts * usize::from(laps) > most => {
            let shares = parts * usize::from(laps);
            let remedy = match most / parts {
                0 => format!("name {name} less often"),
                fewer => format!("write *{fewer} for {}", laps_of(ring)),
            };
            let whole = match parts {
                1 => name.to_string(),
                parts => format!("{parts} parts of {name}"),
            };
            Err(format!(
                "{laps} laps of {whole} are {shares} shares, and {steps} denoise steps cannot be cut into \
                 more than {most}; {remedy}"
            ))
        }
        _ => Ok(()),
    }
}

/// How the text says the laps of a ring.
fn laps_of(ring: &Ring) -> String {
    match ring.laps {
        Laps::Steps => "*steps".into(),
        Laps::Fixed(laps) => format!("*{laps}"),
    }
}

/// All stages of the kernels, where they stand without `--pipeline`.
fn all(kernels: &Description) -> String {
    let place = |info: &StageInfo| {
        let rank = u32::from(info.kind == StageKind::Middle);
        format!("{}@{rank}", info.name)
    };
    let stages: Vec<String> = kernels.stages.iter().map(place).collect();
    stages.join(" -> ")
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use pp_kernels::KernelSet;

    use super::*;

    #[test]
    fn ranks_place_the_parts_of_phase_b() {
        for (ranks, steps, expected) in [
            (1, 4, "encode@0 -> phase_b@0 -> decode@0"),
            (2, 0, "encode@0 -> phase_b@1 -> decode@0"),
            (3, 2, "encode@0 -> phase_b@1 -> phase_b@2 -> decode@0"),
        ] {
            assert_eq!(of_ranks(ranks, steps).unwrap().to_string(), expected);
        }
        for (ranks, steps, most) in [(3, 0, 2), (3, 1, 2), (6, 4, 5), (64, 62, 63)] {
            let error = of_ranks(ranks, steps).unwrap_err().to_string();
            let words = format!("so {most} ranks are the most");
            assert!(error.contains(&words), "{error}");
        }
    }

    #[test]
    fn a_rank_0_with_a_part_is_named_where_it_is_faster() {
        let args = |more: &[&str]| {
            let line = ["pp", "run"].iter().chain(more);
            match crate::args::Cli::parse_from(line).command {
                crate::args::Command::Run(args) => *args,
                _ => unreachable!(),
            }
        };
        let two = "encode@0 -> phase_b@0 -> phase_b@1 -> decode@0";
        let three = "encode@0 -> phase_b@0 -> phase_b@1 -> phase_b@2 -> decode@0";
        let given = "--pipeline=encode@0,phase_b@1,decode@0";
        for (more, ranks, is_on_gpu, expected) in [
            (&[][..], 2, true, Some(two)),
            (&["--denoise-steps=3"], 3, true, Some(three)),
            // Two passes are the longest part either way.
            (&["--denoise-steps=4"], 3, true, None),
            (&["--denoise-steps=1"], 2, true, None),
            (&[], 1, true, None),
            (&[given], 2, true, None),
            (&["--threads=2"], 2, false, Some(two)),
            // The ranks share a GPU already.
            (&["--devices=cuda:0,cuda:0"], 2, true, None),
            (&["--devices=cuda:0,cuda:1"], 2, true, Some(two)),
            // The ranks share all cores already.
            (&[], 2, false, None),
            (&["--threads=3"], 2, false, None),
        ] {
            let args = args(more);
            let found = faster(&args, &args.devices, ranks, (is_on_gpu, 4));
            assert_eq!(found.as_deref(), expected, "{more:?} {ranks}");
        }
    }

    #[test]
    fn what_the_kernels_cannot_do_is_named_with_the_remedy() {
        let mut kernels = KernelSet::for_host().describe().clone();
        let judge = |kernels: &Description, text: &str| {
            let pipeline: Pipeline = text.parse().unwrap();
            let each = vec![kernels.clone(); pipeline.stages().len()];
            check(&pipeline, &each, &[], (4, true)).map_err(|error| error.to_string())
        };
        for good in [
            "encode@0,phase_b@1,decode@2",
            "encode@0,phase_b@0,phase_b@1,decode@1",
            "encode@0,phase_b@0+1,phase_b@2,decode@1",
            "encode@0,(phase_b@1)*steps,decode@0",
            "encode@0,(phase_b@1,phase_b@2)*2,decode@0",
        ] {
            assert_eq!(judge(&kernels, good), Ok(()));
        }
        for (text, words) in [
            (
                "encode@0,blur@1,decode@0",
                "have no stage blur; write --pipeline \"encode@0 -> phase_b@1 -> decode@0\"",
            ),
            ("encode@0,decode@0", "are others or in another order"),
            (
                "encode@0,(phase_b@1,phase_b@2)*steps,decode@0",
                "4 laps of 2 parts of phase_b are 8 shares, and 4 denoise steps cannot be cut into more than 4; write *2 \
                 for *steps",
            ),
            (
                "encode@0,(phase_b@1)*5,decode@0",
                "5 laps of phase_b are 5 shares, and 4 denoise steps cannot be cut into more than 4; write *4 \
                 for *5",
            ),
            (
                "encode@0,(phase_b@1,phase_b@1,phase_b@1,phase_b@1,phase_b@1)*1,decode@0",
                "name phase_b less often",
            ),
            (
                "encode@0,phase_b@1,(phase_b@1)*2,decode@0",
                "put all parts of phase_b into one ring, or none",
            ),
            (
                "encode@0,phase_b@1,phase_b@2,phase_b@1,phase_b@2,phase_b@1,decode@0",
                "the most is 4: name it less often",
            ),
        ] {
            let error = judge(&kernels, text).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        kernels.stages[1].in_ring = false;
        let error = judge(&kernels, "encode@0,(phase_b@1)*2,decode@0").unwrap_err();
        assert!(error.contains("cpu cannot walk phase_b in laps"), "{error}");
        (kernels.stages[1].in_parts, kernels.stages[1].in_group) = (false, false);
        let error = judge(&kernels, "encode@0,phase_b@1,phase_b@2,decode@0").unwrap_err();
        assert!(
            error.contains("cpu cannot cut phase_b into parts"),
            "{error}"
        );
        let error = judge(&kernels, "encode@0,phase_b@1+2,decode@0").unwrap_err();
        assert!(
            error.contains("cpu have no collectives for phase_b"),
            "{error}"
        );
        assert!(error.contains("give phase_b one rank"), "{error}");
    }

    #[test]
    fn kernels_for_each_stage_stand_where_they_can_with_one_memory_and_context() {
        let kernels = KernelSet::for_host().describe().clone();
        // A set of its own for phase_b.
        let mut other = kernels.clone();
        other.stages.remove(0);
        let judge_mixed = |text: &str| {
            let pipeline: Pipeline = text.parse().unwrap();
            let of = |name: &str| if name == "phase_b" { &other } else { &kernels };
            let each = pipeline
                .stages()
                .iter()
                .map(|stage| of(&stage.name).clone());
            let checked = check(&pipeline, &each.collect::<Vec<_>>(), &[], (4, true));
            checked.map_err(|error| error.to_string())
        };
        assert_eq!(judge_mixed("encode@0,phase_b@1,decode@0"), Ok(()));
        let error = judge_mixed("phase_b@0,encode@0,decode@0").unwrap_err();
        let words = "phase_b of the kernels cpu must stand between source and sink";
        assert!(error.contains(words), "{error}");
        let parts: Pipeline = "encode@0,phase_b@1,phase_b@2,decode@0".parse().unwrap();
        let mut each = vec![kernels.clone(); 4];
        let mut judge_devices = |devices: &[DeviceName], is_alike| {
            each.iter_mut()
                .for_each(|of| (of.stages[1].same_bytes, of.cuda) = (is_alike, true));
            check(&parts, &each, devices, (4, true)).map_err(|error| error.to_string())
        };
        let [cpu, gpu] = [DeviceName::Cpu, DeviceName::Cuda(0)];
        assert_eq!(judge_devices(&[cpu, gpu, gpu], false), Ok(()));
        assert_eq!(judge_devices(&[gpu, gpu, cpu], true), Ok(()));
        let error = judge_devices(&[gpu, gpu, cpu], false).unwrap_err();
        let words = "phase_b@1 cuda:0 and phase_b@2 cpu, and the kernels of phase_b do not say";
        assert!(error.contains(words), "{error}");
        let three: Pipeline = "encode@0,phase_b@1,decode@0".parse().unwrap();
        let mut each = vec![kernels.clone(); 3];
        let mut judge_context = |of_stage: [u32; 3]| {
            let sets = each.iter_mut().zip(of_stage);
            sets.for_each(|(set, frames)| set.context_frames = frames);
            check_context(&three, &each).map_err(|error| error.to_string())
        };
        assert_eq!(judge_context([2, 0, 2]), Ok(()));
        let error = judge_context([2, 8, 2]).unwrap_err();
        assert!(
            error.contains("the kernels cpu of encode take 2"),
            "{error}"
        );
    }
}
