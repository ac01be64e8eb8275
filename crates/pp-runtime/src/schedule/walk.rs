//! Runs the steps of all ranks in an order in which each finds what it waits for.
//!
//! Hazard: a deadlock. Guarantee: a walk ends with every step done, or with a cycle of steps that wait
//! for each other. It takes time linear in the number of steps.
//!
//! Choices: which rank goes on first changes nothing of where the walk ends, so one order is enough. A larger number of
//! slots allows all that a smaller one does; so the smallest number is found in one walk that adds a slot where it stands.

use std::collections::VecDeque;

use super::flaw::{Cycle, Flaw, Link, Why};
use super::graph::{Graph, Wait};

/// Sees the steps as they are done.
pub(super) trait Visit {
    /// All that the step waits for is there.
    fn begin(&mut self, _rank: u32, _node: u32) -> Result<(), Flaw> {
        Ok(())
    }

    /// The step is done, and its sends have ended.
    fn leave(&mut self, _rank: u32, _node: u32) {}
}

impl Visit for () {}

/// The smallest number of slots with which all edges suffice; 0 where there is no edge.
pub(super) fn least_slots(graph: &Graph<'_>) -> Result<u32, Flaw> {
    if graph.edges().next().is_none() {
        return walk(graph, None, &mut ()).map(|()| 0);
    }
    let mut walk = Walk::new(graph, Some(1));
    loop {
        walk.run(&mut ())?;
        if walk.is_done() {
            return Ok(walk.slots.unwrap_or_default());
        }
        let mut open = (0..graph.ranks()).flat_map(|rank| walk.open(rank));
        if !open.any(|wait| wait.why == Why::Slot) {
            walk.slots = None;
            return Err(walk.cycle());
        }
        walk.slots = walk.slots.map(|slots| slots + 1);
        walk.wake_all();
    }
}

/// Does all steps with so many slots an edge. At 0 a step ends only when all that it sends has begun to be received.
///
/// # Errors
/// What `visit` refuses, and a cycle: it is one of too few slots, where [`least_slots`] has found a number.
pub(super) fn walk(
    graph: &Graph<'_>,
    slots: Option<u32>,
    visit: &mut impl Visit,
) -> Result<(), Flaw> {
    let mut walk = Walk::new(graph, slots);
    walk.run(visit)?;
    match walk.is_done() {
        true => Ok(()),
        false => Err(walk.cycle()),
    }
}

/// Where all ranks stand.
///
/// A rank's progress is twice the node at which it stands, and one more where the step is done and its sends are not.
struct Walk<'a> {
    graph: &'a Graph<'a>,
    slots: Option<u32>,
    progress: Vec<u64>,
    /// Ranks that can go on.
    ready: Vec<u32>,
    /// By rank: the ranks that wait for it, each with the progress that it waits for.
    waiting: Vec<Vec<(u64, u32)>>,
    /// The least of these.
    wake_at: Vec<u64>,
}

impl<'a> Walk<'a> {
    fn new(graph: &'a Graph<'a>, slots: Option<u32>) -> Self {
        let ranks = graph.ranks();
        let mut walk = Self {
            graph,
            slots,
            progress: (0..ranks)
                .map(|rank| 2 * u64::from(graph.first(rank)))
                .collect(),
            ready: Vec::new(),
            waiting: vec![Vec::new(); ranks as usize],
            wake_at: vec![u64::MAX; ranks as usize],
        };
        walk.wake_all();
        walk
    }

    fn wake_all(&mut self) {
        self.ready = (0..self.graph.ranks()).rev().collect();
        self.waiting.iter_mut().for_each(Vec::clear);
        self.wake_at.fill(u64::MAX);
    }

    fn is_done(&self) -> bool {
        (0..self.graph.ranks()).all(|rank| self.at(rank).is_none())
    }

    /// The node at which a rank stands, and whether it is done but for its sends.
    fn at(&self, rank: u32) -> Option<(u32, bool)> {
        let progress = self.progress[rank as usize];
        let node = (progress / 2) as u32;
        (node < self.graph.first(rank + 1)).then_some((node, progress % 2 == 1))
    }

    /// Goes on until no rank can.
    fn run(&mut self, visit: &mut impl Visit) -> Result<(), Flaw> {
        while let Some(rank) = self.ready.pop() {
            while let Some((node, is_begun)) = self.at(rank) {
                if let Some(open) = self.first_open(rank, node, is_begun) {
                    self.park(rank, open);
                    break;
                }
                if !is_begun {
                    visit.begin(rank, node)?;
                }
                // Without slots the step's sends are a wait of their own.
                let is_left = is_begun || self.slots != Some(0);
                if is_left {
                    visit.leave(rank, node);
                }
                self.progress[rank as usize] = 2 * u64::from(node) + 1 + u64::from(is_left);
                self.wake(rank);
            }
        }
        Ok(())
    }

    fn each_wait(&self, rank: u32, node: u32, is_begun: bool, each: impl FnMut(Wait)) {
        match is_begun {
            true => self.graph.holds(rank, node, each),
            false => self.graph.waits(rank, node, self.slots, each),
        }
    }

    /// The progress of the other rank that ends a wait: what sends has to wait until its receive is reached.
    fn wanted(wait: &Wait, is_begun: bool) -> u64 {
        2 * u64::from(wait.node) + u64::from(!is_begun)
    }

    fn first_open(&self, rank: u32, node: u32, is_begun: bool) -> Option<(u64, u32)> {
        let mut open = None;
        self.each_wait(rank, node, is_begun, |wait| {
            let wanted = Self::wanted(&wait, is_begun);
            if open.is_none() && self.progress[wait.rank as usize] < wanted {
                open = Some((wanted, wait.rank));
            }
        });
        open
    }

    fn park(&mut self, rank: u32, (wanted, other): (u64, u32)) {
        self.waiting[other as usize].push((wanted, rank));
        let wake_at = &mut self.wake_at[other as usize];
        *wake_at = wanted.min(*wake_at);
    }

    fn wake(&mut self, rank: u32) {
        let progress = self.progress[rank as usize];
        if progress < self.wake_at[rank as usize] {
            return;
        }
        let waiting = &mut self.waiting[rank as usize];
        self.ready.extend(
            waiting
                .extract_if(.., |(wanted, _)| *wanted <= progress)
                .map(|(_, other)| other),
        );
        let least = waiting.iter().map(|(wanted, _)| *wanted).min();
        self.wake_at[rank as usize] = least.unwrap_or(u64::MAX);
    }

    /// All that the step of a rank still waits for.
    fn open(&self, rank: u32) -> Vec<Wait> {
        let mut open = Vec::new();
        if let Some((node, is_begun)) = self.at(rank) {
            self.each_wait(rank, node, is_begun, |wait| {
                if self.progress[wait.rank as usize] < Self::wanted(&wait, is_begun) {
                    open.push(wait);
                }
            });
        }
        open
    }

    /// The shortest cycle of ranks that stand. Each rank that stands waits for one that stands, so there is one.
    fn cycle(&self) -> Flaw {
        let open: Vec<Vec<Wait>> = (0..self.graph.ranks())
            .map(|rank| self.open(rank))
            .collect();
        let mut shortest: Option<Vec<(u32, Wait)>> = None;
        for rank in 0..self.graph.ranks() {
            let most = shortest
                .as_ref()
                .map_or(usize::MAX, |found| found.len() - 1);
            if let Some(found) = cycle_through(rank, &open, most) {
                shortest = Some(found);
            }
        }
        let links: Vec<Link> = shortest
            .into_iter()
            .flatten()
            .map(|(rank, wait)| Link {
                blocked: self.graph.place((self.progress[rank as usize] / 2) as u32),
                why: wait.why,
                awaited: self.graph.place(wait.node),
            })
            .collect();
        let slots = self.slots;
        Flaw::Deadlock(Cycle { links, slots })
    }
}

/// The shortest cycle through a rank, of at most so many ranks: each with what it waits for.
fn cycle_through(start: u32, open: &[Vec<Wait>], most: usize) -> Option<Vec<(u32, Wait)>> {
    // By rank: how it was reached.
    let mut from: Vec<Option<(u32, Wait)>> = vec![None; open.len()];
    let mut queue = VecDeque::from([(start, 1)]);
    while let Some((rank, length)) = queue.pop_front() {
        if length > most {
            return None;
        }
        for wait in &open[rank as usize] {
            if from[wait.rank as usize].is_some() {
                continue;
            }
            from[wait.rank as usize] = Some((rank, *wait));
            if wait.rank != start {
                queue.push_back((wait.rank, length + 1));
                continue;
            }
            let mut cycle = Vec::new();
            let mut at = start;
            while let Some((rank, wait)) = from[at as usize] {
                cycle.push((rank, wait));
                at = rank;
                if at == start {
                    break;
                }
            }
            cycle.reverse();
            return Some(cycle);
        }
    }
    None
}
