//! `pp run` from file to file: nothing lost, nothing doubled, the same on one rank and on two.

mod common;

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

use common::{Folder, finish, pp, ranks, run, signal, video, wait_until_it_runs};
use rustix::process::Signal;

fn args(input: &Path, output: &Path, more: &[&str]) -> Vec<OsString> {
    let mut args: Vec<OsString> = vec!["run".into(), "--input".into(), input.into()];
    args.extend(["--output".into(), output.into()]);
    args.extend(more.iter().map(OsString::from));
    args
}

#[test]
fn zero_steps_is_the_identity_for_every_sampling_and_odd_sizes() {
    let folder = Folder::new("identity");
    for sampling in ["mono", "420jpeg", "422", "444"] {
        for (width, height) in [(16, 16), (17, 19), (64, 48), (33, 16)] {
            let input = folder.write("in.y4m", &video(width, height, sampling, 7));
            let output = folder.file("out.y4m");
            let more = ["--denoise-steps", "0", "--frames-per-chunk", "3"];
            run(&mut pp(&args(&input, &output, &more)), None).succeeded();
            let same = std::fs::read(&input).unwrap() == std::fs::read(&output).unwrap();
            assert!(same, "{width}x{height} {sampling} changed on its way");
        }
    }
}

#[test]
fn two_ranks_give_what_one_gives_at_every_depth() {
    let folder = Folder::new("ranks");
    let input = folder.write("in.y4m", &video(48, 32, "420jpeg", 11));
    for recompute in [&[][..], &["--recompute"]] {
        let mut more = vec!["--ranks", "1", "--frames-per-chunk", "2"];
        more.extend(recompute);
        let alone = folder.file("alone.y4m");
        run(&mut pp(&args(&input, &alone, &more)), None).succeeded();
        let alone = std::fs::read(alone).unwrap();
        assert_ne!(
            alone,
            std::fs::read(&input).unwrap(),
            "nothing was denoised"
        );
        for depth in ["1", "2", "3", "8"] {
            let mut more = vec!["--depth", depth, "--frames-per-chunk", "2"];
            more.extend(recompute);
            let output = folder.file("two.y4m");
            run(&mut pp(&args(&input, &output, &more)), None).succeeded();
            let same = std::fs::read(&output).unwrap() == alone;
            assert!(same, "depth {depth}, recompute {recompute:?}");
        }
    }
}

#[test]
fn pipes_in_and_out_carry_the_same_bytes() {
    let input = video(32, 16, "420jpeg", 9);
    let more = [
        "run",
        "--input",
        "-",
        "--output",
        "-",
        "--denoise-steps",
        "0",
    ];
    let ended = run(&mut pp(&more), Some(input.clone())).succeeded();
    assert!(ended.stdout == input, "the pipe changed the video");
    assert!(
        ended.stderr.contains("frames per second"),
        "{}",
        ended.stderr
    );
}

#[test]
fn fewer_chunks_end_early_and_well() {
    let folder = Folder::new("chunks");
    let video = video(16, 16, "mono", 10);
    let input = folder.write("in.y4m", &video);
    let output = folder.file("out.y4m");
    let more = [
        "--denoise-steps",
        "0",
        "--frames-per-chunk",
        "2",
        "--chunks",
        "3",
    ];
    run(&mut pp(&args(&input, &output, &more)), None).succeeded();
    let got = std::fs::read(&output).unwrap();
    assert!(video.starts_with(&got));
    let header = video.iter().position(|b| *b == b'\n').unwrap() + 1;
    assert_eq!(got.len(), header + 6 * (6 + 256));
}

#[test]
fn reports_are_written_whole_and_say_what_was_run() {
    let folder = Folder::new("reports");
    let input = folder.write("in.y4m", &video(32, 32, "420jpeg", 12));
    let output = folder.file("out.y4m");
    let names = ["report.json", "trace.json", "timeline.svg"].map(|n| folder.file(n));
    let [report, trace, timeline] = names.each_ref().map(|p| p.to_str().unwrap());
    let more = [
        "--add-noise",
        "20",
        "--frames-per-chunk",
        "2",
        "--depth",
        "3",
        "--report",
        report,
        "--trace",
        trace,
        "--timeline",
        timeline,
    ];
    let ended = run(&mut pp(&args(&input, &output, &more)), None).succeeded();
    let text = String::from_utf8(ended.stdout).unwrap();
    for word in [
        "frames per second",
        "luma PSNR",
        "efficiency",
        "out.y4m (12 frames)",
    ] {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
    let report: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&names[0]).unwrap()).unwrap();
    assert_eq!(report["run"]["depth"], 3);
    assert_eq!(report["measures"]["frames"], 12);
    assert!(report["measures"]["max_in_flight"].as_u64().unwrap() <= 3);
    assert_eq!(report["chunks"].as_array().unwrap().len(), 6);
    let trace: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&names[1]).unwrap()).unwrap();
    assert!(trace["traceEvents"].as_array().unwrap().len() > 12);
    assert!(
        std::fs::read_to_string(&names[2])
            .unwrap()
            .starts_with("<svg")
    );
}

#[test]
fn an_interrupt_finishes_what_is_in_flight_and_writes_it() {
    let folder = Folder::new("interrupt");
    let output = folder.file("out.y4m");
    let whole = video(32, 16, "mono", 40);
    let header = whole.iter().position(|b| *b == b'\n').unwrap() + 1;
    let frame = 6 + 32 * 16;
    let more = ["--denoise-steps", "0", "--frames-per-chunk", "2"];
    let mut child = pp(&args(Path::new("-"), &output, &more))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Twenty frames come, and then the source stays open and silent.
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(&whole[..header + 20 * frame]).unwrap();
    // Until the front runs, a signal ends it: then there is nothing to finish.
    wait_until_it_runs(ranks(child.id())[0]);
    signal(child.id(), Signal::INT);
    let ended = finish(child).succeeded();
    assert!(String::from_utf8_lossy(&ended.stdout).contains("interrupted"));
    let got = std::fs::read(&output).unwrap();
    assert!(whole.starts_with(&got), "what was written is not the input");
    assert_eq!((got.len() - header) % frame, 0, "half a frame");
}

#[test]
fn a_second_interrupt_aborts_and_leaves_no_output() {
    let folder = Folder::new("abort");
    let input = folder.write("in.y4m", &video(352, 288, "420jpeg", 8));
    let output = folder.file("out.y4m");
    // Far more passes than the test has time for.
    let more = ["--denoise-steps", "1024"];
    let mut child = pp(&args(&input, &output, &more))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pids = ranks(child.id());
    wait_until_it_runs(pids[0]);
    common::abort(&mut child);
    finish(child).failed(130, &["interrupted"]);
    common::all_gone(&pids);
    assert_eq!(folder.names(), ["in.y4m"]);
}

#[test]
fn the_overlap_benchmark_prints_its_keys() {
    let more = [
        "bench",
        "overlap",
        "--decode-ms",
        "0.2",
        "--phase-b-ms",
        "0.2",
        "--bytes",
        "100000",
        "--chunks",
        "60",
        "--depth",
        "2",
        "--touch",
        "--json",
    ];
    let ended = run(&mut pp(&more), None).succeeded();
    let result: serde_json::Value = serde_json::from_slice(&ended.stdout).unwrap();
    for key in [
        "transport",
        "bytes",
        "decode_ms",
        "phase_b_ms",
        "decode_ms_achieved",
        "phase_b_ms_achieved",
        "depth",
        "chunks",
        "period_ms",
        "efficiency",
        "overlap_score",
        "max_in_flight",
        "phase_b_idle_ms",
    ] {
        assert!(!result[key].is_null(), "{key} is missing in {result}");
    }
    assert_eq!(result["chunks"], 60);
    assert!(result["max_in_flight"].as_u64().unwrap() <= 2);
}
