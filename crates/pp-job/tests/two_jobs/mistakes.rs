//! What a program does wrong ends its job with one line that says so, and with the exit code of its kind.

use std::process::Command;

use pp_job::prelude::*;
use pp_testing::{Toy, ToySink, ToySource, bytes, done};

/// A job of one process, and one of three with a supervisor.
const PIPELINES: [&str; 2] = [
    "read@0 -> count@0 -> write@0",
    "read@0 -> count@1 -> write@2",
];

/// What the program does wrong, the exit code, and what the line says.
const MISTAKES: [(&str, u8, &str); 7] = [
    ("source usage", 2, "give alto or bass"),
    ("stage usage", 2, "give alto or bass"),
    ("sink usage", 2, "give alto or bass"),
    ("source other", 1, "no voice"),
    (
        "read slots",
        2,
        "read -> count has no payload slots: call .payloads()",
    ),
    ("count slots", 2, "count -> write has no payload slots"),
    ("stage file", 4, "open: /no/such/voice: No such file"),
];

fn refuses(what: &str) -> Result<(), Error> {
    let path = "/no/such/voice".as_ref();
    match what {
        "usage" => Err(Error::Usage("give alto or bass".into())),
        "other" => Err(anyhow::anyhow!("no voice").into()),
        "file" => {
            Err(StageError::file("open", path, &std::fs::File::open(path).unwrap_err()).into())
        }
        _ => Ok(()),
    }
}

fn run(mistake: &str, pipeline: &str) -> Result<(), Error> {
    let (place, what) = mistake.split_once(' ').unwrap();
    let opens = |this: &str| refuses(if this == place { what } else { "" });
    let mut left = 4;
    let poll = move || {
        left -= 1;
        if left < 0 {
            Offer::End
        } else {
            Offer::Chunk(Cut::None)
        }
    };
    let build = |_, _: &mut TxLease| Built::new(Toy(0), bytes(64), ());
    let open = |_| opens("source").map(|()| Opened::new(ToySource::new(poll, build)));
    let program = Program::<Host, _, _>::new("read", open)
        .payloads(|[from, _], ()| match mistake.strip_prefix(&*from.name) {
            Some(" slots") => 0,
            _ => 64,
        })
        .stage("count", |_, ()| {
            opens("stage")?;
            Ok(OnHost::new(
                |chunk: Chunk<'_, Toy>, _: &[u8], _: &mut [u8]| Ok(done(chunk.message, bytes(64))),
            ))
        })
        .sink("write", |(), _| {
            opens("sink")?;
            Ok(ToySink::<Toy, _>::new(|_, _| Ok(())))
        });
    let pipeline = pipeline.parse()?;
    let config = Config::from_env(|name| std::env::var_os(name))?;
    Job::new(&config, &pipeline).run(|rank| rank.run(Host, Profile::new(), program))
}

#[test]
#[ignore = "the process that the other tests start"]
fn program() {
    let [mistake, pipeline] = ["MISTAKE", "PIPELINE"].map(|name| std::env::var(name).unwrap());
    pp_job::main(|| run(&mistake, &pipeline));
}

#[test]
fn a_mistake_of_the_program_ends_the_job_with_one_line_and_the_code_of_its_kind() {
    for (mistake, code, words) in MISTAKES {
        for pipeline in PIPELINES {
            let ended = Command::new(std::env::current_exe().unwrap())
                .args(["mistakes::program", "--exact", "--ignored", "--nocapture"])
                .envs([
                    ("MISTAKE", mistake),
                    ("PIPELINE", pipeline),
                    ("PP_FLIGHT_OPS", "0"),
                ])
                .output()
                .unwrap();
            let said = String::from_utf8(ended.stderr).unwrap();
            let lines = said.lines().filter(|line| line.starts_with("pp: error: "));
            let told = format!("{mistake}, {pipeline}: {said}");
            assert_eq!(ended.status.code(), Some(code.into()), "{told}");
            assert!(said.contains(words) && lines.count() == 1, "{told}");
        }
    }
}
