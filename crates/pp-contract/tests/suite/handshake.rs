//! The handshake: what differs between two ranks is found and named, what does not decode is
//! refused.

use pp_contract::*;

use crate::support::*;

// OM-04, OM-05, counts: what steers communication is compared key by key.

#[test]
fn any_difference_that_matters_is_found_and_named() {
    type Change = fn(&mut HelloParts);
    let changes: [(&str, Change, &str, &str); 8] = [
        (
            "job",
            |parts| parts.job = 1,
            "0000000000001122",
            "0000000000000001",
        ),
        (
            "world_size",
            |parts| parts.world_size = WorldSize::new(3).unwrap(),
            "2",
            "3",
        ),
        (
            "plan",
            |parts| parts.plan_name = Text::truncated("audio"),
            "\"video\"",
            "\"audio\"",
        ),
        ("plan_version", |parts| parts.plan_version = 2, "1", "2"),
        ("chunks", |parts| parts.chunks = Some(99), "100", "99"),
        (
            "settings.depth",
            |parts| set(parts, "depth", "8"),
            "\"4\"",
            "\"8\"",
        ),
        (
            "settings.nccl",
            |parts| set(parts, "nccl", "1"),
            "(not set)",
            "\"1\"",
        ),
        (
            "memory",
            |parts| parts.device = Some(Text::truncated("GPU-a")),
            "host",
            "GPU",
        ),
    ];
    assert_eq!(compare(&hello(0), &hello(1)), Ok(()));
    for (key, change, ours, theirs) in changes {
        let mut parts = hello_parts(1);
        change(&mut parts);
        let other = Hello::new(parts).unwrap();
        let found = compare(&hello(0), &other).unwrap_err();
        let back = compare(&other, &hello(0)).unwrap_err();
        assert_eq!((found.key.as_str(), back.key.as_str()), (key, key));
        assert_eq!(
            (found.left, found.left_value.as_str()),
            (Rank::new(0), ours)
        );
        assert_eq!(
            (found.right, found.right_value.as_str()),
            (Rank::new(1), theirs)
        );
    }
}

#[test]
fn ranks_in_host_memory_and_on_devices_are_compared_without_what_is_between_gpus() {
    let on = |rank, device: Option<&str>, is_named: bool, more: &[(&str, &str)]| {
        let mut parts = hello_parts(rank);
        parts.device = device.map(Text::truncated);
        if is_named {
            set(&mut parts, "devices", "cpu,cuda:0");
        }
        for (key, value) in more {
            parts.device_settings.set(key, value).unwrap();
        }
        Hello::new(parts).unwrap()
    };
    let p2p = ("transport", "p2p");
    let nccl = [("transport", "nccl"), ("NCCL_ALGO", "Ring")];
    let is_alike = |one: &Hello, other: &Hello| compare(one, other).is_ok();
    for named in [false, true] {
        let cpu = on(0, None, named, &[]);
        assert_eq!(is_alike(&cpu, &on(1, Some("GPU-a"), named, &nccl)), named);
        let gpu = on(0, Some("GPU-b"), named, &[p2p]);
        assert!(!is_alike(&gpu, &on(1, Some("GPU-a"), named, &nccl)));
        assert!(is_alike(&gpu, &on(1, Some("GPU-a"), named, &[p2p])));
    }
}

#[test]
fn mismatch_says_what_to_do() {
    let mut parts = hello_parts(1);
    parts.chunks = None;
    let error = compare(&hello(0), &Hello::new(parts).unwrap()).unwrap_err();
    let text = "chunks differs: rank 0 has 100, rank 1 has (not set); \
                start every rank with the same value";
    assert_eq!(error.to_string(), text);
}

fn set(parts: &mut HelloParts, key: &str, value: &str) {
    parts.settings.set(key, value).unwrap();
}

// Devices.

#[test]
fn two_ranks_on_one_device_are_refused_with_the_map() {
    let on = |rank, device: Option<&str>, given: Option<&str>| {
        let mut parts = hello_parts(rank);
        parts.device = device.map(Text::truncated);
        parts.device_given = given.map(Text::truncated);
        Hello::new(parts).unwrap()
    };
    let map = check_devices(&[on(1, Some("GPU-b"), Some("GPU-b")), on(0, None, None)]).unwrap();
    assert_eq!(
        map.to_string(),
        "rank 0: host memory on host-a; rank 1: GPU-b on host-a"
    );
    // Host memory is not a device that could be used twice.
    assert!(check_devices(&[hello(0), hello(1)]).is_ok());

    let error = check_devices(&[on(1, Some("GPU-a"), None), on(0, Some("GPU-a"), None)]);
    assert_eq!(
        error.unwrap_err().to_string(),
        "ranks 0 and 1 are both on GPU-a; check CUDA_VISIBLE_DEVICES, or name the GPU for each of them with --devices \
         (devices: rank 0: GPU-a on host-a; rank 1: GPU-a on host-a)"
    );
    let named = |rank, is_named| {
        let mut parts = on(rank, Some("GPU-a"), None).parts().clone();
        parts.device_named = is_named;
        Hello::new(parts).unwrap()
    };
    assert!(check_devices(&[named(0, true), named(1, true)]).is_ok());
    assert!(check_devices(&[named(0, true), named(1, false)]).is_err());
    for got in [Some("GPU-a"), None] {
        let error = check_devices(&[on(0, None, None), on(1, got, Some("GPU-b"))]).unwrap_err();
        let clash = matches!(error.clash, DeviceClash::NotAsGiven { rank, .. } if rank.get() == 1);
        assert!(clash, "{error}");
    }
    let error = check_devices(&[hello(1), hello(1)]).unwrap_err();
    assert_eq!(error.clash, DeviceClash::RankTwice { rank: Rank::new(1) });
}

// Hostile bytes.

/// Makes the checksum of a forged hello right.
fn repair(hello: &mut [u8]) {
    let crc = crc32(&[&hello[..12], &hello[16..]].concat());
    hello[12..16].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn every_flip_of_one_bit_of_a_hello_is_refused() {
    let frame = hello(1).encode().unwrap();
    for bit in 0..frame.len() * 8 {
        let mut flipped = frame.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(Hello::decode(&flipped).is_err(), "bit {bit} flipped");
    }
}

#[test]
fn fixed_part_of_a_hello_is_checked_field_by_field() {
    let forge = |change: fn(&mut Vec<u8>)| {
        let mut forged = hello(1).encode().unwrap();
        change(&mut forged);
        repair(&mut forged);
        Hello::decode(&forged).unwrap_err()
    };
    let magic = forge(|frame| frame[3] = b'2');
    assert_eq!(magic, HandshakeError::Magic { got: *b"PPH2" });
    let version = forge(|frame| frame[4] = 9);
    assert_eq!(version, HandshakeError::Version { theirs: 9 });
    let reserved = forge(|frame| frame[7] = 1);
    assert_eq!(reserved, HandshakeError::Reserved { got: 256 });
    let (expected, got) = (HELLO_HEADER_BYTES + 43, HELLO_HEADER_BYTES + 42);
    let length = forge(|frame| frame[8] = 43);
    assert_eq!(length, HandshakeError::Length { expected, got });
}

#[test]
fn oversize_hello_is_refused_unread() {
    let mut frame = hello(1).encode().unwrap();
    frame.resize(MAX_HELLO_BYTES + 1, 0);
    let (expected, got) = (MAX_HELLO_BYTES, MAX_HELLO_BYTES + 1);
    let error = Hello::decode(&frame).unwrap_err();
    assert_eq!(error, HandshakeError::Length { expected, got });
}

#[test]
fn hello_with_unsorted_or_repeated_settings_is_refused() {
    let good = hello(1).encode().unwrap();
    let depth = good.windows(5).position(|bytes| bytes == b"depth").unwrap();
    for key in [b"wepth", b"touch"] {
        let mut forged = good.clone();
        forged[depth..depth + 5].copy_from_slice(key);
        repair(&mut forged);
        let error = Hello::decode(&forged).unwrap_err();
        assert!(
            matches!(error, HandshakeError::Body(BodyError::Malformed { .. })),
            "{error}"
        );
    }
}

#[test]
fn hello_of_a_rank_outside_its_world_is_refused() {
    let mut forged = hello(1).encode().unwrap();
    forged[18] = 2;
    repair(&mut forged);
    let error = Hello::decode(&forged).unwrap_err();
    assert_eq!(
        error.to_string(),
        "rank 2 is not in a world of 2; check RANK and WORLD_SIZE"
    );
}

#[test]
fn every_field_at_its_bound_fits_a_hello_and_a_fault() {
    let mut settings = Settings::new();
    for key in 0..MAX_SETTINGS {
        settings
            .set(&format!("{key:064}"), "v".repeat(256))
            .unwrap();
    }
    let hello = Hello::new(HelloParts {
        job: u64::MAX,
        rank: Rank::new(u32::MAX - 1),
        world_size: WorldSize::new(u32::MAX).unwrap(),
        plan_name: Text::new("p".repeat(64)).unwrap(),
        plan_version: u16::MAX,
        settings: settings.clone(),
        device_settings: settings.clone(),
        chunks: Some(u64::MAX),
        host: Text::new("h".repeat(128)).unwrap(),
        device: Some(Text::new("d".repeat(64)).unwrap()),
        device_given: Some(Text::new("g".repeat(64)).unwrap()),
        device_named: true,
    });
    let hello = hello.unwrap();
    let frame = hello.encode().unwrap();
    assert!(frame.len() <= MAX_HELLO_BYTES, "{}", frame.len());
    assert_eq!(Hello::decode(&frame).unwrap(), hello);
    assert!(settings.set("one more", 1).is_err());

    let rank = Rank::new(u32::MAX);
    let fault = Fault::new(FaultKind::Io, rank, &"o".repeat(99), "d".repeat(99_999));
    let fault = fault.in_stage(&"s".repeat(99), Some(ChunkIndex::new(u64::MAX)));
    let bytes = fault.encode().unwrap();
    assert_eq!(bytes.len(), Fault::MAX_BYTES);
    let short = fault.without_text();
    let bytes_of_short = short.encode().unwrap();
    assert_eq!(bytes_of_short.len(), Fault::MAX_BYTES_WITHOUT_TEXT);
    assert_eq!(Fault::decode(&bytes_of_short), Ok(short));
    assert_eq!(Fault::decode(&bytes), Ok(fault));
}
