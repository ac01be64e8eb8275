//! A picture as a BMP file: every browser reads it, and it is written without a library.

/// The bytes before the pixels.
const HEAD: u32 = 54;

/// A file of `width` × `height` pixels from red, green and blue of each, row by row; none where there are not so many.
pub(crate) fn bmp(width: u32, height: u32, rgb: &[u8]) -> Option<Vec<u8>> {
    let row = width.checked_mul(3).filter(|row| *row > 0)?;
    let padding = row.wrapping_neg() % 4;
    let pixels = row.checked_add(padding)?.checked_mul(height)?;
    if rgb.len() as u64 != u64::from(row) * u64::from(height) {
        return None;
    }
    let mut file = b"BM".to_vec();
    let planes_and_bits = 1 | 24 << 16;
    for word in [
        HEAD + pixels,
        0,
        HEAD,
        40,
        width,
        height,
        planes_and_bits,
        0,
        pixels,
        2835,
        2835,
        0,
        0,
    ] {
        file.extend(word.to_le_bytes());
    }
    // The lowest row comes first, and blue before green before red.
    for row in rgb.chunks_exact(row as usize).rev() {
        file.extend(
            row.chunks_exact(3)
                .flat_map(|pixel| [pixel[2], pixel[1], pixel[0]]),
        );
        file.resize(file.len() + padding as usize, 0);
    }
    Some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_padded_and_stand_on_their_heads() {
        // Red over blue, one pixel wide, as another program wrote it.
        let file = bmp(1, 2, &[255, 0, 0, 0, 0, 255]).unwrap();
        assert_eq!(file.len(), 62);
        assert_eq!(file[..6], *b"BM\x3e\0\0\0");
        assert_eq!(
            file[10..30],
            *b"\x36\0\0\0\x28\0\0\0\x01\0\0\0\x02\0\0\0\x01\0\x18\0"
        );
        assert_eq!(file[54..], [255, 0, 0, 0, 0, 0, 255, 0]);
        assert_eq!(
            bmp(160, 90, &[0; 160 * 90 * 3]).unwrap().len(),
            54 + 160 * 90 * 3
        );
    }

    #[test]
    fn another_number_of_bytes_is_no_picture() {
        assert_eq!(bmp(2, 2, &[0; 11]), None);
        assert_eq!(bmp(0, 0, &[]), None);
        assert_eq!(bmp(u32::MAX, u32::MAX, &[0; 3]), None);
    }
}
