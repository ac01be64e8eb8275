//! Stores that go around the cache, for payloads another core reads next.
//!
//! Hazard: a consumer that shares no cache with the producer pulls dirty lines out of it one by
//! one, at 2 GB/s. Non-temporal stores put the bytes where both reach them at memory speed, and
//! they read nothing first. Worth it from about 64 KiB up.
//!
//! Guarantee: the stores are ordered before every later store of the calling thread (a store
//! fence ends each call), so the frame that hands the slot over cannot be seen before them.

/// Fills `to` with repetitions of the little-endian bytes of `word`.
pub fn stream_fill(to: &mut [u8], word: u64) {
    imp::fill(to, word);
}

/// Copies `from` to `to`.
///
/// # Panics
/// If their lengths differ.
pub fn stream_copy(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len(), "a copy has two sides of one length");
    imp::copy(to, from);
}

#[cfg(target_arch = "x86_64")]
mod imp {
    use std::arch::x86_64::{
        __m128i, _mm_loadu_si128, _mm_set1_epi64x, _mm_sfence, _mm_stream_si128,
    };

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

    pub(super) fn copy(to: &mut [u8], from: &[u8]) {
        // SAFETY: as in `fill`.
        let (head, body, tail) = unsafe { to.align_to_mut::<__m128i>() };
        let (from_head, rest) = from.split_at(head.len());
        let (from_body, from_tail) = rest.split_at(body.len() * 16);
        head.copy_from_slice(from_head);
        for (lane, source) in body.iter_mut().zip(from_body.chunks_exact(16)) {
            // SAFETY: `source` has 16 bytes and the load wants no alignment; `lane` is valid,
            // exclusive and aligned.
            unsafe { _mm_stream_si128(lane, _mm_loadu_si128(source.as_ptr().cast())) };
        }
        tail.copy_from_slice(from_tail);
        // SAFETY: as in `fill`.
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

    pub(super) fn copy(to: &mut [u8], from: &[u8]) {
        to.copy_from_slice(from);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_offset_and_length_gets_its_bytes_and_no_others() {
        let word = 0x0807_0605_0403_0201;
        let source: Vec<u8> = (0..100).collect();
        for start in 0..20 {
            for len in 0..70 {
                let mut filled = [0xEE; 100];
                stream_fill(&mut filled[start..start + len], word);
                let mut copied = [0xEE; 100];
                stream_copy(&mut copied[start..start + len], &source[..len]);
                for i in 0..100 {
                    let inside = (start..start + len).contains(&i);
                    let expected = if inside {
                        ((i - start) % 8 + 1) as u8
                    } else {
                        0xEE
                    };
                    assert_eq!(filled[i], expected, "fill {start}+{len} at {i}");
                    let expected = if inside { source[i - start] } else { 0xEE };
                    assert_eq!(copied[i], expected, "copy {start}+{len} at {i}");
                }
            }
        }
    }
}
