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

/// A thread of a process.
type Host = (usize, u32);

#[derive(Default)]
pub(crate) struct Shared {
    names: HashMap<String, usize>,
    /// The nodes that write a value to a word, in the order of the recordings.
    writes: HashMap<(Word, u64), Vec<usize>>,
    /// What is read there, by which node, and how often its thread had seen that value go and come back.
    reads: Vec<(Word, u64, usize, usize)>,
    /// The words that a host has seen to be something else than the zero that they begin with, each with its process.
    begun: HashSet<(usize, Word)>,
    /// How often a host has written a word.
    written: HashMap<(Host, Word), usize>,
    /// How often a value has come back, and what its reader had written when it read it last.
    seen: HashMap<(Host, Word, u64), (usize, usize)>,
}

impl Shared {
    /// What a `cuMemMap`, `cuMemHostRegister` or `HostMap` maps. Spaces below `processes` are those of the processes
    /// themselves.
    pub(crate) fn mapped(&mut self, line: &Line, processes: usize) -> Option<Mapped> {
        let name = line.text("mem").or(line.text("file"))?;
        let next = processes + self.names.len();
        Some(Mapped {
            range: line.allocation()?,
            space: *self.names.entry(name.to_owned()).or_insert(next),
            offset: line.number("from").unwrap_or(0),
        })
    }

    pub(crate) fn writes(&mut self, process: usize, line: &Line, mapped: &[Mapped], node: usize) {
        const WITHOUT_FENCE: u64 = 1;
        let orders = line.number("flags") != Some(WITHOUT_FENCE);
        if let (true, Some((word, value))) = (orders, word(line, mapped)) {
            self.writes.entry((word, value)).or_default().push(node);
            if line.name == "HostStore" {
                let host = (process, line.thread);
                *self.written.entry((host, word)).or_default() += 1;
            }
        }
    }

    /// What a host of this process reads. A zero is that of a write once the word was something else, or the host wrote
    /// there.
    pub(crate) fn reads(&mut self, process: usize, line: &Line, mapped: &[Mapped], node: usize) {
        let Some((word, value)) = word(line, mapped) else {
            return;
        };
        if value != 0 {
            self.begun.insert((process, word));
        }
        let host = (process, line.thread);
        let written = self.written.get(&(host, word)).copied().unwrap_or(0);
        if written == 0 && !self.begun.contains(&(process, word)) {
            return;
        }
        let seen = self.seen.entry((host, word, value));
        let (times, when) = seen.or_insert((0, written));
        *times += usize::from(*when < written);
        *when = written;
        self.reads.push((word, value, node, *times));
    }

    /// Pairs of nodes: a write, and a read that saw its value. A read comes behind the first write of its value if one
    /// timeline made all writes of that value, and behind none otherwise. Where the reader writes the word, too, the value
    /// goes and comes, as in the word of a slot: the read then comes behind as many writes as it has seen come.
    pub(crate) fn orders(&self, timeline_of: impl Fn(usize) -> usize) -> Vec<(usize, usize)> {
        let order = |&(word, value, read, times): &(Word, u64, usize, usize)| {
            let writes = self.writes.get(&(word, value))?;
            let first = timeline_of(*writes.first()?);
            let alone = |write: &usize| timeline_of(*write) == first;
            let is_known = writes.iter().all(alone) && first != timeline_of(read);
            Some((*writes.get(times).filter(|_| is_known)?, read))
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
