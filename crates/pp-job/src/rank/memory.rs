//! Compares the slots of ranks with the free memory of their device, before the slots are made.
//!
//! A rank counts its own slots by itself. Ranks that share a device would each find enough memory and then take it from
//! one another, so they tell rank 0 what their edges need, and wait until it has added that up. What their stages and the
//! edges inside a rank hold is made by then: it is missing in what each finds free.

use std::fmt::Write as _;

use pp_contract::{Fault, FaultKind, Rank, Text};
use pp_transport::backend::EdgeEnd;
use serde::{Deserialize, Serialize};

use super::join::JoinedRank;
use crate::RANK_0;
use crate::end::say_aside;
use crate::shared::SharedDevice;

/// The operation of a fault.
const WHAT: &str = "count the memory of a device";

/// What a rank tells rank 0: the bytes of its slots, those that it finds free on its device, and whether MPS serves it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Need {
    pub(super) slots: u64,
    pub(super) free: u64,
    /// When it looked, on the monotonic clock of the host.
    pub(super) looked_ns: u64,
    pub(super) is_under_mps: bool,
}

impl JoinedRank {
    /// Says whether this rank shares its device with no other one.
    pub(super) fn is_alone(&self) -> bool {
        let all = shared(&self.devices);
        all.iter().all(|(_, ranks)| !ranks.contains(&self.own))
    }

    /// Waits until rank 0 has added up the slots of all ranks that share a device, and says that they do. Does nothing if no
    /// two ranks share one.
    ///
    /// # Errors
    /// The slots take more than is free, or a rank is lost.
    pub(super) fn add_up_memory(&mut self, own: Need) -> Result<(), Fault> {
        let sharing = shared(&self.devices);
        let shares = |rank| sharing.iter().any(|(_, ranks)| ranks.contains(&rank));
        if self.own != RANK_0 {
            if shares(self.own) {
                let body = serde_json::to_vec(&own).expect("a struct of numbers");
                self.tell(RANK_0, &body)?;
                self.set_up.frame(RANK_0, WHAT)?;
            }
            return Ok(());
        }
        for (device, ranks) in &sharing {
            let mut needs = Vec::new();
            for rank in ranks {
                let need = match *rank == self.own {
                    true => own,
                    false => {
                        let body = self.set_up.frame(*rank, WHAT)?;
                        let refuse = |error: serde_json::Error| {
                            Fault::new(FaultKind::PeerMisbehaved, *rank, WHAT, error)
                        };
                        serde_json::from_slice(&body).map_err(refuse)?
                    }
                };
                needs.push((*rank, need));
            }
            check(device.as_str(), &needs)?;
            let device = SharedDevice {
                device: device.as_str().to_owned(),
                ranks: ranks.clone(),
                is_under_mps: needs.iter().all(|(_, need)| need.is_under_mps),
            };
            say_aside(format!("pp: {device}"));
            self.context.lock_shared().push(device);
        }
        let others = sharing.iter().flat_map(|(_, ranks)| ranks);
        for rank in others.filter(|rank| **rank != self.own) {
            self.tell(*rank, &[])?;
        }
        Ok(())
    }
}

/// The bytes of the slots of these edges on this rank.
pub(super) fn bytes_of(edges: &[(Rank, Vec<EdgeEnd>)]) -> u64 {
    let ends = edges.iter().flat_map(|(_, ends)| ends);
    ends.fold(0, |sum: u64, end| sum.saturating_add(end.shape.bytes()))
}

/// The devices with more than one rank, and these ranks.
fn shared(devices: &[Option<Text<64>>]) -> Vec<(Text<64>, Vec<Rank>)> {
    let mut all: Vec<(Text<64>, Vec<Rank>)> = Vec::new();
    for (rank, device) in (0..).map(Rank::new).zip(devices) {
        let Some(device) = device else { continue };
        match all.iter_mut().find(|(known, _)| known == device) {
            Some((_, ranks)) => ranks.push(rank),
            None => all.push((device.clone(), vec![rank])),
        }
    }
    all.retain(|(_, ranks)| ranks.len() > 1);
    all
}

/// Refuses slots that take more than is free on their device. Each rank looked before any of the slots was made.
pub(super) fn check(device: &str, needs: &[(Rank, Need)]) -> Result<(), Fault> {
    let total: u128 = needs.iter().map(|(_, need)| u128::from(need.slots)).sum();
    // Whoever looked last saw all that the stages of the others hold, and nothing that they held for a while.
    let last_look = needs.iter().max_by_key(|(_, need)| need.looked_ns);
    let free = last_look.map_or(0, |(_, need)| need.free);
    let Some((last, _)) = needs.last().filter(|_| total > u128::from(free)) else {
        return Ok(());
    };
    let mut all = String::new();
    for (rank, need) in needs {
        let comma = if all.is_empty() { "" } else { ", " };
        let _ = write!(all, "{comma}{} bytes for rank {rank}", need.slots);
    }
    let what = format!(
        "the payload slots on {device} take {total} bytes, and {free} bytes are free; lower the depth (--depth) or the bytes of a payload \
         (--frames-per-chunk), or end other programs on the GPU ({all})"
    );
    Err(Fault::new(FaultKind::Usage, *last, WHAT, what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_on_one_device_are_added_up_and_others_are_not() {
        let name = Text::truncated;
        let devices = [Some("a"), None, Some("b"), Some("a"), None];
        let ranks = [0, 3].map(Rank::new).to_vec();
        let found = shared(&devices.map(|device| device.map(name)));
        assert_eq!(found, [(name("a"), ranks.clone())]);
        let needs = |free| {
            let need = |slots, free, looked_ns| Need {
                slots,
                free,
                looked_ns,
                is_under_mps: false,
            };
            [(ranks[0], need(60, free, 2)), (ranks[1], need(40, 1, 1))]
        };
        check("a", &needs(100)).unwrap();
        let fault = check("a", &needs(99)).unwrap_err();
        let told = "the payload slots on a take 100 bytes, and 99 bytes are free";
        assert!(fault.detail.starts_with(told), "{fault}");
        let all = "(60 bytes for rank 0, 40 bytes for rank 3)";
        assert!(fault.detail.ends_with(all), "{fault}");
    }
}
