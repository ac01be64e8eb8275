//! Rules about the calls themselves: who made them, in what order, and which must not be made in the steady state.

use std::collections::{BTreeSet, HashMap};

use super::graph::describe;
use super::record::{Line, Range, Recording};
use super::{Expect, Report, Rule, Violation};

/// What the fakes themselves complained about.
pub fn faults(recordings: &[Recording], report: &mut Report) {
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

/// From the first payload on, one thread issues every operation of all communicators of a device. Before it another one
/// may have set up the connections.
pub fn one_issuer(recordings: &[Recording], report: &mut Report) {
    const ISSUED: [&str; 5] = [
        "ncclSend",
        "ncclRecv",
        "ncclAllReduce",
        "ncclBroadcast",
        "NcclLaunch",
    ];
    for recording in recordings {
        let comms = comms(recording);
        let mut issuers: HashMap<u64, u32> = HashMap::new();
        let mut has_begun = false;
        for (index, line) in recording.lines.iter().enumerate() {
            has_begun |= line.is_payload();
            if !has_begun || !ISSUED.contains(&line.name.as_str()) {
                continue;
            }
            let comm = line.number("comm").unwrap_or(0);
            let device = comms.get(&comm).map_or(0, |comm| comm.2);
            let issuer = *issuers.entry(device).or_insert(line.thread);
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

type Sides = HashMap<(String, &'static str, u64, u64), Vec<(Side, String)>>;

/// The operations of every communicator, in the order in which they were launched, are the same on its ranks, sizes and
/// types included.
pub fn ranks_agree(recordings: &[Recording], complete: bool, report: &mut Report) {
    let mut sides: [Sides; 2] = Default::default();
    for recording in recordings {
        launched(recording, &mut sides, report);
    }
    let [sent, received] = &sides;
    let keys: BTreeSet<_> = sent.keys().chain(received.keys()).collect();
    for key in keys {
        let none = Vec::new();
        let (left, right) = (
            sent.get(key).unwrap_or(&none),
            received.get(key).unwrap_or(&none),
        );
        for (n, (a, b)) in left.iter().zip(right).enumerate() {
            if a.0 != b.0 {
                report.violations.push(Violation {
                    rule: Rule::Agreement,
                    what: format!("operation {n}: {} {:?} / {} {:?}", a.1, a.0, b.1, b.0),
                });
            }
        }
        if complete && left.len() != right.len() {
            report.violations.push(Violation {
                rule: Rule::Agreement,
                what: format!(
                    "{key:?}: {} operations on one side, {} on the other",
                    left.len(),
                    right.len()
                ),
            });
        }
    }
}

fn launched(recording: &Recording, sides: &mut [Sides; 2], report: &mut Report) {
    let comms = comms(recording);
    let mut calls: HashMap<u64, (usize, &Line)> = HashMap::new();
    for (index, line) in recording.lines.iter().enumerate() {
        if let Some(op) = line.number("op") {
            calls.insert(op, (index, line));
            report.transfers += usize::from(line.is_payload());
        }
        if line.name != "NcclLaunch" {
            continue;
        }
        let Some((uid, rank, _)) = line.number("comm").and_then(|comm| comms.get(&comm)) else {
            continue;
        };
        for op in line.text("ops").unwrap_or_default().split(',') {
            let Some((index, call)) = op.parse().ok().and_then(|op: u64| calls.get(&op)) else {
                continue;
            };
            let number = |key| call.number(key).unwrap_or(0);
            let collective = !call.is_transfer();
            let side = Side {
                what: match call.name.as_str() {
                    "ncclAllReduce" => "all-reduce",
                    "ncclBroadcast" => "broadcast",
                    _ => "transfer",
                },
                len: number("len"),
                dtype: number("dt"),
                root_or_operation: (number("root"), number("operation")),
            };
            let said = describe(recording, *index);
            if collective {
                // The two lowest ranks are compared; every further rank with the lowest.
                let key = (uid.clone(), "collective", 0, (*rank).max(1));
                let which = usize::from(*rank > 0);
                sides[which].entry(key).or_default().push((side, said));
            } else {
                let sends = call.name == "ncclSend";
                let (from, to) = if sends {
                    (*rank, number("peer"))
                } else {
                    (number("peer"), *rank)
                };
                let key = (uid.clone(), "p2p", from, to);
                sides[usize::from(!sends)]
                    .entry(key)
                    .or_default()
                    .push((side, said));
            }
        }
    }
}

/// Between warm-up and the last payload nothing is synchronized, allocated, freed or created, and no copy from or to the
/// host touches memory that payloads travel in.
pub fn steady(recordings: &[Recording], expect: Expect, report: &mut Report) {
    const NEVER: [&str; 18] = [
        "cuStreamSynchronize",
        "cuCtxSynchronize",
        "cuEventSynchronize",
        "cuMemAlloc",
        "cuMemFree",
        "cuMemAllocAsync",
        "cuMemFreeAsync",
        "cuMemHostAlloc",
        "cuMemFreeHost",
        "cuMemHostRegister",
        "cuMemHostUnregister",
        "cuEventCreate",
        "cuEventDestroy",
        "cuStreamCreate",
        "cuStreamDestroy",
        "cuModuleLoadData",
        "ncclCommInit",
        "ncclCommDestroy",
    ];
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
                && touched
                    .iter()
                    .any(|range| slots.iter().any(|slot| slot.overlaps(*range)));
            if line.name == "cuEventCreate" && late_events > 0 {
                late_events -= 1;
                continue;
            }
            if NEVER.contains(&line.name.as_str()) || touches {
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
    let mut slots: Vec<Range> = Vec::new();
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
