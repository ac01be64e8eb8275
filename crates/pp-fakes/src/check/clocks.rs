//! A vector clock for each node: how far of every timeline must have happened before it.

use super::graph::Graph;

pub(crate) struct Clocks {
    timelines: usize,
    ticks: Vec<u32>,
    /// The nodes in an order in which everything comes after what it happens after.
    pub(crate) order: Vec<usize>,
}

impl Clocks {
    /// # Errors
    /// The graph has a cycle; the error is a node on it, or behind it.
    pub(crate) fn of(graph: &Graph) -> Result<Self, usize> {
        let (count, timelines) = (graph.nodes.len(), graph.timelines);
        let mut missing: Vec<u32> = graph
            .nodes
            .iter()
            .map(|node| node.after.len() as u32)
            .collect();
        let mut followers: Vec<Vec<u32>> = vec![Vec::new(); count];
        for (index, node) in graph.nodes.iter().enumerate() {
            for &before in &node.after {
                followers[before].push(index as u32);
            }
        }
        let mut ready: std::collections::VecDeque<usize> =
            (0..count).filter(|&node| missing[node] == 0).collect();
        let (mut ticks, mut order) = (vec![0u32; count * timelines], Vec::with_capacity(count));
        while let Some(index) = ready.pop_front() {
            let node = &graph.nodes[index];
            let mut own = vec![0u32; timelines];
            for &before in &node.after {
                let theirs = &ticks[before * timelines..(before + 1) * timelines];
                own.iter_mut()
                    .zip(theirs)
                    .for_each(|(mine, &theirs)| *mine = theirs.max(*mine));
            }
            own[node.timeline] = node.tick;
            ticks[index * timelines..(index + 1) * timelines].copy_from_slice(&own);
            order.push(index);
            for &follower in &followers[index] {
                missing[follower as usize] -= 1;
                if missing[follower as usize] == 0 {
                    ready.push_back(follower as usize);
                }
            }
        }
        match (0..count).find(|&node| missing[node] > 0) {
            Some(stuck) => Err(stuck),
            None => Ok(Self {
                timelines,
                ticks,
                order,
            }),
        }
    }

    /// Says whether `before` must have happened when `after` happens.
    pub(crate) fn is_ordered(&self, graph: &Graph, before: usize, after: usize) -> bool {
        let node = &graph.nodes[before];
        before != after && self.ticks[after * self.timelines + node.timeline] >= node.tick
    }
}
