//! The report file: what was run, its measures, and the record of each chunk, as one JSON object.

use std::io::{self, Write};

use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use super::{Measures, Recorder};

/// The version of the file. It rises when a key goes, or means something else; `docs/report.md` has all keys.
pub const SCHEMA: u32 = 2;

/// Writes `{"schema": …, "run": …, "pipeline": …, "measures": …, "chunks": [ … ]}`, where `run` is whatever the caller has
/// to say about the run, and `pipeline` is the canonical text.
///
/// Streams: the size of the report never lies in memory as one piece.
///
/// # Errors
/// Whatever `out` returns, or a `run` that JSON cannot express.
pub fn write_json(
    out: impl Write,
    run: &impl Serialize,
    measures: &Measures,
    recorder: &Recorder,
) -> io::Result<()> {
    let mut pretty = serde_json::Serializer::pretty(out);
    let mut document = pretty.serialize_map(None)?;
    document.serialize_entry("schema", &SCHEMA)?;
    document.serialize_entry("run", run)?;
    document.serialize_entry("pipeline", &recorder.pipeline().to_string())?;
    document.serialize_entry("measures", measures)?;
    document.serialize_entry("chunks", recorder)?;
    Ok(document.end()?)
}

/// The records that are still held.
impl Serialize for Recorder {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.records())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::testing;
    use serde_json::{Value, json};

    #[test]
    fn the_report_parses_and_holds_run_measures_and_chunks() {
        let recorder = testing::overlapped(6);
        let measures = Measures::of(&recorder, 0, &[]);
        let mut out = Vec::new();
        write_json(
            &mut out,
            &json!({"transport": "host"}),
            &measures,
            &recorder,
        )
        .unwrap();

        let parsed: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(parsed["schema"], SCHEMA);
        assert_eq!(parsed["run"]["transport"], "host");
        assert_eq!(parsed["measures"]["chunks"], 6);
        assert_eq!(parsed["measures"]["period_ms"], json!(measures.period_ms));
        let chunks = parsed["chunks"].as_array().unwrap();
        assert_eq!(chunks.len(), 6);
        assert_eq!(chunks[5]["chunk_index"], 5);
        let phase_b = &chunks[5]["stages"][0];
        assert!(phase_b["times"]["start_ns"].is_u64());
        // Durations are milliseconds, whatever the record counts in.
        let last = &recorder.records().last().unwrap().stages[0];
        assert_eq!(phase_b["work_ms"], last.work_us as f64 / 1e3);
        assert_eq!(phase_b["idle_ms"], last.idle_us as f64 / 1e3);
    }

    #[test]
    fn stages_and_ranks_are_lists_in_the_order_of_the_pipeline() {
        let recorder = testing::three_ranks(40);
        let measures = Measures::of(&recorder, 8, &[]);
        let mut out = Vec::new();
        write_json(&mut out, &(), &measures, &recorder).unwrap();
        let parsed: Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(parsed["pipeline"], testing::THREE);
        let list = |key: &str, of: &str| -> Vec<Value> {
            let list = parsed["measures"][key].as_array().unwrap();
            list.iter().map(|entry| entry[of].clone()).collect()
        };
        assert_eq!(
            list("stages", "stage"),
            ["encode", "phase_b 1/2", "phase_b 2/2", "decode"]
        );
        assert_eq!(list("stages", "rank"), [0, 1, 2, 0]);
        assert_eq!(list("ranks", "rank"), [0, 1, 2]);
        assert!(list("ranks", "work_ms").iter().all(Value::is_f64));
        assert_eq!(list("stages", "idle_ms")[0], Value::Null);
    }

    #[test]
    fn each_member_of_a_group_has_its_own_figures() {
        let recorder = testing::group(40);
        let mut out = Vec::new();
        let measures = Measures::of(&recorder, 8, &[]);
        write_json(&mut out, &(), &measures, &recorder).unwrap();
        let parsed: Value = serde_json::from_slice(&out).unwrap();
        let (stages, chunk) = (&parsed["measures"]["stages"], &parsed["chunks"][5]);
        for stage in [&stages[1], &chunk["stages"][0]] {
            let members = stage["members"].as_array().unwrap();
            let ranks: Vec<_> = members.iter().map(|member| &member["rank"]).collect();
            assert_eq!(ranks, [1, 2]);
            let works = [0, 1].map(|at| members[at]["work_ms"].as_f64().unwrap());
            assert!((works[1] - 2.0 * works[0]).abs() < 0.002, "{works:?}");
            assert_eq!(stage["work_ms"], works[1]);
        }
        for stage in [&stages[2], &chunk["stages"][1]] {
            assert_eq!(stage["members"], json!([]));
        }
    }

    #[test]
    fn a_full_disk_is_reported() {
        let recorder = testing::overlapped(3);
        let result = write_json(&mut [0u8; 16][..], &(), &Measures::default(), &recorder);
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::WriteZero);
    }
}
