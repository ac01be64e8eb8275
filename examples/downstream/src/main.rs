//! A vocoder: rank 0 reads a spectrogram from IN, rank 1 makes samples of it, and rank 0 writes them to OUT.

use std::fs::File;
use std::io::{BufReader, Read as _, Write as _};
use std::path::PathBuf;

use pp_example_downstream::{BINS, HOP, PIECE, vocode};
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
    fn check_inputs(&self, inputs: &Manifest) -> Result<(), PlanError> {
        inputs.expect_shape("mel", &[self.frames, BINS])
    }
    fn check_outputs(&self, _: &Manifest, outputs: &Manifest) -> Result<(), PlanError> {
        outputs.expect_shape("samples", &[self.frames, HOP])
    }
}

/// Rank 0: the source and the sink.
struct Files {
    source: BufReader<File>,
    sink: StagedFile,
    mel: Vec<u8>,
    next: u64,
}

impl FrontStages<TxLease, RxLease> for Files {
    type Plan = Piece;
    type Carry = ();
    type Decoding = Infallible;
    fn poll_source(&mut self) -> StageResult<Offer> {
        if self.mel.is_empty() {
            let mut piece = self.source.by_ref().take(PIECE * BINS * 4);
            piece.read_to_end(&mut self.mel)?;
        }
        match self.mel.is_empty() {
            true => Ok(Offer::End),
            false => Ok(Offer::Chunk(Cut::None)),
        }
    }
    fn build(&mut self, _: Place, slot: &mut TxLease) -> StageResult<Built<Piece, ()>> {
        let (first, frames) = (self.next, self.mel.len() as u64 / BINS / 4);
        slot.bytes_mut()[..self.mel.len()].copy_from_slice(&self.mel);
        self.mel.clear();
        self.next += frames;
        let mel = Manifest::single("mel", DType::F32, &[frames, BINS])?;
        let samples = Manifest::single("samples", DType::F32, &[frames, HOP])?;
        let envelope = Envelope::new(Piece { first, frames }, mel, samples)?;
        Ok(Built::new(envelope, ()))
    }
    fn decode(
        &mut self,
        _: ChunkIndex,
        (): (),
        _: &Outcome,
        samples: Option<RxLease>,
    ) -> StageResult<Progress<Decoded, Infallible>> {
        samples.map_or(Ok(()), |samples| self.sink.write_all(samples.bytes()))?;
        Ok(Progress::Done(Decoded::default()))
    }
}

fn main() -> std::process::ExitCode {
    pp_job::main(|| {
        let paths: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
        let [input, output] = paths.as_slice() else {
            return Err(Error::Usage("usage: vocoder IN OUT".into()));
        };
        let edges = Edges::new(4, PIECE * BINS * 4, PIECE * HOP * 4);
        let ranks = Ranks {
            front: |_| {
                let file = File::open(input).map_err(|e| StageError::file("open", input, &e))?;
                let files = Files {
                    source: BufReader::new(file),
                    sink: StagedFile::create(output)?,
                    mel: Vec::new(),
                    next: 0,
                };
                Ok(FrontPart::new(files, edges))
            },
            phase_b: |()| {
                let stages = OnHost::new(|asked: &Envelope<Piece>, mel, samples| {
                    vocode(asked.plan().first, mel, samples);
                    Ok(())
                });
                Ok(PhaseBPart { stages, edges })
            },
            finish: |files: Files, finished: Finished| {
                files.sink.commit()?;
                finished.write_report(&output.with_extension("json"))?;
                Ok(finished.write_trace(&output.with_extension("trace"))?)
            },
        };
        let config = Config::from_env(|name| std::env::var_os(name))?;
        let job = Job::new(&config).restarts(2);
        job.run(|rank| rank.run(Host, Profile::new(), ranks))
    })
}
