//! Which stages stand on which ranks, and whether the kernels can do that.

use pp_contract::pipeline::MAX_RANKS;
use pp_contract::{Pipeline, StageSpec};
use pp_job::Error;
use pp_kernels::{Description, StageInfo, StageKind};

use crate::args::RunArgs;

/// The pipeline of `--pipeline`; without it that of `--ranks`.
pub(super) fn pipeline(args: &RunArgs) -> Result<Pipeline, Error> {
    let Some(given) = &args.pipeline else {
        return of_ranks(args.ranks.unwrap_or(2), args.denoise_steps);
    };
    let has = given.world_size().get();
    match args.ranks {
        Some(ranks) if ranks != has => Err(Error::Usage(format!(
            "--ranks {ranks}: {given} has {has} ranks; leave --ranks out"
        ))),
        _ => Ok(given.clone()),
    }
}

/// On one rank all stages; on two, `phase_b` on the second; on more, its parts on all but the first.
fn of_ranks(ranks: u32, steps: u32) -> Result<Pipeline, Error> {
    let parts = steps.max(1);
    if ranks > 2 && ranks - 1 > parts {
        let most = (parts + 1).clamp(2, MAX_RANKS);
        return Err(Error::Usage(format!(
            "--ranks {ranks}: {steps} denoise steps can be cut into {parts} parts, so {most} ranks are the most; lower \
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
    (steps, is_given): (u32, bool),
) -> Result<(), Error> {
    let refuse = |what: String| {
        let given = if is_given {
            "--pipeline"
        } else {
            "the pipeline"
        };
        Err(Error::Usage(format!("{given} {pipeline}: {what}")))
    };
    let stages = pipeline.stages();
    if let Some(ring) = pipeline.rings().first() {
        let name = &stages[ring.first].name;
        return refuse(format!(
            "{name} stands in a ring, and pp run has none; give its parts ranks instead: {name}@1 -> {name}@2"
        ));
    }
    for stage in stages {
        let name = &*stage.name;
        let Some(info) = kernels.stages.iter().find(|info| info.name == name) else {
            return refuse(format!(
                "the kernels {} have no stage {name}; write --pipeline \"{}\", on ranks of your choice",
                kernels.name,
                all(kernels)
            ));
        };
        if stage.ranks.len() > 1 {
            return refuse(format!(
                "no stage of pp run can be run by a group of ranks; give {name} one rank"
            ));
        }
        check_parts(stage, info, steps).or_else(refuse)?;
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

fn check_parts(stage: &StageSpec, info: &StageInfo, steps: u32) -> Result<(), String> {
    let (name, parts) = (&stage.name, stage.parts);
    if parts > 1 && !info.in_parts {
        return Err(format!(
            "the kernels cannot cut {name} into parts; name it once"
        ));
    }
    let most = steps.max(1) as usize;
    if parts > most {
        return Err(format!(
            "{steps} denoise steps cannot be cut into {parts} parts of {name}; name it {most} times at most, or raise \
             --denoise-steps"
        ));
    }
    Ok(())
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
        ] {
            assert_eq!(judge(&kernels, good), Ok(()));
        }
        for (text, words) in [
            (
                "encode@0,blur@1,decode@0",
                "have no stage blur; write --pipeline \"encode@0 -> phase_b@1 -> decode@0\"",
            ),
            ("encode@0,decode@0", "are others or in another order"),
            ("encode@0,phase_b@1+2,decode@0", "give phase_b one rank"),
            (
                "encode@0,(phase_b@1)*steps,decode@0",
                "phase_b stands in a ring",
            ),
            (
                "encode@0,phase_b@1,phase_b@2,phase_b@1,phase_b@2,phase_b@1,decode@0",
                "name it 4 times at most",
            ),
        ] {
            let error = judge(&kernels, text).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        kernels.stages[1].in_parts = false;
        let error = judge(&kernels, "encode@0,phase_b@1,phase_b@2,decode@0").unwrap_err();
        assert!(error.contains("cannot cut phase_b into parts"), "{error}");
    }
}
