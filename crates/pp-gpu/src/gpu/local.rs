//! An edge between two stages on one device. The slot is handed on in place, and one stream waits for the other.
//!
//! Hazard: the next stage reads a slot before it is written, or a slot is written again while it is read. Guarantee:
//! each stream that works on a slot waits for the stream before it. The slot is leased again only when the device says
//! that its last reader is done. No host thread waits, and NCCL is not called.

use std::sync::Arc;

use pp_device::Device;

use super::lease::{DeviceRx, DeviceTx, Sending};
use super::slots::{DeviceSlots, Pool, RxPool, TxPool};
use pp_edges::edge::{EdgeLocal, check_payload};
use pp_edges::error::TransportError;
use pp_edges::host::EdgeShape;
use pp_edges::in_flight::{InFlight, Rejected};
use pp_edges::lane;

/// An edge between two stages on one device.
#[derive(Debug)]
pub struct DeviceLocal {
    tx: Arc<TxPool>,
    rx: Arc<RxPool>,
}

impl DeviceLocal {
    /// Allocates the slots of the edge, one buffer each.
    ///
    /// # Errors
    /// The shape is not valid, or the device has no memory for the slots.
    pub fn new(device: &Device, shape: EdgeShape) -> Result<Self, TransportError> {
        shape.capacity()?;
        let slots = Arc::new(DeviceSlots::new(device, None, shape)?);
        let (out, incoming) = lane::local(shape);
        Ok(Self {
            tx: Arc::new(Pool {
                lane: out,
                slots: Arc::clone(&slots),
            }),
            rx: Arc::new(RxPool::new(Pool {
                lane: incoming,
                slots,
            })),
        })
    }
}

impl EdgeLocal for DeviceLocal {
    type Tx = DeviceTx;
    type Rx = DeviceRx;
    type Sending = Sending;

    fn try_lease(&mut self) -> Result<Option<DeviceTx>, TransportError> {
        self.rx.sweep();
        let slots = &self.tx.slots;
        let slot = self.tx.lane.lease_if(|slot| !slots.slot(slot).is_lost());
        Ok(slot.map(|slot| DeviceTx::new(&self.tx, slot)))
    }

    fn hand_on(
        &mut self,
        mut payload: DeviceTx,
        bytes: u64,
    ) -> Result<(InFlight<Sending>, DeviceRx), Rejected<DeviceTx>> {
        let lease = (Arc::ptr_eq(&payload.pool, &self.tx), payload.capacity());
        let fits = check_payload(bytes, Some(lease));
        let slot = payload.slot;
        if let Err(error) = fits.and_then(|()| self.tx.slot(slot).check()) {
            let buffer = Some(payload);
            return Err(Rejected { buffer, error });
        }
        self.tx.slot(slot).leave_worker(payload.writer.take());
        let sending = payload.into_sending();
        let taken = self.rx.pool.lane.take(slot);
        taken.expect("no other code moves a slot of this process");
        // The payload fits a slot, so its size fits the address space.
        let lease = DeviceRx::new(&self.rx, slot, bytes as usize);
        Ok((InFlight::new(sending), lease))
    }
}
