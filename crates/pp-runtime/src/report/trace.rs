//! The run as a Chrome trace: open it in <https://ui.perfetto.dev> or `chrome://tracing`.
//!
//! One process per rank, one thread per stage, of a group one in the process of each member, all ranks on the clock of rank 0.
//! Works are complete events. Transfers are
//! asynchronous ones, because several may be under way at once, and so is the latency of a chunk: from when its first
//! frame had been read until it was accepted. Arrows (flow events) follow a chunk from the source to the sink, and a
//! counter shows how many chunks were in flight. A rank that was lost has an event until the sink had a chunk again.
//!
//! Source: "Trace Event Format", the document of the Chromium project that both viewers read.

use std::collections::BTreeSet;
use std::io::{self, Write};

use pp_contract::StageSpec;
use serde_json::{Value, json};

use super::record::named;
use super::{ChunkRecord, Recorder, Restart, View};

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
    let mut trace = Trace {
        events: TraceEvents::begin(out, origin_ns)?,
        recorder,
        tracks: tracks(recorder),
        restarts: &view.restarts,
    };
    trace.name_tracks()?;
    for record in recorder.records() {
        trace.stages(record)?;
        trace.spans(record)?;
    }
    trace.in_flight()?;
    trace.lost()?;
    trace.events.end()
}

/// A run and its trace, while that is written.
struct Trace<'a, W> {
    events: TraceEvents<'a, W>,
    recorder: &'a Recorder,
    tracks: Vec<Track<'a>>,
    restarts: &'a [Restart],
}

/// Where a stage is drawn, and each member of a group.
struct Track<'a> {
    stage: &'a StageSpec,
    label: String,
    /// Of the leader.
    pid: u32,
    tid: usize,
}

/// Makes the tracks of all stages, in the order of the pipeline.
fn tracks(recorder: &Recorder) -> Vec<Track<'_>> {
    let stages = recorder.pipeline().stages().iter().zip(1..);
    let tracks = stages.map(|(stage, tid)| Track {
        stage,
        label: stage.label(),
        pid: stage.leader().get(),
        tid,
    });
    tracks.collect()
}

impl<W: Write> Trace<'_, W> {
    /// The thread of losses, behind those of the stages.
    fn lost_tid(&self) -> usize {
        self.tracks.len() + 1
    }

    fn name_tracks(&mut self) -> io::Result<()> {
        let lost_tid = self.lost_tid();
        let mut name = |kind: &str, pid: u32, tid: usize, name: &str| {
            self.events.put(
                &json!({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}),
            )
        };
        let lost = self.restarts.iter().map(|restart| restart.fault.rank);
        let lost: BTreeSet<_> = lost.collect();
        for rank in 0..self.recorder.pipeline().world_size().get() {
            name("process_name", rank, 0, &format!("rank {rank}"))?;
        }
        for track in &self.tracks {
            for rank in &track.stage.ranks {
                name("thread_name", rank.get(), track.tid, &named(track.stage))?;
            }
        }
        for rank in lost {
            name("thread_name", rank.get(), lost_tid, "lost")?;
        }
        Ok(())
    }

    fn stages(&mut self, r: &ChunkRecord) -> io::Result<()> {
        let k = r.chunk_index;
        for (at, track) in self.tracks.iter().enumerate() {
            for (place, rank) in track.stage.ranks.iter().enumerate() {
                let Some((start_ns, end_ns)) = r.rank_times(at, place) else {
                    continue;
                };
                let ts = self.events.us(start_ns);
                let dur = end_ns.saturating_sub(start_ns) as f64 / 1e3;
                let idle_us = r.rank_idle_ns(at, place).map(|ns| ns / 1_000);
                self.events.put(&json!({
                    "ph": "X", "cat": "stage", "name": format!("{} {k}", track.label), "pid": rank.get(),
                    "tid": track.tid, "ts": ts, "dur": dur,
                    "args": {
                        "chunk_index": k, "call_id": r.call_id, "cache_epoch": r.cache_epoch, "frames": r.frames,
                        "in_flight": r.in_flight, "idle_us": idle_us, "dropped": r.dropped,
                    },
                }))?;
            }
            let Some(times) = r.times(at) else { continue };
            let ts = self.events.us(times.start_ns);
            let ph = match at {
                0 => "s",
                _ if at + 1 == self.tracks.len() => "f",
                _ => "t",
            };
            self.events.put(&json!({
                "ph": ph, "cat": "chunk", "name": "chunk", "id": k, "bp": "e", "pid": track.pid,
                "tid": track.tid, "ts": ts,
            }))?;
        }
        Ok(())
    }

    /// What may overlap with its like: the latency, and transfers between ranks.
    fn spans(&mut self, r: &ChunkRecord) -> io::Result<()> {
        let mut span =
            |name: &str, cat: &str, track: &Track<'_>, bytes, from_ns: u64, to_ns: u64| {
                for (ph, at_ns) in [("b", from_ns), ("e", to_ns.max(from_ns))] {
                    let ts = self.events.us(at_ns);
                    self.events.put(&json!({
                    "ph": ph, "cat": cat, "name": name, "id": format!("{name} {}", r.chunk_index),
                    "pid": track.pid, "tid": track.tid, "ts": ts,
                    "args": {"chunk_index": r.chunk_index, "call_id": r.call_id, "bytes": bytes},
                }))?;
                }
                Ok::<(), io::Error>(())
            };
        if !r.dropped {
            let (from_ns, to_ns) = (r.first_read_ns, r.accepted_ns);
            span("latency", "latency", &self.tracks[0], None, from_ns, to_ns)?;
        }
        for to in 1..self.tracks.len() {
            let [from_track, to_track] = [&self.tracks[to - 1], &self.tracks[to]];
            let Some([left_ns, arrived_ns, _]) = r.transfer_ns(to) else {
                continue;
            };
            if from_track.pid != to_track.pid {
                let name = format!("{} → {}", from_track.label, to_track.label);
                // Rank 0 knows only what the source sends.
                let bytes = (to == 1).then_some(r.source_bytes);
                span(&name, "transfer", from_track, bytes, left_ns, arrived_ns)?;
            }
        }
        Ok(())
    }

    /// The counter: a chunk counts from when it was sent until it was accepted or dropped, or a rank was lost. Of one that was
    /// sent again the record has the last time; the first was when it was built.
    fn in_flight(&mut self) -> io::Result<()> {
        let records = self.recorder.records();
        let mut steps = Vec::with_capacity(2 * records.len());
        let mut count = |from_ns: u64, to_ns: u64| {
            if to_ns > from_ns {
                steps.extend([(from_ns, 1_i64), (to_ns, -1)]);
            }
        };
        for r in records {
            let mut from_ns = r.build_end_ns.min(r.sent_ns);
            for restart in self.restarts {
                if (from_ns..r.sent_ns).contains(&restart.lost_ns) {
                    count(from_ns, restart.lost_ns);
                    from_ns = restart.sent_ns.unwrap_or(r.sent_ns);
                }
            }
            count(r.sent_ns, r.accepted_ns);
        }
        // A chunk that was accepted makes room for the one that was sent at that moment.
        steps.sort_unstable();
        let mut chunks = 0;
        for (at_ns, step) in steps {
            chunks += step;
            let ts = self.events.us(at_ns);
            self.events.put(&json!({
                "ph": "C", "name": "in flight", "pid": 0, "ts": ts, "args": {"chunks": chunks},
            }))?;
        }
        Ok(())
    }

    /// Each time that a rank was lost, until the sink had a chunk again.
    fn lost(&mut self) -> io::Result<()> {
        for restart in self.restarts {
            let to_ns = restart
                .served_ns
                .unwrap_or(self.recorder.totals().last_accepted_ns)
                .max(restart.lost_ns);
            let ts = self.events.us(restart.lost_ns);
            let dur = (to_ns - restart.lost_ns) as f64 / 1e3;
            let (rank, tid) = (restart.fault.rank, self.lost_tid());
            self.events.put(&json!({
                "ph": "X", "cat": "restart", "name": format!("rank {rank} lost"), "pid": rank.get(),
                "tid": tid, "ts": ts, "dur": dur,
                "args": {"cause": restart.fault.to_string(), "chunk_index": restart.chunk.map(|c| c.get()),
                    "sent_again": restart.sent_again, "served_again": restart.served_ns.is_some()},
            }))?;
        }
        Ok(())
    }
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
    use crate::report::testing::{self, TWO, empty};

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
        let events = events(&testing::overlapped(5));
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

    #[test]
    fn one_rank_has_no_transfers_and_three_have_one_for_each_edge() {
        for (recorder, ranks, transfers) in [
            (testing::one_rank(5), 1, 0),
            (testing::three_ranks(5), 3, 15),
        ] {
            let events = events(&recorder);
            let processes = of(&events, "M").filter(|e| e["name"] == "process_name");
            assert_eq!(processes.count(), ranks);
            let begun = of(&events, "b").filter(|e| e["cat"] == "transfer");
            assert_eq!(begun.count(), transfers);
        }
        let events = events(&testing::three_ranks(5));
        let second = of(&events, "X").find(|e| e["name"] == "phase_b 2/2 3");
        assert_eq!(second.unwrap()["pid"], 2);
        let between = |e: &&Value| e["name"] == "phase_b 1/2 → phase_b 2/2";
        assert_eq!(of(&events, "e").filter(between).count(), 5);
    }

    #[test]
    fn each_member_of_a_group_has_a_thread_and_works_as_long_as_it_said() {
        let events = events(&testing::group(5));
        let threads = of(&events, "M").filter(|e| e["args"]["name"] == "phase_b, ranks 1+2");
        let threads: Vec<_> = threads.map(|e| e["pid"].clone()).collect();
        assert_eq!(threads, [1, 2]);
        let works = of(&events, "X").filter(|e| e["name"] == "phase_b 0");
        let works = works.map(|e| json!([e["pid"], e["ts"], e["dur"]]));
        let expected = [json!([1, 1_230.0, 2_000.0]), json!([2, 1_230.0, 4_000.0])];
        assert_eq!(works.collect::<Vec<_>>(), expected);
        // A chunk passes a group once.
        for ph in ["s", "t", "f"] {
            assert_eq!(of(&events, ph).count(), 5, "{ph}");
        }
        let transfers = of(&events, "b").filter(|e| e["cat"] == "transfer");
        assert_eq!(transfers.count(), 10);
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
    fn the_counter_falls_when_a_chunk_is_accepted_and_ends_at_zero() {
        let sent_and_accepted = |sent_ns: u64, accepted_ns: u64| ChunkRecord {
            sent_ns,
            accepted_ns,
            ..ChunkRecord::default()
        };
        let mut recorder = empty(TWO, 8);
        // The third takes the place of the first.
        for [sent, accepted] in [[1, 10], [2, 20], [10, 30], [21, 22]] {
            recorder.push(sent_and_accepted(sent, accepted));
        }
        assert_eq!(in_flight(&events(&recorder)), [1, 2, 1, 2, 1, 2, 1, 0]);
        // The third was built at 3, went down at 5 with a rank and was sent again at 10; the first and the second
        // had been accepted before.
        recorder = empty(TWO, 8);
        for [built, sent, accepted] in [[1, 1, 2], [2, 2, 4], [3, 10, 30]] {
            recorder.push(ChunkRecord {
                build_end_ns: built,
                ..sent_and_accepted(sent, accepted)
            });
        }
        let view = View {
            restarts: vec![Restart {
                lost_ns: 5,
                sent_ns: Some(10),
                ..testing::restart()
            }],
            ..View::default()
        };
        let again = in_flight(&events_of(&recorder, &view));
        assert_eq!(again, [1, 0, 1, 2, 1, 0, 1, 0]);
        let overlapped = in_flight(&events(&testing::overlapped(40)));
        assert_eq!(
            (overlapped.iter().max(), overlapped.last()),
            (Some(&4), Some(&0))
        );
    }

    #[test]
    fn a_restart_is_a_span_beside_the_stages_of_its_rank() {
        let view = View {
            restarts: vec![testing::restart()],
            ..View::default()
        };
        let events = events_of(&testing::overlapped(40), &view);
        let lost = of(&events, "X").find(|e| e["name"] == "rank 1 lost");
        let lost = lost.unwrap();
        assert_eq!((&lost["pid"], &lost["dur"]), (&json!(1), &json!(2_000.0)));
        assert_eq!(lost["args"]["chunk_index"], 9);
        assert!(lost["args"]["cause"].as_str().unwrap().contains("SIGKILL"));
    }

    #[test]
    fn a_latency_begins_before_the_build_and_ends_with_the_acceptance() {
        let mut recorder = empty(TWO, 4);
        recorder.push(ChunkRecord {
            first_read_ns: 1_000,
            last_read_ns: 4_000,
            build_start_ns: 5_000,
            accepted_ns: 9_000,
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
        let events = events(&testing::overlapped(3));
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
    fn a_dropped_chunk_has_the_stages_that_are_known_and_an_empty_run_is_still_json() {
        let mut recorder = empty(TWO, 4);
        recorder.push(ChunkRecord {
            dropped: true,
            ..ChunkRecord::default()
        });
        assert_eq!(of(&events(&recorder), "X").count(), 1);
        assert_eq!(of(&events(&empty(TWO, 1)), "X").count(), 0);
    }
}
