//! `pp run` from file to file: nothing lost, nothing doubled, the same on one rank and on two.

use std::path::Path;

use pp_testing::{assert_has, process::run, read_json, video, words};

use crate::build::median;
use crate::common::{assert_keys_are_documented, files, folder, pp, run_args};

#[test]
fn zero_steps_is_the_identity_for_every_sampling_and_odd_sizes() {
    let folder = folder("identity");
    for sampling in ["mono", "420jpeg", "422", "444"] {
        for (width, height) in [(16, 16), (17, 19), (64, 48), (33, 16)] {
            let input = folder.write("in.y4m", &video(width, height, sampling, 7));
            let output = folder.file("out.y4m");
            let more = ["--denoise-steps", "0", "--frames-per-chunk", "3"];
            run(&mut pp(&run_args(&input, &output, &more)), None).succeeded();
            let same = std::fs::read(&input).unwrap() == std::fs::read(&output).unwrap();
            assert!(same, "{width}x{height} {sampling} changed on its way");
        }
    }
}

#[test]
fn zero_steps_keep_the_parameters_of_frames() {
    let plain = video(32, 16, "420jpeg", 11);
    let stride = 6 + 32 * 16 * 3 / 2;
    let mut film = plain.clone();
    for frame in [9, 4, 0] {
        let at = plain.len() - (11 - frame) * stride + 5;
        film.splice(at..at, format!(" Ip Xnumber={frame}").into_bytes());
    }
    let (_folder, input, output) = files("parameters", &film);
    for ranks in ["1", "2"] {
        let more = ["--denoise-steps", "0", "--ranks", ranks];
        run(&mut pp(&run_args(&input, &output, &more)), None).succeeded();
        assert!(std::fs::read(&output).unwrap() == film, "{ranks} ranks");
    }
}

#[test]
fn two_ranks_give_what_one_gives_at_every_depth() {
    let (folder, input, _) = files("ranks", &video(48, 32, "420jpeg", 11));
    for recompute in [&[][..], &["--recompute"]] {
        let mut more = vec!["--ranks", "1", "--frames-per-chunk", "2"];
        more.extend(recompute);
        let alone = folder.file("alone.y4m");
        run(&mut pp(&run_args(&input, &alone, &more)), None).succeeded();
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
            run(&mut pp(&run_args(&input, &output, &more)), None).succeeded();
            let same = std::fs::read(&output).unwrap() == alone;
            assert!(same, "depth {depth}, recompute {recompute:?}");
        }
    }
}

#[test]
fn every_placement_gives_the_same_clip_and_the_same_psnr() {
    let (folder, input, _) = files("placements", &video(48, 32, "420jpeg", 11));
    let mut expected = None;
    for pipeline in words(
        "encode@0,phase_b@0,decode@0 encode@0,phase_b@1,decode@1 \
         encode@0,phase_b@0,decode@1 encode@0,phase_b@1,phase_b@2,decode@0 \
         encode@0,phase_b@1,phase_b@0,phase_b@1,decode@2 encode@0,phase_b@0+1,decode@0 \
         encode@0,phase_b@1+0+2,decode@1 encode@0,phase_b@2+1,phase_b@0,decode@3",
    ) {
        let report = folder.file("report.json");
        let more = "--denoise-steps 3 --add-noise 10 --verify every=1 --report";
        let mut command = pp(&run_args(&input, Path::new("-"), &words(more)));
        command.arg(&report).args(["--pipeline", pipeline]);
        let ended = run(&mut command, None).succeeded();
        let report = read_json(report);
        let of = &report["run"];
        let psnr = (of["psnr_before_db"].clone(), of["psnr_after_db"].clone());
        assert!(psnr.1.as_f64() > psnr.0.as_f64(), "{psnr:?}");
        let results = of["verify"]["all_results"].clone();
        let got = (ended.stdout, psnr, results);
        let expected = expected.get_or_insert_with(|| got.clone());
        assert!(
            got == *expected,
            "{pipeline}: {:?}, not {:?}",
            got.1,
            expected.1
        );
    }
}

/// The CPU kernels take 10 bits a sample, a plugin of 8 bits does not.
#[test]
fn clips_of_10_bits_come_out_in_10_bits() {
    let clip = video(50, 35, "420p10", 9);
    let (folder, input, output) = files("ten_bits", &clip);
    let report = folder.file("report.json");
    let of = |more: &str| {
        let more = format!("--frames-per-chunk 2 {more}");
        run(&mut pp(&run_args(&input, &output, &words(&more))), None)
    };
    for pipeline in words("encode@0,phase_b@0,decode@0 encode@0,phase_b@1,decode@2") {
        of(&format!("--denoise-steps 0 --pipeline {pipeline}")).succeeded();
        let same = std::fs::read(&output).unwrap() == clip;
        assert!(same, "{pipeline}: zero steps is the identity");
    }
    let mut expected = None;
    for more in [
        "encode@0,phase_b@0,decode@0 --recompute",
        "encode@0,phase_b@1+2,phase_b@0,decode@1",
    ] {
        let text = format!(
            "--add-noise 10 --report {} --pipeline {more}",
            report.display()
        );
        of(&text).succeeded();
        let run = &read_json(&report)["run"];
        let db = |key: &str| run[key].as_f64().unwrap();
        // The noise is that of 8 bits: 20 log10(255 / 10).
        assert!((db("psnr_before_db") - 28.13).abs() < 0.5, "{run}");
        assert!(db("psnr_after_db") > db("psnr_before_db"), "{run}");
        let sigma = run["noise_sigma_estimated"]["first"][0].as_f64().unwrap();
        assert!((8.0..16.0).contains(&sigma), "{run}");
        let made = std::fs::read(&output).unwrap();
        assert_eq!(made.len(), clip.len());
        assert!(
            made == *expected.get_or_insert_with(|| made.clone()),
            "{more}"
        );
    }
    let plugin = format!("--kernels phase_b={}", median().display());
    let words = [
        "the clip has 10 bits a sample, and the kernels 'median' of phase_b take 8; make one of 8: \
         ffmpeg -i IN -pix_fmt yuv420p OUT.y4m",
    ];
    std::fs::remove_file(&output).unwrap();
    of(&plugin).failed(3, &words);
    assert!(!output.exists());
}

#[test]
fn pipes_in_and_out_carry_the_same_bytes() {
    let input = video(32, 16, "420jpeg", 9);
    let more = words("run --input - --output - --denoise-steps 0");
    let ended = run(&mut pp(&more), Some(input.clone())).succeeded();
    assert!(ended.stdout == input, "the pipe changed the video");
    assert_has(&ended.stderr, &["frames per second"]);
}

#[test]
fn reports_are_written_whole_and_say_what_was_run() {
    let (folder, input, output) = files("reports", &video(32, 32, "420jpeg", 12));
    let names = ["report.json", "trace.json", "timeline.svg"].map(|n| folder.file(n));
    let [report, trace, timeline] = names.each_ref().map(|p| p.to_str().unwrap());
    let more = format!(
        "--pipeline encode@0,phase_b@1+2,decode@0 --add-noise 20 --frames-per-chunk 2 --depth 3 \
         --report {report} --trace {trace} --timeline {timeline}"
    );
    let more = words(&more);
    let mut command = pp(&run_args(&input, &output, &more));
    let ended = run(&mut command, None).succeeded();
    let text = ended.text();
    assert_has(
        &text,
        &[
            "frames per second",
            "luma PSNR",
            "efficiency",
            "out.y4m (12 frames)",
            "rank 1 phase_b on ranks 1+2 ",
            "group        phase_b: rank 1 ",
        ],
    );
    let report = read_json(&names[0]);
    assert_eq!(report["schema"], 2);
    assert_eq!(report["run"]["depth"], 3);
    let command = report["run"]["command"].as_array().unwrap();
    assert!(command.iter().any(|word| word == "--add-noise"));
    // Noise of 20 was added to a clip that has little of its own.
    let noise = &report["run"]["noise_sigma_estimated"];
    let luma = noise["first"][0].as_f64().unwrap();
    assert!((10.0..40.0).contains(&luma), "{noise}");
    assert!(text.contains(&format!("sigma {luma:.1}, ")), "{text}");
    assert_keys_are_documented(&report);
    assert_eq!(report["measures"]["frames"], 12);
    assert!(report["measures"]["max_in_flight"].as_u64().unwrap() <= 3);
    let chunks = report["chunks"].as_array().unwrap();
    assert_eq!(chunks.len(), 6);
    for chunk in chunks {
        let at = |key: &str| chunk[key].as_u64().unwrap();
        assert!(at("first_read_ns") < at("last_read_ns"), "{chunk}");
        assert!(at("last_read_ns") < at("build_start_ns"), "{chunk}");
        let members = chunk["stages"][0]["members"].as_array().unwrap();
        let ranks: Vec<_> = members.iter().map(|member| &member["rank"]).collect();
        assert_eq!(ranks, [1, 2]);
        let works = members
            .iter()
            .map(|member| member["work_ms"].as_f64().unwrap());
        assert!(works.clone().all(|ms| ms > 0.0), "{chunk}");
        assert_eq!(chunk["stages"][0]["work_ms"], works.fold(0.0, f64::max));
    }
    let trace = read_json(&names[1]);
    let events = trace["traceEvents"].as_array().unwrap();
    for rank in [1, 2] {
        let works = events.iter().filter(|e| e["ph"] == "X" && e["pid"] == rank);
        assert_eq!(works.count(), 6, "rank {rank}");
    }
    let svg = std::fs::read_to_string(&names[2]).unwrap();
    assert!(svg.starts_with("<svg"));
    assert_eq!(svg.matches(">phase_b</text><text").count(), 2);
    assert_eq!(svg.matches(">rank 2, busy ").count(), 1);
}

#[test]
fn clips_that_are_identical_have_no_psnr_and_nothing_is_infinite() {
    let (folder, input, _) = files("identical", &video(32, 32, "420jpeg", 1));
    let report = folder.file("report.json");
    let more = words("--add-noise 0 --denoise-steps 0 --strength 7 --verify every=1 --report");
    let mut command = pp(&run_args(&input, &folder.file("out.y4m"), &more));
    let ended = run(command.arg(&report), None).succeeded();
    let text = ended.text();
    assert_has(
        &text,
        &[
            "luma PSNR identical before, identical after\n",
            "1 frame in 1 chunk\n",
        ],
    );
    assert!(!text.contains("NaN") && !text.contains("inf "), "{text}");
    assert_eq!(text.matches("transport").count(), 1, "{text}");
    let report = read_json(report);
    for key in ["psnr_before", "psnr_after"] {
        assert!(report["run"][format!("{key}_db")].is_null());
        assert_eq!(report["run"][format!("{key}_why_null")], "identical");
    }
    assert_eq!(report["run"]["strength"], 7.0);
    assert!(report["run"]["noise_sigma_estimated"].is_null());
    // One chunk has no period, and says so.
    assert!(report["measures"]["period_ms"].is_null());
    assert!(report["measures"]["efficiency_why_null"].is_string());
    assert!(report["measures"]["latency_ms"].is_number());
    assert_keys_are_documented(&report);
}

#[test]
fn the_video_benchmark_reads_and_writes_the_whole_clip() {
    let (_folder, input, output) = files("bench_video", &video(48, 32, "420jpeg", 11));
    let more = ["bench", "video", "--runs", "2", "--json", "--input"];
    let files = [
        input.to_str().unwrap(),
        "--output",
        output.to_str().unwrap(),
    ];
    let ended = run(&mut pp(&[&more[..], &files].concat()), None).succeeded();
    let result = ended.json();
    assert_eq!(result["frames"], 11);
    for side in ["source_gbytes_per_s", "sink_gbytes_per_s"] {
        assert!(
            result[side]["worst"]
                .as_f64()
                .is_some_and(|rate| rate > 0.0),
            "{result}"
        );
    }
    let bytes = |path| std::fs::metadata(path).unwrap().len();
    assert_eq!(bytes(&output), bytes(&input));
}

#[test]
fn the_overlap_benchmark_prints_its_keys() {
    let more = words(
        "bench overlap --decode-ms 0.2 --phase-b-ms 0.2 --bytes 100000 \
         --chunks 60 --depth 2 --touch --json",
    );
    let ended = run(&mut pp(&more), None).succeeded();
    let result = ended.json();
    for key in words(
        "transport bytes pipeline stages_ms stages ranks depth chunks period_ms \
         period_mean_ms gbytes_per_s latency_ms latency_p99_ms latency_max_ms max_in_flight",
    ) {
        assert!(!result[key].is_null(), "{key} is missing in {result}");
    }
    // On a machine with other work chunks may come in bursts: then there is a reason instead.
    for key in words(
        "efficiency efficiency_by_mean efficiency_asked \
         efficiency_asked_by_mean overlap_score",
    ) {
        let (figure, why) = (&result[key], &result[format!("{key}_why_null")]);
        let share = figure.as_f64().filter(|share| (0.0..=1.0).contains(share));
        assert!(share.is_some() != why.is_string(), "{key} in {result}");
    }
    assert_eq!(result["chunks"], 60);
    assert!(result["max_in_flight"].as_u64().unwrap() <= 2);
}

/// Too few blocks for a pair behind the one that warms up, and two sizes that are one.
#[test]
fn blocks_that_give_nothing_to_compare_are_refused() {
    for (more, words) in [
        (["64", "191"], ["--chunks 191", "192 or more"]),
        (["4096", "192"], ["--against 4096", "two sizes"]),
    ] {
        let [against, chunks] = more;
        let args = ["bench", "overlap", "--bytes", "4096", "--against", against];
        let args = [&args[..], &["--chunks", chunks]].concat();
        run(&mut pp(&args), None).failed(2, &words);
    }
}

/// Every stage finds each payload as it was written, so blocks have the sizes that were asked for. The first pair of blocks
/// warms up.
#[test]
fn blocks_of_two_sizes_are_compared_in_pairs() {
    let args = words(
        "bench overlap --bytes 4096 --against 64 --chunks 192 --decode-ms 0 \
         --phase-b-ms 0 --touch --json",
    );
    let ended = run(&mut pp(&args), None).succeeded();
    let result = ended.json();
    assert_eq!(result["against"]["bytes"], 64);
    assert_eq!(result["against"]["pairs"], 1, "{result}");
    assert!(result["against"]["ratio"].as_f64().unwrap() > 0.0);
    assert!(result["gbytes_per_s"].is_null(), "{result}");
}

/// In shared memory a payload is handed over: no byte moves, so nothing has a rate.
#[test]
fn bench_reports_no_bandwidth_where_payloads_are_handed_over() {
    let link = ["bench", "link", "--max-bytes", "65536"];
    let text = run(&mut pp(&link), None).succeeded().stdout;
    let text = String::from_utf8(text).unwrap();
    let rows: Vec<&str> = text.lines().skip(3).take(3).collect();
    assert_eq!(rows.len(), 3, "{text}");
    assert!(rows.iter().all(|row| row.contains("handed over")), "{text}");
    let json = |args: &[&str]| -> serde_json::Value {
        let ended = run(&mut pp(&[args, &["--json"]].concat()), None).succeeded();
        serde_json::from_slice(&ended.stdout).unwrap()
    };
    for figure in json(&link)["figures"].as_array().unwrap() {
        assert!(figure["one_way_us"].is_number() && figure["one_way_mean_us"].is_number());
        assert!(figure["one_way_gbytes_per_s"].is_null(), "{figure}");
    }
    let untouched = ["bench", "overlap", "--decode-ms", "0", "--phase-b-ms", "0"];
    for bytes in ["0", "65536"] {
        let overlap = json(&[&untouched[..], &["--chunks", "60", "--bytes", bytes]].concat());
        assert!(overlap["gbytes_per_s"].is_null(), "{overlap}");
        assert_eq!(overlap["efficiency_why_null"], "a rank had no work");
    }
}
