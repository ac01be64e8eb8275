//! What can be said about a file before the dynamic linker maps it.
//!
//! Hazard: the linker maps segments by their headers and does not ask whether the file is long enough; touching the
//! part that is missing kills the process with SIGBUS. So a file that was cut off, or still being copied, is refused
//! here. Its words for a file of another kind are also clearer than the linker's.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

use crate::error::LoadError;

const HEADER_BYTES: usize = 64;
const SEGMENT_BYTES: usize = 56;
const PT_LOAD: u32 = 1;
const ET_DYN: u16 = 3;

/// Checks that the file is a whole 64-bit ELF shared library.
pub(super) fn look_at(path: &Path) -> Result<(), LoadError> {
    match File::open(path).and_then(examine) {
        Ok(None) => Ok(()),
        Ok(Some(reason)) => Err(LoadError::NotALibrary {
            path: path.into(),
            reason,
        }),
        Err(source) => Err(LoadError::Unreadable {
            path: path.into(),
            source,
        }),
    }
}

/// What is wrong with the file, if anything is.
fn examine(mut file: File) -> std::io::Result<Option<String>> {
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Ok(Some("it is a directory".into()));
    }
    let mut header = Vec::with_capacity(HEADER_BYTES);
    (&mut file)
        .take(HEADER_BYTES as u64)
        .read_to_end(&mut header)?;
    if !header.is_empty() && !header.starts_with(b"\x7fELF") {
        return Ok(Some("it does not start with 7f 45 4c 46".into()));
    }
    if header.len() < HEADER_BYTES {
        return Ok(Some("it is shorter than an ELF header".into()));
    }
    let little = cfg!(target_endian = "little");
    if header[4] != 2 || header[5] != if little { 1 } else { 2 } {
        return Ok(Some("it is for another kind of machine".into()));
    }
    let kind = u16::from_ne_bytes([header[16], header[17]]);
    if kind != ET_DYN {
        return Ok(Some(format!(
            "its ELF type is {kind}, a shared library's is {ET_DYN}"
        )));
    }
    let count = u16::from_ne_bytes([header[56], header[57]]);
    file.seek(SeekFrom::Start(word(&header, 32)))?;
    for _ in 0..count {
        let mut segment = [0u8; SEGMENT_BYTES];
        match file.read_exact(&mut segment) {
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                return Ok(Some("it is cut off in its program headers".into()));
            }
            other => other?,
        }
        let is_load =
            u32::from_ne_bytes([segment[0], segment[1], segment[2], segment[3]]) == PT_LOAD;
        let end = word(&segment, 8).saturating_add(word(&segment, 32));
        if is_load && end > metadata.len() {
            return Ok(Some(format!(
                "it is cut off: it has {} bytes and needs {end}",
                metadata.len()
            )));
        }
    }
    Ok(None)
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(std::array::from_fn(|i| bytes[at + i]))
}
