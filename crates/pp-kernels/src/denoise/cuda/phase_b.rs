//! Phase B on the device: the passes over a chunk, and the frames remembered from earlier ones.
//!
//! Frames are kept as the attention reads them, in a ring of scratch frames: two of context, then those of the chunk,
//! whose last ones are the next chunk's context where they lie. What decides the sequence of kernels (which frames are
//! known, their numbers) is kept on the host, so no call waits for the device.
//!
//! A member of a group keeps its rows of all frames. What it sends and gets is in `team.rs`.

use pp_contract::{DType, VideoPlanParts};

use super::gpu::Gpu;
use super::kernels::{DenoiseKernels, SIGMA_BYTES, Tokens};
use super::sizes::{AttendArgument, Sizes};
use super::team::{TYPES, Team};
use crate::config::{ChunkShape, SessionConfig};
use crate::denoise::geometry::Geometry;
use crate::denoise::passes::Share;
use crate::denoise::settings::CONTEXT_FRAMES;
use crate::denoise::tensors::{
    HANDED_ON, check_place, context_count, frame_count, latents_dims, result,
};
use crate::error::Failure;
use crate::group::Collectives;
use crate::payload::{Payload, PayloadMut};

/// Further away than any window reaches: the kernels take narrow numbers.
const FAR: i64 = 1_000_000;

/// The state of Phase B of one stream.
#[derive(Debug)]
pub(super) struct PhaseB<G: Gpu> {
    pub(super) denoiser: DenoiseKernels<G>,
    /// Of the frames, or of the rows that this member of a group holds.
    geometry: Geometry,
    config: SessionConfig,
    lap: u32,
    team: Option<Team<G>>,
    /// Scratch frames: the ring, and the guides of the second and later passes.
    ring: G::Memory,
    guides: G::Memory,
    /// The guides as tokens, from one pass to the next.
    tokens: G::Memory,
    /// The noise of each plane, as last read from the conditioning.
    sigma: G::Memory,
    pub(super) place: Place,
    is_conditioned: bool,
}

/// Which frames the ring holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// The slot of the next chunk's first frame; context lies in the slots before it.
    pub(super) slot: u32,
    /// How many of the numbers, from the end, are of frames in the ring.
    context: usize,
    /// Numbers in the stream, older first.
    numbers: [u64; CONTEXT_FRAMES],
}

impl Place {
    /// What holds behind a chunk.
    fn after(self, start: u64, frames: u32, slots: u32) -> Place {
        let mut numbers = self.numbers;
        for number in start..start + u64::from(frames) {
            numbers.rotate_left(1);
            numbers[CONTEXT_FRAMES - 1] = number;
        }
        Place {
            slot: (self.slot + frames) % slots,
            context: CONTEXT_FRAMES.min(self.context + frames as usize),
            numbers,
        }
    }

    /// What holds once `context` frames have been rebuilt, the last of which have these numbers.
    fn rebuilt(self, numbers: [u64; CONTEXT_FRAMES], context: u32) -> Place {
        Place {
            context: context as usize,
            numbers,
            ..self
        }
    }

    /// How far each known frame lies from the one of this number.
    fn distances(&self, start: u64) -> [i32; CONTEXT_FRAMES] {
        self.numbers.map(|number| {
            let distance = i128::from(number) - i128::from(start);
            distance.clamp(-i128::from(FAR), i128::from(FAR)) as i32
        })
    }
}

impl<G: Gpu> PhaseB<G> {
    /// Allocates for the session's largest chunk.
    pub(super) fn new(
        (gpu, results): (&G, &G),
        config: &SessionConfig,
        lap: u32,
        geometry: &Geometry,
    ) -> Result<PhaseB<G>, Failure> {
        let team = match config.members {
            1 => None,
            _ => Some(Team::new((gpu, results), config, geometry)?),
        };
        let geometry = (team.as_ref()).map_or(geometry, |team| &team.cut.own().geometry);
        let gpu = (team.as_ref()).map_or(gpu, |team| &team.kernels);
        let denoiser = DenoiseKernels::new(gpu.clone(), Sizes::new(geometry)?)?;
        let frames = config.max_frames as usize;
        let memory = |bytes| denoiser.gpu.memory(bytes);
        let sizes = denoiser.sizes;
        Ok(PhaseB {
            geometry: geometry.clone(),
            config: *config,
            lap,
            ring: memory((frames + CONTEXT_FRAMES) * sizes.scratch_bytes)?,
            guides: memory(frames * sizes.scratch_bytes)?,
            tokens: memory(frames * sizes.token_bytes)?,
            sigma: memory(SIGMA_BYTES)?,
            place: Place::default(),
            is_conditioned: false,
            denoiser,
            team,
        })
    }

    fn slots(&self) -> u32 {
        self.config.max_frames + CONTEXT_FRAMES as u32
    }

    /// Enqueues Phase B; gives the number of generator calls.
    ///
    /// # Safety
    /// The contract of a call ([`crate::RawSession`]).
    pub(super) unsafe fn run(
        &mut self,
        plan: &VideoPlanParts,
        input: &Payload<'_>,
        output: &PayloadMut<'_>,
        group: Option<&mut dyn Collectives>,
    ) -> Result<u32, Failure> {
        let Some(group) = group else {
            // SAFETY: the caller's duty.
            return unsafe { self.compute(plan, input, output, None) };
        };
        let mut team = (self.team.take()).ok_or_else(|| Failure::invalid("there is no group"))?;
        let share = Share::of(&self.config, plan.num_denoise_steps, self.lap);
        let shape = frame_count(input.spec("latents_in"), self.config.max_frames);
        let mut run = |frames, share| {
            let context_frames = context_count(plan, input.spec("context_frames"))?;
            let shape = ChunkShape {
                frames,
                steps: plan.num_denoise_steps,
                context_frames,
            };
            // SAFETY: the caller's duty.
            unsafe {
                team.run(
                    (shape, share),
                    (input, output),
                    group,
                    |input, output, team, group| {
                        self.compute(plan, input, output, Some((team, group)))
                    },
                )
            }
        };
        let done = shape.and_then(|frames| run(frames, share?));
        if done.is_err() {
            // What a stream does next may use what another still uses. The first error counts.
            let _ = team.join();
        }
        self.team = Some(team);
        done
    }

    /// Enqueues Phase B on the rows that the session holds, which are those of the payloads.
    ///
    /// # Safety
    /// As [`PhaseB::run`].
    unsafe fn compute(
        &mut self,
        plan: &VideoPlanParts,
        input: &Payload<'_>,
        output: &PayloadMut<'_>,
        mut others: Option<(&mut Team<G>, &mut dyn Collectives)>,
    ) -> Result<u32, Failure> {
        // What can be refused is refused before anything is enqueued or changed.
        let frames = frame_count(input.spec("latents_in"), self.config.max_frames)?;
        let dims = latents_dims(&self.geometry, frames);
        let latents_in = input.device_tensor("latents_in", DType::Bf16, &dims)?;
        let steps = plan.num_denoise_steps;
        let share = Share::of(&self.config, steps, self.lap)?;
        let tokens = |is_there: bool, name, dims: &[u64]| {
            let tensor = is_there.then(|| input.device_tensor(name, DType::Bf16, dims));
            tensor.transpose()
        };
        let guide = tokens(share.has_guide(), "guide", &dims)?;
        let (name, dtype) = result(&share, TYPES);
        let out = output.device_tensor(name, dtype, &dims)?;
        let planes = self.geometry.planes.len() as u64;
        let embeds = input.device_tensor("conditioning_embeds", DType::Bf16, &[planes])?;
        let list = input.device_tensor("denoising_step_list", DType::I64, &[steps.into()])?;
        let context = context_count(plan, input.spec("context_frames"))?;
        let numbers = check_place(plan, frames, context)?;
        let context_dims = latents_dims(&self.geometry, context);
        let context_tokens = tokens(context > 0, "context_frames", &context_dims)?;
        // What the leader of a group hands on is the whole.
        let hands_on = !share.ends() && self.config.member == 0;
        let copies = hands_on.then(|| handed_on(input, output)).transpose()?;
        let copies = copies.into_iter().flatten();

        let denoiser = &self.denoiser;
        let (start, slots) = (plan.current_start_frame, self.slots());
        if plan.init_cache || plan.reset_kv_cache {
            self.place.context = 0;
        }
        // SAFETY: the addresses come from the payloads, whose tensors have just been checked, and from this session's
        // memory, which is as large as its largest chunk and freed behind the stream's work; the rest is the caller's
        // duty.
        unsafe {
            for (from, to, bytes) in copies.filter(|(_, _, bytes)| *bytes > 0) {
                denoiser.gpu.copy(from, to, bytes)?;
            }
            if plan.init_cache || plan.reset_crossattn_cache || !self.is_conditioned {
                denoiser.condition(embeds, G::address(&self.sigma))?;
                self.is_conditioned = true;
            }
            if let Some(tokens) = context_tokens {
                let first = (self.place.slot + slots - context) % slots;
                self.unfold(Tokens::OfFrames(tokens), first, context)?;
                self.place = self.place.rebuilt(numbers, context);
            }
            if steps == 0 {
                self.pass_through(latents_in, out, frames)?;
            } else {
                self.unfold(Tokens::OfFrames(latents_in), self.place.slot, frames)?;
                let own = G::address(&self.tokens);
                let (mut left, mut list) = (guide, list);
                for step in share.first..share.end {
                    if let Some(guide) = left {
                        self.unfold(Tokens::OfGuides(guide), 0, frames)?;
                    }
                    let is_last = step + 1 == steps;
                    let to = if step + 1 == share.end { out } else { own };
                    if let Some((team, _)) = &others
                        && step == share.first
                    {
                        list = team.begin_passes(list, steps)?;
                    }
                    let strength = list + 8 * u64::from(step);
                    self.attend(plan, step == 0, is_last, strength, to, frames)?;
                    if let Some((team, group)) = &mut others
                        && step + 1 < share.end
                    {
                        team.exchange(to, frames, *group)?;
                    }
                    left = Some(to);
                }
            }
            if let Some((team, _)) = &others
                && share.count() == 0
            {
                team.begin_passes(list, 0)?;
            }
        }
        self.place = self.place.after(start, frames, slots);
        Ok(share.count() + u32::from(context > 0))
    }

    /// Copies tokens on which no pass works, and remembers the last of them.
    ///
    /// # Safety
    /// Both addresses are memory of the context for so many frames.
    unsafe fn pass_through(&self, tokens: u64, out: u64, frames: u32) -> Result<(), Failure> {
        let token_bytes = self.denoiser.sizes.token_bytes;
        let bytes = frames as usize * token_bytes;
        let kept = frames.min(CONTEXT_FRAMES as u32);
        let skipped = frames - kept;
        let last = tokens + u64::from(skipped) * token_bytes as u64;
        let slot = (self.place.slot + skipped) % self.slots();
        // SAFETY: the caller's duty; the last tokens are among those of the chunk.
        unsafe {
            self.denoiser.gpu.copy(tokens, out, bytes)?;
            self.unfold(Tokens::OfFrames(last), slot, kept)
        }
    }

    /// Unfolds tokens of frames into the ring, or guides that the pass before has left, from this slot on.
    ///
    /// # Safety
    /// The tokens are memory of the context for so many frames.
    pub(super) unsafe fn unfold(
        &self,
        tokens: Tokens,
        first: u32,
        frames: u32,
    ) -> Result<(), Failure> {
        let (memory, slots) = match tokens {
            Tokens::OfFrames(_) => (&self.ring, self.slots()),
            Tokens::OfGuides(_) => (&self.guides, self.config.max_frames),
        };
        let (memory, place) = (G::address(memory), [first as i32, slots as i32]);
        // SAFETY: the caller's duty. Both memories are this session's. The ring has so many slots, and no chunk more frames
        // than fit beside the context; the guides are for `max_frames` frames, which no chunk exceeds.
        unsafe { self.denoiser.unfold(tokens, memory, place, frames) }
    }

    /// # Safety
    /// `strength` and `out` are memory of the context, `out` for so many frames.
    pub(super) unsafe fn attend(
        &self,
        plan: &VideoPlanParts,
        is_first: bool,
        is_last: bool,
        strength: u64,
        out: u64,
        frames: u32,
    ) -> Result<(), Failure> {
        let pass = AttendArgument {
            values: G::address(&self.ring),
            guides: if is_first {
                0
            } else {
                G::address(&self.guides)
            },
            out,
            sigma: G::address(&self.sigma),
            step: strength,
            noise_scale: plan.noise_scale,
            bias: plan.kv_cache_attention_bias,
            frames: frames as i32,
            context: self.place.context as i32,
            context_at: self.place.distances(plan.current_start_frame),
            slots: self.slots() as i32,
            first_slot: self.place.slot as i32,
            last: i32::from(is_last),
            reserved: 0,
            geometry: self.denoiser.sizes.argument,
        };
        // SAFETY: the caller's duty; all else is this session's.
        unsafe { self.denoiser.attend(is_first, pass) }
    }
}

/// Where each tensor that is handed on lies, where it goes to, and its bytes; no bytes for one that is not there.
fn handed_on(
    input: &Payload<'_>,
    output: &PayloadMut<'_>,
) -> Result<[(u64, u64, usize); HANDED_ON.len()], Failure> {
    let mut copies = [(0, 0, 0); HANDED_ON.len()];
    let tensors = HANDED_ON.into_iter().filter_map(|name| input.spec(name));
    for (copy, spec) in copies.iter_mut().zip(tensors) {
        let (name, dims) = (spec.name(), spec.shape().dims());
        let from = input.device_tensor(name, spec.dtype(), dims)?;
        let to = output.device_tensor(name, spec.dtype(), dims)?;
        *copy = (from, to, spec.bytes() as usize);
    }
    Ok(copies)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ring_keeps_the_last_two_frames_and_their_numbers() {
        let slots = 5; // for chunks of up to three frames
        let one = Place::default().after(10, 1, slots);
        assert_eq!((one.slot, one.context, one.numbers[1]), (1, 1, 10));
        let two = one.after(11, 1, slots);
        assert_eq!((two.slot, two.context, two.numbers), (2, 2, [10, 11]));
        let five = two.after(12, 3, slots);
        assert_eq!((five.slot, five.context, five.numbers), (0, 2, [13, 14]));
        assert_eq!(five.distances(15), [-2, -1]);
        assert_eq!(five.distances(u64::MAX), [-1_000_000, -1_000_000]);
    }
}
