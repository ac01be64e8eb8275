//! The user loses no data: no result replaces a file that the command needs, what was whole before a break is written,
//! and what the system refuses is an error that leaves everything as it was.

use std::fs::{self, File};
use std::io::Read as _;
use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use pp_testing::{
    Folder, c_library,
    process::{after, finish, run},
    read_json, video, words,
};

use crate::common::{files, folder, pp};

fn copy(input: &Path, more: &[&str]) -> Command {
    let mut command = pp(&["run", "--denoise-steps", "0", "--input"]);
    command.arg(input).args(more);
    command
}

#[test]
fn no_result_replaces_another_file_of_the_command() {
    let (folder, input, _) = files("clashes", &video(32, 16, "420jpeg", 5));
    folder.write("plugin.so", b"no library");
    folder.write("a.flight", b"no recording");
    symlink("in.y4m", folder.file("soft")).unwrap();
    fs::hard_link(&input, folder.file("hard")).unwrap();
    symlink("new.y4m", folder.file("dangling")).unwrap();
    let before = contents(&folder);
    let job = words("run --denoise-steps 0 --ranks 1 --input in.y4m");
    let bench = ["bench", "overlap", "--chunks", "9"];
    let flight = ["flight", "a.flight"];
    let copy = ["bench", "video", "--input", "in.y4m"];
    let cases: [(&[&str], &[&str]); 14] = [
        (&job, &["--report", "in.y4m"]),
        (&job, &["--trace", "./in.y4m"]),
        (&job, &["--timeline", "../clashes/in.y4m"]),
        (&job, &["--report", "soft"]),
        (&job, &["--report", "hard"]),
        (&job, &["--output", "in.y4m"]),
        (&job, &["--output", "soft"]),
        (&job, &["--output", "plugin.so", "--kernels", "./plugin.so"]),
        (&job, &["--output", "new.y4m", "--report", "./new.y4m"]),
        (&job, &["--output", "dangling", "--timeline", "new.y4m"]),
        (&job, &["--output", "-", "--report", "/dev/stdout"]),
        (&bench, &["--trace", "x.json", "--timeline", "./x.json"]),
        (&copy, &["--output", "./in.y4m"]),
        (&flight, &["--trace", "./a.flight"]),
    ];
    for (command, more) in cases {
        let is_run = command[0] == "run";
        let mut command = pp(&[command, more].concat());
        // It stands alone, without the rest of a launcher's environment.
        command.envs(is_run.then_some(("RANK", "1")));
        let ended = run(command.current_dir(folder.file("")), None);
        ended.failed(2, &["name the same place", more[0]]);
        assert!(contents(&folder) == before, "{more:?}: a file has changed");
    }
}

fn contents(folder: &Folder) -> Vec<(String, Option<Vec<u8>>)> {
    let read = |name: String| {
        let bytes = fs::read(folder.file(&name)).ok();
        (name, bytes)
    };
    folder.names().into_iter().map(read).collect()
}

#[test]
fn a_file_that_is_open_already_is_not_replaced() {
    let folder = folder("descriptor");
    folder.write("in.y4m", &video(32, 16, "420jpeg", 5));
    let log = folder.write("log", b"before\n");
    for (path, open) in [("/dev/fd/5", "5>>log"), ("/dev/stderr", "2>>log")] {
        let script = format!(
            "{} run --ranks 1 --input in.y4m --report {path} {open}",
            env!("CARGO_BIN_EXE_pp")
        );
        let mut shell = Command::new("sh");
        let ended = run(
            shell.args(["-c", &script]).current_dir(folder.file("")),
            None,
        )
        .ended(4, &[]);
        let said = format!("{}{}", ended.stderr, fs::read_to_string(&log).unwrap());
        assert!(
            said.starts_with("before") || said.contains("before\n"),
            "{said}"
        );
        assert!(said.contains("open already"), "{said}");
    }
}

/// Everybody may replace what is in the folder, but for what is protected.
#[test]
fn what_this_user_may_not_write_is_not_replaced() {
    let (folder, input, _) = files("protected", &video(32, 16, "420jpeg", 5));
    let kept = folder.write("kept.y4m", b"precious");
    fs::set_permissions(&kept, fs::Permissions::from_mode(0o444)).unwrap();
    // Root may write everything: the program runs as somebody else, who can reach none of these files by their names.
    let place = std::env::temp_dir().join(format!("pp-protected-{}", std::process::id()));
    fs::create_dir(&place).unwrap();
    fs::set_permissions(&place, fs::Permissions::from_mode(0o777)).unwrap();
    let [copy, target, clip] = ["pp", "kept.y4m", "in.y4m"].map(|name| place.join(name));
    // By another process: a child of this one that inherits a descriptor for writing keeps the copy from being run.
    let mut copying = Command::new("cp");
    copying.arg(env!("CARGO_BIN_EXE_pp")).arg(&copy);
    run(&mut copying, None).succeeded();
    fs::set_permissions(&copy, fs::Permissions::from_mode(0o755)).unwrap();
    fs::copy(&kept, &target).unwrap();
    fs::copy(&input, &clip).unwrap();
    let mut command = Command::new(&copy);
    if rustix::process::geteuid().is_root() {
        command.uid(65534).gid(65534);
    }
    command
        .current_dir("/")
        .args(["run", "--ranks", "1", "--input"]);
    let ended = run(command.arg(&clip).arg("--output").arg(&target), None);
    let left = fs::read(&target).unwrap();
    fs::remove_dir_all(&place).unwrap();
    ended.failed(4, &["kept.y4m", "make it writable"]);
    assert_eq!(left, b"precious");
}

#[test]
fn a_link_to_a_file_that_does_not_exist_yet_is_followed() {
    let (folder, input, _) = files("dangling", &video(32, 16, "420jpeg", 5));
    let link = folder.file("link.y4m");
    symlink("target.y4m", &link).unwrap();
    let mut command = copy(&input, &["--ranks", "1", "--output"]);
    run(command.arg(&link), None).succeeded();
    assert!(link.is_symlink(), "the link was replaced");
    assert_eq!(
        fs::read(folder.file("target.y4m")).unwrap(),
        fs::read(&input).unwrap()
    );
}

#[test]
fn whole_frames_before_a_break_are_written_and_counted() {
    let folder = folder("breaks");
    let output = folder.file("out.y4m");
    let good = video(32, 16, "420jpeg", 40);
    let stride = 6 + 32 * 16 * 3 / 2;
    let end_of = |frames: usize| good.len() - (40 - frames) * stride;
    let mut no_marker = good.clone();
    no_marker[end_of(30)] = b'X';
    let cases = [
        ("truncated", 39, good[..good.len() - 100].to_vec()),
        ("truncated", 1, good[..end_of(1) + 3].to_vec()),
        ("no FRAME marker", 30, no_marker),
    ];
    for (word, whole, bytes) in &cases {
        let input = folder.write("in.y4m", bytes);
        for ranks in ["1", "2"] {
            for (from, stdin) in [(&*input, None), (Path::new("-"), Some(bytes.clone()))] {
                let _ = fs::remove_file(&output);
                let report = folder.file("report.json");
                let mut command = copy(from, &["--ranks", ranks, "--output"]);
                command.arg(&output).arg("--report").arg(&report);
                let frames = format!("; {whole} frames were written to");
                run(&mut command, stdin).failed(3, &[word, &frames]);
                assert!(
                    fs::read(&output).unwrap() == good[..end_of(*whole)],
                    "{word} {from:?}"
                );
                let report = read_json(report);
                assert_eq!(report["measures"]["frames"], *whole);
            }
        }
    }
}

/// Stands in for the function of the C library.
const NO_ROOM: &str =
    "#include <errno.h>\nint fsync(int fd) { (void)fd; errno = ENOSPC; return -1; }\n";

#[test]
fn an_error_that_shows_only_when_a_file_is_stored_leaves_the_old_one() {
    let folder = folder("unstored");
    let library = c_library(&folder, "library", NO_ROOM, &[]);
    let input = folder.write("in.y4m", &video(32, 16, "420jpeg", 5));
    let result = folder.write("result", b"older");
    for flag in ["--output", "--report"] {
        for ranks in ["1", "2"] {
            let mut command = copy(&input, &["--ranks", ranks, flag]);
            let ended = run(command.arg(&result).env("LD_PRELOAD", &library), None);
            ended.failed(4, &["result: complete, but cannot be stored", "space"]);
            assert_eq!(fs::read(&result).unwrap(), b"older");
        }
    }
    assert_eq!(
        folder.names(),
        ["in.y4m", "library.c", "library.so", "result"]
    );
}

/// What is left of a job shows by a variable that all its processes inherit.
fn assert_none_has(mark: &str) {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let environments =
        processes.filter_map(|process| fs::read(process.path().join("environ")).ok());
    let with_mark = |environment: &Vec<u8>| {
        environment
            .windows(mark.len())
            .any(|part| part == mark.as_bytes())
    };
    assert_eq!(
        environments.filter(with_mark).count(),
        0,
        "a process lives on"
    );
}

#[test]
fn limits_of_the_system_are_named() {
    let (folder, input, _) = files("limits", &video(64, 64, "420jpeg", 40));
    let output = folder.write("out.y4m", b"older");
    let limited = |limit: &str, ranks: &str| {
        let mark = format!("PP_TEST_MARK={limit} {}", std::process::id());
        let mut command = copy(&input, &["--ranks", ranks, "--output"]);
        command
            .arg(&output)
            .env("PP_TEST_MARK", &mark["PP_TEST_MARK=".len()..]);
        let ended = run(&mut after(limit, &command), None);
        assert_none_has(&mark);
        let is_older = fs::read(&output).unwrap() == b"older";
        assert_eq!(is_older, ended.code != Some(0), "{limit}: {}", ended.stderr);
        fs::write(&output, b"older").unwrap();
        ended
    };
    for ranks in ["1", "2"] {
        limited("ulimit -f 2", ranks).failed(4, &["ulimit -f"]);
        // From where no process can start to where all is well.
        for files in 6..24 {
            let ended = limited(&format!("ulimit -n {files}"), ranks);
            // Below that the loader itself ends the process.
            if ended.code != Some(0) && !ended.stderr.contains("shared libraries") {
                ended.failed(4, &["ulimit -n"]);
            }
        }
        for kib in (20_000..300_000).step_by(20_000) {
            let ended = limited(&format!("ulimit -v {kib}"), ranks);
            if ended.code != Some(0) && !ended.stderr.contains("shared libraries") {
                ended.failed(4, &["ulimit -v"]);
            }
        }
    }
}

#[test]
fn standard_streams_that_are_closed_or_a_terminal_are_refused() {
    let (folder, input, output) = files("streams", &video(32, 16, "420jpeg", 5));
    let to_stdout = copy(&input, &["--output", "-"]);
    let report = copy(&input, &["--report", "/dev/stdout"]);
    for command in [to_stdout, report] {
        run(&mut after("exec >&-", &command), None).failed(4, &["standard output is closed"]);
    }
    let mut from_stdin = copy(Path::new("-"), &["--output"]);
    from_stdin.arg(&output);
    run(&mut after("exec <&-", &from_stdin), None).failed(4, &["standard input is closed"]);

    let (mut main, mut other) = (0, 0);
    let null = std::ptr::null_mut();
    // SAFETY: both places hold a descriptor; what is null is not asked for.
    let opened =
        unsafe { libc::openpty(&mut main, &mut other, null, null as *mut _, null as *mut _) };
    assert_eq!(opened, 0);
    // SAFETY: both were just opened, and are owned by nothing else.
    let [main, terminal] = [main, other].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    let mut command = copy(&input, &["--output", "-"]);
    let child = command
        .stdin(Stdio::null())
        .stdout(terminal)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(command);
    finish(child).failed(2, &["terminal", "pipe it"]);
    // Nothing was written; the other end is closed, which a terminal says with an error.
    let mut seen = Vec::new();
    let _ = File::from(main.as_fd().try_clone_to_owned().unwrap()).read_to_end(&mut seen);
    assert!(seen.is_empty(), "{seen:?}");
    assert_eq!(folder.names(), ["in.y4m"]);
}

#[test]
fn the_largest_depth_goes_with_restarts() {
    let (_folder, input, output) = files("deepest", &video(32, 16, "420jpeg", 12));
    for (depth, frames) in [("64", "4"), ("63", "1"), ("64", "1")] {
        let more = format!("--restarts 1 --depth {depth} --frames-per-chunk {frames} --output");
        let mut command = copy(&input, &words(&more));
        run(command.arg(&output), None).succeeded();
        assert_eq!(fs::read(&output).unwrap(), fs::read(&input).unwrap());
    }
}
