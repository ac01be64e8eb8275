//! How the passes over a chunk are cut into parts, and what goes from one part to the next.
//!
//! Part `i` of `n` runs the passes of [`pass_range`], which every rank computes for the checks of the plan too. Every pass
//! takes its values from the noisy frames, and every pass but the first takes queries and keys from the guide that the
//! pass before it left. So a part hands on what it got (`latents_in`, `conditioning_embeds`, `denoising_step_list`, and
//! `context_frames` with recompute), and its own
//! `guide` as its kernels hold it: f32 on the CPU; on a GPU bf16, less 128. Nothing is rounded for the way, so the
//! result of any number of parts is that of one, byte for byte.
//!
//! What a session remembers of earlier chunks is the same for every part: the last two *noisy* frames, and the noise
//! that the conditioning said when it was last read. No pass keeps a guide or an estimate of an earlier frame. So a part
//! rebuilds its state from the tensor `context_frames`, like one that runs all passes, and hands that tensor on
//! unchanged. A rebuild counts as one call of each part.
//!
//! A lap of a ring is a part like another one. A session keeps what it remembers for each lap apart, because the next
//! chunk may begin its first lap before this one begins its last.

use std::ops::Range;

use pp_contract::pass_range;

use crate::config::SessionConfig;
use crate::error::Failure;

/// The passes that one part runs of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) first: u32,
    pub(crate) end: u32,
    /// Passes of all parts together.
    pub(crate) steps: u32,
}

impl Share {
    /// The share of a session in this lap: a ring's part `i` of `n` in lap `k` of `m` is part `kn + i` of `mn`.
    pub(crate) fn of(config: &SessionConfig, steps: u32, lap: u32) -> Result<Share, Failure> {
        if lap >= config.laps {
            return Err(Failure::invalid(format!("lap {lap} of {}", config.laps)));
        }
        let part = lap * config.parts + config.part;
        Share::new(steps, part, config.laps * config.parts)
    }

    /// Refuses more parts than there are passes: a part with none would have no guide to hand on.
    fn new(steps: u32, part: u32, parts: u32) -> Result<Share, Failure> {
        let most = steps.max(1);
        if parts > most {
            return Err(Failure::invalid(format!(
                "{steps} denoise steps cannot be cut into {parts} parts, at most {most}"
            )));
        }
        let Range { start, end } = pass_range(steps, part as usize, parts as usize);
        Ok(Share {
            first: start,
            end,
            steps,
        })
    }

    /// Says whether it begins with the guide of another part.
    pub(crate) fn has_guide(&self) -> bool {
        self.first > 0
    }

    /// Says whether its last pass is the last of all.
    pub(crate) fn ends(&self) -> bool {
        self.end == self.steps
    }

    /// Its passes.
    pub(crate) fn count(&self) -> u32 {
        self.end - self.first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_no_parts_without_a_pass() {
        let none = Share::new(0, 0, 1).unwrap();
        assert!(!none.has_guide() && none.ends() && none.count() == 0);
        for (steps, parts, most) in [(0, 2, 1), (1, 2, 1), (3, 4, 3)] {
            let error = Share::new(steps, 0, parts).unwrap_err().to_string();
            let words =
                format!("{steps} denoise steps cannot be cut into {parts} parts, at most {most}");
            assert!(error.contains(&words), "{error}");
        }
    }
}
