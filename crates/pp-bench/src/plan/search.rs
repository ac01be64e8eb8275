//! The placement of stages on ranks with the shortest period.
//!
//! *Hazard.* The number of placements grows with the power of the stages. *Choices.* A rank is busy for the sum of its
//! stages and of what its edges cost; the busiest rank is the period. The search begins with the best placement that gives
//! each rank neighbours in the chain. Then it looks at all placements, but for those that differ only in the names of
//! ranks, and those that are already worse than the best so far; after [`MOST_LOOKS`] it stops.

/// What is known of a chain of stages before it is placed. All times are for one chunk.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Chain {
    /// Work of each stage, in milliseconds: the source first, the sink last.
    pub(super) work_ms: Vec<f64>,
    /// What an edge between two ranks costs each of them.
    pub(super) edge_ms: f64,
    /// How long a payload is on its way over an edge, beside the work of the ranks.
    pub(super) link_ms: f64,
    /// No placement has a shorter period: the cores that the ranks share have so much to do.
    pub(super) least_ms: f64,
}

/// Stages on ranks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Placement {
    /// The rank of each stage.
    pub(super) ranks: Vec<u32>,
    /// The period that it is to have, in milliseconds.
    pub(super) period_ms: f64,
    /// Edges between different ranks on the way from source to sink.
    pub(super) edges: u32,
}

impl Placement {
    /// Says whether its period is shorter; among equals, whether it has fewer edges.
    pub(super) fn is_better_than(&self, other: &Self) -> bool {
        is_better((self.period_ms, self.edges), other)
    }
}

/// Placements that are no better than this much are taken for equal; then fewer edges count.
const EQUAL: f64 = 5e-3;
/// Beginnings of placements that are looked at: enough for all of 11 stages on any ranks, and less than a second.
const MOST_LOOKS: u32 = 1_000_000;

fn is_better((period_ms, edges): (f64, u32), best: &Placement) -> bool {
    period_ms < best.period_ms * (1.0 - EQUAL)
        || (period_ms < best.period_ms * (1.0 + EQUAL) && edges < best.edges)
}

impl Chain {
    /// The placement on at most so many ranks with the shortest period; among equals that with the fewest edges.
    ///
    /// # Panics
    /// If there are no stages, or no ranks.
    pub(super) fn place(&self, most_ranks: u32) -> Placement {
        assert!(!self.work_ms.is_empty() && most_ranks > 0);
        // What any placement can reach.
        let share_ms = self.work_ms.iter().sum::<f64>() / f64::from(most_ranks);
        let mut search = Search {
            chain: self,
            most_ranks,
            least_ms: share_ms.max(self.least_ms),
            ranks: Vec::new(),
            loads: Vec::new(),
            edges: 0,
            best: self.in_one_row(most_ranks),
            looks: MOST_LOOKS,
        };
        search.go_on();
        search.best
    }

    /// These stages on these ranks.
    pub(super) fn on(&self, ranks: Vec<u32>) -> Placement {
        let mut loads = vec![0.0; ranks.len()];
        let mut edges = 0;
        for (at, &rank) in ranks.iter().enumerate() {
            loads[rank as usize] += self.work_ms[at];
            if at > 0 && ranks[at - 1] != rank {
                loads[rank as usize] += self.edge_ms;
                loads[ranks[at - 1] as usize] += self.edge_ms;
                edges += 1;
            }
        }
        Placement {
            period_ms: self.period_ms(&loads, edges),
            ranks,
            edges,
        }
    }

    fn period_ms(&self, loads: &[f64], edges: u32) -> f64 {
        let least_ms = match edges {
            0 => self.least_ms,
            _ => self.least_ms.max(self.link_ms),
        };
        loads.iter().copied().fold(least_ms, f64::max)
    }

    /// The best placement in which the stages of each rank follow each other.
    fn in_one_row(&self, most_ranks: u32) -> Placement {
        let stages = self.work_ms.len();
        let load = |from: usize, to: usize| {
            let ends = u32::from(from > 0) + u32::from(to < stages);
            self.work_ms[from..to].iter().sum::<f64>() + self.edge_ms * f64::from(ends)
        };
        let mut best = self.on(vec![0; stages]);
        // Of the stages up to each: the busiest rank, and where its last rank begins.
        let mut rows = vec![(0..=stages).map(|to| (load(0, to), 0)).collect::<Vec<_>>()];
        for rank in 1..(most_ranks as usize).min(stages) {
            let before = &rows[rank - 1];
            let shortest = |to: usize| {
                let cuts = (rank..to).map(|from| (before[from].0.max(load(from, to)), from));
                cuts.min_by(|a, b| a.0.total_cmp(&b.0))
                    .unwrap_or((f64::MAX, 0))
            };
            rows.push((0..=stages).map(shortest).collect());
            let (mut ranks, mut to) = (vec![0; stages], stages);
            for at in (1..=rank).rev() {
                let from = rows[at][to].1;
                ranks[from..to].fill(at as u32);
                to = from;
            }
            let placed = self.on(ranks);
            if placed.is_better_than(&best) {
                best = placed;
            }
        }
        best
    }
}

/// All placements of so many stages on at most so many ranks, but for those that differ only in the names of ranks; `None`
/// if there are more than `most`.
pub(super) fn all(stages: usize, most_ranks: u32, most: usize) -> Option<Vec<Vec<u32>>> {
    let mut placed = vec![vec![0]];
    for _ in 1..stages {
        let longer = |ranks: &Vec<u32>| {
            let known = ranks.iter().max().map_or(0, |last| last + 1);
            let candidates = 0..(known + 1).min(most_ranks);
            let add = |rank| [&ranks[..], &[rank]].concat();
            candidates.map(add).collect::<Vec<_>>()
        };
        placed = placed.iter().flat_map(longer).take(most + 1).collect();
    }
    (placed.len() <= most).then_some(placed)
}

struct Search<'a> {
    chain: &'a Chain,
    most_ranks: u32,
    least_ms: f64,
    /// Of the stages placed so far.
    ranks: Vec<u32>,
    /// Of the ranks that have a stage.
    loads: Vec<f64>,
    edges: u32,
    best: Placement,
    /// Looks that are left.
    looks: u32,
}

impl Search<'_> {
    /// Says whether what is placed so far can still be better than the best.
    fn is_promising(&self) -> bool {
        let period_ms = self.chain.period_ms(&self.loads, self.edges);
        is_better((period_ms.max(self.least_ms), self.edges), &self.best)
    }

    fn go_on(&mut self) {
        self.looks = self.looks.saturating_sub(1);
        if self.looks == 0 || !self.is_promising() {
            return;
        }
        let at = self.ranks.len();
        if at == self.chain.work_ms.len() {
            self.best = self.chain.on(self.ranks.clone());
            return;
        }
        // A rank that has no stage yet is like any other such rank. The source stands on rank 0.
        let known = self.loads.len() as u32;
        let candidates = if at == 0 {
            1
        } else {
            (known + 1).min(self.most_ranks)
        };
        for rank in 0..candidates {
            let before = self.ranks.last().copied().filter(|before| *before != rank);
            let (loads, edges) = (self.loads.clone(), self.edges);
            if rank == known {
                self.loads.push(0.0);
            }
            self.loads[rank as usize] += self.chain.work_ms[at];
            if let Some(before) = before {
                self.loads[rank as usize] += self.chain.edge_ms;
                self.loads[before as usize] += self.chain.edge_ms;
                self.edges += 1;
            }
            self.ranks.push(rank);
            self.go_on();
            self.ranks.pop();
            (self.loads, self.edges) = (loads, edges);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(work_ms: &[f64], edge_ms: f64) -> Chain {
        Chain {
            work_ms: work_ms.to_vec(),
            edge_ms,
            link_ms: 0.0,
            least_ms: 0.0,
        }
    }

    fn place(work_ms: &[f64], edge_ms: f64, ranks: u32) -> Placement {
        chain(work_ms, edge_ms).place(ranks)
    }

    #[test]
    fn the_busiest_rank_is_as_short_as_it_can_be() {
        let placed = place(&[1.0, 5.0, 2.0, 4.0], 0.0, 2);
        assert!((placed.period_ms - 6.0).abs() < 1e-9, "{placed:?}");
        // 1 + 5 and 2 + 4: one edge, and no placement has fewer.
        assert_eq!((placed.ranks, placed.edges), (vec![0, 0, 1, 1], 1));
        assert_eq!(place(&[1.0, 5.0, 2.0, 4.0], 0.0, 1).ranks, [0; 4]);
    }

    #[test]
    fn an_edge_that_costs_more_than_it_gains_is_not_made() {
        assert_eq!(place(&[1.0, 1.0], 2.0, 4).ranks, [0, 0]);
        assert_eq!(place(&[5.0, 5.0], 0.1, 4).ranks, [0, 1]);
    }

    #[test]
    fn ranks_that_share_cores_or_wait_for_payloads_gain_nothing() {
        let chain = |link_ms, least_ms| Chain {
            link_ms,
            least_ms,
            ..chain(&[5.0, 5.0], 0.1)
        };
        assert_eq!(chain(0.0, 10.0).place(4).ranks, [0, 0]);
        assert_eq!(chain(20.0, 0.0).place(4).ranks, [0, 0]);
        let placed = chain(6.0, 7.0).place(4);
        assert_eq!((placed.ranks, placed.period_ms), (vec![0, 1], 7.0));
    }

    #[test]
    fn a_long_chain_is_placed_soon() {
        let work: Vec<f64> = (0..64).map(|at| 1.0 + f64::from(at % 7)).collect();
        let sum: f64 = work.iter().sum();
        let placed = place(&work, 0.0, 8);
        assert!(placed.period_ms < 1.1 * sum / 8.0, "{placed:?}");
        assert_eq!(place(&work, 0.0, 64).period_ms, 7.0);
    }

    #[test]
    fn no_placement_of_a_small_chain_is_better_than_the_proposal() {
        let works: [&[f64]; 4] = [
            &[3.0, 1.0, 4.0, 1.0, 5.0],
            &[0.1, 9.0, 0.1],
            &[2.0, 2.0, 2.0, 2.0],
            &[1.0, 6.0, 1.0, 1.0, 1.0, 2.0],
        ];
        for work in works {
            for ranks in 1..=3 {
                let found = place(work, 0.2, ranks);
                let chain = chain(work, 0.2);
                let all = all(work.len(), ranks, 1_000).unwrap();
                let periods = all.into_iter().map(|ranks| chain.on(ranks).period_ms);
                let least = periods.fold(f64::MAX, f64::min);
                assert!(found.period_ms <= least * 1.001, "{work:?} on {ranks}");
            }
        }
    }

    #[test]
    fn every_placement_is_listed_once() {
        assert_eq!(
            all(3, 2, 4).unwrap(),
            [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]
        );
        assert_eq!(all(3, 2, 3), None);
        // The ways to share out four stages: the Bell number.
        assert_eq!(all(4, 64, 100).unwrap().len(), 15);
        assert_eq!(all(64, 64, 1_000), None);
    }
}
