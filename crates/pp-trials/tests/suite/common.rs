//! What the tests of this crate share.

use std::process::Command;

use pp_testing::{Folder, process};
use serde_json::Value;

/// Everything ended as it must, some of it later than its bound.
pub(crate) const LATE: i32 = 9;

/// The folder of a test.
pub(crate) fn folder(test: &str) -> Folder {
    Folder::new(env!("CARGO_TARGET_TMPDIR"), test)
}

/// `pp-trials` with these arguments: `pp`, where PP_FAULT works.
pub(crate) fn pp<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Command {
    let (program, folder) = (env!("CARGO_BIN_EXE_pp-trials"), env!("CARGO_TARGET_TMPDIR"));
    process::program(program, folder, args)
}

/// Lets the fakes of a job meet and record in empty folders of this one.
pub(crate) fn meet_in(folder: &Folder, command: &mut Command) {
    for (name, at) in [("PP_FAKE_NCCL_DIR", "meet"), ("PP_FAKE_RECORD", "rec")] {
        let folder = folder.file(at);
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        command.env(name, folder);
    }
}

/// Says whether no part of the trials was chosen.
pub(crate) fn runs_all() -> bool {
    std::env::var_os("PP_TESTS_PART").is_some_and(|chosen_by| chosen_by == "all")
}

/// Runs trials to their end, which must be a good one, early or late: at least so many ran, and the others have a reason
/// with one of these words in it. PP_TESTS_PART chooses a part of the trials, with another choice for other arguments;
/// with `all` they all run.
#[track_caller]
pub(crate) fn assert_all_behave(command: &mut Command, least: usize, reasons: &[&str]) {
    let one_in = if runs_all() {
        1
    } else {
        let chosen_by = std::env::var("PP_TESTS_PART").unwrap_or_default();
        let seed = format!("{chosen_by} {:?}", command.get_args().collect::<Vec<_>>());
        eprintln!("PP_TESTS_PART={chosen_by} chooses; --part {seed:?}");
        command.args(["--part", &seed]);
        6
    };
    let ended = process::run(command.arg("--json"), None);
    let report: Value = serde_json::from_slice(&ended.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", ended.stderr));
    let trials = report["trials"].as_array().unwrap();
    let is_wrong = |trial: &&Value| trial["wrong"] != serde_json::json!([]);
    let wrong: Vec<_> = trials.iter().filter(is_wrong).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    // How long it took is a matter of the machine; that it has a bound is not.
    let times = trials.iter().flat_map(|t| t["times"].as_array().unwrap());
    let bounds: Vec<_> = times
        .filter_map(|time| Some((time["ms"].as_f64()?, time["bound_ms"].as_f64()?)))
        .collect();
    assert!(bounds.len() >= 25 / one_in, "{report}");
    let late = if bounds.iter().any(|(ms, bound)| ms > bound) {
        LATE
    } else {
        0
    };
    assert_eq!(ended.code, Some(late), "{}", ended.stderr);
    let left_out: Vec<_> = trials
        .iter()
        .filter_map(|t| t["not_run"].as_str())
        .collect();
    for why in &left_out {
        assert!(reasons.iter().any(|reason| why.contains(reason)), "{why}");
        eprintln!("skipped: {why}");
    }
    assert!(trials.len() - left_out.len() >= least / one_in, "{report}");
}
