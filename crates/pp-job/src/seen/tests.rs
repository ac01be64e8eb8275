//! A socket and its callers: another user, one too many, one that writes, one that does not read.

use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use pp_runtime::report::Training;
use pp_runtime::schedule::{Kind, Schedule};
use pp_testing::Folder;
use rustix::process::{Uid, getuid};
use serde_json::{Value, json};

use super::socket::{CLIENTS, Serving, bind};
use super::vitals::Signs;
use super::{AboutJob, Snapshot, Thumb, Thumbnail, Viewer, file_name, parse};
use crate::own_folder;
use crate::times::STUCK_VIEWER;

fn viewer() -> Viewer {
    let pipeline = "a@0 -> b@1 -> c@0".parse().unwrap();
    Viewer::new(AboutJob::default(), &pipeline, Vec::new(), Signs::default())
}

/// The socket of a job in this folder, without its thread.
fn serving(folder: &Path) -> Serving {
    let bound = bind(&folder.join("pp"), |again| file_name(1, 2, again)).unwrap();
    Serving::new(viewer(), Some(bound))
}

fn call(folder: &Path) -> UnixStream {
    UnixStream::connect(folder.join("pp/1-2.sock")).unwrap()
}

/// What this caller gets until it is dropped.
fn all_of(mut stream: UnixStream) -> Vec<u8> {
    let mut all = Vec::new();
    // One that was dropped with bytes unread is reset.
    let _ = stream.read_to_end(&mut all);
    all
}

#[test]
fn another_user_gets_no_byte_and_this_one_a_line() {
    let folder = Folder::scratch();
    let mut serving = serving(folder.path());
    let mode = std::fs::metadata(folder.file("pp/1-2.sock")).unwrap();
    assert_eq!(mode.permissions().mode() & 0o777, 0o600);
    let stranger = call(folder.path());
    serving.accept(Uid::from_raw(getuid().as_raw() + 1));
    assert_eq!(all_of(stranger), b"");
    assert!(!serving.viewer.is_watched());

    let own = call(folder.path());
    serving.accept(getuid());
    assert!(serving.viewer.is_watched());
    serving.show(Instant::now());
    serving.write(Instant::now());
    drop(serving);
    let line = all_of(own);
    assert_eq!(line.iter().filter(|byte| **byte == b'\n').count(), 1);
    let snapshot: Snapshot = serde_json::from_slice(&line).unwrap();
    assert_eq!(snapshot.ranks.len(), 2);
}

#[test]
fn one_caller_too_many_and_one_that_says_something_are_dropped() {
    let folder = Folder::scratch();
    let mut serving = serving(folder.path());
    let mut callers: Vec<UnixStream> = (0..=CLIENTS).map(|_| call(folder.path())).collect();
    serving.accept(getuid());
    assert_eq!(all_of(callers.pop().unwrap()), b"");
    callers[0].write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    drop(callers.pop());
    serving.write(Instant::now());
    assert_eq!(all_of(callers.remove(0)), b"");
    assert!(serving.viewer.is_watched());
    drop(callers);
    serving.write(Instant::now());
    assert!(!serving.viewer.is_watched());
}

#[test]
fn who_does_not_read_gets_whole_lines_and_is_dropped_in_time() {
    let folder = Folder::scratch();
    let mut serving = serving(folder.path());
    let mut slow = call(folder.path());
    serving.accept(getuid());
    let now = Instant::now();
    // Until the socket takes no more.
    while serving.waiting_bytes() == 0 {
        serving.show(now);
        serving.write(now);
    }
    let waiting = serving.waiting_bytes();
    serving.show(now);
    assert_eq!(serving.waiting_bytes(), waiting, "no more is kept for it");
    serving.write(now + STUCK_VIEWER - Duration::from_millis(1));
    assert!(serving.viewer.is_watched());
    // It reads on, and has its time again.
    slow.read_exact(&mut vec![0; 64 * 1024]).unwrap();
    serving.write(now + STUCK_VIEWER);
    serving.show(now);
    serving.write(now + STUCK_VIEWER + Duration::from_millis(1));
    assert!(serving.viewer.is_watched());
    while serving.waiting_bytes() == 0 {
        serving.show(now + STUCK_VIEWER);
        serving.write(now + STUCK_VIEWER);
    }
    serving.write(now + 3 * STUCK_VIEWER);
    assert!(!serving.viewer.is_watched());
}

#[test]
fn jobs_of_one_number_have_names_of_their_own_and_what_is_left_is_replaced() {
    let folder = Folder::scratch();
    let own = folder.file("own");
    let name = |again| file_name(7, 0, again);
    let (listener, first) = bind(&own, name).unwrap();
    let (_other, second) = bind(&own, name).unwrap();
    let names = [first.clone(), second].map(|path| path.file_name().unwrap().to_owned());
    assert_eq!(names, ["7-0.sock", "7-0-1.sock"]);
    // As a kill leaves it.
    drop(listener);
    assert_eq!(bind(&own, name).unwrap().1, first);
    for (name, parsed) in [
        ("7-0.sock", Some((7, 0))),
        ("7-0-1.sock", Some((7, 0))),
        ("7-0-0.sock", None),
        ("7-0-1-2.sock", None),
        ("07-0.sock", None),
        ("7.sock", None),
        ("7-0.socket", None),
    ] {
        assert_eq!(parse(name), parsed, "{name}");
    }
    let open = folder.file("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::set_permissions(&open, PermissionsExt::from_mode(0o755)).unwrap();
    let refused = bind(&open, name).unwrap_err();
    assert_eq!(refused.to_string(), "the folder is not this user's alone");
    assert!(own_folder::check(&own).is_ok());
}

#[test]
fn pictures_are_wanted_while_somebody_looks_and_not_twice_at_once() {
    let viewer = viewer();
    assert!(!viewer.wants(Thumb::Before));
    let watching = [viewer.watch(), viewer.watch()];
    assert!(viewer.wants(Thumb::Before) && viewer.wants(Thumb::After));
    let picture = Thumbnail {
        width: 1,
        height: 1,
        rgb: vec![1, 2, 3],
    };
    viewer.set_thumbnail(Thumb::After, picture.clone());
    assert!(!viewer.wants(Thumb::After) && viewer.wants(Thumb::Before));
    assert_eq!(viewer.thumbnail(Thumb::After).as_deref(), Some(&picture));
    assert_eq!(viewer.snapshot().thumbnails, [false, true]);
    drop(watching);
    assert!(!viewer.is_watched());
}

#[test]
fn a_training_is_seen_with_its_loss_and_bubble_and_is_in_the_report() {
    let viewer = viewer();
    viewer.trained(1.0, &[]);
    assert!(viewer.snapshot().training.is_none() && viewer.training().is_none());
    let schedule = Schedule::build(Kind::GPipe, 2, 1, 1).unwrap();
    viewer.trains(Training::new("gpipe", &schedule));
    viewer.trained(1.0, &[]);
    let seen = viewer.snapshot().training.unwrap();
    assert_eq!((seen.steps, seen.loss, seen.bubble), (1, Some(1.0), None));
    // F of stage 0 and 1, B of stage 1 and 0: each a second, so that each rank is idle for half of the time.
    let seconds = [1.0, 2.0, 4.0, 5.0, 0.0, 0.0, 2.0, 3.0, 3.0, 4.0, 0.0, 0.0];
    viewer.trained(0.5, &seconds);
    let seen = viewer.snapshot().training.unwrap();
    assert_eq!(
        (seen.steps, seen.loss, seen.bubble),
        (2, Some(0.5), Some(0.5))
    );
    let mut report = Vec::new();
    viewer.write_report(&mut report).unwrap();
    let report: Value = serde_json::from_slice(&report).unwrap();
    let training = &report["measures"]["training"];
    assert_eq!(
        (&training["step_ms"], &training["bubble"]),
        (&json!(4000.0), &json!(0.5))
    );
    assert_eq!(training["stages"][1]["backward_ms"], 1000.0);
}
