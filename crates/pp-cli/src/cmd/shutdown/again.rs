//! A report that was written before, judged by what this program expects.
//!
//! The times and exit codes of a cell are what was seen; whether they are as they should be is a
//! judgement, which may have changed since on a machine that is not here.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};

use super::BoundsMs;
use super::cell::{Cell, Ground};
use super::judge::{self, Times};
use super::play::Played;
use crate::exit::{Failure, print};

/// How a judgement of exit codes begins; everything else that was wrong was seen, and stays.
const OF_CODES: [&str; 2] = ["we ended with ", "the peer ended with "];

/// Prints the report with new judgements.
pub(super) fn judge_again(path: &Path) -> Result<(), Failure> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let report: Value = serde_json::from_str(&text).context("the report is no JSON")?;
    print(&format!("{}\n", judged(report)?))
}

fn judged(mut report: Value) -> anyhow::Result<Value> {
    let all = [Ground::Host, Ground::Fakes, Ground::Gpus];
    let ground = all.into_iter().find(|g| report["ground"] == g.name());
    let ground = ground.context("a report of an unknown ground")?;
    let heartbeat = report["heartbeat_ms"].as_u64().context("no heartbeat")?;
    let heartbeat = Duration::from_millis(heartbeat);
    let known = Cell::all(ground);
    let cells = report["cells"].as_array_mut().context("no cells")?;
    for told in cells {
        let name = told["cell"].as_str().unwrap_or_default();
        let cell = known.iter().find(|cell| cell.to_string() == name);
        let cell = *cell.with_context(|| format!("an unknown cell {name:?}"))?;
        let codes = told["codes"].as_array().map_or(&[][..], Vec::as_slice);
        // One that was not run, or never reached its state, has nothing to judge.
        if codes.is_empty() {
            continue;
        }
        let time = |field: &str| {
            let ms = told[field].as_f64();
            ms.map(|ms| Duration::from_secs_f64(ms.max(0.0) / 1000.0))
        };
        let before = told["wrong"].as_array().into_iter().flatten();
        let before = before.filter_map(|what| what.as_str());
        let seen = before.filter(|what| !OF_CODES.iter().any(|code| what.starts_with(code)));
        let played = Played {
            codes: (codes.iter())
                .map(|code| code.as_i64().map(|code| code as i32))
                .collect(),
            noticed: time("noticed_ms"),
            gone: time("gone_ms"),
            all_gone: time("all_gone_ms"),
            resumed: time("resumed_ms"),
            said: String::new(),
            left: seen.map(str::to_owned).collect(),
        };
        told["wrong"] = json!(judge::wrong(cell, ground, &played));
        let seen = Times::of(&played);
        let bounds = judge::bounds(cell, ground, heartbeat, seen);
        told["bounds_ms"] = json!(BoundsMs::of(bounds));
        told["missed"] = json!(judge::missed(seen, bounds));
    }
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_bounds_are_judged_anew_and_what_was_left_stays() {
        let cell = |name: &str, code: i32, all_gone: f64, wrong: &[&str]| {
            json!({"cell": name, "codes": [code, code], "noticed_ms": null, "gone_ms": all_gone,
                "all_gone_ms": all_gone, "resumed_ms": null, "wrong": wrong, "missed": ["old"]})
        };
        let report = json!({"ground": "nccl, GPUs", "heartbeat_ms": 250, "cells": [
            cell("front/connect/cut/go-on", 10, 400.0, &["we ended with 10, not [9]", "process 7"]),
            cell("front/send/computing/drain", 130, 1786.0, &[]),
            cell("front/send/computing/drain", 3, 9000.0, &[]),
        ]});
        let judged = judged(report).unwrap();
        let of = |at: usize, what: &str| judged["cells"][at][what].clone();
        assert_eq!(of(0, "wrong"), json!(["process 7"]));
        assert_eq!((of(1, "wrong"), of(1, "missed")), (json!([]), json!([])));
        assert_eq!(of(2, "wrong").as_array().unwrap().len(), 2);
        assert_eq!(of(2, "missed").as_array().unwrap().len(), 1);
    }
}
