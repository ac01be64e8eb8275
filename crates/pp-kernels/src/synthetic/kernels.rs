//! The kernels of synthetic work. The sources are in `kernels/{spin,hbm}.cu`.

use pp_device::{CudaError, Device, Function, LaunchConfig, Module, Stream, arguments};

use crate::cuda::once;
use crate::cuda::ptx::{Source, check_device};
use crate::error::Failure;

/// The kernels of synthetic work, in one context.
#[derive(Debug, Clone, Copy)]
pub(super) struct Synthetic {
    spin: Function,
    copy: Function,
    blocks: u32,
}

impl Synthetic {
    /// The kernels in the context of the device, which is current.
    pub(super) fn of(device: &Device) -> Result<Synthetic, Failure> {
        once(device.context_id()?, || {
            check_device(device)?;
            let load = |source: Source| Module::load(device, source.ptx());
            Ok(Synthetic {
                spin: load(Source::Spin)?.function("spin")?,
                copy: load(Source::Hbm)?.function("hbm_copy")?,
                blocks: 4 * device.about().multiprocessors.max(1),
            })
        })
        .copied()
    }

    /// Blocks that spin for so many nanoseconds.
    pub(super) fn spin(
        &self,
        stream: &Stream,
        blocks: u32,
        nanoseconds: u64,
    ) -> Result<(), CudaError> {
        // SAFETY: this is the kernel's only parameter, and it touches no memory.
        unsafe {
            self.spin.launch(
                stream,
                LaunchConfig::line(blocks, 32),
                &mut arguments![nanoseconds],
            )
        }
    }

    /// Copies memory, again and again.
    ///
    /// # Safety
    /// Both addresses are memory of the context, of `bytes` (a multiple of 16), until the stream has passed.
    pub(super) unsafe fn copy(
        &self,
        stream: &Stream,
        from: u64,
        to: u64,
        bytes: u64,
        repeats: u32,
    ) -> Result<(), CudaError> {
        let words = bytes / 16;
        // SAFETY: these are the kernel's parameters in their order; the memory is the caller's duty.
        unsafe {
            self.copy.launch(
                stream,
                LaunchConfig::line(self.blocks, 512),
                &mut arguments![from, to, words, repeats],
            )
        }
    }
}
