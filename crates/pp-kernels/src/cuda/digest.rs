//! Digests of tensors in device memory, from `kernels/digest.cu`; `docs/wire-format.md` says what they are.
//!
//! Two launches for all tensors of a payload, whatever their sizes; nothing waits, and the host touches no byte.

use pp_device::{Device, Function, LaunchConfig, Module, Stream, StreamBuffer, arguments};

use super::ptx::{Source, check_device};
use super::{borrow, once};
use crate::error::Failure;

/// Most tensors in one launch.
const MOST_TENSORS: usize = 16;
/// Bytes of a block.
const BLOCK_BYTES: u64 = 4096;
/// Threads of a block of the grid, and blocks of the tensor that one of them takes at a time.
const THREADS: u32 = 256;
const GROUPS: u64 = 32;
/// Blocks of the grid on a multiprocessor: more begin only when others end.
const RESIDENT: u32 = 3;

/// The kernels, in one context.
#[derive(Debug, Clone, Copy)]
struct Digesters {
    blocks: Function,
    tree: Function,
    /// The most blocks of a grid.
    grid: u32,
}

impl Digesters {
    /// The kernels in the context of the device, which is current.
    fn of(device: &Device) -> Result<Digesters, Failure> {
        once(device.context_id()?, || {
            check_device(device)?;
            let module = Module::load(device, Source::Digest.ptx())?;
            Ok(Digesters {
                blocks: module.function("digest_blocks")?,
                tree: module.function("digest_tree")?,
                grid: RESIDENT * device.about().multiprocessors.max(1),
            })
        })
        .copied()
    }
}

/// Where a tensor lies in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceTensor {
    /// Its address, a multiple of 8.
    pub address: u64,
    /// Its size.
    pub bytes: u64,
}

/// The kernels' argument.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Tensors {
    address: [u64; MOST_TENSORS],
    bytes: [u64; MOST_TENSORS],
    first: [u64; MOST_TENSORS + 1],
    count: u64,
}

impl Tensors {
    fn of(tensors: &[DeviceTensor]) -> Result<Tensors, Failure> {
        if tensors.len() > MOST_TENSORS {
            return Err(Failure::invalid(format!(
                "digests of {} tensors at once: at most {MOST_TENSORS}",
                tensors.len()
            )));
        }
        let mut argument = Tensors {
            address: [0; MOST_TENSORS],
            bytes: [0; MOST_TENSORS],
            first: [0; MOST_TENSORS + 1],
            count: tensors.len() as u64,
        };
        for (index, tensor) in tensors.iter().enumerate() {
            argument.address[index] = tensor.address;
            argument.bytes[index] = tensor.bytes;
            argument.first[index + 1] = argument.first[index] + blocks_of(tensor.bytes);
        }
        Ok(argument)
    }

    fn blocks(&self) -> u64 {
        self.first[self.count as usize]
    }
}

/// Blocks of a tensor; one of no bytes has one.
fn blocks_of(bytes: u64) -> u64 {
    bytes.div_ceil(BLOCK_BYTES).max(1)
}

/// Computes digests of tensors on one stream.
///
/// # If dropped
/// Its memory is freed behind what is enqueued; nothing waits.
#[derive(Debug)]
pub struct DeviceDigests {
    stream: Stream,
    kernels: Digesters,
    /// Digests of blocks, then as much for the levels above.
    scratch: StreamBuffer,
    most_blocks: u64,
}

impl DeviceDigests {
    /// Makes one for payloads of so many bytes at the most.
    ///
    /// # Safety
    /// `context` is a live `CUcontext`, current on the calling thread and on those that call the other functions;
    /// `stream` is a live `CUstream` of it. Both outlive this, which is dropped with the context current.
    ///
    /// # Errors
    /// No driver, a device that is too old, no memory.
    pub unsafe fn new(context: u64, stream: u64, most_bytes: u64) -> Result<Self, Failure> {
        // SAFETY: the caller's duty.
        let stream = unsafe { borrow(context, stream) }?;
        // A tensor that ends in the middle of a block has one more.
        let most_blocks = most_bytes / BLOCK_BYTES + MOST_TENSORS as u64;
        Ok(DeviceDigests {
            kernels: Digesters::of(stream.device())?,
            scratch: StreamBuffer::new(&stream, 2 * 8 * most_blocks as usize)?,
            stream,
            most_blocks,
        })
    }

    /// Enqueues the digests of the tensors: as many numbers of 64 bits, from `to` on.
    ///
    /// # Safety
    /// The tensors and the place for the results are memory of the context until the stream has passed.
    ///
    /// # Errors
    /// More tensors than 16 or more bytes than it was made for, another context, or a failure of the device.
    pub unsafe fn enqueue(&self, tensors: &[DeviceTensor], to: u64) -> Result<(), Failure> {
        if tensors.is_empty() {
            return Ok(());
        }
        self.stream.device().check_current()?;
        let argument = Tensors::of(tensors)?;
        let blocks = argument.blocks();
        if blocks > self.most_blocks {
            return Err(Failure::invalid(format!(
                "digests of {blocks} blocks, room was made for {}",
                self.most_blocks
            )));
        }
        let digests = self.scratch.address();
        let above = digests + 8 * self.most_blocks;
        let grid = u64::from(self.kernels.grid).min(blocks.div_ceil(GROUPS)) as u32;
        // SAFETY: these are the kernels' parameters in their order; the scratch memory has two places for each block
        // and is used on this stream alone; the rest is the caller's duty.
        unsafe {
            self.kernels.blocks.launch(
                &self.stream,
                LaunchConfig::line(grid, THREADS),
                &mut arguments![argument, digests],
            )?;
            self.kernels.tree.launch(
                &self.stream,
                LaunchConfig::line(tensors.len() as u32, THREADS),
                &mut arguments![argument, digests, above, to],
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_here_are_those_of_the_source() {
        let source = include_str!("../../kernels/digest.cu");
        for line in [
            format!("constexpr int kMostTensors = {MOST_TENSORS};"),
            format!("constexpr int kBlockBytes = {BLOCK_BYTES};"),
            format!("constexpr int kThreads = {THREADS};"),
            "constexpr int kLanes = 8;".to_owned(),
            format!("__launch_bounds__(kThreads, {RESIDENT})"),
        ] {
            assert!(source.contains(&line), "{line}");
        }
        assert_eq!(GROUPS, u64::from(THREADS) / 8);
    }

    #[test]
    fn blocks_are_numbered_through_all_tensors() {
        let tensor = |bytes| DeviceTensor { address: 8, bytes };
        let argument = Tensors::of(&[0, 1, 4096, 4097, 8192].map(tensor)).expect("few");
        assert_eq!(argument.first[..6], [0, 1, 2, 3, 5, 7]);
        assert_eq!(argument.blocks(), 7);
        assert!(Tensors::of(&[tensor(1); 17]).is_err());
    }
}
