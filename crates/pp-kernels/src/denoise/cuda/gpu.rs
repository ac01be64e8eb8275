//! What the denoiser asks of a library that calls the CUDA driver.

use std::ffi::c_void;
use std::fmt::Debug;

pub use pp_device::{Apart, LaunchConfig, Rows};
use pp_device::{DevicePtr, Event, Function, Module, Stream, StreamBuffer};

use crate::error::Failure;

/// What the device of a stream can do.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// The driver's version as 1000 × major + 10 × minor.
    pub driver_version: u32,
    /// Compute capability, major and minor.
    pub capability: [u32; 2],
    /// The most shared memory of a block.
    pub shared_bytes_per_block: u32,
}

/// A stream of a CUDA device, through a library of the implementor's choice. Clones are the same stream.
///
/// Every function but [`Gpu::check_current`] is called with the stream's context current. None waits for the device,
/// but [`Gpu::memory_with`] may.
///
/// # Safety
/// Kernels read and write the memory that [`Gpu::memory`] and [`Gpu::memory_with`] give, at [`Gpu::address`]: it has the
/// size that was asked for, lies in the stream's context, and stays allocated until the stream has passed all work given
/// to it before the drop.
pub unsafe trait Gpu: Clone + Debug + Send + Sync + 'static {
    /// A loaded module. It stays loaded when this is dropped.
    type Module;
    /// A kernel.
    type Function: Copy + Debug + Send + Sync;
    /// Device memory. When dropped it is freed behind the stream's work.
    type Memory: Debug + Send;
    /// A place in the order of a stream, which is marked again and again.
    type Event: Debug + Send;

    /// Refuses a thread on which the stream's context is not current.
    ///
    /// # Errors
    /// Another context, or none, is current.
    fn check_current(&self) -> Result<(), Failure>;

    /// A number that no other context has. Kernels are loaded once for each.
    ///
    /// # Errors
    /// The driver refuses.
    fn context_id(&self) -> Result<u64, Failure>;

    /// What the device can do.
    ///
    /// # Errors
    /// The driver refuses.
    fn limits(&self) -> Result<Limits, Failure>;

    /// Compiles PTX for the device.
    ///
    /// # Errors
    /// The driver refuses.
    fn load(&self, ptx: &str) -> Result<Self::Module, Failure>;

    /// A kernel of a module, whose blocks may have so many bytes of dynamic shared memory.
    ///
    /// # Errors
    /// There is none of this name, or the device has less memory.
    fn function(
        &self,
        module: &Self::Module,
        name: &str,
        shared: u32,
    ) -> Result<Self::Function, Failure>;

    /// Enqueues a launch.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// `arguments` point to values of the types of the kernel's parameters, in their order; what the kernel reads and
    /// writes through them stays allocated until the stream has passed it.
    unsafe fn launch(
        &self,
        function: Self::Function,
        config: LaunchConfig,
        arguments: &mut [*mut c_void],
    ) -> Result<(), Failure>;

    /// Allocates so many bytes, for work of this stream, and of others between two places in its order.
    ///
    /// # Errors
    /// The device has no memory left.
    fn memory(&self, bytes: usize) -> Result<Self::Memory, Failure>;

    /// Allocates memory that holds these bytes.
    ///
    /// # Errors
    /// The device has no memory left, or the copy fails.
    fn memory_with(&self, bytes: Vec<u8>) -> Result<Self::Memory, Failure>;

    /// Where the memory is.
    fn address(memory: &Self::Memory) -> u64;

    /// Enqueues a copy within the device.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// Both ranges stay allocated until the stream has passed the copy, and do not overlap.
    unsafe fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), Failure>;

    /// Enqueues a copy of rows within the device.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// As [`Gpu::copy`], for every row.
    unsafe fn copy_within(&self, rows: Apart) -> Result<(), Failure>;

    /// Another stream of the context. It may be the same stream: then work that could go on side by side does not.
    ///
    /// # Errors
    /// The driver refuses.
    fn beside(&self) -> Result<Self, Failure>;

    /// The stream for the results of a group. It is another stream only where whoever calls the session gathers on
    /// [`PtxSession::results`](super::PtxSession::results).
    ///
    /// # Errors
    /// The driver refuses.
    fn for_results(&self) -> Result<Self, Failure> {
        Ok(self.clone())
    }

    /// An event of the context.
    ///
    /// # Errors
    /// The driver refuses.
    fn event(&self) -> Result<Self::Event, Failure>;

    /// Marks with the event what was given to this stream so far.
    ///
    /// # Errors
    /// The driver refuses.
    fn record(&self, event: &Self::Event) -> Result<(), Failure>;

    /// Lets later work of this stream wait for what the event marks.
    ///
    /// # Errors
    /// The driver refuses.
    fn wait(&self, event: &Self::Event) -> Result<(), Failure>;

    /// Lets later work of this stream wait for what was given to the other one so far.
    ///
    /// # Errors
    /// The driver refuses.
    fn follow(&self, other: &Self, event: &Self::Event) -> Result<(), Failure> {
        other.record(event)?;
        self.wait(event)
    }

    /// Enqueues a copy of rows of host memory to the device.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// Both sides stay allocated until the stream has passed the copy.
    unsafe fn upload(&self, from: *const u8, rows: Rows, to: u64) -> Result<(), Failure>;

    /// Enqueues a copy from the device to rows of host memory.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// As [`Gpu::upload`].
    unsafe fn download(&self, to: *mut u8, rows: Rows, from: u64) -> Result<(), Failure>;
}

// SAFETY: pp-device gives memory of the stream's context, of the size that was asked for, and frees it behind the
// stream's work.
unsafe impl Gpu for Stream {
    type Module = Module;
    type Function = Function;
    type Memory = StreamBuffer;
    type Event = Event;

    fn check_current(&self) -> Result<(), Failure> {
        Ok(self.device().check_current()?)
    }

    fn context_id(&self) -> Result<u64, Failure> {
        Ok(self.device().context_id()?)
    }

    fn limits(&self) -> Result<Limits, Failure> {
        let about = self.device().about();
        Ok(Limits {
            driver_version: about.driver_version,
            capability: [about.compute_major, about.compute_minor],
            shared_bytes_per_block: about.shared_bytes_per_block,
        })
    }

    fn load(&self, ptx: &str) -> Result<Module, Failure> {
        Ok(Module::load(self.device(), ptx)?)
    }

    fn function(&self, module: &Module, name: &str, shared: u32) -> Result<Function, Failure> {
        let function = module.function(name)?;
        if shared > 0 {
            function.allow_shared(shared)?;
        }
        Ok(function)
    }

    unsafe fn launch(
        &self,
        function: Function,
        config: LaunchConfig,
        arguments: &mut [*mut c_void],
    ) -> Result<(), Failure> {
        // SAFETY: the caller's duty.
        Ok(unsafe { function.launch(self, config, arguments) }?)
    }

    fn memory(&self, bytes: usize) -> Result<StreamBuffer, Failure> {
        Ok(StreamBuffer::new(self, bytes)?)
    }

    fn memory_with(&self, bytes: Vec<u8>) -> Result<StreamBuffer, Failure> {
        let memory = StreamBuffer::new(self, bytes.len())?;
        memory.fill_with(bytes)?;
        Ok(memory)
    }

    fn address(memory: &StreamBuffer) -> u64 {
        memory.address()
    }

    unsafe fn copy(&self, from: u64, to: u64, len: usize) -> Result<(), Failure> {
        let at = |address| DevicePtr { address, len };
        // SAFETY: the caller's duty.
        Ok(unsafe { Stream::copy(self, at(from), at(to)) }?)
    }

    unsafe fn copy_within(&self, rows: Apart) -> Result<(), Failure> {
        // SAFETY: the caller's duty.
        Ok(unsafe { Stream::copy_within(self, rows) }?)
    }

    fn beside(&self) -> Result<Stream, Failure> {
        Ok(Stream::new(self.device())?)
    }

    fn for_results(&self) -> Result<Stream, Failure> {
        Ok(Stream::urgent(self.device())?)
    }

    fn event(&self) -> Result<Event, Failure> {
        Ok(Event::new(self.device())?)
    }

    fn record(&self, event: &Event) -> Result<(), Failure> {
        Ok(event.record(self)?)
    }

    fn wait(&self, event: &Event) -> Result<(), Failure> {
        Ok(Stream::wait(self, event)?)
    }

    unsafe fn upload(&self, from: *const u8, rows: Rows, to: u64) -> Result<(), Failure> {
        // SAFETY: the caller's duty.
        Ok(unsafe { self.upload_rows(from, rows, to) }?)
    }

    unsafe fn download(&self, to: *mut u8, rows: Rows, from: u64) -> Result<(), Failure> {
        // SAFETY: the caller's duty.
        Ok(unsafe { self.download_rows(to, rows, from) }?)
    }
}
