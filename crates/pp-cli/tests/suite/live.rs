//! `pp run --late drop`: the source is never held up, the output says what is missing, and a report plays the same again.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::channel;
use std::time::Instant;

use pp_testing::process::{Ended, HANG, Output, Process, children, rank_of, run, signal};
use pp_testing::{Folder, read_json, scenes, words};
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::{assert_keys_are_documented, folder, pp};

const FRAMES: usize = 900;
const SIZE: usize = 64 * 48;

/// Scenes of 37 frames; every tenth frame has a parameter.
fn clip() -> Vec<u8> {
    let plain = scenes(64, 48, "mono", FRAMES, 37);
    let (header, frames) = plain.split_at(plain.len() - FRAMES * (6 + SIZE));
    let mut clip = header.to_vec();
    for (number, frame) in frames.chunks_exact(6 + SIZE).enumerate() {
        match number % 10 {
            3 => clip.extend(
                format!("FRAME Xn={number}\n")
                    .bytes()
                    .chain(frame[6..].iter().copied()),
            ),
            _ => clip.extend_from_slice(frame),
        }
    }
    clip
}

/// The frames of a film.
fn frames(film: &[u8]) -> Vec<&[u8]> {
    let end = |bytes: &[u8]| 1 + bytes.iter().position(|byte| *byte == b'\n').unwrap();
    let mut rest = &film[end(film)..];
    let mut frames = Vec::new();
    while !rest.is_empty() {
        let (frame, behind) = rest[end(rest)..].split_at(SIZE);
        frames.push(frame);
        rest = behind;
    }
    frames
}

/// Runs over pipes while nobody takes the output: the source gives the clip, and most of it cannot wait. `then` is done to the
/// process before it has the last byte, so no rank has ended, and before the output is taken.
fn live(folder: &Folder, args: &[&str], then: impl FnOnce(&Process)) -> (Ended, Value) {
    let json = folder.file("live.json");
    let mut command = pp(&words(
        "run --input - --output - --late drop --frames-per-chunk 3",
    ));
    command.args(args).arg("--report").arg(&json);
    let process = Process::start(&mut command, Output::Held).unwrap();
    let (tx, all_is_read) = channel();
    let mut whole = clip();
    let last = whole.split_off(whole.len() - 1);
    process.give(false, move |pipe| {
        pipe.write_all(&whole)?;
        let _ = tx.send(());
        Ok(())
    });
    all_is_read
        .recv_timeout(HANG)
        .expect("the source was held up");
    then(&process);
    process.give(true, move |pipe| pipe.write_all(&last));
    process.read_to(u64::MAX);
    let ended = Ended::of(&process).succeeded();
    let report = read_json(&json);
    assert_keys_are_documented(&report);
    (ended, report)
}

/// Plays a report again.
fn replay(folder: &Folder, report: &Path, args: &[&str]) -> (Ended, Value) {
    let (input, json) = (folder.write("in.y4m", &clip()), folder.file("again.json"));
    let mut command = pp(&words("run --output - --frames-per-chunk 3"));
    command
        .arg("--input")
        .arg(input)
        .arg("--replay")
        .arg(report);
    command.args(args).arg("--report").arg(&json);
    (run(&mut command, None).succeeded(), read_json(&json))
}

/// The numbers of the frames that a run had, from the gaps in its report.
fn kept(report: &Value) -> Vec<bool> {
    let mut kept = vec![true; FRAMES];
    for gap in report["run"]["played"]["gaps"].as_array().unwrap() {
        let [first, count] = [0, 1].map(|at| gap[at].as_u64().unwrap() as usize);
        kept[first..first + count].fill(false);
    }
    kept
}

#[test]
fn frames_that_are_dropped_are_repeated_or_left_out() {
    let folder = folder("live_fill");
    let whole = clip();
    let whole = frames(&whole);
    for fill in ["repeat", "skip"] {
        let args = ["--denoise-steps", "0", "--ranks", "2", "--fill", fill];
        let (ended, report) = live(&folder, &args, |_| {});
        let kept = kept(&report);
        let dropped = kept.iter().filter(|kept| !**kept).count();
        assert!(dropped > FRAMES / 2, "{dropped} of {FRAMES} dropped");
        assert_eq!(report["measures"]["skipped_frames"], dropped);
        assert_eq!(report["measures"]["frames"], FRAMES - dropped);
        let first = kept.iter().position(|kept| *kept).unwrap();
        let mut last = whole[first];
        let mut wanted = Vec::new();
        for (frame, kept) in whole.iter().zip(kept) {
            if kept {
                last = frame;
            }
            if kept || fill == "repeat" {
                wanted.push(last);
            }
        }
        let made = frames(&ended.stdout);
        assert_eq!(
            (made.len(), report["run"]["output_frames"].as_u64()),
            (wanted.len(), Some(wanted.len() as u64))
        );
        assert!(made == wanted, "{fill}: other frames");
    }
}

#[test]
fn what_was_live_is_played_again_to_the_same_bytes() {
    let folder = folder("live_again");
    let noise = ["--denoise-steps", "3", "--ranks", "2", "--add-noise", "12"];
    let (ended, report) = live(&folder, &noise, |_| {});
    let (again, played) = replay(&folder, &folder.file("live.json"), &noise);
    assert!(ended.stdout == again.stdout, "{}", again.stderr);
    let refused = |input: &Path, args: &str, code, told: &str| {
        let mut command = pp(&words(&format!("run --frames-per-chunk 3 {args}")));
        let report = folder.file("live.json");
        command
            .arg("--input")
            .arg(input)
            .arg("--replay")
            .arg(report);
        run(&mut command, None).ended(code, &[told]);
    };
    let options = "--denoise-steps 3 --ranks 2 --add-noise 12";
    let mut other = clip();
    let first = other.iter().position(|byte| *byte == b'\n').unwrap();
    other[first + 1 + b"FRAME\n".len()] ^= 1;
    let (input, other) = (folder.file("in.y4m"), folder.write("other.y4m", &other));
    refused(
        &input,
        &format!("{options} --seed 2"),
        2,
        "seed was 1 and is 2",
    );
    refused(&other, options, 3, "begins with other frames");
    for key in ["played", "psnr_after_db", "output_frames"] {
        assert_eq!(report["run"][key], played["run"][key], "{key}");
    }
    assert!(report["run"]["psnr_after_db"].is_f64());
}

#[test]
fn a_kill_between_gaps_changes_no_byte() {
    let folder = folder("live_kill");
    let steps = ["--denoise-steps", "2", "--ranks", "2"];
    let kill = |process: &Process| {
        // Chunks with gaps before them are in flight.
        process.read_to(40_000);
        assert!(process.writes(40_000, Instant::now() + HANG));
        let ranks = children(process.id());
        let rank_1 = ranks.into_iter().find(|pid| rank_of(*pid) == Some(1));
        assert!(signal(rank_1.unwrap(), Signal::KILL));
    };
    let (ended, report) = live(&folder, &[&steps[..], &["--restarts", "3"]].concat(), kill);
    assert_eq!(report["run"]["restarts"], 1);
    let (again, _) = replay(&folder, &folder.file("live.json"), &steps);
    assert!(ended.stdout == again.stdout, "{}", again.stderr);
}

/// A report that names other steps than a run has by itself.
fn report_of(folder: &Folder, played: &Value) -> std::path::PathBuf {
    let run = json!({"frames_per_chunk": 3, "cuts": "flush", "played": played});
    folder.write("made.json", json!({ "run": run }).to_string().as_bytes())
}

#[test]
fn steps_of_a_report_are_made_again_on_any_ranks() {
    let folder = folder("live_steps");
    let played =
        json!({"gaps": [[3, 6], [30, 7]], "steps": [[3, 4], [1, 2], [2, 9]], "chunks_left_out": 0});
    let report = report_of(&folder, &played);
    let play = |ranks| {
        replay(
            &folder,
            &report,
            &["--denoise-steps", "3", "--ranks", ranks],
        )
    };
    let ((one, _), (two, said)) = (play("1"), play("2"));
    assert!(one.stdout == two.stdout);
    assert_eq!(said["run"]["played"], played);
    let mut other = played.clone();
    other["steps"][1][0] = json!(2);
    let report = report_of(&folder, &other);
    let (other, _) = replay(&folder, &report, &["--denoise-steps", "3", "--ranks", "1"]);
    assert!(one.stdout != other.stdout, "the steps make no difference");
}

#[test]
fn what_cannot_keep_up_is_refused_with_the_remedy() {
    let folder = folder("live_refused");
    folder.write("in.y4m", &scenes(32, 16, "mono", 9, 9));
    let text = String::from_utf8(scenes(32, 16, "mono", 0, 1)).unwrap();
    folder.write(
        "no_rate.y4m",
        &[text.replace("F25:1", "F0:0").as_bytes(), &clip()[..0]].concat(),
    );
    folder.write("no.json", b"{}");
    let played = json!({"gaps": [[1, 1]], "steps": [[9, 1]], "chunks_left_out": 0});
    let path = report_of(&folder, &played);
    folder.write("deep.json", &std::fs::read(path).unwrap());
    let mut full = played.clone();
    full["chunks_left_out"] = json!(1);
    report_of(&folder, &full);
    let refused = |args: &str, code, said: &[&str]| {
        let mut command: Command = pp(&words(&format!("run {args}")));
        run(command.current_dir(folder.file("")), Some(Vec::new())).failed(code, said);
    };
    for (args, code, said) in [
        ("--input in.y4m --late drop", 2, "--pace, or a pipe"),
        ("--input - --pace", 2, "leave --pace out"),
        ("--input no_rate.y4m --pace", 3, "F25:1"),
        ("--input in.y4m --max-latency 80", 2, "80ms or 1.5s"),
        ("--input in.y4m --max-latency 0ms", 2, "1ms to 3600s"),
        (
            "--input in.y4m --pace --late drop --max-latency 1s --min-steps 9",
            2,
            "--denoise-steps is",
        ),
        (
            "--input in.y4m --pace --late drop --max-latency 1s --min-steps 1 --pipeline encode@0,phase_b@0,phase_b@1,decode@0",
            2,
            "--min-steps is 2 at least",
        ),
        (
            "--input in.y4m --pace --late drop --max-latency 1s --min-steps 1 --pipeline encode@0,(phase_b@0)*steps,decode@0",
            2,
            "laps of a ring",
        ),
        (
            "--input in.y4m --max-latency 1s --min-steps 1",
            2,
            "--late drop",
        ),
        ("--input in.y4m --replay no.json", 2, "no report of pp run"),
        ("--input in.y4m --replay made.json", 2, "lists were full"),
        (
            "--input in.y4m --replay deep.json",
            2,
            "--frames-per-chunk 3",
        ),
        (
            "--input in.y4m --frames-per-chunk 3 --replay deep.json",
            2,
            "--denoise-steps 9",
        ),
        (
            "--input in.y4m --frames-per-chunk 3 --denoise-steps 9 --replay deep.json",
            3,
            "frames 1 to 2 are missing",
        ),
        (
            "--input in.y4m --cuts hard --replay no.json",
            2,
            "--cuts flush or off",
        ),
    ] {
        refused(args, code, &[said]);
    }
}
