//! Tensors of a payload: what they are called, how large they are, and where in the slot they lie.
//!
//! The rule of placement is the manifest's: tensors lie in their order, each at the next multiple of 256 bytes, and the
//! payload ends with the last one.

use std::fmt;

use crate::abi::{self, MAX_TENSORS, TENSOR_ALIGN};
use crate::config::{read_text, write_text};
use crate::error::Failure;

/// Element type of a tensor; the codes are those of the ABI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
#[allow(missing_docs)] // the names are the types
pub enum DType {
    U8 = 0,
    I32 = 1,
    I64 = 2,
    Bf16 = 3,
    F16 = 4,
    F32 = 5,
}

impl DType {
    const ALL: [DType; 6] = [
        DType::U8,
        DType::I32,
        DType::I64,
        DType::Bf16,
        DType::F16,
        DType::F32,
    ];

    /// The type of a code of the ABI.
    #[must_use]
    pub fn from_code(code: u32) -> Option<DType> {
        DType::ALL.into_iter().find(|d| *d as u32 == code)
    }

    /// Bytes of one element.
    #[must_use]
    pub fn size_bytes(self) -> u64 {
        match self {
            DType::U8 => 1,
            DType::Bf16 | DType::F16 => 2,
            DType::I32 | DType::F32 => 4,
            DType::I64 => 8,
        }
    }
}

/// Name, element type and shape of one tensor, and its place in the payload.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct TensorSpec(abi::Tensor);

impl TensorSpec {
    /// A tensor with no place yet; a [`TensorList`] gives it one.
    ///
    /// # Errors
    /// A name that is not 1 to 47 bytes of `a-z 0-9 _ .`, more than 8 dimensions, or a size that overflows.
    pub fn new(name: &str, dtype: DType, dims: &[u64]) -> Result<TensorSpec, Failure> {
        let mut raw = abi::Tensor {
            name: [0; 48],
            dtype: dtype as u32,
            ndim: dims.len() as u32,
            dims: [0; 8],
            offset: 0,
            bytes: 0,
        };
        if name.len() >= raw.name.len() || dims.len() > raw.dims.len() {
            return Err(Failure::invalid(format!(
                "tensor {name:?} of {} dimensions: at most 47 bytes of name and 8 dimensions",
                dims.len()
            )));
        }
        write_text(&mut raw.name, name);
        raw.dims[..dims.len()].copy_from_slice(dims);
        TensorSpec::from_abi(raw)
    }

    /// Checks what a plugin wrote.
    pub(crate) fn from_abi(mut raw: abi::Tensor) -> Result<TensorSpec, Failure> {
        let name = read_text(&raw.name).unwrap_or_default();
        let allowed = |b: u8| matches!(b, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.');
        if name.is_empty() || !name.bytes().all(allowed) {
            return Err(Failure::invalid(format!(
                "tensor name {name:?} is not made of a-z, 0-9, _ and ."
            )));
        }
        let dtype = DType::from_code(raw.dtype).ok_or_else(|| {
            Failure::invalid(format!("tensor {name} has the unknown dtype {}", raw.dtype))
        })?;
        let dims = raw.dims.get(..raw.ndim as usize).ok_or_else(|| {
            Failure::invalid(format!(
                "tensor {name} has {} dimensions, at most 8",
                raw.ndim
            ))
        })?;
        raw.bytes = dims
            .iter()
            .try_fold(dtype.size_bytes(), |bytes, dim| bytes.checked_mul(*dim))
            .ok_or_else(|| Failure::invalid(format!("tensor {name} of {dims:?} is too large")))?;
        Ok(TensorSpec(raw))
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        read_text(&self.0.name).unwrap_or_default()
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> DType {
        DType::from_code(self.0.dtype).unwrap_or(DType::U8)
    }

    /// The shape.
    #[must_use]
    pub fn dims(&self) -> &[u64] {
        &self.0.dims[..self.0.ndim as usize]
    }

    /// Bytes of all elements.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.bytes as usize
    }

    /// Where it starts in the payload.
    #[must_use]
    pub fn offset(&self) -> usize {
        self.0.offset as usize
    }

    pub(crate) fn as_abi(&self) -> &abi::Tensor {
        &self.0
    }
}

impl fmt::Debug for TensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {:?} {:?} @{}",
            self.name(),
            self.dtype(),
            self.dims(),
            self.offset()
        )
    }
}

/// The tensors of one payload in their order, each with its place.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TensorList {
    tensors: Vec<TensorSpec>,
    payload_bytes: usize,
}

impl TensorList {
    /// Gives each tensor its place.
    ///
    /// # Errors
    /// More than 16 tensors, a name that occurs twice, or a payload that overflows.
    pub fn new(specs: impl IntoIterator<Item = TensorSpec>) -> Result<TensorList, Failure> {
        let mut list = TensorList::default();
        let mut end = 0u64;
        for mut spec in specs {
            if list.tensors.len() == MAX_TENSORS {
                return Err(Failure::invalid(format!("more than {MAX_TENSORS} tensors")));
            }
            if list.get(spec.name()).is_some() {
                return Err(Failure::invalid(format!(
                    "tensor {} occurs twice",
                    spec.name()
                )));
            }
            let too_large = || Failure::invalid("the payload is too large");
            spec.0.offset = end
                .checked_next_multiple_of(TENSOR_ALIGN)
                .ok_or_else(too_large)?;
            end = spec
                .0
                .offset
                .checked_add(spec.0.bytes)
                .ok_or_else(too_large)?;
            list.tensors.push(spec);
        }
        list.payload_bytes = usize::try_from(end)
            .ok()
            .filter(|bytes| isize::try_from(*bytes).is_ok())
            .ok_or_else(|| Failure::invalid("the payload is too large"))?;
        Ok(list)
    }

    /// From the end of nothing to the end of the last tensor.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        self.payload_bytes
    }

    /// The tensor of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&TensorSpec> {
        find(&self.tensors, name)
    }

    /// In their order.
    #[must_use]
    pub fn as_slice(&self) -> &[TensorSpec] {
        &self.tensors
    }
}

pub(crate) fn find<'a>(tensors: &'a [TensorSpec], name: &str) -> Option<&'a TensorSpec> {
    tensors.iter().find(|spec| spec.name() == name)
}

/// The tensors that travel to `phase_b` and those that come back.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Layout {
    /// Written by `encode`, read by `phase_b`.
    pub inputs: TensorList,
    /// Written by `phase_b`, read by `decode`.
    pub outputs: TensorList,
}

/// The tensor of that name, which must have this element type and shape.
pub(crate) fn expect<'a>(
    tensors: &'a [TensorSpec],
    name: &str,
    dtype: DType,
    dims: &[u64],
) -> Result<&'a TensorSpec, Failure> {
    let spec = find(tensors, name)
        .ok_or_else(|| Failure::invalid(format!("the tensor {name} is missing")))?;
    if spec.dtype() != dtype || spec.dims() != dims {
        return Err(Failure::invalid(format!(
            "the tensor {name} is {:?} {:?}, must be {dtype:?} {dims:?}",
            spec.dtype(),
            spec.dims()
        )));
    }
    Ok(spec)
}
