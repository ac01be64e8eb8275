//! The kernels of crates/pp-kernels/kernels, and what each is launched with: the host's side of the `.cu` files.

use std::sync::Mutex;

use pp_kernels::denoise::geometry::{self, PATCH, TOKEN};
use pp_kernels::{Failure, SessionConfig};

use crate::gpu::{self, Function, Memory, Shape, Stream, arguments};

/// The device code, the same files that the built-in kernels embed.
macro_rules! ptx {
    ($name:literal) => {
        gpu::load(include_str!(concat!(
            "../../../crates/pp-kernels/kernels/ptx/",
            $name,
            ".ptx"
        )))
    };
}

/// Bins of the histogram of one plane (noise.cu).
const BINS: usize = 4096;
/// Samples on the left and the top of a scratch plane, and on the right and the bottom (geometry.cuh).
const MARGINS: usize = 4 + 20;
const BYTES_PER_SAMPLE: usize = 2 + 2 + 4;
/// The part of a scratch plane that a block of `unfold` makes.
const UNFOLD: [usize; 2] = [64, 32];
/// Patches of a block of `attend`, of which neighbouring blocks share the last.
const TILE: [usize; 2] = [16, 24];
/// Frames that a block of `attend` takes together, one kernel for each.
const TOGETHER: [u32; 3] = [1, 2, 4];
/// Shared memory of a block of each of those, in the first pass and in the others.
const SHARED: [[u32; 3]; 2] = [[110_212, 105_320, 145_968], [153_444, 131_656, 163_600]];
/// Between frames on the device, so that each begins where rows are read in one piece.
const FRAME_ALIGN: usize = 256;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct Plane {
    width: i32,
    height: i32,
    tokens_x: i32,
    tokens_y: i32,
    first_token: i32,
    offset: i32,
}

/// The sizes of a frame, as every kernel takes them.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Geometry {
    planes: i32,
    tokens: i32,
    plane: [Plane; 3],
}

impl Geometry {
    pub(crate) fn of(config: &SessionConfig) -> Geometry {
        let geometry = geometry::Geometry::of(config);
        let mut plane = [Plane::default(); 3];
        let mut offset = 0;
        for (to, from) in plane.iter_mut().zip(&geometry.planes) {
            *to = Plane {
                width: from.width as i32,
                height: from.height as i32,
                tokens_x: from.tokens_x() as i32,
                tokens_y: from.tokens_y() as i32,
                first_token: from.first_token as i32,
                offset,
            };
            offset += to.width * to.height;
        }
        Geometry {
            planes: geometry.planes.len() as i32,
            tokens: geometry.tokens as i32,
            plane,
        }
    }

    pub(crate) fn planes(&self) -> u32 {
        self.planes as u32
    }

    pub(crate) fn tokens(&self) -> u64 {
        self.tokens as u64
    }

    /// Bytes of a frame as tokens.
    pub(crate) fn token_bytes(&self) -> usize {
        self.tokens as usize * TOKEN * 2
    }

    /// Bytes from one frame of samples to the next; its planes lie without gaps.
    pub(crate) fn frame_stride(&self) -> usize {
        let planes = self.plane.iter();
        let bytes: usize = planes.map(|p| p.width as usize * p.height as usize).sum();
        bytes.next_multiple_of(FRAME_ALIGN)
    }

    /// Where a plane begins in a frame of samples.
    pub(crate) fn plane_offset(&self, plane: usize) -> u64 {
        self.plane[plane].offset as u64
    }

    /// Width and height of each scratch plane.
    fn rasters(&self) -> impl Iterator<Item = [usize; 2]> {
        self.plane
            .into_iter()
            .take(self.planes as usize)
            .map(|p| [p.tokens_x, p.tokens_y].map(|tokens| tokens as usize * PATCH + MARGINS))
    }

    /// Bytes of a scratch frame.
    pub(crate) fn scratch_bytes(&self) -> usize {
        self.rasters().map(|[w, h]| w * h * BYTES_PER_SAMPLE).sum()
    }

    /// Blocks of `unfold` for the largest plane.
    fn unfold_blocks(&self) -> u32 {
        let blocks = self
            .rasters()
            .map(|[w, h]| w.div_ceil(UNFOLD[0]) * h.div_ceil(UNFOLD[1]));
        blocks.max().unwrap_or(0) as u32
    }

    /// Blocks of `attend` for all planes.
    fn attend_blocks(&self) -> u32 {
        let along = |tokens: i32, tile: usize| (2 * tokens as usize - 2).div_ceil(tile - 1).max(1);
        let planes = self.plane.iter().take(self.planes as usize);
        let blocks = planes.map(|p| along(p.tokens_x, TILE[0]) * along(p.tokens_y, TILE[1]));
        blocks.sum::<usize>() as u32
    }
}

/// One pass of `attend`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attend {
    pub(crate) values: u64,
    pub(crate) guides: u64,
    pub(crate) out: u64,
    pub(crate) sigma: u64,
    pub(crate) step: u64,
    pub(crate) noise_scale: f32,
    pub(crate) bias: f32,
    pub(crate) frames: i32,
    pub(crate) context: i32,
    pub(crate) context_at: [i32; 2],
    pub(crate) slots: i32,
    pub(crate) first_slot: i32,
    pub(crate) last: i32,
    pub(crate) reserved: i32,
    pub(crate) geometry: Geometry,
}

// As the `.cu` files have them.
const _: () = assert!(size_of::<Geometry>() == 80 && size_of::<Attend>() == 160);

/// The kernels, loaded into one context.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kernels {
    encode: Function,
    decode: Function,
    noise_count: Function,
    noise_sigma: Function,
    conditioning: Function,
    condition: Function,
    unfold: Function,
    unfold_guides: Function,
    attend: [[Function; 3]; 2],
}

impl Kernels {
    /// Those of the current context, whose number this is; they are compiled for its device once. The context must
    /// live as long as the process, as a device's primary context does that is never given back.
    pub(crate) fn of(context: u64) -> Result<Kernels, Failure> {
        static LOADED: Mutex<Vec<(u64, Kernels)>> = Mutex::new(Vec::new());
        let mut loaded = LOADED
            .lock()
            .map_err(|_| Failure::error("loading kernels panicked"))?;
        if let Some((_, kernels)) = loaded.iter().find(|(of, _)| *of == context) {
            return Ok(*kernels);
        }
        let capability = gpu::capability()?;
        if capability < (8, 0) {
            return Err(Failure::unsupported(format!(
                "the GPU has compute capability {}.{}, these kernels need 8.0 or newer",
                capability.0, capability.1
            )));
        }
        let encode = ptx!("encode")?;
        let decode = ptx!("decode")?;
        let noise = ptx!("noise")?;
        let unfold = ptx!("unfold")?;
        let attend = ptx!("attend")?;
        let most = gpu::most_shared()?;
        let pass = |which: usize| -> Result<[Function; 3], Failure> {
            let [one, two, four] = [0, 1, 2].map(|at| {
                let name = format!("attend_{}_{}", ["first", "next"][which], TOGETHER[at]);
                gpu::function(&attend, &name)?.with_shared(SHARED[which][at], most)
            });
            Ok([one?, two?, four?])
        };
        let kernels = Kernels {
            encode: gpu::function(&encode, "encode")?,
            decode: gpu::function(&decode, "decode")?,
            noise_count: gpu::function(&noise, "noise_count")?,
            noise_sigma: gpu::function(&noise, "noise_sigma")?,
            conditioning: gpu::function(&noise, "conditioning")?,
            condition: gpu::function(&noise, "condition")?,
            unfold_guides: gpu::function(&unfold, "unfold_guides")?,
            unfold: gpu::function(&unfold, "unfold")?,
            attend: [pass(0)?, pass(1)?],
        };
        loaded.push((context, kernels));
        Ok(kernels)
    }

    /// # Safety
    /// `frames` holds so many packed frames, `tokens` has room for theirs, until the stream has passed.
    pub(crate) unsafe fn encode(
        &self,
        stream: Stream,
        geometry: Geometry,
        frames: u64,
        tokens: u64,
        count: usize,
    ) -> Result<(), Failure> {
        let (stride, count) = (geometry.frame_stride() as u64, count as i32);
        let mut arguments = arguments![frames, stride, tokens, geometry, count];
        // SAFETY: the types are those of encode.cu; the memory is the caller's duty.
        unsafe { stream.launch(self.encode, token_rows(&geometry, count), &mut arguments) }
    }

    /// # Safety
    /// `tokens` holds those of so many frames, `frames` has room for them packed, until the stream has passed.
    pub(crate) unsafe fn decode(
        &self,
        stream: Stream,
        geometry: Geometry,
        tokens: u64,
        frames: u64,
        count: usize,
    ) -> Result<(), Failure> {
        let (stride, count) = (geometry.frame_stride() as u64, count as i32);
        let mut arguments = arguments![tokens, frames, stride, geometry, count];
        // SAFETY: the types are those of decode.cu; the memory is the caller's duty.
        unsafe { stream.launch(self.decode, token_rows(&geometry, count), &mut arguments) }
    }

    /// Estimates the noise of each plane of a packed frame.
    ///
    /// # Safety
    /// `frame` holds a packed frame until the stream has passed; `noise` is of this context.
    pub(crate) unsafe fn estimate(
        &self,
        stream: Stream,
        geometry: Geometry,
        frame: u64,
        noise: &Noise,
    ) -> Result<(), Failure> {
        let (histogram, sigma) = (noise.histogram.address(), noise.sigma.address());
        let planes = geometry.planes();
        let mut count = arguments![frame, geometry, histogram];
        let mut judge = arguments![histogram, sigma];
        // SAFETY: the types are those of noise.cu; the histogram is zero, as each `noise_sigma` leaves it.
        unsafe {
            stream.launch(self.noise_count, shape([64, planes], 256, 0), &mut count)?;
            stream.launch(self.noise_sigma, shape([planes, 1], 1024, 0), &mut judge)
        }
    }

    /// Writes the tensors `conditioning_embeds` and `denoising_step_list`.
    ///
    /// # Safety
    /// Both have room for their elements until the stream has passed.
    pub(crate) unsafe fn conditioning(
        &self,
        stream: Stream,
        planes: u32,
        noise: &Noise,
        [embeds, steps]: [u64; 2],
        [count, first, rest]: [i64; 3],
    ) -> Result<(), Failure> {
        let (sigma, planes, count) = (noise.sigma.address(), planes as i32, count as i32);
        let mut arguments = arguments![sigma, planes, embeds, steps, count, first, rest];
        // SAFETY: the types are those of noise.cu; the memory is the caller's duty.
        unsafe { stream.launch(self.conditioning, shape([1, 1], 32, 0), &mut arguments) }
    }

    /// Keeps the noise of each plane that the tensor `conditioning_embeds` says.
    ///
    /// # Safety
    /// The tensor is there until the stream has passed.
    pub(crate) unsafe fn condition(
        &self,
        stream: Stream,
        planes: u32,
        embeds: u64,
        sigma: &Memory,
    ) -> Result<(), Failure> {
        let (planes, sigma) = (planes as i32, sigma.address());
        let mut arguments = arguments![embeds, planes, sigma];
        // SAFETY: the types are those of noise.cu; the memory is the caller's duty.
        unsafe { stream.launch(self.condition, shape([1, 1], 32, 0), &mut arguments) }
    }

    /// Tokens of so many frames to scratch frames, of which `scratch` has `slots`, from slot `first` on; the tokens are
    /// those of frames, or what a pass has left for the next one.
    ///
    /// # Safety
    /// The tokens are there until the stream has passed.
    pub(crate) unsafe fn unfold(
        &self,
        stream: Stream,
        geometry: Geometry,
        is_guide: bool,
        tokens: u64,
        count: usize,
        (scratch, first, slots): (&Memory, usize, usize),
    ) -> Result<(), Failure> {
        let (scratch, first, slots) = (scratch.address(), first as i32, slots as i32);
        let kernel = if is_guide {
            self.unfold_guides
        } else {
            self.unfold
        };
        let grid = [geometry.unfold_blocks(), geometry.planes() * count as u32];
        let mut arguments = arguments![tokens, scratch, geometry, first, slots];
        // SAFETY: the types are those of unfold.cu; the memory is the caller's duty.
        unsafe { stream.launch(kernel, shape(grid, 256, 0), &mut arguments) }
    }

    /// One pass of the attention.
    ///
    /// # Safety
    /// What `pass` points to is there until the stream has passed, and as long as its numbers say.
    pub(crate) unsafe fn attend(
        &self,
        stream: Stream,
        is_first: bool,
        pass: Attend,
    ) -> Result<(), Failure> {
        // Three frames are taken as four.
        let (later, which) = (usize::from(!is_first), (pass.frames as usize - 1).min(2));
        let grid = [
            pass.geometry.attend_blocks(),
            (pass.frames as u32).div_ceil(TOGETHER[which]),
        ];
        let shape = shape(grid, 384, SHARED[later][which]);
        let mut arguments = arguments![pass];
        // SAFETY: the type is that of attend.cu; the memory is the caller's duty.
        unsafe { stream.launch(self.attend[later][which], shape, &mut arguments) }
    }
}

/// The noise of each plane, and what it is estimated with.
#[derive(Debug)]
pub(crate) struct Noise {
    histogram: Memory,
    pub(crate) sigma: Memory,
}

impl Noise {
    /// Without an estimate: no noise.
    pub(crate) fn new(geometry: &Geometry, stream: Stream) -> Result<Noise, Failure> {
        let planes = geometry.planes as usize;
        Ok(Noise {
            histogram: Memory::zeroed(planes * BINS * 4, stream)?,
            sigma: Memory::zeroed(planes * 4, stream)?,
        })
    }
}

/// One thread for each row of each token.
fn token_rows(geometry: &Geometry, frames: i32) -> Shape {
    let rows = frames as u64 * geometry.tokens() * PATCH as u64;
    shape([rows.div_ceil(256) as u32, 1], 256, 0)
}

fn shape([x, y]: [u32; 2], block: u32, shared: u32) -> Shape {
    Shape {
        grid: [x, y, 1],
        block,
        shared,
    }
}
