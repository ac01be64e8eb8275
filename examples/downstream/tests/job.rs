//! The example as its users start it: by itself, by a launcher, and with a rank that is killed.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use pp_example_downstream::{BINS, HOP, slow, vocode};
use pp_fakes::Fakes;
use pp_testing::Folder;
use pp_testing::process::run;
use rustix::process::{Pid, Signal, kill_process};

/// Frames of the spectrogram: the last piece is shorter.
const FRAMES: u64 = 20_000;

fn folder(test: &str) -> Folder {
    Folder::new(env!("CARGO_TARGET_TMPDIR"), test)
}

fn vocoder(input: &Path, output: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pp-example-downstream"));
    command.args([input, output]);
    // A rank that a busy machine holds up is not lost.
    command.env("PP_HEARTBEAT_MS", "3000");
    command
}

/// Other placements than that of the program.
const PIPELINES: [&str; 5] = [
    "mel@0 -> vocode@0 -> play@0",
    "mel@0 -> vocode@1 -> play@0",
    // Groups.
    "mel@0 -> vocode@1+2 -> play@0",
    "mel@0 -> vocode@0+1 -> play@0",
    "mel@0 -> vocode@2+0+1 -> play@3",
];

fn spectrogram() -> Vec<u8> {
    let loud = (0..FRAMES * BINS).map(|at| ((at * 7 % 31) as f32 / 31.0).to_le_bytes());
    loud.flatten().collect()
}

fn assert_is_whole(output: &Path) {
    let mut expected = vec![0; (FRAMES * HOP * 4) as usize];
    vocode(0, &spectrogram(), &mut expected);
    assert!(fs::read(output).unwrap() == expected, "the samples differ");
}

fn report(output: &Path) -> serde_json::Value {
    serde_json::from_slice(&fs::read(output.with_extension("json")).unwrap()).unwrap()
}

/// The process of rank 1.
fn rank_1(supervisor: &Child) -> Option<Pid> {
    let id = supervisor.id();
    let children = fs::read_to_string(format!("/proc/{id}/task/{id}/children")).ok()?;
    children.split_whitespace().find_map(|pid| {
        let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
        let is_rank_1 = environment
            .split(|byte| *byte == 0)
            .any(|text| text == b"RANK=1");
        is_rank_1
            .then(|| Pid::from_raw(pid.parse().ok()?))
            .flatten()
    })
}

#[test]
fn every_placement_makes_the_same_samples() {
    let folder = folder("placed");
    let input = folder.write("mel", &spectrogram());
    for (at, pipeline) in PIPELINES.iter().enumerate() {
        let output = folder.file(&format!("samples-{at}.f32"));
        let ended = vocoder(&input, &output).arg(pipeline).status().unwrap();
        assert!(ended.success(), "{pipeline}");
        assert_is_whole(&output);
    }
}

/// A stage that works in either memory gives the same samples in both. The GPU is a fake one.
#[test]
fn a_stage_on_a_cpu_or_on_a_gpu_makes_the_same_samples() {
    let folder = folder("devices");
    let input = folder.write("mel", &spectrogram());
    let pipeline = "mel@0 -> vocode@0 -> slow@1 -> play@0";
    let (mut samples, mut expected) = (vec![0; (FRAMES * HOP * 4) as usize], Vec::new());
    vocode(0, &spectrogram(), &mut samples);
    expected.resize(2 * samples.len(), 0);
    slow(&samples, &mut expected).unwrap();
    let run = |pipeline: &str, devices: &str| {
        let output = folder.file("slow.f32");
        let mut command = vocoder(&input, &output);
        Fakes::newest().give_to(command.args([pipeline, devices]));
        run(&mut command, None)
    };
    for devices in ["", "cpu,cpu", "cpu,cuda:0"] {
        run(pipeline, devices).succeeded();
        let output = fs::read(folder.file("slow.f32")).unwrap();
        assert!(output == expected, "{devices}: the samples differ");
    }
    let twice = "mel@0 -> vocode@0 -> slow@1 -> slow@1 -> play@0";
    for devices in ["cpu,cpu", "cpu,cuda:0"] {
        let told = "do not fit twice into 16384";
        run(twice, devices).ended(2, &[told]);
    }
    let told = "the program has no stage mel for the device of its rank";
    run(pipeline, "cuda:0,cpu").ended(2, &[told]);
}

#[test]
fn a_killed_rank_is_replaced_and_no_sample_is_lost() {
    replace_rank_1("killed", &[]);
}

#[test]
fn a_killed_rank_is_replaced_where_source_and_sink_share_a_rank() {
    replace_rank_1("killed between", &[PIPELINES[1]]);
}

#[test]
fn a_killed_member_of_a_group_is_replaced() {
    replace_rank_1("killed in a group", &[PIPELINES[2]]);
}

fn replace_rank_1(test: &str, pipeline: &[&str]) {
    let folder = folder(test);
    let (input, output) = (folder.fifo("mel"), folder.file("samples.f32"));
    let mut job = vocoder(&input, &output).args(pipeline).spawn().unwrap();
    let mut pipe = File::options().write(true).open(&input).unwrap();
    let spectrogram = spectrogram();
    let (first, rest) = spectrogram.split_at(spectrogram.len() / 2);
    // A pipe holds 64 KiB and four chunks are in flight, so most of the first half is done when this returns.
    pipe.write_all(first).unwrap();
    kill_process(rank_1(&job).unwrap(), Signal::KILL).unwrap();
    pipe.write_all(rest).unwrap();
    drop(pipe);
    assert!(job.wait().unwrap().success());
    assert_is_whole(&output);
    assert_eq!(report(&output)["run"]["restarts"], 1);
}

#[test]
fn torchrun_starts_the_ranks_as_well() {
    let folder = folder("launched");
    let input = folder.write("mel", &spectrogram());
    let output: PathBuf = folder.file("samples.f32");
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = socket.local_addr().unwrap().port().to_string();
    drop(socket);
    let ranks = ["0", "1", "2"].map(|rank| {
        let mut command = vocoder(&input, &output);
        command.envs([("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "3")]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", &port)]);
        command.env("PP_JOB_SECRET", "a secret of more than sixteen bytes");
        command.spawn().unwrap()
    });
    for mut rank in ranks {
        assert!(rank.wait().unwrap().success());
    }
    assert_is_whole(&output);
    assert_eq!(report(&output)["run"]["restarts"], 0);
    let trace = fs::read(output.with_extension("trace")).unwrap();
    serde_json::from_slice::<serde_json::Value>(&trace).unwrap();
}

#[test]
fn an_output_that_cannot_be_written_blames_the_rank_of_the_sink() {
    let folder = folder("unwritable");
    let input = folder.write("mel", &spectrogram());
    let output = folder.file("none").join("samples.f32");
    let ended = vocoder(&input, &output).output().unwrap();
    let text = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(
        text.contains("rank 2") && text.contains("create its directory"),
        "{text}"
    );
}

#[test]
fn an_input_that_is_not_there_is_an_error_in_one_line() {
    let folder = folder("missing");
    let ended = vocoder(&folder.file("none"), &folder.file("samples.f32"))
        .output()
        .unwrap();
    let text = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(4), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(
        text.contains("rank 0") && text.contains("No such file"),
        "{text}"
    );
}
