//! What can be tried with edges that a correct run never tries.

use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use pp_contract::{DType, Prepared, Rank, Stamp};
use pp_device::{Device, DeviceBuffer, DevicePtr, Stream};
use pp_transport::backend::{Backend, Connect};
use pp_transport::edge::{EdgeTx, Edges, Sent};
use pp_transport::error::TransportError;
use pp_transport::gpu::DeviceTx;
use pp_transport::gpu::p2p::{GpuBackend, GpuTx};
use pp_transport::host::{Host, HostGroup, TxLease};
use pp_transport::in_flight::Rejected;
use pp_transport::nccl::{CommOptions, Communicator, GroupBuffer, Issuer, UniqueId};

/// Time to make a group of one rank.
const GROUP_WITHIN: Duration = Duration::from_secs(10);

/// The byte of a payload that is changed, and what it becomes where it cannot be read.
const CHANGED: usize = 1;
const UNLIKELY: u8 = 0xa5;

/// Bytes that a group of one rank broadcasts.
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

    /// What breaking the rules takes, once edges are made.
    fn tools(&mut self, how: Connect<'_>) -> Result<Self::Tools, TransportError>;

    /// Lets no payload move before its message, which may have to change it.
    fn hold_back(_: &mut Self::Tx) {}

    /// Changes one byte of a slot that is about to be sent.
    fn change_byte(tools: &Self::Tools, slot: &mut Self::Tx) -> Result<(), TransportError>;

    /// Broadcasts from `root` in a group of this rank alone, as a part of the call that is about to
    /// be answered, and waits until that is done; where there are groups.
    fn broadcast_alone(_: &Self::Tools, _: Rank, _: Rank, _: Stamp) -> Result<(), TransportError> {
        Ok(())
    }

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

    fn tools(&mut self, _: Connect<'_>) -> Result<(), TransportError> {
        Ok(())
    }

    fn change_byte((): &(), slot: &mut TxLease) -> Result<(), TransportError> {
        slot.bytes_mut()[CHANGED] ^= 1;
        Ok(())
    }
}

impl Breakable for GpuBackend {
    /// And who issues for NCCL, where that is loaded.
    type Tools = (Device, Option<Issuer>);

    fn tools(&mut self, how: Connect<'_>) -> Result<Self::Tools, TransportError> {
        let is_loaded = self.nccl.is_some();
        let issuer = is_loaded.then(|| self.issuer(how)).transpose()?;
        Ok((self.device.clone(), issuer))
    }

    fn hold_back(slot: &mut DeviceTx) {
        slot.hold_back();
    }

    fn change_byte((device, _): &Self::Tools, slot: &mut DeviceTx) -> Result<(), TransportError> {
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

    fn broadcast_alone(
        (_, issuer): &Self::Tools,
        me: Rank,
        root: Rank,
        stamp: Stamp,
    ) -> Result<(), TransportError> {
        let issuer = issuer.as_ref().ok_or(TransportError::Alone)?;
        let stream = Stream::new(issuer.device())?;
        let memory = DeviceBuffer::new(issuer.device(), BROADCAST)?;
        let id = UniqueId::new(issuer.nccl())?;
        let deadline = Instant::now() + GROUP_WITHIN;
        // Not ended: the job that this breaks would wait for that beside its own end.
        let mut mesh = ManuallyDrop::new(Communicator::connect(CommOptions {
            issuer: issuer.share(),
            name: "mesh",
            members: vec![me],
            me,
            id,
            gathers: None,
            deadline,
            blocking: true,
        })?);
        let buffer = GroupBuffer::new(memory, DType::U8, BROADCAST);
        let buffer = buffer.expect("as large as its memory");
        let mut group = mesh.group();
        group.about(stamp.call_id, stamp.chunk_index, stamp.cache_epoch);
        group
            .broadcast(buffer, root)
            .map_err(|refused| refused.error)?;
        let flights = group.commit(&stream).map_err(|refused| refused.error)?;
        while !flights
            .iter()
            .all(|flight| matches!(flight.is_done(), Ok(true)))
        {
            if Instant::now() > deadline {
                break;
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    #[allow(
        clippy::result_large_err,
        reason = "the payload comes back with its error, as from any send"
    )]
    fn send_elsewhere(
        edge: &mut GpuTx,
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
