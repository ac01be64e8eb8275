//! A copy of the program, in an empty folder and with an empty environment, needs nothing of the repository.

use std::process::Command;

use pp_testing::{process::run, video, words};

use crate::common::folder;

#[test]
fn a_copy_of_the_program_works_anywhere() {
    let folder = folder("installed");
    let program = folder.file("pp");
    // Another process writes it: one that a test beside this starts meanwhile would hold a file open that this one writes, and a
    // program that is open for writing cannot be started.
    let mut copy = Command::new("cp");
    run(copy.arg(env!("CARGO_BIN_EXE_pp")).arg(&program), None).succeeded();
    folder.write("in.y4m", &video(64, 48, "420jpeg", 8));
    let started = |args: &str| {
        let mut command = Command::new(&program);
        command.env_clear().current_dir(folder.path());
        run(command.args(words(args)), None)
    };
    // Its ranks are processes of its own file.
    started("run --input in.y4m --output out.y4m --ranks 2 --denoise-steps 1").succeeded();
    assert!(folder.file("out.y4m").exists());
    // What it lacks on this machine is no failure of the copy.
    let doctor = started("doctor");
    assert!(!doctor.stdout.is_empty(), "{}", doctor.stderr);
}
