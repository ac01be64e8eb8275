//! `pp run` with rings, and with a plugin that brings stages of its own and a sink of another size.

use std::process::Command;

use pp_testing::{process::run, read_json, rows, scenes, video, words};

use crate::build::{compile_c_file, root};
use crate::common::{assert_keys_are_documented, folder, pp};

/// `pp run` from standard input to standard output.
fn piped(more: &[&str]) -> Command {
    let mut command = pp(&words("run --output - --frames-per-chunk 2 --threads=1"));
    command.args(more);
    command
}

#[test]
fn rings_give_what_one_process_gives() {
    let film = scenes(48, 32, "420jpeg", 20, 8);
    for more in [&["--cuts=off"][..], &["--recompute"]] {
        // Five passes cannot be shared out evenly.
        let of = |pipeline: &str, depth: &str| {
            let steps = ["--denoise-steps=5", "--verify=every=2"];
            let place = ["--pipeline", pipeline, "--depth", depth];
            let command = [&steps[..], &place, more].concat();
            run(&mut piped(&command), Some(film.clone()))
                .succeeded()
                .stdout
        };
        let alone = of("encode@0,phase_b@0,decode@0", "2");
        assert!(alone != film, "nothing was denoised");
        for (pipeline, depths) in [
            ("encode@0,(phase_b@0)*steps,decode@0", &["1", "4"][..]),
            (
                "encode@0,(phase_b@1,phase_b@2)*2,decode@0",
                &["1", "2", "9"],
            ),
            ("encode@0,(phase_b@1,phase_b@1)*2,decode@2", &["1", "4"]),
            ("encode@0,(phase_b@0,phase_b@1)*1,decode@1", &["4"]),
        ] {
            for depth in depths {
                let same = of(pipeline, depth) == alone;
                assert!(same, "{pipeline}, depth {depth}, {more:?}");
            }
        }
    }
}

#[test]
fn stages_of_a_plugin_run_in_chains_and_rings_and_its_sink_sets_the_header() {
    let folder = folder("own_stages");
    let three = compile_c_file(&root().join("crates/pp-kernels/tests/plugins/three.c"), &[]);
    let kernels = three.to_str().unwrap();
    let report = folder.file("report.json");
    let film = video(48, 32, "mono", 9);
    let of = |pipeline: &str, more: &[&str]| {
        let own = [
            "--kernels",
            kernels,
            "--pipeline",
            pipeline,
            "--verify=every=1",
        ];
        let report = ["--report", report.to_str().unwrap()];
        run(
            &mut piped(&[&own[..], &report, more].concat()),
            Some(film.clone()),
        )
    };
    let steps = ["--denoise-steps=5"];
    let alone = of("read@0,soften@0,write@0", &steps).succeeded().stdout;
    for pipeline in words(
        "read@0,soften@1,write@2 read@0,soften@1,soften@2,write@0 \
         read@0,(soften@1,soften@2)*2,write@2 read@0,(soften@1)*steps,write@0",
    ) {
        let ended = of(pipeline, &steps).succeeded();
        assert!(ended.stdout == alone, "{pipeline}");
    }
    let header = b"YUV4MPEG2 W96 H64 F50:1 Ip A1:1 Cmono\n";
    assert!(alone.starts_with(header));
    assert_eq!(alone.len(), header.len() + 18 * (6 + 96 * 64));
    let report = read_json(&report);
    assert_keys_are_documented(&report);
    for (key, expected) in [
        ("width", 48),
        ("output_width", 96),
        ("output_height", 64),
        ("output_frames", 18),
    ] {
        assert_eq!(report["run"][key], expected, "{key}");
    }
    let stronger = of(
        "read@0,soften@0,write@0",
        &["--plugin-arg", "share=1", steps[0]],
    );
    assert!(
        stronger.succeeded().stdout != alone,
        "the argument came to the plugin"
    );
    for [pipeline, more, words] in rows(
        "
        read@0,soften@1,write@2 | --plugin-arg=weight=2 | unknown argument weight
        read@0,soften@1,write@0 | --add-noise=5 | leave --add-noise out
        read@0,(soften@1)*9,write@0 | --denoise-steps=4 | write *4 for *9
    ",
    ) {
        let ended = of(pipeline, &[more]);
        assert!(
            ended.code != Some(0) && ended.stderr.contains(words),
            "{}",
            ended.stderr
        );
        assert_eq!(ended.stderr.lines().count(), 1, "{}", ended.stderr);
    }
}
