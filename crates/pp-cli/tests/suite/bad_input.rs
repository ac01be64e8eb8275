//! What a user can get wrong: one line that names the thing and the remedy, an exit code by kind,
//! and nothing under the final name.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use pp_testing::{
    process::{after, as_rank, finish, free_port, run, spawn},
    rows, video, words,
};

use crate::common::{self, files, folder, pp};

fn run_args(input: &Path, output: &Path, more: &[&str]) -> Vec<OsString> {
    common::run_args(input, output, &[&["--denoise-steps", "0"], more].concat())
}

#[test]
fn malformed_inputs_are_refused_with_their_fault() {
    let good = video(32, 16, "420jpeg", 6);
    let header = good.iter().position(|b| *b == b'\n').unwrap() + 1;
    let with_header = |line: &str| [line.as_bytes(), &good[header..]].concat();
    let cases: [(&str, Vec<u8>, &[&str]); 7] = [
        ("empty", Vec::new(), &["empty"]),
        ("header only", good[..header].to_vec(), &["no frame"]),
        (
            "cut off",
            good[..header + 99].to_vec(),
            &["truncated", "frame 0"],
        ),
        ("noise", vec![0xA7; 5000], &["not a Y4M file"]),
        (
            "twelve bits",
            with_header("YUV4MPEG2 W32 H16 F25:1 C420p12\n"),
            &["420p12", "ffmpeg -i IN -pix_fmt yuv420p10le -strict -1"],
        ),
        (
            "mixed fields",
            with_header("YUV4MPEG2 W32 H16 F25:1 Im\n"),
            &["convert its source: ffmpeg -i ORIGINAL -vf yadif"],
        ),
        (
            "unknown fields",
            with_header("YUV4MPEG2 W32 H16 F25:1 Iz\n"),
            &["Iz", "Ip, It, Ib and I?"],
        ),
    ];
    let folder = folder("bad_inputs");
    let output = folder.file("out.y4m");
    for (name, bytes, told) in cases {
        let input = folder.write("in.y4m", &bytes);
        for ranks in ["1", "2"] {
            let more = ["--ranks", ranks, "--frames-per-chunk", "1"];
            let told = [told, &["in.y4m"]].concat();
            run(&mut pp(&run_args(&input, &output, &more)), None).failed(3, &told);
            assert_eq!(folder.names(), ["in.y4m"], "{name}: something was left");
        }
    }
}

#[test]
fn an_input_that_is_not_there_or_too_small() {
    let folder = folder("missing_input");
    let output = folder.file("out.y4m");
    let missing = folder.file("missing.y4m");
    run(&mut pp(&run_args(&missing, &output, &[])), None).failed(4, &["missing.y4m", "opened"]);
    let directory = folder.file("");
    run(&mut pp(&run_args(&directory, &output, &[])), None).failed(4, &["directory"]);
    let small = folder.write("small.y4m", &video(15, 40, "mono", 2));
    run(&mut pp(&run_args(&small, &output, &[])), None).failed(3, &["15x40", "16x16"]);
    let vast = folder.write("vast.y4m", b"YUV4MPEG2 W16384 H16384 F25:1\nFRAME\n");
    let more = ["--frames-per-chunk", "256", "--depth", "64"];
    run(&mut pp(&run_args(&vast, &output, &more)), None).failed(3, &["16384x16384", "available"]);
}

#[test]
fn a_file_that_is_not_there_is_named_with_one_exit_code() {
    let folder = folder("missing_files");
    let input = folder.write("in.y4m", &video(32, 16, "mono", 2));
    let (input, missing) = (input.to_str().unwrap(), folder.file("no/such.csv"));
    let missing = missing.to_str().unwrap();
    for args in [
        &["run", missing][..],
        &["run", input, "--config", missing],
        &["run", input, "--replay", missing],
        &["plan", missing],
        &["verify", missing, input],
        &["flight", missing],
        &["schedule", "check", missing],
    ] {
        run(&mut pp(args), None).failed(4, &["no/such.csv", "check its name"]);
    }
    let man = ["man", "/proc/no/such"];
    run(&mut pp(&man), None).failed(4, &["/proc/no/such", "check its name"]);
}

#[test]
fn fields_are_filtered_as_one_picture_and_one_note_says_so() {
    let folder = folder("interlaced");
    let output = folder.file("out.y4m");
    for (tag, notes) in [("It", 1), ("Ib", 1), ("Ip", 0), ("I?", 0)] {
        let text = String::from_utf8_lossy(&video(32, 16, "420jpeg", 0)).replace("Ip", tag);
        let frames = video(32, 16, "420jpeg", 6);
        let bytes = [text.as_bytes(), &frames[text.len()..]].concat();
        let input = folder.write("in.y4m", &bytes);
        for ranks in ["1", "2"] {
            let mut command = pp(&run_args(&input, &output, &["--ranks", ranks]));
            let ended = run(&mut command, None).succeeded();
            let said = ended.stderr.matches("in.y4m: interlaced").count();
            assert_eq!(said, notes, "{tag}: {}", ended.stderr);
            assert_eq!(std::fs::read(&output).unwrap(), bytes, "{tag}");
        }
    }
}

#[test]
fn outputs_that_cannot_be_written() {
    let (folder, input, output) = files("bad_outputs", &video(64, 64, "420jpeg", 40));
    let nowhere = folder.file("no/such/folder/out.y4m");
    run(&mut pp(&run_args(&input, &nowhere, &[])), None).failed(4, &["no/such/folder"]);
    let no_new_files = Path::new("/proc/out.y4m");
    run(&mut pp(&run_args(&input, no_new_files, &[])), None)
        .failed(4, &["/proc/out.y4m", "takes no new files"]);
    let folder_itself = folder.file("");
    run(&mut pp(&run_args(&input, &folder_itself, &[])), None).failed(4, &["directory"]);
    let full = PathBuf::from("/dev/full");
    run(&mut pp(&run_args(&input, &full, &[])), None).failed(4, &["/dev/full", "space"]);
    let report = folder.file("no/report.json");
    let more = ["--report", report.to_str().unwrap()];
    run(&mut pp(&run_args(&input, &output, &more)), None).failed(4, &["report.json"]);
    // A report that fails at the end takes nothing from the video.
    let more = ["--report", "/dev/full"];
    let ended = run(&mut pp(&run_args(&input, &output, &more)), None);
    let ended = ended.failed(4, &["/dev/full", "space"]);
    let said = String::from_utf8(ended.stdout).unwrap();
    assert!(said.contains("out.y4m (40 frames)"), "{said}");
    assert!(output.exists() && !said.contains("/dev/full"), "{said}");
}

#[test]
fn a_reader_that_leaves_is_an_output_error() {
    let (_folder, input, _) = files("broken_pipe", &video(64, 64, "420jpeg", 200));
    let mut child = spawn(&mut pp(&run_args(&input, Path::new("-"), &[])));
    drop(child.stdout.take());
    finish(child).failed(4, &["standard output", "pipe"]);
}

#[test]
fn command_lines_that_cannot_be() {
    let cases = rows("
        run --depth 257 | --depth 257: it takes a whole number from 1 to 256
        run --depth=-1.5 | --depth -1.5: it takes a whole number from 1 to 256
        run --strength -3 | --strength -3: it takes 'auto', or 
        run --ranks 65 | --ranks 65: it takes a whole number from 1 to 64
        run --ranks 4 --denoise-steps 2 | the parts of --denoise-steps 2 are at most 2, so 3 ranks are the most
        run --pipeline encode@0- | --pipeline encode@0-: pipeline, character 9: the text ends in '-'; quote it: the shell took the >
        run --pipeline encode@0 - - | quote the text: the shell took the >
        run --pipeline encode@0,blur@1,decode@0 | the kernels cpu have no stage blur
        run --pipeline encode@0,phase_b@1,decode@0 --ranks 3 | decode@0 is 2; leave --ranks out
        run --plugin-arg key | --plugin-arg key: it takes KEY=VALUE
        run --plugin-arg encode.a=1 | encode is a stage whose kernels are no plugin
        run --plugin-arg a=1 --plugin-arg a=2 | --plugin-arg a=2: a is given twice, first as \"1\"; give each key once
        run --pipeline encode@0,phase_b@0,decode@1 --add-noise 3 | standard input can be read once; name a file with --input, or put decode on rank 0
        run --ranks 1 --restarts 1 --input x.y4m | --restarts
        run --fill skip | none are; give --late drop or --replay, or leave it out
        run --skip 3 | the following required arguments were not provided: --output
        run --depht 3 | unexpected argument '--depht' found; a similar argument exists: '--depth'; pp run --help says what it takes
        run --cuts soft | invalid value 'soft' for '--cuts <CUTS>'; possible values: flush, hard, off
        plann | unrecognized subcommand 'plann'; some similar subcommands exist: 'plugin', 'plan'; pp --help says what it takes
    ");
    for [args, word] in cases {
        run(&mut pp(&words(args)), Some(Vec::new())).failed(2, &[word]);
    }
}

#[test]
fn every_command_has_the_version_of_pp() {
    let version = run(&mut pp(&["--version"]), None).succeeded().stdout;
    for command in [&["run"] as &[&str], &["bench", "link"], &["doctor"]] {
        let ended = run(&mut pp(&[command, &["--version"]].concat()), None).succeeded();
        assert_eq!(ended.stdout, version, "{command:?}");
    }
}

#[test]
fn results_that_cannot_be_printed() {
    for args in [
        "bench overlap --chunks 9 --bytes 8 --json",
        "doctor",
        "plugin check /no/such.so",
        "schedule show 1f1b --ranks 2 --microbatches 2",
        "--help",
    ] {
        let args: Vec<&str> = args.split(' ').collect();
        for (to, words) in [(">/dev/full", "No space left"), (">&-", "it is closed")] {
            let mut command = after(&format!("exec {to}"), &pp(&args));
            run(&mut command, None).failed(4, &["standard output", words]);
        }
    }
}

#[test]
fn reports_that_cannot_be_written_are_refused_before_the_work() {
    let (folder, input, output) = files("bad_report", &video(32, 32, "mono", 2));
    for flag in ["--report", "--trace", "--timeline"] {
        let more = [flag, "/no/such/folder/file"];
        run(&mut pp(&run_args(&input, &output, &more)), None)
            .failed(4, &["/no/such/folder/file", "directory"]);
        assert_eq!(folder.names(), ["in.y4m"]);
    }
}

#[test]
fn two_ranks_of_a_launcher_for_a_job_of_one_rank_are_refused() {
    let (folder, input, _) = files("twice", &video(32, 32, "mono", 2));
    let mut command = pp(&run_args(
        &input,
        &folder.file("out.y4m"),
        &["--ranks", "1"],
    ));
    let world = [
        ("RANK", "0"),
        ("LOCAL_RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "29500"),
        ("PP_JOB_SECRET", "0123456789abcdef0123"),
    ];
    let words = [
        "the launcher started 2 ranks",
        "has 1; start 1, give --ranks 2",
    ];
    run(command.envs(world), None).failed(2, &words);
    // Two processes would write one output, secret or none.
    run(command.env_remove("PP_JOB_SECRET"), None).failed(2, &words);
    assert_eq!(folder.names(), ["in.y4m"]);
}

#[test]
fn payloads_that_fit_no_memory() {
    let bytes = (1_u64 << 36).to_string();
    let more = ["bench", "overlap", "--depth", "64", "--bytes", &bytes];
    run(&mut pp(&more), None).failed(3, &["shared memory", "--bytes"]);
}

#[test]
fn kernels_that_are_none() {
    let (folder, input, output) = files("bad_kernels", &video(32, 32, "mono", 2));
    let text = folder.write("text.so", b"this is no shared library");
    for ranks in ["1", "2"] {
        let more = ["--ranks", ranks, "--kernels", text.to_str().unwrap()];
        let words = ["plugin: load kernels: ", "text.so"];
        run(&mut pp(&run_args(&input, &output, &more)), None).failed(5, &words);
        for (name, code) in [("cpu2", 2), ("", 2), ("/no/such/plugin.so", 4)] {
            let more = ["--ranks", ranks, "--kernels", name];
            let shown = format!("--kernels {name:?}: ");
            let words = [&shown, "it takes auto, cpu, ptx, or the path of a plugin"];
            run(&mut pp(&run_args(&input, &output, &more)), None).failed(code, &words);
        }
    }
    assert_eq!(folder.names(), ["in.y4m", "text.so"]);
}

#[test]
fn kernels_transports_and_devices_that_do_not_go_together() {
    let (folder, input, output) = files("wrong_memory", &video(32, 16, "420jpeg", 4));
    let cases = rows(
        "
        --kernels cpu --transport nccl | --transport nccl does not; --transport host
        --kernels cpu --transport p2p | --transport p2p does not; --transport host
        --kernels ptx --transport host | --transport auto
        --kernels ptx --devices cpu,cpu | kernels ptx, which work in GPU memory; gives rank 0 cpu
        --kernels cpu --devices cuda:0,cuda | which work in host memory; gives rank 0 cuda:0; give rank 0 cpu
        --transport host --devices cuda,cuda | --devices names a GPU; use --transport auto or p2p
        --transport p2p --devices cpu,cpu | --devices names no GPU; use --transport host
        --devices cuda,cpu --pipeline encode@0,phase_b@0,phase_b@1,decode@0 | phase_b@0 cuda and phase_b@1 cpu; give all ranks of phase_b GPUs
        --devices cuda:0,cpu --kernels encode=cpu | encode has the kernels cpu; gives rank 0 cuda:0
        --kernels encode=cpu,phase_b=ptx | cpu, which works in host memory, and ptx; say with --devices
        --kernels encode=cpu,encode=ptx | names encode twice
        --kernels encode=cpu,ptx | is not STAGE=KERNELS
        --kernels blur=cpu | names the stage blur; name one of its stages
        --kernels phase_b=./none.so | there is no such file
        --devices cpu --ranks 2 | names 1 device; has 2 ranks
        --devices cuda:x,cpu | --devices cuda:x; where N is the number of a visible GPU
    ",
    );
    for [more, told] in cases {
        let told: Vec<&str> = told.split("; ").collect();
        let code = if more.ends_with(".so") { 4 } else { 2 };
        run(&mut pp(&run_args(&input, &output, &words(more))), None).failed(code, &told);
    }
    let cases = rows(
        "
        --simulate gemm | --transport p2p or nccl
        --simulate spin --transport p2p | gpu-spin
        --touch --transport p2p | --transport host
        --simulate spin --transport nccl | gpu-spin
        --touch --transport nccl | --transport host
        --devices cuda:0,cuda:0 | --transport auto
    ",
    );
    for [more, told] in cases {
        let args = format!("bench overlap {more}");
        run(&mut pp(&words(&args)), None).failed(2, &[told]);
    }
    assert_eq!(folder.names(), ["in.y4m"]);
}

#[test]
fn a_gpu_that_is_wanted_and_not_there_is_named_once_and_what_is_only_hoped_for_is_told() {
    let (_folder, input, output) = files("no_gpu", &video(32, 16, "420jpeg", 4));
    for more in [
        ["--transport", "p2p"],
        ["--transport", "nccl"],
        ["--kernels", "ptx"],
    ] {
        let mut command = pp(&run_args(&input, &output, &more));
        let ended = run(command.env("CUDA_VISIBLE_DEVICES", ""), None);
        ended.failed(10, &["device", "look for GPUs"]);
    }
    let mut command = pp(&run_args(&input, &output, &[]));
    let ended = run(command.env("CUDA_VISIBLE_DEVICES", ""), None).succeeded();
    let said = String::from_utf8(ended.stdout).unwrap();
    let said = said.lines().nth(2).unwrap();
    assert!(said.starts_with("transport host "), "{said}");
    let (_, why) = said.split_once("; on CPUs: ").unwrap();
    assert!(!why.contains("install"), "{why}");
    assert_eq!(said.matches("transport").count(), 1, "{said}");
}

#[test]
fn pipelines_that_cannot_be_run_are_refused_before_a_rank_starts() {
    let (folder, input, output) = files("bad_pipelines", &video(32, 16, "420jpeg", 4));
    // No denoise steps are asked for.
    let cases = rows(
        "
        encode@0,blur@1,decode@0 | have no stage blur; write
        encode@0,phase_b@2,decode@0 | rank 1 has no stage; use all ranks
        encode@0,phase_b@1,phase_b@2,decode@0 | the most is 1: name it less often
        encode@0,(phase_b@1),decode@0 | character 21: found ','; write '*steps'
        encode@0,(phase_b@1)*0,decode@0 | write 'steps', or a number
        encode@0,(phase_b@1)*steps,decode@0 | --denoise-steps is 0; raise
        encode@0 - | quote it: the shell took the >
        encode@0; - | quote the text: the shell took the >
        encode@0,phase_b@1,decode@0; --ranks=3 | leave --ranks out
    ",
    );
    for [more, words] in cases {
        let more: Vec<&str> = ["--pipeline"].into_iter().chain(more.split("; ")).collect();
        let ended = run(&mut pp(&run_args(&input, &output, &more)), None);
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
        ended.failed(2, &[words]);
    }
    for (pipeline, words) in [
        ("s0@0,x@1,s2@0", "has no stage s1"),
        ("s0@0,(s1@1)*steps,s2@0", "write the number of laps"),
        ("s0@0,s1@1+2,s2@0", "give s1 one rank"),
    ] {
        let mut command = pp(&pp_testing::words(
            "bench overlap --stages 0,0,0 --pipeline",
        ));
        let ended = run(command.arg(pipeline), None);
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
        ended.failed(2, &[words]);
    }
    let only = pp_testing::words("bench overlap --stages 5");
    run(&mut pp(&only), None).failed(2, &["--stages 5: ", "give two lengths or more"]);
    // A launcher of two ranks.
    for [pipeline, words] in rows(
        "
        encode@0,phase_b@0,decode@0 | start 1, give a --pipeline of 2 ranks or --ranks 2
        encode@0,phase_b@1,decode@2 | start 3, give a --pipeline of 2 ranks or --ranks 2
    ",
    ) {
        let command = pp(&run_args(&input, &output, &["--pipeline", pipeline]));
        run(&mut as_rank(command, 0, free_port()), None).failed(2, &[words]);
    }
    assert_eq!(folder.names(), ["in.y4m"]);
}
