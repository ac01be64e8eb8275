//! Every pair of accesses to the same bytes, one of them a write, must be ordered; nothing is read before it is written,
//! sent twice, freed in use or used after it was freed.

use std::collections::BTreeMap;

use super::clocks::Clocks;
use super::graph::{Access, Graph, Kind, describe};
use super::record::Recording;
use super::report::{Fresh, Report, Rule, Violation};

/// Bytes that all accesses so far treated alike, from their first to `end`.
#[derive(Clone, Debug, Default)]
struct Cell {
    end: u64,
    write: Option<usize>,
    /// Since that write; the newest of each timeline.
    reads: Vec<usize>,
    sent: Option<usize>,
}

struct Checker<'a> {
    recordings: &'a [Recording],
    graph: &'a Graph,
    clocks: &'a Clocks,
    fresh: Fresh,
    /// The first part of the key is the space, the second one an address in it.
    cells: BTreeMap<(usize, u64), Cell>,
    found: Vec<Violation>,
}

pub(crate) fn check(
    recordings: &[Recording],
    graph: &Graph,
    clocks: &Clocks,
    fresh: Fresh,
    report: &mut Report,
) {
    let mut by_node: Vec<Vec<usize>> = vec![Vec::new(); graph.nodes.len()];
    for (index, access) in graph.accesses.iter().enumerate() {
        by_node[access.first].push(index);
    }
    let mut checker = Checker {
        recordings,
        graph,
        clocks,
        fresh,
        cells: BTreeMap::new(),
        found: Vec::new(),
    };
    for &node in &clocks.order {
        for &access in &by_node[node] {
            checker.access(access);
        }
    }
    report.accesses = graph.accesses.len();
    report.violations.append(&mut checker.found);
}

impl Checker<'_> {
    fn access(&mut self, index: usize) {
        let access = self.graph.accesses[index];
        let space = access.space;
        let (from, to) = (access.range.at, access.range.at + access.range.bytes);
        self.split(space, from);
        self.split(space, to);
        self.cover(space, from, to);
        let keys: Vec<(usize, u64)> = self
            .cells
            .range((space, from)..(space, to))
            .map(|(&key, _)| key)
            .collect();
        // One access may lie over many cells: say once what is wrong with it.
        let mut said: Vec<(Rule, usize)> = Vec::new();
        let (mut any_written, mut any_fresh) = (false, false);
        for key in keys {
            let mut cell = self.cells.remove(&key).expect("listed just now");
            any_written |= self.is_written(&cell);
            any_fresh |= self.is_written(&cell) && cell.sent.is_none();
            for (rule, other) in self.judge(index, access, &cell) {
                if !said.contains(&(rule, other)) {
                    said.push((rule, other));
                    self.say(rule, index, other);
                }
            }
            self.update(index, access, &mut cell);
            self.cells.insert(key, cell);
        }
        let reads = access.kind == Kind::Read && access.device && !access.is_trial;
        if self.fresh == Fresh::WithGaps && reads && !any_written {
            self.say(Rule::Unwritten, index, index);
        } else if self.fresh == Fresh::WithGaps && access.sends && !any_fresh {
            self.say(Rule::Stale, index, index);
        }
    }

    /// What is wrong between this access and those before it on a cell.
    fn judge(&self, index: usize, access: Access, cell: &Cell) -> Vec<(Rule, usize)> {
        let mut wrong = Vec::new();
        let reads = cell
            .reads
            .iter()
            .copied()
            .filter(|_| access.kind != Kind::Read);
        for other in cell.write.into_iter().chain(reads) {
            let theirs = self.graph.accesses[other];
            if theirs.call == access.call {
                continue;
            }
            let is_ordered = self
                .clocks
                .is_ordered(self.graph, theirs.last, access.first);
            let is_end = theirs.kind == Kind::Free && access.kind != Kind::Begin;
            if is_end || (access.kind == Kind::Free && !is_ordered) {
                wrong.push((Rule::Lifetime, other));
            } else if !is_ordered {
                wrong.push((Rule::Race, other));
            }
        }
        let is_read = access.kind == Kind::Read && access.device;
        if is_read && !self.is_written(cell) && self.is_held_to_it(access) {
            wrong.push((Rule::Unwritten, index));
        }
        if let (true, Some(before)) = (access.sends && self.is_held_to_it(access), cell.sent) {
            wrong.push((Rule::Stale, before));
        }
        wrong
    }

    /// Says whether every byte that it reads must have been written: not the byte that tries out a connection.
    fn is_held_to_it(&self, access: Access) -> bool {
        let gaps_are_fine = match self.fresh {
            Fresh::Whole => false,
            Fresh::WithGaps => true,
            Fresh::NotPayloads => access.sends,
        };
        !access.is_trial && !gaps_are_fine
    }

    /// Says whether anything was written there.
    fn is_written(&self, cell: &Cell) -> bool {
        let begins = |write: usize| self.graph.accesses[write].kind == Kind::Begin;
        cell.write.is_some_and(|write| !begins(write))
    }

    fn update(&self, index: usize, access: Access, cell: &mut Cell) {
        if access.kind == Kind::Read {
            let timeline =
                |access: usize| self.graph.nodes[self.graph.accesses[access].last].timeline;
            cell.reads
                .retain(|&other| timeline(other) != timeline(index));
            cell.reads.push(index);
            if access.sends {
                cell.sent = Some(index);
            }
        } else {
            *cell = Cell {
                end: cell.end,
                write: Some(index),
                reads: Vec::new(),
                sent: None,
            };
        }
    }

    /// Makes `at` a border between cells.
    fn split(&mut self, space: usize, at: u64) {
        let Some((&key, cell)) = self.cells.range_mut((space, 0)..(space, at)).next_back() else {
            return;
        };
        if key.1 < at && at < cell.end {
            let upper = cell.clone();
            cell.end = at;
            self.cells.insert((space, at), upper);
        }
    }

    /// Fills the gaps between cells with untouched ones.
    fn cover(&mut self, space: usize, from: u64, to: u64) {
        let there: Vec<(u64, u64)> = self
            .cells
            .range((space, from)..(space, to))
            .map(|(key, cell)| (key.1, cell.end))
            .collect();
        let mut at = from;
        for (start, end) in there.into_iter().chain([(to, to)]) {
            if at < start {
                self.cells.insert(
                    (space, at),
                    Cell {
                        end: start,
                        ..Cell::default()
                    },
                );
            }
            at = end;
        }
    }

    fn say(&mut self, rule: Rule, index: usize, other: usize) {
        let (mine, theirs) = (self.graph.accesses[index], self.graph.accesses[other]);
        let line = |access: Access| {
            let at = self.graph.nodes[access.first].at;
            let text = describe(&self.recordings[at.0], at.1);
            format!(
                "{:?} of {} bytes at {:#x} by {text}",
                access.kind, access.range.bytes, access.range.at
            )
        };
        let what = match rule {
            Rule::Unwritten => format!("nothing written: {}", line(mine)),
            _ => format!("{} / {}", line(theirs), line(mine)),
        };
        self.found.push(Violation { rule, what });
    }
}
