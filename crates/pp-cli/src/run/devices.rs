//! Which ranks are on GPUs where the user names no devices and there are fewer GPUs than ranks.

use std::collections::BTreeSet;

use pp_contract::{DeviceName, Pipeline, Rank};
use pp_kernels::Description;

/// The devices of ranks where `gpus` are fewer than the ranks. Ranks with a stage between source and sink get GPUs first. If a
/// group, or the parts of a stage that may give other bytes on a CPU, do not all get one, all are CPUs. None if no stage between
/// source and sink is on a GPU, or a rank has no kernels for its memory.
pub(super) fn mixed(
    pipeline: &Pipeline,
    kernels: &[Description],
    gpus: u32,
) -> Option<Vec<DeviceName>> {
    let stages = || pipeline.stages().iter().zip(kernels);
    let last = kernels.len() - 1;
    let is_between = |rank: &Rank| {
        let mut between = pipeline.stages()[1..last].iter();
        between.any(|stage| stage.ranks.contains(rank))
    };
    let ranks = (0..pipeline.world_size().get()).map(Rank::new);
    let works_on = |rank: &Rank, is_gpu: bool| {
        let mut own = stages().filter(|(stage, _)| stage.ranks.contains(rank));
        own.all(|(_, about)| if is_gpu { about.cuda } else { about.host })
    };
    let mut wanting: Vec<Rank> = ranks.clone().filter(|rank| works_on(rank, true)).collect();
    wanting.sort_by_key(|rank| !is_between(rank));
    let mut on_gpus: BTreeSet<Rank> = wanting.into_iter().take(gpus as usize).collect();
    loop {
        // What a group or the parts of a stage have in common.
        let is_mixed = |ranks: &[Rank]| {
            let count = ranks.iter().filter(|rank| on_gpus.contains(rank)).count();
            (1..ranks.len()).contains(&count)
        };
        let together = stages().map(|(stage, about)| {
            let mut infos = about.stages.iter();
            let is_alike = infos.any(|info| *info.name == *stage.name && info.same_bytes);
            let parts = stages().filter(|(part, _)| part.name == stage.name && !is_alike);
            let parts = parts.flat_map(|(part, _)| part.ranks.iter().copied());
            let all: BTreeSet<Rank> = parts.chain(stage.ranks.iter().copied()).collect();
            all.into_iter().collect::<Vec<Rank>>()
        });
        let Some(mixed) = together.into_iter().find(|ranks| is_mixed(ranks)) else {
            break;
        };
        on_gpus.retain(|rank| !mixed.contains(rank));
    }
    let mut numbers = 0..;
    let devices = ranks.map(|rank| match on_gpus.contains(&rank) {
        true => numbers.next().map(DeviceName::Cuda),
        false => works_on(&rank, false).then_some(DeviceName::Cpu),
    });
    let devices: Vec<DeviceName> = devices.collect::<Option<_>>()?;
    on_gpus.iter().any(is_between).then_some(devices)
}

#[cfg(test)]
mod tests {
    use pp_kernels::KernelSet;

    use super::*;

    #[test]
    fn gpus_go_first_to_stages_between_and_no_stage_is_mixed() {
        let found = |text: &str, gpus, change: fn(&mut Description)| {
            let pipeline: Pipeline = text.parse().unwrap();
            let mut about = KernelSet::for_host().describe().clone();
            about.cuda = true;
            change(&mut about);
            let each = vec![about; pipeline.stages().len()];
            mixed(&pipeline, &each, gpus).map(|devices| DeviceName::list(&devices))
        };
        let parts = "encode@0,phase_b@1,phase_b@2,decode@3";
        let group = "encode@0,phase_b@1+2,decode@0";
        for (text, gpus, expected) in [
            ("encode@0,phase_b@1,decode@0", 1, Some("cpu,cuda:0")),
            ("encode@0,phase_b@1,decode@2", 2, Some("cuda:0,cuda:1,cpu")),
            ("encode@0,phase_b@0,decode@1", 1, Some("cuda:0,cpu")),
            (parts, 1, None),
            (parts, 2, Some("cpu,cuda:0,cuda:1,cpu")),
            (parts, 3, Some("cuda:0,cuda:1,cuda:2,cpu")),
            (group, 1, None),
            (group, 2, Some("cpu,cuda:0,cuda:1")),
            ("encode@0,phase_b@0,phase_b@1,decode@0", 1, None),
        ] {
            let devices = found(text, gpus, |_| {});
            assert_eq!(devices.as_deref(), expected, "{text} on {gpus}");
        }
        let alike: fn(&mut Description) = |about| about.stages[1].same_bytes = true;
        assert_eq!(
            found(parts, 1, alike).as_deref(),
            Some("cpu,cuda:0,cpu,cpu")
        );
        assert_eq!(found(group, 1, alike), None);
        assert_eq!(found(parts, 2, |about| about.cuda = false), None);
        assert_eq!(found(parts, 2, |about| about.host = false), None);
    }
}
