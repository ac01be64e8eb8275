//! The run as a Chrome trace: open it in <https://ui.perfetto.dev> or `chrome://tracing`.
//!
//! One process per rank, one thread per stage, both ranks on the front's clock. Stages are complete events. Transfers are
//! asynchronous ones, because several may be under way at once. Arrows (flow events) follow a chunk from encode through
//! phase B to decode, and a counter shows how many chunks were in flight.
//!
//! Source: "Trace Event Format", the document of the Chromium project that both viewers read.

use std::io::{self, Write};

use serde_json::{Value, json};

use super::{ChunkRecord, Recorder, View};

const ENCODE: u32 = 1;
const DECODE: u32 = 2;
const PHASE_B: u32 = 3;
const FORWARD: u32 = 4;
const BACK: u32 = 5;

/// Writes every record that `recorder` still holds.
///
/// # Errors
/// Whatever `out` returns.
pub fn write_chrome_trace(
    out: &mut impl Write,
    recorder: &Recorder,
    view: &View,
) -> io::Result<()> {
    let origin_ns = recorder
        .records()
        .map(|r| r.build_start_ns)
        .min()
        .unwrap_or(0);
    let mut events = TraceEvents::begin(out, origin_ns)?;
    name_lanes(&mut events, view.phase_b_rank)?;
    for record in recorder.records() {
        stages(&mut events, record, view.phase_b_rank)?;
        transfers(&mut events, record, view.phase_b_rank)?;
    }
    events.end()
}

fn name_lanes(events: &mut TraceEvents<'_, impl Write>, phase_b_rank: u32) -> io::Result<()> {
    let mut name = |kind: &str, pid: u32, tid: u32, name: &str| {
        events
            .put(&json!({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}))
    };
    name("process_name", 0, 0, "rank 0 (front)")?;
    if phase_b_rank != 0 {
        name(
            "process_name",
            phase_b_rank,
            0,
            &format!("rank {phase_b_rank} (phase B)"),
        )?;
    }
    name("thread_name", 0, ENCODE, "encode")?;
    name("thread_name", 0, DECODE, "decode")?;
    name("thread_name", phase_b_rank, PHASE_B, "phase_b")
}

fn stages(events: &mut TraceEvents<'_, impl Write>, r: &ChunkRecord, rank: u32) -> io::Result<()> {
    let k = r.chunk_index;
    let args = json!({
        "chunk_index": k, "call_id": r.call_id, "cache_epoch": r.cache_epoch, "frames": r.frames,
        "in_flight": r.in_flight, "idle_us": r.idle_us, "dropped": r.dropped,
    });
    let mut stage = |name: &str, pid: u32, tid: u32, from_ns: u64, to_ns: u64| {
        let (ts, dur) = (
            events.us(from_ns),
            to_ns.saturating_sub(from_ns) as f64 / 1e3,
        );
        events.put(&json!({
            "ph": "X", "cat": "stage", "name": format!("{name} {k}"),
            "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args,
        }))
    };
    stage("encode", 0, ENCODE, r.build_start_ns, r.build_end_ns)?;
    if let Some(b) = r.phase_b {
        stage(
            "phase_b",
            rank,
            PHASE_B,
            b.compute_start_ns,
            b.compute_end_ns,
        )?;
    }
    if !r.dropped {
        stage("decode", 0, DECODE, r.decode_start_ns, r.decode_end_ns)?;
    }

    let mut arrow = |ph: &str, pid: u32, tid: u32, at_ns: u64| {
        let ts = events.us(at_ns);
        events.put(&json!({
            "ph": ph, "cat": "chunk", "name": "chunk", "id": k, "bp": "e", "pid": pid, "tid": tid, "ts": ts,
        }))
    };
    arrow("s", 0, ENCODE, r.build_start_ns)?;
    if let Some(b) = r.phase_b {
        arrow("t", rank, PHASE_B, b.compute_start_ns)?;
    }
    if !r.dropped {
        arrow("f", 0, DECODE, r.decode_start_ns)?;
    }
    let ts = events.us(r.sent_ns);
    events.put(&json!({
        "ph": "C", "name": "in flight", "pid": 0, "ts": ts, "args": {"chunks": r.in_flight},
    }))
}

fn transfers(
    events: &mut TraceEvents<'_, impl Write>,
    r: &ChunkRecord,
    rank: u32,
) -> io::Result<()> {
    let Some(b) = r.phase_b else { return Ok(()) };
    let mut transfer = |name: &str, pid: u32, tid: u32, bytes: u64, from_ns: u64, to_ns: u64| {
        for (ph, at_ns) in [("b", from_ns), ("e", to_ns.max(from_ns))] {
            let ts = events.us(at_ns);
            events.put(&json!({
                "ph": ph, "cat": "transfer", "name": name, "id": format!("{name} {}", r.chunk_index),
                "pid": pid, "tid": tid, "ts": ts,
                "args": {"chunk_index": r.chunk_index, "call_id": r.call_id, "bytes": bytes},
            }))?;
        }
        Ok::<(), io::Error>(())
    };
    transfer("forward", 0, FORWARD, r.forward_bytes, r.sent_ns, b.recv_ns)?;
    transfer("back", rank, BACK, r.back_bytes, b.sent_ns, r.received_ns)
}

/// Writes events one after the other, commas between them.
#[derive(Debug)]
pub struct TraceEvents<'a, W> {
    out: &'a mut W,
    first: bool,
    origin_ns: u64,
}

impl<'a, W: Write> TraceEvents<'a, W> {
    /// Begins a trace whose time is counted from `origin_ns`.
    ///
    /// # Errors
    /// Whatever `out` returns.
    pub fn begin(out: &'a mut W, origin_ns: u64) -> io::Result<Self> {
        out.write_all(b"{\"displayTimeUnit\":\"ms\",\"traceEvents\":[")?;
        Ok(Self {
            out,
            first: true,
            origin_ns,
        })
    }

    /// Microseconds since the first build, the unit of the format. A rank whose clock lies before it gives 0.
    pub fn us(&self, at_ns: u64) -> f64 {
        at_ns.saturating_sub(self.origin_ns) as f64 / 1e3
    }

    /// Writes one event.
    ///
    /// # Errors
    /// Whatever `out` returns.
    pub fn put(&mut self, event: &Value) -> io::Result<()> {
        self.out
            .write_all(if self.first { b"\n" } else { b",\n" })?;
        self.first = false;
        serde_json::to_writer(&mut *self.out, event).map_err(io::Error::from)
    }

    /// Ends the trace.
    ///
    /// # Errors
    /// Whatever `out` returns.
    pub fn end(self) -> io::Result<()> {
        self.out.write_all(b"\n]}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::synthetic;

    fn events(recorder: &Recorder) -> Vec<Value> {
        let mut out = Vec::new();
        write_chrome_trace(&mut out, recorder, &View::default()).unwrap();
        let parsed: Value = serde_json::from_slice(&out).unwrap();
        parsed["traceEvents"].as_array().unwrap().clone()
    }

    fn of<'a>(events: &'a [Value], ph: &'a str) -> impl Iterator<Item = &'a Value> {
        events.iter().filter(move |e| e["ph"] == ph)
    }

    #[test]
    fn every_chunk_has_its_stages_transfers_and_arrows() {
        let events = events(&synthetic::overlapped(5));
        for name in ["encode", "phase_b", "decode"] {
            let found = of(&events, "X").filter(|e| e["name"].as_str().unwrap().starts_with(name));
            assert_eq!(found.count(), 5, "{name}");
        }
        assert_eq!(of(&events, "b").count(), 10);
        assert_eq!(of(&events, "e").count(), 10);
        for ph in ["s", "t", "f", "C"] {
            assert_eq!(of(&events, ph).count(), 5, "{ph}");
        }
    }

    #[test]
    fn ranks_are_processes_on_one_clock() {
        let events = events(&synthetic::overlapped(3));
        let stage = |name: &str| {
            let e = of(&events, "X").find(|e| e["name"] == name).unwrap();
            (
                e["pid"].as_u64().unwrap(),
                e["ts"].as_f64().unwrap(),
                e["dur"].as_f64().unwrap(),
            )
        };
        let (encode, phase_b, decode) = (stage("encode 0"), stage("phase_b 0"), stage("decode 0"));
        assert_eq!((encode.0, phase_b.0, decode.0), (0, 1, 0));
        assert_eq!((encode.1, encode.2), (0.0, 1_200.0));
        assert_eq!((phase_b.1, phase_b.2), (1_230.0, 4_000.0));
        assert!(decode.1 >= phase_b.1 + phase_b.2);
    }

    #[test]
    fn a_dropped_chunk_has_no_decode_and_an_empty_run_is_still_json() {
        let mut recorder = Recorder::with_capacity(4);
        recorder.push(ChunkRecord {
            dropped: true,
            ..ChunkRecord::default()
        });
        assert_eq!(of(&events(&recorder), "X").count(), 1);
        assert_eq!(of(&events(&Recorder::with_capacity(1)), "X").count(), 0);
    }
}
