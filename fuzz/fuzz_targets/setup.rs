//! A number and the header of the clip, as rank 0 tells them in its briefing.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let Ok(told) = serde_json::from_slice::<(u32, pp_cli::Shape)>(bytes) {
        let again = serde_json::to_vec(&told).expect("it came as JSON");
        assert_eq!(serde_json::from_slice(&again).ok(), Some(told));
    }
});
