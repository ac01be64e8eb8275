//! Element types and shapes, with sizes that cannot overflow.

use core::fmt;

use serde::de::{Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Most dimensions of a [`Shape`].
pub const MAX_DIMS: usize = 8;
/// Most elements of a [`Shape`]: at one byte each they fill the largest payload, 64 GiB.
pub const MAX_ELEMENTS: u64 = 1 << 36;

wire_enum! {
    /// Type of the elements of a tensor.
    pub enum DType {
        /// Unsigned, 8 bits.
        U8 = 1 => "u8",
        /// Signed, 32 bits.
        I32 = 2 => "i32",
        /// Signed, 64 bits.
        I64 = 3 => "i64",
        /// Brain float: 8 bits of exponent, 7 of fraction.
        Bf16 = 4 => "bf16",
        /// IEEE half: 5 bits of exponent, 10 of fraction.
        F16 = 5 => "f16",
        /// IEEE single.
        F32 = 6 => "f32",
        /// One byte, 0 or 1.
        Bool = 7 => "bool",
        /// Signed, 8 bits.
        I8 = 8 => "i8",
        /// Signed, 16 bits.
        I16 = 9 => "i16",
        /// Unsigned, 16 bits.
        U16 = 10 => "u16",
        /// Unsigned, 32 bits.
        U32 = 11 => "u32",
        /// IEEE double.
        F64 = 12 => "f64",
        /// 4 bits of exponent, 3 of fraction, no infinities: `float8_e4m3fn` of PyTorch.
        F8E4m3fn = 13 => "f8e4m3fn",
        /// 5 bits of exponent, 2 of fraction: `float8_e5m2` of PyTorch.
        F8E5m2 = 14 => "f8e5m2",
    }
}

impl DType {
    /// Says whether the collectives of a group sum such elements: i32, i64, bf16, f16 and f32.
    #[must_use]
    pub const fn is_summed(self) -> bool {
        matches!(
            self,
            Self::I32 | Self::I64 | Self::Bf16 | Self::F16 | Self::F32
        )
    }

    /// Size of one element.
    #[must_use]
    pub const fn size_bytes(self) -> u64 {
        match self {
            Self::U8 | Self::Bool | Self::I8 | Self::F8E4m3fn | Self::F8E5m2 => 1,
            Self::Bf16 | Self::F16 | Self::I16 | Self::U16 => 2,
            Self::I32 | Self::F32 | Self::U32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }
}

/// Why a shape is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// More than [`MAX_DIMS`] dimensions.
    #[error("{dims} dimensions are over the bound of {MAX_DIMS}")]
    TooManyDims {
        /// How many were given.
        dims: usize,
    },
    /// More than [`MAX_ELEMENTS`] elements.
    #[error("the shape has more than {MAX_ELEMENTS} elements")]
    TooManyElements,
}

/// Dimensions of a tensor, row-major, outermost first.
///
/// A dimension may be 0. No dimension at all is a scalar: one element.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Those past `len` are 0, so that equal shapes compare equal.
    dims: [u64; MAX_DIMS],
    len: u8,
    elements: u64,
}

impl Shape {
    /// The shape with these dimensions.
    ///
    /// # Errors
    /// [`ShapeError::TooManyDims`], [`ShapeError::TooManyElements`].
    pub fn new(dims: &[u64]) -> Result<Self, ShapeError> {
        let mut own = [0; MAX_DIMS];
        let head = own
            .get_mut(..dims.len())
            .ok_or(ShapeError::TooManyDims { dims: dims.len() })?;
        head.copy_from_slice(dims);
        let elements = if dims.contains(&0) {
            Some(0)
        } else {
            dims.iter()
                .try_fold(1u64, |product, dim| product.checked_mul(*dim))
        };
        match elements {
            Some(elements) if elements <= MAX_ELEMENTS => Ok(Self {
                dims: own,
                len: dims.len() as u8,
                elements,
            }),
            _ => Err(ShapeError::TooManyElements),
        }
    }

    /// The dimensions.
    #[must_use]
    pub fn dims(&self) -> &[u64] {
        &self.dims[..usize::from(self.len)]
    }

    /// Product of the dimensions, at most [`MAX_ELEMENTS`].
    #[must_use]
    pub const fn elements(&self) -> u64 {
        self.elements
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.dims().fmt(f)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl Serialize for Shape {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.dims().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ShapeVisitor;
        impl<'de> Visitor<'de> for ShapeVisitor {
            type Value = Shape;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "at most {MAX_DIMS} dimensions")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Shape, A::Error> {
                let mut dims = [0; MAX_DIMS];
                let mut len = 0;
                while let Some(dim) = seq.next_element()? {
                    let too_many = ShapeError::TooManyDims { dims: len + 1 };
                    let place = dims.get_mut(len).ok_or(too_many);
                    *place.map_err(A::Error::custom)? = dim;
                    len += 1;
                }
                Shape::new(&dims[..len]).map_err(A::Error::custom)
            }
        }
        deserializer.deserialize_seq(ShapeVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_sizes_are_those_of_the_wire_format() {
        let row = |dtype: &DType| (dtype.code(), dtype.size_bytes(), dtype.to_string());
        let table: Vec<_> = DType::ALL.iter().map(row).collect();
        let expected = [
            (1, 1, "u8"),
            (2, 4, "i32"),
            (3, 8, "i64"),
            (4, 2, "bf16"),
            (5, 2, "f16"),
            (6, 4, "f32"),
            (7, 1, "bool"),
            (8, 1, "i8"),
            (9, 2, "i16"),
            (10, 2, "u16"),
            (11, 4, "u32"),
            (12, 8, "f64"),
            (13, 1, "f8e4m3fn"),
            (14, 1, "f8e5m2"),
        ];
        let expected = expected.map(|(code, size, name)| (code, size, name.to_owned()));
        assert_eq!(table, expected);
    }

    #[test]
    fn unknown_dtype_is_refused() {
        for code in [0, 15, 255] {
            assert!(DType::try_from(code).is_err());
            assert!(postcard::from_bytes::<DType>(&[code]).is_err());
        }
    }

    #[test]
    fn element_count_is_checked() {
        assert_eq!(Shape::new(&[]).unwrap().elements(), 1);
        assert_eq!(Shape::new(&[3, 5, 7]).unwrap().elements(), 105);
        assert_eq!(Shape::new(&[u64::MAX, 0, u64::MAX]).unwrap().elements(), 0);
        assert_eq!(
            Shape::new(&[MAX_ELEMENTS]).unwrap().elements(),
            MAX_ELEMENTS
        );
        for over in [
            &[MAX_ELEMENTS + 1][..],
            &[1 << 32, 1 << 32],
            &[u64::MAX, u64::MAX],
        ] {
            assert_eq!(Shape::new(over), Err(ShapeError::TooManyElements));
        }
    }

    #[test]
    fn ninth_dimension_is_refused_both_ways() {
        assert_eq!(
            Shape::new(&[1; 9]),
            Err(ShapeError::TooManyDims { dims: 9 })
        );
        assert!(postcard::from_bytes::<Shape>(&[9, 1, 1, 1, 1, 1, 1, 1, 1, 1]).is_err());
        assert!(postcard::from_bytes::<Shape>(&[8, 1, 1, 1, 1, 1, 1, 1, 1]).is_ok());
    }
}
