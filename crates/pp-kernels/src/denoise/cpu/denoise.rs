//! `phase_b` of the CPU backend: the passes over a chunk, the frames remembered from earlier ones, and the threads.
//!
//! Guarantee: the result depends on the sequence of calls alone. Bands are independent, each sums in one order, and
//! threads only decide who computes a band.

use std::ops::Range;
use std::sync::Mutex;

use half::{bf16, f16};
use pp_contract::{DType, VideoPlanParts};

use super::attention::{Attend, BAND, Sums, attend};
use super::group::CpuTeam;
use super::plane::{CELL, PlaneLayout};
use super::tokens::Sample;
use crate::config::Bits;
use crate::denoise::geometry::{Geometry, PATCH, PlaneGeometry, TOKEN};
use crate::denoise::rows::RowShares;
use crate::denoise::settings::{CONTEXT_FRAMES, FLOOR, KEEP, RADIUS};
use crate::error::Failure;

/// Keeps the logit finite where there is no noise: only equal patches then have weight.
pub(crate) const MIN_H2: f32 = 1e-6;

/// One frame as the attention loop reads it.
#[derive(Debug)]
struct FramePlanes {
    /// Index in the stream.
    frame: u64,
    planes: Vec<Vec<f32>>,
}

/// What a call leaves for the next one.
#[derive(Debug)]
pub(super) enum Output<'a> {
    /// The result, behind the last pass.
    Latents(&'a mut [u8]),
    /// The guide for the pass that another part begins with.
    Guide(&'a mut [u8]),
}

/// The bytes of one plane among the tokens of a frame.
fn of_plane<S: Sample>(plane: &PlaneGeometry) -> std::ops::Range<usize> {
    let bytes = TOKEN * S::BYTES;
    plane.first_token * bytes..(plane.first_token + plane.tokens()) * bytes
}

/// The state of `phase_b` of one stream.
#[derive(Debug)]
pub(super) struct Denoiser {
    geometry: Geometry,
    bits: Bits,
    layouts: Vec<PlaneLayout>,
    /// The rows of cells of each plane that a pass computes.
    own: Vec<Range<usize>>,
    /// Context frames, the last of them at `CONTEXT_FRAMES - 1`, then the frames of the chunk.
    slots: Vec<FramePlanes>,
    /// How many of the context slots hold a frame.
    context: usize,
    /// The planes of the chunk's frames after the pass before, and after this one.
    before: Vec<Vec<Vec<f32>>>,
    after: Vec<Vec<Vec<f32>>>,
    sums: Vec<Sums>,
    /// Noise of each plane, as last read from the conditioning.
    sigma: Vec<f32>,
}

impl Denoiser {
    /// For frames of this geometry: those of the stream, or the rows that a member of a group holds.
    pub(super) fn new(
        geometry: Geometry,
        cut: Option<&RowShares>,
        (bits, max_frames, threads): (Bits, usize, usize),
    ) -> Denoiser {
        let layouts: Vec<_> = geometry
            .planes
            .iter()
            .map(|p| PlaneLayout::new(p, RADIUS[0]))
            .collect();
        let own = match cut {
            None => layouts.iter().map(|l| 0..l.cells_y).collect(),
            Some(cut) => {
                let cells = |row: usize| row * PATCH / CELL;
                let planes = cut.own().planes.iter();
                planes
                    .map(|p| match p.own.is_empty() {
                        true => 0..0,
                        false => cells(p.own.start - p.held.start)..cells(p.own.end - p.held.start),
                    })
                    .collect()
            }
        };
        let planes = || {
            layouts
                .iter()
                .map(|l| vec![0.0; l.len()])
                .collect::<Vec<_>>()
        };
        let slot = || FramePlanes {
            frame: 0,
            planes: planes(),
        };
        Denoiser {
            slots: std::iter::repeat_with(slot)
                .take(CONTEXT_FRAMES + max_frames)
                .collect(),
            context: 0,
            before: std::iter::repeat_with(planes).take(max_frames).collect(),
            after: std::iter::repeat_with(planes).take(max_frames).collect(),
            sums: std::iter::repeat_with(Sums::default)
                .take(threads)
                .collect(),
            sigma: Vec::new(),
            geometry,
            bits,
            layouts,
            own,
        }
    }

    /// Follows what a plan says of the frames of earlier chunks and of the noise of each plane. The context is that of a
    /// recompute.
    pub(super) fn begin(
        &mut self,
        plan: &VideoPlanParts,
        sigma: impl Iterator<Item = f32>,
        context: Option<(&[u8], [u64; CONTEXT_FRAMES])>,
    ) {
        if plan.init_cache || plan.reset_kv_cache {
            self.context = 0;
        }
        // A session that has just begun has read no noise.
        if plan.init_cache || plan.reset_crossattn_cache || self.sigma.is_empty() {
            self.sigma.clear();
            self.sigma.extend(sigma);
        }
        if let Some((tokens, numbers)) = context {
            self.rebuild_context(tokens, numbers);
        }
    }

    /// Rebuilds the context from the tokens of the frames before the chunk, the last of which have these numbers.
    fn rebuild_context(&mut self, tokens: &[u8], numbers: [u64; CONTEXT_FRAMES]) {
        let frames = tokens.len() / self.geometry.frame_bytes();
        self.context = frames;
        for index in 0..frames {
            let slot = CONTEXT_FRAMES - frames + index;
            self.load(slot, numbers[slot], index, tokens);
        }
    }

    /// Runs the passes of these strengths over a chunk, and remembers its last frames. The first of them has the guide
    /// that the pass before it left; the first of all has none.
    pub(super) fn run(
        &mut self,
        plan: &VideoPlanParts,
        strengths: &[f32],
        input: &[u8],
        guide: Option<&[u8]>,
        output: Output<'_>,
        mut team: Option<CpuTeam<'_>>,
    ) -> Result<(), Failure> {
        let frames = input.len() / self.geometry.frame_bytes();
        let start = plan.current_start_frame;
        match (strengths, output) {
            ([], Output::Latents(output)) => {
                output.copy_from_slice(input);
                for index in frames.saturating_sub(CONTEXT_FRAMES)..frames {
                    self.load(CONTEXT_FRAMES + index, start + index as u64, index, input);
                }
            }
            (strengths, output) => {
                for index in 0..frames {
                    self.load(CONTEXT_FRAMES + index, start + index as u64, index, input);
                }
                if let Some(guide) = guide {
                    self.load_guide(guide);
                }
                let ends = matches!(output, Output::Latents(_));
                for (number, strength) in strengths.iter().enumerate() {
                    let first = number == 0 && guide.is_none();
                    let last = ends && number + 1 == strengths.len();
                    let keep = if last { 0.0 } else { KEEP };
                    self.pass(plan, *strength, first, keep, frames);
                    std::mem::swap(&mut self.before, &mut self.after);
                    if number + 1 < strengths.len() {
                        if let Some(team) = &mut team {
                            self.exchange(team, frames)?;
                        }
                        self.mirror(frames);
                    }
                }
                match output {
                    Output::Latents(tokens) => match self.bits {
                        Bits::Eight => self.store::<bf16>(tokens),
                        Bits::Ten => self.store::<f16>(tokens),
                    },
                    Output::Guide(tokens) => self.store::<f32>(tokens),
                }
            }
        }
        self.remember(frames);
        Ok(())
    }

    /// Sends the rows of what a pass has left that other members read, and gets those that this one reads.
    fn exchange(&mut self, team: &mut CpuTeam<'_>, frames: usize) -> Result<(), Failure> {
        const DTYPE: DType = DType::F32;
        let cut = team.cut;
        let held = &cut.own().planes;
        let (geometry, layouts) = (&self.geometry, &self.layouts);
        let row_bytes = |plane: usize| geometry.planes[plane].tokens_x() * TOKEN * f32::BYTES;
        for (other, sends_first) in cut.neighbours() {
            let mut given = vec![0; cut.message_bytes(cut.given(other), frames, DTYPE)];
            let mut rest = &mut given[..];
            for row in cut.given(other) {
                let place = (
                    &geometry.planes[row.plane],
                    row.row - held[row.plane].held.start,
                );
                for planes in &self.before[..frames] {
                    let (out, behind) = rest.split_at_mut(row_bytes(row.plane));
                    layouts[row.plane].store::<f32>(&planes[row.plane], place, out);
                    rest = behind;
                }
            }
            let mut got = vec![0; cut.message_bytes(cut.got(other), frames, DTYPE)];
            for sends in [sends_first, !sends_first] {
                match sends {
                    true if !given.is_empty() => team.send(&given, other)?,
                    false if !got.is_empty() => team.receive(&mut got, other)?,
                    _ => {}
                }
            }
            let mut rest = &got[..];
            for row in cut.got(other) {
                let place = (
                    &geometry.planes[row.plane],
                    row.row - held[row.plane].held.start,
                );
                for planes in &mut self.before[..frames] {
                    let (tokens, behind) = rest.split_at(row_bytes(row.plane));
                    layouts[row.plane].load_rows::<f32>(tokens, place, &mut planes[row.plane]);
                    rest = behind;
                }
            }
        }
        Ok(())
    }

    /// Fills the margins of what a pass has left.
    fn mirror(&mut self, frames: usize) {
        for planes in &mut self.before[..frames] {
            for (layout, plane) in self.layouts.iter().zip(planes) {
                layout.mirror(plane);
            }
        }
    }

    fn load(&mut self, slot: usize, frame: u64, index: usize, tokens: &[u8]) {
        let bytes = self.geometry.frame_bytes();
        let tokens = &tokens[index * bytes..][..bytes];
        let slot = &mut self.slots[slot];
        slot.frame = frame;
        for (number, plane) in self.geometry.planes.iter().enumerate() {
            // Either type has two bytes.
            let tokens = &tokens[of_plane::<bf16>(plane)];
            let (layout, out) = (&self.layouts[number], &mut slot.planes[number]);
            match self.bits {
                Bits::Eight => layout.load::<bf16>(tokens, plane, out),
                Bits::Ten => layout.load::<f16>(tokens, plane, out),
            }
        }
    }

    fn load_guide(&mut self, guide: &[u8]) {
        let bytes = self.geometry.tokens * TOKEN * f32::BYTES;
        for (tokens, planes) in guide.chunks_exact(bytes).zip(&mut self.before) {
            for (number, plane) in self.geometry.planes.iter().enumerate() {
                let tokens = &tokens[of_plane::<f32>(plane)];
                self.layouts[number].load::<f32>(tokens, plane, &mut planes[number]);
            }
        }
    }

    /// What the last pass has left, as tokens.
    fn store<S: Sample>(&self, output: &mut [u8]) {
        let bytes = self.geometry.tokens * TOKEN * S::BYTES;
        for (tokens, planes) in output.chunks_exact_mut(bytes).zip(&self.before) {
            for (number, plane) in self.geometry.planes.iter().enumerate() {
                let tokens = &mut tokens[of_plane::<S>(plane)];
                self.layouts[number].store::<S>(&planes[number], (plane, 0), tokens);
            }
        }
    }

    /// The last frames of context and chunk become the context.
    fn remember(&mut self, frames: usize) {
        let keep = CONTEXT_FRAMES.min(self.context + frames);
        for index in CONTEXT_FRAMES - keep..CONTEXT_FRAMES {
            self.slots.swap(index, index + frames);
        }
        self.context = keep;
    }

    /// One generator call: every frame of the chunk attends to its neighbours in time. Of the noisy samples, `keep`
    /// stays in what it leaves for the next one.
    fn pass(
        &mut self,
        plan: &VideoPlanParts,
        strength: f32,
        first: bool,
        keep: f32,
        frames: usize,
    ) {
        let Denoiser {
            layouts,
            own,
            slots,
            before,
            after,
            sums,
            sigma,
            context,
            ..
        } = self;
        let slots = &slots[CONTEXT_FRAMES - *context..CONTEXT_FRAMES + frames];
        let (before, context) = (&*before, *context);
        let (layouts, own) = (&*layouts, &*own);

        // One job is a band of one plane of one frame; the longest planes come first within a frame.
        let jobs = after[..frames]
            .iter_mut()
            .enumerate()
            .flat_map(|(frame, planes)| {
                planes.iter_mut().enumerate().flat_map(move |(plane, out)| {
                    let (layout, own) = (&layouts[plane], &own[plane]);
                    let cell = CELL * CELL * layout.stride;
                    let rows =
                        &mut out[layout.row((own.start * CELL) as isize)..][..own.len() * cell];
                    rows.chunks_mut(BAND * cell)
                        .zip(own.clone().step_by(BAND))
                        .map(move |(rows, first)| (frame, plane, first, rows))
                })
            });
        let jobs = Mutex::new(jobs);
        let work = |sums: &mut Sums| {
            loop {
                let job = jobs
                    .lock()
                    .expect("no band panics while it takes a job")
                    .next();
                let Some((frame, plane, first_cell, out)) = job else {
                    break;
                };
                let layout = layouts[plane];
                let query = &slots[context + frame];
                let rows = out.len() / (CELL * CELL * layout.stride);
                sums.start(&layout);
                let sigma = sigma[plane] * plan.noise_scale;
                let h = strength * sigma;
                // Variance of the noise in queries and keys, over that of the frames.
                let variance = if first { 1.0 } else { KEEP * KEEP };
                for (index, key) in slots.iter().enumerate() {
                    let Some(radius) = RADIUS.get(query.frame.abs_diff(key.frame) as usize) else {
                        continue;
                    };
                    // Context frames take part as they came: there is no estimate of them.
                    let of_chunk = index.checked_sub(context);
                    let (key_plane, key_variance, bias) = match of_chunk {
                        Some(index) if !first => (&before[index][plane], variance, 0.0),
                        Some(_) => (&key.planes[plane], 1.0, 0.0),
                        None => (&key.planes[plane], 1.0, plan.kv_cache_attention_bias),
                    };
                    let job = Attend {
                        layout,
                        query: if first {
                            &query.planes[plane]
                        } else {
                            &before[frame][plane]
                        },
                        key: key_plane,
                        value: &key.planes[plane],
                        radius: *radius as isize,
                        floor: TOKEN as f32 * FLOOR * (variance + key_variance) * sigma * sigma,
                        scale: 1.0 / (TOKEN as f32 * (h * h).max(MIN_H2)),
                        bias,
                    };
                    attend(&job, first_cell, rows, sums);
                }
                let noisy =
                    &query.planes[plane][layout.row((first_cell * CELL) as isize)..][..out.len()];
                sums.finish(&layout, keep, noisy, out);
            }
        };
        on_threads(sums, work);
    }
}

/// Does the work on a thread for each of these, this one among them.
fn on_threads(sums: &mut [Sums], work: impl Fn(&mut Sums) + Sync) {
    let (own, others) = sums.split_first_mut().expect("at least one thread");
    std::thread::scope(|scope| {
        for sums in others {
            // Where no thread is to be had, the others take its share.
            let _ = std::thread::Builder::new().spawn_scoped(scope, || work(sums));
        }
        work(own);
    });
}
