//! Memory that two processes of one host map, and numbers that a stream writes for both hosts.
//!
//! Hazard: memory that is unmapped while a stream still copies to it, a page that is given back to the system while a
//! device still writes to it. Guarantee: the owner of either names the streams and events of the work that may use it, and
//! it is unmapped behind all of that, by the thread that frees ([`crate::reclaim`]).
//!
//! These functions of the driver have a table of their own, which is filled when they are first wanted: a driver without
//! them works for all else.

use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::ops::Deref;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Mutex, OnceLock, PoisonError};

use cudarc::driver::sys::{
    self, CUdevice_P2PAttribute, CUdevice_attribute as Attribute, CUmemAccess_flags,
    CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationType, CUmemLocation, CUmemLocationType,
};

use crate::device::Device;
use crate::driver::{Address, Driver, Handle};
use crate::error::CudaError;
use crate::functions;
use crate::memory::{DevicePtr, with_sizes};
use crate::reclaim::{DeferredFree, Work};
use crate::stream::{Event, Stream};

functions! {
    /// What is called of the driver for memory of several processes, with the types of cuda.h 13.0.
    Functions {
        cuDeviceGetCount(*mut c_int);
        cuDeviceGetUuid_v2(*mut [u8; 16], c_int);
        cuDeviceGetAttribute(*mut c_int, c_int, c_int);
        cuDeviceGetP2PAttribute(*mut c_int, c_int, c_int, c_int);
        cuDeviceCanAccessPeer(*mut c_int, c_int, c_int);
        cuMemGetAllocationGranularity(*mut usize, *const CUmemAllocationProp, c_uint);
        cuMemCreate(*mut u64, usize, *const CUmemAllocationProp, u64);
        cuMemRelease(u64);
        cuMemExportToShareableHandle(*mut c_void, u64, c_uint, u64);
        cuMemImportFromShareableHandle(*mut u64, *mut c_void, c_uint);
        cuMemAddressReserve(*mut Address, usize, usize, Address, u64);
        cuMemAddressFree(Address, usize);
        cuMemMap(Address, usize, usize, u64, u64);
        cuMemUnmap(Address, usize);
        cuMemSetAccess(Address, usize, *const CUmemAccessDesc, usize);
        cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        cuMemHostUnregister(*mut c_void);
        cuMemHostGetDevicePointer_v2(*mut Address, *mut c_void, c_uint);
        cuStreamWriteValue32_v2(Handle, Address, u32, c_uint);
    }
}

static FUNCTIONS: OnceLock<Result<Functions, &'static str>> = OnceLock::new();

const AS_FILE: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// The functions; a device was opened before, so the driver is there.
fn functions() -> Result<&'static Functions, CudaError> {
    let found = FUNCTIONS.get_or_init(|| {
        // SAFETY: the driver was found when a device was opened, so this does not panic.
        let library = unsafe { sys::culib() };
        // SAFETY: the names stand for these types in cuda.h 13.0 and are part of the driver's stable interface.
        unsafe { Functions::look_up(library) }
    });
    let missing = |symbol: &&'static str| CudaError::MissingSymbol { symbol };
    found.as_ref().map_err(missing)
}

/// As [`crate::driver::call`], for a function of this table.
macro_rules! call {
    ($name:ident($($argument:expr),* $(,)?)) => {{
        let functions = functions()?;
        let code = (functions.$name)($($argument),*);
        Driver::loaded().check(stringify!($name), code)
    }};
}

/// How a device reaches the memory of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// It is the same device.
    Itself,
    /// Over NVLink.
    NvLink,
    /// Over the bus of the host.
    Bus,
    /// Not at all.
    Not,
    /// This process does not see the other device.
    Hidden,
}

impl Device {
    fn number(&self) -> c_int {
        self.about().ordinal.cast_signed()
    }

    /// How this device reaches the memory of that with this UUID.
    ///
    /// # Errors
    /// The driver lacks the functions, or refuses.
    pub fn reach(&self, uuid: [u8; 16]) -> Result<Reach, CudaError> {
        if self.about().uuid == uuid {
            return Ok(Reach::Itself);
        }
        let (mut count, own) = (0, self.number());
        // SAFETY: writes one number to a local.
        unsafe { call!(cuDeviceGetCount(&raw mut count)) }?;
        for other in (0..count).filter(|other| *other != own) {
            let (mut seen, mut reaches, mut atomics) = ([0; 16], 0, 0);
            // SAFETY: writes a UUID to a local, of a device that there is.
            unsafe { call!(cuDeviceGetUuid_v2(&raw mut seen, other)) }?;
            if seen != uuid {
                continue;
            }
            let native =
                CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED as c_int;
            // SAFETY: each writes one number to a local, of two devices that there are.
            unsafe {
                call!(cuDeviceCanAccessPeer(&raw mut reaches, own, other))?;
                call!(cuDeviceGetP2PAttribute(
                    &raw mut atomics,
                    native,
                    own,
                    other
                ))?;
            }
            return Ok(match (reaches, atomics) {
                (0, _) => Reach::Not,
                // The bus has no atomics.
                (_, 0) => Reach::Bus,
                _ => Reach::NvLink,
            });
        }
        Ok(Reach::Hidden)
    }

    /// Says whether its memory can be passed to another process as a descriptor.
    ///
    /// # Errors
    /// As [`Device::reach`].
    pub fn can_share(&self) -> Result<bool, CudaError> {
        let mut can = 0;
        let which =
            Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED as c_int;
        // SAFETY: writes one number to a local, of a device that there is.
        unsafe { call!(cuDeviceGetAttribute(&raw mut can, which, self.number())) }?;
        Ok(can != 0)
    }
}

impl Stream {
    /// Writes a number to memory of the host that was registered ([`Registered`]), behind all work before it: whoever sees
    /// the number sees what that work wrote, on any device.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// Until this stream has passed the write, `address` is that of an atomic of 32 bits in registered memory.
    pub unsafe fn write_value(&self, address: u64, value: u32) -> Result<(), CudaError> {
        self.device().bind()?;
        // SAFETY: the caller's promise, and a live stream. Flags 0: with a fence in front.
        unsafe { call!(cuStreamWriteValue32_v2(self.handle(), address, value, 0)) }
    }
}

fn location(device: &Device) -> CUmemLocation {
    CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device.number(),
    }
}

/// Memory of one device that two processes map: one has made it, one has imported it.
///
/// # If dropped
/// Never waits. It is unmapped some time later, when all work that [`SharedMemory::used_until`] named is over. The memory
/// itself is free when both have unmapped it, or have ended.
#[derive(Debug)]
pub struct SharedMemory {
    device: Device,
    memory: DevicePtr,
    behind: Mutex<Work>,
}

impl SharedMemory {
    /// Takes so much memory of a device, maps it, and gives the descriptor that another process imports. It holds what the
    /// device has left there.
    ///
    /// # Errors
    /// There is not so much; the driver cannot share it.
    pub fn new(device: &Device, bytes: usize) -> Result<(Self, OwnedFd), CudaError> {
        device.bind_anew()?;
        let len = whole(device, bytes)?;
        let (mut handle, mut fd) = (0, -1);
        let of = properties(device);
        // SAFETY: reads one description, and writes to a local; the context is current.
        unsafe { call!(cuMemCreate(&raw mut handle, len, &raw const of, 0)) }
            .map_err(|error| with_sizes(error, device, "device", len))?;
        let handle = Created(handle);
        let to = (&raw mut fd).cast();
        // SAFETY: writes a descriptor to a local, for memory that was just made.
        unsafe { call!(cuMemExportToShareableHandle(to, handle.0, AS_FILE.0, 0)) }?;
        // SAFETY: the driver has just made it for this call.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok((Self::map(device, &handle, len)?, fd))
    }

    /// Maps memory that a process of this host has made with [`SharedMemory::new`], on this device or on one that it
    /// reaches.
    ///
    /// # Errors
    /// It is not so much; the driver refuses.
    pub fn import(device: &Device, fd: OwnedFd, bytes: usize) -> Result<Self, CudaError> {
        device.bind_anew()?;
        let len = whole(device, bytes)?;
        let mut handle = 0;
        let from = fd.as_raw_fd() as isize as *mut c_void;
        // SAFETY: writes to a local; the driver takes a descriptor as the value of the pointer, and checks what it is.
        unsafe {
            call!(cuMemImportFromShareableHandle(
                &raw mut handle,
                from,
                AS_FILE.0
            ))
        }?;
        Self::map(device, &Created(handle), len)
    }

    fn map(device: &Device, handle: &Created, len: usize) -> Result<Self, CudaError> {
        let mut address = 0;
        // SAFETY: writes to a local; the context is current.
        unsafe { call!(cuMemAddressReserve(&raw mut address, len, 0, 0, 0)) }?;
        // SAFETY: the range was just reserved, and the handle is that of memory.
        if let Err(error) = unsafe { call!(cuMemMap(address, len, 0, handle.0, 0)) } {
            // SAFETY: as above; nothing is mapped there.
            unsafe { call!(cuMemAddressFree(address, len)) }?;
            return Err(error);
        }
        let memory = Self {
            device: device.clone(),
            memory: DevicePtr { address, len },
            behind: Mutex::default(),
        };
        let access = CUmemAccessDesc {
            location: location(device),
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: reads one description of the range that was just mapped.
        unsafe { call!(cuMemSetAccess(address, len, &raw const access, 1)) }?;
        Ok(memory)
    }

    /// Where it is, for this process.
    #[must_use]
    pub fn ptr(&self) -> DevicePtr {
        self.memory
    }

    /// It stays mapped until these events are done and all that these streams have at its end is.
    pub fn used_until(&self, events: Vec<Event>, streams: Vec<Stream>) {
        let mut behind = self.behind.lock().unwrap_or_else(PoisonError::into_inner);
        behind.events.extend(events);
        behind.streams.extend(streams);
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        let DevicePtr { address, len } = self.memory;
        let behind = self.behind.get_mut();
        let free = move || {
            // SAFETY: mapped by `map`, whose only owner gave it up here, once, and no work uses it.
            unsafe {
                call!(cuMemUnmap(address, len))?;
                call!(cuMemAddressFree(address, len))
            }
        };
        let behind = std::mem::take(behind.unwrap_or_else(PoisonError::into_inner));
        DeferredFree::submit(&self.device, behind, free);
    }
}

/// A reference to memory, which lives on in its mappings.
struct Created(u64);

impl Drop for Created {
    fn drop(&mut self) {
        let release = || {
            // SAFETY: the driver has just given it, and it is not used again.
            unsafe { call!(cuMemRelease(self.0)) }
        };
        if let Err(error) = release() {
            tracing::warn!(%error, "shared memory was not released");
        }
    }
}

fn properties(device: &Device) -> CUmemAllocationProp {
    // SAFETY: all zero is a value of each of its fields: numbers, enums with a zero, and a pointer.
    let zero: CUmemAllocationProp = unsafe { std::mem::zeroed() };
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: AS_FILE,
        location: location(device),
        ..zero
    }
}

/// So many bytes in whole pages of the device.
fn whole(device: &Device, bytes: usize) -> Result<usize, CudaError> {
    let mut page = 0;
    let which = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED as c_uint;
    let of = properties(device);
    // SAFETY: reads one description, and writes one number to a local.
    unsafe {
        call!(cuMemGetAllocationGranularity(
            &raw mut page,
            &raw const of,
            which
        ))
    }?;
    Ok(bytes.next_multiple_of(page.max(1)))
}

/// Memory of the host that a device writes, and what keeps it mapped.
///
/// # If dropped
/// Never waits. It is given back some time later, when all that its streams have by then is done.
pub struct Registered<M: Send + 'static> {
    /// Taken out by the drop alone.
    memory: Option<M>,
    device: Device,
    base: usize,
    address: Address,
    streams: Vec<Stream>,
}

impl<M: Send + 'static> Registered<M> {
    /// Lets a device write `len` bytes at `base`, which are whole pages. These streams do.
    ///
    /// # Errors
    /// The driver refuses, for example because no more memory may be locked.
    ///
    /// # Safety
    /// `memory` keeps the bytes mapped, also where it is moved, and nothing else registers them.
    pub unsafe fn new(
        memory: M,
        (base, len): (NonNull<u8>, usize),
        streams: Vec<Stream>,
        device: &Device,
    ) -> Result<Self, CudaError> {
        device.bind_anew()?;
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller's promise; the context is current.
        unsafe { call!(cuMemHostRegister_v2(base.as_ptr().cast(), len, flags)) }?;
        let mut registered = Self {
            memory: Some(memory),
            device: device.clone(),
            base: base.as_ptr() as usize,
            address: 0,
            streams,
        };
        let to = &raw mut registered.address;
        // SAFETY: writes one address to a local, for bytes that were just registered.
        unsafe { call!(cuMemHostGetDevicePointer_v2(to, base.as_ptr().cast(), 0)) }?;
        Ok(registered)
    }

    /// Where the device finds it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl<M: Send + 'static> Deref for Registered<M> {
    type Target = M;

    fn deref(&self) -> &M {
        self.memory.as_ref().expect("present until dropped")
    }
}

impl<M: Send + 'static> fmt::Debug for Registered<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Registered({:#x} on {:?})", self.base, self.device)
    }
}

impl<M: Send + 'static> Drop for Registered<M> {
    fn drop(&mut self) {
        let (base, memory) = (self.base, self.memory.take());
        let free = move || {
            // SAFETY: registered by `new`, whose only owner gave it up here, once, and no stream writes it.
            let done = unsafe { call!(cuMemHostUnregister(base as *mut c_void)) };
            match done {
                Ok(()) => drop(memory),
                // The driver still knows these addresses: nothing else may be mapped there.
                Err(_) => std::mem::forget(memory),
            }
            done
        };
        let behind = Work {
            streams: std::mem::take(&mut self.streams),
            ..Work::default()
        };
        DeferredFree::submit(&self.device, behind, free);
    }
}
