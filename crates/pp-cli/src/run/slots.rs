//! How large the slots between two stages are.
//!
//! The laps of a ring may have payloads of different sizes, so that the last stage of a ring makes others for its first
//! stage than for the one behind the ring. Both ranks of an edge must come to the same number, and each knows its own
//! stage alone: what a stage makes is what the next one gets.

use std::collections::BTreeMap;

use pp_contract::Pipeline;

use super::open::slot_bytes;

/// Of each stage that stands on this rank, by lap, the bytes of slots for the largest payload that it gets and for the
/// largest one that it makes.
pub(super) type Payloads = BTreeMap<usize, Vec<[u64; 2]>>;

/// The bytes of a slot for what stage `from` makes for stage `to`, on a rank with either of them.
pub(super) fn bytes(pipeline: &Pipeline, payloads: &Payloads, from: usize, to: usize) -> u64 {
    let is_back = to <= from;
    // The last lap leads out of a ring, and the others back to its first stage, which begin their next lap there.
    let made = payloads.get(&from).map(|laps| {
        let ring = pipeline.ring_at(from);
        let last = laps.len() - 1;
        let laps = match ring.filter(|ring| ring.last == from) {
            Some(_) if is_back => &laps[..last],
            Some(_) => &laps[last..],
            None => laps,
        };
        laps.iter().map(|[_, made]| *made).max()
    });
    let got = || {
        let laps = payloads.get(&to)?;
        let ring = pipeline.ring_at(to);
        let laps = match ring.filter(|ring| ring.first == to) {
            Some(_) if is_back => &laps[1..],
            Some(_) => &laps[..1],
            None => laps,
        };
        laps.iter().map(|[got, _]| *got).max()
    };
    // Elsewhere the edge has no end. A ring that is walked once has nothing for the way back.
    made.unwrap_or_else(got).unwrap_or(slot_bytes(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_of_an_edge_come_to_the_same_size() {
        let pipeline = "a@0,(b@1,c@2)*3,d@0".parse().unwrap();
        let b = (1, vec![[10, 20], [12, 22], [14, 24]]);
        let c = (2, vec![[20, 12], [22, 14], [24, 7]]);
        let ends = [(0, vec![[0, 10]]), (3, vec![[7, 0]])];
        let ranks = [Payloads::from(ends), [b].into(), [c].into()];
        for (from, to, sender, receiver, expected) in [
            (0, 1, 0, 1, 10),
            (1, 2, 1, 2, 24),
            (2, 1, 2, 1, 14),
            (2, 3, 2, 0, 7),
        ] {
            for rank in [sender, receiver] {
                let bytes = bytes(&pipeline, &ranks[rank], from, to);
                assert_eq!(bytes, expected, "from {from} to {to}, at rank {rank}");
            }
        }
    }
}
