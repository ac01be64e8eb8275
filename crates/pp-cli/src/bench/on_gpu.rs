//! The stages of `pp bench overlap` on GPUs: work that takes a fixed time, on payloads that stay
//! where they are.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use pp_contract::{ChunkIndex, Envelope, FaultKind, Manifest, Outcome, Plan as _, with_source};
use pp_kernels::synthetic::{Calibration, Kind, Work};
use pp_runtime::core::Cut;
use pp_runtime::stage::{
    Computed, Decoded, FrontStages, FrontWork, Offer, PhaseBStages, PhaseBWork, Place, Progress,
    StageError,
};
use pp_transport::cuda::{CudaError, DevicePtr, Stream};
use pp_transport::nccl::{DeviceRx, DeviceTx};

use super::plan::BenchPlan;
use crate::args::Simulate;
use crate::backend::Gpu;
use crate::timed::Timed;

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

/// A stage's load on its stream, and what of it is under way.
pub(super) struct Stage {
    load: Load,
    timed: Timed<()>,
    /// Ends of the sleeps under way, oldest first; they lie end to end.
    sleeps: VecDeque<Instant>,
    calibration: Option<Calibration>,
}

/// What a stage worked on one chunk.
#[derive(Clone, Copy)]
struct Worked {
    work_ns: u64,
    idle_ns: u64,
}

impl Stage {
    pub(super) fn open(
        gpu: &Gpu,
        how: Simulate,
        time: Duration,
        depth: u32,
    ) -> Result<Self, StageError> {
        gpu.device.bind().map_err(device)?;
        let stream = Stream::new(&gpu.device).map_err(device)?;
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
                // is dropped after the load.
                let work = unsafe { Work::new(kind, gpu.device.raw_context(), stream.raw()) };
                let mut work = work.map_err(refuse)?;
                calibration = Some(work.calibrate(time).map_err(refuse)?);
                Load::Gpu(Box::new(work))
            }
        };
        Ok(Self {
            load,
            timed: Timed::new(stream, depth as usize).map_err(device)?,
            sleeps: VecDeque::new(),
            calibration,
        })
    }

    /// What one piece of work takes on this GPU, where it is the GPU's.
    pub(super) fn calibration(&self) -> Option<&Calibration> {
        self.calibration.as_ref()
    }

    /// Begins the work on one chunk; `on_slots` issues it between the events of the slots.
    fn begin(
        &mut self,
        on_slots: impl FnOnce(
            &Stream,
            &mut dyn FnMut() -> Result<(), StageError>,
        ) -> Result<(), StageError>,
    ) -> Result<Progress<Worked>, StageError> {
        match &mut self.load {
            Load::Nothing => {
                on_slots(self.timed.stream(), &mut || Ok(()))?;
                Ok(Progress::Done(Worked {
                    work_ns: 0,
                    idle_ns: 0,
                }))
            }
            Load::Sleep(time) => {
                on_slots(self.timed.stream(), &mut || Ok(()))?;
                let now = Instant::now();
                let start = self.sleeps.back().map_or(now, |end| now.max(*end));
                self.sleeps.push_back(start + *time);
                Ok(Progress::UnderWay)
            }
            Load::Gpu(work) => {
                let span = self.timed.open().map_err(device)?;
                on_slots(self.timed.stream(), &mut || {
                    work.launch()
                        .map_err(|e| StageError::new(FaultKind::Device, "launch", with_source(&e)))
                })?;
                self.timed.close(span, ()).map_err(device)?;
                Ok(Progress::UnderWay)
            }
        }
    }

    fn poll(&mut self) -> Result<Option<Worked>, StageError> {
        if let Load::Sleep(time) = self.load {
            let is_over = self
                .sleeps
                .front()
                .is_some_and(|end| *end <= Instant::now());
            return Ok(is_over.then(|| {
                self.sleeps.pop_front();
                Worked {
                    work_ns: time.as_nanos() as u64,
                    idle_ns: 0,
                }
            }));
        }
        let done = self.timed.poll().map_err(device)?;
        Ok(done.map(|done| Worked {
            work_ns: done.work_ns,
            idle_ns: done.idle_ns,
        }))
    }
}

fn read<R>(
    payload: Option<&DeviceRx>,
    stream: &Stream,
    issue: impl FnOnce(DevicePtr) -> Result<R, StageError>,
) -> Result<R, StageError> {
    match payload {
        Some(payload) => payload.read_on(stream, issue),
        None => issue(DevicePtr { address: 0, len: 0 }),
    }
}

/// Builds in no time and decodes in a fixed one.
pub(super) struct GpuBenchFront {
    manifest: Manifest,
    left: u64,
    stage: Stage,
    /// Chunks decoded so far, and of those the one at which the run counts as warm.
    decoded: u64,
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
            decoded: 0,
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
        let memory = self.stage.timed.stream().device().memory();
        memory.ok().map(|memory| memory.free)
    }
}

fn decoded(worked: Worked) -> Decoded {
    Decoded {
        worked: Some(FrontWork {
            build_ns: 0,
            decode_ns: worked.work_ns,
        }),
    }
}

impl FrontStages<DeviceTx, DeviceRx> for GpuBenchFront {
    type Plan = BenchPlan;

    fn poll_source(&mut self) -> Result<Offer, StageError> {
        Ok(if self.left == 0 {
            Offer::End
        } else {
            Offer::Chunk(Cut::None)
        })
    }

    fn build(&mut self, place: Place, _: &mut DeviceTx) -> Result<Envelope<BenchPlan>, StageError> {
        self.left -= 1;
        let plan = BenchPlan::new(place.chunk.get());
        Envelope::new(plan, self.manifest.clone(), self.manifest.clone())
            .map_err(|e| StageError::new(FaultKind::Internal, "build", e.to_string()))
    }

    fn decode(
        &mut self,
        _: ChunkIndex,
        _: &Outcome,
        payload: Option<DeviceRx>,
    ) -> Result<Progress<Decoded>, StageError> {
        if self.decoded == self.warm_at {
            self.free_when_warm = self.free_memory();
        }
        if self.decoded == self.last {
            self.free_at_end = self.free_memory();
        }
        self.decoded += 1;
        let progress = self
            .stage
            .begin(|stream, launch| read(payload.as_ref(), stream, |_| launch()))?;
        Ok(match progress {
            Progress::Done(worked) => Progress::Done(decoded(worked)),
            Progress::UnderWay => Progress::UnderWay,
        })
    }

    fn poll_decoded(&mut self) -> Result<Option<Decoded>, StageError> {
        Ok(self.stage.poll()?.map(decoded))
    }

    fn queued(&self) -> (u32, u32) {
        (u32::from(self.left > 0), 0)
    }
}

/// Computes in a fixed time.
pub(super) struct GpuBenchPhaseB {
    stage: Stage,
    /// First frames of the chunks under way, oldest first.
    started: VecDeque<u64>,
}

impl GpuBenchPhaseB {
    pub(super) fn new(stage: Stage) -> Self {
        Self {
            stage,
            started: VecDeque::new(),
        }
    }
}

fn computed(worked: Worked, start_frame: u64) -> Computed {
    Computed {
        observed_calls: 1,
        start_frame,
        seal: None,
        worked: Some(PhaseBWork {
            compute_ns: worked.work_ns,
            idle_ns: worked.idle_ns,
        }),
    }
}

impl PhaseBStages<DeviceTx, DeviceRx> for GpuBenchPhaseB {
    type Plan = BenchPlan;

    fn compute(
        &mut self,
        _: Place,
        envelope: &Envelope<BenchPlan>,
        input: Option<&DeviceRx>,
        output: &mut DeviceTx,
    ) -> Result<Progress<Computed>, StageError> {
        let progress = self.stage.begin(|stream, launch| {
            read(input, stream, |_| output.write_on(stream, |_| launch()))
        })?;
        let start_frame = envelope.plan().start_frame();
        Ok(match progress {
            Progress::Done(worked) => Progress::Done(computed(worked, start_frame)),
            Progress::UnderWay => {
                self.started.push_back(start_frame);
                Progress::UnderWay
            }
        })
    }

    fn poll_computed(&mut self) -> Result<Option<Computed>, StageError> {
        let Some(worked) = self.stage.poll()? else {
            return Ok(None);
        };
        let start_frame = self.started.pop_front();
        let start_frame = start_frame.expect("asked only while a chunk is under way");
        Ok(Some(computed(worked, start_frame)))
    }
}
