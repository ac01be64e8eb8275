//! The run as a Chrome trace: open it in <https://ui.perfetto.dev> or `chrome://tracing`.
//!
//! One process per rank, one thread per stage, both ranks on the front's clock. Stages are complete events. Transfers are
//! asynchronous ones, because several may be under way at once, and so is the latency of a chunk: from when its first
//! frame had been read until it was handed to the sink. Arrows (flow events) follow a chunk from encode through phase B to
//! decode, and a counter shows how many chunks were in flight. A Phase B that was lost is a stage until the next one gave
//! its first result.
//!
//! Source: "Trace Event Format", the document of the Chromium project that both viewers read.

use std::io::{self, Write};

use serde_json::{Value, json};

use super::{ChunkRecord, Recorder, Restart, View};

const ENCODE: u32 = 1;
const DECODE: u32 = 2;
const PHASE_B: u32 = 3;
const FORWARD: u32 = 4;
const BACK: u32 = 5;
const LATENCY: u32 = 6;
const LOST: u32 = 7;

/// Writes every record that `recorder` still holds.
///
/// # Errors
/// Whatever `out` returns.
pub fn write_chrome_trace(
    out: &mut impl Write,
    recorder: &Recorder,
    view: &View,
) -> io::Result<()> {
    let began = |r: &ChunkRecord| r.first_read_ns.min(r.build_start_ns);
    let origin_ns = recorder.records().map(began).min().unwrap_or(0);
    let mut events = TraceEvents::begin(out, origin_ns)?;
    name_lanes(&mut events, view.phase_b_rank)?;
    for record in recorder.records() {
        stages(&mut events, record, view.phase_b_rank)?;
        spans(&mut events, record, view.phase_b_rank)?;
    }
    in_flight(&mut events, recorder, &view.restarts)?;
    lost(&mut events, recorder, view)?;
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
    name("thread_name", phase_b_rank, PHASE_B, "phase_b")?;
    name("thread_name", phase_b_rank, LOST, "lost")
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
    Ok(())
}

/// The counter: a chunk counts from when it was sent until its result was back, or its Phase B was lost. Of one that was
/// sent again the record has the last time; the first was when it was built.
fn in_flight(
    events: &mut TraceEvents<'_, impl Write>,
    recorder: &Recorder,
    restarts: &[Restart],
) -> io::Result<()> {
    let mut steps = Vec::with_capacity(2 * recorder.len());
    let mut count = |from_ns: u64, to_ns: u64| {
        if to_ns > from_ns {
            steps.extend([(from_ns, 1_i64), (to_ns, -1)]);
        }
    };
    for r in recorder.records() {
        let mut from_ns = r.build_end_ns.min(r.sent_ns);
        for restart in restarts {
            if (from_ns..r.sent_ns).contains(&restart.lost_ns) {
                count(from_ns, restart.lost_ns);
                from_ns = restart.sent_ns.unwrap_or(r.sent_ns);
            }
        }
        let mut losses = restarts.iter().map(|restart| restart.lost_ns);
        let ended_ns = match r.received_ns {
            // A hard cut had overtaken it when its Phase B was lost.
            0 => losses.find(|lost_ns| *lost_ns > r.sent_ns).unwrap_or(0),
            received_ns => received_ns,
        };
        count(r.sent_ns, ended_ns);
    }
    // A chunk that came back makes room for the one that was sent at that moment.
    steps.sort_unstable();
    let mut chunks = 0;
    for (at_ns, step) in steps {
        chunks += step;
        let ts = events.us(at_ns);
        events.put(&json!({
            "ph": "C", "name": "in flight", "pid": 0, "ts": ts, "args": {"chunks": chunks},
        }))?;
    }
    Ok(())
}

/// Each time that Phase B was lost, until there was a result of the next one.
fn lost(
    events: &mut TraceEvents<'_, impl Write>,
    recorder: &Recorder,
    view: &View,
) -> io::Result<()> {
    for restart in &view.restarts {
        let to_ns = restart
            .served_ns
            .unwrap_or(recorder.totals().last_emit_ns)
            .max(restart.lost_ns);
        let (ts, dur) = (
            events.us(restart.lost_ns),
            (to_ns - restart.lost_ns) as f64 / 1e3,
        );
        events.put(&json!({
            "ph": "X", "cat": "restart", "name": "Phase B lost", "pid": view.phase_b_rank, "tid": LOST,
            "ts": ts, "dur": dur,
            "args": {"cause": restart.fault.to_string(), "chunk_index": restart.chunk.map(|c| c.get()),
                "sent_again": restart.sent_again, "served_again": restart.served_ns.is_some()},
        }))?;
    }
    Ok(())
}

/// What may overlap with its like: transfers, and latencies.
fn spans(events: &mut TraceEvents<'_, impl Write>, r: &ChunkRecord, rank: u32) -> io::Result<()> {
    let mut span = |name: &str, [pid, tid]: [u32; 2], bytes: u64, from_ns: u64, to_ns: u64| {
        let cat = if tid == LATENCY {
            "latency"
        } else {
            "transfer"
        };
        for (ph, at_ns) in [("b", from_ns), ("e", to_ns.max(from_ns))] {
            let ts = events.us(at_ns);
            events.put(&json!({
                "ph": ph, "cat": cat, "name": name, "id": format!("{name} {}", r.chunk_index),
                "pid": pid, "tid": tid, "ts": ts,
                "args": {"chunk_index": r.chunk_index, "call_id": r.call_id, "bytes": bytes},
            }))?;
        }
        Ok::<(), io::Error>(())
    };
    if !r.dropped {
        let bytes = r.forward_bytes.saturating_add(r.back_bytes);
        span(
            "latency",
            [0, LATENCY],
            bytes,
            r.first_read_ns,
            r.emitted_ns,
        )?;
    }
    let Some(b) = r.phase_b else { return Ok(()) };
    span(
        "forward",
        [0, FORWARD],
        r.forward_bytes,
        r.sent_ns,
        b.recv_ns,
    )?;
    span("back", [rank, BACK], r.back_bytes, b.sent_ns, r.received_ns)
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
        events_of(recorder, &View::default())
    }

    fn events_of(recorder: &Recorder, view: &View) -> Vec<Value> {
        let mut out = Vec::new();
        write_chrome_trace(&mut out, recorder, view).unwrap();
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
        // Two transfers and a latency.
        assert_eq!(of(&events, "b").count(), 15);
        assert_eq!(of(&events, "e").count(), 15);
        for ph in ["s", "t", "f"] {
            assert_eq!(of(&events, ph).count(), 5, "{ph}");
        }
    }

    /// The values of the counter, in the order of the file, which must be that of time.
    fn in_flight(events: &[Value]) -> Vec<i64> {
        let counted = || of(events, "C").filter(|e| e["name"] == "in flight");
        assert!(counted().is_sorted_by_key(|e| e["ts"].as_f64().unwrap()));
        counted()
            .map(|e| e["args"]["chunks"].as_i64().unwrap())
            .collect()
    }

    #[test]
    fn the_counter_falls_when_a_chunk_comes_back_and_ends_at_zero() {
        let sent_and_received = |sent_ns: u64, received_ns: u64| ChunkRecord {
            sent_ns,
            received_ns,
            ..ChunkRecord::default()
        };
        let mut recorder = Recorder::with_capacity(8);
        // The third takes the place of the first, and the last never came back.
        for [sent, received] in [[1, 10], [2, 20], [10, 30], [21, 22], [25, 0]] {
            recorder.push(sent_and_received(sent, received));
        }
        assert_eq!(in_flight(&events(&recorder)), [1, 2, 1, 2, 1, 2, 1, 0]);
        let view = View {
            restarts: vec![Restart {
                lost_ns: 26,
                ..synthetic::restart()
            }],
            ..View::default()
        };
        let lost = in_flight(&events_of(&recorder, &view));
        assert_eq!(lost, [1, 2, 1, 2, 1, 2, 1, 2, 1, 0]);
        // The third was built at 3, went down at 5 with the first Phase B and was sent again at 10; the first and the
        // second had come back before.
        recorder = Recorder::with_capacity(8);
        for [built, sent, received] in [[1, 1, 2], [2, 2, 4], [3, 10, 30]] {
            recorder.push(ChunkRecord {
                build_end_ns: built,
                ..sent_and_received(sent, received)
            });
        }
        let view = View {
            restarts: vec![Restart {
                lost_ns: 5,
                sent_ns: Some(10),
                ..synthetic::restart()
            }],
            ..View::default()
        };
        let again = in_flight(&events_of(&recorder, &view));
        assert_eq!(again, [1, 0, 1, 2, 1, 0, 1, 0]);
        let overlapped = in_flight(&events(&synthetic::overlapped(40)));
        assert_eq!(
            (overlapped.iter().max(), overlapped.last()),
            (Some(&4), Some(&0))
        );
    }

    #[test]
    fn a_restart_is_a_span_beside_phase_b() {
        let view = View {
            restarts: vec![synthetic::restart()],
            ..View::default()
        };
        let events = events_of(&synthetic::overlapped(40), &view);
        let lost = of(&events, "X").find(|e| e["name"] == "Phase B lost");
        let lost = lost.unwrap();
        assert_eq!((&lost["pid"], &lost["dur"]), (&json!(1), &json!(2_000.0)));
        assert_eq!(lost["args"]["chunk_index"], 9);
        assert!(lost["args"]["cause"].as_str().unwrap().contains("SIGKILL"));
    }

    #[test]
    fn a_latency_begins_before_the_build_and_ends_with_the_sink() {
        let mut recorder = Recorder::with_capacity(4);
        recorder.push(ChunkRecord {
            first_read_ns: 1_000,
            last_read_ns: 4_000,
            build_start_ns: 5_000,
            emitted_ns: 9_000,
            ..ChunkRecord::default()
        });
        let events = events(&recorder);
        let at = |ph| {
            let e = of(&events, ph).find(|e| e["name"] == "latency").unwrap();
            e["ts"].as_f64().unwrap()
        };
        assert_eq!((at("b"), at("e")), (0.0, 8.0));
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
