//! What a job that ends early keeps of its output, and the job that goes on behind it to the same bytes.

use std::fs;
use std::path::Path;

use pp_testing::process::{Held, run, signal};
use pp_testing::{assert_has, scenes, until, video, words};
use rustix::process::Signal;

use crate::build::rust_plugin;
use crate::common::{files, pp, run_args};

/// Bytes of a frame in a file of the clip.
const FRAME: usize = b"FRAME\n".len() + 64 * 48;
/// Bytes of the first line of the clip.
const HEADER: usize = b"YUV4MPEG2 W64 H48 F25:1 Ip A1:1 Cmono\n".len();

/// The output of a run with these options, written to `to`.
fn output(input: &Path, to: &Path, more: &str) -> Vec<u8> {
    run(&mut pp(&run_args(input, to, &words(more))), None).succeeded();
    fs::read(to).unwrap()
}

#[test]
fn what_a_job_kept_whose_source_or_sink_was_killed_is_gone_on_in_to_the_same_bytes() {
    const OPTIONS: &str =
        "--transport host --denoise-steps 2 --pipeline encode@0,phase_b@1,decode@2";
    let clip = scenes(64, 48, "mono", 200, 70);
    for rank in [2, 0] {
        let (folder, input, out) = files(&format!("kept_{rank}"), &clip);
        let kept = folder.file("out.y4m.part");
        let options = format!("{OPTIONS} --keep-partial");
        // All but the last frames come; so the job is in the middle when it is struck.
        let some = clip[..HEADER + 150 * FRAME].to_vec();
        let held = Held::start(
            &mut pp(&run_args(Path::new("-"), &out, &words(&options))),
            some,
        );
        let has_frames =
            || fs::metadata(&kept).is_ok_and(|about| about.len() as usize > 40 * FRAME);
        until(has_frames);
        assert!(!out.exists());
        signal(held.rank(rank), Signal::KILL);
        let said = held.drained().stderr;
        let skip = said.split("the same command with --skip ").nth(1);
        let skip = skip.and_then(|text| text.split_whitespace().next());
        let skip: usize = skip
            .and_then(|n| n.parse().ok())
            .unwrap_or_else(|| panic!("{said}"));
        let part = fs::read(&kept).unwrap();
        assert_eq!(part.len(), HEADER + skip * FRAME, "{said}");

        let whole = output(&input, &folder.file("whole.y4m"), OPTIONS);
        let rest = output(
            &input,
            &folder.file("rest.y4m"),
            &format!("{OPTIONS} --skip {skip}"),
        );
        assert!(
            [&part[..], &rest[HEADER..]].concat() == whole,
            "rank {rank}, {skip} frames"
        );
        // The same without what was kept, and a frame that was cut off behind it.
        let left = [&part[..], &b"FRAME\nhalf"[..]].concat();
        fs::write(&kept, &left).unwrap();
        let mut other = clip.clone();
        other[HEADER + b"FRAME\n".len()] ^= 1;
        let other = folder.write("other.y4m", &other);
        for (input, steps, told) in [
            (&input, 3, "denoise_steps was 2 and is 3"),
            (&other, 2, "begins with other frames"),
        ] {
            let options = format!("{options} --skip {skip} --denoise-steps {steps}");
            let options = options.replacen("--denoise-steps 2 ", "", 1);
            run(&mut pp(&run_args(input, &out, &words(&options))), None).ended(4, &[told]);
        }
        assert!(fs::read(&kept).unwrap() == part);
        fs::write(&kept, left).unwrap();
        let gone_on = output(&input, &out, &format!("{options} --skip {skip}"));
        assert!(
            gone_on == whole && !kept.exists(),
            "rank {rank}, {skip} frames"
        );
        assert!(!folder.file("out.y4m.part.json").exists());
    }
}

#[test]
fn a_skip_to_any_frame_gives_the_bytes_of_the_whole_run() {
    let (folder, input, out) = files("skip", &scenes(64, 48, "mono", 60, 23));
    let temporal = rust_plugin("pp-plugin-temporal");
    let temporal = format!(
        "--kernels {} --pipeline encode@0,average@0,decode@0",
        temporal.display()
    );
    let kinds = [
        "--denoise-steps 2",
        "--denoise-steps 2 --cuts off --recompute --frames-per-chunk 3",
        "--denoise-steps 2 --strength 4 --add-noise 6 --ranks 2 --transport host",
        &temporal,
    ];
    for options in kinds {
        let options = match options.contains("--ranks") || options.contains("--pipeline") {
            true => options.into(),
            false => format!("{options} --ranks 1"),
        };
        let whole = output(&input, &folder.file("whole.y4m"), &options);
        for skip in [1, 14, 23, 24, 41, 59, 60] {
            let rest = output(&input, &out, &format!("{options} --skip {skip}"));
            let is_same = rest[HEADER..] == whole[HEADER + skip * FRAME..];
            assert!(is_same, "{options} --skip {skip}");
        }
    }
}

#[test]
fn what_cannot_be_gone_on_in_is_refused_with_the_remedy() {
    let (folder, input, out) = files("kept_refused", &video(64, 48, "mono", 8));
    let refused = |more: &str, code, said: &[&str]| {
        run(&mut pp(&run_args(&input, &out, &words(more))), None).ended(code, said);
    };
    let copy = "--denoise-steps 0 --ranks 1";
    refused(
        &format!("{copy} --skip 4 --cuts hard"),
        2,
        &["--cuts hard drops frames"],
    );
    refused(
        &format!("{copy} --skip 9"),
        3,
        &["8 frames are read, and --skip 9 is behind them"],
    );
    let kept = folder.file("out.y4m.part");
    refused(
        &format!("{copy} --skip 4 --keep-partial"),
        4,
        &["out.y4m.part: is not there"],
    );
    let clip = fs::read(&input).unwrap();
    fs::write(&kept, &clip[..HEADER + 3 * FRAME + 9]).unwrap();
    let number = "3 whole frames are kept; the same command with --skip 3 goes on in it";
    refused(
        &format!("{copy} --keep-partial"),
        4,
        &["is left of a job that ended early", number],
    );
    refused(
        &format!("{copy} --keep-partial --skip 4"),
        4,
        &["how it was made is not known", "out.y4m.part.json"],
    );
    refused(
        &format!("{copy} --keep-partial --report {}", kept.display()),
        2,
        &["--keep-partial and --report name the same place"],
    );
    let left = fs::read(&kept).unwrap();
    assert!(left == clip[..HEADER + 3 * FRAME] && !out.exists());
    let alone = run(pp(&["run", "--keep-partial", "--input"]).arg(&input), None);
    assert_eq!(alone.code, Some(2));
    assert_has(&alone.stderr, &["--output"]);
}
