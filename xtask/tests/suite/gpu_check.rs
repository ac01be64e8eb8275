//! `gpu-check.sh` with stand-ins for everything that it runs: what it records, and how it ends.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::Value;

/// What `pp` writes.
const OUTPUTS: &str = r#": >out.y4m; : >ptx.y4m; : >cust.so.y4m; : >calm.y4m; : >again.y4m
while (($#)); do [[ $1 == --output ]] && : >"$2"; shift; done"#;

/// A bundle in which every program is a script that succeeds.
struct Bundle(PathBuf);

impl Bundle {
    fn new(name: &str) -> Bundle {
        let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("gpu-check-{name}"));
        let _ = fs::remove_dir_all(&place);
        for part in ["bin", "tests", "clip", "plugins", "path"] {
            fs::create_dir_all(place.join(part)).unwrap();
        }
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("gpu-check.sh");
        {
            let _alone = alone();
            fs::copy(script, place.join("gpu-check.sh")).unwrap();
        }
        fs::write(place.join("about.json"), "{\"commit\":\"abc\"}\n").unwrap();
        let bundle = Bundle(place);
        fs::write(bundle.0.join("clip/cup.y4m"), "").unwrap();
        bundle.program("bin/pp", OUTPUTS);
        bundle.program("bin/pp-trials", ": >calm.y4m; : >again.y4m");
        bundle.program("path/nvidia-smi", "printf '0\\n1\\n'");
        // A Python without torch or NCCL that takes every file for JSON: serde looks at it here.
        bundle.program("path/python3", "[[ $2 == *json.load* ]]");
        bundle.program(
            "path/compute-sanitizer",
            "while [[ $1 == -* ]]; do shift 2; done; \"$@\"",
        );
        for test in ["gpu_oracle", "conformance", "race"] {
            let body = "echo \"$0 $*\"; echo 'test result: ok. 1 passed'";
            bundle.program(&format!("tests/{test}"), body);
        }
        bundle
    }

    fn program(&self, name: &str, body: &str) {
        let path = self.0.join(name);
        let _alone = alone();
        fs::write(&path, format!("#!/bin/bash\n{body}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn run(&self, args: &[&str]) -> (Output, Value) {
        self.run_with(args, None)
    }

    fn run_with(&self, args: &[&str], peers: Option<&Path>) -> (Output, Value) {
        let output = self.start(args, peers).wait_with_output().unwrap();
        let report = self.0.join("report.json");
        let report = fs::read_to_string(report).unwrap_or_else(|_| "null".to_owned());
        let report = serde_json::from_str(&report).unwrap_or_else(|e| panic!("{e}: {report}"));
        (output, report)
    }

    fn start(&self, args: &[&str], peers: Option<&Path>) -> Child {
        let path = format!("{}:/usr/bin:/bin", self.0.join("path").display());
        let mut check = Command::new(self.0.join("gpu-check.sh"));
        check
            .arg("--out")
            .arg(self.0.join("report.json"))
            .args(args)
            .env("PATH", path)
            .env_remove("PEERS")
            .env_remove("CUDA_HOME")
            .env_remove("CUDA_MPS_PIPE_DIRECTORY")
            .envs(peers.map(|place| ("PEERS", place)))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let _alone = alone();
        check.spawn().unwrap()
    }
}

/// Held while a program is written and while one is started: a child that is forked in between would
/// hold the file open for writing, and no process could run it.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn step<'a>(report: &'a Value, name: &str) -> &'a Value {
    let steps = report["steps"].as_array().unwrap();
    let found = steps.iter().find(|step| step["name"] == name);
    found.unwrap_or_else(|| panic!("no step {name} in {report}"))
}

#[test]
fn figures_are_medians_over_the_runs_and_say_whether_they_meet_their_mark() {
    let bundle = Bundle::new("figures");
    // Runs 1, 2 and 3 of each benchmark give 0.93, 0.96 and 0.99.
    bundle.program(
        "bin/pp",
        &format!(
            r#"n=$(cat "$0.runs" 2>/dev/null || echo 0)
[[ "$*" == *22118400*"--decode-ms 0.2"*json && "$*" != *10000* ]] && {{ echo $((n + 1)) >"$0.runs"; echo "{{\"efficiency_asked\":0.9$((3 + 3 * n)),\"efficiency_asked_by_mean\":0.9,\"period_ms\":0.2}}"; }}
{OUTPUTS}"#
        ),
    );
    let (output, report) = bundle.run(&[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert_eq!(report["failed"], serde_json::json!([]));
    assert_eq!(report["bundle"]["commit"], "abc");
    assert_eq!(report["gpus"], 2);
    let figure = &report["figures"][0];
    assert_eq!(figure["name"], "efficiency, 22 MB, stages 0.2 ms");
    assert_eq!(figure["value"], 0.96);
    assert_eq!(figure["runs"], 3);
    assert_eq!(figure["met"], true);
    assert!(text.contains("0.96 (min 0.95: met), 3 runs"), "{text}");
    let by_mean = &report["figures"][1];
    assert_eq!(by_mean["name"], "  over the mean period");
    assert_eq!(
        (&by_mean["value"], &by_mean["mark"]),
        (&0.9.into(), &Value::Null)
    );
    let (_, report) = bundle.run(&["--runs", "1"]);
    // The fourth call of the stand-in gives 0.912.
    assert_eq!(report["figures"][0]["met"], false);
}

#[test]
fn ours_is_set_beside_the_peer_of_the_same_size() {
    let bundle = Bundle::new("peers");
    bundle.program(
        "bin/pp",
        r#"[[ $2 == link ]] && echo '{"transport":"nccl","figures":[{"bytes":4,"one_way_us":9.5,"round_trip_us":36.0},{"bytes":22118400,"one_way_us":73.4,"round_trip_us":1}]}'
: >out.y4m; : >ptx.y4m; : >cust.so.y4m; : >calm.y4m; : >again.y4m"#,
    );
    bundle.program(
        "path/python3",
        r#"case "$*" in
*find_spec*) echo /nowhere/nccl ;;
*torch_pilot.py)
    echo '{"what": "torch_one_way", "bytes": 22118400, "us": 73.0}'
    echo '{"what": "torch_round_trip_host", "bytes": 4, "us": 81.0}'
    echo '{"what": "torch_pilot", "bytes": 65536, "decode_ms": 0.2, "phase_b_ms": 0.2, "efficiency": 0.4}'
    echo '{"what": "torch_pilot", "bytes": 22118400, "decode_ms": 0, "phase_b_ms": 0, "period_ms": 0.67, "efficiency": 0.0}'
    echo '{"what": "torch_pilot", "bytes": 22118400, "decode_ms": 0.2, "phase_b_ms": 0.2, "efficiency": 0.25}' ;;
*attention.py*--only*) ;;
*"import torch"* | *json.load*) ;;
*) exit 1 ;;
esac"#,
    );
    bundle.program(
        "path/nvcc",
        r#"while [[ $1 != -o ]]; do shift; done
cat >"$2" <<'MADE'
#!/bin/bash
echo '{"what":"raw_nccl_round_trip_host","bytes":4,"us":24.00}'
echo '{"what":"raw_nccl_one_way","bytes":22118400,"us":71.90,"GBps":307.6}'
echo '{"what":"limit_pipeline","bytes":22118400,"decode_ms":0.00,"phase_b_ms":0.00,"slots":4,"period_ms":0.077,"efficiency":0.0000}'
echo '{"what":"limit_pipeline","bytes":22118400,"decode_ms":0.20,"phase_b_ms":0.20,"slots":4,"period_ms":0.2,"efficiency":0.9773}'
MADE
chmod +x "$2""#,
    );
    let (output, report) = bundle.run(&["--only", "^(link|peer)", "--runs", "1"]);
    assert!(output.status.success());
    let figures = report["figures"].as_array().unwrap();
    let figure = |name: &str| {
        let mut named = figures
            .iter()
            .filter(|f| f["name"].as_str().unwrap().contains(name));
        let found = named.next();
        let found = found.unwrap_or_else(|| panic!("no figure {name} in {figures:?}"));
        (found["value"].as_f64().unwrap(), found["met"].clone())
    };
    assert_eq!(figure("22118400 bytes, messages"), (1.02, true.into()));
    assert_eq!(
        figure("round trip over raw NCCL, 4 bytes, messages"),
        (1.5, Value::Null)
    );
    // Stages of 0.2 ms, then none; one way; round trip.
    let values = |name: &str| -> Vec<f64> {
        let named = figures
            .iter()
            .filter(|f| f["name"].as_str().unwrap().contains(name));
        named.map(|f| f["value"].as_f64().unwrap()).collect()
    };
    assert_eq!(values("by hand"), [0.9773, 0.077]);
    assert_eq!(values("in PyTorch"), [0.25, 0.67, 1.015, 3.375]);
}

#[test]
fn edges_over_the_copy_engine_stand_beside_those_over_nccl_and_the_limit_by_hand() {
    let bundle = Bundle::new("p2p");
    bundle.program(
        "bin/pp",
        r#"[[ "$*" == *p2p* ]] && e=0.99 l=0.0263 r=1.004 || e=0.96 l=0.05 r=1.06
case "$*" in
*--sync*) echo '{"latency_ms":'$l'}' ;;
*--against*) echo '{"period_ms":2,"against":{"bytes":64,"ratio":'$r',"ratio_p10":0.9}}' ;;
*"--decode-ms 0.2"*) echo '{"efficiency_asked":'$e'}' ;;
esac"#,
    );
    bundle.program(
        "bin/pp-trials",
        r#"case $1 in
words) echo '{"wrong_messages":0,"wrong_words":0}' ;;
kills) echo '{"back_in_service":{"median_ms":500.5,"worst_ms":700.5},"bare_start":{"median_ms":450.5,"worst_ms":500.5},"over_median_ms":50.0,"over_worst_ms":250.0}' ;;
esac"#,
    );
    bundle.program(
        "path/nvcc",
        r#"while [[ $1 != -o ]]; do shift; done
cat >"$2" <<'MADE'
#!/bin/bash
echo '{"what":"copy_engine_pipeline","bytes":22118400,"decode_ms":0.20,"phase_b_ms":0.20,"period_ms":0.2,"efficiency":0.9925}'
echo '{"what":"copy_engine_round_trip","bytes":4,"behind_a_kernel":false,"ms":0.01380,"us":13.8}'
by=20; [[ $1 == round_trip ]] && by=22
echo '{"what":"copy_engine_round_trip","bytes":4,"behind_a_kernel":true,"ms":0.0'$by'50,"us":'$by'.5}'
MADE
chmod +x "$2""#,
    );
    let only = "^p2p-(words|limit.*|kills|memcheck.*|overlap-.*(22M-0.2ms|behind|cost).*)$";
    let (output, report) = bundle.run(&["--only", only, "--runs", "1"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    let figures = report["figures"].as_array().unwrap();
    let figure = |name: &str| {
        let named = figures.iter().find(|f| f["name"] == name);
        let named = named.unwrap_or_else(|| panic!("no figure {name} in {text}"));
        (named["value"].as_f64().unwrap(), named["met"].as_bool())
    };
    for (name, expected) in [
        ("efficiency, 22 MB, stages 0.2 ms, p2p", (0.99, Some(true))),
        ("efficiency, 22 MB, stages 0.2 ms, nccl", (0.96, None)),
        ("  the same by hand", (0.9925, None)),
        (
            "a round trip behind a kernel over that by hand",
            (1.168, Some(true)),
        ),
        (
            "2 ms of products, 22 MB over 64 bytes, p2p",
            (1.004, Some(true)),
        ),
        ("2 ms of products, 22 MB over 64 bytes, nccl", (1.06, None)),
        ("wrong words of messages", (0.0, Some(true))),
        (
            "median_ms of a killed rank until its next result",
            (500.5, None),
        ),
        ("worst_ms of the start of a bare rank", (500.5, None)),
        (
            "ms that the former takes longer, median",
            (50.0, Some(true)),
        ),
        ("  worst, over the same median", (250.0, Some(false))),
    ] {
        assert_eq!(figure(name), expected, "{name}");
    }
    // A filter that names no test proves nothing.
    bundle.program("tests/conformance", "echo 'test result: ok. 0 passed'");
    let (output, report) = bundle.run(&["--only", "^p2p-conformance$"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(report["failed"], serde_json::json!(["p2p-conformance"]));
}

#[test]
fn runs_without_a_figure_do_not_count_and_a_figure_over_its_mark_is_marked() {
    let bundle = Bundle::new("share");
    bundle.program(
        "bin/pp",
        r#"n=$(cat "$0.runs" 2>/dev/null || echo 0)
echo $((n + 1)) >"$0.runs"
((n)) && idle=0.025 || idle=null
echo '{"measures":{"stages":[{"stage":"phase_b","idle_share":'$idle'}],"frames_per_second":900}}' >report.json"#,
    );
    let (_, report) = bundle.run(&["--only", "^720p-written"]);
    let figures = report["figures"].as_array().unwrap();
    let figure = |name: &str| {
        let figure = figures.iter().find(|f| f["name"] == name);
        let figure = figure.unwrap_or_else(|| panic!("no {name} in {figures:?}"));
        let part = |key: &str| figure[key].clone();
        serde_json::json!([part("value"), part("runs"), part("met")])
    };
    assert_eq!(
        figure("  share of the time that phase_b is idle"),
        serde_json::json!([0.025, 2, false])
    );
    let frames = figure("frames a second, 1280x720, written");
    assert_eq!(frames, serde_json::json!([900, 3, null]));
}

#[test]
fn programs_of_another_directory_run_beside() {
    let bundle = Bundle::new("more");
    bundle.program(
        "path/python3",
        "[[ $* == *find_spec* ]] && echo /nowhere/nccl || [[ $* == *'import torch'* || $* == *torch.distributed.run*a.py || $* == *json.load* ]]",
    );
    bundle.program("path/nvcc", "exit 5");
    let more = bundle.0.join("more");
    fs::create_dir_all(&more).unwrap();
    fs::write(more.join("a.py"), "").unwrap();
    fs::write(more.join("b.cu"), "").unwrap();
    let (output, report) = bundle.run_with(&["--only", "^more-"], Some(&more));
    // What is compared with may fail.
    assert!(output.status.success());
    assert_eq!(step(&report, "more-a.py")["status"], "passed");
    assert_eq!(step(&report, "more-b.cu")["exit"], 5);
    assert_eq!(report["steps"].as_array().unwrap().len(), 2);
}

#[test]
fn a_step_that_fails_stops_nothing_and_whatever_it_prints_is_kept_as_json() {
    let bundle = Bundle::new("failure");
    bundle.program(
        "tests/gpu_oracle",
        r#"printf 'a "quote" and a \\ back\tslash\r\n\xff\x01 bytes\n{"value":NaN}\n{"cut":'; exit 3"#,
    );
    let (output, report) = bundle.run(&["--only", "^(kernels-oracle|conformance)$"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(report["failed"], serde_json::json!(["kernels-oracle"]));
    let failed = step(&report, "kernels-oracle");
    assert_eq!(
        (&failed["status"], &failed["exit"]),
        (&"failed".into(), &3.into())
    );
    assert_eq!(failed["results"], serde_json::json!([{ "value": null }]));
    let text = failed["text"].as_str().unwrap();
    assert!(
        text.contains("a \"quote\" and a \\ back\tslash\n?? bytes"),
        "{text:?}"
    );
    assert_eq!(step(&report, "conformance")["status"], "passed");
    assert_eq!(report["steps"].as_array().unwrap().len(), 2);
}

#[test]
fn a_step_that_hangs_is_ended_with_its_children() {
    let bundle = Bundle::new("hang");
    bundle.program("tests/conformance", "sleep 600 & sleep 600");
    let (output, report) = bundle.run(&["--only", "^conformance$", "--budget", "8"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(step(&report, "conformance")["status"], "no time");
}

#[test]
fn an_interrupt_ends_the_step_and_what_was_done_is_written() {
    let bundle = Bundle::new("interrupt");
    let begun = bundle.0.join("begun");
    // Programs that a step runs must get their own SIGINT: bit 1 is set where it is ignored.
    bundle.program(
        "tests/gpu_oracle",
        r#"echo "{\"ignored\":$((0x$(sed -n 's/SigIgn:\t//p' /proc/self/status) & 2))}""#,
    );
    let hang = format!(
        "echo $$ >{0}.part; mv {0}.part {0}; sleep 600",
        begun.display()
    );
    bundle.program("tests/conformance", &hang);
    // As the real one where the signal comes right behind its fork: it ends, and its command does not.
    let early = r#"[[ $* == *conformance* ]] || exec /usr/bin/timeout "$@"
[[ ${LEADS-} ]] || LEADS=1 exec setsid "$0" "$@"
shift 2; trap 'exit 143' TERM; "$@" & wait"#;
    bundle.program("path/timeout", early);
    let mut script = bundle.start(&["--only", "^(kernels-oracle|conformance|job)$"], None);
    let own = loop {
        if let Ok(own) = fs::read_to_string(&begun) {
            break own;
        }
        assert!(script.try_wait().unwrap().is_none(), "no step has begun");
        std::thread::sleep(std::time::Duration::from_millis(10));
    };
    // A SIGINT may be ignored here, as in all that runs in the background of a shell.
    let mut kill = Command::new("kill");
    let killed = kill.arg(script.id().to_string()).status().unwrap();
    assert!(killed.success());
    assert_eq!(script.wait().unwrap().code(), Some(143));
    assert!(
        !Path::new("/proc").join(own.trim()).exists(),
        "the step runs on"
    );
    let report = fs::read_to_string(bundle.0.join("report.json")).unwrap();
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(step(&report, "kernels-oracle")["results"][0]["ignored"], 0);
    assert_eq!(step(&report, "conformance")["status"], "interrupted");
    assert_eq!(report["steps"].as_array().unwrap().len(), 2);
}

#[test]
fn a_required_step_that_cannot_run_fails_the_whole() {
    let bundle = Bundle::new("none");
    bundle.program("path/nvidia-smi", "exit 9");
    let (output, report) = bundle.run(&["--only", "^(device|doctor|race|job|link-1)$"]);
    assert_eq!(output.status.code(), Some(1));
    let failed = serde_json::json!(["device", "doctor", "race", "job"]);
    assert_eq!(report["failed"], failed);
    assert_eq!(step(&report, "job")["status"], "skipped");
    assert_eq!(step(&report, "job")["text"], "too few GPUs: 0 of 2");
    assert_eq!(step(&report, "link-1")["status"], "skipped");
    assert_eq!(step(&report, "link-1")["required"], false);
}

#[test]
fn on_one_gpu_two_ranks_share_it_and_what_needs_two_is_skipped_by_name() {
    let bundle = Bundle::new("one");
    bundle.program("path/nvidia-smi", "printf '0\\n'");
    bundle.program("bin/pp-trials", "echo \"$*\"");
    let only = "^(device|race|p2p-words|p2p-placements|fault-shutdown-computing)$";
    let (output, report) = bundle.run(&["--only", only]);
    assert_eq!(output.status.code(), Some(0), "{report}");
    let race = step(&report, "race");
    assert_eq!(race["status"], "skipped");
    assert_eq!(race["text"], "too few GPUs: 1 of 2");
    let words = step(&report, "p2p-words")["text"].as_str().unwrap();
    assert!(words.contains("words --transport p2p --devices cuda:0,cuda:0"));
    assert_eq!(step(&report, "p2p-placements")["status"], "passed");
    let cells = step(&report, "fault-shutdown-computing")["text"].as_str();
    assert!(cells.unwrap().contains("--only /computing /interrupted"));
}

#[test]
fn on_one_gpu_the_same_steps_run_under_an_mps_of_their_own_which_is_ended() {
    let bundle = Bundle::new("mps");
    bundle.program("path/nvidia-smi", "printf '0\\n'");
    // It is there for whoever names its folder.
    bundle.program(
        "path/nvidia-cuda-mps-control",
        r#"case $1 in
-d) : >"$CUDA_MPS_PIPE_DIRECTORY/up" ;;
wait) read -r ;;
*) read -r order; rm "$CUDA_MPS_PIPE_DIRECTORY/up"; echo "$order" >>"$0.orders" ;;
esac"#,
    );
    bundle.program(
        "bin/pp",
        r#"[[ -f $CUDA_MPS_PIPE_DIRECTORY/up ]] && l=0.03 how=under || l=0.3 how=without
case "$*" in
doctor) echo "a GPU, $how MPS" ;;
*--sync*) echo '{"latency_ms":'$l',"latency_p99_ms":0.9}' ;;
*--against*) echo '{"period_ms":2,"against":{"bytes":4,"ratio":1.004,"ratio_p10":0.9}}' ;;
esac"#,
    );
    bundle.program(
        "bin/pp-trials",
        r#"echo "${CUDA_MPS_PIPE_DIRECTORY:-none} $*"; [[ $CUDA_MPS_PIPE_DIRECTORY$1 != */mpskills ]]"#,
    );
    bundle.program(
        "path/nvcc",
        r#"while [[ $1 != -o ]]; do shift; done
cat >"$2" <<'MADE'
#!/bin/bash
echo '{"what":"copy_engine_cpu_cost","work":"gemm","units":80,"ratio":1.0100,"ratio_mean":1.0}'
echo '{"what":"copy_engine_round_trip","bytes":4,"behind_a_kernel":true,"ms":0.02500,"ms_p99":0.06000}'
MADE
chmod +x "$2""#,
    );
    let only = "^((p2p|mps)-(words|kills|limit|behind-4-1|memcheck)|cpu-cost-gemm)$";
    let (_, report) = bundle.run(&["--only", only]);
    assert_eq!(report["failed"], serde_json::json!(["mps-kills"]));
    let text = |name| step(&report, name)["text"].as_str().unwrap();
    let words = " words --transport p2p --devices cuda:0,cuda:0 ";
    assert!(text("p2p-words").contains(&format!("none{words}")));
    assert!(text("mps-words").contains(&format!("/mps{words}")));
    assert!(text("p2p-memcheck").contains(&format!("none{words}")));
    let control = bundle.0.join("path/nvidia-cuda-mps-control");
    let orders = control.with_extension("orders");
    assert_eq!(fs::read_to_string(orders).unwrap(), "quit\n");
    let figures = report["figures"].as_array().unwrap();
    let named = |name: &str| -> Vec<(f64, Option<bool>)> {
        let named = figures.iter().filter(|f| f["name"] == name);
        let value = |f: &Value| (f["value"].as_f64().unwrap(), f["met"].as_bool());
        named.map(value).collect()
    };
    let expected = [(12.0, Some(false)), (1.2, Some(true))];
    assert_eq!(named("  over that by hand"), expected);
    assert_eq!(named("  the 99th percentile by hand"), [(0.06, None); 2]);
    assert_eq!(named("  less that by hand"), [(-0.006, Some(true))]);

    let why = || {
        let (output, report) = bundle.run(&["--only", "^mps-words$"]);
        assert!(output.status.success());
        assert_eq!(step(&report, "mps-words")["status"], "skipped");
        step(&report, "mps-words")["text"].clone()
    };
    let mut other = {
        let _alone = alone();
        let mut other = Command::new(&control);
        other.arg("wait").stdin(Stdio::piped()).spawn().unwrap()
    };
    let found = why();
    drop(other.stdin.take());
    other.wait().unwrap();
    let remedy = "another MPS runs; end it with: echo quit | nvidia-cuda-mps-control";
    assert_eq!(found, remedy);
    bundle.program("path/nvidia-cuda-mps-control", "echo no daemon >&2; exit 1");
    assert_eq!(why(), "MPS cannot start: no daemon");
}

#[test]
fn both_races_and_both_checkers_are_required() {
    let bundle = Bundle::new("required");
    bundle.program("tests/race", "[[ ! ${NCCL_P2P_DISABLE:-} ]]");
    bundle.program("tests/gpu_oracle", "[[ $1 == --small && $2 == encode ]]");
    let (output, report) = bundle.run(&["--only", "^(race|sanitizer)"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(report["failed"], serde_json::json!(["race-no-p2p"]));
    fs::remove_file(bundle.0.join("path/compute-sanitizer")).unwrap();
    let (_, report) = bundle.run(&["--only", "^sanitizer"]);
    let failed = serde_json::json!(["sanitizer-memcheck", "sanitizer-racecheck"]);
    assert_eq!(report["failed"], failed);
}

#[test]
fn a_fault_that_is_felt_fails_the_whole_and_one_without_time_does_not() {
    let bundle = Bundle::new("faults");
    // The output after three deaths is another one.
    bundle.program(
        "bin/pp-trials",
        r#"case "$*" in
*--restarts*) [[ $PP_FAULT == kill@1:* ]] && echo other >again.y4m ;;
shutdown*--json*) echo '{"what":"cells"}' ;;
faults*--json) echo '{"what":"faults"}' ;;
*) : >calm.y4m ;;
esac"#,
    );
    let (output, report) = bundle.run(&["--only", "^fault-"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(report["failed"], serde_json::json!(["fault-restart"]));
    for (name, what) in [("fault-shutdown-left", "cells"), ("fault-rules", "faults")] {
        assert_eq!(step(&report, name)["results"][0]["what"], what);
    }
    assert_eq!(step(&report, "fault-revoke")["status"], "skipped");
    // The budget ends the first one, and no other begins.
    bundle.program("bin/pp-trials", "sleep 600");
    let (output, report) = bundle.run(&["--only", "^fault-", "--budget", "4"]);
    assert!(output.status.success());
    for name in ["fault-rules", "fault-restart"] {
        assert_eq!(step(&report, name)["status"], "no time");
    }
}

#[test]
fn nccl_of_the_wheel_is_aborted_with_too() {
    let bundle = Bundle::new("wheel");
    let wheel = bundle.0.join("nccl/lib");
    fs::create_dir_all(&wheel).unwrap();
    fs::write(wheel.join("libnccl.so.2"), "").unwrap();
    let script = format!(
        r#"case "$*" in *find_spec*) echo {} ;; *json.load*) ;; *) exit 1 ;; esac"#,
        bundle.0.join("nccl").display()
    );
    bundle.program("path/python3", &script);
    bundle.program("tests/conformance", r#"echo "$PP_NCCL_LIB $*""#);
    let (output, report) = bundle.run(&["--only", "^fault-revoke$"]);
    assert!(output.status.success());
    let text = step(&report, "fault-revoke")["text"].as_str().unwrap();
    assert!(text.contains("nccl/lib/libnccl.so.2 "), "{text}");
    assert!(text.contains("abort"), "{text}");
}

#[test]
fn a_report_that_cannot_be_written_is_known_before_the_first_step() {
    let bundle = Bundle::new("nowhere");
    let nowhere = bundle.0.join("nowhere/report.json");
    let (output, _) = bundle.run(&["--out", nowhere.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "");
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write"));
}

#[test]
fn wrong_use_is_said_and_the_steps_can_be_listed() {
    let bundle = Bundle::new("use");
    for args in [
        &["--only"][..],
        &["--only", "("],
        &["--only", "^nothing$"],
        &["--budget", "08"],
    ] {
        let (output, _) = bundle.run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    }
    let (output, report) = bundle.run(&["--list"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("\nconformance\n"),
        "{text}"
    );
    assert_eq!(report, Value::Null);
}
