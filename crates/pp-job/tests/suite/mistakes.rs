//! What a program does wrong ends its job with one line that says so, and with the exit code of its kind.

use std::process::Command;

use pp_job::prelude::*;
use pp_testing::{Toy, bytes, done, rows};

/// A job of one process, and one of three with a supervisor.
const PIPELINES: [&str; 2] = [
    "read@0 -> count@0 -> write@0",
    "read@0 -> count@1 -> write@2",
];
/// Bytes of a slot.
const BYTES: usize = 64;

/// The stage that makes a mistake and which, the exit code, and what the line says.
const MISTAKES: &str = "
    read usage | 2 | give alto or bass
    count usage | 2 | give alto or bass
    write usage | 2 | give alto or bass
    read other | 1 | no voice
    count file | 4 | open: /no/such/voice: No such file
    read slots | 2 | read -> count has no payload slots: call .payloads()
    count slots | 2 | count -> write has no payload slots
    read large | 2 | a payload of 65 bytes does not fit a slot of 64
    count large | 2 | count: a payload of 65 bytes does not fit a slot of 64
    read writes | 2 | a payload of 65 bytes does not fit a slot of 64
    count differs | 6 | an edge differs: rank 1 has count -> write with 4 slots of 65 bytes, rank 2 has count -> write with 4 slots of 66 bytes
    count report | 2 | made 0 calls, 1 were planned
    write report | 2 | made 0 calls, 1 were planned
";

/// The stages of the program, with what they do wrong.
struct Stages<'a>(&'a str, u32);

impl Stages<'_> {
    fn makes(&self, stage: &str, mistake: &str) -> bool {
        self.0.split_once(' ') == Some((stage, mistake))
    }

    /// What the closure that opens a stage returns.
    fn open(&self, stage: &str) -> Result<Self, Error> {
        let path = "/no/such/voice".as_ref();
        if self.makes(stage, "usage") {
            return Err(Error::Usage("give alto or bass".into()));
        }
        if self.makes(stage, "other") {
            return Err(anyhow::anyhow!("no voice").into());
        }
        if self.makes(stage, "file") {
            let opened = std::fs::File::open(path);
            opened.map_err(|e| StageError::file("open", path, &e))?;
        }
        Ok(Self(self.0, 4))
    }

    fn made(&self, stage: &str) -> usize {
        BYTES + usize::from(self.makes(stage, "large"))
    }

    fn report(&self, stage: &str) -> Taken {
        match self.makes(stage, "report") {
            true => Taken::default(),
            false => Taken::of(&Toy(0), 1),
        }
    }
}

impl Source<TxLease> for Stages<'_> {
    type Plan = Toy;
    type Carry = ();

    fn poll(&mut self) -> StageResult<Offer> {
        Ok(match self.1 {
            0 => Offer::End,
            _ => Offer::Chunk(Cut::None),
        })
    }

    fn build(&mut self, _: Place, slot: &mut TxLease) -> StageResult<Built<Toy, ()>> {
        self.1 -= 1;
        let written = BYTES + usize::from(self.makes("read", "writes"));
        first_bytes(slot.bytes_mut(), written)?.fill(7);
        Ok(Built::new(Toy(0), bytes(self.made("read")), ()))
    }
}

impl Sink<RxLease> for Stages<'_> {
    type Plan = Toy;
    type Kept = Infallible;

    fn take(
        &mut self,
        _: Chunk<'_, Toy>,
        _: Option<&RxLease>,
    ) -> StageResult<Progress<Taken, Infallible>> {
        Ok(Progress::Done(self.report("write")))
    }
}

fn run(stages: &Stages<'_>, pipeline: &str) -> Result<(), Error> {
    let program = Program::<Host, _, _>::new("read", |_| Ok(Opened::new(stages.open("read")?)))
        .payloads(|[from, _], ()| {
            let rank = std::env::var("RANK").map_or(0, |rank| rank.parse().unwrap());
            let differs = u64::from(stages.makes(&from.name, "differs"));
            match stages.makes(&from.name, "slots") {
                true => 0,
                false => BYTES as u64 + rank * differs,
            }
        })
        .stage("count", |_, ()| {
            let count = stages.open("count")?;
            Ok(OnHost::new(move |chunk: Chunk<'_, Toy>, _, _| {
                let made = bytes(count.made("count"));
                Ok(Done {
                    report: count.report("count"),
                    ..done(chunk.message, made)
                })
            }))
        })
        .sink("write", |(), _| stages.open("write"));
    let pipeline = pipeline.parse()?;
    let config = Config::from_env(|name| std::env::var_os(name))?;
    Job::new(&config, &pipeline).run(|rank| rank.run(Host, Profile::new(), program))
}

#[test]
#[ignore = "the process that the other tests start"]
fn program() {
    let [mistake, pipeline] = ["MISTAKE", "PIPELINE"].map(|name| std::env::var(name).unwrap());
    pp_job::main(|| run(&Stages(&mistake, 0), &pipeline));
}

#[test]
fn a_mistake_of_the_program_ends_the_job_with_one_line_and_the_code_of_its_kind() {
    for [mistake, code, words] in rows(MISTAKES) {
        let first = usize::from(mistake.ends_with("differs"));
        for pipeline in &PIPELINES[first..] {
            let ended = Command::new(std::env::current_exe().unwrap())
                .args(["mistakes::program", "--exact", "--ignored", "--nocapture"])
                .envs([("MISTAKE", mistake), ("PIPELINE", pipeline)])
                .env("PP_FLIGHT_OPS", "0")
                .output()
                .unwrap();
            let said = String::from_utf8(ended.stderr).unwrap();
            let lines = said.lines().filter(|line| line.starts_with("pp: error: "));
            let told = format!("{mistake}, {pipeline}: {said}");
            assert_eq!(ended.status.code(), code.parse().ok(), "{told}");
            assert!(said.contains(words) && lines.count() == 1, "{told}");
        }
    }
}
