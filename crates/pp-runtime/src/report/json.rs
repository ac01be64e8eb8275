//! The report file: what was run, its measures, and the record of each chunk, as one JSON object.

use std::io::{self, Write};

use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};

use super::{Measures, Recorder};

/// The version of the file. It rises when a key goes, or means something else; `docs/report.md` has all keys.
pub const SCHEMA: u32 = 1;

/// Writes `{"schema": …, "run": …, "measures": …, "chunks": [ … ]}`, where `run` is whatever the caller has to say about
/// the run.
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
    use crate::report::synthetic;
    use serde_json::{Value, json};

    #[test]
    fn the_report_parses_and_holds_run_measures_and_chunks() {
        let recorder = synthetic::overlapped(6);
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
        assert!(chunks[5]["phase_b"]["compute_start_ns"].is_u64());
        // Durations are milliseconds, whatever the record counts in.
        let last = recorder.records().last().unwrap();
        assert_eq!(chunks[5]["phase_b_ms"], last.phase_b_us as f64 / 1e3);
        assert_eq!(chunks[5]["idle_ms"], last.idle_us as f64 / 1e3);
    }

    #[test]
    fn a_full_disk_is_reported() {
        let recorder = synthetic::overlapped(3);
        let result = write_json(&mut [0u8; 16][..], &(), &Measures::default(), &recorder);
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::WriteZero);
    }
}
