//! The stage that works on GPUs, too. It issues copies to a stream, and no thread waits for them.

use pp_device::{CudaError, Device, DevicePtr, Event, Stream};
use pp_job::prelude::*;
use pp_transport::gpu::{DeviceRx, DeviceTx};
use pp_transport::gpu_backend::{GpuBackend, GpuTransport};
use pp_transport::nccl::NcclBackend;

use crate::{FRAME, room_for_twice};

/// Writes each frame twice.
pub struct SlowOnGpu<P> {
    stream: Stream,
    /// Describes what the stage makes of a piece.
    describe: fn(&P) -> StageResult<Done>,
}

fn failed(error: CudaError) -> StageError {
    StageError::new(FaultKind::Device, "slow", error.to_string())
}

/// Bytes in a range of the device, by their place in it.
fn part(of: DevicePtr, at: usize, len: usize) -> DevicePtr {
    let address = of.address + at as u64;
    DevicePtr { address, len }
}

/// Opens GPU `number` of the visible ones, and makes the backend that moves payloads to and from it. The other ranks may be on GPUs
/// or on CPUs. The backend could say which transport it takes between two GPUs; here nobody wants to know.
///
/// # Errors
/// There is no such GPU, or its driver refuses.
pub fn open(number: u32) -> StageResult<(Device, GpuBackend)> {
    let device = Device::open(number).map_err(failed)?;
    let gpu = NcclBackend::alone(device.clone());
    let backend = GpuBackend::new(gpu, GpuTransport::Best, |_| {});
    Ok((device, backend))
}

impl<P> SlowOnGpu<P> {
    /// Makes a stream for the stage.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn new(on: &Device, describe: fn(&P) -> StageResult<Done>) -> StageResult<Self> {
        let stream = on.bind().and_then(|()| Stream::new(on)).map_err(failed)?;
        Ok(Self { stream, describe })
    }
}

impl<P: Plan> Stage<DeviceTx, DeviceRx> for SlowOnGpu<P> {
    type Plan = P;
    type Kept = (Event, Done);

    fn run(
        &mut self,
        chunk: Chunk<'_, P>,
        input: Option<&DeviceRx>,
        output: &mut DeviceTx,
    ) -> StageResult<Progress<Done, Self::Kept>> {
        let done = (self.describe)(chunk.message.plan())?;
        let stream = &self.stream;
        let input = input.expect("each piece has samples");
        input.read_on(stream, |from| {
            output.write_on(stream, |to| {
                room_for_twice(from.len, to.len)?;
                for at in (0..from.len).step_by(FRAME) {
                    for to in [part(to, 2 * at, FRAME), part(to, 2 * at + FRAME, FRAME)] {
                        // SAFETY: both ranges lie in slots, as was checked above, and these are held until the stream has passed this copy.
                        unsafe { stream.copy(part(from, at, FRAME), to) }.map_err(failed)?;
                    }
                }
                StageResult::Ok(())
            })
        })?;
        let end = Event::new(stream.device()).map_err(failed)?;
        end.record(stream).map_err(failed)?;
        Ok(Progress::UnderWay((end, done)))
    }

    fn poll(&mut self, (end, done): Self::Kept) -> StageResult<Progress<Done, Self::Kept>> {
        Ok(match end.is_done().map_err(failed)? {
            true => Progress::Done(done),
            false => Progress::UnderWay((end, done)),
        })
    }
}
