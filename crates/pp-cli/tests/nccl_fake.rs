//! `pp` on two GPUs with NCCL, both fakes: the right bytes, in an order that is proven, and an end for everybody when
//! one rank dies.

mod common;
#[path = "../../pp-transport/tests/fakes/mod.rs"]
mod fakes;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{Folder, all_gone, finish, pp, ranks, run, signal, video, wait_until_it_runs};
use fakes::Fakes;
use fakes::check::{Expect, Fresh, Recording, check};
use rustix::process::Signal;

/// `pp` with the fakes, which meet and record in the folder.
fn pp_on(fakes: &Fakes, folder: &Folder, args: &[&str]) -> Command {
    let mut command = pp(args);
    fakes.give_to(&mut command);
    command
        .env("PP_FAKE_NCCL_DIR", folder.file("meet"))
        .env("PP_FAKE_RECORD", folder.file("rec"));
    for name in ["meet", "rec"] {
        std::fs::create_dir_all(folder.file(name)).unwrap();
    }
    command
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// What both ranks recorded, which is judged and taken away.
#[track_caller]
fn assert_proven(folder: &Folder, transfers: usize, expect: Expect) {
    let recordings = Recording::read_all(&folder.file("rec"));
    for name in ["meet", "rec"] {
        std::fs::remove_dir_all(folder.file(name)).unwrap();
    }
    let report = check(&recordings, expect);
    report.assert_clean();
    assert_eq!(report.transfers, transfers);
}

/// The pools of events for times grow with the chunks that are in flight, and these are few chunks.
const EXPECT: Expect = Expect {
    warm_up: 4,
    complete: true,
    fresh: Fresh::WithGaps,
    late_events: 40,
};

const RUN: [&str; 7] = [
    "run",
    "--transport",
    "nccl",
    "--kernels",
    "ptx",
    "--input",
    "IN",
];

fn run_args<'a>(input: &'a Path, output: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let mut args = RUN.to_vec();
    args[6] = text(input);
    args.extend(["--output", text(output)]);
    args.extend(more);
    args
}

#[test]
fn zero_steps_is_the_identity_for_every_sampling_and_odd_sizes() {
    let fakes = Fakes::build();
    let folder = Folder::new("nccl_identity");
    for (seed, sampling) in ["mono", "420jpeg", "422", "444"].into_iter().enumerate() {
        for (width, height) in [(16, 16), (33, 19)] {
            let input = folder.write("in.y4m", &video(width, height, sampling, 11));
            let output = folder.file("out.y4m");
            let more = ["--denoise-steps", "0", "--frames-per-chunk", "2"];
            let mut command = pp_on(&fakes, &folder, &run_args(&input, &output, &more));
            run(command.env("PP_FAKE_SEED", seed.to_string()), None).succeeded();
            let same = std::fs::read(&input).unwrap() == std::fs::read(&output).unwrap();
            assert!(same, "{width}x{height} {sampling} changed on its way");
            // Six chunks, sent and received, there and back.
            assert_proven(&folder, 24, EXPECT);
        }
    }
}

/// Every order of the denoiser's kernels, whatever they compute; payloads on both sides of the eager limit.
#[test]
fn every_depth_is_in_order() {
    let fakes = Fakes::build();
    let folder = Folder::new("nccl_depths");
    let input = folder.write("in.y4m", &video(48, 32, "420jpeg", 24));
    let output = folder.file("out.y4m");
    for depth in ["1", "2", "8"] {
        for eager in ["0", "1048576"] {
            let more = [
                "--depth",
                depth,
                "--denoise-steps",
                "2",
                "--frames-per-chunk",
                "2",
            ];
            let mut command = pp_on(&fakes, &folder, &run_args(&input, &output, &more));
            run(command.env("PP_FAKE_NCCL_EAGER", eager), None).succeeded();
            assert_proven(&folder, 48, EXPECT);
        }
    }
}

#[test]
fn benchmarks_are_in_order_and_take_no_memory() {
    let fakes = Fakes::build();
    let folder = Folder::new("nccl_bench");
    let args = [
        "bench",
        "overlap",
        "--transport",
        "nccl",
        "--bytes",
        "100000",
        "--chunks",
        "200",
        "--decode-ms",
        "0.2",
        "--phase-b-ms",
        "0.2",
        "--json",
    ];
    for eager in ["65536", "1048576"] {
        let mut command = pp_on(&fakes, &folder, &args);
        let ended = run(command.env("PP_FAKE_NCCL_EAGER", eager), None).succeeded();
        let report: serde_json::Value = serde_json::from_slice(&ended.stdout).unwrap();
        assert_eq!(report["device_memory_grown_bytes"], 0);
        let expect = Expect {
            warm_up: 16,
            fresh: Fresh::NotPayloads,
            late_events: 16,
            ..EXPECT
        };
        assert_proven(&folder, 800, expect);
    }
}
