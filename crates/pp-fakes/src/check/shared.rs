//! Memory that several processes have, and the words in it that order them: a host that reads a number comes after the
//! stream, or the host, that wrote it.

use std::collections::{HashMap, HashSet};

use super::record::{Line, Range};

/// A part of a process's memory that other processes may have, too.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mapped {
    pub(crate) range: Range,
    /// Where it lies, and from what offset on.
    space: usize,
    offset: u64,
}

/// A word: where it lies, and its offset.
type Word = (usize, u64);

#[derive(Default)]
pub(crate) struct Shared {
    names: HashMap<String, usize>,
    /// The nodes that write a value to a word, in the order of the recordings.
    writes: HashMap<(Word, u64), Vec<usize>>,
    reads: Vec<(Word, u64, usize)>,
    /// The words that a host has seen to be something else than the zero that they begin with, each with its process.
    begun: HashSet<(usize, Word)>,
}

impl Shared {
    /// What a `cuMemMap` or `cuMemHostRegister` maps. Spaces below `processes` are those of the processes themselves.
    pub(crate) fn mapped(&mut self, line: &Line, processes: usize) -> Option<Mapped> {
        let name = line.text("mem").or(line.text("file"))?;
        let next = processes + self.names.len();
        Some(Mapped {
            range: line.allocation()?,
            space: *self.names.entry(name.to_owned()).or_insert(next),
            offset: line.number("from").unwrap_or(0),
        })
    }

    pub(crate) fn writes(&mut self, line: &Line, mapped: &[Mapped], node: usize) {
        const WITHOUT_FENCE: u64 = 1;
        let orders = line.number("flags") != Some(WITHOUT_FENCE);
        if let (true, Some((word, value))) = (orders, word(line, mapped)) {
            self.writes.entry((word, value)).or_default().push(node);
        }
    }

    /// What a host of this process reads. A zero is that of a write once the word was something else.
    pub(crate) fn reads(&mut self, process: usize, line: &Line, mapped: &[Mapped], node: usize) {
        let Some((word, value)) = word(line, mapped) else {
            return;
        };
        if value != 0 {
            self.begun.insert((process, word));
        }
        if self.begun.contains(&(process, word)) {
            self.reads.push((word, value, node));
        }
    }

    /// Pairs of nodes: a write, and a read that saw its value. A read comes behind the first write of its value if one
    /// timeline made all writes of that value, and behind none otherwise.
    pub(crate) fn orders(&self, timeline_of: impl Fn(usize) -> usize) -> Vec<(usize, usize)> {
        let order = |&(word, value, read): &(Word, u64, usize)| {
            let writes = self.writes.get(&(word, value))?;
            let first = *writes.first()?;
            let alone = |write: &usize| timeline_of(*write) == timeline_of(first);
            writes.iter().all(alone).then_some((first, read))
        };
        self.reads.iter().filter_map(order).collect()
    }
}

/// The word of a call, and its value.
fn word(line: &Line, mapped: &[Mapped]) -> Option<(Word, u64)> {
    let word = Range {
        at: line.number("addr")?,
        bytes: 4,
    };
    let (space, word) = place(word, mapped)?;
    Some(((space, word.at), line.number("value")?))
}

/// Where a range of a process's memory lies, if it is in a part that others may have.
pub(crate) fn place(range: Range, mapped: &[Mapped]) -> Option<(usize, Range)> {
    let first = Range { bytes: 1, ..range };
    let part = mapped.iter().find(|part| part.range.overlaps(first))?;
    let at = part.offset + (range.at - part.range.at);
    Some((part.space, Range { at, ..range }))
}
