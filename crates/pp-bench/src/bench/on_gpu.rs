//! The stages of `pp bench overlap` on GPUs: work that takes a fixed time, on payloads that stay
//! where they are.

use std::time::{Duration, Instant};

use pp_command::timed::{Issued, Timed, read_on};
use pp_contract::{ChunkIndex, FaultKind, Manifest, with_source};
use pp_device::{CudaError, Device, Stream};
use pp_kernels::synthetic::{Calibration, Kind, Work};
use pp_runtime::core::Cut;
use pp_runtime::stage::{
    Built, Chunk, Done, Offer, Place, Progress, Sink, Source, Stage, StageError, StageResult,
    Taken, Worked,
};
use pp_transport::gpu::{DeviceRx, DeviceTx};

use super::against::Payloads;
use super::plan::BenchPlan;
use crate::args::Simulate;

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
    Gpu(Issued),
}

/// The work on one chunk while it is issued.
struct Issue<'a> {
    stream: &'a Stream,
    load: &'a mut Work,
    work: &'a Issued,
}

impl Issue<'_> {
    fn launch(&mut self) -> StageResult<()> {
        let launched = self.load.launch();
        launched.map_err(|e| StageError::new(FaultKind::Device, "launch", with_source(&e)))
    }

    /// Records the event that ends the work. Call it behind `send_ahead`: an event in front would delay the payload.
    fn close(&self) -> StageResult<()> {
        self.work.close(self.stream).map_err(device)
    }
}

/// A stage's load on its stream.
pub(super) struct GpuStage {
    load: Load,
    timed: Timed,
    /// End of the last sleep; sleeps lie end to end.
    last_sleep: Option<Instant>,
    /// What one piece of work takes on this GPU, where it is the GPU's.
    pub(super) calibration: Option<Calibration>,
}

impl GpuStage {
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

    /// Begins the work on one chunk; `on_slots` issues it between the events of the slots, and closes it.
    fn begin(
        &mut self,
        on_slots: impl FnOnce(Issue<'_>) -> StageResult<()>,
    ) -> StageResult<Progress<Worked, Working>> {
        match &mut self.load {
            Load::Nothing => Ok(Progress::Done(Worked {
                work_ns: 0,
                idle_ns: 0,
            })),
            Load::Sleep(time) => {
                let now = Instant::now();
                let end = self.last_sleep.map_or(now, |last| now.max(last)) + *time;
                self.last_sleep = Some(end);
                Ok(Progress::UnderWay(Working::Sleep { end, time: *time }))
            }
            Load::Gpu(load) => {
                let work = self.timed.open().map_err(device)?;
                let stream = &self.timed.stream;
                on_slots(Issue {
                    stream,
                    load,
                    work: &work,
                })?;
                Ok(Progress::UnderWay(Working::Gpu(work)))
            }
        }
    }

    /// How far the oldest work is.
    fn poll_work(&mut self, oldest: Working) -> StageResult<Progress<Worked, Working>> {
        Ok(match oldest {
            Working::Sleep { end, .. } if Instant::now() < end => Progress::UnderWay(oldest),
            Working::Sleep { time, .. } => Progress::Done(Worked {
                work_ns: time.as_nanos() as u64,
                idle_ns: 0,
            }),
            Working::Gpu(work) => {
                let polled = self.timed.poll(work).map_err(device)?;
                polled.map(|worked| worked, Working::Gpu)
            }
        })
    }
}

/// Builds in a fixed time.
pub(super) struct GpuSource {
    payloads: Payloads,
    left: u64,
    stage: GpuStage,
    /// The chunk at which the run counts as warm, and the last one.
    warm_at: u64,
    last: u64,
    free_when_warm: Option<u64>,
    free_at_end: Option<u64>,
}

impl GpuSource {
    pub(super) fn new(payloads: Payloads, chunks: u64, stage: GpuStage) -> Self {
        Self {
            payloads,
            left: chunks,
            stage,
            warm_at: chunks / 10,
            last: chunks.saturating_sub(1),
            free_when_warm: None,
            free_at_end: None,
        }
    }

    /// Bytes of this rank's device memory that were taken between the warm-up and the last chunk.
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

impl Source<DeviceTx> for GpuSource {
    type Plan = BenchPlan;
    /// What a device does, and then what it worked.
    type Carry = Option<Progress<Worked, Working>>;

    fn poll(&mut self) -> StageResult<Offer> {
        Ok(match self.left {
            0 => Offer::End,
            _ => Offer::Chunk(Cut::None),
        })
    }

    fn is_built(&mut self, carry: &mut Self::Carry) -> StageResult<bool> {
        Progress::ask(carry, |working| self.stage.poll_work(working))
    }

    fn build(
        &mut self,
        place: Place,
        slot: &mut DeviceTx,
    ) -> StageResult<Built<BenchPlan, Self::Carry>> {
        self.left -= 1;
        let manifest = self.payloads.of_chunk(place.chunk.get()).clone();
        let begun = self.stage.begin(|mut issue| {
            slot.write_on(issue.stream, |_| issue.launch())?;
            slot.send_ahead(manifest.payload_bytes() as usize)?;
            issue.close()
        })?;
        let carry = match begun {
            // The host waits, and what it waits for is the chunk.
            Progress::UnderWay(Working::Sleep { end, .. }) => {
                std::thread::sleep(end.saturating_duration_since(Instant::now()));
                None
            }
            Progress::Done(_) => None,
            on_device => Some(on_device),
        };
        let plan = BenchPlan {
            chunk: place.chunk.get(),
            hands_on: true,
        };
        Ok(Built::new(plan, manifest, carry))
    }

    fn accepted(
        &mut self,
        chunk: ChunkIndex,
        carry: Self::Carry,
        _: Option<&[u8]>,
    ) -> StageResult<Option<u64>> {
        if chunk.get() == self.warm_at {
            self.free_when_warm = self.free_memory();
        }
        if chunk.get() == self.last {
            self.free_at_end = self.free_memory();
        }
        Ok(match carry {
            Some(Progress::Done(worked)) => Some(worked.work_ns),
            // The payload left ahead of the end of its work, so the sink may have it before that is seen. The chunk has no time then.
            Some(Progress::UnderWay(Working::Gpu(work))) => {
                self.stage.timed.forget(work);
                None
            }
            _ => None,
        })
    }

    fn queued(&self) -> u32 {
        u32::from(self.left > 0)
    }
}

/// Says how long a device worked, once that is known.
fn said(mut done: Done, progress: Progress<Worked, Working>) -> Progress<Done, (Done, Working)> {
    match progress {
        Progress::Done(worked) => {
            done.report.worked = Some(worked);
            Progress::Done(done)
        }
        Progress::UnderWay(working) => Progress::UnderWay((done, working)),
    }
}

/// A stage between source and sink that takes a fixed time.
impl Stage<DeviceTx, DeviceRx> for GpuStage {
    type Plan = BenchPlan;
    type Kept = (Done, Working);

    fn run(
        &mut self,
        chunk: Chunk<'_, BenchPlan>,
        input: Option<&DeviceRx>,
        output: &mut DeviceTx,
    ) -> StageResult<Progress<Done, Self::Kept>> {
        let tensors = chunk.message.tensors().clone();
        let progress = self.begin(|mut issue| {
            read_on(input, issue.stream, |_| {
                output.write_on(issue.stream, |_| issue.launch())?;
                output.send_ahead(tensors.payload_bytes() as usize)?;
                issue.close()
            })
        })?;
        let report = Taken::of(chunk.message.plan(), 1);
        Ok(said(Done { tensors, report }, progress))
    }

    fn poll(&mut self, (done, working): Self::Kept) -> StageResult<Progress<Done, Self::Kept>> {
        Ok(said(done, self.poll_work(working)?))
    }
}

/// A sink that takes a fixed time.
pub(super) struct GpuSink(pub(super) GpuStage);

impl Sink<DeviceRx> for GpuSink {
    type Plan = BenchPlan;
    type Kept = (Done, Working);

    fn take(
        &mut self,
        chunk: Chunk<'_, BenchPlan>,
        input: Option<&DeviceRx>,
    ) -> StageResult<Progress<Taken, Self::Kept>> {
        let stage = &mut self.0;
        let progress = stage.begin(|mut issue| {
            read_on(input, issue.stream, |_| {
                issue.launch()?;
                issue.close()
            })
        })?;
        let done = Done {
            tensors: Manifest::empty(),
            report: Taken::of(chunk.message.plan(), 1),
        };
        Ok(said(done, progress).map(|done| done.report, |kept| kept))
    }

    fn poll(&mut self, (done, working): Self::Kept) -> StageResult<Progress<Taken, Self::Kept>> {
        let progress = self.0.poll_work(working)?;
        Ok(said(done, progress).map(|done| done.report, |kept| kept))
    }
}
