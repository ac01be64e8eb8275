//! Stores that bypass the cache, for payloads that another core reads next.
//!
//! Hazard: a consumer that shares no cache with the producer fetches dirty lines out of the producer's cache one by
//! one, at 2 GB/s. Non-temporal stores write the bytes to memory, where both reach them at memory speed, and they read
//! nothing first. They pay off from about 64 KiB up.
//!
//! Guarantee: the stores are ordered before every later store of the calling thread, because a store fence ends each
//! call. So the frame that hands over the slot cannot be seen before them.

/// Fills `to` with repetitions of the little-endian bytes of `word`.
pub fn stream_fill(to: &mut [u8], word: u64) {
    imp::fill(to, word);
}

#[cfg(target_arch = "x86_64")]
mod imp {
    use std::arch::x86_64::{__m128i, _mm_set1_epi64x, _mm_sfence, _mm_stream_si128};

    pub(super) fn fill(to: &mut [u8], word: u64) {
        // SAFETY: `__m128i` is plain old data of any bit pattern, so an aligned run of bytes may
        // be seen as vectors.
        let (head, body, tail) = unsafe { to.align_to_mut::<__m128i>() };
        let shift = head.len() % 8 * 8;
        // SAFETY: SSE2 is part of x86-64.
        let vector = unsafe { _mm_set1_epi64x(word.rotate_right(shift as u32).cast_signed()) };
        for (i, byte) in head.iter_mut().enumerate() {
            *byte = word.to_le_bytes()[i % 8];
        }
        for lane in &mut *body {
            // SAFETY: `lane` is valid, exclusive and 16-byte aligned (`align_to_mut`).
            unsafe { _mm_stream_si128(lane, vector) };
        }
        let start = head.len() + body.len() * 16;
        for (i, byte) in tail.iter_mut().enumerate() {
            *byte = word.to_le_bytes()[(start + i) % 8];
        }
        // SAFETY: no operands; orders the stores above before those that follow.
        unsafe { _mm_sfence() };
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod imp {
    pub(super) fn fill(to: &mut [u8], word: u64) {
        for (byte, value) in to.iter_mut().zip(word.to_le_bytes().iter().cycle()) {
            *byte = *value;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_offset_and_length_gets_its_bytes_and_no_others() {
        let word = 0x0807_0605_0403_0201;
        for start in 0..20 {
            for len in 0..70 {
                let mut filled = [0xEE_u8; 100];
                stream_fill(&mut filled[start..start + len], word);
                for (i, byte) in filled.into_iter().enumerate() {
                    let inside = (start..start + len).contains(&i);
                    let expected = if inside { (i - start) % 8 + 1 } else { 0xEE };
                    assert_eq!(usize::from(byte), expected, "{start}+{len} at {i}");
                }
            }
        }
    }
}
