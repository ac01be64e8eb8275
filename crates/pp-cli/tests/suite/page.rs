//! `pp run --live` and `pp top`: what is shown of a job, against the report of the same run.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use pp_testing::process::{Ended, HANG, Output, Process, children, rank_of, run, signal};
use pp_testing::{Folder, assert_has, read_json, until_some, video, words};
use rustix::process::Signal;
use serde_json::Value;

use crate::common::{folder, pp};
use crate::restart_support::host;

/// Chunks of a run, of two frames each.
const CHUNKS: u64 = 30;

/// A run that is shown, with its input held open.
struct Live {
    process: Process,
    runtime: PathBuf,
    host: String,
    token: String,
}

impl Live {
    fn start(folder: &Folder, args: &[&str]) -> Self {
        let mut command = host(args);
        let runtime = folder.path().to_path_buf();
        command.args(["--live", "localhost:0"]);
        command.env("XDG_RUNTIME_DIR", &runtime);
        let process = Process::start(&mut command, Output::Kept).unwrap();
        let said = process.says(&["pp: live page: http://"], Instant::now() + HANG);
        assert!(said.is_some(), "{}", process.log());
        let log = process.log();
        let url = log.split("http://").nth(1).unwrap();
        let (host, rest) = url.split_once("/?token=").unwrap();
        let token = rest.lines().next().unwrap();
        Self {
            runtime,
            host: host.into(),
            token: token.into(),
            process,
        }
    }

    /// The answer to a GET with the token: its status, and its body.
    fn get(&self, path: &str) -> (u16, String) {
        let answer = self.whole(path);
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap();
        (status.parse().unwrap(), body.into())
    }

    /// The same, with its head.
    fn whole(&self, path: &str) -> String {
        answer_to(self.ask(path))
    }

    fn ask(&self, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.host).unwrap();
        let (host, token) = (&self.host, &self.token);
        write!(
            stream,
            "GET {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n\r\n"
        )
        .unwrap();
        stream
    }

    /// The answer, as soon as there is one: more than 20 in a second are refused.
    fn take(&self, path: &str) -> String {
        until_some(path, || {
            let (status, body) = self.get(path);
            assert!(matches!(status, 200 | 429), "{status}: {body}");
            (status == 200).then_some(body)
        })
    }

    fn snapshot(&self) -> Value {
        serde_json::from_str(&self.take("/snapshot.json")).unwrap()
    }

    /// A snapshot of which this is so. It asks at half of the allowed rate, so that other callers are answered.
    fn when(&self, what: &str, is_so: impl Fn(&Value) -> bool) -> Value {
        until_some(what, || {
            let seen = Some(self.snapshot()).filter(&is_so);
            if seen.is_none() {
                std::thread::sleep(Duration::from_millis(100));
            }
            seen
        })
    }

    fn pid_of(&self, rank: u32) -> u32 {
        let all = children(self.process.id()).into_iter();
        all.into_iter()
            .find(|pid| rank_of(*pid) == Some(rank))
            .unwrap()
    }
}

fn answer_to(mut asked: TcpStream) -> String {
    let mut answer = String::new();
    asked.read_to_string(&mut answer).unwrap();
    answer
}

/// A program of the system; `None` where it is not there, which is said.
fn installed(name: &str) -> Option<Command> {
    let mut command = Command::new(name);
    let asked = command.arg("--version").stdin(Stdio::null()).output();
    if asked.is_ok() {
        return Some(Command::new(name));
    }
    assert!(
        std::env::var_os("PP_TESTS_MUST_RUN").is_none(),
        "{name} is not installed"
    );
    eprintln!("skipped: {name} is not installed");
    None
}

/// The document of this page as a browser has made it.
fn in_a_browser(url: &str, profile: &Path) -> Option<String> {
    let mut chromium = installed("chromium")?;
    chromium.args([
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
    ]);
    chromium.args([
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]);
    chromium.arg(format!("--user-data-dir={}", profile.display()));
    // Time runs on only while nothing is under way, so this ends when the page has nothing left to do.
    chromium.args(["--virtual-time-budget=60000", "--dump-dom"]);
    chromium.arg(url);
    Some(run(&mut chromium, None).succeeded().text())
}

/// The text of the first `<dd>` behind this id.
fn figure<'a>(document: &'a str, id: &str) -> &'a str {
    let from = document.split(&format!("id=\"{id}\"")).nth(1);
    let from = from.and_then(|rest| rest.split("<dd>").nth(1));
    from.and_then(|rest| rest.split('<').next())
        .unwrap_or_else(|| panic!("no {id}: {document}"))
}

#[test]
fn what_is_shown_of_a_run_with_a_loss_is_what_its_report_says() {
    let folder = folder("live");
    let json = folder.file("report.json");
    let report = json.to_str().unwrap();
    let args = "--restarts 2 --pipeline encode@0,phase_b@1,decode@0 --report";
    let args: Vec<&str> = args.split(' ').chain([report]).collect();
    let live = Live::start(&folder, &args);

    let clip = video(64, 48, "mono", 2 * CHUNKS as usize);
    let half = clip.len() / 2;
    let (first, second) = (clip[..half].to_vec(), clip[half..].to_vec());
    live.process.give(false, move |pipe| pipe.write_all(&first));
    live.when("ten chunks", |seen| {
        seen["totals"]["chunks"].as_u64() >= Some(10)
    });
    signal(live.pid_of(1), Signal::KILL);
    live.process
        .give(false, move |pipe| pipe.write_all(&second));
    let seen = live.when("all chunks, served again", |seen| {
        seen["totals"]["chunks"] == CHUNKS && seen["restarts"][0]["served_ns"].is_u64()
    });
    let url = format!("http://{}/?token={}&still", live.host, live.token);
    let document = in_a_browser(&url, &folder.file("browser"));
    let metrics = live.take("/metrics");
    let so_far: Value = serde_json::from_str(&live.take("/report.json")).unwrap();
    let [top, line] = [&["top"][..], &["top", "--json"]].map(|args| {
        let mut top = pp(args);
        // No job of another test is looked for.
        top.env("XDG_RUNTIME_DIR", &live.runtime);
        run(top.env("TMPDIR", &live.runtime), None).succeeded()
    });
    live.process.give(true, |_| Ok(()));
    Ended::of(&live.process).succeeded();

    let report = read_json(&json);
    let (measures, recovery) = (&report["measures"], &report["run"]["recoveries"][0]);
    assert_eq!(report["run"]["restarts"], 1);
    assert_eq!(seen["totals"]["chunks"], measures["chunks"]);
    assert_eq!(seen["totals"]["frames"], measures["frames"]);
    assert_eq!(seen["totals"]["restarts"], 1);
    let cause = recovery["cause"].as_str().unwrap();
    assert_eq!(seen["restarts"][0]["sentence"], cause);
    assert_eq!(so_far["chunks"], report["chunks"]);
    for key in [
        "period_ms",
        "latency_ms",
        "latency_p99_ms",
        "added_latency_ms",
    ] {
        assert_eq!(seen["recent"][key], measures[key], "{key}");
    }
    for chunk in seen["timeline"].as_array().unwrap() {
        let at = chunk["chunk_index"].as_u64().unwrap() as usize;
        assert_eq!(chunk["stages"], times(&report["chunks"][at]), "chunk {at}");
    }
    assert_has(
        &metrics,
        &[
            &format!("\npp_chunks_total {CHUNKS}\n"),
            "\npp_restarts_total 1\n",
        ],
    );
    if let Some(mut promtool) = installed("promtool") {
        let checked = run(
            promtool.args(["check", "metrics"]),
            Some(metrics.into_bytes()),
        );
        assert_eq!((checked.code, &*checked.stderr), (Some(0), ""));
    }
    let line: Value = serde_json::from_slice(&line.stdout).unwrap();
    assert_eq!(
        (&line["totals"], &line["job"]),
        (&seen["totals"], &seen["job"])
    );
    let top = String::from_utf8(top.stdout).unwrap();
    assert_has(
        &top,
        &[cause, "restarts  1 of 2", &format!("in {CHUNKS} chunks")],
    );
    if let Some(document) = document {
        assert_page(&document, &report, cause);
    }
}

/// When each stage worked on a chunk of a report.
fn times(chunk: &Value) -> Value {
    let behind = chunk["stages"].as_array().unwrap().iter();
    let behind = behind.map(|stage| [&stage["times"]["start_ns"], &stage["times"]["end_ns"]]);
    let all = [[&chunk["build_start_ns"], &chunk["build_end_ns"]]]
        .into_iter()
        .chain(behind);
    all.map(|pair| pair.map(Value::clone).to_vec())
        .collect::<Vec<_>>()
        .into()
}

/// The page shows what the report says.
fn assert_page(document: &str, report: &Value, cause: &str) {
    let measures = &report["measures"];
    assert_eq!(figure(document, "chunks"), measures["chunks"].to_string());
    assert_eq!(figure(document, "restarted-times"), "1");
    for (id, key) in [
        ("period", "period_ms"),
        ("latency", "latency_ms"),
        ("added", "added_latency_ms"),
    ] {
        let ms = measures[key].as_f64().unwrap();
        let text = figure(document, id);
        let (value, unit) = text.split_once(' ').unwrap();
        let scale = match unit {
            "s" => 1e-3,
            "ms" => 1.0,
            _ => 1e3,
        };
        let shown: f64 = value.parse().unwrap();
        assert!(
            (shown - ms * scale).abs() <= 0.01 * shown.max(1.0),
            "{key}: {text} for {ms}"
        );
    }
    let cause = as_html(cause);
    assert_has(
        document,
        &[&cause, "class=\"state running\"", "class=\"lost\""],
    );
    let last = report["chunks"].as_array().unwrap().last().unwrap();
    for times in times(last).as_array().unwrap() {
        let bar = format!(
            "data-chunk=\"{}\" data-from=\"{}\" data-to=\"{}\"",
            last["chunk_index"], times[0], times[1]
        );
        assert_has(document, &[&bar]);
    }
    // No style and no script was refused, and nothing was asked of anybody else.
    assert_has(document, &["<svg"]);
    assert!(!document.contains("https://"), "{document}");
}

/// A text as it stands in a document.
fn as_html(text: &str) -> String {
    let all = [("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")];
    let replace = |text: String, (from, to): (&str, &str)| text.replace(from, to);
    all.into_iter().fold(text.into(), replace)
}

/// Gives callers these answers, whole as a job gave them, by the path that they ask for.
fn play(listener: &TcpListener, answers: &[(&str, String)]) {
    let answer = |mut stream: TcpStream| {
        let mut asked = String::new();
        let is_read = BufReader::new(&stream).read_line(&mut asked);
        let path = asked.split([' ', '?']).nth(1).unwrap_or_default();
        let found = answers.iter().find(|(of, _)| *of == path);
        if is_read.is_ok()
            && let Some((_, answer)) = found
        {
            let _ = stream.write_all(answer.as_bytes());
        }
    };
    // A browser connects ahead, and may ask nothing: others must not wait for that.
    std::thread::scope(|scope| {
        for stream in listener.incoming() {
            scope.spawn(move || answer(stream.unwrap()));
        }
    });
}

#[test]
fn a_fault_that_ends_the_job_is_shown_as_it_is_printed() {
    let folder = folder("live_fault");
    let args = "--pipeline encode@0,phase_b@1,decode@0";
    let live = Live::start(&folder, &words(args));
    let clip = video(64, 48, "mono", 8);
    live.process.give(false, move |pipe| pipe.write_all(&clip));
    live.when("a chunk", |seen| {
        seen["totals"]["chunks"].as_u64() > Some(0)
    });
    // Who has just followed the job is waited for at its end.
    let (page, before) = (live.whole("/"), live.whole("/next.json"));
    let mut asked = live.ask("/next.json");
    signal(live.pid_of(1), Signal::STOP);
    let (last, seen) = loop {
        let answer = answer_to(asked);
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        let seen: Value = serde_json::from_str(body).unwrap();
        if seen["state"] == "ended" {
            break (answer, seen);
        }
        asked = live.ask("/next.json");
    };
    let ended = Ended::of(&live.process);
    let printed = ended.stderr.split("pp: error: ").nth(1).unwrap();
    let sentence = seen["ended"]["sentence"].as_str().unwrap();
    // Behind it stands where the recordings are.
    assert!(printed.starts_with(sentence), "{printed} for {sentence}");
    assert_eq!(seen["ended"]["code"], i64::from(ended.code.unwrap()));
    assert_eq!(
        (&seen["fault"]["rank"], &seen["fault"]["sentence"]),
        (&1.into(), &sentence.into())
    );
    assert_has(sentence, &["rank 1: heartbeat: nothing heard"]);

    let listener = TcpListener::bind("localhost:0").unwrap();
    let url = format!(
        "http://{}/?token={}",
        listener.local_addr().unwrap(),
        live.token
    );
    let answers = [
        ("/", page),
        ("/snapshot.json", before),
        ("/next.json", last),
    ];
    // Ends with this process.
    std::thread::spawn(move || play(&listener, &answers));
    if let Some(document) = in_a_browser(&url, &folder.file("browser")) {
        let alert = format!(
            "<p id=\"fault\" class=\"fault\" role=\"alert\">{}</p>",
            as_html(sentence)
        );
        assert_has(&document, &[&alert, "class=\"state bad\">ended<"]);
        assert_eq!(figure(&document, "restarted-times"), "0");
        assert!(!document.contains(">no answer<"), "{document}");
    }
}

#[test]
fn who_has_no_token_gets_nothing_and_an_address_that_is_taken_is_named() {
    let folder = folder("page_refused");
    let mut live = Live::start(&folder, &["--ranks", "1"]);
    assert_eq!(live.get("/healthz"), (200, "ok\n".into()));
    let page = live.take("/");
    assert_has(
        &page,
        &["<!doctype html>", "<style nonce=", "<script nonce="],
    );
    assert_eq!(live.get("/thumb/before").0, 404);
    let token = std::mem::replace(&mut live.token, "0".repeat(64));
    assert_eq!(live.get("/snapshot.json").0, 401);
    let mut second = host(&["--ranks", "1", "--live", &live.host]);
    run(&mut second, Some(Vec::new())).failed(4, &["listen for viewers", &live.host, "port 0"]);
    let log = live.process.log();
    assert_eq!(log.matches(&token).count(), 1, "{log}");
    live.process.give(true, |_| Ok(()));
    Ended::of(&live.process);

    folder.write("open.token", b"0123456789abcdef");
    let open = folder.file("open.token");
    for (args, words) in [
        (
            ["--live", "example.org:80"],
            "--live example.org:80: it takes ADDRESS:PORT",
        ),
        (["--live-token-file", "x"], "--live"),
    ] {
        run(&mut host(&args), Some(Vec::new())).ended(2, &[words]);
    }
    let mut elsewhere = host(&["--ranks", "1", "--live", "192.0.2.7:80"]);
    let told = "192.0.2.7 is no address of this machine";
    run(&mut elsewhere, Some(Vec::new())).failed(4, &[told]);
    let mut shared = host(&["--ranks", "1", "--live", "0", "--live-token-file"]);
    run(shared.arg(&open), Some(Vec::new()))
        .failed(2, &["--live-token-file", "open to every user"]);
    let mut none = pp(&["top", "1"]);
    run(none.env("XDG_RUNTIME_DIR", folder.path()), None).failed(2, &["process 1", "pp top lists"]);
}
