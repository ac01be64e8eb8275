//! What must happen before what.
//!
//! Timelines are threads and streams; each is a chain. Between them:
//! a call happens before the operation it queues; a recording of an event before the waits that were called while it was
//! the newest, and before whatever a thread calls after it has seen the event done; a send's beginning before the end of
//! its receive; a word that is written before a host has read it ([`super::shared`]). Outside the run (set-up, winding up)
//! the calls of all threads of a process count as one chain; within it a thread that makes communicators belongs between
//! the calls of the one that issues on its device.

use std::collections::HashMap;

use super::record::{Connector, Line, Range, Recording};
use super::shared::{Mapped, Shared, place};

/// What an operation does to memory between its first and its last node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Write,
    /// The beginning of an allocation in the order of a stream: nothing is in it yet, and nothing may come before.
    Begin,
    /// The end of an allocation: a write to all of it that nothing may follow.
    Free,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Access {
    /// Recording and line of the call: what one call reads and writes is in the order that it needs.
    pub(crate) call: (usize, usize),
    pub(crate) first: usize,
    pub(crate) last: usize,
    pub(crate) kind: Kind,
    /// The process whose memory it is, or a number beyond those of processes: memory that several have. What they do
    /// there counts as an access to their own addresses, too, which end for each by itself.
    pub(crate) space: usize,
    pub(crate) range: Range,
    /// A send of a payload. (The byte that tries out a connection is anything.)
    pub(crate) sends: bool,
    pub(crate) is_trial: bool,
    /// Device memory (what is not allocated by a driver call in the recording counts as the host's).
    pub(crate) device: bool,
}

#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) timeline: usize,
    /// Place on its timeline, from 1.
    pub(crate) tick: u32,
    /// Recording and line.
    pub(crate) at: (usize, usize),
    pub(crate) after: Vec<usize>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Graph {
    pub(crate) nodes: Vec<Node>,
    pub(crate) accesses: Vec<Access>,
    pub(crate) timelines: usize,
    /// (beginning of the receive, end of the send): an order only where the sender waits for its receiver.
    rendezvous: Vec<(usize, usize)>,
    /// (end, beginning) of neighbours on one communicator.
    in_turn: Vec<(usize, usize)>,
}

impl Graph {
    /// The graph as it would be if every send waited for its receive, and with what NCCL orders by itself.
    pub(crate) fn with_rendezvous(&self) -> Graph {
        let mut strict = self.clone();
        for &(before, after) in self.rendezvous.iter().chain(&self.in_turn) {
            strict.nodes[after].after.push(before);
        }
        strict
    }

    pub(crate) fn describe(&self, recordings: &[Recording], node: usize) -> String {
        let (process, line) = self.nodes[node].at;
        describe(&recordings[process], line)
    }
}

pub(crate) fn describe(recording: &Recording, line: usize) -> String {
    let line = &recording.lines[line];
    format!(
        "[{} line {} thread {}] {}",
        recording.process, line.sequence, line.thread, line.name
    )
}

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Timeline {
    Thread(usize, u32),
    Stream(usize, u64),
}

/// A transfer or collective on the wire: communicator, kind, from, to.
type Channel = (String, &'static str, u64, u64);

#[derive(Default)]
struct Builder {
    graph: Graph,
    timelines: HashMap<Timeline, usize>,
    last: HashMap<usize, usize>,
    /// Beginnings and ends of launches, in order, for each side of each channel; and whether it is a payload.
    sends: HashMap<Channel, Vec<(usize, usize, bool)>>,
    receives: HashMap<Channel, Vec<(usize, usize, bool)>>,
    collectives: HashMap<(String, u64), Vec<(usize, usize)>>,
    shared: Shared,
    processes: usize,
}

/// What a process has at the moment.
#[derive(Default)]
struct Process {
    events: HashMap<u64, usize>,
    comms: HashMap<u64, (String, u64)>,
    comm_last: HashMap<u64, usize>,
    /// Calls that wait for their launch, by operation.
    calls: HashMap<u64, usize>,
    allocations: Vec<Range>,
    mapped: Vec<Mapped>,
    /// What was mapped or registered, and the call that ended it.
    unmapped: Vec<(Range, usize)>,
    streams: Vec<(u64, u64)>,
    /// What a synchronization waits for, by thread.
    waits: HashMap<u32, Vec<usize>>,
    chain: Option<usize>,
    /// Threads that make communicators, and whether the one that issues has called since.
    connectors: Vec<(Connector, bool)>,
    /// Who issues on each device.
    issuers: HashMap<u64, u32>,
    devices: HashMap<u64, u64>,
}

pub(crate) fn build(recordings: &[Recording]) -> Graph {
    let mut builder = Builder {
        processes: recordings.len(),
        ..Builder::default()
    };
    for (index, recording) in recordings.iter().enumerate() {
        builder.process(index, recording);
    }
    builder.join();
    builder.graph.timelines = builder.timelines.len();
    builder.graph
}

impl Builder {
    fn node(&mut self, timeline: Timeline, at: (usize, usize), after: Vec<usize>) -> usize {
        let next = self.timelines.len();
        let timeline = *self.timelines.entry(timeline).or_insert(next);
        let node = self.graph.nodes.len();
        let previous = self.last.insert(timeline, node);
        let tick = previous.map_or(1, |p| self.graph.nodes[p].tick + 1);
        let mut after = after;
        after.extend(previous);
        self.graph.nodes.push(Node {
            timeline,
            tick,
            at,
            after,
        });
        node
    }

    fn end_of_stream(&self, process: usize, stream: u64) -> Option<usize> {
        let timeline = self.timelines.get(&Timeline::Stream(process, stream))?;
        self.last.get(timeline).copied()
    }

    fn accesses(
        &mut self,
        call: (usize, usize),
        line: &Line,
        process: &Process,
        first: usize,
        last: usize,
    ) {
        for (key, kind) in [("r", Kind::Read), ("w", Kind::Write)] {
            for range in line.ranges(key) {
                let device = process.allocations.iter().any(|a| a.overlaps(range));
                let is_trial = line.is_trial();
                let sends = line.sends() && kind == Kind::Read;
                let access = Access {
                    call,
                    first,
                    last,
                    kind,
                    space: call.0,
                    range,
                    sends,
                    is_trial,
                    device,
                };
                if let Some((space, range)) = place(range, &process.mapped) {
                    let there = Access {
                        space,
                        range,
                        device: true,
                        ..access
                    };
                    self.graph.accesses.push(there);
                    // A host dies of an address that is not there.
                    if !line.name.starts_with("Host") {
                        self.uses(access);
                    }
                } else {
                    self.graph.accesses.push(access);
                }
            }
        }
    }

    /// An access to addresses that must be there, whatever else becomes of what lies at them.
    fn uses(&mut self, access: Access) {
        self.graph.accesses.push(Access {
            kind: Kind::Read,
            sends: false,
            device: false,
            ..access
        });
    }

    fn at_once(&self, range: Range, kind: Kind, node: usize) -> Access {
        let call = self.graph.nodes[node].at;
        Access {
            call,
            first: node,
            last: node,
            kind,
            space: call.0,
            range,
            sends: false,
            is_trial: false,
            device: false,
        }
    }

    /// An allocation that begins or ends.
    fn allocation(&mut self, line: &Line, kind: Kind, node: usize) {
        let range = line.allocation().expect("an allocation");
        let access = self.at_once(range, kind, node);
        self.graph.accesses.push(Access {
            device: line.name != "cuMemFreeHost",
            ..access
        });
    }

    /// Memory that is there from now on. The host may unmap what is not registered any more. Where its address comes back,
    /// that was before, and what is there now is something else.
    fn maps(&mut self, line: &Line, process: &mut Process, call: usize) {
        let range = line.allocation().expect("an allocation");
        process.mapped.retain(|part| !part.range.overlaps(range));
        let mapped = self.shared.mapped(line, self.processes);
        process.mapped.extend(mapped);
        let there = |(before, _): &&(Range, usize)| before.overlaps(range);
        let before: Vec<usize> = process
            .unmapped
            .iter()
            .filter(there)
            .map(|at| at.1)
            .collect();
        if !before.is_empty() {
            self.graph.nodes[call].after.extend(before);
            self.allocation(line, Kind::Begin, call);
        }
    }

    fn process(&mut self, index: usize, recording: &Recording) {
        let connectors = recording.connectors().into_iter();
        let mut process = Process {
            connectors: connectors.map(|connector| (connector, false)).collect(),
            ..Process::default()
        };
        let runs = recording.runs();
        for (number, line) in recording.lines.iter().enumerate() {
            if line.thread == 0 {
                continue; // a fault seen by a stream: judged elsewhere, orders nothing
            }
            let at = (index, number);
            let mut after = self.seen_done(index, line, &mut process);
            let in_run = runs.iter().any(|run| run.contains(&number));
            after.extend(process.chain);
            after.extend(self.beside(at, line, &mut process));
            let call = self.node(Timeline::Thread(index, line.thread), at, after);
            if !in_run {
                process.chain = Some(call);
            }
            self.effect(at, line, &mut process, recording, call);
        }
    }

    /// What comes before this call where one thread makes communicators for another.
    fn beside(&self, at: (usize, usize), line: &Line, process: &mut Process) -> Vec<usize> {
        let comm = line.number("comm");
        if let (Some(comm), Some(device)) = (comm, line.number("dev"))
            && line.name == "ncclCommInit"
        {
            process.devices.insert(comm, device);
        }
        if let (true, Some(comm)) = (line.is_payload(), comm) {
            let device = process.devices.get(&comm).copied().unwrap_or(0);
            process.issuers.insert(device, line.thread);
        }
        let end_of = |thread: u32| {
            let timeline = self.timelines.get(&Timeline::Thread(at.0, thread))?;
            self.last.get(timeline).copied()
        };
        let mut before = Vec::new();
        for (connector, is_joined) in &mut process.connectors {
            let issuer = process.issuers.get(&connector.device).copied();
            if connector.first == at.1 {
                before.extend(issuer.and_then(end_of));
            }
            if !*is_joined && connector.last < at.1 && issuer == Some(line.thread) {
                *is_joined = true;
                before.extend(end_of(connector.thread));
            }
        }
        before
    }

    /// The operations that this call has found to be done.
    fn seen_done(&self, index: usize, line: &Line, process: &mut Process) -> Vec<usize> {
        let event = || {
            line.number("ev")
                .and_then(|ev| process.events.get(&ev).copied())
        };
        let stream = || {
            line.number("st")
                .and_then(|st| self.end_of_stream(index, st))
        };
        match line.name.as_str() {
            "cuEventQuery" if line.succeeded() => event().into_iter().collect(),
            "cuStreamQuery" if line.succeeded() => stream().into_iter().collect(),
            "cuEventSynchronize" | "cuStreamSynchronize" | "cuCtxSynchronize" => {
                if line.is_end() {
                    return process.waits.remove(&line.thread).unwrap_or_default();
                }
                let device = line.number("dev");
                let all = process.streams.iter().filter(|(_, on)| Some(*on) == device);
                let found = match line.name.as_str() {
                    "cuEventSynchronize" => event().into_iter().collect(),
                    "cuStreamSynchronize" => stream().into_iter().collect(),
                    _ => all
                        .filter_map(|&(st, _)| self.end_of_stream(index, st))
                        .collect(),
                };
                process.waits.insert(line.thread, found);
                Vec::new()
            }
            _ => Vec::new(),
        }
    }

    /// What the call queues or ends.
    fn effect(
        &mut self,
        at: (usize, usize),
        line: &Line,
        process: &mut Process,
        recording: &Recording,
        call: usize,
    ) {
        let stream = |key| Timeline::Stream(at.0, line.number(key).expect("a stream"));
        match line.name.as_str() {
            "cuMemAlloc" => process.allocations.extend(line.allocation()),
            "cuMemMap" | "cuMemHostRegister" | "cuMemHostAlloc" | "HostMap" => {
                self.maps(line, process, call);
            }
            "cuMemUnmap" | "cuMemHostUnregister" => {
                let range = line.allocation().expect("a range");
                process.mapped.retain(|part| part.range != range);
                process.unmapped.push((range, call));
                self.allocation(line, Kind::Free, call);
            }
            "cuMemFree" | "cuMemFreeHost" => self.allocation(line, Kind::Free, call),
            "cuStreamWriteValue32" => {
                let node = self.node(stream("st"), at, vec![call]);
                self.shared.writes(at.0, line, &process.mapped, node);
                let at = line.number("addr").expect("a word");
                let word = self.at_once(Range { at, bytes: 4 }, Kind::Read, node);
                self.uses(word);
            }
            "HostStore" => self.shared.writes(at.0, line, &process.mapped, call),
            "HostLoad" => self.shared.reads(at.0, line, &process.mapped, call),
            "cuMemAllocAsync" => {
                process.allocations.extend(line.allocation());
                let node = self.node(stream("st"), at, vec![call]);
                self.allocation(line, Kind::Begin, node);
            }
            "cuMemFreeAsync" => {
                let node = self.node(stream("st"), at, vec![call]);
                self.allocation(line, Kind::Free, node);
            }
            "HostRead" | "HostWrite" => self.accesses(at, line, process, call, call),
            "cuStreamCreate" => {
                process.streams.push((
                    line.number("st").unwrap_or(0),
                    line.number("dev").unwrap_or(0),
                ));
            }
            "cuEventRecord" => {
                let node = self.node(stream("st"), at, vec![call]);
                process
                    .events
                    .insert(line.number("ev").expect("an event"), node);
            }
            "cuStreamWaitEvent" => {
                let mut after = vec![call];
                after.extend(line.number("ev").and_then(|ev| process.events.get(&ev)));
                self.node(stream("st"), at, after);
            }
            "Order" => {
                let mut after = vec![call];
                after.extend(self.end_of_stream(at.0, line.number("from").expect("a stream")));
                self.node(stream("to"), at, after);
            }
            "cuLaunchKernel" | "cuLaunchHostFunc" => {
                let node = self.node(stream("st"), at, vec![call]);
                self.accesses(at, line, process, node, node);
            }
            name if name.starts_with("cuMemcpy") || name.starts_with("cuMemset") => {
                let node = self.node(stream("st"), at, vec![call]);
                self.accesses(at, line, process, node, node);
            }
            "ncclCommInit" if !line.is_end() => {
                let uid = line.text("uid").unwrap_or_default().to_owned();
                let comm = line.number("comm").expect("a communicator");
                process
                    .comms
                    .insert(comm, (uid, line.number("rank").unwrap_or(0)));
            }
            "ncclSend" | "ncclRecv" | "ncclAllReduce" | "ncclBroadcast" => {
                process
                    .calls
                    .insert(line.number("op").expect("an operation"), at.1);
            }
            "NcclLaunch" => self.launch(at, line, process, recording, call),
            _ => {}
        }
    }

    fn launch(
        &mut self,
        at: (usize, usize),
        line: &Line,
        process: &mut Process,
        recording: &Recording,
        call: usize,
    ) {
        let stream = Timeline::Stream(at.0, line.number("st").expect("a stream"));
        let first = self.node(stream, at, vec![call]);
        let last = self.node(stream, at, Vec::new());
        let comm = line.number("comm").expect("a communicator");
        if let Some(before) = process.comm_last.insert(comm, last) {
            self.graph.in_turn.push((before, first));
        }
        let (uid, rank) = process.comms.get(&comm).cloned().unwrap_or_default();
        for op in line.text("ops").unwrap_or_default().split(',') {
            let Some(&called) = op.parse().ok().and_then(|op: u64| process.calls.get(&op)) else {
                continue;
            };
            let call = (at.0, called);
            let called = &recording.lines[called];
            self.accesses(call, called, process, first, last);
            let peer = called.number("peer").unwrap_or(0);
            match called.name.as_str() {
                "ncclSend" => {
                    let channel = (uid.clone(), "p2p", rank, peer);
                    let sends = self.sends.entry(channel).or_default();
                    sends.push((first, last, called.is_payload()));
                }
                "ncclRecv" => {
                    let channel = (uid.clone(), "p2p", peer, rank);
                    let receives = self.receives.entry(channel).or_default();
                    receives.push((first, last, called.is_payload()));
                }
                _ => {
                    let all = self.collectives.entry((uid.clone(), rank)).or_default();
                    all.push((first, last));
                }
            }
        }
    }

    /// The orders between ranks: the n-th send of a channel is the n-th receive's.
    fn join(&mut self) {
        for (channel, receives) in &self.receives {
            let sends = self.sends.get(channel).map_or(&[][..], Vec::as_slice);
            for (send, receive) in sends.iter().zip(receives) {
                self.graph.nodes[receive.1].after.push(send.0);
                // The byte that tries out a connection is always eager.
                if send.2 {
                    self.graph.rendezvous.push((receive.0, send.1));
                }
            }
        }
        let nodes = &mut self.graph.nodes;
        for (write, read) in self.shared.orders(|node| nodes[node].timeline) {
            nodes[read].after.push(write);
        }
        for ((uid, rank), mine) in &self.collectives {
            for ((other_uid, other), theirs) in &self.collectives {
                if uid == other_uid && rank != other {
                    for (a, b) in mine.iter().zip(theirs) {
                        self.graph.nodes[b.1].after.push(a.0);
                    }
                }
            }
        }
    }
}
