//! What programs of the user see of a job of `pp run`.

use std::io::Write as _;
use std::path::Path;

use pp_job::Config;
use pp_job::seen::{Client, JobState, jobs};
use pp_testing::process::{finish, spawn_with_input};
use pp_testing::{until_some, video};

use super::common::{folder, pp, run_args};

#[test]
fn a_viewer_gets_pictures_before_and_after_and_the_end() {
    let folder = folder("seen_pictures");
    let output = folder.file("out.y4m");
    let runtime = |name: &str| (name == "XDG_RUNTIME_DIR").then(|| folder.path().into());
    let config = Config::alone(runtime).unwrap();
    let mut command = pp(&run_args(Path::new("-"), &output, &["--ranks", "1"]));
    let mut child = spawn_with_input(command.env("XDG_RUNTIME_DIR", folder.path()));
    let mut pipe = child.stdin.take().unwrap();
    let clip = video(64, 48, "420jpeg", 8);
    let header = clip.iter().position(|byte| *byte == b'\n').unwrap() + 1;
    pipe.write_all(&clip).unwrap();
    let is_it = |found: &pp_job::seen::FoundJob| found.pid == child.id();
    let found = until_some("the job", || jobs(&config).into_iter().find(is_it));
    let mut client = Client::connect(&found).unwrap();
    let mut clips = 1;
    // Pictures are taken of what comes while somebody looks.
    while client.next_snapshot().unwrap().unwrap().thumbnails != [true, true] {
        pipe.write_all(&clip[header..]).unwrap();
        clips += 1;
    }
    drop(pipe);
    let last = std::iter::from_fn(|| client.next_snapshot().unwrap()).last();
    let last = last.unwrap();
    assert_eq!(
        (last.state, last.totals.frames),
        (JobState::Ended, 8 * clips)
    );
    finish(child).succeeded();
}
