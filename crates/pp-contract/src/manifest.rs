//! The manifest: which tensors a payload holds, and where each begins.
//!
//! *Guarantee.* The receiver sizes and cuts its slot from the manifest alone; two equal manifests
//! give the same layout on both sides, and nothing in it can overflow.

use core::fmt;
use core::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize, Serializer};

use crate::bounded::{List, TooLong, check_len};
use crate::dtype::{DType, Shape, ShapeError};

/// Most tensors in one [`Manifest`].
pub const MAX_TENSORS: usize = 16;
/// Most bytes of one payload: 64 GiB.
pub const MAX_PAYLOAD_BYTES: u64 = 64 << 30;
/// Every tensor begins at a multiple of this.
pub const TENSOR_ALIGN_BYTES: u64 = 256;
const MAX_NAME_BYTES: usize = 48;

/// Why a tensor or a manifest is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    /// Not 1 to 48 bytes of `a-z`, `0-9`, `_` and `.`.
    #[error("tensor name {name:?} is not 1 to {MAX_NAME_BYTES} bytes of a-z, 0-9, '_' and '.'")]
    Name {
        /// The name, or the beginning of it.
        name: String,
    },
    /// The shape is refused.
    #[error("tensor {name} refused")]
    Shape {
        /// The tensor.
        name: TensorName,
        /// The reason.
        source: ShapeError,
    },
    /// More than [`MAX_TENSORS`].
    #[error("too many tensors in one manifest")]
    TooMany(#[from] TooLong),
    /// Two tensors of one name.
    #[error("tensor {name} stands in the manifest twice")]
    Twice {
        /// The name.
        name: TensorName,
    },
    /// More than [`MAX_PAYLOAD_BYTES`].
    #[error("with tensor {name} the payload is over {MAX_PAYLOAD_BYTES} bytes; send it in parts")]
    TooLarge {
        /// The first tensor that does not fit.
        name: TensorName,
    },
}

/// Name of a tensor: 1 to 48 bytes of `a-z`, `0-9`, `_` and `.`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(try_from = "&str")]
pub struct TensorName {
    /// Those past `len` are 0, so that equal names compare equal.
    bytes: [u8; MAX_NAME_BYTES],
    len: u8,
}

impl TensorName {
    /// The name, if it is well formed.
    ///
    /// # Errors
    /// [`ManifestError::Name`].
    pub fn new(name: &str) -> Result<Self, ManifestError> {
        let well_formed = |byte: &u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.');
        let mut bytes = [0; MAX_NAME_BYTES];
        match bytes.get_mut(..name.len()) {
            Some(head) if !name.is_empty() && name.as_bytes().iter().all(well_formed) => {
                head.copy_from_slice(name.as_bytes());
                let len = name.len() as u8;
                Ok(Self { bytes, len })
            }
            _ => Err(ManifestError::Name {
                name: name.chars().take(MAX_NAME_BYTES).collect(),
            }),
        }
    }

    /// The name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        // All bytes are ASCII, the constructor saw to it.
        str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or_default()
    }
}

impl fmt::Debug for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl Serialize for TensorName {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

impl TryFrom<&str> for TensorName {
    type Error = ManifestError;
    fn try_from(name: &str) -> Result<Self, ManifestError> {
        Self::new(name)
    }
}

/// One tensor of a manifest: its name, element type and shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorSpec {
    name: TensorName,
    dtype: DType,
    shape: Shape,
}

impl TensorSpec {
    /// The tensor with this name, element type and dimensions.
    ///
    /// # Errors
    /// [`ManifestError::Name`], [`ManifestError::Shape`].
    pub fn new(name: &str, dtype: DType, dims: &[u64]) -> Result<Self, ManifestError> {
        let name = TensorName::new(name)?;
        let shape = Shape::new(dims).map_err(|source| ManifestError::Shape { name, source })?;
        Ok(Self { name, dtype, shape })
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// Type of its elements.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its dimensions.
    #[must_use]
    pub const fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Its size; at most eight times the largest payload, so it never overflows.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.shape.elements() * self.dtype.size_bytes()
    }
}

impl fmt::Display for TensorSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.name, self.dtype, self.shape)
    }
}

/// The tensors of one payload, in the order in which they lie in it.
///
/// Each begins at a multiple of [`TENSOR_ALIGN_BYTES`]; the bytes between them mean nothing.
/// Cloning shares the list: a manifest that stays the same from chunk to chunk costs nothing.
#[derive(Clone, Default)]
pub struct Manifest {
    tensors: Arc<[(u64, TensorSpec)]>,
    /// How many of them are meant: one less than there are, where only the seal is left out.
    len: usize,
    payload_bytes: u64,
}

impl Manifest {
    /// The manifest of one tensor.
    ///
    /// # Errors
    /// As [`TensorSpec::new`].
    pub fn single(name: &str, dtype: DType, dims: &[u64]) -> Result<Self, ManifestError> {
        Self::new(&[TensorSpec::new(name, dtype, dims)?])
    }

    /// The manifest of these tensors, in this order.
    ///
    /// # Errors
    /// [`ManifestError::TooMany`], [`ManifestError::Twice`], [`ManifestError::TooLarge`].
    pub fn new(tensors: &[TensorSpec]) -> Result<Self, ManifestError> {
        check_len(tensors.len(), MAX_TENSORS)?;
        let mut end = 0u64;
        let mut offsets = [0; MAX_TENSORS];
        for (index, spec) in tensors.iter().enumerate() {
            let name = spec.name;
            if tensors[..index].iter().any(|other| other.name == name) {
                return Err(ManifestError::Twice { name });
            }
            // Below 64 GiB, plus at most 8 × 64 GiB: far from an overflow.
            let offset = end.next_multiple_of(TENSOR_ALIGN_BYTES);
            end = offset + spec.bytes();
            if end > MAX_PAYLOAD_BYTES {
                return Err(ManifestError::TooLarge { name });
            }
            offsets[index] = offset;
        }
        Ok(Self {
            tensors: offsets.into_iter().zip(tensors.iter().copied()).collect(),
            len: tensors.len(),
            payload_bytes: end,
        })
    }

    /// The manifest of no tensors.
    #[must_use]
    pub fn empty() -> Self {
        Self::default()
    }

    /// The first `count` of these tensors, or all if there are not so many.
    pub(crate) fn first(&self, count: usize) -> Self {
        let mut first = self.clone();
        first.len = self.len.min(count);
        let end = |(offset, spec): &(u64, TensorSpec)| offset + spec.bytes();
        first.payload_bytes = first.tensors().last().map_or(0, end);
        first
    }

    fn tensors(&self) -> &[(u64, TensorSpec)] {
        &self.tensors[..self.len]
    }

    /// Size of the payload: the end of its last tensor, 0 if there is none.
    #[must_use]
    pub const fn payload_bytes(&self) -> u64 {
        self.payload_bytes
    }

    /// How many tensors there are.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Says whether there is no tensor.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where tensor `index` begins in the payload.
    #[must_use]
    pub fn offset(&self, index: usize) -> Option<u64> {
        self.tensors().get(index).map(|(offset, _)| *offset)
    }

    /// The tensor of this name and where it begins.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<(u64, &TensorSpec)> {
        self.iter().find(|(_, spec)| spec.name() == name)
    }

    /// The bytes of the payload that the tensor of this name takes up, as an index of a slice.
    #[must_use]
    pub fn range(&self, name: &str) -> Option<Range<usize>> {
        let (offset, spec) = self.get(name)?;
        let start = usize::try_from(offset).ok()?;
        Some(start..start.checked_add(usize::try_from(spec.bytes()).ok()?)?)
    }

    /// The tensors in order, each with its offset.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (u64, &TensorSpec)> {
        self.tensors().iter().map(|(offset, spec)| (*offset, spec))
    }
}

impl PartialEq for Manifest {
    fn eq(&self, other: &Self) -> bool {
        // The layout follows from the tensors; the same list needs no look at all.
        let is_same = self.len == other.len && Arc::ptr_eq(&self.tensors, &other.tensors);
        is_same || self.tensors() == other.tensors()
    }
}

impl Eq for Manifest {}

impl fmt::Debug for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

impl fmt::Display for Manifest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        for (index, (_, spec)) in self.iter().enumerate() {
            write!(f, "{}{spec}", if index == 0 { "" } else { ", " })?;
        }
        f.write_str("}")
    }
}

impl Serialize for Manifest {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.iter().map(|(_, spec)| spec))
    }
}

/// A manifest as it arrives: the constructor has not seen it yet.
pub(crate) type WireManifest = List<TensorSpec, MAX_TENSORS>;

impl TryFrom<WireManifest> for Manifest {
    type Error = ManifestError;
    fn try_from(tensors: WireManifest) -> Result<Self, ManifestError> {
        Self::new(&tensors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(name: &str, size: u64) -> TensorSpec {
        TensorSpec::new(name, DType::U8, &[size]).unwrap()
    }

    #[test]
    fn only_well_formed_names_are_taken() {
        let longest = "x".repeat(48);
        for name in ["a", "latents_in", "layer.0.weight", "9", &longest] {
            assert_eq!(TensorName::new(name).unwrap().as_str(), name);
        }
        let too_long = "x".repeat(49);
        for name in ["", "A", "a b", "a-b", "é", "a\0", &too_long] {
            assert!(TensorName::new(name).is_err(), "{name:?}");
            let encoded = postcard::to_allocvec(name).unwrap();
            assert!(postcard::from_bytes::<TensorName>(&encoded).is_err());
        }
    }

    #[test]
    fn seventeenth_tensor_is_refused() {
        let specs: Vec<TensorSpec> = (0..17).map(|n| bytes(&format!("t{n}"), 1)).collect();
        assert_eq!(Manifest::new(&specs[..16]).unwrap().len(), 16);
        let too_long = TooLong { len: 17, max: 16 };
        let error = Manifest::new(&specs).unwrap_err();
        assert_eq!(error, ManifestError::TooMany(too_long));
    }

    #[test]
    fn name_that_stands_twice_is_refused() {
        let error = Manifest::new(&[bytes("a", 1), bytes("b", 1), bytes("a", 2)]).unwrap_err();
        assert_eq!(error.to_string(), "tensor a stands in the manifest twice");
    }

    #[test]
    fn payload_may_fill_its_bound_and_not_pass_it() {
        let full = bytes("full", MAX_PAYLOAD_BYTES);
        let manifest = Manifest::new(&[full, bytes("nothing", 0)]).unwrap();
        assert_eq!(manifest.payload_bytes(), MAX_PAYLOAD_BYTES);
        let error = Manifest::new(&[full, bytes("drop", 1)]).unwrap_err();
        assert!(matches!(error, ManifestError::TooLarge { .. }), "{error}");
    }

    #[test]
    fn tensors_begin_at_multiples_of_256() {
        let specs = [bytes("a", 1), bytes("b", 256), bytes("c", 0), bytes("d", 5)];
        let manifest = Manifest::new(&specs).unwrap();
        let offsets: Vec<u64> = manifest.iter().map(|(offset, _)| offset).collect();
        assert_eq!(offsets, [0, 256, 512, 512]);
        assert_eq!(manifest.payload_bytes(), 517);
        assert_eq!(manifest.range("d"), Some(512..517));
        assert_eq!(manifest.get("d"), Some((512, &specs[3])));
        assert_eq!(manifest.range("e"), None);
        assert_eq!(Manifest::empty().payload_bytes(), 0);
    }
}
