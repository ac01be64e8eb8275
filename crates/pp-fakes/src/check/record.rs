//! Reading recordings. `record.c` says how a line is written.

use std::path::Path;

/// Bytes of one process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    pub at: u64,
    pub bytes: u64,
}

impl Range {
    pub fn overlaps(self, other: Range) -> bool {
        self.at < other.at + other.bytes && other.at < self.at + self.bytes
    }
}

/// One call.
#[derive(Clone, Debug)]
pub struct Line {
    /// Its number in the process, from 1.
    pub sequence: u64,
    /// The thread that called; 0 is a stream's own.
    pub thread: u32,
    /// The function, or what the fakes have to say.
    pub name: String,
    /// A copy that tries out the way to a peer.
    is_trial: bool,
    fields: Vec<(String, String)>,
}

/// The number of a copy that tries out the way to a peer.
const TRIAL: u64 = u32::MAX as u64;

impl Line {
    /// # Panics
    /// The text is not a line of a recording.
    pub fn parse(text: &str) -> Self {
        Self::try_parse(text).unwrap_or_else(|| panic!("not a line of a recording: {text}"))
    }

    fn try_parse(text: &str) -> Option<Self> {
        let mut words = text.split_ascii_whitespace();
        let sequence = words.next()?.parse().ok()?;
        let thread = words.next()?.parse().ok()?;
        let _nanoseconds: u64 = words.next()?.parse().ok()?;
        let name = words.next()?.to_owned();
        let fields = words
            .map(|word| word.split_once('='))
            .map(|pair| pair.map(|(key, value)| (key.to_owned(), value.to_owned())))
            .collect::<Option<_>>()?;
        Some(Self {
            sequence,
            thread,
            name,
            is_trial: false,
            fields,
        })
    }

    pub fn text(&self, key: &str) -> Option<&str> {
        self.fields
            .iter()
            .find(|(name, _)| name == key)
            .map(|(_, value)| value.as_str())
    }

    pub fn number(&self, key: &str) -> Option<u64> {
        self.text(key).and_then(to_number)
    }

    /// The ranges behind `r` or `w`.
    pub fn ranges(&self, key: &str) -> Vec<Range> {
        let list = self.text(key).unwrap_or_default();
        list.split(',')
            .filter_map(|item| item.split_once(':'))
            .map(|(at, bytes)| Range {
                at: to_number(at).expect("an address"),
                bytes: to_number(bytes).expect("a size"),
            })
            .filter(|range| range.bytes > 0)
            .collect()
    }

    /// The allocation of an alloc or free.
    pub fn allocation(&self) -> Option<Range> {
        Some(Range {
            at: self.number("addr")?,
            bytes: self.number("len")?,
        })
    }

    /// Says whether a call that can say "no" said yes.
    pub fn succeeded(&self) -> bool {
        self.number("rc").unwrap_or(0) == 0
    }

    pub fn is_end(&self) -> bool {
        self.text("phase") == Some("end")
    }

    /// A send or receive that carries a payload, and not what a connection is tried out with.
    pub fn is_payload(&self) -> bool {
        (self.is_put() || self.is_shared() || self.is_transfer()) && !self.is_trial()
    }

    /// A copy into memory of a peer.
    pub fn is_put(&self) -> bool {
        self.number("peer") == Some(1) && self.name.starts_with("cuMemcpy")
    }

    /// A copy between a device and memory that a rank without one has, too.
    pub fn is_shared(&self) -> bool {
        self.number("shared") == Some(1)
    }

    /// What a connection is tried out with: by NCCL one byte.
    pub fn is_trial(&self) -> bool {
        let is_byte =
            self.name.starts_with("nccl") && self.number("len").is_some_and(|len| len <= 1);
        self.is_trial || is_byte
    }

    /// A payload leaves this rank.
    pub fn sends(&self) -> bool {
        (self.name == "ncclSend" || self.is_put() || self.is_shared()) && !self.is_trial()
    }

    pub fn is_transfer(&self) -> bool {
        self.name == "ncclSend" || self.name == "ncclRecv"
    }
}

/// Finds the copies that are followed by the number of a trial, and the first one of each slot in host memory since that was
/// registered.
fn mark_trials(lines: &mut [Line]) {
    let puts = (0..lines.len()).filter(|&at| lines[at].is_put());
    for put in puts.collect::<Vec<_>>() {
        let (this, later) = (lines[put].number("st"), &lines[put..]);
        let mut on_stream = later.iter().filter(|line| line.number("st") == this);
        let number = on_stream.find(|line| line.name == "cuStreamWriteValue32");
        lines[put].is_trial = number.is_some_and(|line| line.number("value") == Some(TRIAL));
    }
    let mut tried: Vec<Range> = Vec::new();
    for line in lines {
        if let ("cuMemHostRegister", Some(new)) = (line.name.as_str(), line.allocation()) {
            tried.retain(|slot| !slot.overlaps(new));
        }
        let of_host = if line.name.contains("HtoD") { "r" } else { "w" };
        if let (true, Some(&slot)) = (line.is_shared(), line.ranges(of_host).first()) {
            line.is_trial = tried.iter().all(|tried| tried.at != slot.at);
            tried.extend(line.is_trial.then_some(slot));
        }
    }
}

fn to_number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(hexadecimal) => u64::from_str_radix(hexadecimal, 16).ok(),
        None => text.parse().ok(),
    }
}

/// A thread that makes communicators for the one that issues, which stands aside meanwhile: started by it, and waited
/// for. A recording does not show that; it does show whether the other one called meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Connector {
    pub thread: u32,
    pub device: u64,
    /// Its lines, from the first to the last.
    pub first: usize,
    pub last: usize,
}

/// What one process called.
#[derive(Clone, Debug)]
pub struct Recording {
    /// A name for messages.
    pub process: String,
    /// In the order of their numbers.
    pub lines: Vec<Line>,
}

impl Recording {
    /// A recording from its text. A last line that was cut off by a kill is left out.
    pub fn parse(process: &str, text: &str) -> Self {
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let mut lines: Vec<_> = whole
            .lines()
            .filter(|line| !line.trim().is_empty())
            .map(Line::parse)
            .collect();
        mark_trials(&mut lines);
        Self {
            process: process.to_owned(),
            lines,
        }
    }

    /// All recordings in a directory, in the order of their names.
    pub fn read_all(directory: &Path) -> Vec<Self> {
        let mut paths: Vec<_> = std::fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|end| end == "rec"))
            .collect();
        paths.sort();
        paths
            .iter()
            .map(|path| {
                Self::parse(
                    path.file_stem().unwrap().to_str().unwrap(),
                    &std::fs::read_to_string(path).unwrap(),
                )
            })
            .collect()
    }

    /// Where set-up ends and where winding up begins, as indices of lines: from each note `Mark name=run` to the next note
    /// `Mark name=end`, or from the first payload to the last one. Outside, threads hand things to each other in ways that
    /// a recording does not show.
    pub fn runs(&self) -> Vec<std::ops::Range<usize>> {
        let marks = |name| {
            let lines = self.lines.iter().enumerate();
            let marks = lines.filter(|(_, line)| line.name == "Mark");
            marks.filter_map(move |(at, line)| (line.text("name") == Some(name)).then_some(at))
        };
        let marked: Vec<_> = marks("run").zip(marks("end")).collect();
        let first = self.lines.iter().position(Line::is_payload);
        let last = self.lines.iter().rposition(Line::is_payload);
        let payloads = marks("run").next().or(first).zip(last);
        let runs = if marked.is_empty() {
            payloads.into_iter().collect()
        } else {
            marked
        };
        runs.into_iter()
            .map(|(first, last)| first..last + 1)
            .collect()
    }

    /// The threads that made communicators, and issued nothing but the bytes that try them out.
    pub fn connectors(&self) -> Vec<Connector> {
        let begins = self
            .lines
            .iter()
            .filter(|line| line.name == "ncclCommInit" && !line.is_end());
        let mut found: Vec<Connector> = Vec::new();
        for begin in begins {
            let thread = begin.thread;
            // It may end long after it has handed over what it made.
            let is_own = |line: &Line| line.thread == thread && line.name != "ThreadEnd";
            let issues = |line: &Line| is_own(line) && line.is_payload();
            if found.iter().any(|other| other.thread == thread) || self.lines.iter().any(issues) {
                continue;
            }
            found.push(Connector {
                thread,
                device: begin.number("dev").unwrap_or(0),
                first: self.lines.iter().position(is_own).expect("it began"),
                last: self.lines.iter().rposition(is_own).expect("it began"),
            });
        }
        found
    }
}
