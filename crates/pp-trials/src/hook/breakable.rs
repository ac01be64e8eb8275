//! What can be tried with a link that a correct run never tries.

use std::time::{Duration, Instant};

use pp_contract::{CallStamp, DType, Prepared, Rank, Stamp};
use pp_device::{DeviceBuffer, DevicePtr, Stream};
use pp_transport::bell::Bell;
use pp_transport::error::TransportError;
use pp_transport::host::{EdgeShape, HostLink};
use pp_transport::in_flight::Rejected;
use pp_transport::link::{Link, Sent};
use pp_transport::nccl::{CommOptions, Communicator, GroupBuffer, NcclLink, UniqueId};

/// Time to make a group of one rank.
const GROUP_WITHIN: Duration = Duration::from_secs(10);

/// The byte of a payload that is changed, and what it becomes where it cannot be read.
const CHANGED: usize = 1;
const UNLIKELY: u8 = 0xa5;

/// Bytes that a group of one rank broadcasts.
const BROADCAST: usize = 256;

/// A backend's link with which rules can be broken.
pub(crate) trait Breakable: Link {
    /// A slot of another link of the same kind, where a process can have two.
    fn slot_of_another(&self) -> Option<Self::Tx> {
        None
    }

    /// Changes one byte of a slot that is about to be sent.
    fn change_byte(&self, slot: &mut Self::Tx) -> Result<(), TransportError>;

    /// Broadcasts from `root` in a group of this rank alone, as a part of the call that is about to
    /// be answered, and waits until that is done; where there are groups.
    fn broadcast_alone(&mut self, _: Rank, _: Rank, _: Stamp) -> Result<(), TransportError> {
        Ok(())
    }

    /// Sends from a thread that is not the link's, where that matters.
    fn send_elsewhere(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<Self::Tx>,
    ) -> Result<Sent<Self::Sending>, Rejected<Self::Tx>> {
        self.send(message, stamp, payload)
    }
}

impl Breakable for HostLink {
    fn slot_of_another(&self) -> Option<Self::Tx> {
        let edge = EdgeShape {
            depth: 1,
            slot_bytes: 1 << 20,
        };
        let (mut other, _) = Self::pair(edge, edge, Bell::new().ok()?).ok()?;
        other.try_lease().ok()?
    }

    fn change_byte(&self, slot: &mut Self::Tx) -> Result<(), TransportError> {
        slot.bytes_mut()[CHANGED] ^= 1;
        Ok(())
    }
}

impl Breakable for NcclLink {
    fn change_byte(&self, slot: &mut Self::Tx) -> Result<(), TransportError> {
        assert!(CHANGED < slot.capacity(), "a payload of a byte");
        let issuer = self.issuer();
        let stream = Stream::new(issuer.device())?;
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
        &mut self,
        me: Rank,
        root: Rank,
        stamp: Stamp,
    ) -> Result<(), TransportError> {
        let issuer = self.issuer();
        let stream = Stream::new(issuer.device())?;
        let memory = DeviceBuffer::new(issuer.device(), BROADCAST)?;
        let id = UniqueId::new(issuer.nccl())?;
        let deadline = Instant::now() + GROUP_WITHIN;
        let mut mesh = Communicator::connect(CommOptions {
            issuer,
            name: "mesh",
            members: vec![me],
            me,
            id,
            deadline,
            blocking: true,
        })?;
        let buffer = GroupBuffer::new(memory, DType::U8, BROADCAST);
        let buffer = buffer.expect("as large as its memory");
        let mut group = mesh.group();
        if let CallStamp::Echo(call) | CallStamp::Numbered(call) = stamp.call {
            group.about(call, stamp.chunk_index, stamp.cache_epoch);
        }
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
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<Self::Tx>,
    ) -> Result<Sent<Self::Sending>, Rejected<Self::Tx>> {
        std::thread::scope(|scope| {
            let second = scope.spawn(|| self.send(message, stamp, payload));
            second.join().expect("a send does not panic")
        })
    }
}
