//! The recordings as a Chrome trace: a process for each rank, a track for each kind of operation,
//! all on the clock of the first, and an arrow from each send to its receive.

use std::io::{self, Write};

use pp_runtime::report::TraceEvents;
use pp_transport::flight::{Kind, Operation};
use serde_json::json;

use super::pairs::halves;
use super::ranked::Ranked;
use super::tell;

/// The track of what the driver was inside of at the end.
const DRIVER: u32 = 1;

fn track(kind: Kind) -> u32 {
    DRIVER + 1 + kind as u32
}

/// Writes the trace.
pub(super) fn draw(out: &mut impl Write, ranked: &[Ranked]) -> io::Result<()> {
    let begins = ranked
        .iter()
        .flat_map(|r| r.operations().map(|o| r.at(o.prepared_ns)));
    let origin = begins.min().unwrap_or(0);
    let us = |own: &Ranked, ns: u64| (own.at(ns) - origin) as f64 / 1e3;
    let mut events = TraceEvents::begin(out, 0)?;
    for (process, own) in ranked.iter().enumerate() {
        let mut name = |what: &str, tid: u32, name: String| {
            events.put(&json!({
                "ph": "M", "name": what, "pid": process, "tid": tid, "args": {"name": name},
            }))
        };
        let (rank, pid) = (own.rank(), own.recording.pid);
        name("process_name", 0, format!("rank {rank} (process {pid})"))?;
        name("thread_name", DRIVER, "driver".into())?;
        for kind in Kind::ALL {
            name("thread_name", track(*kind), kind.to_string())?;
        }
        let written = own.recording.written.monotonic_ns;
        for operation in own.operations() {
            let until = operation.ended_ns.unwrap_or(written);
            let ends = [("b", operation.prepared_ns), ("e", until)];
            for (ph, at) in ends {
                let ts = us(own, at.max(operation.prepared_ns));
                events.put(&span(operation, process, ph, ts))?;
            }
        }
        if let Some(activity) = &own.recording.activity {
            let since = activity.since_ns.unwrap_or(written).min(written);
            events.put(&json!({
                "ph": "X", "cat": "driver", "name": tell::activity(own), "pid": process, "tid": DRIVER,
                "ts": us(own, since), "dur": (written - since) as f64 / 1e3,
            }))?;
        }
    }
    for (number, halves) in halves(ranked).values().enumerate() {
        let one = |kinds: [Kind; 2]| halves.iter().find(|h| kinds.contains(&h.operation.kind));
        let from = one([Kind::Send, Kind::GroupSend]);
        let (Some(from), Some(to)) = (from, one([Kind::Receive, Kind::GroupReceive])) else {
            continue;
        };
        for (ph, half) in [("s", from), ("f", to)] {
            events.put(&json!({
                "ph": ph, "cat": "message", "name": "message", "id": number, "bp": "e",
                "pid": half.at, "tid": track(half.operation.kind),
                "ts": us(half.of, half.operation.prepared_ns),
            }))?;
        }
    }
    events.end()
}

/// The beginning or the end of an operation. Asynchronous: several are under way at once.
fn span(operation: &Operation, process: usize, ph: &str, ts: f64) -> serde_json::Value {
    let message = operation.message.map(|m| m.to_string());
    let what = message.unwrap_or_else(|| operation.kind.to_string());
    let number = operation.call_id.map(|c| c.get()).or(operation.number);
    let number = number.map_or(String::new(), |n| format!(" {n}"));
    let open = if operation.is_over() { "" } else { " (open)" };
    json!({
        "ph": ph, "cat": operation.kind.to_string(), "name": format!("{what}{number}{open}"),
        "id": format!("{process}.{}", operation.sequence),
        "pid": process, "tid": track(operation.kind), "ts": ts,
        "args": {
            "state": operation.state.to_string(), "bytes": operation.bytes,
            "chunk_index": operation.chunk_index.map(|c| c.get()),
            "cache_epoch": operation.cache_epoch.map(|e| e.get()),
            "generation": operation.generation.get(), "number": operation.number,
        },
    })
}
