//! `pp-trials words`: whether each word that is read of a message is the word that was sent.
//!
//! Messages of random sizes go from rank 0 to rank 1 and back. Each is a passage of one book of random words, which both
//! ranks have: its number says which. A slot is poisoned as soon as it was read, and before it is written. So a word that
//! is read before it has arrived, or after its slot was given to another message, is a wrong one. Rank 1 reads each message
//! twice: it copies the words into the answer, and adds their digest. Rank 0 compares both with the book, copies the words
//! of the answer to the host, and digests them too. On a GPU a kernel digests and the copy engine copies, by turns one
//! before the other, while a memory stream and matrix products keep the GPU busy, one of them, both, or none.

mod book;
mod on_gpu;
mod on_host;
mod work;

use std::cell::Cell;
use std::convert::Infallible;
use std::ffi::OsString;
use std::fmt;
use std::rc::Rc;

use pp_command::backend::{self, Backend};
use pp_command::env::Env;
use pp_command::{TransportChoice, whole};
use pp_contract::pipeline::MAX_DEPTH;
use pp_contract::{DType, DeviceName, Manifest, Message, Pipeline, Rank, TensorSpec};
use pp_job::{Config, Error, Finished, Job, Opened, Profile, Program, ThisRank};
use pp_runtime::core::Cut;
use pp_runtime::stage::{
    Built, Chunk, Done, Offer, Place, Progress, Sink, Source, Stage, StageResult, Taken,
};
use pp_testing::{Random, Toy};
use pp_transport::edge::Edges;
use pp_transport::host::Host;
use serde::Serialize;

use self::book::{Book, Passage, Wrong};
use self::on_gpu::OnGpu;
use self::on_host::OnHost;
use self::work::{DIGEST_ROOM, Words};
use crate::hook::{Breakable, FaultyBackend, Hook};

/// There and back.
const PIPELINE: &str = "write@0 -> echo@1 -> check@0";
/// The tensors of a message; an answer alone has the second one.
const WORDS: &str = "words";
const DIGEST: &str = "digest";

/// The arguments of `pp-trials words`.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct WordsArgs {
    /// How payloads travel between the ranks.
    #[arg(long, value_enum, default_value = "host")]
    transport: TransportChoice,
    /// The device of each rank, as for pp run.
    #[arg(long, value_name = "cpu|cuda|cuda:N,...", value_delimiter = ',', action = clap::ArgAction::Set)]
    devices: Vec<DeviceName>,
    /// Messages each way, 1 to 18446744073709551615.
    #[arg(long, value_name = "N", default_value_t = 100_000, value_parser = whole(1..=u64::MAX))]
    messages: u64,
    /// The largest message in bytes, 64 to 1073741824; the smallest has 4.
    #[arg(long, value_name = "N", default_value_t = 22_118_400, value_parser = whole(64..=1_u64 << 30))]
    max_bytes: u64,
    /// Slots of each edge, 1 to 256.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = whole(1..=MAX_DEPTH))]
    depth: u32,
    /// The same seed, 0 to 18446744073709551615, gives the same sizes and words.
    #[arg(long, value_name = "S", default_value_t = 1, value_parser = whole(0..=u64::MAX))]
    seed: u64,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// The result: exit code 1 where something is wrong.
#[derive(Serialize)]
struct WordsReport<'a> {
    transport: &'static str,
    seed: u64,
    /// What kept the GPU of rank 0 busy, and why something did not.
    beside: &'a [&'static str],
    not_beside: Option<&'a str>,
    messages_each_way: u64,
    max_bytes: u64,
    #[serde(flatten)]
    wrong: Wrong,
    seconds: f64,
}

/// Runs the whole job, or this process's rank of it, with the fault that PP_FAULT names.
pub(crate) fn words(args: &WordsArgs, env: &Env, fault: Option<OsString>) -> Result<(), Error> {
    backend::check_transport(args.transport, &args.devices)?;
    let pipeline: Pipeline = PIPELINE.parse()?;
    let hook = fault.map(|text| Hook::read(&text, &pipeline)).transpose()?;
    let config = Config::from_env(env.lookup())?;
    let job = Job::new(&config, &pipeline)
        .depth(args.depth)
        .devices(&args.devices);
    job.run(|rank| {
        let (backend, choice) = backend::choose_transport(args.transport, rank, env)?;
        if rank.rank() == Rank::new(0) {
            backend::say(choice.as_deref());
        }
        let mut profile = Profile::new()
            .set("max_bytes", args.max_bytes)
            .set("seed", args.seed);
        profile.chunks = Some(args.messages);
        profile.choice = choice;
        let book = Rc::new(Book::new(args.seed, args.max_bytes));
        let trial = WordsRank {
            args,
            rank,
            profile,
            hook: hook.map(|hook| (hook, &pipeline)),
        };
        match backend {
            Backend::Host => trial.run(Host, || Ok(OnHost::new(&book))),
            Backend::Gpu(gpu) => {
                let device = gpu.device.clone();
                let open = || Ok(OnGpu::open(&device, &book, args.max_bytes)?);
                trial.run(*gpu, open)
            }
        }
    })
}

/// One rank of the job.
struct WordsRank<'a> {
    args: &'a WordsArgs,
    rank: ThisRank<'a>,
    profile: Profile,
    hook: Option<(Hook, &'a Pipeline)>,
}

impl WordsRank<'_> {
    fn run<B: Breakable, W: Words<Tx = B::Tx, Rx = B::Rx>>(
        self,
        backend: B,
        open: impl Fn() -> Result<W, Error>,
    ) -> Result<(), Error> {
        let (args, rank) = (self.args, self.rank);
        let wrong = Cell::new(Wrong::default());
        let Some((hook, pipeline)) = self.hook else {
            let program = program::<B, W>(args, &wrong, &open);
            return rank.run(backend, self.profile, program);
        };
        let arm = hook.arm(rank.rank(), pipeline);
        let inner = backend;
        let program = program::<FaultyBackend<B>, W>(args, &wrong, &open);
        let profile = self.profile.set("fault", hook);
        rank.run(FaultyBackend { inner, arm }, profile, program)
    }
}

fn program<'p, B: Edges, W: Words<Tx = B::Tx, Rx = B::Rx> + 'p>(
    args: &'p WordsArgs,
    wrong: &'p Cell<Wrong>,
    open: &'p impl Fn() -> Result<W, Error>,
) -> Program<'p, B, Writer<W>, ()> {
    let source = |_| {
        Ok(Opened::new(Writer {
            words: open()?,
            random: Random::new(args.seed),
            left: args.messages,
            max_bytes: args.max_bytes,
        }))
    };
    Program::new("write", source)
        .payloads(|_, ()| args.max_bytes + DIGEST_ROOM)
        .stage("echo", |_, ()| Ok(Echo(open()?)))
        .sink("check", |(), _| {
            let words = open()?;
            Ok(Checker { words, wrong })
        })
        .finish(|source: Writer<W>, finished| {
            publish(args, source.words.beside(), wrong.get(), &finished)
        })
}

fn publish(
    args: &WordsArgs,
    (beside, not_beside): (&[&'static str], Option<&str>),
    wrong: Wrong,
    finished: &Finished,
) -> Result<(), Error> {
    let report = WordsReport {
        transport: finished.summary.transport,
        seed: args.seed,
        beside,
        not_beside,
        messages_each_way: finished.summary.recorder.totals().chunks,
        max_bytes: args.max_bytes,
        wrong,
        seconds: finished.wall.as_secs_f64(),
    };
    let text = match args.json {
        true => serde_json::to_string(&report).map_err(anyhow::Error::new)?,
        false => report.to_string(),
    };
    pp_command::print(&format!("{text}\n"))?;
    match wrong.messages {
        0 => Ok(()),
        _ => Err(anyhow::anyhow!("what was read is not what was sent: {wrong}").into()),
    }
}

impl fmt::Display for WordsReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "transport {}, seed {}, {} messages each way of 4 to {} bytes in {:.1} s",
            self.transport, self.seed, self.messages_each_way, self.max_bytes, self.seconds
        )?;
        if !self.beside.is_empty() {
            write!(f, ", beside {}", self.beside.join(" and "))?;
        }
        if let Some(why) = self.not_beside {
            write!(f, " ({why})")?;
        }
        write!(f, ": {}", self.wrong)
    }
}

/// Writes messages of random sizes.
struct Writer<W> {
    words: W,
    random: Random,
    left: u64,
    max_bytes: u64,
}

impl<W> Writer<W> {
    /// Sizes of every order of magnitude, most of them odd, and those at which copies and digests change their way.
    fn size(&mut self) -> u64 {
        let most = self.max_bytes;
        if self.random.below(8) == 0 {
            let edges = [4, 4095, 4096, 4097, 65_536, most - 1, most];
            return self.random.pick(&edges).min(most);
        }
        let power = 1 << (2 + self.random.below(u64::from(most.ilog2()) - 1));
        (power + self.random.below(power)).min(most)
    }
}

impl<W: Words> Source<W::Tx> for Writer<W> {
    type Plan = Toy;
    type Carry = ();

    fn poll(&mut self) -> StageResult<Offer> {
        Ok(match self.left {
            0 => Offer::End,
            _ => Offer::Chunk(Cut::None),
        })
    }

    fn build(&mut self, place: Place, slot: &mut W::Tx) -> StageResult<Built<Toy, ()>> {
        self.left -= 1;
        let (number, bytes) = (place.chunk.get(), self.size());
        self.words.write(Passage::new(number, bytes), slot)?;
        let tensors = Manifest::single(WORDS, DType::U8, &[bytes])?;
        Ok(Built::new(Toy(number), tensors, ()))
    }

    fn queued(&self) -> u32 {
        u32::from(self.left > 0)
    }
}

/// The passage of a message, and its answer: the words, and where their digest lies.
fn answered(message: &Message<Toy>) -> StageResult<(Passage, Manifest, usize)> {
    let (_, words) = message
        .tensors()
        .get(WORDS)
        .expect("all messages have words");
    let bytes = words.bytes();
    let digest = TensorSpec::new(DIGEST, DType::I64, &[1])?;
    let answer = Manifest::new(&[*words, digest])?;
    let at = answer.range(DIGEST).expect("just named").start;
    Ok((Passage::new(message.plan().0, bytes), answer, at))
}

/// Sends back what it reads.
struct Echo<W>(W);

impl<W: Words> Stage<W::Tx, W::Rx> for Echo<W> {
    type Plan = Toy;
    type Kept = Infallible;

    fn run(
        &mut self,
        chunk: Chunk<'_, Toy>,
        input: Option<&W::Rx>,
        output: &mut W::Tx,
    ) -> StageResult<Progress<Done, Infallible>> {
        let (passage, tensors, digest_at) = answered(chunk.message)?;
        let input = input.expect("all messages have words");
        self.0.echo(passage, input, digest_at, output)?;
        let report = Taken::of(chunk.message.plan(), 1);
        // A device may have to do it yet: the answer is sent behind that.
        Ok(Progress::Done(Done { tensors, report }))
    }
}

/// Compares what came back with the book.
struct Checker<'p, W> {
    words: W,
    wrong: &'p Cell<Wrong>,
}

impl<W> Checker<'_, W> {
    fn add(&self, wrong: Wrong, plan: &Toy) -> Taken {
        self.wrong.set(self.wrong.get() + wrong);
        Taken::of(plan, 1)
    }
}

impl<W: Words> Sink<W::Rx> for Checker<'_, W> {
    type Plan = Toy;
    type Kept = (Toy, W::Read);

    fn take(
        &mut self,
        chunk: Chunk<'_, Toy>,
        input: Option<&W::Rx>,
    ) -> StageResult<Progress<Taken, Self::Kept>> {
        let plan = chunk.message.plan();
        let (passage, _, digest_at) = answered(chunk.message)?;
        let input = input.expect("all messages have words");
        let progress = self.words.check(passage, input, digest_at)?;
        Ok(progress.map(|wrong| self.add(wrong, plan), |read| (plan.clone(), read)))
    }

    fn poll(&mut self, (plan, read): Self::Kept) -> StageResult<Progress<Taken, Self::Kept>> {
        let progress = self.words.poll(read)?;
        let taken = |wrong| self.add(wrong, &plan);
        Ok(progress.map(taken, |read| (plan.clone(), read)))
    }
}
