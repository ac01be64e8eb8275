//! Kernels swapped in with `--kernels`: good ones do their work, bad ones end the job by name.

use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use pp_fakes::Fakes;
use pp_testing::{
    assert_has,
    process::{Ended, all_gone, children, run, signal, wait},
    rows, video,
};
use rustix::process::Signal;

use crate::build::{compile_c_file, median, root, rust_plugin};
use crate::common::{files, folder, pp};

/// The C plugin of the tests with this fault.
fn faulty(fault: &str) -> PathBuf {
    compile_c_file(
        &root().join("crates/pp-kernels/tests/plugins/faulty.c"),
        &[fault],
    )
}

fn plugin_check(plugin: &Path) -> Command {
    let mut command = pp(&["plugin", "check"]);
    command.arg(plugin);
    command
}

/// The lines of a report with an outcome that is neither "ok" nor "skipped".
fn not_ok(checked: &Ended) -> Vec<&str> {
    let report = std::str::from_utf8(&checked.stdout).unwrap();
    let lines = report.lines();
    let is_ok = |line: &str| line.ends_with(" ... ok") || line.contains(" ... skipped: ");
    lines.filter(|line| !is_ok(line)).collect()
}

fn denoise(input: &Path, output: &Path, kernels: &Path, more: &[&str]) -> Ended {
    let mut command = pp(&["run", "--frames-per-chunk", "2"]);
    command
        .args(more)
        .arg("--input")
        .arg(input)
        .arg("--output")
        .arg(output);
    run(command.arg("--kernels").arg(kernels), None)
}

/// Stages of its own, of which one is run by a group, also in parts; its sink makes larger frames and more of them.
#[test]
fn a_group_runs_a_stage_of_a_plugin() {
    let (_folder, input, output) = files("plugin_group", &video(32, 20, "mono", 7));
    let three = compile_c_file(&root().join("crates/pp-kernels/tests/plugins/three.c"), &[]);
    let film = |pipeline: &str| {
        let pipeline = format!("--pipeline={pipeline}");
        denoise(&input, &output, &three, &[&pipeline]).succeeded();
        std::fs::read(&output).unwrap()
    };
    let alone = film("read@0,soften@0,write@0");
    for pipeline in [
        "read@0,soften@0+1,write@0",
        "read@0,soften@2+1+0,soften@1,write@2",
    ] {
        assert!(film(pipeline) == alone, "{pipeline}");
    }
}

#[test]
fn example_plugins_pass_their_check_and_do_their_work() {
    let folder = folder("plugins");
    let original = video(48, 32, "420jpeg", 9);
    let input = folder.write("in.y4m", &original);
    let (alone, two) = (folder.file("alone.y4m"), folder.file("two.y4m"));
    let temporal = rust_plugin("pp-plugin-temporal");
    // Its own stages are no default.
    let words = [
        "the kernels temporal have no stage phase_b; write --pipeline \"encode@0 -> average@1 -> decode@0\"",
    ];
    for ranks in ["1", "2"] {
        denoise(&input, &two, &temporal, &["--ranks", ranks]).failed(2, &words);
    }
    let plugins = [(median(), "phase_b"), (temporal, "average")];
    let mut results = Vec::new();
    for (plugin, between) in &plugins {
        let on = |rank: u32| format!("--pipeline=encode@0,{between}@{rank},decode@0");
        let (on_one, on_two) = (on(0), on(1));
        let checked = run(&mut plugin_check(plugin), None).succeeded();
        assert_eq!(not_ok(&checked), [] as [&str; 0]);

        denoise(&input, &two, plugin, &[&on_two, "--denoise-steps", "0"]).succeeded();
        assert!(
            std::fs::read(&two).unwrap() == original,
            "zero steps is the identity"
        );

        denoise(&input, &alone, plugin, &[&on_one]).succeeded();
        let alone = std::fs::read(&alone).unwrap();
        for depth in ["1", "4"] {
            denoise(&input, &two, plugin, &[&on_two, "--depth", depth]).succeeded();
            assert!(std::fs::read(&two).unwrap() == alone, "depth {depth}");
        }
        results.push(alone);
    }
    assert!(results[0] != original && results[1] != original && results[0] != results[1]);
}

/// A child process loads it before any rank does.
#[test]
fn a_plugin_that_crashes_while_it_loads_starts_no_rank() {
    let (folder, input, _) = files("crashing_plugin", &video(48, 32, "420jpeg", 9));
    let plugin = faulty("FAULT_CONSTRUCTOR");
    let words = ["load kernels: ", "the plugin crashed, signal: 6"];
    for ranks in ["1", "2"] {
        let ended = denoise(
            &input,
            &folder.file("out.y4m"),
            &plugin,
            &["--ranks", ranks],
        );
        ended.failed(5, &words);
    }
}

#[test]
fn faulty_plugins_end_the_job_with_their_name_and_leave_no_output() {
    let (_folder, input, output) = files("faulty_plugins", &video(48, 32, "420jpeg", 9));
    let faults = [
        ("FAULT_ERROR", "rank 1: phase_b"),
        ("FAULT_OVERRUN", "rank 1: phase_b"),
        ("FAULT_CALLS", "generator calls"),
        ("FAULT_MAJOR", "ABI"),
        ("FAULT_MAGIC", "magic"),
        ("FAULT_SHORT", "40 bytes"),
        ("FAULT_SELF_TEST", "self"),
        ("FAULT_NO_ENTRY", "pp_kernels_entry_v2"),
    ];
    for (fault, words) in faults {
        let plugin = faulty(fault);
        for ranks in ["1", "2"] {
            let ended = denoise(&input, &output, &plugin, &["--ranks", ranks]);
            assert!(
                ended.code == Some(5) || ended.code == Some(8),
                "{fault}: {}",
                ended.stderr
            );
            assert_eq!(ended.stderr.lines().count(), 1, "{fault}: {}", ended.stderr);
            let expected = words.replace("rank 1", if ranks == "1" { "rank 0" } else { "rank 1" });
            assert_has(&ended.stderr, &[&expected]);
            assert!(!output.exists(), "{fault} left an output");
        }
        let checked = run(&mut plugin_check(&plugin), None);
        assert_eq!(checked.code, Some(5), "{fault} passed its check");
    }
}

/// The first line of a plugin's error stands in the line of the job, and all of it, up to 16 KiB, below.
#[test]
fn a_long_error_of_a_plugin_is_printed_whole() {
    let (_folder, input, output) = files("long_error", &video(48, 32, "420jpeg", 9));
    let plugin = faulty("FAULT_ERROR_TEXT");
    for (ranks, rank) in [("1", "rank 0"), ("2", "rank 1")] {
        let ended = denoise(&input, &output, &plugin, &["--ranks", ranks]);
        assert_eq!(ended.code, Some(5), "{}", ended.stderr);
        let lines: Vec<&str> = ended.stderr.lines().collect();
        let [first, below] = lines[..] else {
            panic!("{} lines: {}", lines.len(), ended.stderr);
        };
        assert_has(first, &["pp: error: plugin", rank, "failed in phase_b: x"]);
        assert!(below.starts_with("    xxx") && below.trim_start().len() > 16_000);
        assert!(below.trim_start().bytes().all(|byte| byte == b'x'));
    }
}

#[test]
fn what_a_plugin_prints_does_not_get_into_the_video() {
    let (_folder, input, _) = files("plugin_prints", &video(48, 32, "420jpeg", 9));
    let [sound, prints] = ["NO_FAULT", "NO_FAULT_PRINTS"].map(faulty);
    for pipeline in [
        "encode@0,phase_b@0,decode@0",
        "encode@0,phase_b@1,decode@0",
        "encode@0,phase_b@1,decode@2",
    ] {
        let film = |kernels| {
            let more = ["--pipeline", pipeline];
            denoise(&input, Path::new("-"), kernels, &more).succeeded()
        };
        let (sound, prints) = (film(&sound), film(&prints));
        assert!(prints.stdout == sound.stdout, "{pipeline}");
        assert!(prints.stderr.contains("the plugin prints"), "{pipeline}");
    }
}

#[test]
fn a_plugin_that_panics_is_stopped_at_the_border() {
    let folder = folder("panicking_plugin");
    let output = folder.file("out.y4m");
    let plugin = rust_plugin("pp-plugin-panicking");
    // The plugin panics by frame width: 20 when a session is made, 21 in encode.
    for width in [20, 21] {
        let input = folder.write("in.y4m", &video(width, 32, "420jpeg", 3));
        for ranks in ["1", "2"] {
            let ended = denoise(&input, &output, &plugin, &["--ranks", ranks]).ended(5, &[]);
            // The panic's own message comes from the plugin's copy of the standard library.
            let last = ended.stderr.lines().last().unwrap();
            assert!(
                last.starts_with("pp: error:") && last.contains("panicked"),
                "{last}"
            );
            assert!(!output.exists());
        }
    }
}

const IDENTITY: &str = "host memory: zero steps is the identity, bit for bit, at every size ... ";
const WRITTEN: &str = "host memory: every byte of the output is written ... ";
const BAD_ARGUMENTS: &str =
    "host memory: bad arguments give an error and leave the session usable ... ";
const LAST: &str = "the process that used it ends without a fault ... ";

#[test]
fn a_check_in_which_the_plugin_does_not_return_is_named_and_the_others_pass() {
    let sound = run(&mut plugin_check(&faulty("NO_FAULT")), None).succeeded();
    let lines = sound.stdout.split(|byte| *byte == b'\n').count();
    for [fault, check, why, call] in rows(
        "
        FAULT_CRASH | IDENTITY | crashed, signal: 11 (SIGSEGV) | run of phase_b at frame 0
        FAULT_EXIT | IDENTITY | called exit, exit status: 3 | run of phase_b at frame 0
        FAULT_LATER_CRASH | WRITTEN | crashed, signal: 11 (SIGSEGV) | run of phase_b at frame 9
        FAULT_LATER_EXIT | WRITTEN | called exit, exit status: 3 | run of phase_b at frame 9
        FAULT_TRUSTS | BAD_ARGUMENTS | crashed, signal: 6 (SIGABRT) | run of phase_b at frame 0
        FAULT_AT_EXIT | LAST | crashed, signal: 6 (SIGABRT) | 
    ",
    ) {
        let checked = run(&mut plugin_check(&faulty(fault)), None).ended(5, &[]);
        let [failed, others @ ..] = &not_ok(&checked)[..] else {
            panic!("{fault} passed its check");
        };
        assert!(others.is_empty() || fault.contains("LATER"), "{others:?}");
        let failed = failed.replace(" (core dumped)", "");
        let check = match check {
            "IDENTITY" => IDENTITY,
            "WRITTEN" => WRITTEN,
            "BAD_ARGUMENTS" => BAD_ARGUMENTS,
            _ => LAST,
        };
        let call = match call {
            "" => String::new(),
            _ => format!("; its last call was {call}"),
        };
        assert_eq!(failed, format!("{check}FAILED: the plugin {why}{call}"));
        assert_eq!(checked.stdout.split(|byte| *byte == b'\n').count(), lines);
        if fault == "FAULT_CRASH" {
            let mut command = plugin_check(&faulty(fault));
            let checked = run(command.arg("--json"), None).ended(5, &[]).json();
            let all = checked["checks"].as_array().unwrap().iter();
            let failed: Vec<_> = all.filter(|check| check["passed"] == false).collect();
            let outcome = failed[0]["outcome"].as_str().unwrap();
            assert!(failed.len() == 1 && outcome.contains(why), "{failed:?}");
            assert_eq!(failed[0]["check"], check.trim_end_matches(" ... "));
        }
        // What the plugin prints is no part of the report.
        let said = checked.stderr.contains("the plugin says good-bye");
        assert_eq!(said, fault == "FAULT_EXIT");
    }
}

/// Also smaller than frames of a clip may be. Its stages claim no flag, so the check of a flag is skipped.
/// The tensors of these are others than those of the built-in kernels, with as many bytes.
#[test]
fn kernels_of_two_sets_that_do_not_fit_are_named() {
    let (folder, input, output) = files("two_sets", &video(48, 32, "420jpeg", 4));
    for (stage, told) in [("phase_b", "latents_in"), ("decode", "latents_out")] {
        let kernels = format!("{stage}={}", median().display());
        for ranks in ["1", "2"] {
            let ended = denoise(&input, &output, Path::new(&kernels), &["--ranks", ranks]);
            let words = format!("chunk 0: the kernels of {stage} take {told}");
            ended.failed(5, &[&words, "take the kernels of both from one set"]);
        }
    }
    assert_eq!(folder.names(), ["in.y4m"]);
}

#[test]
fn a_sink_may_give_smaller_frames() {
    let smaller = faulty("NO_FAULT_SMALLER");
    let checked = run(&mut plugin_check(&smaller), None).succeeded();
    let report = String::from_utf8_lossy(&checked.stdout);
    let skipped = "one member gives ... skipped: no stage has the flag PP_STAGE_GROUP";
    assert_has(&report, &[skipped]);
    assert_eq!(not_ok(&checked), [""; 0]);
    let (_folder, input, output) = files("smaller_frames", &video(24, 20, "mono", 3));
    denoise(&input, &output, &smaller, &["--ranks", "1"]).succeeded();
    let film = std::fs::read(&output).unwrap();
    assert!(film.starts_with(b"YUV4MPEG2 W12 H10 "));
}

#[test]
fn a_plugin_that_does_not_return_ends_the_job_by_name_and_one_that_crashes_is_tried_twice() {
    let (_folder, input, output) = files("alone", &video(48, 32, "420jpeg", 9));
    let again = "ended twice with chunk";
    for (fault, args, code, words) in [
        (
            "FAULT_EXIT",
            &["--ranks", "1"][..],
            5,
            &["a kernel plugin call exit?"][..],
        ),
        (
            "FAULT_EXIT",
            &["--restarts", "3"],
            5,
            &["a kernel plugin call exit?"],
        ),
        (
            "FAULT_HANG",
            &["--ranks", "1"],
            9,
            &["phase_b: no progress"],
        ),
        (
            "FAULT_CRASH",
            &["--restarts", "3"],
            7,
            &["SIGSEGV", again, "1 of 3"],
        ),
    ] {
        let mut command = pp(&["run", "--denoise-steps", "0", "--frames-per-chunk", "2"]);
        command.args(args).arg("--input").arg(&input);
        command.arg("--output").arg(&output);
        command.arg("--kernels").arg(faulty(fault));
        run(command.env("PP_STUCK_MS", "1000"), None).failed(code, words);
        assert!(!output.exists(), "{fault}: half an output has a name");
    }
}

/// The supervisor hears no report any more, so rank 0 has done its work if it ends well with an output.
#[test]
fn a_plugin_that_writes_into_the_pipe_of_reports_has_done_its_work_unless_it_exits() {
    let (folder, input, output) = files("junk", &video(48, 32, "420jpeg", 9));
    let film = |plugin: &str| denoise(&input, &output, &faulty(plugin), &["--denoise-steps", "0"]);
    let ended = film("FAULT_JUNK");
    // Its own code, or that of the rank that lost it.
    assert!(matches!(ended.code, Some(5 | 7)), "{}", ended.stderr);
    assert_eq!(folder.names(), ["in.y4m"]);
    film("NO_FAULT_JUNK").succeeded();
    assert_eq!(folder.names(), ["in.y4m", "out.y4m"]);
}

#[test]
fn a_plugin_whose_sessions_leave_memory_behind_fails_its_check() {
    let checked = run(&mut plugin_check(&faulty("FAULT_LEAK")), None).ended(5, &[]);
    let [failed] = &not_ok(&checked)[..] else {
        panic!("{:?}", not_ok(&checked));
    };
    let reason =
        " bytes are still allocated when 32 sessions of each stage were made and destroyed";
    assert!(failed.ends_with(reason), "{failed}");
}

#[test]
fn a_plugin_that_needs_an_argument_and_a_size_is_checked_with_them() {
    let picky = faulty("NO_FAULT_PICKY");
    let check = |more: &[&str]| run(plugin_check(&picky).args(more), None);
    let weights = ["--plugin-arg", "weights=w.bin"];
    let size = ["--width", "200", "--height", "100"];
    for (more, reason) in [
        (&size[..], "give --plugin-arg weights=FILE"),
        (
            &weights,
            "the kernels refuse every size that was tried, 40x24 (frames have",
        ),
    ] {
        let failed = check(more).ended(5, &[]);
        assert!(not_ok(&failed)[0].contains(reason), "{:?}", not_ok(&failed));
    }
    let passed = check(&[&size[..], &weights].concat()).succeeded();
    let skipped = format!("{IDENTITY}ok; skipped 16x16 (frames have 200x100 samples), ");
    assert!(
        not_ok(&passed)[0].starts_with(&skipped),
        "{:?}",
        not_ok(&passed)
    );
    check(&[weights, weights].concat()).failed(2, &["weights is given twice"]);
    assert_eq!(check(&size[..2]).code, Some(2), "a width without a height");
}

#[test]
fn a_check_that_hangs_is_named_and_the_others_run() {
    let mut command = plugin_check(&faulty("FAULT_HANG"));
    let checked = run(command.env("PP_STUCK_MS", "5000"), None).ended(5, &[]);
    let failed = not_ok(&checked);
    let expected = format!("{IDENTITY}FAILED: not done after 5 s; PP_STUCK_MS sets");
    assert!(failed[0].starts_with(&expected), "{failed:?}");
    let report = String::from_utf8(checked.stdout).unwrap();
    assert!(report.lines().last().unwrap().starts_with(LAST), "{report}");
}

#[test]
fn no_process_is_left_when_the_check_is_ended_by_a_signal() {
    let plugin = faulty("FAULT_HANG");
    for end in [Signal::TERM, Signal::KILL] {
        let mut command = plugin_check(&plugin);
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut check = command.stderr(Stdio::null()).spawn().unwrap();
        let mut report = Vec::new();
        let mut bytes = BufReader::new(check.stdout.take().unwrap()).bytes();
        while !report.ends_with(IDENTITY.as_bytes()) {
            report.push(bytes.next().expect("the check hangs").unwrap());
        }
        let workers = children(check.id());
        assert_eq!(workers.len(), 1);
        signal(check.id(), end);
        assert_eq!(wait(&mut check), None, "it ends by the signal");
        all_gone(&workers);
    }
}

#[test]
fn gpu_memory_is_checked_where_there_is_a_gpu() {
    let fakes = Fakes::newest();
    let on_gpus = |plugin: &Path, gpus: &str| {
        let mut command = plugin_check(plugin);
        fakes.give_to(&mut command).env("PP_FAKE_DEVICES", gpus);
        run(&mut command, None)
    };
    let cust = rust_plugin("pp-plugin-cust");
    let checked = on_gpus(&cust, "1").succeeded();
    assert_eq!(not_ok(&checked), [] as [&str; 0]);
    let report = String::from_utf8(checked.stdout).unwrap();
    assert!(
        report.contains("GPU memory: ") && !report.contains("host memory"),
        "{report}"
    );
    on_gpus(&cust, "0").failed(10, &["in GPU memory alone", "no CUDA device"]);
    // Without a driver, or with one that shows no device.
    let mut command = plugin_check(&cust);
    run(command.env("CUDA_VISIBLE_DEVICES", ""), None).failed(10, &["libpp_plugin_cust.so"]);

    // It claims both memories, and refuses a session on a device.
    let both = faulty("NO_FAULT_CUDA");
    let checked = on_gpus(&both, "0").succeeded();
    let [note] = &not_ok(&checked)[..] else {
        panic!("{:?}", not_ok(&checked));
    };
    assert!(
        note.starts_with("GPU memory: not checked, there is no CUDA device"),
        "{note}"
    );
    let checked = on_gpus(&both, "1").ended(5, &[]);
    let failed = not_ok(&checked);
    assert!(
        failed.iter().all(|line| line.starts_with("GPU memory: ")),
        "{failed:?}"
    );
    assert!(
        failed[0].contains("median works on host memory only"),
        "{failed:?}"
    );
    // Where an argument may be the reason, the memory that is refused is left out.
    let mut command = plugin_check(&faulty("NO_FAULT_PICKY"));
    command.args("--plugin-arg weights=w.bin --width 200 --height 100".split(' '));
    let checked = run(
        fakes.give_to(&mut command).env("PP_FAKE_DEVICES", "1"),
        None,
    );
    let report = String::from_utf8(checked.succeeded().stdout).unwrap();
    let refused = "GPU memory: not checked, the kernels refuse it: 200x100 (median works on host";
    assert_has(&report, &["host memory: self test passes ... ok", refused]);
    assert!(!report.contains("GPU memory: self test"), "{report}");
}
