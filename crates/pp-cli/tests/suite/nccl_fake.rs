//! `pp` on two GPUs, by copy engine and over NCCL, all of them fakes: the right bytes, in an order that is proven, and an
//! end for everybody when one rank dies.

use std::process::Command;

use pp_fakes::Fakes;
use pp_fakes::check::{Expect, Fresh, Recording, Rule, check};
use pp_testing::{
    Folder,
    process::{all_gone, finish, ranks, run, signal, spawn, wait_until_it_runs},
    read_json, rows, video, words,
};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::{endless, files, folder, pp, run_args};

/// Lets a command meet and record in the folder, on these fakes.
fn on_fakes(mut command: Command, fakes: &Fakes, folder: &Folder) -> Command {
    fakes.give_to(&mut command);
    command
        .env("PP_FAKE_NCCL_DIR", folder.file("meet"))
        .env("PP_FAKE_WATCH", "1")
        .env("PP_FAKE_RECORD", folder.file("rec"));
    for name in ["meet", "rec"] {
        std::fs::create_dir_all(folder.file(name)).unwrap();
    }
    command
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
    late_events: 0,
};

/// What both ranks recorded of so many payloads, there and back: a copy of each, or a send and a receive.
#[track_caller]
fn assert_proven_over(transport: &str, folder: &Folder, payloads: usize, expect: Expect) {
    let calls = if transport == "p2p" { 1 } else { 2 };
    assert_proven(folder, payloads * calls, expect);
}

/// Many small chunks that come out as they went in.
const COPY: [&str; 4] = ["--denoise-steps", "0", "--frames-per-chunk", "2"];

/// `pp run` on the fakes, from file to file.
fn run_over(transport: &str, folder: &Folder, more: &[&str]) -> Command {
    let own = ["--transport", transport, "--kernels", "ptx"];
    let files = ["in.y4m", "out.y4m"].map(|name| folder.file(name));
    let args = run_args(&files[0], &files[1], &[&own, more].concat());
    on_fakes(pp(&args), &Fakes::newest(), folder)
}

#[test]
fn zero_steps_is_the_identity_for_every_sampling_and_odd_sizes() {
    let folder = folder("nccl_identity");
    for (seed, sampling) in ["mono", "420jpeg", "422", "444"].into_iter().enumerate() {
        for (width, height) in [(16, 16), (33, 19)] {
            let input = folder.write("in.y4m", &video(width, height, sampling, 11));
            let output = folder.file("out.y4m");
            for transport in ["p2p", "nccl"] {
                let mut command = run_over(transport, &folder, &COPY);
                run(command.env("PP_FAKE_SEED", seed.to_string()), None).succeeded();
                let same = std::fs::read(&input).unwrap() == std::fs::read(&output).unwrap();
                assert!(same, "{width}x{height} {sampling} changed on its way");
                // Six chunks, there and back.
                assert_proven_over(transport, &folder, 12, EXPECT);
            }
        }
    }
}

#[test]
fn a_driver_too_old_for_the_built_in_kernels_is_refused_with_what_they_need() {
    let (folder, _, _) = files("nccl_old_driver", &video(32, 16, "mono", 2));
    let mut command = run_over("nccl", &folder, &[]);
    let words = [
        "rank 0: look for GPUs: ",
        "for CUDA 12.8, and the built-in PTX needs 13.0; update the driver to 580 or newer",
    ];
    run(command.env("PP_FAKE_DRIVER", "12080"), None).failed(10, &words);
}

/// Every order of the denoiser's kernels, whatever they compute; payloads on both sides of the eager limit.
#[test]
fn every_depth_is_in_order() {
    let (folder, _, _) = files("nccl_depths", &video(48, 32, "420jpeg", 24));
    for depth in [1, 2, 8] {
        for (transport, eager) in [("p2p", "0"), ("nccl", "0"), ("nccl", "1048576")] {
            let more = format!("--depth {depth} --denoise-steps 2 --frames-per-chunk 2");
            let mut command = run_over(transport, &folder, &words(&more));
            let ended = run(command.env("PP_FAKE_NCCL_EAGER", eager), None).succeeded();
            assert_proven_over(transport, &folder, 24, EXPECT);
            let faster = "--pipeline \"encode@0 -> phase_b@0 -> phase_b@1 -> decode@0\"";
            assert_eq!(ended.stderr.matches(faster).count(), 1, "{}", ended.stderr);
        }
    }
}

/// Rows go out, are exchanged and come back from GPU to GPU, beside the leader's kernels. The passes are the kernels' own
/// formula, so the film is that of one GPU.
#[test]
fn a_group_is_in_order_and_gives_what_one_gpu_gives() {
    let (folder, _, output) = files("nccl_group", &video(32, 43, "420jpeg", 8));
    // Each communicator has made its event by then.
    let expect = Expect {
        warm_up: 8,
        ..EXPECT
    };
    let film = |pipeline, more: &[&str], seed: &str, transfers| {
        let mut all = vec!["--frames-per-chunk", "2", "--pipeline", pipeline];
        all.extend(more);
        let mut command = run_over("nccl", &folder, &all);
        run(command.env("PP_FAKE_SEED", seed), None).succeeded();
        assert_proven(&folder, transfers, expect);
        std::fs::read(&output).unwrap()
    };
    // With one pass nothing but the unfold of a chunk keeps the rows of the next one away.
    for (more, exchanges) in [
        (&[][..], 16),
        (&["--recompute"], 16),
        (&["--denoise-steps", "1"], 0),
    ] {
        let alone = film("encode@0,phase_b@0,decode@0", more, "1", 0);
        // Of four chunks, sends and receives: of payloads, of rows out and back, and of two exchanges between two passes.
        for (seed, pipeline, transfers) in [
            ("2", "encode@0,phase_b@0+1,decode@0", 16 + exchanges),
            ("3", "encode@0,phase_b@1+0,decode@0", 32 + exchanges),
        ] {
            let same = film(pipeline, more, seed, transfers) == alone;
            assert!(same, "{pipeline} {more:?}");
        }
    }
}

/// What an edge and a group have taken, whoever leads the group.
#[test]
fn a_group_beside_the_copy_engine_is_said_and_reported() {
    let (folder, _, _) = files("nccl_beside", &video(32, 43, "420jpeg", 4));
    for (transport, group, name) in [
        ("p2p", "0+1", "transport nccl 2."),
        ("p2p", "1+0", "transport p2p+nccl 2."),
        ("auto", "1+0", "transport p2p+nccl 2."),
    ] {
        let pipeline = format!("encode@0,phase_b@{group},decode@0");
        let mut command = run_over(transport, &folder, &["--pipeline", &pipeline]);
        let ended = run(&mut command, None).succeeded();
        let said = String::from_utf8_lossy(&ended.stdout) + &*ended.stderr;
        assert!(said.contains(name), "{transport} {group}: {said}");
        assert_eq!(
            said.matches("pp: group phase_b nccl\n").count(),
            1,
            "{said}"
        );
    }
}

/// Where no edge has a payload, too.
#[test]
fn one_queue_for_all_streams_is_warned_of_also_for_a_group() {
    let (folder, _, _) = files("nccl_queue", &video(32, 43, "420jpeg", 2));
    let group = ["--pipeline", "encode@0,phase_b@0+1,decode@0"];
    let mut command = run_over("nccl", &folder, &group);
    command
        .env("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        .env("PP_LOG", "warn");
    let ended = run(&mut command, None).succeeded();
    let warned = ended.stderr.contains("CUDA_DEVICE_MAX_CONNECTIONS=1 puts");
    assert!(warned, "{}", ended.stderr);
}

/// Copied out of the payload behind the encode, in every epoch, with nothing waited for.
#[test]
fn the_noise_that_was_estimated_is_that_of_the_host() {
    let mut clip = video(48, 32, "420jpeg", 24);
    // From the thirteenth frame on another scene, whose samples all have the upper half of their range.
    let frame = b"FRAME\n".len() + 48 * 32 * 3 / 2;
    let scene = clip.len() - 12 * frame;
    for picture in clip[scene..].chunks_mut(frame) {
        picture[6..]
            .iter_mut()
            .for_each(|sample| *sample = 128 + *sample / 2);
    }
    let (folder, input, output) = files("nccl_noise", &clip);
    let report = folder.file("report.json");
    let noise = || {
        let report = read_json(&report);
        report["run"]["noise_sigma_estimated"].clone()
    };
    let more = [
        "--frames-per-chunk",
        "2",
        "--report",
        report.to_str().unwrap(),
    ];
    run(&mut run_over("nccl", &folder, &more), None).succeeded();
    assert_proven(&folder, 48, EXPECT);
    let on_gpu = noise();
    let mut on_host = pp(&run_args(&input, &output, &more));
    on_host.args(["--transport", "host", "--kernels", "cpu"]);
    run(&mut on_host, None).succeeded();
    assert_eq!(on_gpu, noise());
    assert_eq!(on_gpu["epochs"], 2);
    assert_ne!(on_gpu["least"], on_gpu["most"]);
}

#[test]
fn benchmarks_are_in_order_and_take_no_memory() {
    let folder = folder("nccl_bench");
    let args = words(
        "bench overlap --bytes 100000 --chunks 200 --decode-ms 0.2 \
         --phase-b-ms 0.2 --json",
    );
    for (transport, eager) in [("p2p", "0"), ("nccl", "65536"), ("nccl", "1048576")] {
        let mut command = on_fakes(pp(&args), &Fakes::newest(), &folder);
        command.args(["--transport", transport]);
        let ended = run(command.env("PP_FAKE_NCCL_EAGER", eager), None).succeeded();
        let report = ended.json();
        assert_eq!(report["device_memory_grown_bytes"], 0);
        assert_eq!(report["transport"], transport);
        let expect = Expect {
            warm_up: 16,
            fresh: Fresh::NotPayloads,
            late_events: 0,
            ..EXPECT
        };
        assert_proven_over(transport, &folder, 400, expect);
    }
}

/// What was sent and received up to the death was in order, and so is how the survivor ended.
#[test]
fn the_survivor_of_a_killed_rank_ends_in_order() {
    for (fakes, transport) in [
        (Fakes::newest(), "p2p"),
        (Fakes::newest(), "nccl"),
        (Fakes::without_revoke(), "nccl"),
    ] {
        let folder = folder("nccl_survivor");
        let mut command = on_fakes(endless("300000", "0.5"), &fakes, &folder);
        let child = spawn(command.args(["--transport", transport]));
        let pids = ranks(child.id());
        wait_until_it_runs(pids[0]);
        signal(pids[1], Signal::KILL);
        finish(child).ended(7, &[]);
        all_gone(&pids);
        let expect = Expect {
            complete: false,
            fresh: Fresh::NotPayloads,
            ..EXPECT
        };
        let report = check(&Recording::read_all(&folder.file("rec")), expect);
        report.assert_clean();
        assert!(report.transfers > 0);
    }
}

#[test]
fn what_fails_in_the_driver_or_in_nccl_is_named() {
    let (folder, _, output) = files("nccl_failures", &video(48, 32, "420jpeg", 120));
    for [fault, told] in rows(
        "
        ncclGetUniqueId:1:2 | ncclGetUniqueId; ncclSystemError
        ncclCommInitRankConfig:1:2 | rank; ncclCommInitRankConfig
        ncclSend:20:1 | ncclSend; ncclUnhandledCudaError
        ncclRecv:20:3 | ncclRecv; ncclInternalError
        cuEventQuery:100:719 | cuEventQuery; CUDA_ERROR_LAUNCH_FAILED
        cuLaunchKernel:30:719 | cuLaunchKernel; CUDA_ERROR_LAUNCH_FAILED
    ",
    ) {
        let mut command = run_over("nccl", &folder, &COPY);
        run(command.env("PP_FAKE_FAULTS", fault), None)
            .failed(10, &told.split("; ").collect::<Vec<_>>());
        assert!(!output.exists(), "{fault}: half an output has a name");
    }
    // Ranks look for this one when they have asked for completions in vain, however long that takes.
    let mut command = on_fakes(endless("300000", "0.5"), &Fakes::newest(), &folder);
    command.args(["--transport", "nccl"]);
    command.env("PP_FAKE_FAULTS", "asyncError:5:6");
    run(&mut command, None).failed(10, &["ncclRemoteError"]);
}

#[test]
fn too_few_gpus_are_refused_and_auto_takes_the_host() {
    let (folder, input, output) = files("nccl_none", &video(32, 16, "mono", 4));
    let mut command = run_over("nccl", &folder, &["--denoise-steps", "0"]);
    run(command.env("PP_FAKE_DEVICES", "0"), None).failed(10, &["GPUs", "--transport host"]);
    // With kernels that need a GPU the host alone would be refused.
    for (transport, advice) in [
        ("nccl", "or use --kernels cpu --transport host"),
        ("p2p", "or use --kernels cpu --transport host"),
        ("auto", "or use --kernels cpu"),
    ] {
        let mut command = run_over(transport, &folder, &["--ranks", "2"]);
        let words = ["1 GPU visible, and the ranks", advice];
        run(command.env("PP_FAKE_DEVICES", "1"), None).failed(10, &words);
    }
    // Restarts want a rank beside that of the source.
    let restarts = run_args(
        &input,
        &output,
        &["--denoise-steps", "0", "--restarts", "1"],
    );
    let mut command = on_fakes(pp(&restarts), &Fakes::newest(), &folder);
    command.env_remove("PP_FAKE_WATCH");
    let ended = run(command.env("PP_FAKE_DEVICES", "1"), None).succeeded();
    let said = String::from_utf8(ended.stdout).unwrap();
    let words = "kernels encode=cpu,phase_b=ptx,decode=cpu; fewer GPUs than ranks, so some ranks are on CPUs, as with --devices cpu,cuda:0";
    assert!(said.contains(words), "{said}");
    let auto = run_args(&input, &output, &["--denoise-steps", "0"]);
    for (variable, value, transport) in [
        ("PP_FAKE_DEVICES", "0", "transport host"),
        (
            "PP_FAKE_DEVICES",
            "1",
            "the only GPU, so all stages are on one rank",
        ),
        ("PP_FAKE_DEVICES", "2", "transport p2p"),
        ("PP_FAKE_PEERS", "pcie", "transport nccl"),
        (
            "PP_FAKE_PEERS",
            "nvlink",
            "pp: edges between ranks: 0 -> 1 p2p, 1 -> 0 p2p\n",
        ),
        (
            "PP_FAKE_PEERS",
            "none",
            "pp: edges between ranks: 0 -> 1 nccl, 1 -> 0 nccl (rank 0: this GPU cannot reach the memory of the other)\n",
        ),
        // A driver that moves payloads and is too old for the kernels.
        ("PP_FAKE_DRIVER", "12080", "transport host"),
    ] {
        let mut command = on_fakes(pp(&auto), &Fakes::newest(), &folder);
        let ended = run(command.env(variable, value), None).succeeded();
        let said = String::from_utf8_lossy(&ended.stdout) + &*ended.stderr;
        assert!(said.contains(transport), "{said}");
        assert!(std::fs::read(&input).unwrap() == std::fs::read(&output).unwrap());
    }
}

#[test]
fn benchmarks_run_between_host_memory_and_a_gpu() {
    let folder = folder("bench_mixed");
    // The ranks share rings and payloads, where only single words can be watched.
    let on_fakes = |args: &str| {
        let mut command = on_fakes(pp(&words(args)), &Fakes::newest(), &folder);
        command.env_remove("PP_FAKE_WATCH");
        run(&mut command, None).succeeded()
    };
    let overlap = "bench overlap --transport p2p --bytes 4096 --chunks 30 --decode-ms 0.1 --phase-b-ms 0.1 --json";
    for more in [
        "cpu,cuda:0 --simulate spin",
        "cuda:0,cpu --simulate gpu-spin",
    ] {
        let ended = on_fakes(&format!("{overlap} --devices {more}"));
        assert_eq!(ended.json()["transport"], "host");
        // What the rank in host memory writes is in no recording.
        let report = check(&Recording::read_all(&folder.file("rec")), EXPECT);
        let others = [Rule::Fault, Rule::Race, Rule::Lifetime, Rule::Steady];
        assert!(!others.iter().any(|rule| report.broke(*rule)), "{report:?}");
        assert!(report.accesses > 30 * 2);
        std::fs::remove_dir_all(folder.file("rec")).unwrap();
    }
    on_fakes("bench link --transport auto --devices cpu,cuda:0 --max-bytes 64");
}

/// Source and sink on a CPU, all passes on a GPU.
#[test]
fn a_film_through_a_cpu_and_a_gpu_has_the_bytes_of_the_gpu() {
    let folder = folder("film_mixed");
    let film = |sampling, (width, height), more: &str| {
        let input = folder.write("in.y4m", &video(width, height, sampling, 11));
        let output = folder.file("out.y4m");
        let more = format!("--frames-per-chunk 2 {more}");
        let mut command = pp(&run_args(&input, &output, &words(&more)));
        command.env("PP_FAKE_DEVICES", "1");
        let mut command = on_fakes(command, &Fakes::newest(), &folder);
        command.env_remove("PP_FAKE_WATCH");
        run(&mut command, None).succeeded();
        std::fs::read(&output).unwrap()
    };
    for (sampling, size) in [
        ("mono", (16, 16)),
        ("420jpeg", (33, 19)),
        ("422", (33, 18)),
        ("444", (17, 19)),
    ] {
        let wanted = film(sampling, size, "--devices cuda:0,cuda:0 --transport p2p");
        std::fs::remove_dir_all(folder.file("rec")).unwrap();
        for kernels in ["auto", "encode=cpu,phase_b=ptx"] {
            let mixed = film(
                sampling,
                size,
                &format!("--devices cpu,cuda:0 --kernels {kernels}"),
            );
            assert!(mixed == wanted, "{sampling} {size:?} {kernels}");
            let recorded = Recording::read_all(&folder.file("rec"));
            assert_eq!(recorded.len(), 1, "the rank on the CPU called the driver");
            let report = check(&recorded, EXPECT);
            // What the rank in host memory writes is in no recording.
            let others = [Rule::Fault, Rule::Race, Rule::Lifetime, Rule::Steady];
            assert!(!others.iter().any(|rule| report.broke(*rule)), "{report:?}");
            std::fs::remove_dir_all(folder.file("rec")).unwrap();
        }
    }
}

#[test]
fn with_one_gpu_a_plan_tries_it_a_cpu_beside_it_and_cpus_and_leaves_out_what_cannot_run() {
    let folder = folder("plan_one_gpu");
    let plan = |kernels| {
        let args =
            "plan --json --rounds 1 --width 32 --height 16 --denoise-steps 1 --chunks 8 --kernels";
        let mut command = pp(&[&words(args)[..], &[kernels]].concat());
        command.env("PP_FAKE_DEVICES", "1");
        let mut command = on_fakes(command, &Fakes::newest(), &folder);
        command
            .env_remove("PP_FAKE_WATCH")
            .env_remove("PP_FAKE_RECORD");
        run(&mut command, None).succeeded().json()
    };
    let report = plan("auto");
    assert_eq!(report["gpus"], 1);
    let tried = report["chain_and_groups"].as_array().unwrap();
    let devices: Vec<&Value> = tried.iter().map(|of| &of["devices"]).collect();
    assert_eq!(tried[0]["pipeline"], "encode@0 -> phase_b@0 -> decode@0");
    assert_eq!(devices[..2], [&Value::Null, &json!("cpu,cuda:0")]);
    assert!(devices[2].as_str().unwrap().starts_with("cpu"), "{report}");
    assert!(
        tried[..3]
            .iter()
            .all(|of| of["predicted_ms"].as_f64() > Some(0.0))
    );
    assert_eq!(report["left_out"], json!([]));
    // There are none of these kernels for a CPU.
    let report = plan("ptx");
    assert_eq!(report["chain_and_groups"].as_array().unwrap().len(), 1);
    let left_out = report["left_out"].as_array().unwrap();
    let why: Vec<&str> = left_out
        .iter()
        .map(|of| of["why"].as_str().unwrap())
        .collect();
    assert!(
        why[0].contains("the kernels ptx, which work in GPU memory"),
        "{why:?}"
    );
}

#[test]
fn ranks_share_a_gpu_that_is_named_for_each_of_them() {
    let (folder, input, output) = files("nccl_shared", &video(33, 19, "420jpeg", 11));
    let run_on = |transport, devices, more: &[&str], mps| {
        let more = [&COPY[..], &["--devices", devices], more].concat();
        let mut command = run_over(transport, &folder, &more);
        command.env("PP_FAKE_DEVICES", "1").env("PP_FAKE_MPS", mps);
        run(&mut command, None)
    };
    for (transport, mps, told) in [
        (
            "p2p",
            "0",
            ", which serves them in turns; to let their work overlap, start",
        ),
        ("auto", "1", " under MPS\n"),
    ] {
        let report = folder.file("report.json").display().to_string();
        let more = ["--report", report.as_str()];
        let ended = run_on(transport, "cuda:0,cuda:0", &more, mps).succeeded();
        let uuid = "GPU-70702066-616b-6520-4750-552000000001";
        let line = format!("pp: ranks 0, 1 share {uuid}{told}");
        assert_eq!(ended.stderr.matches(&line).count(), 1, "{}", ended.stderr);
        let shared = &read_json(&report)["run"]["shared_devices"];
        let is_under_mps = mps == "1";
        let expected = json!([{ "device": uuid, "ranks": [0, 1], "is_under_mps": is_under_mps }]);
        assert_eq!(*shared, expected);
        assert!(std::fs::read(&input).unwrap() == std::fs::read(&output).unwrap());
        assert_proven_over("p2p", &folder, 12, EXPECT);
    }
    // Each takes the next GPU: two ranks on one would be refused.
    let mut command = run_over(
        "p2p",
        &folder,
        &[&COPY[..], &["--devices", "cuda,cuda"]].concat(),
    );
    run(&mut command, None).succeeded();
    assert_proven_over("p2p", &folder, 12, EXPECT);
    let mut command = pp(&words(
        "bench link --transport p2p --devices cuda:0,cuda:0 --max-bytes 64",
    ));
    Fakes::newest().give_to(&mut command);
    run(command.env("PP_FAKE_DEVICES", "1"), None).succeeded();
    let group = ["--pipeline", "encode@0,phase_b@0+1,decode@0"];
    for (transport, devices, more, code, words) in [
        ("p2p", "cuda:0,cuda", &[][..], 6, "are both on GPU-"),
        (
            "p2p",
            "cuda:0,cuda:1",
            &[],
            10,
            "cuda:1, which is GPU 1 of this host, and 1 GPU visible",
        ),
        (
            "nccl",
            "cuda:0,cuda:0",
            &[],
            6,
            "NCCL, which connects them, takes one GPU for each rank",
        ),
        (
            "auto",
            "cuda:0,cuda:0",
            &group,
            6,
            "ranks 0 and 1 are both on GPU-",
        ),
    ] {
        run_on(transport, devices, more, "0").failed(code, &[words]);
    }
}

/// The proof sees what is wrong in `pp` as it does in the transport alone.
#[test]
fn a_spoiled_run_is_noticed() {
    let (folder, _, _) = files("nccl_spoiled", &video(48, 32, "420jpeg", 60));
    for (fault, rule) in [
        ("cuStreamWaitEvent:15:skip", Rule::Race),
        ("ncclSend:15:thread", Rule::Issuer),
        ("ncclRecv:15:sync", Rule::Steady),
        ("ncclRecv:15:half", Rule::Agreement),
        ("ncclSend:15:free", Rule::Lifetime),
    ] {
        let mut command = run_over("nccl", &folder, &COPY);
        command
            .env("PP_FAKE_FAULTS", fault)
            .env("PP_STUCK_MS", "2000");
        // A run that was spoiled may well go on for as long as nothing counts as stuck.
        run(&mut command, None);
        let recordings = Recording::read_all(&folder.file("rec"));
        std::fs::remove_dir_all(folder.file("rec")).unwrap();
        let report = check(
            &recordings,
            Expect {
                complete: false,
                ..EXPECT
            },
        );
        assert!(report.broke(rule), "{fault}: {:?}", report.violations);
    }
}

#[test]
fn slots_of_all_ranks_on_a_gpu_are_added_up_before_they_are_made() {
    let (folder, _, _) = files("gpu_memory", &video(33, 19, "420jpeg", 11));
    let refused = |code, gpus, memory: u64| {
        let pipeline = "encode@0,phase_b@1,phase_b@2,decode@0 --denoise-steps 2 --devices cuda:2,";
        let more = format!("--pipeline {pipeline}{gpus}");
        let mut command = run_over("p2p", &folder, &words(&more));
        let memory = memory.to_string();
        command.env("PP_FAKE_DEVICES", "3");
        run(command.env("PP_FAKE_MEMORY", memory), None)
            .ended(code, &[])
            .stderr
    };
    let number = |text: &str, before: &str| -> u64 {
        let (_, behind) = text.split_once(before).unwrap_or_else(|| panic!("{text}"));
        behind.split(' ').next().unwrap().parse().unwrap()
    };
    let kernels_fail = refused(10, "cuda:0,cuda:1", 40_000);
    let told = "of the device's 40000 bytes are free";
    assert!(kernels_fail.contains(told), "{kernels_fail}");
    // The kernels of a rank leave too little for its slots.
    let memory = 700_000;
    let told = refused(2, "cuda:0,cuda:1", memory);
    let (slots, free) = (number(&told, " take "), number(&told, "bytes, and "));
    assert!(
        told.contains(&format!("({slots} bytes for rank ")),
        "{told}"
    );
    // Now there is enough for one rank, and not for both. Each fake process counts its own memory.
    let told = refused(2, "cuda:0,cuda:0", memory + slots - free);
    let both = ["bytes for rank 1, ", "bytes for rank 2)"];
    assert!(both.iter().all(|rank| told.contains(rank)), "{told}");
}
