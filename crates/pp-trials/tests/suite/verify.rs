//! `--verify`: bytes that change are found and named by rank, tensor and chunk, in shared memory and over NCCL; a run
//! in which nothing changes is what it is without.

use std::path::{Path, PathBuf};
use std::process::Command;

use pp_fakes::Fakes;
use pp_fakes::check::{Expect, Fresh, Recording, check};
use pp_testing::{
    Folder, c_library,
    process::{as_rank, finish, free_port, run, spawn},
    read_json, video, words,
};
use serde_json::Value;

use crate::common::{folder, meet_in, pp};

const TRANSPORTS: [&str; 2] = ["host", "nccl"];

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A run of two ranks in chunks of two frames; `nccl` is on the fakes.
fn job(folder: &Folder, transport: &str, input: &Path, more: &[&str]) -> Command {
    let kernels = if transport == "nccl" { "ptx" } else { "cpu" };
    let mut args = vec!["run", "--transport", transport, "--kernels", kernels];
    args.extend(["--frames-per-chunk", "2", "--input", text(input)]);
    args.extend(more);
    let mut command = pp(&args);
    if transport == "nccl" {
        Fakes::newest().give_to(&mut command);
        meet_in(folder, &mut command);
    }
    command
}

/// The report's part about digests.
fn verified(report: &Path) -> Value {
    let report = read_json(report);
    report["run"]["verify"].clone()
}

fn chunks(verified: &Value) -> Vec<u64> {
    let chunks = verified["chunks"].as_array().unwrap();
    chunks
        .iter()
        .map(|chunk| chunk["chunk"].as_u64().unwrap())
        .collect()
}

/// Runs with these arguments; the output and the report.
fn made(folder: &Folder, transport: &str, input: &Path, name: &str, more: &[&str]) -> [PathBuf; 2] {
    let files = ["y4m", "json"].map(|end| folder.file(&format!("{name}_{transport}.{end}")));
    let mut args = more.to_vec();
    args.extend(["--output", text(&files[0]), "--report", text(&files[1])]);
    run(&mut job(folder, transport, input, &args), None).succeeded();
    files
}

#[test]
fn verified_run_gives_the_same_film_and_checks_one_chunk_in_so_many() {
    let folder = folder("verify_same");
    let input = folder.write("in.y4m", &video(48, 32, "420jpeg", 13));
    for transport in TRANSPORTS {
        for more in [
            &["--denoise-steps", "1"][..],
            &["--recompute", "--cuts", "hard"],
        ] {
            let film = |verify: &str| {
                let args = [more, &["--verify", verify]].concat();
                made(&folder, transport, &input, verify, &args)
            };
            let [plain, unverified] = film("off");
            assert_eq!(verified(&unverified), Value::Null);
            for (every, expected) in [
                ("every=1", &[0, 1, 2, 3, 4, 5, 6][..]),
                ("every=3", &[0, 3, 6]),
            ] {
                let [output, report] = film(every);
                let same = std::fs::read(&plain).unwrap() == std::fs::read(output).unwrap();
                assert!(same, "{transport} {every}: another film");
                assert_eq!(chunks(&verified(&report)), expected, "{transport} {every}");
            }
        }
    }
}

/// Host and device compute the same digests of the same bytes: those of an encode are the same, and zero steps copy.
#[test]
fn both_transports_have_the_same_digests_and_runs_can_be_compared() {
    let folder = folder("verify_compare");
    let input = folder.write("in.y4m", &video(80, 48, "420jpeg", 12));
    let run_of = |transport: &str, steps: &str| {
        let more = ["--verify", "every=1", "--denoise-steps", steps];
        let [_, report] = made(&folder, transport, &input, steps, &more);
        report
    };
    let (host, nccl) = (run_of("host", "0"), run_of("nccl", "0"));
    let compare = |a: &Path, b: &Path| run(&mut pp(&["verify", text(a), text(b)]), None);
    let ended = compare(&host, &nccl).succeeded();
    assert_eq!(ended.stdout, b"6 verified chunks are the same\n");
    // Another number of steps is another list of steps.
    let other = run_of("host", "1");
    let words = ["rank 0", "chunk 0", "tensor denoising_step_list"];
    compare(&host, &other).failed(11, &words);
}

/// What one run alone verified is no success, and neither is what cannot be compared.
#[test]
fn runs_that_verified_other_chunks_are_not_the_same() {
    let folder = folder("verify_other_chunks");
    let input = folder.write("in.y4m", &video(48, 32, "420jpeg", 12));
    let compare = |a: &Path, b: &Path| run(&mut pp(&["verify", text(a), text(b)]), None);
    let of = |name: &str, more: &[&str]| {
        let args = [&["--denoise-steps", "0"], more].concat();
        let [_, report] = made(&folder, "host", &input, name, &args);
        report
    };
    let host = of("all", &["--verify", "every=1"]);
    compare(&host, &host).succeeded();
    let without = of("off", &[]);
    compare(&host, &without).failed(3, &["no digests", "--verify"]);
    compare(&input, &host).failed(3, &["no report"]);
    compare(&folder.file("missing"), &host).failed(4, &["missing"]);
    let rarer = of("rarer", &["--verify", "every=2"]);
    let words = [
        "compared 3 chunks",
        "(every=1) has 3 more, chunks 1, 3, 5",
        "(every=2) has no other",
    ];
    compare(&host, &rarer).failed(3, &words);
    compare(&rarer, &host).failed(3, &words);
    let shorter = of("shorter", &["--verify", "every=1", "--chunks", "4"]);
    compare(&host, &shorter).failed(3, &["compared 4 chunks", "2 more, chunks 4, 5"]);
}

/// On GPUs digests are issued like everything else: nothing waits for them, and nothing is read too early.
#[test]
fn digests_on_a_gpu_are_in_order() {
    let folder = folder("verify_order");
    let input = folder.write("in.y4m", &video(48, 32, "420jpeg", 24));
    for depth in ["1", "4"] {
        let more = format!("--verify every=2 --depth {depth} --denoise-steps 1");
        let more = words(&more);
        run(&mut job(&folder, "nccl", &input, &more), None).succeeded();
        let recordings = Recording::read_all(&folder.file("rec"));
        let expect = Expect {
            warm_up: 4,
            complete: true,
            fresh: Fresh::WithGaps,
            late_events: 0,
        };
        let report = check(&recordings, expect);
        report.assert_clean();
        assert_eq!(report.transfers, 48);
    }
}

/// What is sent again has digests, too, and the same results.
#[test]
fn run_that_went_on_with_another_rank_has_the_digests_of_an_undisturbed_one() {
    let folder = folder("verify_restart");
    let input = folder.write("in.y4m", &video(48, 32, "420jpeg", 14));
    for transport in TRANSPORTS {
        let plain = ["--verify", "every=1", "--denoise-steps", "1"];
        let [film, undisturbed] = made(&folder, transport, &input, "undisturbed", &plain);
        let (output, report) = (folder.file("again.y4m"), folder.file("again.json"));
        let more = [
            "--restarts",
            "1",
            "--output",
            text(&output),
            "--report",
            text(&report),
        ];
        let args = [&plain[..], &more].concat();
        let mut command = job(&folder, transport, &input, &args);
        run(command.env("PP_FAULT", "kill@1:chunk=3"), None).succeeded();
        let same = std::fs::read(&film).unwrap() == std::fs::read(&output).unwrap();
        assert!(same, "{transport}: another film");
        let compared = run(
            &mut pp(&["verify", text(&undisturbed), text(&report)]),
            None,
        );
        let words = String::from_utf8(compared.succeeded().stdout).unwrap();
        assert_eq!(words, "7 verified chunks are the same\n", "{transport}");
    }
}

/// Compiles the plugin of the faults.
fn plugin(folder: &Folder, define: &str) -> PathBuf {
    let text = format!("#define {define}\n#include \"crates/pp-kernels/tests/plugins/faulty.c\"\n");
    c_library(folder, define, &text, &[])
}

#[test]
fn stage_that_writes_its_input_is_to_blame_itself() {
    let folder = folder("verify_writes");
    let input = folder.write("in.y4m", &video(48, 32, "420jpeg", 8));
    let plugin = plugin(&folder, "FAULT_WRITES_INPUT");
    let run_with = |verify: &str, ranks: &str| {
        let mut command = pp(&["run", "--frames-per-chunk", "2", "--input", text(&input)]);
        command.args(["--transport", "host", "--verify", verify, "--ranks", ranks]);
        run(command.arg("--kernels").arg(&plugin), None)
    };
    let words = [
        "drift: rank 1",
        "tensor latents_in",
        "chunk 0",
        "afterwards",
    ];
    run_with("every=1", "2").failed(11, &words);
    run_with("every=1", "1").failed(11, &["drift: rank 0", "tensor latents_in", "afterwards"]);
    run_with("off", "2").succeeded();
}

#[test]
fn ranks_that_have_other_kernels_stop_before_they_begin() {
    let folder = folder("verify_handshake");
    let input = folder.write("in.y4m", &video(32, 32, "mono", 2));
    let port = free_port();
    // Two builds of one plugin that say the same of themselves.
    let ranks = [(1, "FAULT_IDENTITY"), (0, "FAULT_WRITES_INPUT")].map(|(rank, fault)| {
        let command = pp(&["run", "--transport", "host", "--input", text(&input)]);
        let kernels = plugin(&folder, fault);
        spawn(as_rank(command, rank, port).arg("--kernels").arg(kernels))
    });
    for ended in ranks.map(finish) {
        ended.failed(6, &["settings.kernels.decode differs", ", digest "]);
    }
}
