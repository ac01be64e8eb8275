//! A vocoder: the first stage reads a spectrogram from IN, the second makes samples of it, and the third writes them to
//! OUT. The stages stand on three ranks, unless a third argument says where: "mel@0 -> vocode@1 -> play@0". Several ranks
//! can make the samples together: "mel@0 -> vocode@1+2 -> play@0". One more stage plays them at half the speed, on a CPU or
//! on a GPU, as a fourth argument says: "mel@0 -> vocode@0 -> slow@1 -> play@0" "cpu,cuda:0".

use std::fs::File;
use std::io::{BufReader, Read as _, Write as _};

use pp_example_downstream::on_gpu::{self, SlowOnGpu};
use pp_example_downstream::{BINS, HOP, PIECE, slow, vocode};
use pp_job::prelude::*;
use serde::{Deserialize, Serialize};

/// The plan of a chunk: make samples of so many frames, from this one on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
struct Piece {
    first: u64,
    frames: u64,
}

impl Plan for Piece {
    const NAME: &'static str = "vocoder";
    const VERSION: u16 = 1;
    type Parts = Self;
    fn from_parts(parts: Self) -> Result<Self, PlanError> {
        let rule = || PlanError::field("frames", parts.frames, format!("1 to {PIECE}"));
        let fits = (1..=PIECE).contains(&parts.frames);
        fits.then_some(parts).ok_or_else(rule)
    }
    fn parts(&self) -> &Self {
        self
    }
    fn start_frame(&self) -> u64 {
        self.first
    }
    fn check(&self, stage: &StageSpec, _: bool, made: &Manifest) -> Result<(), PlanError> {
        match &*stage.name {
            "mel" => made.expect_shape("mel", &[self.frames, BINS]),
            "slow" => made.expect_shape("samples", &[self.frames, 2 * HOP]),
            _ => made.expect_shape("samples", &[self.frames, HOP]),
        }
    }
}

/// The source.
struct Mel {
    file: BufReader<File>,
    piece: Vec<u8>,
    next: u64,
}

impl Source<TxLease> for Mel {
    type Plan = Piece;
    type Carry = ();
    fn poll(&mut self) -> StageResult<Offer> {
        if self.piece.is_empty() {
            let mut piece = self.file.by_ref().take(PIECE * BINS * 4);
            piece.read_to_end(&mut self.piece)?;
        }
        match self.piece.is_empty() {
            true => Ok(Offer::End),
            false => Ok(Offer::Chunk(Cut::None)),
        }
    }
    fn build(&mut self, _: Place, slot: &mut TxLease) -> StageResult<Built<Piece, ()>> {
        let (first, frames) = (self.next, self.piece.len() as u64 / BINS / 4);
        first_bytes(slot.bytes_mut(), self.piece.len())?.copy_from_slice(&self.piece);
        self.piece.clear();
        self.next += frames;
        let mel = Manifest::single("mel", DType::F32, &[frames, BINS])?;
        Ok(Built::new(Piece { first, frames }, mel, ()))
    }
}

/// The sink.
struct Play(Option<StagedFile>);

impl Sink<RxLease> for Play {
    type Plan = Piece;
    type Kept = Infallible;
    fn take(
        &mut self,
        chunk: Chunk<'_, Piece>,
        samples: Option<&RxLease>,
    ) -> StageResult<Progress<Taken, Infallible>> {
        if let (Some(file), Some(samples)) = (&mut self.0, samples) {
            file.write_all(samples.bytes())?;
        }
        Ok(Progress::Done(Taken::of(chunk.message.plan(), 1)))
    }
    fn finish(&mut self) -> StageResult<()> {
        self.0.take().map_or(Ok(()), |file| Ok(file.commit()?))
    }
}

/// One member of a group that makes the samples together: each has some of the frames.
struct Together {
    mel: Vec<u8>,
    samples: Vec<u8>,
}

impl GroupStage<TxLease, RxLease, HostGroup> for Together {
    type Plan = Piece;
    type Kept = Infallible;
    fn run(
        &mut self,
        chunk: Chunk<'_, Piece>,
        input: Option<&RxLease>,
        output: Option<&mut TxLease>,
        group: &mut HostGroup,
    ) -> StageResult<Progress<Done, Infallible>> {
        let piece = chunk.message.plan();
        let (members, own) = (group.members().ranks().len(), group.members().own_place());
        let share = |member: usize| member as u64 * piece.frames / members as u64;
        let frames: Vec<u64> = (0..members).map(|at| share(at + 1) - share(at)).collect();
        let bytes = |of_frame: u64| frames.iter().map(|f| f * of_frame * 4).collect::<Vec<_>>();
        let (mels, samples) = (bytes(BINS), bytes(HOP));
        self.mel.resize(mels[own] as usize, 0);
        self.samples.resize(samples[own] as usize, 0);
        // The leader alone has the slots: it scatters what came, and gathers what was made.
        let whole = |bytes: &[u64]| ..bytes.iter().sum::<u64>() as usize;
        let from = input.map_or(&[][..], |mel| &mel.bytes()[whole(&mels)]);
        group.scatter(from, &mels, &mut self.mel, 0)?;
        vocode(piece.first + share(own), &self.mel, &mut self.samples);
        let to = output.map_or(&mut [][..], |slot| &mut slot.bytes_mut()[whole(&samples)]);
        group.gather(&self.samples, &samples, to, 0)?;
        Ok(Progress::Done(made(piece)?))
    }
}

/// What the vocoder says of a piece that it has made.
fn made(piece: &Piece) -> StageResult<Done> {
    let tensors = Manifest::single("samples", DType::F32, &[piece.frames, HOP])?;
    let report = Taken::of(piece, 1);
    Ok(Done { tensors, report })
}

/// What is said of a piece with every frame twice.
fn slowed(piece: &Piece) -> StageResult<Done> {
    let tensors = Manifest::single("samples", DType::F32, &[piece.frames, 2 * HOP])?;
    let report = Taken::of(piece, 1);
    Ok(Done { tensors, report })
}

/// The bytes of the largest payload that a stage makes: the same on all ranks.
fn slot_bytes([stage, _]: [&StageSpec; 2], (): &()) -> u64 {
    match &*stage.name {
        "mel" => PIECE * BINS * 4,
        "slow" => PIECE * HOP * 8,
        _ => PIECE * HOP * 4,
    }
}

fn main() -> std::process::ExitCode {
    pp_job::main(|| {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let [input, output, more @ ..] = args.as_slice() else {
            let usage = "usage: vocoder IN OUT [PIPELINE [DEVICES]]";
            return Err(Error::Usage(usage.into()));
        };
        let output = std::path::Path::new(output);
        let pipeline = more.first().map(String::as_str);
        let pipeline = pipeline.unwrap_or("mel@0 -> vocode@1 -> play@2");
        let pipeline: Pipeline = pipeline.parse()?;
        let devices = more.get(1).map_or("", String::as_str).split(',');
        let devices = devices.filter(|name| !name.is_empty()).map(str::parse);
        let devices: Vec<DeviceName> = devices.collect::<Result<_, _>>()?;
        let open = |_| {
            let failed = |e| StageError::file("open", input.as_ref(), &e);
            let file = BufReader::new(File::open(input).map_err(failed)?);
            let (piece, next) = (Vec::new(), 0);
            Ok(Opened::new(Mel { file, piece, next }))
        };
        let program = Program::<Host, _, _>::new("mel", open)
            .payloads(slot_bytes)
            .stage("vocode", |_, ()| {
                Ok(OnHost::new(|chunk: Chunk<'_, Piece>, mel, samples| {
                    let piece = chunk.message.plan();
                    vocode(piece.first, mel, samples);
                    made(piece)
                }))
            })
            .group_stage("vocode", |_, _, ()| {
                let (mel, samples) = (Vec::new(), Vec::new());
                Ok(Together { mel, samples })
            })
            .stage("slow", |_, ()| {
                Ok(OnHost::new(|chunk: Chunk<'_, Piece>, samples, twice| {
                    slow(samples, twice)?;
                    slowed(chunk.message.plan())
                }))
            })
            .sink("play", |(), _| Ok(Play(Some(StagedFile::create(output)?))))
            .finish(|_, finished| {
                finished.write_report(&output.with_extension("json"))?;
                Ok(finished.write_trace(&output.with_extension("trace"))?)
            });
        let config = Config::from_env(|name| std::env::var_os(name))?;
        // Those of the source and of the sink are not started again.
        let restarts = 2 * u32::from(pipeline.world_size().get() > 1);
        let job = Job::new(&config, &pipeline)
            .restarts(restarts)
            .devices(&devices);
        // Each rank runs the program for its memory.
        job.run(|rank| match rank.device() {
            Some(gpu @ (DeviceName::Cuda(_) | DeviceName::NextCuda)) => {
                let number = match gpu {
                    DeviceName::Cuda(number) => number,
                    _ => rank.gpus_before(),
                };
                let (device, backend) = on_gpu::open(number)?;
                let program =
                    Program::<_, Elsewhere<Piece>, ()>::between("mel", &["vocode"], "play")
                        .payloads(slot_bytes)
                        .stage("slow", |_, ()| Ok(SlowOnGpu::new(&device, slowed)?));
                rank.run(backend, Profile::new(), program)
            }
            Some(DeviceName::Cpu) | None => rank.run(Host, Profile::new(), program),
        })
    })
}
