//! `pp plan`: what it refuses, and that it runs what it proposes.

use pp_contract::Pipeline;
use pp_testing::{process::run, rows, video, words};
use serde_json::Value;

use crate::common::{folder, pp};

#[test]
fn what_cannot_be_planned_is_named_with_the_remedy() {
    let folder = folder("bad_plan");
    let clip = folder.write("in.y4m", &video(32, 16, "420jpeg", 1));
    let clip = clip.to_str().unwrap();
    let many = vec!["1"; 257].join(",");
    let cases = rows("
        --stages 5 | 2 | --stages 5; give two lengths or more
        --stages 0,0 | 2 | --stages; give one a length
        --stages 1,-2 | 2 | --stages -2; from 0 to 60000
        --stages MANY | 2 | 257 lengths; give fewer
        --ranks 0 | 2 | --ranks 0; from 1 to 64
        --ranks 65 | 2 | --ranks 65; from 1 to 64
        --stages 1,1,1,1,1,1,1,1,1,1,1 --ranks 3 --all | 2 | more than 1000 placements; lower --ranks
        --input - | 2 | name a file with --input
        --input no.y4m | 4 | no.y4m
        --input CLIP --frames-per-chunk 1 | 3 | raise --chunks
        --kernels cpu2 | 2 | cpu2; auto, cpu, ptx
    ");
    for [args, code, told] in cases {
        let args = format!("plan {args}").replace("MANY", &many);
        let told: Vec<&str> = told.split("; ").collect();
        let ended = run(&mut pp(&words(&args.replace("CLIP", clip))), None);
        ended.failed(code.parse().unwrap(), &told);
    }
    let mut launched = pp(&["plan"]);
    launched.envs([("RANK", "0"), ("WORLD_SIZE", "2")]);
    run(&mut launched, None).failed(2, &["without one", "WORLD_SIZE"]);
}

fn plan(args: &[&str]) -> Value {
    let args = [&["plan", "--json", "--rounds", "1"], args].concat();
    run(&mut pp(&args), None).succeeded().json()
}

#[test]
fn every_placement_is_run_and_the_proposal_is_one_of_them() {
    let lengths = ["--stages", "0.3,0.1,0.2", "--bytes", "64", "--chunks", "20"];
    let report = plan(&[&lengths[..], &["--all"]].concat());
    let placements = report["placements"].as_array().unwrap();
    let texts: Vec<&str> = placements
        .iter()
        .map(|of| of["pipeline"].as_str().unwrap())
        .collect();
    assert_eq!(texts.len(), 4, "{texts:?}");
    assert!(texts.contains(&"s0@0 -> s1@1 -> s2@0"), "{texts:?}");
    let proposal = &report["proposal"];
    assert!(texts.contains(&proposal["pipeline"].as_str().unwrap()));
    // What is predicted for one rank is the sum of what was measured there.
    let alone = &report["on_one_rank"][0];
    let works = alone["stages"].as_array().unwrap().iter();
    let sum: f64 = works.map(|stage| stage["work_ms"].as_f64().unwrap()).sum();
    let same = placements
        .iter()
        .find(|of| of["pipeline"] == alone["pipeline"]);
    let predicted = same.unwrap()["predicted_ms"].as_f64().unwrap();
    assert!(
        sum > 0.0 && (predicted / sum - 1.0).abs() < 1e-9,
        "{predicted} and {sum}"
    );
    let ms = |of: &Value| of["measured_ms"].as_f64().unwrap();
    let over = ms(proposal) / ms(&placements[0]) - 1.0;
    // A number that is read back from text may differ in its last bit.
    let said = report["over_best"].as_f64().unwrap();
    assert!((said - over).abs() < 1e-9, "{said} and {over}");
}

#[test]
fn passes_are_measured_in_all_their_parts() {
    let film = words("--width 32 --height 16 --denoise-steps 2 --chunks 8 --ranks 3");
    let report = plan(&film);
    let alone = report["on_one_rank"].as_array().unwrap();
    let texts: Vec<&Value> = alone.iter().map(|of| &of["pipeline"]).collect();
    let expected = [
        "encode@0 -> phase_b@0 -> decode@0",
        "encode@0 -> phase_b@0 -> phase_b@0 -> decode@0",
    ];
    assert_eq!(texts, expected);
    assert_eq!(alone[1]["stages"][1]["stage"], "phase_b 1/2");
    let proposal = &report["proposal"];
    let pipeline: Pipeline = proposal["pipeline"].as_str().unwrap().parse().unwrap();
    assert!(pipeline.world_size().get() <= 3, "{proposal}");
    assert!(proposal["measured_ms"].as_f64() > Some(0.0), "{proposal}");
    // Groups are run beside the best chain, and the best of all is proposed.
    let [chain, groups @ ..] = &report["chain_and_groups"].as_array().unwrap()[..] else {
        panic!("no chain");
    };
    assert!(chain["predicted_ms"].as_f64() > Some(0.0), "{chain}");
    let texts: Vec<&Value> = groups.iter().map(|of| &of["pipeline"]).collect();
    let expected = [
        "encode@0 -> phase_b@0+1+2 -> decode@0",
        "encode@0 -> phase_b@1+2 -> decode@0",
    ];
    assert_eq!(texts, expected);
    for group in groups {
        assert_eq!(group["predicted_ms"], Value::Null);
        assert!(proposal["measured_ms"].as_f64() <= group["measured_ms"].as_f64());
    }
    assert!(proposal["measured_ms"].as_f64() <= chain["measured_ms"].as_f64());
}

#[test]
fn ranks_with_the_most_stages_agree_on_their_lengths() {
    let lengths = vec!["0.1"; 256].join(",");
    let stages: Vec<String> = (0..256).map(|at| format!("s{at}@{}", at / 255)).collect();
    let args = ["bench", "overlap", "--bytes", "64", "--chunks", "2"];
    let more = ["--stages", &lengths, "--pipeline", &stages.join(",")];
    run(&mut pp(&[&args[..], &more].concat()), None).succeeded();
}
