//! What can be tried with edges that a correct run never tries.

use pp_contract::{Prepared, Stamp};
use pp_device::{Device, DeviceBuffer, DevicePtr, Stream};
use pp_transport::backend::Backend;
use pp_transport::edge::{EdgeTx, Edges, Sent};
use pp_transport::error::TransportError;
use pp_transport::gpu::{DeviceOut, DeviceTx};
use pp_transport::gpu_backend::GpuBackend;
use pp_transport::host::{Host, HostGroup, TxLease};
use pp_transport::in_flight::Rejected;
use pp_transport::nccl::Communicator;

/// The byte of a payload that is changed, and what it becomes where it cannot be read.
const CHANGED: usize = 1;
const UNLIKELY: u8 = 0xa5;

/// Bytes that a group broadcasts.
const BROADCAST: usize = 256;

/// A group with which rules can be broken.
pub(crate) trait Collective {
    /// Takes a broadcast from a member that there is not.
    fn broadcast_from_nobody(&mut self) -> Result<(), TransportError>;
}

impl Collective for HostGroup {
    fn broadcast_from_nobody(&mut self) -> Result<(), TransportError> {
        let members = self.members().ranks().len() as u32;
        self.broadcast(&mut [0; BROADCAST], members)
    }
}

impl Collective for Communicator {
    fn broadcast_from_nobody(&mut self) -> Result<(), TransportError> {
        let members = self.members().ranks().len() as u32;
        let stream = Stream::new(self.device())?;
        let memory = DeviceBuffer::new(self.device(), BROADCAST)?;
        let data = memory.ptr();
        // Where it is not refused, it may never be done.
        std::mem::forget(memory);
        // SAFETY: the memory is of this device, is never freed, and nothing else uses it.
        unsafe { self.broadcast(data, members, &stream) }
    }
}

/// A backend with which rules can be broken.
pub(crate) trait Breakable: Backend + Edges<Group: Collective> {
    /// What that takes.
    type Tools;

    /// What breaking the rules takes.
    fn tools(&self) -> Self::Tools;

    /// Lets no payload move before its message, which may have to change it.
    fn hold_back(_: &mut Self::Tx) {}

    /// Changes one byte of a slot that is about to be sent.
    fn change_byte(tools: &Self::Tools, slot: &mut Self::Tx) -> Result<(), TransportError>;

    /// Sends from a thread that is not the edge's, where that matters.
    fn send_elsewhere(
        edge: &mut Self::Out,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<Self::Tx>,
    ) -> Result<Sent<Self::Sending>, Rejected<Self::Tx>> {
        edge.send(message, stamp, payload)
    }
}

impl Breakable for Host {
    type Tools = ();

    fn tools(&self) {}

    fn change_byte((): &(), slot: &mut TxLease) -> Result<(), TransportError> {
        slot.bytes_mut()[CHANGED] ^= 1;
        Ok(())
    }
}

impl Breakable for GpuBackend {
    type Tools = Device;

    fn tools(&self) -> Device {
        self.device.clone()
    }

    fn hold_back(slot: &mut DeviceTx) {
        slot.hold_back();
    }

    fn change_byte(device: &Device, slot: &mut DeviceTx) -> Result<(), TransportError> {
        assert!(CHANGED < slot.capacity(), "a payload of a byte");
        let stream = Stream::new(device)?;
        slot.write_on(&stream, |whole| {
            let place = DevicePtr {
                address: whole.address + CHANGED as u64,
                len: 1,
            };
            // SAFETY: the byte lies inside the slot (checked), which is leased, so nothing else uses it, and the stream is
            // ordered behind all that wrote it.
            Ok(unsafe { stream.fill(place, UNLIKELY) }?)
        })
    }

    #[allow(
        clippy::result_large_err,
        reason = "the payload comes back with its error, as from any send"
    )]
    fn send_elsewhere(
        edge: &mut DeviceOut,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<DeviceTx>,
    ) -> Result<Sent<Self::Sending>, Rejected<DeviceTx>> {
        std::thread::scope(|scope| {
            let second = scope.spawn(|| edge.send(message, stamp, payload));
            second.join().expect("a send does not panic")
        })
    }
}
