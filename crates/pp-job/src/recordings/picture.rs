//! The recordings as a Chrome trace: a process for each rank, a track for each kind of operation,
//! all on the clock of the first, and an arrow from each send to its receive.

use std::io::{self, Write};

use pp_runtime::report::TraceEvents;
use pp_transport::flight::{Kind, Operation};
use serde_json::json;

use super::pairs::{Half, halves};
use super::ranked::Ranked;
use super::tell;

/// The track of what the driver was inside of at the end.
const DRIVER: u32 = 1;

/// Writes the trace.
pub(super) fn draw(out: &mut impl Write, ranked: &[Ranked]) -> io::Result<()> {
    let begins = ranked.iter().flat_map(|r| {
        let operations = r.recording.operations.iter();
        operations.map(|o| r.at(o.prepared_ns))
    });
    let origin = begins.min().unwrap_or(0);
    let mut events = TraceEvents::begin(out, 0)?;
    for (process, own) in ranked.iter().enumerate() {
        let mut process = Process {
            events: &mut events,
            process,
            own,
            origin,
        };
        process.name_tracks()?;
        for operation in own.recording.operations.iter() {
            process.span(operation)?;
        }
        process.inside()?;
    }
    for (number, halves) in halves(ranked).values().enumerate() {
        arrow(&mut events, number, halves, ranked, origin)?;
    }
    events.end()
}

/// Microseconds on the trace.
fn us(own: &Ranked, ns: u64, origin: i128) -> f64 {
    (own.at(ns) - origin) as f64 / 1e3
}

fn track(kind: Kind) -> u32 {
    DRIVER + 1 + kind as u32
}

/// One rank in the trace.
struct Process<'a, 'b, W> {
    events: &'a mut TraceEvents<'b, W>,
    process: usize,
    own: &'a Ranked,
    origin: i128,
}

impl<W: Write> Process<'_, '_, W> {
    fn name_tracks(&mut self) -> io::Result<()> {
        let (rank, pid, process) = (self.own.rank(), self.own.recording.pid, self.process);
        let mut name = |what: &str, tid: u32, name: String| {
            self.events.put(&json!({
                "ph": "M", "name": what, "pid": process, "tid": tid, "args": {"name": name},
            }))
        };
        name("process_name", 0, format!("rank {rank} (process {pid})"))?;
        name("thread_name", DRIVER, "driver".into())?;
        for kind in Kind::ALL {
            name("thread_name", track(*kind), kind.to_string())?;
        }
        Ok(())
    }

    /// An operation, from its preparation to its end. Asynchronous: several are under way at once.
    fn span(&mut self, operation: &Operation) -> io::Result<()> {
        let message = operation.message.map(|m| m.to_string());
        let what = message.unwrap_or_else(|| operation.kind.to_string());
        let number = operation.call_id.map(|c| c.get()).or(operation.number);
        let number = number.map_or(String::new(), |n| format!(" {n}"));
        let open = if operation.is_over() { "" } else { " (open)" };
        let written = self.own.recording.written.monotonic_ns;
        let until = operation
            .ended_ns
            .unwrap_or(written)
            .max(operation.prepared_ns);
        for (ph, at) in [("b", operation.prepared_ns), ("e", until)] {
            self.events.put(&json!({
                "ph": ph, "cat": operation.kind.to_string(), "name": format!("{what}{number}{open}"),
                "id": format!("{}.{}", self.process, operation.sequence),
                "pid": self.process, "tid": track(operation.kind), "ts": us(self.own, at, self.origin),
                "args": {
                    "state": operation.state.to_string(), "bytes": operation.bytes,
                    "chunk_index": operation.chunk_index.map(|c| c.get()),
                    "cache_epoch": operation.cache_epoch.map(|e| e.get()),
                    "generation": operation.generation.get(), "number": operation.number,
                },
            }))?;
        }
        Ok(())
    }

    /// What the driver was inside of when the recording was written.
    fn inside(&mut self) -> io::Result<()> {
        let Some(activity) = &self.own.recording.activity else {
            return Ok(());
        };
        let written = self.own.recording.written.monotonic_ns;
        let since = activity.since_ns.unwrap_or(written).min(written);
        self.events.put(&json!({
            "ph": "X", "cat": "driver", "name": tell::activity(self.own), "pid": self.process, "tid": DRIVER,
            "ts": us(self.own, since, self.origin), "dur": (written - since) as f64 / 1e3,
        }))
    }
}

/// From the half that sends to the one that receives.
fn arrow(
    events: &mut TraceEvents<'_, impl Write>,
    number: usize,
    halves: &[Half<'_>],
    ranked: &[Ranked],
    origin: i128,
) -> io::Result<()> {
    let one = |kinds: [Kind; 2]| halves.iter().find(|h| kinds.contains(&h.operation.kind));
    let from = one([Kind::Send, Kind::GroupSend]);
    let (Some(from), Some(to)) = (from, one([Kind::Receive, Kind::GroupReceive])) else {
        return Ok(());
    };
    for (ph, half) in [("s", from), ("f", to)] {
        let process = ranked.iter().position(|r| std::ptr::eq(r, half.of));
        events.put(&json!({
            "ph": ph, "cat": "message", "name": "message", "id": number, "bp": "e",
            "pid": process, "tid": track(half.operation.kind),
            "ts": us(half.of, half.operation.prepared_ns, origin),
        }))?;
    }
    Ok(())
}
