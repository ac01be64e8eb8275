//! A test that needs a process of its own.

use std::process::Command;

/// Tells a process that it was started for one test.
const ALONE: &str = "PP_TEST_ALONE";

/// Runs the calling test in a process of its own: gives true there, and false, with the test done, in the process that
/// started it.
///
/// # Panics
///
/// If the test fails in its own process.
#[macro_export]
macro_rules! alone {
    () => {{
        fn here() {}
        $crate::process::is_alone(std::any::type_name_of_val(&here))
    }};
}

/// Does the work of [`alone!`], for the path of a function inside the test.
#[track_caller]
pub fn is_alone(path: &str) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let path = path.strip_suffix("::here").unwrap();
    let (_, test) = path.split_once("::").unwrap();
    let mut process = Command::new(std::env::current_exe().unwrap());
    process.args([test, "--exact", "--include-ignored", "--nocapture"]);
    let ended = process.env(ALONE, test).output().unwrap();
    let said = [ended.stdout, ended.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(
        ended.status.success() && said[0].contains("test result: ok. 1 passed"),
        "{test} alone: {}\n{}\n{}",
        ended.status,
        said[0],
        said[1]
    );
    false
}
