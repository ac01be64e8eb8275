//! Phase B on devices in a group: what the members send each other around the passes, from device memory to device memory.
//!
//! There are three streams. That of the session scatters, and exchanges rows between passes. That of the kernels computes.
//! That of the results gathers. So the rows of the next chunk go out, and those of the chunk before come back, while the
//! kernels work on a chunk. The streams wait for each other where they must, and the host waits for none. Rows that lie
//! apart are copied into one message for each member.
//!
//! All members enqueue the same in the same order: the scatter of a chunk, its kernels, its gather, the next scatter. So
//! members whose devices do one thing after the other (`CUDA_DEVICE_MAX_CONNECTIONS=1`) do not wait for each other in a
//! circle.

use pp_contract::DType;

use super::gpu::{Apart, Gpu};
use super::sizes::TILE;
use crate::config::{ChunkShape, SessionConfig};
use crate::denoise::geometry::Geometry;
use crate::denoise::messages::Messages;
use crate::denoise::passes::Share;
use crate::denoise::rows::{Move, RowShares};
use crate::denoise::settings::CONTEXT_FRAMES;
use crate::denoise::tensors::{Types, between, latents_dims};
use crate::error::Failure;
use crate::group::Collectives;
use crate::payload::{Payload, PayloadMut};

/// The type of a guide.
const GUIDE: DType = DType::Bf16;
/// The types of what goes from part to part.
pub(super) const TYPES: Types = Types {
    latents: DType::Bf16,
    guide: GUIDE,
};
/// Steps for whose strengths there is room: the most that a plan has.
const MOST_STEPS: u32 = 1024;

/// One member's side of its group.
#[derive(Debug)]
pub(super) struct Team<G: Gpu> {
    pub(super) cut: RowShares,
    /// The session's stream.
    session: G,
    /// The stream of the kernels.
    pub(super) kernels: G,
    /// The stream of the results.
    results: G,
    /// Lets one of the streams wait for another.
    event: G::Event,
    config: SessionConfig,
    /// What the others get; of a member that does not lead, what it gets.
    parts: Room<G>,
    /// What the others give back; of a member that does not lead, what it gives back, in two rooms in turn: its kernels
    /// write one while the other is sent.
    made: Vec<Made<G>>,
    turn: usize,
    /// The strengths of a chunk. The kernels read them in every pass, and the next part may come before the last pass.
    strengths: Room<G>,
    /// Rows of the guide for a neighbour, and from one.
    given: Room<G>,
    got: Room<G>,
}

/// Memory for messages.
#[derive(Debug)]
struct Room<G: Gpu> {
    memory: G::Memory,
    bytes: usize,
}

impl<G: Gpu> Room<G> {
    fn new(gpu: &G, bytes: usize) -> Result<Room<G>, Failure> {
        let memory = gpu.memory(bytes.max(1))?;
        Ok(Room { memory, bytes })
    }

    /// Where it lies; refuses what does not fit.
    fn address(&self, bytes: u64) -> Result<u64, Failure> {
        match bytes <= self.bytes as u64 {
            true => Ok(G::address(&self.memory)),
            false => Err(Failure::invalid(format!(
                "a message of {bytes} bytes in a group, the session has room for {}",
                self.bytes
            ))),
        }
    }
}

/// Memory for results.
#[derive(Debug)]
struct Made<G: Gpu> {
    room: Room<G>,
    /// Marks its last gather.
    gathered: G::Event,
}

impl<G: Gpu> Made<G> {
    fn new(results: &G, bytes: usize) -> Result<Made<G>, Failure> {
        let made = Made {
            room: Room::new(results, bytes)?,
            gathered: results.event()?,
        };
        // Another stream writes the memory first, behind its allocation.
        results.record(&made.gathered)?;
        Ok(made)
    }
}

/// A payload as the collectives take it.
fn pointer(address: u64) -> *mut u8 {
    std::ptr::without_provenance_mut(address as usize)
}

impl<G: Gpu> Team<G> {
    /// Allocates for the session's largest chunk.
    pub(super) fn new(
        (gpu, results): (&G, &G),
        config: &SessionConfig,
        geometry: &Geometry,
    ) -> Result<Team<G>, Failure> {
        // In the order of the sums a patch's place in its tile counts. Tiles lie as many rows of patches apart, and a token
        // has two: so in a plane that begins with a multiple of this many rows of tokens, tiles lie as in the whole plane.
        let step = TILE[1];
        let cut = RowShares::new(geometry, config.members, config.member, step);
        let shape = ChunkShape {
            frames: config.max_frames,
            steps: MOST_STEPS,
            context_frames: CONTEXT_FRAMES as u32,
        };
        let (mut parts, mut made) = (0, 0);
        for (member, rows) in cut.followers() {
            if config.member == 0 || member == config.member as usize {
                let part = between(&rows.geometry, shape, TYPES, true)?;
                parts += part.payload_bytes() as usize;
                made += config.max_frames as usize * rows.geometry.frame_bytes();
            }
        }
        let frames = config.max_frames as usize;
        let most = |bytes: &dyn Fn(usize) -> usize| {
            let neighbours = cut.neighbours();
            neighbours.map(|(other, _)| bytes(other)).max().unwrap_or(0)
        };
        let given = most(&|other| cut.message_bytes(cut.given(other), frames, GUIDE));
        let got = most(&|other| cut.message_bytes(cut.got(other), frames, GUIDE));
        // The leader's kernels write its output, and one stream gathers and copies: one room is enough.
        let rooms = if config.member == 0 { 1 } else { 2 };
        let kernels = gpu.beside()?;
        Ok(Team {
            parts: Room::new(gpu, parts)?,
            made: (0..rooms)
                .map(|_| Made::new(results, made))
                .collect::<Result<_, _>>()?,
            turn: 0,
            strengths: Room::new(&kernels, 8 * MOST_STEPS as usize)?,
            given: Room::new(gpu, given)?,
            got: Room::new(gpu, got)?,
            cut,
            event: gpu.event()?,
            session: gpu.clone(),
            results: results.clone(),
            kernels,
            config: *config,
        })
    }

    /// The kernels begin behind what the session's stream has so far.
    fn kernels_follow(&self) -> Result<(), Failure> {
        self.kernels.follow(&self.session, &self.event)
    }

    /// The session's stream goes on behind what the kernels' stream has so far.
    fn session_follows(&self) -> Result<(), Failure> {
        self.session.follow(&self.kernels, &self.event)
    }

    /// The stream of the results goes on behind what the kernels' stream has so far.
    fn results_follow(&self) -> Result<(), Failure> {
        self.results.follow(&self.kernels, &self.event)
    }

    /// Each stream goes on behind what the others have so far.
    pub(super) fn join(&self) -> Result<(), Failure> {
        self.session_follows()?;
        self.session.follow(&self.results, &self.event)?;
        self.kernels_follow()?;
        self.results_follow()
    }

    /// The kernels' stream has all work in front of the passes: lets the session's stream write over the part, and the
    /// passes begin. Gives where the strengths of so many steps are kept, which were at `list`.
    ///
    /// # Safety
    /// `list` is memory of the context for so many strengths, until the session's stream has passed.
    pub(super) unsafe fn begin_passes(&self, list: u64, steps: u32) -> Result<u64, Failure> {
        let bytes = 8 * steps as usize;
        let kept = self.strengths.address(bytes as u64)?;
        if bytes > 0 {
            // SAFETY: the caller's duty; the room is this session's, its size was checked, and the kernels' stream alone
            // uses it.
            unsafe { self.kernels.copy(list, kept, bytes) }?;
        }
        self.session_follows()?;
        // Blocks of the attention are long: a scatter that is not done yet would wait for the first of them.
        self.kernels_follow()?;
        Ok(kept)
    }

    /// Enqueues a call of Phase B: scatters, lets `compute` enqueue the passes over this member's rows, and gathers. After an
    /// error the caller lets the streams [`join`](Team::join).
    ///
    /// # Safety
    /// The contract of a call ([`crate::RawSession`]).
    pub(super) unsafe fn run(
        &mut self,
        (shape, share): (ChunkShape, Share),
        (input, output): (&Payload<'_>, &PayloadMut<'_>),
        group: &mut dyn Collectives,
        compute: impl FnOnce(
            &Payload<'_>,
            &PayloadMut<'_>,
            &mut Team<G>,
            &mut dyn Collectives,
        ) -> Result<u32, Failure>,
    ) -> Result<u32, Failure> {
        self.kernels_follow()?;
        let messages = Messages::new(&self.cut, (shape, &share), TYPES)?;
        let Messages { parts, results, .. } = &messages;
        let own = self.config.member as usize;
        if own > 0 {
            let [part, made] = messages.of(own);
            self.turn = (self.turn + 1) % self.made.len();
            let turn = self.turn;
            let from = self.parts.address(parts[own])?;
            let to = self.made[turn].room.address(results[own])?;
            // SAFETY: the memory is this session's, and as large as the call says. The session's stream is behind the
            // kernels that have read the part before.
            unsafe { group.scatter(pointer(0), parts, pointer(from), 0) }?;
            self.kernels_follow()?;
            self.kernels.wait(&self.made[turn].gathered)?;
            let input = Payload::on_device(part, from, parts[own] as usize)?;
            let output = PayloadMut::on_device(made, to, results[own] as usize)?;
            let calls = compute(&input, &output, self, &mut *group)?;
            self.results_follow()?;
            // SAFETY: as above. The kernels have made the results, and write the room again behind this gather.
            unsafe { group.gather(pointer(to), results, pointer(0), 0) }?;
            self.results.record(&self.made[turn].gathered)?;
            return Ok(calls);
        }
        let sent = self.parts.address(parts.iter().sum())?;
        let got = self.made[self.turn].room.address(results.iter().sum())?;
        let ((name, dtype), own) = (messages.made, &self.cut.own().geometry);
        let dims = latents_dims(own, shape.frames);
        let out = output.device_tensor(name, dtype, &dims)?;
        for (spec, one) in messages.sent(&self.cut, input.tensors()) {
            let whole = input.device_tensor(spec.name(), spec.dtype(), spec.shape().dims())?;
            // SAFETY: the rows lie in a tensor that was found, and in the session's memory, whose size was checked; the
            // session's stream has the scatter behind it.
            unsafe { copy(&self.session, one, whole, sent) }?;
        }
        // SAFETY: as above.
        unsafe { group.scatter(pointer(sent), parts, pointer(sent), 0) }?;
        let calls = compute(input, output, self, &mut *group)?;
        // A receive that waits for its sender has multiprocessors, so it begins when the kernels of its chunk need them no
        // more.
        self.results_follow()?;
        // SAFETY: as above; the stream of the results alone uses the room, and the kernels are done with the tensor.
        unsafe {
            group.gather(pointer(got), results, pointer(got), 0)?;
            for one in messages.got(&self.cut) {
                copy(&self.results, one, got, out)?;
            }
        }
        Ok(calls)
    }

    /// Enqueues the exchange of rows of the guide that a pass has left at `tokens`.
    ///
    /// # Safety
    /// `tokens` is memory of the context for so many frames of the rows that this member holds, until the session's stream
    /// has passed.
    pub(super) unsafe fn exchange(
        &mut self,
        tokens: u64,
        frames: u32,
        group: &mut dyn Collectives,
    ) -> Result<(), Failure> {
        let frames = frames as usize;
        self.session_follows()?;
        for (other, sends_first) in self.cut.neighbours() {
            let cut = &self.cut;
            let given = cut.message_bytes(cut.given(other), frames, GUIDE) as u64;
            let got = cut.message_bytes(cut.got(other), frames, GUIDE) as u64;
            let (to, from) = (self.given.address(given)?, self.got.address(got)?);
            let other_member = other as u32;
            // SAFETY: the rows lie in the caller's memory and in the session's, whose size was checked; all is on one stream.
            unsafe {
                for one in cut.in_message(cut.given(other), frames, GUIDE, true) {
                    copy(&self.session, one, tokens, to)?;
                }
                for sends in [sends_first, !sends_first] {
                    match sends {
                        true if given > 0 => group.send(pointer(to), given, other_member)?,
                        false if got > 0 => group.receive(pointer(from), got, other_member)?,
                        _ => {}
                    }
                }
                for one in cut.in_message(cut.got(other), frames, GUIDE, false) {
                    copy(&self.session, one, from, tokens)?;
                }
            }
        }
        self.kernels_follow()
    }
}

/// Enqueues a copy between memory at two addresses.
///
/// # Safety
/// As [`Gpu::copy_within`].
unsafe fn copy<G: Gpu>(gpu: &G, one: Move, from: u64, to: u64) -> Result<(), Failure> {
    let (from, to) = (from + one.from as u64, to + one.to as u64);
    // SAFETY: the caller's duty.
    unsafe {
        match one.count {
            0 => Ok(()),
            1 => gpu.copy(from, to, one.bytes),
            count => gpu.copy_within(Apart {
                from,
                from_pitch: one.from_pitch,
                to,
                to_pitch: one.to_pitch,
                count,
                width: one.bytes,
            }),
        }
    }
}
