//! Which stages stand on which ranks, and whether the kernels can do that.

use pp_contract::Pipeline;
use pp_contract::pipeline::{Laps, MAX_RANKS, Ring};
use pp_job::Error;
use pp_kernels::{Description, StageInfo, StageKind};

use crate::args::RunArgs;

/// The pipeline of `--pipeline`; without it that of `--ranks`, else of as many ranks as a launcher started.
pub(super) fn pipeline(args: &RunArgs, started: Option<u32>) -> Result<Pipeline, Error> {
    let Some(given) = &args.pipeline else {
        let ranks = args.ranks.or(started).unwrap_or(2);
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
    let mut text = String::from("encode@0");
    for rank in 1.min(ranks - 1)..ranks {
        text.push_str(&format!(" -> phase_b@{rank}"));
    }
    text.push_str(" -> decode@0");
    Ok(text.parse().map_err(anyhow::Error::new)?)
}

/// Refuses a pipeline that these kernels cannot run.
///
/// # Errors
/// The stage, and the remedy.
pub(super) fn check(
    pipeline: &Pipeline,
    kernels: &Description,
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
    let stages = pipeline.stages();
    for (at, stage) in stages.iter().enumerate() {
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
                "the kernels have no collectives for {name}, so no group of ranks can run it; give {name} one rank"
            ));
        }
        check_share(pipeline, at, info, steps).or_else(refuse)?;
    }
    // Parts of a stage count once.
    let mut names: Vec<&str> = stages.iter().map(|stage| &*stage.name).collect();
    names.dedup();
    let wanted: Vec<&str> = kernels.stages.iter().map(|info| &*info.name).collect();
    if names != wanted {
        return refuse(format!(
            "the stages of the kernels {} are others or in another order; write --pipeline \"{}\", on ranks of your choice",
            kernels.name,
            all(kernels)
        ));
    }
    Ok(())
}

/// Refuses parts and laps that the stage cannot have, and more of them than there are denoise steps.
fn check_share(pipeline: &Pipeline, at: usize, info: &StageInfo, steps: u16) -> Result<(), String> {
    let (stages, ring) = (pipeline.stages(), pipeline.ring_at(at));
    let (name, parts) = (&stages[at].name, stages[at].parts);
    if parts > 1 && !info.in_parts {
        return Err(format!(
            "the kernels cannot cut {name} into parts; name it once"
        ));
    }
    if ring.is_some() && !info.in_ring {
        return Err(format!(
            "{name} stands in a ring, and the kernels cannot walk {name} in laps; take it out of the ring"
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
    fn what_the_kernels_cannot_do_is_named_with_the_remedy() {
        let mut kernels = KernelSet::for_host().describe().clone();
        let judge = |kernels: &Description, text: &str| {
            let pipeline = text.parse().unwrap();
            check(&pipeline, kernels, (4, true)).map_err(|error| error.to_string())
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
        assert!(error.contains("cannot walk phase_b in laps"), "{error}");
        (kernels.stages[1].in_parts, kernels.stages[1].in_group) = (false, false);
        let error = judge(&kernels, "encode@0,phase_b@1,phase_b@2,decode@0").unwrap_err();
        assert!(error.contains("cannot cut phase_b into parts"), "{error}");
        let error = judge(&kernels, "encode@0,phase_b@1+2,decode@0").unwrap_err();
        assert!(error.contains("have no collectives for phase_b"), "{error}");
        assert!(error.contains("give phase_b one rank"), "{error}");
    }
}
