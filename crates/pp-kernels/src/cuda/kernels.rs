//! The embedded PTX, the kernels in it, and what each is launched with. The sources are in `kernels/*.cu`.
//!
//! Hazard: a launch passes raw bytes. So the structures here mirror those of `kernels/geometry.cuh` and
//! `kernels/attend.cu`, their sizes are asserted, and every kernel has one function here and no other caller.
//!
//! Modules are loaded once for a context and stay: unloading would wait for the device.

use std::collections::HashMap;
use std::sync::{Mutex, OnceLock, PoisonError};

use super::driver::{CudaError, Driver, Function, Module, Ptx, Shape, Stream, arguments};
use crate::cpu::geometry::{Geometry, PATCH};
use crate::cpu::settings;
use crate::error::Failure;

/// The modules with the PTX for compute_80 and for compute_90a, from the files of those names.
macro_rules! modules {
    ($($module:ident = $file:literal),* $(,)?) => {
        #[derive(Debug, Clone, Copy)]
        enum Source { $($module),* }

        impl Source {
            #[cfg(test)]
            const ALL: &[Source] = &[$(Source::$module),*];

            fn ptx(self, arch: Arch) -> Ptx {
                let [old, new] = match self {
                    $(Source::$module => [
                        include_str!(concat!("../../kernels/ptx/", $file, ".compute_80.ptx")),
                        include_str!(concat!("../../kernels/ptx/", $file, ".compute_90a.ptx")),
                    ]),*
                };
                match arch {
                    Arch::Compute80 => Ptx { arch: "compute_80", text: old },
                    Arch::Compute90a => Ptx { arch: "compute_90a", text: new },
                }
            }
        }
    };
}

modules! {
    Encode = "encode",
    Decode = "decode",
    Noise = "noise",
    Unfold = "unfold",
    Attend = "attend",
    Spin = "spin",
    Hbm = "hbm",
}

/// What the denoiser's results come from.
const DENOISER: [Source; 5] = [
    Source::Encode,
    Source::Decode,
    Source::Noise,
    Source::Unfold,
    Source::Attend,
];

/// The architectures with PTX of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Arch {
    Compute80,
    Compute90a,
}

impl Arch {
    /// `compute_90a` runs on 9.0 alone; `compute_80` on everything from 8.0 on.
    fn of((major, minor): (i32, i32)) -> Result<Arch, CudaError> {
        match (major, minor) {
            (9, 0) => Ok(Arch::Compute90a),
            (8.., _) => Ok(Arch::Compute80),
            _ => Err(CudaError::OldDevice { major, minor }),
        }
    }
}

/// Changes with any PTX of the denoiser and with the numbers of the formula, whatever the device: both ranks have the
/// same one. (FNV-1a.)
pub(super) fn digest() -> u64 {
    static DIGEST: OnceLock<u64> = OnceLock::new();
    *DIGEST.get_or_init(|| {
        let texts = DENOISER
            .iter()
            .flat_map(|source| [Arch::Compute80, Arch::Compute90a].map(|arch| source.ptx(arch)))
            .flat_map(|ptx| ptx.text.as_bytes());
        let settings = settings::DIGEST.to_le_bytes();
        texts
            .chain(&settings)
            .fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
                (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3)
            })
    })
}

/// One plane, as the kernels take it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct PlaneArgument {
    width: i32,
    height: i32,
    tokens_x: i32,
    tokens_y: i32,
    first_token: i32,
    /// Where it begins in a packed frame of samples.
    offset: i32,
}

/// A frame, as the kernels take it.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct GeometryArgument {
    planes: i32,
    tokens: i32,
    plane: [PlaneArgument; 3],
}

/// One pass, as the kernels take it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct AttendArgument {
    pub(super) values: u64,
    pub(super) guides: u64,
    pub(super) out: u64,
    pub(super) sigma: u64,
    pub(super) step: u64,
    pub(super) noise_scale: f32,
    pub(super) bias: f32,
    pub(super) frames: i32,
    pub(super) context: i32,
    pub(super) context_at: [i32; 2],
    pub(super) slots: i32,
    pub(super) first_slot: i32,
    pub(super) last: i32,
    pub(super) reserved: i32,
    pub(super) geometry: GeometryArgument,
}

const _: () = {
    assert!(size_of::<PlaneArgument>() == 24);
    assert!(size_of::<GeometryArgument>() == 80);
    assert!(size_of::<AttendArgument>() == 160);
};

/// Samples around a plane in a scratch frame, both sides together; and bytes of scratch for each of its places.
const SCRATCH_MARGIN: usize = 24;
const SCRATCH_BYTES: usize = 8;
/// Patches in a block of the attention.
const TILE: [usize; 2] = [15, 7];
/// Shared memory of the attention for each frame that a block works on.
const ATTEND_SHARED: u32 = 10_404;

/// The sizes from which every launch follows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) argument: GeometryArgument,
    /// Bytes of the tokens of a frame.
    pub(super) token_bytes: usize,
    /// Bytes from one frame of samples to the next: those of a packed frame, rounded up so that every frame is aligned.
    pub(super) frame_stride: usize,
    /// Bytes of a scratch frame.
    pub(super) scratch_bytes: usize,
    /// Blocks that unfold the largest plane, and that attend to all planes.
    unfold_tiles: u32,
    attend_tiles: u32,
}

impl Sizes {
    pub(super) fn new(geometry: &Geometry) -> Result<Sizes, Failure> {
        let too_large =
            |_| Failure::unsupported("frames of this size are too large for the ptx kernels");
        let narrow = |number: usize| i32::try_from(number).map_err(too_large);
        let mut sizes = Sizes {
            argument: GeometryArgument {
                planes: narrow(geometry.planes.len())?,
                tokens: narrow(geometry.tokens)?,
                ..GeometryArgument::default()
            },
            token_bytes: geometry.frame_bytes(),
            frame_stride: 0,
            scratch_bytes: 0,
            unfold_tiles: 0,
            attend_tiles: 0,
        };
        let mut offset = 0;
        for (plane, argument) in geometry.planes.iter().zip(&mut sizes.argument.plane) {
            *argument = PlaneArgument {
                width: narrow(plane.width)?,
                height: narrow(plane.height)?,
                tokens_x: narrow(plane.tokens_x())?,
                tokens_y: narrow(plane.tokens_y())?,
                first_token: narrow(plane.first_token)?,
                offset: narrow(offset)?,
            };
            offset += plane.width * plane.height;
            let (width, height) = (
                plane.padded_width() + SCRATCH_MARGIN,
                plane.padded_height() + SCRATCH_MARGIN,
            );
            sizes.scratch_bytes += SCRATCH_BYTES * width * height;
            let unfold = (width.div_ceil(64) * height.div_ceil(32)) as u32;
            sizes.unfold_tiles = sizes.unfold_tiles.max(unfold);
            let across = |tokens: usize, tile: usize| (2 * tokens - 2).div_ceil(tile).max(1);
            sizes.attend_tiles +=
                (across(plane.tokens_x(), TILE[0]) * across(plane.tokens_y(), TILE[1])) as u32;
        }
        sizes.frame_stride = offset.next_multiple_of(256);
        Ok(sizes)
    }

    /// A block of 256 threads for 256 rows of tokens.
    fn rows(&self, frames: u32) -> Shape {
        let rows = u64::from(frames) * self.argument.tokens as u64 * PATCH as u64;
        Shape::line(rows.div_ceil(256) as u32, 256)
    }
}

/// The kernels of the denoiser, in one context.
#[derive(Debug)]
pub(super) struct Denoiser {
    encode: Function,
    decode: Function,
    noise_count: Function,
    noise_sigma: Function,
    conditioning: Function,
    condition: Function,
    unfold: Function,
    /// The first pass and the others, each for blocks of 1, 2 and 4 frames.
    attend: [[Function; 3]; 2],
}

/// The kernels of synthetic work, in one context.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Synthetic {
    spin: Function,
    copy: Function,
    blocks: u32,
}

/// What has been loaded, by the number of the context.
type Loaded<T> = Mutex<HashMap<u64, &'static T>>;

/// Loads once for the context, which is current.
fn once<T>(
    loaded: &Loaded<T>,
    driver: Driver,
    context: u64,
    load: impl FnOnce() -> Result<T, CudaError>,
) -> Result<&'static T, CudaError> {
    driver.check_context(context)?;
    let id = driver.context_id(context)?;
    // A thread that panicked here left the map as it was.
    let mut loaded = loaded.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = loaded.get(&id) {
        return Ok(found);
    }
    let made: &'static T = Box::leak(Box::new(load()?));
    loaded.insert(id, made);
    Ok(made)
}

impl Denoiser {
    /// The kernels in the context, which is current.
    pub(super) fn of(driver: Driver, context: u64) -> Result<&'static Denoiser, CudaError> {
        static LOADED: OnceLock<Loaded<Denoiser>> = OnceLock::new();
        once(LOADED.get_or_init(Loaded::default), driver, context, || {
            let arch = Arch::of(driver.capability()?)?;
            let load = |source: Source| Module::load(driver, source.ptx(arch));
            let (noise, attend) = (load(Source::Noise)?, load(Source::Attend)?);
            let pass = |name: &str| -> Result<[Function; 3], CudaError> {
                Ok([
                    attend.function(&format!("attend_{name}_1"))?,
                    attend.function(&format!("attend_{name}_2"))?,
                    attend.function(&format!("attend_{name}_4"))?,
                ])
            };
            Ok(Denoiser {
                encode: load(Source::Encode)?.function("encode")?,
                decode: load(Source::Decode)?.function("decode")?,
                noise_count: noise.function("noise_count")?,
                noise_sigma: noise.function("noise_sigma")?,
                conditioning: noise.function("conditioning")?,
                condition: noise.function("condition")?,
                unfold: load(Source::Unfold)?.function("unfold")?,
                attend: [pass("first")?, pass("next")?],
            })
        })
    }

    /// Samples of `frames` frames to their tokens.
    ///
    /// # Safety
    /// Both addresses are memory of the context, as large as `sizes` says, until the stream has passed.
    pub(super) unsafe fn encode(
        &self,
        stream: Stream,
        sizes: &Sizes,
        samples: u64,
        tokens: u64,
        frames: u32,
    ) -> Result<(), CudaError> {
        let (stride, geometry) = (sizes.frame_stride as u64, sizes.argument);
        // SAFETY: these are the kernel's parameters in their order; the memory is the caller's duty.
        unsafe {
            self.encode.launch(
                stream,
                sizes.rows(frames),
                &mut arguments![samples, stride, tokens, geometry, frames],
            )
        }
    }

    /// Tokens of `frames` frames to their samples.
    ///
    /// # Safety
    /// As [`Denoiser::encode`].
    pub(super) unsafe fn decode(
        &self,
        stream: Stream,
        sizes: &Sizes,
        tokens: u64,
        samples: u64,
        frames: u32,
    ) -> Result<(), CudaError> {
        let (stride, geometry) = (sizes.frame_stride as u64, sizes.argument);
        // SAFETY: as in `encode`.
        unsafe {
            self.decode.launch(
                stream,
                sizes.rows(frames),
                &mut arguments![tokens, samples, stride, geometry, frames],
            )
        }
    }

    /// Estimates the noise of one frame of samples into `sigma`. `histogram` is zero before and after.
    ///
    /// # Safety
    /// As [`Denoiser::encode`]; `histogram` has [`HISTOGRAM_BYTES`], `sigma` [`SIGMA_BYTES`].
    pub(super) unsafe fn estimate(
        &self,
        stream: Stream,
        sizes: &Sizes,
        samples: u64,
        histogram: u64,
        sigma: u64,
    ) -> Result<(), CudaError> {
        let geometry = sizes.argument;
        let planes = geometry.planes as u32;
        let count = Shape {
            grid: [64, planes, 1],
            block: [256, 1, 1],
            shared: 0,
        };
        // SAFETY: as in `encode`.
        unsafe {
            self.noise_count.launch(
                stream,
                count,
                &mut arguments![samples, geometry, histogram],
            )?;
            self.noise_sigma.launch(
                stream,
                Shape::line(planes, 1024),
                &mut arguments![histogram, sigma],
            )
        }
    }

    /// Writes `conditioning_embeds` from `sigma`, and `denoising_step_list`.
    ///
    /// # Safety
    /// As [`Denoiser::encode`]; `list` has `steps` elements.
    pub(super) unsafe fn conditioning(
        &self,
        stream: Stream,
        sizes: &Sizes,
        sigma: u64,
        embeds: u64,
        list: u64,
        steps: u32,
    ) -> Result<(), CudaError> {
        let planes = sizes.argument.planes;
        let [first, rest] = strengths();
        // SAFETY: as in `encode`.
        unsafe {
            self.conditioning.launch(
                stream,
                Shape::line(1, 32),
                &mut arguments![sigma, planes, embeds, list, steps, first, rest],
            )
        }
    }

    /// Keeps the noise of `conditioning_embeds` in `sigma`.
    ///
    /// # Safety
    /// As [`Denoiser::encode`].
    pub(super) unsafe fn condition(
        &self,
        stream: Stream,
        sizes: &Sizes,
        embeds: u64,
        sigma: u64,
    ) -> Result<(), CudaError> {
        let planes = sizes.argument.planes;
        // SAFETY: as in `encode`.
        unsafe {
            self.condition.launch(
                stream,
                Shape::line(1, 32),
                &mut arguments![embeds, planes, sigma],
            )
        }
    }

    /// Unfolds the tokens of `frames` frames into a ring of `slots` scratch frames, from `first_slot` on.
    ///
    /// # Safety
    /// As [`Denoiser::encode`].
    pub(super) unsafe fn unfold(
        &self,
        stream: Stream,
        sizes: &Sizes,
        tokens: u64,
        scratch: u64,
        [first_slot, slots]: [i32; 2],
        frames: u32,
    ) -> Result<(), CudaError> {
        let geometry = sizes.argument;
        let shape = Shape {
            grid: [sizes.unfold_tiles, frames * geometry.planes as u32, 1],
            block: [256, 1, 1],
            shared: 0,
        };
        // SAFETY: as in `encode`.
        unsafe {
            self.unfold.launch(
                stream,
                shape,
                &mut arguments![tokens, scratch, geometry, first_slot, slots],
            )
        }
    }

    /// One pass of attention.
    ///
    /// # Safety
    /// As [`Denoiser::encode`], for every address in `pass`, the values read from `sigma` and `step` included.
    pub(super) unsafe fn attend(
        &self,
        stream: Stream,
        sizes: &Sizes,
        is_first: bool,
        pass: AttendArgument,
    ) -> Result<(), CudaError> {
        let frames = pass.frames as u32;
        let (variant, each) = match frames {
            1 => (0, 1),
            2 => (1, 2),
            _ => (2, 4),
        };
        let shape = Shape {
            grid: [sizes.attend_tiles, frames.div_ceil(each), 1],
            block: [256, 1, 1],
            shared: ATTEND_SHARED * each,
        };
        // SAFETY: as in `encode`.
        unsafe {
            self.attend[usize::from(!is_first)][variant].launch(
                stream,
                shape,
                &mut arguments![pass],
            )
        }
    }
}

/// Bytes of the counters of the noise's estimate.
pub(super) const HISTOGRAM_BYTES: usize = 3 * 4096 * 4;
/// Bytes of the noise of all planes, as f32.
pub(super) const SIGMA_BYTES: usize = 3 * 4;

/// The strengths of the first pass and of all others.
fn strengths() -> [i64; 2] {
    let mut schedule = settings::schedule(2);
    std::array::from_fn(|_| schedule.next().unwrap_or(0))
}

impl Synthetic {
    /// The kernels in the context, which is current.
    pub(crate) fn of(driver: Driver, context: u64) -> Result<Synthetic, CudaError> {
        static LOADED: OnceLock<Loaded<Synthetic>> = OnceLock::new();
        once(LOADED.get_or_init(Loaded::default), driver, context, || {
            let arch = Arch::of(driver.capability()?)?;
            let load = |source: Source| Module::load(driver, source.ptx(arch));
            Ok(Synthetic {
                spin: load(Source::Spin)?.function("spin")?,
                copy: load(Source::Hbm)?.function("hbm_copy")?,
                blocks: 4 * driver.multiprocessors()?,
            })
        })
        .copied()
    }

    /// Blocks that spin for so many nanoseconds.
    pub(crate) fn spin(
        &self,
        stream: Stream,
        blocks: u32,
        nanoseconds: u64,
    ) -> Result<(), CudaError> {
        // SAFETY: this is the kernel's only parameter, and it touches no memory.
        unsafe {
            self.spin.launch(
                stream,
                Shape::line(blocks, 32),
                &mut arguments![nanoseconds],
            )
        }
    }

    /// Copies memory, again and again.
    ///
    /// # Safety
    /// Both addresses are memory of the context, of `bytes` (a multiple of 16), until the stream has passed.
    pub(crate) unsafe fn copy(
        &self,
        stream: Stream,
        from: u64,
        to: u64,
        bytes: u64,
        repeats: u32,
    ) -> Result<(), CudaError> {
        let words = bytes / 16;
        // SAFETY: these are the kernel's parameters in their order; the memory is the caller's duty.
        unsafe {
            self.copy.launch(
                stream,
                Shape::line(self.blocks, 512),
                &mut arguments![from, to, words, repeats],
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Chroma;

    #[test]
    fn each_device_gets_the_ptx_that_runs_on_it() {
        assert_eq!(Arch::of((9, 0)), Ok(Arch::Compute90a));
        for newer in [(8, 0), (8, 6), (8, 9), (9, 1), (10, 0), (12, 1)] {
            assert_eq!(Arch::of(newer), Ok(Arch::Compute80), "{newer:?}");
        }
        for older in [(7, 5), (7, 0), (6, 1)] {
            let error = Arch::of(older).unwrap_err().to_string();
            assert!(error.contains("need 8.0 or newer"), "{error}");
        }
    }

    #[test]
    fn every_file_holds_ptx_for_what_its_name_says() {
        for source in Source::ALL {
            for (arch, target) in [
                (Arch::Compute80, ".target sm_80\n"),
                (Arch::Compute90a, ".target sm_90a\n"),
            ] {
                assert!(
                    source.ptx(arch).text.contains(target),
                    "{source:?} {arch:?}"
                );
            }
        }
    }

    #[test]
    fn every_kernel_is_in_its_file_with_its_parameters() {
        // Bytes of each parameter, as PTX declares them.
        let kernels: [(Source, &str, &[usize]); 15] = [
            (Source::Encode, "encode", &[8, 8, 8, 80, 4]),
            (Source::Decode, "decode", &[8, 8, 8, 80, 4]),
            (Source::Noise, "noise_count", &[8, 80, 8]),
            (Source::Noise, "noise_sigma", &[8, 8]),
            (Source::Noise, "conditioning", &[8, 4, 8, 8, 4, 8, 8]),
            (Source::Noise, "condition", &[8, 4, 8]),
            (Source::Unfold, "unfold", &[8, 8, 80, 4, 4]),
            (Source::Attend, "attend_first_1", &[160]),
            (Source::Attend, "attend_first_2", &[160]),
            (Source::Attend, "attend_first_4", &[160]),
            (Source::Attend, "attend_next_1", &[160]),
            (Source::Attend, "attend_next_2", &[160]),
            (Source::Attend, "attend_next_4", &[160]),
            (Source::Spin, "spin", &[8]),
            (Source::Hbm, "hbm_copy", &[8, 8, 8, 4]),
        ];
        for (source, name, expected) in kernels {
            for arch in [Arch::Compute80, Arch::Compute90a] {
                let text = source.ptx(arch).text;
                let entry = text.split_once(&format!(".entry {name}("));
                let (_, rest) = entry.unwrap_or_else(|| panic!("{name} is not in {source:?}"));
                let list = rest.split_once(')').expect("the list ends").0;
                let found: Vec<usize> = list.split(',').map(parameter_bytes).collect();
                assert_eq!(found, expected, "{name} {arch:?}");
            }
        }
    }

    /// `.param .u64 name`, or `.param .align 8 .b8 name[160]`.
    fn parameter_bytes(declaration: &str) -> usize {
        if let Some((_, length)) = declaration.split_once('[') {
            let length = length.split_once(']').expect("a length").0;
            return length.parse().expect("a number");
        }
        let bits = declaration
            .split_whitespace()
            .find_map(|word| word.strip_prefix(".u").or_else(|| word.strip_prefix(".b")));
        bits.and_then(|bits| bits.parse::<usize>().ok())
            .expect("a type")
            / 8
    }

    #[test]
    fn sizes_of_720p_are_those_of_the_kernels() {
        let geometry = Geometry::new(1280, 720, Chroma::C420);
        let sizes = Sizes::new(&geometry).unwrap();
        assert_eq!(sizes.frame_stride, 1_382_400);
        assert_eq!(sizes.scratch_bytes, 11_841_024);
        assert_eq!(sizes.scratch_bytes % 256, 0);
        assert_eq!(sizes.argument.plane[2].offset, 1280 * 720 + 640 * 360);
        let tiles = |tx: u32, ty: u32| (2 * tx - 2).div_ceil(15) * (2 * ty - 2).div_ceil(7);
        assert_eq!(sizes.attend_tiles, tiles(160, 90) + 2 * tiles(80, 45));
        // The smallest frame has one token in each chroma plane, and a tile is needed for it.
        let smallest = Sizes::new(&Geometry::new(16, 16, Chroma::C420)).unwrap();
        assert_eq!(smallest.attend_tiles, 3);
    }

    #[test]
    fn frames_beyond_what_the_kernels_count_are_refused() {
        let geometry = Geometry::new(32_768, 32_768, Chroma::C444);
        assert!(Sizes::new(&geometry).is_err());
        assert!(Sizes::new(&Geometry::new(32_768, 32_768, Chroma::C420)).is_ok());
    }

    #[test]
    fn two_strengths_make_every_schedule() {
        let [first, rest] = strengths();
        for steps in 0..6 {
            let expected = std::iter::once(first).chain(std::iter::repeat(rest));
            assert!(settings::schedule(steps).eq(expected.take(steps as usize)));
        }
    }
}
