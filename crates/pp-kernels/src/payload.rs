//! The tensors of one direction as a call sees them: a list, and the memory in which they lie.
//!
//! Memory is either the host's, borrowed as a slice, or a device's, which is only a number here: nothing in this crate
//! reads through a device address on the host, so such a payload gives addresses ([`Payload::device_tensor`]) and
//! refuses to give slices. A member of a group that does not lead has the list alone.

use std::ops::Range;

use pp_contract::{DType, Manifest, TensorSpec};

use crate::abi::TENSOR_ALIGN;
use crate::error::Failure;

fn check_length(tensors: &Manifest, len: usize) -> Result<(), Failure> {
    if (len as u64) < tensors.payload_bytes() {
        return Err(Failure::invalid(format!(
            "the tensors need {} bytes, the buffer has {len}",
            tensors.payload_bytes()
        )));
    }
    Ok(())
}

/// The range of the tensor of that name, which must have this element type and shape.
fn expect(
    tensors: &Manifest,
    name: &str,
    dtype: DType,
    dims: &[u64],
) -> Result<Range<usize>, Failure> {
    let (Some((_, spec)), Some(range)) = (tensors.get(name), tensors.range(name)) else {
        return Err(Failure::invalid(format!("the tensor {name} is missing")));
    };
    if spec.dtype() != dtype || spec.shape().dims() != dims {
        return Err(Failure::invalid(format!(
            "the tensor {name} is {:?} {}, must be {dtype:?} {dims:?}",
            spec.dtype(),
            spec.shape()
        )));
    }
    Ok(range)
}

fn on_device() -> Failure {
    Failure::invalid("the payload lies in device memory, which the host cannot read or write")
}

fn nowhere() -> Failure {
    Failure::invalid("only the leader of the group has the payload's memory")
}

/// Tensors, and the memory in which they lie: `H` on the host.
#[derive(Debug)]
pub struct TensorsIn<H> {
    tensors: Manifest,
    memory: Memory<H>,
}

/// Tensors to read.
pub type Payload<'a> = TensorsIn<&'a [u8]>;
/// Tensors to write.
pub type PayloadMut<'a> = TensorsIn<HostMut<'a>>;

#[derive(Debug)]
enum Memory<H> {
    Host(H),
    Device {
        address: u64,
        bytes: usize,
    },
    /// That of a group's leader.
    Elsewhere,
}

/// Memory of the host to be written.
#[derive(Debug)]
pub struct HostMut<'a> {
    pub(crate) data: &'a mut [u8],
    /// Bytes behind the payload that the caller gave for guarding, empty where it gave none.
    pub(crate) tail: &'a mut [u8],
}

impl<H> TensorsIn<H> {
    /// The tensors of `list`, which lie in the `len` bytes of device memory at `address`. There are no guard bytes on a
    /// device: looking at them would mean to wait.
    ///
    /// This is a number only: what must be true of the memory is part of the call to which the payload is given
    /// ([`crate::RawSession`]).
    ///
    /// # Errors
    /// A buffer that is too short, or an address that is not a multiple of 256.
    pub fn on_device(list: &Manifest, address: u64, len: usize) -> Result<Self, Failure> {
        check_length(list, len)?;
        let bytes = list.payload_bytes() as usize;
        if !address.is_multiple_of(TENSOR_ALIGN) || (address == 0 && bytes > 0) {
            return Err(Failure::invalid(format!(
                "a payload at device address {address:#x}: must be a multiple of {TENSOR_ALIGN} and not 0"
            )));
        }
        Ok(Self::from_checked_device(list.clone(), address, bytes))
    }

    /// The tensors of `list`, for a member of a group that does not lead: their memory is the leader's.
    #[must_use]
    pub fn of_leader(list: &Manifest) -> Self {
        TensorsIn {
            tensors: list.clone(),
            memory: Memory::Elsewhere,
        }
    }

    /// The caller has checked that every tensor lies within the memory of the host.
    pub(crate) fn from_checked(tensors: Manifest, host: H) -> Self {
        TensorsIn {
            tensors,
            memory: Memory::Host(host),
        }
    }

    /// The caller has checked that every tensor lies within the `bytes` at `address`.
    pub(crate) fn from_checked_device(tensors: Manifest, address: u64, bytes: usize) -> Self {
        TensorsIn {
            tensors,
            memory: Memory::Device { address, bytes },
        }
    }

    /// The description of a tensor, if there is one of that name.
    #[must_use]
    pub fn spec(&self, name: &str) -> Option<&TensorSpec> {
        self.tensors.get(name).map(|(_, spec)| spec)
    }

    /// All tensors, in their order.
    #[must_use]
    pub fn tensors(&self) -> &Manifest {
        &self.tensors
    }

    /// The device address of a tensor that must have this element type and shape.
    ///
    /// # Errors
    /// No such tensor, or another type or shape; both are named. A payload in host memory.
    pub fn device_tensor(&self, name: &str, dtype: DType, dims: &[u64]) -> Result<u64, Failure> {
        let range = expect(&self.tensors, name, dtype, dims)?;
        match self.memory {
            Memory::Host(_) => Err(Failure::invalid(
                "the payload lies in host memory, it has no device address",
            )),
            Memory::Device { address, .. } => Ok(address + range.start as u64),
            Memory::Elsewhere => Err(nowhere()),
        }
    }

    /// Says whether it lies in device memory; `None` where its memory is that of a group's leader.
    #[must_use]
    pub fn is_on_device(&self) -> Option<bool> {
        match self.memory {
            Memory::Host(_) => Some(false),
            Memory::Device { .. } => Some(true),
            Memory::Elsewhere => None,
        }
    }
}

impl<'a> Payload<'a> {
    /// The tensors of `list`, which lie in `data`.
    ///
    /// # Errors
    /// A buffer that is too short.
    pub fn new(list: &Manifest, data: &'a [u8]) -> Result<Payload<'a>, Failure> {
        check_length(list, data.len())?;
        let data = &data[..list.payload_bytes() as usize];
        Ok(TensorsIn::from_checked(list.clone(), data))
    }

    /// The bytes of a tensor that must have this element type and shape.
    ///
    /// # Errors
    /// No such tensor, or another type or shape; both are named. A payload in device memory.
    pub fn tensor(&self, name: &str, dtype: DType, dims: &[u64]) -> Result<&'a [u8], Failure> {
        let range = expect(&self.tensors, name, dtype, dims)?;
        match self.memory {
            Memory::Host(data) => Ok(&data[range]),
            Memory::Device { .. } => Err(on_device()),
            Memory::Elsewhere => Err(nowhere()),
        }
    }

    /// Start and length as they cross the border. The pointer is dereferenced on the side of its space alone.
    pub(crate) fn raw(&self) -> (*mut u8, u64) {
        match self.memory {
            // Read only by the rules of the entry it is given to.
            Memory::Host(data) => (data.as_ptr().cast_mut(), data.len() as u64),
            Memory::Device { address, bytes } => (device_pointer(address), bytes as u64),
            Memory::Elsewhere => (std::ptr::null_mut(), 0),
        }
    }
}

impl<'a> PayloadMut<'a> {
    /// The tensors of `list`, to be written into `data`. Bytes of `data` behind the payload serve as guard bytes:
    /// at most [`crate::guard::GUARD_BYTES`] of them are overwritten, and found changed if the kernels write past the
    /// end.
    ///
    /// # Errors
    /// A buffer that is too short.
    pub fn new(list: &Manifest, data: &'a mut [u8]) -> Result<PayloadMut<'a>, Failure> {
        check_length(list, data.len())?;
        let (data, tail) = data.split_at_mut(list.payload_bytes() as usize);
        let guarded = tail.len().min(crate::guard::GUARD_BYTES);
        let tail = &mut tail[..guarded];
        Ok(TensorsIn::from_checked(
            list.clone(),
            HostMut { data, tail },
        ))
    }

    /// The bytes of a tensor that must have this element type and shape.
    ///
    /// # Errors
    /// No such tensor, or another type or shape; both are named. A payload in device memory.
    pub fn tensor_mut(
        &mut self,
        name: &str,
        dtype: DType,
        dims: &[u64],
    ) -> Result<&mut [u8], Failure> {
        let range = expect(&self.tensors, name, dtype, dims)?;
        match &mut self.memory {
            Memory::Host(host) => Ok(&mut host.data[range]),
            Memory::Device { .. } => Err(on_device()),
            Memory::Elsewhere => Err(nowhere()),
        }
    }

    /// Start and length as they cross the border. The pointer is dereferenced on the side of its space alone.
    pub(crate) fn raw(&mut self) -> (*mut u8, u64) {
        match &mut self.memory {
            Memory::Host(host) => (host.data.as_mut_ptr(), host.data.len() as u64),
            Memory::Device { address, bytes } => (device_pointer(*address), *bytes as u64),
            Memory::Elsewhere => (std::ptr::null_mut(), 0),
        }
    }

    /// List, payload and guard bytes of a payload in host memory; else `None`.
    pub(crate) fn guarded(&mut self) -> Option<(&Manifest, &mut [u8], &mut [u8])> {
        match &mut self.memory {
            Memory::Host(host) => Some((&self.tensors, host.data, host.tail)),
            Memory::Device { .. } | Memory::Elsewhere => None,
        }
    }
}

/// A device address in the shape that the ABI has for it.
fn device_pointer(address: u64) -> *mut u8 {
    std::ptr::without_provenance_mut(address as usize)
}
