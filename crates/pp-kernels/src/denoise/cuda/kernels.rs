//! The kernels in a context, and what each is launched with. The sources are in `kernels/*.cu`.
//!
//! Hazard: a launch passes raw bytes. So every kernel has one function here and no other caller.
//!
//! Modules are loaded once for a context and stay: unloading would wait for the device.

use std::sync::OnceLock;

use pp_device::arguments;

use super::gpu::{Gpu, LaunchConfig};
use super::sizes::{AttendArgument, Sizes};
use crate::cuda::once;
use crate::cuda::ptx::{self, Source};
use crate::denoise::settings;
use crate::error::Failure;

/// What the denoiser's results come from.
const DENOISER: [Source; 5] = [
    Source::Encode,
    Source::Decode,
    Source::Noise,
    Source::Unfold,
    Source::Attend,
];

/// Frames that one block of the attention works on.
const ATTEND_FRAMES: [u32; 3] = [1, 2, 4];
/// Bytes of dynamic shared memory of the first pass and of the others, for so many frames.
const ATTEND_SHARED: [[u32; 3]; 2] = [[110_212, 105_320, 145_968], [153_444, 131_656, 163_600]];
/// Threads of a block of the attention.
const ATTEND_THREADS: u32 = 384;

/// The kernels of the denoiser, in one context.
#[derive(Debug)]
pub(super) struct Functions<F> {
    encode: F,
    decode: F,
    noise_count: F,
    noise_sigma: F,
    conditioning: F,
    condition: F,
    unfold: F,
    unfold_guides: F,
    /// The first pass and the others, each for blocks of 1, 2 and 4 frames.
    attend: [[F; 3]; 2],
}

impl<F: Copy + Send + Sync + 'static> Functions<F> {
    /// The kernels in the context of the stream, which is current.
    pub(super) fn of<G: Gpu<Function = F>>(gpu: &G) -> Result<&'static Functions<F>, Failure> {
        once(gpu.context_id()?, || {
            let limits = gpu.limits()?;
            ptx::check(limits.driver_version, limits.capability)?;
            check_shared(limits.shared_bytes_per_block)?;
            let load = |source: Source| gpu.load(source.ptx());
            let (noise, attend) = (load(Source::Noise)?, load(Source::Attend)?);
            let unfold = load(Source::Unfold)?;
            let pass = |name: &str, shared: [u32; 3]| -> Result<[F; 3], Failure> {
                let [one, two, four] = std::array::from_fn(|index| {
                    let name = format!("attend_{name}_{}", ATTEND_FRAMES[index]);
                    gpu.function(&attend, &name, shared[index])
                });
                Ok([one?, two?, four?])
            };
            Ok(Functions {
                encode: gpu.function(&load(Source::Encode)?, "encode", 0)?,
                decode: gpu.function(&load(Source::Decode)?, "decode", 0)?,
                noise_count: gpu.function(&noise, "noise_count", 0)?,
                noise_sigma: gpu.function(&noise, "noise_sigma", 0)?,
                conditioning: gpu.function(&noise, "conditioning", 0)?,
                condition: gpu.function(&noise, "condition", 0)?,
                unfold: gpu.function(&unfold, "unfold", 0)?,
                unfold_guides: gpu.function(&unfold, "unfold_guides", 0)?,
                attend: [
                    pass("first", ATTEND_SHARED[0])?,
                    pass("next", ATTEND_SHARED[1])?,
                ],
            })
        })
    }
}

/// The kernels, the stream that they are issued to, and the sizes of its frames.
#[derive(Debug, Clone)]
pub(super) struct DenoiseKernels<G: Gpu> {
    functions: &'static Functions<G::Function>,
    pub(super) gpu: G,
    pub(super) sizes: Sizes,
}

impl<G: Gpu> DenoiseKernels<G> {
    /// For a stream whose context is current.
    pub(super) fn new(gpu: G, sizes: Sizes) -> Result<DenoiseKernels<G>, Failure> {
        Ok(DenoiseKernels {
            functions: Functions::of(&gpu)?,
            gpu,
            sizes,
        })
    }

    /// Samples of `frames` frames to their tokens.
    ///
    /// # Safety
    /// Both addresses are memory of the context, as large as `sizes` says, until the stream has passed.
    pub(super) unsafe fn encode(
        &self,
        samples: u64,
        tokens: u64,
        frames: u32,
    ) -> Result<(), Failure> {
        let (stride, geometry) = (self.sizes.frame_stride as u64, self.sizes.argument);
        // SAFETY: these are the kernel's parameters in their order; the memory is the caller's duty.
        unsafe {
            self.gpu.launch(
                self.functions.encode,
                self.sizes.rows(frames),
                &mut arguments![samples, stride, tokens, geometry, frames],
            )
        }
    }

    /// Tokens of `frames` frames to their samples.
    ///
    /// # Safety
    /// As [`DenoiseKernels::encode`].
    pub(super) unsafe fn decode(
        &self,
        tokens: u64,
        samples: u64,
        frames: u32,
    ) -> Result<(), Failure> {
        let (stride, geometry) = (self.sizes.frame_stride as u64, self.sizes.argument);
        // SAFETY: as in `encode`.
        unsafe {
            self.gpu.launch(
                self.functions.decode,
                self.sizes.rows(frames),
                &mut arguments![tokens, samples, stride, geometry, frames],
            )
        }
    }

    /// Estimates the noise of one frame of samples into `sigma`. `histogram` is zero before and after.
    ///
    /// # Safety
    /// As [`DenoiseKernels::encode`]; `histogram` has [`HISTOGRAM_BYTES`], `sigma` [`SIGMA_BYTES`].
    pub(super) unsafe fn estimate(
        &self,
        samples: u64,
        histogram: u64,
        sigma: u64,
    ) -> Result<(), Failure> {
        let geometry = self.sizes.argument;
        let planes = geometry.planes as u32;
        let count = LaunchConfig {
            grid: [64, planes, 1],
            block: [256, 1, 1],
            shared: 0,
        };
        // SAFETY: as in `encode`.
        unsafe {
            self.gpu.launch(
                self.functions.noise_count,
                count,
                &mut arguments![samples, geometry, histogram],
            )?;
            self.gpu.launch(
                self.functions.noise_sigma,
                LaunchConfig::line(planes, 1024),
                &mut arguments![histogram, sigma],
            )
        }
    }

    /// Writes `conditioning_embeds` from `sigma`, and `denoising_step_list`.
    ///
    /// # Safety
    /// As [`DenoiseKernels::encode`]; `list` has `steps` elements.
    pub(super) unsafe fn conditioning(
        &self,
        sigma: u64,
        embeds: u64,
        list: u64,
        steps: u32,
    ) -> Result<(), Failure> {
        let planes = self.sizes.argument.planes;
        let [first, rest] = strengths();
        // SAFETY: as in `encode`.
        unsafe {
            self.gpu.launch(
                self.functions.conditioning,
                LaunchConfig::line(1, 32),
                &mut arguments![sigma, planes, embeds, list, steps, first, rest],
            )
        }
    }

    /// Keeps the noise of `conditioning_embeds` in `sigma`.
    ///
    /// # Safety
    /// As [`DenoiseKernels::encode`].
    pub(super) unsafe fn condition(&self, embeds: u64, sigma: u64) -> Result<(), Failure> {
        let planes = self.sizes.argument.planes;
        // SAFETY: as in `encode`.
        unsafe {
            self.gpu.launch(
                self.functions.condition,
                LaunchConfig::line(1, 32),
                &mut arguments![embeds, planes, sigma],
            )
        }
    }

    /// Unfolds the tokens of `frames` frames into a ring of `slots` scratch frames, from `first_slot` on. What a pass
    /// has left for the next one are guides.
    ///
    /// # Safety
    /// As [`DenoiseKernels::encode`].
    pub(super) unsafe fn unfold(
        &self,
        tokens: Tokens,
        scratch: u64,
        [first_slot, slots]: [i32; 2],
        frames: u32,
    ) -> Result<(), Failure> {
        let (function, tokens) = match tokens {
            Tokens::OfFrames(tokens) => (self.functions.unfold, tokens),
            Tokens::OfGuides(tokens) => (self.functions.unfold_guides, tokens),
        };
        let geometry = self.sizes.argument;
        let shape = LaunchConfig {
            grid: [self.sizes.unfold_tiles, frames, 1],
            block: [256, 1, 1],
            shared: 0,
        };
        // SAFETY: as in `encode`.
        unsafe {
            self.gpu.launch(
                function,
                shape,
                &mut arguments![tokens, scratch, geometry, first_slot, slots],
            )
        }
    }

    /// One pass of attention.
    ///
    /// # Safety
    /// As [`DenoiseKernels::encode`], for every address in `pass`, the values read from `sigma` and `step` included.
    pub(super) unsafe fn attend(
        &self,
        is_first: bool,
        pass: AttendArgument,
    ) -> Result<(), Failure> {
        let frames = pass.frames as u32;
        let variant = (frames as usize - 1).min(2);
        let kind = usize::from(!is_first);
        let shape = LaunchConfig {
            grid: [
                self.sizes.attend_tiles,
                frames.div_ceil(ATTEND_FRAMES[variant]),
                1,
            ],
            block: [ATTEND_THREADS, 1, 1],
            shared: ATTEND_SHARED[kind][variant],
        };
        // SAFETY: as in `encode`.
        unsafe {
            self.gpu.launch(
                self.functions.attend[kind][variant],
                shape,
                &mut arguments![pass],
            )
        }
    }
}

/// The address of tokens, and what they are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tokens {
    OfFrames(u64),
    OfGuides(u64),
}

/// Refuses a device whose blocks cannot have the shared memory that the attention needs.
pub(super) fn check_shared(there_is: u32) -> Result<(), Failure> {
    let needed = ATTEND_SHARED.into_iter().flatten().max().unwrap_or(0);
    if there_is < needed {
        return Err(Failure::unsupported(format!(
            "a block on the GPU has at most {there_is} bytes of shared memory, these kernels need {needed} (A100, H100 \
             and H200 have them); run on the CPU with --kernels cpu"
        )));
    }
    Ok(())
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

/// Changes with any PTX of the denoiser and with the numbers of the formula, whatever the device: both ranks have the
/// same one.
pub(super) fn digest() -> u64 {
    static DIGEST: OnceLock<u64> = OnceLock::new();
    *DIGEST.get_or_init(|| {
        let texts = DENOISER.iter().flat_map(|source| source.ptx().as_bytes());
        fnv1a(texts.chain(&settings::DIGEST.to_le_bytes()))
    })
}

/// Source: G. Fowler, L. C. Noll, K.-P. Vo, "The FNV Non-Cryptographic Hash Algorithm"; its 64-bit variant 1a.
fn fnv1a<'a>(bytes: impl Iterator<Item = &'a u8>) -> u64 {
    bytes.fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01B3)
    })
}

#[cfg(test)]
mod tests {
    use super::super::sizes;
    use super::*;

    /// The number behind `name` in a source.
    fn constant(source: &str, name: &str) -> f64 {
        let (_, rest) = source
            .split_once(&format!(" {name} = "))
            .unwrap_or_else(|| panic!("{name} is not there"));
        let value = rest.split_once(';').expect("it ends").0;
        let terms = value
            .split('+')
            .map(|term| term.trim().trim_end_matches('f'));
        terms
            .map(|term| term.parse::<f64>().expect("a number"))
            .sum()
    }

    #[test]
    fn the_hash_is_the_published_one() {
        assert_eq!(fnv1a(b"".iter()), 0xCBF2_9CE4_8422_2325);
        assert_eq!(fnv1a(b"foobar".iter()), 0x8594_4171_F739_67E8);
    }

    #[test]
    fn the_numbers_here_are_those_of_the_sources() {
        let geometry = include_str!("../../../kernels/geometry.cuh");
        let attend = include_str!("../../../kernels/attend.cu");
        let unfold = include_str!("../../../kernels/unfold.cu");
        let noise = include_str!("../../../kernels/noise.cu");
        let expected = [
            (geometry, "kPatch", crate::denoise::geometry::PATCH as f64),
            (geometry, "kBytesPerSample", sizes::SCRATCH_BYTES as f64),
            (attend, "kTileX", (sizes::TILE[0] + 1) as f64),
            (attend, "kTileY", (sizes::TILE[1] + 1) as f64),
            (attend, "kRadius", settings::RADIUS[0] as f64),
            (attend, "kRadiusFar", settings::RADIUS[1] as f64),
            (attend, "kReach", settings::CONTEXT_FRAMES as f64),
            (attend, "kMinH2", 1e-6),
            (unfold, "kTileX", sizes::UNFOLD_TILE[0] as f64),
            (unfold, "kTileY", sizes::UNFOLD_TILE[1] as f64),
            (noise, "kBins", (HISTOGRAM_BYTES / 12) as f64),
        ];
        for (source, name, number) in expected {
            assert_eq!(constant(source, name), number, "{name}");
        }
        assert_eq!(settings::RADIUS[1], settings::RADIUS[2]);
        assert_eq!(constant(attend, "kKeep") as f32, settings::KEEP);
        assert_eq!(constant(attend, "kFloor") as f32, settings::FLOOR);
        let margin = constant(geometry, "kMargin") + constant(geometry, "kOverrun");
        assert_eq!(margin, sizes::SCRATCH_MARGIN as f64);
    }

    #[test]
    fn the_attention_has_as_much_shared_memory_as_its_source_says() {
        let source = include_str!("../../../kernels/attend.cu");
        for (kind, name, is_first) in [(0, "first", "true"), (1, "next", "false")] {
            for (frames, bytes) in ATTEND_FRAMES.into_iter().zip(ATTEND_SHARED[kind]) {
                let line =
                    format!("PP_ATTEND(attend_{name}_{frames}, {frames}, {is_first}, {bytes})");
                assert!(source.contains(&line), "{line}");
            }
        }
    }

    #[test]
    fn the_attention_has_as_many_threads_as_it_was_compiled_for() {
        let threads = format!(".maxntid {ATTEND_THREADS}");
        assert_eq!(Source::Attend.ptx().matches(&threads).count(), 6);
    }

    #[test]
    fn a_device_with_too_little_shared_memory_is_refused() {
        assert_eq!(check_shared(163_600), Ok(()));
        // What an RTX card has.
        let error = check_shared(101_376).unwrap_err().to_string();
        assert!(
            error.contains("101376") && error.contains("163600"),
            "{error}"
        );
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
