//! Frees what must not be freed where it is dropped.
//!
//! Freeing device memory or page-locked memory waits until the device is idle, and whoever calls
//! the driver meanwhile waits behind it. Behind a kernel that never ends that is for ever. So
//! whoever drops a buffer leaves it to a thread of its own, which frees nothing on a device whose
//! kernels may hang (a communicator that was given up and has not ended yet); later, when they
//! have ended, or never.

use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use super::device::Device;
use super::driver::{Address, Handle, call};

/// Time between two looks at a device in trouble.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Memory that nobody uses any more.
#[derive(Debug)]
pub(super) enum Waste {
    Device(Device, Address),
    /// The address as a number: the memory belongs to nobody.
    Pinned(Device, usize),
}

impl Waste {
    fn device(&self) -> &Device {
        match self {
            Self::Device(device, _) | Self::Pinned(device, _) => device,
        }
    }

    fn free(self) {
        let device = self.device().clone();
        let driver = device.driver();
        let freed = device.bind().and_then(|()| match self {
            // SAFETY: allocated by `DeviceBuffer`, whose only owner gave it up here, once.
            Self::Device(_, address) => unsafe { call!(driver, cuMemFree_v2(address)) },
            // SAFETY: likewise, by `PinnedBuffer`.
            Self::Pinned(_, address) => unsafe { call!(driver, cuMemFreeHost(address as Handle)) },
        });
        if let Err(error) = freed {
            tracing::warn!(%error, "memory was not freed");
        }
    }
}

/// Hands memory over to be freed some time later; leaks it when there is no thread for that.
pub(super) fn free(waste: Waste) {
    static JANITOR: OnceLock<Option<Sender<Waste>>> = OnceLock::new();
    let janitor = JANITOR.get_or_init(|| {
        let (sender, wastes) = channel();
        std::thread::Builder::new()
            .name("pp-cuda-free".into())
            .spawn(move || collect(&wastes))
            .ok()
            .map(|_| sender)
    });
    if let Some(janitor) = janitor {
        // The thread never ends while a sender exists.
        let _ = janitor.send(waste);
    }
}

fn collect(wastes: &Receiver<Waste>) {
    let mut kept: Vec<Waste> = Vec::new();
    loop {
        let next = if kept.is_empty() {
            wastes.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            wastes.recv_timeout(LOOK_EVERY)
        };
        match next {
            Ok(waste) => kept.push(waste),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        for waste in std::mem::take(&mut kept) {
            if waste.device().is_troubled() {
                kept.push(waste);
            } else {
                waste.free();
            }
        }
    }
}
