//! The stages of `pp bench overlap` on GPUs: work that takes a fixed time, on payloads that stay
//! where they are.

use std::time::{Duration, Instant};

use pp_contract::{ChunkIndex, Envelope, FaultKind, Manifest, Outcome, with_source};
use pp_device::{CudaError, Device, Stream};
use pp_kernels::synthetic::{Calibration, Kind, Work};
use pp_runtime::core::Cut;
use pp_runtime::stage::{
    Built, Computed, Decoded, FrontStages, FrontWork, Offer, PhaseBStages, PhaseBWork, Place,
    Progress, StageError,
};
use pp_transport::nccl::{DeviceRx, DeviceTx};

use super::plan::{BenchPlan, built};
use crate::args::Simulate;
use crate::timed::{Done, Span, Timed, read_on};

fn device(e: CudaError) -> StageError {
    StageError::new(FaultKind::Device, "simulate work", with_source(&e))
}

/// Work of a fixed time.
enum Load {
    Nothing,
    /// The host waits and the GPU is idle.
    Sleep(Duration),
    Gpu(Box<Work>),
}

/// Work under way.
pub(super) enum Working {
    Sleep { end: Instant, time: Duration },
    Gpu(Span),
}

/// A stage's load on its stream.
pub(super) struct Stage {
    load: Load,
    timed: Timed,
    /// End of the last sleep; sleeps lie end to end.
    last_sleep: Option<Instant>,
    /// What one piece of work takes on this GPU, where it is the GPU's.
    pub(super) calibration: Option<Calibration>,
}

impl Stage {
    pub(super) fn open(
        on: &Device,
        how: Simulate,
        time: Duration,
        depth: u32,
    ) -> Result<Self, StageError> {
        on.bind().map_err(device)?;
        let stream = Stream::new(on).map_err(device)?;
        let kind = match how {
            Simulate::Sleep | Simulate::Spin => None,
            Simulate::GpuSpin => Some(Kind::spin()),
            Simulate::Gemm => Some(Kind::gemm()),
            Simulate::Hbm => Some(Kind::hbm()),
        };
        let mut calibration = None;
        let load = match kind {
            _ if time.is_zero() => Load::Nothing,
            None => Load::Sleep(time),
            Some(kind) => {
                let refuse = |e| StageError::new(FaultKind::Device, "calibrate", with_source(&e));
                // SAFETY: the context is the device's primary one, which lives as long as the
                // process, and was bound to this thread above; the stream lives in `timed`, which
                // is dropped after the load, and until then here, where `load` is dropped first.
                let work = unsafe { Work::new(kind, on.raw_context(), stream.raw()) };
                let mut work = work.map_err(refuse)?;
                calibration = Some(work.calibrate(time).map_err(refuse)?);
                Load::Gpu(Box::new(work))
            }
        };
        Ok(Self {
            load,
            timed: Timed::new(stream.clone(), depth as usize).map_err(device)?,
            last_sleep: None,
            calibration,
        })
    }

    /// Begins the work on one chunk; `on_slots` issues it between the events of the slots.
    fn begin(
        &mut self,
        on_slots: impl FnOnce(
            &Stream,
            &mut dyn FnMut() -> Result<(), StageError>,
        ) -> Result<(), StageError>,
    ) -> Result<Progress<Done, Working>, StageError> {
        match &mut self.load {
            Load::Nothing => {
                on_slots(&self.timed.stream, &mut || Ok(()))?;
                Ok(Progress::Done(Done {
                    work_ns: 0,
                    idle_ns: 0,
                }))
            }
            Load::Sleep(time) => {
                on_slots(&self.timed.stream, &mut || Ok(()))?;
                let now = Instant::now();
                let end = self.last_sleep.map_or(now, |last| now.max(last)) + *time;
                self.last_sleep = Some(end);
                Ok(Progress::UnderWay(Working::Sleep { end, time: *time }))
            }
            Load::Gpu(work) => {
                let span = self.timed.open().map_err(device)?;
                on_slots(&self.timed.stream, &mut || {
                    work.launch()
                        .map_err(|e| StageError::new(FaultKind::Device, "launch", with_source(&e)))
                })?;
                span.close(&self.timed.stream).map_err(device)?;
                Ok(Progress::UnderWay(Working::Gpu(span)))
            }
        }
    }

    /// How far the oldest work is.
    fn poll(&mut self, oldest: Working) -> Result<Progress<Done, Working>, StageError> {
        Ok(match oldest {
            Working::Sleep { end, .. } if Instant::now() < end => Progress::UnderWay(oldest),
            Working::Sleep { time, .. } => Progress::Done(Done {
                work_ns: time.as_nanos() as u64,
                idle_ns: 0,
            }),
            Working::Gpu(span) => {
                let polled = self.timed.poll(span).map_err(device)?;
                polled.map(|done| done, Working::Gpu)
            }
        })
    }
}

/// Builds in no time and decodes in a fixed one.
pub(super) struct GpuBenchFront {
    manifest: Manifest,
    left: u64,
    stage: Stage,
    /// The chunk at which the run counts as warm, and the last one.
    warm_at: u64,
    last: u64,
    free_when_warm: Option<u64>,
    free_at_end: Option<u64>,
}

impl GpuBenchFront {
    pub(super) fn new(manifest: Manifest, chunks: u64, stage: Stage) -> Self {
        Self {
            manifest,
            left: chunks,
            stage,
            warm_at: chunks / 10,
            last: chunks.saturating_sub(1),
            free_when_warm: None,
            free_at_end: None,
        }
    }

    /// Bytes of device memory that were taken between the warm-up and the last chunk.
    pub(super) fn memory_grown(&self) -> Option<i64> {
        let warm = i64::try_from(self.free_when_warm?).ok()?;
        let end = i64::try_from(self.free_at_end?).ok()?;
        Some(warm - end)
    }

    fn free_memory(&self) -> Option<u64> {
        let memory = self.stage.timed.stream.device().memory();
        memory.ok().map(|memory| memory.free)
    }
}

fn decoded(done: Done) -> Decoded {
    Decoded {
        worked: Some(FrontWork {
            build_ns: 0,
            decode_ns: done.work_ns,
        }),
    }
}

impl FrontStages<DeviceTx, DeviceRx> for GpuBenchFront {
    type Plan = BenchPlan;
    type Carry = ();
    type Decoding = Working;

    fn poll_source(&mut self) -> Result<Offer, StageError> {
        Ok(if self.left == 0 {
            Offer::End
        } else {
            Offer::Chunk(Cut::None)
        })
    }

    fn build(
        &mut self,
        place: Place,
        _: &mut DeviceTx,
    ) -> Result<Built<BenchPlan, ()>, StageError> {
        self.left -= 1;
        built(place, self.manifest.clone(), self.manifest.clone())
    }

    fn decode(
        &mut self,
        chunk: ChunkIndex,
        (): (),
        _: &Outcome,
        payload: Option<DeviceRx>,
    ) -> Result<Progress<Decoded, Working>, StageError> {
        if chunk.get() == self.warm_at {
            self.free_when_warm = self.free_memory();
        }
        if chunk.get() == self.last {
            self.free_at_end = self.free_memory();
        }
        let progress = self
            .stage
            .begin(|stream, launch| read_on(payload.as_ref(), stream, |_| launch()))?;
        Ok(progress.map(decoded, |working| working))
    }

    fn poll_decoded(&mut self, oldest: Working) -> Result<Progress<Decoded, Working>, StageError> {
        Ok(self.stage.poll(oldest)?.map(decoded, |working| working))
    }

    fn queued(&self) -> (u32, u32) {
        (u32::from(self.left > 0), 0)
    }
}

fn computed(done: Done, plan: &BenchPlan) -> Computed {
    Computed {
        worked: Some(PhaseBWork {
            compute_ns: done.work_ns,
            idle_ns: done.idle_ns,
        }),
        ..Computed::of(plan)
    }
}

/// Phase B computes in a fixed time.
impl PhaseBStages<DeviceTx, DeviceRx> for Stage {
    type Plan = BenchPlan;
    type Computing = (BenchPlan, Working);

    fn compute(
        &mut self,
        _: Place,
        envelope: &Envelope<BenchPlan>,
        input: Option<&DeviceRx>,
        output: &mut DeviceTx,
    ) -> Result<Progress<Computed, Self::Computing>, StageError> {
        let plan = envelope.plan().clone();
        let progress = self.begin(|stream, launch| {
            read_on(input, stream, |_| output.write_on(stream, |_| launch()))
        })?;
        Ok(progress.map(
            |done| computed(done, &plan),
            |working| (plan.clone(), working),
        ))
    }

    fn poll_computed(
        &mut self,
        (plan, working): (BenchPlan, Working),
    ) -> Result<Progress<Computed, Self::Computing>, StageError> {
        let polled = self.poll(working)?;
        Ok(polled.map(
            |done| computed(done, &plan),
            |working| (plan.clone(), working),
        ))
    }
}
