//! What must never be, and what has to be so at the end.

use pp_contract::CacheEpoch;
use pp_runtime::core::Cut;

use super::{Frame, Shape, World};

/// A property must hold.
#[track_caller]
pub(crate) fn hold(yes: bool, property: &str, detail: impl FnOnce() -> String) {
    assert!(yes, "{property}: {}", detail());
}

impl World {
    /// What holds at any moment.
    pub(crate) fn check(&self, shape: Shape) {
        let core = &self.front;
        let most = core.in_flight().max(core.counts().max_in_flight);
        hold(
            most <= shape.depth,
            "in flight stays within the depth",
            || format!("{most} at depth {}", shape.depth),
        );
        let here = |frame: &&Frame| matches!(frame, Frame::Call(_));
        let on_the_way = self.to_back.iter().filter(here).count() as u32;
        let unanswered = on_the_way + self.back.core.unanswered();
        hold(
            unanswered <= shape.depth,
            "in flight stays within the depth",
            || format!("{unanswered} unanswered at depth {}", shape.depth),
        );
        hold(
            self.in_use() <= Self::slots(shape) && self.back.free_slots <= shape.slots,
            "a slot has one payload at a time",
            || {
                format!(
                    "{} in use, {} free back",
                    self.in_use(),
                    self.back.free_slots
                )
            },
        );
        let rises = |chunks: &[u64]| chunks.windows(2).all(|pair| pair[0] < pair[1]);
        hold(rises(&self.emitted), "output is in order", || {
            format!("{:?}", self.emitted)
        })
    }

    /// Whether this world is at a good end, whatever may still happen to it.
    pub(crate) fn is_over(&self) -> bool {
        self.finished
    }

    /// What holds where nothing more can happen.
    pub(crate) fn check_end(&self, shape: Shape, script: &[Cut]) {
        hold(self.finished, "nobody waits for ever", || {
            let action = self.front.poll(self.facts(shape, true));
            format!(
                "{action:?}; {} free slots, held {:?}, kept {:?}",
                self.free_slots(shape),
                self.held,
                self.kept
            )
        });
        let counts = self.front.counts();
        let mut all = [self.emitted.as_slice(), &self.dropped].concat();
        all.sort_unstable();
        let admitted: Vec<u64> = (0..counts.admitted).collect();
        hold(
            all == admitted && counts.emitted == self.emitted.len() as u64,
            "nothing is lost or doubled",
            || {
                format!(
                    "emitted {:?}, dropped {:?} of {}",
                    self.emitted, self.dropped, counts.admitted
                )
            },
        );
        hold(
            self.is_draining(shape) || admitted.len() == script.len(),
            "every chunk is admitted",
            || format!("{} of {}", admitted.len(), script.len()),
        );
        // A hard cut drops what it finds in flight, and nothing else does.
        let last_cut = script.iter().rposition(|cut| *cut == Cut::Hard);
        let drops = |chunk: &u64| last_cut.is_some_and(|cut| *chunk < cut as u64);
        hold(
            self.dropped.iter().all(drops),
            "only a hard cut drops",
            || format!("{:?} in {script:?}", self.dropped),
        );
        let began = |cut: (usize, &Cut)| *cut.1 != Cut::None && cut.0 > 0;
        let cuts = script.iter().enumerate().take(admitted.len());
        let cuts = cuts.filter(|cut| began(*cut)).count() as u64;
        hold(
            self.newest() == CacheEpoch::new(cuts),
            "every cut begins an epoch",
            || format!("epoch {} after {cuts} cuts", self.newest()),
        )
    }
}
