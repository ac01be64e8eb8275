//! The kinds of memory that slots lie in, as stages in Python use them: host memory, and that of a GPU.

use pp_contract::FaultKind;
use pp_device::{CudaError, Device, Event, Stream};
use pp_runtime::stage::{Progress, StageError, StageResult};
use pp_transport::backend::Backend;
use pp_transport::gpu::{DeviceRx, DeviceTx};
use pp_transport::gpu_backend::GpuBackend;
use pp_transport::host::{Host, Mapping, RxLease, TxLease};

use crate::group::Together;

/// A slot, or what arrived in it.
pub(crate) struct Place {
    pub(crate) address: usize,
    pub(crate) bytes: usize,
    /// Keeps it mapped. The memory of a GPU is freed with its edge.
    pub(crate) mapping: Option<Mapping>,
}

/// A kind of memory.
pub(crate) trait Medium: Together + Clone {
    type Backend: Backend<Tx = Self::Tx, Rx = Self::Rx, Group = Self::Group>;
    type Tx;
    type Rx;
    /// What work that was issued leaves behind.
    type Mark;

    /// Lets `act` work, or issue work, on what was received and on the slot that is sent.
    fn work<T>(
        &self,
        input: Option<&Self::Rx>,
        output: Option<&mut Self::Tx>,
        act: impl FnOnce(Option<Place>, Option<Place>) -> StageResult<T>,
    ) -> StageResult<T>;

    /// Marks the place behind all work that was issued, and lets so many bytes of a slot move then.
    fn mark(&self, output: Option<(&mut Self::Tx, u64)>) -> StageResult<Self::Mark>;

    /// Says whether a message may leave before the work on its slot is done.
    fn may_lead(output: &Self::Tx) -> bool;

    /// Says whether the work in front of the mark is done.
    fn is_done(&self, mark: &Self::Mark) -> StageResult<bool>;

    /// How far it is.
    fn ask<T>(&self, (mark, done): (Self::Mark, T)) -> StageResult<Progress<T, (Self::Mark, T)>> {
        Ok(match self.is_done(&mark)? {
            true => Progress::Done(done),
            false => Progress::UnderWay((mark, done)),
        })
    }
}

/// Host memory: work is done when the call returns.
#[derive(Clone)]
pub(crate) struct OnHost;

impl Medium for OnHost {
    type Backend = Host;
    type Tx = TxLease;
    type Rx = RxLease;
    type Mark = ();

    fn work<T>(
        &self,
        input: Option<&RxLease>,
        output: Option<&mut TxLease>,
        act: impl FnOnce(Option<Place>, Option<Place>) -> StageResult<T>,
    ) -> StageResult<T> {
        let input = input.map(|lease| Place {
            address: lease.bytes().as_ptr().expose_provenance(),
            bytes: lease.bytes().len(),
            mapping: Some(lease.mapping()),
        });
        let output = output.map(|lease| Place {
            address: lease.bytes_mut().as_mut_ptr().expose_provenance(),
            bytes: lease.capacity(),
            mapping: Some(lease.mapping()),
        });
        act(input, output)
    }

    fn mark(&self, _: Option<(&mut TxLease, u64)>) -> StageResult<()> {
        Ok(())
    }

    /// The work is done when the call returns.
    fn may_lead(_: &TxLease) -> bool {
        false
    }

    fn is_done(&self, (): &()) -> StageResult<bool> {
        Ok(true)
    }
}

/// The memory of a GPU: calls issue work to the stream of the rank, and nobody waits for it.
#[derive(Clone)]
pub(crate) struct OnGpu {
    pub(crate) device: Device,
    pub(crate) stream: Stream,
}

impl OnGpu {
    /// Opens GPU `number` of the visible ones, whose primary context PyTorch uses, too.
    pub(crate) fn open(number: u32) -> StageResult<Self> {
        let device = Device::open(number).map_err(failed)?;
        device.bind().map_err(failed)?;
        let stream = Stream::new(&device).map_err(failed)?;
        Ok(Self { device, stream })
    }
}

fn failed(error: CudaError) -> StageError {
    let detail = pp_contract::with_source(&error);
    StageError::new(FaultKind::Device, "issue work", detail)
}

impl Medium for OnGpu {
    type Backend = GpuBackend;
    type Tx = DeviceTx;
    type Rx = DeviceRx;
    type Mark = Event;

    fn work<T>(
        &self,
        input: Option<&DeviceRx>,
        output: Option<&mut DeviceTx>,
        act: impl FnOnce(Option<Place>, Option<Place>) -> StageResult<T>,
    ) -> StageResult<T> {
        let place = |at: pp_device::DevicePtr| Place {
            address: at.address as usize,
            bytes: at.len,
            mapping: None,
        };
        let write = |from: Option<Place>| match output {
            None => act(from, None),
            Some(output) => output.write_on(&self.stream, |to| act(from, Some(place(to)))),
        };
        match input {
            None => write(None),
            Some(input) => input.read_on(&self.stream, |from| write(Some(place(from)))),
        }
    }

    fn mark(&self, output: Option<(&mut DeviceTx, u64)>) -> StageResult<Event> {
        // The payload does not wait for the mark.
        if let Some((output, bytes)) = output {
            output.send_ahead(bytes as usize)?;
        }
        let mark = Event::new(&self.device).map_err(failed)?;
        mark.record(&self.stream).map_err(failed)?;
        Ok(mark)
    }

    fn may_lead(output: &DeviceTx) -> bool {
        output.may_lead()
    }

    fn is_done(&self, mark: &Event) -> StageResult<bool> {
        mark.is_done().map_err(failed)
    }
}
