//! What people are used to from other programs: short flags, a file of options, JSON, completions, manual pages.

use std::collections::BTreeSet;
use std::process::Command;

use pp_testing::process::{Ended, run};
use pp_testing::{assert_has, rows, video, words};
use serde_json::Value;

use crate::common::{files, folder, pp};

#[test]
fn a_file_gives_options_and_the_command_line_wins() {
    let (folder, input, output) = files("options", &video(32, 16, "420jpeg", 9));
    let text = format!(
        "frames-per-chunk = 3\nranks = 2\ndepth = 3\ndenoise-steps = 0\ncuts = 'off'\nadd-noise = 2.5\nrecompute = true\n\
         verify = 'off'\njson = true\nkernels = 'cpu'\ndevices = ['cpu', 'cpu']\noutput = {output:?}\ninput = 'no.y4m'\n\
         quiet = false\nplugin-arg = []\nreport = 'no.json'\n"
    );
    // The ranks cannot read it a second time.
    let mut command = pp(&["run", "--config", "/dev/stdin", "--depth", "4", "--json"]);
    let ended = run(command.arg(&input), Some(text.into_bytes())).succeeded();
    let report = ended.json();
    let run = &report["run"];
    let found =
        ["frames_per_chunk", "ranks", "depth", "denoise_steps"].map(|key| run[key].as_u64());
    assert_eq!(found, [3, 2, 4, 0].map(Some));
    let found = (&run["add_noise"], &run["cuts"], &run["recompute"]);
    assert_eq!(found, (&2.5.into(), &"off".into(), &true.into()));
    let command = run["command"].as_array().unwrap()[1..].to_vec();
    let command = Value::from(command).to_string();
    assert_has(&command, &["--ranks=2", "--devices=cpu,cpu"]);
    assert!(
        !command.contains("config") && !command.contains("no.y4m"),
        "{command}"
    );
    assert!(output.exists());
    assert_eq!(folder.names(), ["in.y4m", "out.y4m"]);
}

#[test]
fn a_file_that_cannot_be_taken_is_refused_by_key() {
    let (folder, input, _) = files("bad_config", &video(32, 16, "420jpeg", 1));
    let input = input.to_str().unwrap();
    for [text, told] in rows(
        "
        depht = 4 | o.toml: depht: ; no option of pp run; did you mean depth?
        zzzzzzz = 4 | zzzzzzz; pp run --help lists them
        config = 'x' | config: no option
        depth = 'x' | o.toml: --depth x: it takes a whole number from 1 to 256
        depth = [1, 2] | depth: it takes one value and no list
        depth = 1979-05-27 | depth: it takes a text, a number or a list
        recompute = 1 | recompute: it takes true or false
        verbose = 'x' | verbose: it takes true, false or a number
        depth = 4 4 | o.toml: line 1 is no TOML
        plugin-arg = ['a=1', 'a=2'] | a is given twice
    ",
    ) {
        let file = folder.write("o.toml", text.as_bytes());
        let args = ["run", input, "--config", file.to_str().unwrap()];
        let told: Vec<&str> = told.split("; ").collect();
        run(&mut pp(&args), None).failed(2, &told);
    }
    let file = folder.write("o.toml", b"cuts = 'soft'\n");
    let file = file.to_str().unwrap();
    let told = [
        "soft",
        "flush, hard, off",
        "the options of",
        "o.toml are part of",
    ];
    run(&mut pp(&["run", input, "--config", file]), None).ended(2, &told);
    let missing = folder.file("no.toml");
    let missing = missing.to_str().unwrap();
    run(&mut pp(&["run", input, "--config", missing]), None).failed(4, &["no.toml"]);
    let twice = ["run", input, "--config", file, "--config", file];
    run(&mut pp(&twice), None).ended(2, &["--config", "cannot be used multiple times"]);
    // What the command line excludes is left out.
    let file = folder.write(
        "o.toml",
        b"phase-b-ms = 7\nbytes = 64\nchunks = 4\njson = true\n",
    );
    let args = [
        "bench",
        "overlap",
        "--stages",
        "0,0",
        "--config",
        file.to_str().unwrap(),
    ];
    let report = run(&mut pp(&args), None).succeeded().json();
    assert_eq!(report["bytes"], 64);
}

#[test]
fn a_quiet_run_from_a_name_to_a_name_says_nothing() {
    let clip = video(32, 16, "420jpeg", 5);
    let (folder, input, output) = files("quiet", &clip);
    let fields = String::from_utf8_lossy(&clip[..40]).replace("Ip", "It");
    let clip = [fields.as_bytes(), &clip[40..]].concat();
    folder.write("in.y4m", &clip);
    let told = |args: &str, log: Option<&str>| {
        let mut command = pp(&words(&format!("run --denoise-steps 0 {args} -o")));
        command.arg(&output).arg(&input);
        if let Some(log) = log {
            command.env("PP_LOG", log);
        }
        let Ended { stdout, stderr, .. } = run(&mut command, None).succeeded();
        assert!(std::fs::read(&output).unwrap() == clip);
        (String::from_utf8(stdout).unwrap(), stderr)
    };
    for ranks in ["--ranks 1", "--ranks 2"] {
        assert_eq!(
            told(&format!("-q {ranks}"), None),
            <(String, String)>::default()
        );
        let (stdout, stderr) = told(ranks, None);
        assert!(stdout.contains("frames per second") && stderr.contains("interlaced"));
        let (_, stderr) = told(&format!("-v {ranks}"), None);
        assert!(
            stderr.contains(" INFO ") && !stderr.contains("DEBUG"),
            "{stderr}"
        );
        let (_, stderr) = told(&format!("-vv {ranks}"), Some(""));
        assert_has(&stderr, &["DEBUG"]);
        let (_, stderr) = told(&format!("-vv {ranks}"), Some("off"));
        assert!(!stderr.contains("INFO"), "{stderr}");
    }
    let twice = ["run", "-i", "a.y4m", "b.y4m"];
    run(&mut pp(&twice), None).ended(2, &["--input", "cannot be used with"]);
    run(&mut pp(&["run", "-q", "no.y4m"]), None).failed(4, &["no.y4m"]);
    run(&mut pp(&["plan", "a.y4m", "--width", "64"]), None).ended(2, &["--width"]);
}

#[test]
fn results_are_one_json_object_and_nothing_else() {
    let doctor = run(&mut pp(&["doctor", "--json"]), None);
    let findings = doctor.json();
    assert_eq!(findings["works"], doctor.code == Some(0));
    let names = findings["findings"].as_array().unwrap().iter();
    let names: Vec<_> = names.map(|found| found["name"].as_str().unwrap()).collect();
    assert_has(
        &names.join(","),
        &["cores", "memory", "gpus", "nccl", "ffmpeg"],
    );
    let list = run(&mut pp(&["schedule", "list", "--json"]), None).succeeded();
    assert_eq!(list.json()["schedules"][2]["pytorch"], "1F1B");
    assert_eq!(list.json()["schedules"][0]["pytorch"], Value::Null);

    let (folder, input, _) = files("json", &video(32, 16, "420jpeg", 6));
    let report = |steps: &str, every: &str, name: &str| {
        let mut command = pp(&words(&format!(
            "run --json --denoise-steps {steps} --verify every={every}"
        )));
        let ended = run(command.args(["--frames-per-chunk", "1"]).arg(&input), None).succeeded();
        assert_has(&ended.stderr, &["frames per second"]);
        assert_eq!(
            ended.json()["run"]["verify"]["every"],
            format!("every={every}")
        );
        folder.write(name, &ended.stdout)
    };
    let [one, same] = ["one", "same"].map(|name| report("1", "1", name));
    let (other, few) = (report("2", "1", "other"), report("1", "2", "few"));
    let beside = |second, code| {
        let mut command = pp(&["verify", "--json"]);
        run(command.arg(&one).arg(second), None)
            .ended(code, &[])
            .json()
    };
    let [same, other, few] = [beside(&same, 0), beside(&other, 11), beside(&few, 3)];
    assert_eq!(
        (&same["same"], &same["difference"]),
        (&6.into(), &Value::Null)
    );
    let difference = other["difference"].as_str().unwrap();
    assert_has(difference, &["chunk 0: encode: tensor denoising_step_list"]);
    assert_eq!(few["only_first"].to_string(), "[1,3,5]");
}

#[test]
fn shells_complete_commands_and_options() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let text = run(&mut pp(&["completions", shell]), None)
            .succeeded()
            .text();
        assert_has(&text, &["denoise-steps", "schedule", "config"]);
        assert!(!text.contains("worker"), "{shell} completes what is hidden");
    }
    let folder = folder("completions");
    let text = run(&mut pp(&["completions", "bash"]), None)
        .succeeded()
        .text();
    let file = folder.write("pp.bash", text.as_bytes());
    let complete = |line: &str| {
        let script = format!(
            "source {file:?}; COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _pp pp \"${{COMP_WORDS[-1]}}\" \"${{COMP_WORDS[-2]}}\"; echo \"${{COMPREPLY[@]}}\""
        );
        run(Command::new("bash").args(["-c", &script]), None)
            .succeeded()
            .text()
    };
    assert_eq!(complete("pp run --reco").trim(), "--recompute");
    assert_eq!(complete("pp schedule sim").trim(), "simulate");
    assert_eq!(complete("pp run --cuts f").trim(), "flush");
}

#[test]
fn each_command_that_is_shown_has_a_page() {
    let first = run(&mut pp(&["man"]), None).succeeded().text();
    assert_has(&first, &[".TH pp 1", "pp\\-schedule(1)", "PP_STUCK_MS"]);
    let folder = folder("man");
    let pages = folder.file("share/man1");
    run(pp(&["man"]).arg(&pages), None).succeeded();
    let names: BTreeSet<String> = std::fs::read_dir(&pages)
        .unwrap()
        .map(|page| page.unwrap().file_name().into_string().unwrap())
        .collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let expected = [
        "pp-run.1",
        "pp-bench-link.1",
        "pp-schedule-check.1",
        "pp-plugin.1",
        "pp.1",
    ];
    assert_has(&names.join(" "), &expected);
    assert!(!names.contains(&"pp-plugin-worker.1"), "{names:?}");
    let page = std::fs::read_to_string(pages.join("pp-run.1")).unwrap();
    assert_has(
        &page,
        &[
            "pp\\-run",
            "\\-\\-denoise\\-steps",
            "\\fB\\-o\\fR",
            "\\-\\-config",
        ],
    );
    let file = folder.write("file", b"");
    run(pp(&["man"]).arg(&file), None).failed(4, &["write pages"]);
}
