//! Sums of elements, the same bits at every member.
//!
//! Guarantee: the sum of an element depends only on the values, added in the order in which they are given. Integers
//! wrap. bf16 and f16 are added as f32 and rounded once, to nearest, ties to even. Every sum that is not a number is
//! the same NaN: which of two NaNs an addition keeps is up to the compiler.

use half::{bf16, f16};
use pp_contract::DType;

/// Bytes that are summed at a time. This is a whole number of elements of every type.
pub(super) const BLOCK: usize = 4096;

/// A sum in progress, of at most [`BLOCK`] bytes of elements.
#[derive(Debug)]
pub(super) enum Sum {
    I32(Box<[i32; BLOCK / 4]>),
    I64(Box<[i64; BLOCK / 8]>),
    Bf16(Box<[f32; BLOCK / 2]>),
    F16(Box<[f32; BLOCK / 2]>),
    F32(Box<[f32; BLOCK / 4]>),
}

impl Sum {
    /// Returns a sum for elements of this type, which [`crate::group::Members::check_sum`] has allowed.
    pub(super) fn new(dtype: DType) -> Self {
        match dtype {
            DType::I32 => Self::I32(Box::new([0; BLOCK / 4])),
            DType::I64 => Self::I64(Box::new([0; BLOCK / 8])),
            DType::Bf16 => Self::Bf16(Box::new([0.0; BLOCK / 2])),
            DType::F16 => Self::F16(Box::new([0.0; BLOCK / 2])),
            DType::F32 => Self::F32(Box::new([0.0; BLOCK / 4])),
            other => unreachable!("{other} is not summed"),
        }
    }

    /// Starts the sum with these elements.
    pub(super) fn set(&mut self, bytes: &[u8]) {
        match self {
            Self::I32(sum) => fold(&mut sum[..], bytes, i32::from_le_bytes, |_, new| new),
            Self::I64(sum) => fold(&mut sum[..], bytes, i64::from_le_bytes, |_, new| new),
            Self::Bf16(sum) => fold(&mut sum[..], bytes, from_bf16, |_, new| new),
            Self::F16(sum) => fold(&mut sum[..], bytes, from_f16, |_, new| new),
            Self::F32(sum) => fold(&mut sum[..], bytes, f32::from_le_bytes, |_, new| new),
        }
    }

    /// Adds these elements. There are as many as at the start.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        match self {
            Self::I32(sum) => fold(&mut sum[..], bytes, i32::from_le_bytes, i32::wrapping_add),
            Self::I64(sum) => fold(&mut sum[..], bytes, i64::from_le_bytes, i64::wrapping_add),
            Self::Bf16(sum) => fold(&mut sum[..], bytes, from_bf16, |a, b| a + b),
            Self::F16(sum) => fold(&mut sum[..], bytes, from_f16, |a, b| a + b),
            Self::F32(sum) => fold(&mut sum[..], bytes, f32::from_le_bytes, |a, b| a + b),
        }
    }

    /// Writes the sums. There are as many as at the start.
    pub(super) fn write(&self, bytes: &mut [u8]) {
        match self {
            Self::I32(sum) => put(&sum[..], bytes, i32::to_le_bytes),
            Self::I64(sum) => put(&sum[..], bytes, i64::to_le_bytes),
            Self::Bf16(sum) => put(&sum[..], bytes, to_bf16),
            Self::F16(sum) => put(&sum[..], bytes, to_f16),
            Self::F32(sum) => put(&sum[..], bytes, |value| canonical(value).to_le_bytes()),
        }
    }
}

const NAN: f32 = f32::from_bits(0x7fc0_0000);

fn fold<T: Copy, const N: usize>(
    sum: &mut [T],
    bytes: &[u8],
    value: impl Fn([u8; N]) -> T,
    both: impl Fn(T, T) -> T,
) {
    for (sum, bytes) in sum.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *sum = both(*sum, value(*bytes));
    }
}

fn put<T: Copy, const N: usize>(sum: &[T], bytes: &mut [u8], value: impl Fn(T) -> [u8; N]) {
    for (sum, bytes) in sum.iter().zip(bytes.as_chunks_mut::<N>().0) {
        *bytes = value(*sum);
    }
}

/// Replaces any NaN by one fixed NaN.
fn canonical(value: f32) -> f32 {
    if value.is_nan() { NAN } else { value }
}

fn from_bf16(bytes: [u8; 2]) -> f32 {
    bf16::from_le_bytes(bytes).to_f32()
}

fn to_bf16(value: f32) -> [u8; 2] {
    bf16::from_f32(canonical(value)).to_le_bytes()
}

fn from_f16(bytes: [u8; 2]) -> f32 {
    f16::from_le_bytes(bytes).to_f32()
}

fn to_f16(value: f32) -> [u8; 2] {
    f16::from_f32(canonical(value)).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_come_back_as_they_were() {
        for bits in 0..=u16::MAX {
            let bytes = bits.to_le_bytes();
            let (half, brain) = (from_f16(bytes), from_bf16(bytes));
            let want = |nan: bool, canonical: u16| if nan { canonical } else { bits };
            let f16 = u16::from_le_bytes(to_f16(half));
            assert_eq!(f16, want(half.is_nan(), 0x7e00), "{bits:#x}");
            let bf16 = u16::from_le_bytes(to_bf16(brain));
            assert_eq!(bf16, want(brain.is_nan(), 0x7fc0), "{bits:#x}");
        }
        assert_eq!(from_f16([0, 0x3c]), 1.0);
        assert_eq!(from_f16([0xff, 0x7b]), 65504.0);
        assert_eq!(from_f16([1, 0x80]), -(2.0_f32.powi(-24)));
    }

    #[test]
    fn halves_are_rounded_to_the_nearest_and_ties_to_even() {
        // Between any two neighbours, from below and from above.
        for bits in 0..0x7bff_u16 {
            let (low, high) = (
                from_f16(bits.to_le_bytes()),
                from_f16((bits + 1).to_le_bytes()),
            );
            let middle = f32::midpoint(low, high);
            let even = bits + bits % 2;
            let rounded = |value| u16::from_le_bytes(to_f16(value));
            assert_eq!(rounded(middle), even, "{bits:#x}");
            assert_eq!(rounded(middle.next_down()), bits, "{bits:#x}");
            assert_eq!(rounded(middle.next_up()), bits + 1, "{bits:#x}");
        }
        assert_eq!(to_f16(65520.0), 0x7c00_u16.to_le_bytes());
        assert_eq!(to_f16(65520_f32.next_down()), 0x7bff_u16.to_le_bytes());
        assert_eq!(to_f16(f32::NEG_INFINITY), 0xfc00_u16.to_le_bytes());
        assert_eq!(to_bf16(f32::MAX), 0x7f80_u16.to_le_bytes());
        assert_eq!(to_bf16(1.0 + 1.0 / 256.0), 0x3f80_u16.to_le_bytes());
        assert_eq!(to_bf16(1.0 + 3.0 / 256.0), 0x3f82_u16.to_le_bytes());
    }

    /// Sums of a column each, in this type.
    fn sums<const N: usize>(dtype: DType, rows: &[&[[u8; N]]]) -> Vec<[u8; N]> {
        let mut sum = Sum::new(dtype);
        sum.set(rows[0].as_flattened());
        for row in &rows[1..] {
            sum.add(row.as_flattened());
        }
        let mut out = vec![[0xee; N]; rows[0].len()];
        sum.write(out.as_flattened_mut());
        out
    }

    #[test]
    fn integers_wrap() {
        let max = i32::MAX.to_le_bytes();
        let wrapped = sums(DType::I32, &[&[max], &[1_i32.to_le_bytes()]]);
        assert_eq!(wrapped, [i32::MIN.to_le_bytes()]);
        let max = i64::MAX.to_le_bytes();
        let wrapped = sums(DType::I64, &[&[max], &[2_i64.to_le_bytes()]]);
        assert_eq!(wrapped, [(i64::MIN + 1).to_le_bytes()]);
    }

    #[test]
    fn the_order_counts_halves_are_rounded_once_and_nan_is_one() {
        let row = |values: [f32; 2]| values.map(f32::to_le_bytes);
        let rows = [
            row([1e8, f32::NAN]),
            row([-1e8, 1.0]),
            row([1.0, -f32::NAN]),
        ];
        let [a, b, c] = &rows;
        assert_eq!(sums(DType::F32, &[a, b, c]), row([1.0, NAN]));
        assert_eq!(sums(DType::F32, &[a, c, b]), row([0.0, NAN]));
        // 256 + 1 is no bf16; 256 + 1 + 1 is.
        let row = |value: f32| [to_bf16(value)];
        let total = sums(DType::Bf16, &[&row(256.0), &row(1.0), &row(1.0)]);
        assert_eq!(total, row(258.0));
        let row = |value: f32| [to_f16(value)];
        let total = sums(DType::F16, &[&row(2048.0), &row(1.0), &row(1.0)]);
        assert_eq!(total, row(2050.0));
    }
}
