//! Kernels swapped in with `--kernels`: good ones do their work, bad ones end the job by name.

#[path = "../../pp-kernels/tests/common/mod.rs"]
mod build;
mod common;

use std::path::Path;

use build::{compile_c_file, median, root, rust_plugin};
use common::{Folder, pp, run, video};

fn denoise(input: &Path, output: &Path, kernels: &Path, more: &[&str]) -> common::Ended {
    let mut command = pp(&["run", "--frames-per-chunk", "2"]);
    command
        .args(more)
        .arg("--input")
        .arg(input)
        .arg("--output")
        .arg(output);
    run(command.arg("--kernels").arg(kernels), None)
}

#[test]
fn example_plugins_pass_their_check_and_do_their_work() {
    let folder = Folder::new("plugins");
    let original = video(48, 32, "420jpeg", 9);
    let input = folder.write("in.y4m", &original);
    let (alone, two) = (folder.file("alone.y4m"), folder.file("two.y4m"));
    let plugins = [median(), rust_plugin("pp-plugin-temporal")];
    let mut results = Vec::new();
    for plugin in &plugins {
        let checked = run(pp(&["plugin", "check"]).arg(plugin), None).succeeded();
        assert!(!checked.stdout.is_empty());

        denoise(&input, &two, plugin, &["--denoise-steps", "0"]).succeeded();
        assert!(
            std::fs::read(&two).unwrap() == original,
            "zero steps is the identity"
        );

        denoise(&input, &alone, plugin, &["--ranks", "1"]).succeeded();
        let alone = std::fs::read(&alone).unwrap();
        for depth in ["1", "4"] {
            denoise(&input, &two, plugin, &["--depth", depth]).succeeded();
            assert!(std::fs::read(&two).unwrap() == alone, "depth {depth}");
        }
        results.push(alone);
    }
    assert!(results[0] != original && results[1] != original && results[0] != results[1]);
}

#[test]
fn faulty_plugins_end_the_job_with_their_name_and_leave_no_output() {
    let folder = Folder::new("faulty_plugins");
    let input = folder.write("in.y4m", &video(48, 32, "420jpeg", 9));
    let output = folder.file("out.y4m");
    let faults = [
        ("FAULT_ERROR", "rank 1: phase_b"),
        ("FAULT_OVERRUN", "rank 1: phase_b"),
        ("FAULT_CALLS", "generator calls"),
        ("FAULT_MAJOR", "ABI"),
        ("FAULT_MAGIC", "magic"),
        ("FAULT_SHORT", "40 bytes"),
        ("FAULT_SELF_TEST", "self"),
        ("FAULT_NO_ENTRY", "pp_kernels_entry_v1"),
    ];
    for (fault, words) in faults {
        let source = root().join("crates/pp-kernels/tests/plugins/faulty.c");
        let plugin = compile_c_file(&source, &[fault]);
        for ranks in ["1", "2"] {
            let ended = denoise(&input, &output, &plugin, &["--ranks", ranks]);
            assert!(
                ended.code == Some(5) || ended.code == Some(8),
                "{fault}: {}",
                ended.stderr
            );
            assert_eq!(ended.stderr.lines().count(), 1, "{fault}: {}", ended.stderr);
            let expected = words.replace("rank 1", if ranks == "1" { "rank 0" } else { "rank 1" });
            assert!(
                ended.stderr.contains(&expected),
                "{fault}: {}",
                ended.stderr
            );
            assert!(!output.exists(), "{fault} left an output");
        }
        let checked = run(pp(&["plugin", "check"]).arg(&plugin), None);
        assert_eq!(checked.code, Some(5), "{fault} passed its check");
    }
}

#[test]
fn a_plugin_that_panics_is_stopped_at_the_border() {
    let folder = Folder::new("panicking_plugin");
    let output = folder.file("out.y4m");
    let plugin = rust_plugin("pp-plugin-panicking");
    // The plugin panics by frame width: 20 when a session is made, 21 in encode.
    for width in [20, 21] {
        let input = folder.write("in.y4m", &video(width, 32, "420jpeg", 3));
        for ranks in ["1", "2"] {
            let ended = denoise(&input, &output, &plugin, &["--ranks", ranks]);
            assert_eq!(ended.code, Some(5), "{}", ended.stderr);
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
