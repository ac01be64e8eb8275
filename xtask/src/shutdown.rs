//! `cargo xtask shutdown [--jobs N]`: the shutdown matrix, run here and written into `docs/shutdown.md`.
//!
//! It runs `pp shutdown` on shared memory and on the tests' stand-ins for the CUDA driver and NCCL. What a machine with
//! GPUs reported comes in with `--gpu FILE.json`, the report of `pp shutdown --transport nccl` or of `gpu-check.sh`, with
//! what PyTorch did there beside it. Only the parts of the file between its markers are written, each by what it is of.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::process::{build_pp, command, root, run as run_command, target};

const DOCUMENT: &str = "docs/shutdown.md";
/// The heads of sections that are there only when they have something to say.
const ON_GPUS: &str = "## NCCL, on two GPUs\n\n";
const PYTORCH: &str = "\
## PyTorch beside it

`xtask/peers/torch_faults.py`: two ranks that send and receive over NCCL with a timeout of 10 s. Rank 0 is in the
state; the event is rank 1's. `defaults` sets no variable; `best` sets those that are documented for ending early.
*Computing* is a peer that is busy for longer than the timeout; *idle* is a rank 0 that has nothing under way, so
that no timeout runs. A cell says when rank 0 first said something of it, and when its process ended and how.

";
const EVENTS: [&str; 5] = ["computing", "left", "killed", "stopped", "cut"];

/// Runs the matrix, or takes one that was run elsewhere.
pub(crate) fn run(args: &[String]) -> Result<()> {
    match args {
        [] => run_here("2"),
        [option, jobs] if option == "--jobs" => run_here(jobs),
        [option, file] if option == "--gpu" => take(Path::new(file)),
        _ => bail!("cargo xtask shutdown takes --jobs N, or --gpu FILE.json, and nothing else"),
    }
}

fn run_here(jobs: &str) -> Result<()> {
    let pp = build_pp()?;
    let fakes = fakes()?;
    let json = target()?.join("shutdown.json");
    for (name, on_fakes) in [("host", false), ("stand-ins", true)] {
        let mut matrix = command(&pp);
        matrix
            .args(["shutdown", "--jobs", jobs, "--json"])
            .arg(&json);
        if on_fakes {
            matrix
                .args(["--transport", "nccl", "--fakes"])
                .env("LD_LIBRARY_PATH", &fakes)
                .env("PP_NCCL_LIB", fakes.join("libnccl.so.2"));
        }
        let _ = fs::remove_file(&json);
        // A cell that is not as it should be is shown in the table too.
        let ended = run_command(&mut matrix);
        let report = read(&json).with_context(|| format!("no report of {name}"))?;
        write(name, &tables(&report)?)?;
        ended?;
    }
    Ok(())
}

/// A report of another machine.
fn take(file: &Path) -> Result<()> {
    let found = read(file)?;
    let steps = found["steps"].as_array();
    let step = |name: &str| {
        let mut steps = steps.into_iter().flatten();
        steps.find(|step| step["name"] == name)
    };
    let report = match step("fault-shutdown") {
        Some(step) => &step["report"],
        None => &found,
    };
    ensure!(
        report["what"] == "shutdown",
        "{} has no report of pp shutdown",
        file.display()
    );
    // What was seen there is judged by what is expected here.
    let seen = target()?.join("shutdown-gpus.json");
    fs::write(&seen, report.to_string())?;
    let judged = command(build_pp()?)
        .args(["shutdown", "--judge-again"])
        .arg(&seen)
        .output()?;
    ensure!(
        judged.status.success(),
        "pp shutdown --judge-again: {}",
        String::from_utf8_lossy(&judged.stderr)
    );
    let judged = serde_json::from_slice(&judged.stdout).context("no JSON of pp")?;
    write("gpus", &(ON_GPUS.to_owned() + &tables(&judged)?))?;
    if let Some(step) = step("fault-torch") {
        let cases = step["results"].as_array().map_or(&[][..], Vec::as_slice);
        write("pytorch", &(PYTORCH.to_owned() + &torch(cases)?))?;
    }
    Ok(())
}

fn read(file: &Path) -> Result<Value> {
    let text =
        fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    serde_json::from_str(&text).with_context(|| format!("{} is no JSON", file.display()))
}

/// Puts a part of the document in its place.
fn write(part: &str, text: &str) -> Result<()> {
    let path = root().join(DOCUMENT);
    let before = fs::read_to_string(&path)?;
    let (begin, end) = (
        format!("<!-- {part} -->\n"),
        format!("<!-- end of {part} -->"),
    );
    let after = between(&before, &begin, &end, text)
        .with_context(|| format!("{DOCUMENT} has no place for {part}"))?;
    fs::write(&path, after)?;
    println!("{DOCUMENT}: wrote what is between the marks of {part}");
    Ok(())
}

fn between(text: &str, begin: &str, end: &str, inside: &str) -> Option<String> {
    let (head, rest) = text.split_once(begin)?;
    let (_, tail) = rest.split_once(end)?;
    Some(format!("{head}{begin}\n{inside}\n{end}{tail}"))
}

fn tables(report: &Value) -> Result<String> {
    let cells = report["cells"]
        .as_array()
        .context("a report without cells")?;
    let mut text = summary(report, cells);
    for supervised in [false, true] {
        for rank in ["front", "phase_b"] {
            let ours = |cell: &&Value| cell["rank"] == rank && cell["supervised"] == supervised;
            let of_rank: Vec<&Value> = cells.iter().filter(ours).collect();
            if of_rank.is_empty() {
                continue;
            }
            let us = if rank == "front" {
                "the front"
            } else {
                "Phase B"
            };
            let title = match (supervised, rank) {
                (false, _) => format!("We are {us}"),
                (true, "front") => "`pp` started both ranks; it happens to Phase B".to_owned(),
                (true, _) => "`pp` started both ranks; it happens to the front".to_owned(),
            };
            write!(text, "\n**{title}.**\n\n| state | wish |")?;
            for event in EVENTS {
                write!(text, " {event} |")?;
            }
            text += "\n|---|---|---|---|---|---|---|\n";
            rows(&mut text, &of_rank)?;
            if !supervised {
                meanings(&mut text, &of_rank)?;
            }
        }
    }
    Ok(text.trim_end().to_owned())
}

fn rows(text: &mut String, cells: &[&Value]) -> Result<()> {
    let mut done: Vec<(&str, &str)> = Vec::new();
    for cell in cells {
        let row = (string(cell, "state"), string(cell, "wish"));
        if done.contains(&row) {
            continue;
        }
        done.push(row);
        write!(text, "| {} | {} |", row.0, row.1)?;
        for event in EVENTS {
            let of_row = |cell: &&&Value| {
                (string(cell, "state"), string(cell, "wish")) == row && cell["event"] == event
            };
            match cells.iter().find(of_row) {
                Some(cell) => write!(text, " {} |", shown(cell))?,
                None => write!(text, " |")?,
            }
        }
        text.push('\n');
    }
    Ok(())
}

/// One cell: our exit code, when we knew, when all were gone.
fn shown(cell: &Value) -> String {
    if !cell["not_run"].is_null() {
        return "not run".into();
    }
    let code = cell["codes"][0]
        .as_i64()
        .map_or("?".into(), |code| code.to_string());
    let mut shown = format!(
        "{code} · {} / {}",
        ms(cell, "noticed_ms"),
        ms(cell, "all_gone_ms")
    );
    if !is_empty(cell, "wrong") {
        shown += " **wrong**";
    } else if !is_empty(cell, "missed") {
        shown += " **late**";
    }
    shown
}

fn meanings(text: &mut String, cells: &[&Value]) -> Result<()> {
    text.push('\n');
    let mut done: Vec<&str> = Vec::new();
    for cell in cells {
        let state = string(cell, "state");
        // What it is when the peer is made to leave may differ: that of the first is the rule.
        if !done.contains(&state) {
            done.push(state);
            writeln!(text, "- *{state}*: {}.", string(cell, "means"))?;
        }
    }
    Ok(())
}

fn summary(report: &Value, cells: &[Value]) -> String {
    let ran: Vec<&Value> = cells.iter().filter(|c| c["not_run"].is_null()).collect();
    let most = |events: &[&str], field: fn(&Value) -> Option<f64>| {
        let of_events = ran
            .iter()
            .filter(|cell| events.contains(&string(cell, "event")));
        let values = of_events.filter_map(|cell| field(cell));
        let most = values.fold(None, |most: Option<f64>, ms| {
            Some(most.map_or(ms, |m| m.max(ms)))
        });
        most.map_or("–".to_owned(), |ms| format!("{ms:.0} ms"))
    };
    let noticed = |cell: &Value| {
        cell["noticed_ms"]
            .as_f64()
            .filter(|_| cell["wish"] != "abort")
    };
    let after = |cell: &Value| {
        let (gone, noticed) = (cell["all_gone_ms"].as_f64()?, cell["noticed_ms"].as_f64()?);
        // A cut is noticed on each side by itself.
        Some(gone - noticed).filter(|_| cell["event"] != "cut" && cell["wish"] != "abort")
    };
    let number = |is: fn(&Value) -> bool| ran.iter().filter(|cell| is(cell)).count();
    let mut text = format!(
        "{} cells, {} run on {}, {} at a time, heartbeat {} ms. Ended otherwise than they should: {}. Late: {}. Left \
         behind: {}. The slowest: a death or a leave noticed after {}, a stop or a cut after {}; from there until all \
         were gone {}; a stopped peer that went on was gone {} later.\n",
        cells.len(),
        ran.len(),
        report["ground"].as_str().unwrap_or("?"),
        report["jobs"],
        report["heartbeat_ms"],
        number(|cell| !is_empty(cell, "wrong")),
        number(|cell| !is_empty(cell, "missed")),
        report["left"].as_array().map_or(0, Vec::len),
        most(&["killed", "left"], noticed),
        most(&["stopped", "cut"], noticed),
        most(&["killed", "left", "stopped"], after),
        most(&["stopped"], |cell| cell["resumed_ms"].as_f64()),
    );
    let mut reasons: Vec<&str> = cells.iter().filter_map(|c| c["not_run"].as_str()).collect();
    reasons.sort_unstable();
    reasons.dedup();
    for reason in reasons {
        text += &format!("\nNot run: {reason}.\n");
    }
    text
}

/// What PyTorch did in the same cells: a column for each of its settings.
fn torch(cases: &[Value]) -> Result<String> {
    let mut text = String::new();
    let about = cases.iter().find(|c| c["what"] == "torch_faults_about");
    if let Some(about) = about {
        writeln!(text, "PyTorch {}.\n", versions(string(about, "torch")))?;
    }
    let ran: Vec<&Value> = (cases.iter())
        .filter(|case| case["what"] == "torch_fault")
        .collect();
    let mut settings: Vec<&str> = Vec::new();
    let mut rows: Vec<(&str, &str)> = Vec::new();
    for case in &ran {
        let (setting, row) = (
            string(case, "settings"),
            (string(case, "state"), string(case, "event")),
        );
        if !settings.contains(&setting) {
            settings.push(setting);
        }
        if !rows.contains(&row) {
            rows.push(row);
        }
    }
    if settings.contains(&"blocking") {
        text += "`blocking` makes each wait one that can time out.\n\n";
    }
    writeln!(text, "| state | event | {} |", settings.join(" | "))?;
    writeln!(text, "|---|---|{}", "---|".repeat(settings.len()))?;
    let mut messages: Vec<String> = Vec::new();
    for (state, event) in rows {
        write!(text, "| {state} | {event} |")?;
        for setting in &settings {
            let case = ran.iter().find(|case| {
                case["settings"] == *setting && case["state"] == state && case["event"] == event
            });
            let cell = case.map_or(String::new(), |case| ended(case));
            write!(text, " {cell} |")?;
            let told = case.and_then(|case| case["first_told"].as_str());
            let told = told.map(|told| plain(&words(told)));
            messages.extend(told.filter(|told| !messages.contains(told)));
        }
        text.push('\n');
    }
    if !messages.is_empty() {
        text += "\nThe first words:\n\n";
    }
    for message in messages {
        writeln!(text, "- `{}`", message.replace('`', "'"))?;
    }
    Ok(text.trim_end().to_owned())
}

/// `2.11.0 13.0 (2, 28, 9) NVIDIA H200`, with names.
fn versions(text: &str) -> String {
    let named = || {
        let (torch, rest) = text.split_once(' ')?;
        let (cuda, rest) = rest.split_once(" (")?;
        let (nccl, gpu) = rest.split_once(") ")?;
        let nccl = nccl.replace(", ", ".");
        Some(format!("{torch}, CUDA {cuda}, NCCL {nccl}, {gpu}"))
    };
    named().unwrap_or_else(|| text.to_owned())
}

/// One cell of PyTorch: its first word, and its end.
fn ended(case: &Value) -> String {
    if let Some(why) = case["failed"].as_str() {
        // What a server could not listen on says nothing of PyTorch.
        let is_port = why.contains("EADDRINUSE");
        let why = if is_port { "its port was taken" } else { why };
        return format!("not run: {}", plain(why));
    }
    let seconds = |field: &str| case[field].as_f64().map(|s| format!("{s:.1} s"));
    let first = seconds("first_told_after_s");
    let first = first.map_or("silent".to_owned(), |at| format!("first word {at}"));
    let Some(at) = seconds("ended_after_s") else {
        return format!("{first}, **not ended in 45 s**");
    };
    let how = match case["exit"].as_i64() {
        Some(-6) => "SIGABRT".to_owned(),
        Some(signal) if signal < 0 => format!("signal {}", -signal),
        Some(code) => format!("exit {code}"),
        None => "?".to_owned(),
    };
    format!("{first}, ended {at}, {how}")
}

/// What a log line says without when and where, and with its numbers cut off.
fn words(line: &str) -> String {
    let said = line.split_once(".cpp:").map_or(line, |(_, rest)| rest);
    let said = said.split_once("] ").map_or(said, |(_, rest)| rest);
    let end = said.find(", NumelIn").unwrap_or(said.len());
    let rest = &said[end..];
    let timeout = rest.find("Timeout(ms)").map_or("", |at| &rest[at..]);
    let timeout = timeout.split_once(')').and_then(|(_, r)| r.split_once(')'));
    let timeout = timeout.map_or(String::new(), |(ms, _)| format!(", Timeout(ms){ms})"));
    format!("{}{timeout}", &said[..end])
}

/// What goes into a table.
fn plain(text: &str) -> String {
    let short: String = text.chars().take(120).collect();
    short.replace('|', "/").replace('\n', " ")
}

fn string<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().unwrap_or("?")
}

fn is_empty(cell: &Value, field: &str) -> bool {
    cell[field].as_array().is_none_or(Vec::is_empty)
}

fn ms(cell: &Value, field: &str) -> String {
    let value = cell[field].as_f64();
    value.map_or("–".into(), |ms| format!("{ms:.0}"))
}

/// Builds the stand-ins for the CUDA driver and NCCL, as the tests do.
fn fakes() -> Result<PathBuf> {
    let sources = root().join("crates/pp-transport/tests/fakes");
    let to = target()?.join("fakes");
    fs::create_dir_all(&to)?;
    let mut driver = Vec::new();
    let mut nccl = Vec::new();
    for file in fs::read_dir(&sources)? {
        let path = file?.path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if name.ends_with(".c") {
            let list = if name.starts_with("nccl_") {
                &mut nccl
            } else {
                &mut driver
            };
            list.push(path);
        }
    }
    let cc = |name: &str| {
        let mut cc = command(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
        cc.args([
            "-std=gnu11",
            "-O1",
            "-fPIC",
            "-fvisibility=hidden",
            "-pthread",
            "-shared",
        ]);
        cc.arg(format!("-Wl,-soname,{name}"))
            .arg("-o")
            .arg(to.join(name))
            .arg("-L")
            .arg(&to);
        cc
    };
    run_command(cc("libcuda.so.1").args(&driver).arg("-lm"))?;
    let empty = [
        "-x",
        "c",
        "/dev/null",
        "-Wl,-rpath,$ORIGIN,--no-as-needed",
        "-l:libcuda.so.1",
    ];
    run_command(cc("libcuda.so").args(empty))?;
    run_command(
        cc("libnccl.so.2")
            .args(&nccl)
            .args(["-Wl,-rpath,$ORIGIN,--no-undefined", "-l:libcuda.so.1"]),
    )?;
    Ok(to)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn cell(event: &str, wish: &str) -> Value {
        json!({"rank": "front", "state": "idle", "event": event, "wish": wish, "supervised": false, "means": "nothing",
            "not_run": null, "codes": [7, -9], "noticed_ms": 1.2, "all_gone_ms": 3.7, "wrong": [], "missed": []})
    }

    #[test]
    fn a_cell_is_its_code_and_its_times_and_what_is_wrong_with_it() {
        let mut cells = vec![
            cell("killed", "drain"),
            cell("stopped", "drain"),
            cell("cut", "drain"),
        ];
        cells[1]["wrong"] = json!(["we ended with 7, not [9]"]);
        cells[2]["not_run"] = json!("no network");
        let report = json!({"what": "shutdown", "ground": "host", "heartbeat_ms": 250, "jobs": 1, "left": [], "cells": cells});
        let text = tables(&report).unwrap();
        assert!(
            text.contains("| idle | drain | | | 7 · 1 / 4 | 7 · 1 / 4 **wrong** | not run |"),
            "{text}"
        );
        assert!(text.contains("3 cells, 2 run on host"), "{text}");
        assert!(text.contains("Not run: no network."), "{text}");
        assert!(text.contains("- *idle*: nothing."), "{text}");
    }

    #[test]
    fn settings_of_pytorch_stand_side_by_side() {
        let case = |settings: &str, first: Option<f64>, ended: Option<f64>, exit: Option<i64>| {
            json!({"what": "torch_fault", "settings": settings, "state": "recv", "event": "killed",
                "first_told_after_s": first, "ended_after_s": ended, "exit": exit,
                "first_told": first.map(|_| "[rank0]:[E1 18:19:02 P.cpp:689] [Rank 0] caught: WorkNCCL(SeqNum=7, NumelIn=4, Timeout(ms)=10000) ran for 10056 ms.")})
        };
        let mut taken = case("blocking", None, None, None);
        taken["failed"] = json!("rank 0 was never ready: EADDRINUSE");
        let cases = [
            case("defaults", Some(9.56), None, None),
            case("best", Some(9.5), Some(10.64), Some(-6)),
            taken,
        ];
        let text = torch(&cases).unwrap();
        let about = versions("2.11.0 13.0 (2, 28, 9) NVIDIA H200");
        assert_eq!(about, "2.11.0, CUDA 13.0, NCCL 2.28.9, NVIDIA H200");
        for line in [
            "| state | event | defaults | best | blocking |",
            "| recv | killed | first word 9.6 s, **not ended in 45 s** | first word 9.5 s, ended 10.6 s, SIGABRT | not run: its port was taken |",
            "- `[Rank 0] caught: WorkNCCL(SeqNum=7, Timeout(ms)=10000)`",
        ] {
            assert!(text.contains(line), "{text}");
        }
        assert_eq!(text.matches("- `").count(), 1, "{text}");
    }

    #[test]
    fn only_what_lies_between_the_marks_is_written() {
        let text = "by hand\n<!-- host -->\nold\n<!-- end of host -->\nby hand\n";
        let new = between(text, "<!-- host -->\n", "<!-- end of host -->", "new").unwrap();
        assert_eq!(
            new,
            "by hand\n<!-- host -->\n\nnew\n<!-- end of host -->\nby hand\n"
        );
        assert_eq!(
            between(text, "<!-- gpus -->\n", "<!-- end of gpus -->", "new"),
            None
        );
    }
}
