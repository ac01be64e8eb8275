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
use super::error::CudaError;
use super::memory::DeviceBuffer;
use super::stream::{Event, Stream};

/// Time between two looks at a device in trouble.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Memory that nobody uses any more.
#[derive(Debug)]
pub(super) enum Waste {
    Device(Device, Address),
    /// The address as a number: the memory belongs to nobody.
    Pinned(Device, usize),
    /// Work may use it until these events are done and this stream is idle.
    Behind {
        buffer: DeviceBuffer,
        events: Vec<Event>,
        stream: Option<Stream>,
    },
}

impl Waste {
    fn device(&self) -> &Device {
        match self {
            Self::Device(device, _) | Self::Pinned(device, _) => device,
            Self::Behind { buffer, .. } => buffer.device(),
        }
    }

    /// Whether nothing works on it any more.
    fn is_quiet(&self) -> Result<bool, CudaError> {
        let Self::Behind {
            buffer,
            events,
            stream,
        } = self
        else {
            return Ok(true);
        };
        for event in events {
            if !event.is_done()? {
                return Ok(false);
            }
        }
        Ok(stream.as_ref().map_or(Ok(true), Stream::is_idle)? && buffer.is_idle()?)
    }

    fn free(self) {
        let device = self.device().clone();
        let driver = device.driver();
        let freed = device.bind().and_then(|()| match self {
            // SAFETY: allocated by `DeviceBuffer`, whose only owner gave it up here, once.
            Self::Device(_, address) => unsafe { call!(driver, cuMemFree_v2(address)) },
            // SAFETY: likewise, by `PinnedBuffer`.
            Self::Pinned(_, address) => unsafe { call!(driver, cuMemFreeHost(address as Handle)) },
            Self::Behind { buffer, .. } => {
                // Comes here again, as what it is.
                drop(buffer);
                Ok(())
            }
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
                continue;
            }
            match waste.is_quiet() {
                Ok(true) => waste.free(),
                Ok(false) => kept.push(waste),
                Err(error) => {
                    tracing::warn!(%error, "memory is leaked: work that used it failed");
                    std::mem::forget(waste);
                }
            }
        }
    }
}
