//! `cargo xtask` as a program: what it says when it cannot do something.

use std::process::{Command, Stdio};

use crate::gpu_check::alone;

#[test]
fn an_error_is_one_line_and_no_backtrace() {
    for (args, words) in [
        (&["nonsense"][..], "no command \"nonsense\""),
        (
            &["mutants", "no_such_mistake"],
            "no mutant is called no_such_mistake",
        ),
    ] {
        let mut xtask = Command::new(env!("CARGO_BIN_EXE_xtask"));
        xtask.args(args).env("RUST_BACKTRACE", "1");
        let started = {
            let _alone = alone();
            xtask.stderr(Stdio::piped()).spawn().unwrap()
        };
        let ended = started.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(1), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(
            said.starts_with("error: ") && said.contains(words),
            "{said}"
        );
    }
}
