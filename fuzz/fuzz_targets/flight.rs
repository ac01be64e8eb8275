//! The file of a flight recording, with a digest that is right, so that the body is reached.
#![no_main]

use pp_contract::digest;
use pp_transport::flight::Recording;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = Recording::decode(bytes);
    let mut file = b"PPFLIGHT\x03\0\0\0".to_vec();
    file.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    file.extend_from_slice(&digest(bytes).to_le_bytes());
    file.extend_from_slice(bytes);
    if let Ok(recording) = Recording::decode(&file) {
        recording.encode().expect("what was read can be written");
    }
});
