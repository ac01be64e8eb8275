//! Rules about the calls themselves: who made them, in what order, and which must not be made in the steady state.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::graph::describe;
use super::record::{Connector, Line, Range, Recording};
use super::report::{Expect, Report, Rule, Violation};

/// What the fakes themselves complained about.
pub(crate) fn faults(recordings: &[Recording], report: &mut Report) {
    for recording in recordings {
        for (index, line) in recording
            .lines
            .iter()
            .enumerate()
            .filter(|(_, line)| line.name == "Fault")
        {
            let what = format!(
                "{} {}",
                describe(recording, index),
                line.text("what").unwrap_or_default()
            );
            report.violations.push(Violation {
                rule: Rule::Fault,
                what,
            });
        }
    }
}

/// The communicators of a process: number to (unique id, rank, device).
fn comms(recording: &Recording) -> HashMap<u64, (String, u64, u64)> {
    let begins = recording
        .lines
        .iter()
        .filter(|line| line.name == "ncclCommInit" && !line.is_end());
    begins
        .filter_map(|line| {
            let uid = line.text("uid")?.to_owned();
            Some((
                line.number("comm")?,
                (uid, line.number("rank")?, line.number("dev")?),
            ))
        })
        .collect()
}

/// From the first payload on, one thread issues every operation of all communicators of a device. Others may set up
/// connections, before it or while it stands aside.
pub(crate) fn one_issuer(recordings: &[Recording], report: &mut Report) {
    const ISSUED: &str = "ncclSend ncclRecv ncclAllReduce ncclBroadcast NcclLaunch";
    for recording in recordings {
        let comms = comms(recording);
        let connectors = recording.connectors();
        let mut issuers: HashMap<u64, u32> = HashMap::new();
        let mut has_begun = false;
        for (index, line) in recording.lines.iter().enumerate() {
            has_begun |= line.is_payload();
            if !has_begun || !ISSUED.split(' ').any(|name| name == line.name) {
                continue;
            }
            let comm = line.number("comm").unwrap_or(0);
            let device = comms.get(&comm).map_or(0, |comm| comm.2);
            let others = connectors.iter().filter(|other| other.device == device);
            let connects = |at: &&Connector| at.first < index && index < at.last;
            let meanwhile = others.clone().filter(connects);
            if others.clone().any(|other| other.thread == line.thread) {
                continue;
            }
            let beside = meanwhile.map(|other| other.thread).next();
            let issuer = *issuers.entry(device).or_insert(line.thread);
            let issuer = beside.unwrap_or(issuer);
            if issuer != line.thread {
                report.violations.push(Violation {
                    rule: Rule::Issuer,
                    what: format!(
                        "device {device} belongs to thread {issuer}: {}",
                        describe(recording, index)
                    ),
                });
            }
        }
    }
}

/// One side of a transfer or collective, as the other side must see it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Side {
    what: &'static str,
    len: u64,
    dtype: u64,
    root_or_operation: (u64, u64),
}

/// Operations in the order of their launches, each with where it was called.
type Operations = Vec<(Side, String)>;

/// What was launched, by unique id and ranks.
#[derive(Default)]
struct Launched {
    sent: BTreeMap<(String, u64, u64), Operations>,
    received: BTreeMap<(String, u64, u64), Operations>,
    collective: BTreeMap<String, BTreeMap<u64, Operations>>,
}

/// The operations of every communicator, in the order in which they were launched, are the same on its ranks, sizes and
/// types included.
pub(crate) fn ranks_agree(recordings: &[Recording], complete: bool, report: &mut Report) {
    let mut launched = Launched::default();
    for recording in recordings {
        launched.add(recording, report);
    }
    let none = Vec::new();
    let (sent, received) = (&launched.sent, &launched.received);
    let channels: BTreeSet<_> = sent.keys().chain(received.keys()).collect();
    for channel in channels {
        let side = |side: &'_ BTreeMap<_, Operations>| side.get(channel).unwrap_or(&none).clone();
        same(&side(sent), &side(received), complete, report);
    }
    for ranks in launched.collective.values() {
        let mut ranks = ranks.values();
        let lowest = ranks.next().unwrap_or(&none);
        ranks.for_each(|other| same(lowest, other, complete, report));
    }
}

fn same(left: &Operations, right: &Operations, complete: bool, report: &mut Report) {
    let mut say = |what| {
        let rule = Rule::Agreement;
        report.violations.push(Violation { rule, what });
    };
    for (n, (a, b)) in left.iter().zip(right).enumerate() {
        if a.0 != b.0 {
            say(format!(
                "operation {n}: {} {:?} / {} {:?}",
                a.1, a.0, b.1, b.0
            ));
        }
    }
    if complete && left.len() != right.len() {
        let (long, short) = if left.len() > right.len() {
            (left, right)
        } else {
            (right, left)
        };
        say(format!("nobody answers {}", long[short.len()].1));
    }
}

impl Launched {
    fn add(&mut self, recording: &Recording, report: &mut Report) {
        let comms = comms(recording);
        let mut calls: HashMap<u64, usize> = HashMap::new();
        for (index, line) in recording.lines.iter().enumerate() {
            if let Some(op) = line.number("op") {
                calls.insert(op, index);
            }
            report.transfers += usize::from(line.is_payload());
            if line.name != "NcclLaunch" {
                continue;
            }
            let Some((uid, rank, _)) = line.number("comm").and_then(|comm| comms.get(&comm)) else {
                continue;
            };
            let ops = line.text("ops").unwrap_or_default().split(',');
            for &call in ops.filter_map(|op| calls.get(&op.parse().ok()?)) {
                let said = describe(recording, call);
                self.operation(uid, *rank, &recording.lines[call], said);
            }
        }
    }

    fn operation(&mut self, uid: &str, rank: u64, call: &Line, said: String) {
        let number = |key| call.number(key).unwrap_or(0);
        let peer = number("peer");
        let (what, operations) = match call.name.as_str() {
            "ncclSend" => (
                "transfer",
                self.sent.entry((uid.to_owned(), rank, peer)).or_default(),
            ),
            "ncclRecv" => (
                "transfer",
                self.received
                    .entry((uid.to_owned(), peer, rank))
                    .or_default(),
            ),
            name => {
                let ranks = self.collective.entry(uid.to_owned()).or_default();
                let what = if name == "ncclBroadcast" {
                    "broadcast"
                } else {
                    "all-reduce"
                };
                (what, ranks.entry(rank).or_default())
            }
        };
        let side = Side {
            what,
            len: number("len"),
            dtype: number("dt"),
            root_or_operation: (number("root"), number("operation")),
        };
        operations.push((side, said));
    }
}

/// Between warm-up and the last payload nothing is synchronized, allocated, freed or created, and no copy from or to the
/// host touches memory that payloads travel in, but for the payloads to and from a rank without a device.
pub(crate) fn steady(recordings: &[Recording], expect: Expect, report: &mut Report) {
    const NEVER: &str = "cuStreamSynchronize cuCtxSynchronize cuEventSynchronize cuMemAlloc cuMemFree cuMemAllocAsync \
        cuMemFreeAsync cuMemHostAlloc cuMemFreeHost cuMemHostRegister cuMemHostUnregister cuMemCreate \
        cuMemRelease cuMemExport cuMemImport cuMemAddressReserve cuMemAddressFree cuMemMap cuMemUnmap \
        cuEventCreate cuEventDestroy cuStreamCreate cuStreamDestroy cuModuleLoadData ncclCommInit \
        ncclCommDestroy";
    for recording in recordings {
        let payloads: Vec<usize> = (0..recording.lines.len())
            .filter(|&at| recording.lines[at].is_payload())
            .collect();
        let (Some(&first), Some(&last)) = (payloads.get(expect.warm_up), payloads.last()) else {
            continue;
        };
        let slots: Vec<Range> = slots(recording, &payloads);
        let mut late_events = expect.late_events;
        for index in first..last {
            let line = &recording.lines[index];
            report.steady_lines += 1;
            let by_host = line.name.contains("HtoD")
                || line.name.contains("DtoH")
                || line.name.starts_with("Host");
            let touched = [line.ranges("r"), line.ranges("w")].concat();
            let touches = by_host
                && !line.is_payload()
                && touched
                    .iter()
                    .any(|range| slots.iter().any(|slot| slot.overlaps(*range)));
            if line.name == "cuEventCreate" && late_events > 0 {
                late_events -= 1;
                continue;
            }
            if NEVER.split(' ').any(|name| name == line.name) || touches {
                let why = if touches {
                    "the host touches a payload"
                } else {
                    "in the steady state"
                };
                report.violations.push(Violation {
                    rule: Rule::Steady,
                    what: format!("{why}: {}", describe(recording, index)),
                });
            }
        }
    }
}

/// The memory that payloads travel in, without repetitions.
fn slots(recording: &Recording, payloads: &[usize]) -> Vec<Range> {
    let maps = recording
        .lines
        .iter()
        .filter(|line| line.name == "cuMemMap");
    let mut slots: Vec<Range> = maps.filter_map(Line::allocation).collect();
    for &at in payloads {
        let line = &recording.lines[at];
        for range in [line.ranges("r"), line.ranges("w")].concat() {
            match slots.iter_mut().find(|slot| slot.at == range.at) {
                Some(slot) => slot.bytes = slot.bytes.max(range.bytes),
                None => slots.push(range),
            }
        }
    }
    slots
}
