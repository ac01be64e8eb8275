//! Denoising benchmark: adds seeded Gaussian noise to a Y4M clip, runs the kernels over it and prints one JSON object.
//!
//!     denoise_bench CLIP.y4m [--sigma 20] [--seed 7] [--steps 2] [--frames-per-chunk 8] [--threads 0]
//!                   [--known-sigma] [--kernels FILE.so] [--noisy-out FILE.y4m] [--out FILE.y4m]
//!     denoise_bench --psnr CLIP.y4m OTHER.y4m
//!
//! `fps` counts encode, Phase B and decode in one process; `phase_b_fps` Phase B alone. PSNR is that of luma over all
//! frames (mean squared error first, then the logarithm). With `--psnr` it only compares two clips: that is how another
//! denoiser, run on the file of `--noisy-out`, is judged by the same measure. Equal clips have a PSNR of 99.

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use pp_kernels::denoise::cpu::add_gaussian;
use pp_kernels::{
    Chroma, ChunkShape, FrameView, FrameViewMut, KernelSet, Payload, PayloadMut, SessionConfig,
    VideoPlanParts,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Clip {
    header: String,
    width: u32,
    height: u32,
    chroma: Chroma,
    frames: Vec<Vec<u8>>,
}

impl Clip {
    fn read(path: &str) -> Result<Clip> {
        let bytes = std::fs::read(path)?;
        let (line, mut rest) = split_line(&bytes).ok_or("no Y4M header")?;
        let header = String::from_utf8(line.to_vec())?;
        let field = |letter: char| {
            header
                .split(' ')
                .skip(1)
                .find_map(|word| word.strip_prefix(letter))
        };
        let chroma = match field('C').unwrap_or("420") {
            "mono" => Chroma::Mono,
            "420" | "420jpeg" | "420mpeg2" | "420paldv" => Chroma::C420,
            "422" => Chroma::C422,
            "444" => Chroma::C444,
            other => return Err(format!("chroma {other} is not supported").into()),
        };
        let width = field('W').ok_or("no width")?.parse()?;
        let height = field('H').ok_or("no height")?.parse()?;
        let size = chroma.packed_frame_bytes(width, height);
        let mut frames = Vec::new();
        while let Some((_, data)) = split_line(rest) {
            let (frame, after) = data
                .split_at_checked(size)
                .ok_or("the last frame is cut short")?;
            frames.push(frame.to_vec());
            rest = after;
        }
        Ok(Clip {
            header,
            width,
            height,
            chroma,
            frames,
        })
    }

    fn write(&self, path: &str) -> Result<()> {
        let mut bytes = format!("{}\n", self.header).into_bytes();
        for frame in &self.frames {
            bytes.extend(b"FRAME\n");
            bytes.extend(frame);
        }
        Ok(std::fs::write(path, bytes)?)
    }

    fn with_noise(&self, sigma: f32, seed: u64) -> Clip {
        let mut frames = self.frames.clone();
        for (number, frame) in frames.iter_mut().enumerate() {
            let mut rest = &mut frame[..];
            for plane in 0..self.chroma.planes() {
                let (width, height) = self.chroma.plane_size(plane, self.width, self.height);
                let (here, after) = rest.split_at_mut((width * height) as usize);
                add_gaussian(here, sigma, seed, number as u64, plane as u32);
                rest = after;
            }
        }
        Clip {
            header: self.header.clone(),
            frames,
            ..*self
        }
    }

    fn luma_psnr(&self, other: &Clip) -> f64 {
        let luma = (self.width * self.height) as usize;
        let pairs = self.frames.iter().zip(&other.frames);
        let (sum, count) = pairs.fold((0.0, 0usize), |(sum, count), (a, b)| {
            let error: u64 = a[..luma]
                .iter()
                .zip(&b[..luma])
                .map(|(a, b)| u64::from(a.abs_diff(*b)).pow(2))
                .sum();
            (sum + error as f64, count + luma)
        });
        (10.0 * (255.0 * 255.0 * count as f64 / sum).log10()).min(99.0)
    }
}

fn split_line(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = bytes.iter().position(|b| *b == b'\n')?;
    Some((&bytes[..end], &bytes[end + 1..]))
}

fn main() -> Result<()> {
    let mut clips = Vec::new();
    let (mut sigma, mut seed, mut steps, mut per_chunk, mut threads) =
        (20.0f32, 7u64, 2u32, 8usize, 0u32);
    let (mut known, mut compare, mut kernels, mut noisy_out, mut out) =
        (false, false, None, None, None);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        match arg.as_str() {
            "--sigma" => sigma = value()?.parse()?,
            "--seed" => seed = value()?.parse()?,
            "--steps" => steps = value()?.parse()?,
            "--frames-per-chunk" => per_chunk = value()?.parse()?,
            "--threads" => threads = value()?.parse()?,
            "--kernels" => kernels = Some(PathBuf::from(value()?)),
            "--noisy-out" => noisy_out = Some(value()?),
            "--out" => out = Some(value()?),
            "--known-sigma" => known = true,
            "--psnr" => compare = true,
            _ => clips.push(arg),
        }
    }
    let path = clips
        .first()
        .ok_or("usage: denoise_bench CLIP.y4m [options]")?;
    let clean = Clip::read(path)?;
    if compare {
        let other = Clip::read(clips.get(1).ok_or("--psnr needs two clips")?)?;
        println!(
            "{{\"psnr\": {:.3}, \"frames\": {}}}",
            clean.luma_psnr(&other),
            other.frames.len()
        );
        return Ok(());
    }
    let noisy = clean.with_noise(sigma, seed);
    if let Some(path) = noisy_out {
        noisy.write(&path)?;
    }
    let set = match kernels {
        None => KernelSet::cpu(),
        Some(path) => KernelSet::load(&path)?,
    };
    let config = SessionConfig {
        threads,
        noise_sigma: known.then_some(sigma),
        ..SessionConfig::host(clean.width, clean.height, clean.chroma, per_chunk as u32)
    };
    let mut session = set.open(&config)?;
    let mut result = Clip {
        header: clean.header.clone(),
        frames: noisy.frames.clone(),
        ..clean
    };
    let layout = session.layout(ChunkShape {
        frames: per_chunk as u32,
        steps,
        context_frames: 0,
    })?;
    let mut input = vec![0; layout.inputs.payload_bytes() as usize];
    let mut output = vec![0; layout.outputs.payload_bytes() as usize];
    let mut plan = VideoPlanParts::first(clean.width, clean.height, steps);
    let (mut total, mut phase_b) = (Duration::ZERO, Duration::ZERO);
    let (width, height, chroma) = (clean.width, clean.height, clean.chroma);
    for (chunk, frames) in noisy.frames.chunks(per_chunk).enumerate() {
        let start = Instant::now();
        let shape = ChunkShape {
            frames: frames.len() as u32,
            steps,
            context_frames: 0,
        };
        let layout = session.layout(shape)?;
        let views: Vec<_> = frames
            .iter()
            .filter_map(|f| FrameView::packed(f, width, height, chroma))
            .collect();
        session.encode(
            &views,
            &plan,
            &mut PayloadMut::new(&layout.inputs, &mut input)?,
        )?;
        let middle = Instant::now();
        session.phase_b(
            &plan,
            &Payload::new(&layout.inputs, &input)?,
            &mut PayloadMut::new(&layout.outputs, &mut output)?,
        )?;
        phase_b += middle.elapsed();
        let target = &mut result.frames[chunk * per_chunk..][..frames.len()];
        let mut views: Vec<_> = target
            .iter_mut()
            .filter_map(|f| FrameViewMut::packed(f, width, height, chroma))
            .collect();
        session.decode(&plan, &Payload::new(&layout.outputs, &output)?, &mut views)?;
        plan = plan.following(plan.current_start_frame + frames.len() as u64, false);
        total += start.elapsed();
    }
    let count = clean.frames.len() as f64;
    println!(
        "{{\"clip\": \"{path}\", \"frames\": {}, \"width\": {}, \"height\": {}, \"sigma\": {sigma}, \"steps\": {steps}, \
         \"psnr_before\": {:.3}, \"psnr_after\": {:.3}, \"fps\": {:.2}, \"phase_b_fps\": {:.2}}}",
        clean.frames.len(),
        clean.width,
        clean.height,
        clean.luma_psnr(&noisy),
        clean.luma_psnr(&result),
        count / total.as_secs_f64(),
        count / phase_b.as_secs_f64(),
    );
    if let Some(path) = out {
        result.write(&path)?;
    }
    Ok(())
}
