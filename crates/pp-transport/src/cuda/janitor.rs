//! Frees what must not be freed where it is dropped.
//!
//! Freeing device memory or page-locked memory waits until the device is idle. Behind a kernel
//! that never ends that is for ever, so the one who drops a buffer must not be the one who waits.

use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

use super::device::Device;
use super::driver::{Address, Handle, call};

/// Memory that nobody uses any more.
#[derive(Debug)]
pub(super) enum Waste {
    Device(Device, Address),
    /// The address as a number: the memory belongs to nobody.
    Pinned(Device, usize),
}

/// Hands memory over to be freed some time later; leaks it when there is no thread for that.
pub(super) fn free(waste: Waste) {
    static JANITOR: OnceLock<Option<Sender<Waste>>> = OnceLock::new();
    let janitor = JANITOR.get_or_init(|| {
        let (sender, wastes) = channel();
        std::thread::Builder::new()
            .name("pp-cuda-free".into())
            .spawn(move || wastes.iter().for_each(collect))
            .ok()
            .map(|_| sender)
    });
    if let Some(janitor) = janitor {
        // The thread never ends while a sender exists.
        let _ = janitor.send(waste);
    }
}

fn collect(waste: Waste) {
    let device = match &waste {
        Waste::Device(device, _) | Waste::Pinned(device, _) => device,
    };
    let driver = device.driver();
    let freed = device.bind().and_then(|()| match waste {
        // SAFETY: allocated by `DeviceBuffer`, whose only owner gave it up here, once.
        Waste::Device(_, address) => unsafe { call!(driver, cuMemFree_v2(address)) },
        // SAFETY: likewise, by `PinnedBuffer`.
        Waste::Pinned(_, address) => unsafe { call!(driver, cuMemFreeHost(address as Handle)) },
    });
    if let Err(error) = freed {
        tracing::warn!(%error, "memory was not freed");
    }
}
