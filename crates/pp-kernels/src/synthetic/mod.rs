//! Work of a known length for benchmarks of pipelines: blocks that spin, matrix products, a stream through memory.
//!
//! [`Work::calibrate`] finds, once, how much of it takes the time that is wanted, by events of the device;
//! [`Work::launch`] then only enqueues. No work at all (a sleep on the host) needs nothing from here.

mod cublaslt;
pub(crate) mod gemm;
mod kernels;

use std::time::Duration;

use pp_device::{Stream, StreamBuffer};

use crate::cuda::{Clock, borrow, fill_with_noise};
use crate::error::Failure;
use gemm::Gemm;
use kernels::Synthetic;

/// Launches whose median is the calibrated time.
const SAMPLES: usize = 9;

/// What the device is kept busy with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Blocks that look at the clock until the time is over. They take one place each and no memory, so that other
    /// kernels (of NCCL, say) run beside them.
    Spin {
        /// How many, at least 1.
        blocks: u32,
    },
    /// Products of square matrices in bf16 with sums in f32, through cublasLt.
    Gemm {
        /// Rows and columns of each matrix, a multiple of 64.
        size: u32,
    },
    /// Reads and writes of device memory.
    Hbm {
        /// Bytes read in one repetition, and as many written; more than the caches hold, to measure the memory.
        bytes: u64,
    },
}

impl Kind {
    /// Blocks that spin on a part of the device.
    #[must_use]
    pub fn spin() -> Kind {
        Kind::Spin { blocks: 32 }
    }

    /// Products of some 20 µs on an H200, so that a fifth of a millisecond is met to a tenth.
    #[must_use]
    pub fn gemm() -> Kind {
        Kind::Gemm { size: 2048 }
    }

    /// A stream through twice 64 MiB, more than the second-level cache of an H200 holds.
    #[must_use]
    pub fn hbm() -> Kind {
        Kind::Hbm { bytes: 64 << 20 }
    }

    fn check(self) -> Result<(), Failure> {
        let reason = match self {
            Kind::Spin { blocks } if blocks == 0 || blocks > 65_535 => {
                format!("{blocks} blocks: must lie within 1 and 65535")
            }
            Kind::Gemm { size } if size == 0 || size % 64 != 0 || size > 32_768 => {
                format!("matrices of {size}: must be a multiple of 64 up to 32768")
            }
            Kind::Hbm { bytes } if bytes < 4096 || bytes % 4096 != 0 => {
                format!("{bytes} bytes: must be a multiple of 4096, at least one")
            }
            _ => return Ok(()),
        };
        Err(Failure::invalid(reason))
    }
}

/// What one launch achieves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rate {
    /// Bytes read and written.
    BytesPerSecond(f64),
    /// Multiplications and additions.
    FlopsPerSecond(f64),
}

/// How long one launch takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Calibration {
    /// What was wanted.
    pub target: Duration,
    /// The median of nine launches, by events around each.
    pub achieved: Duration,
    /// Products, or passes over the memory, in one launch.
    pub repetitions: u32,
    /// What they achieve; spinning achieves nothing.
    pub rate: Option<Rate>,
}

/// Synthetic work on one stream.
///
/// # If dropped
/// Its memory is freed behind what is enqueued; nothing waits.
#[derive(Debug)]
pub struct Work {
    stream: Stream,
    engine: Engine,
    /// Nanoseconds for spinning, repetitions of the others.
    amount: u64,
}

#[derive(Debug)]
enum Engine {
    Spin {
        kernels: Synthetic,
        blocks: u32,
    },
    Gemm(Gemm),
    Hbm {
        kernels: Synthetic,
        from: StreamBuffer,
        to: StreamBuffer,
    },
}

impl Work {
    /// Makes work that does the least until it is calibrated.
    ///
    /// # Safety
    /// `context` is a live `CUcontext`, current on the calling thread and on those that call the other functions;
    /// `stream` is a live `CUstream` of it. Both outlive the work, which is dropped with the context current.
    ///
    /// # Errors
    /// A number out of range, no driver, no cublasLt (for [`Kind::Gemm`]), no memory.
    pub unsafe fn new(kind: Kind, context: u64, stream: u64) -> Result<Work, Failure> {
        kind.check()?;
        // SAFETY: the caller's duty.
        let stream = unsafe { borrow(context, stream) }?;
        let engine = match kind {
            Kind::Spin { blocks } => Engine::Spin {
                kernels: Synthetic::of(stream.device())?,
                blocks,
            },
            Kind::Gemm { size } => Engine::Gemm(Gemm::new(&stream, size)?),
            Kind::Hbm { bytes } => {
                let memory = || StreamBuffer::new(&stream, bytes as usize);
                let (from, to) = (memory()?, memory()?);
                fill_with_noise(&from, 3)?;
                Engine::Hbm {
                    kernels: Synthetic::of(stream.device())?,
                    from,
                    to,
                }
            }
        };
        Ok(Work {
            stream,
            engine,
            amount: 1,
        })
    }

    /// Enqueues the work, as much as was calibrated.
    ///
    /// # Errors
    /// A context that is not current, or a failure of the device.
    pub fn launch(&mut self) -> Result<(), Failure> {
        self.stream.device().check_current()?;
        match &mut self.engine {
            Engine::Spin { kernels, blocks } => {
                Ok(kernels.spin(&self.stream, *blocks, self.amount)?)
            }
            Engine::Gemm(gemm) => (0..self.amount).try_for_each(|_| gemm.enqueue(&self.stream)),
            Engine::Hbm { kernels, from, to } => {
                let (from, to, bytes) = (from.address(), to.address(), to.len() as u64);
                // SAFETY: both memories are as long, and freed behind the stream's work.
                unsafe { kernels.copy(&self.stream, from, to, bytes, self.amount as u32) }?;
                Ok(())
            }
        }
    }

    /// Finds how much work takes `target`, for all launches from now on; for set-up only, as it runs the work and waits.
    ///
    /// Work that takes longer than the target when done once is done once: look at what was achieved.
    ///
    /// # Errors
    /// A context that is not current, a failure of the device, or one that does not finish within 20 s.
    pub fn calibrate(&mut self, target: Duration) -> Result<Calibration, Failure> {
        let clock = Clock::new(&self.stream)?;
        let wanted = target.as_secs_f64();
        // Spinning lasts as long as it is told; what a launch takes on top of it is a cost of the pipeline, not work.
        let (amount, rounds) = match self.engine {
            Engine::Spin { .. } => (target.as_nanos() as u64, 0),
            _ => (1, 4),
        };
        self.amount = amount;
        // The first launches load kernels, fill caches and raise the clock.
        clock.time(|| self.launch())?;
        for _ in 0..rounds {
            let taken = self.median(&clock, 3)?.as_secs_f64();
            let scaled = (self.amount as f64 * wanted / taken.max(1e-9)).round() as u64;
            self.amount = scaled.clamp(1, 1 << 20);
        }
        let achieved = self.median(&clock, SAMPLES)?;
        let per_second = |each: f64| each * self.amount as f64 / achieved.as_secs_f64().max(1e-9);
        let rate = match &self.engine {
            Engine::Spin { .. } => None,
            Engine::Gemm(gemm) => Some(Rate::FlopsPerSecond(per_second(gemm.flops()))),
            Engine::Hbm { to, .. } => Some(Rate::BytesPerSecond(per_second(2.0 * to.len() as f64))),
        };
        Ok(Calibration {
            target,
            achieved,
            repetitions: rate.map_or(1, |_| self.amount as u32),
            rate,
        })
    }

    fn median(&mut self, clock: &Clock, samples: usize) -> Result<Duration, Failure> {
        let mut times = Vec::with_capacity(samples);
        for _ in 0..samples {
            times.push(clock.time(|| self.launch())?);
        }
        times.sort_unstable();
        Ok(times[samples / 2])
    }
}
