//! Digests on the device against those of the host, which have answers of the reference implementation.

use pp_contract::tensor_digest;
use pp_kernels::{DeviceDigests, DeviceTensor};

use crate::cases::Case;
use crate::device::{Gpu, Slot};

pub(crate) const ALL: &[(&str, Case)] = &[
    (
        "digests_are_those_of_the_host",
        digests_are_those_of_the_host,
    ),
    (
        "every_byte_counts_on_the_device",
        every_byte_counts_on_the_device,
    ),
    (
        "digests_that_do_not_fit_are_refused",
        digests_that_do_not_fit_are_refused,
    ),
];

/// Tensors in one launch, and the alignment of each.
const MOST: usize = 16;
const ALIGN: usize = 256;

fn noise(bytes: usize, seed: u64) -> Vec<u8> {
    let mut state = seed;
    let step = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..bytes).map(step).collect()
}

/// Digests of tensors in one payload, on the device.
fn on_device(gpu: &Gpu, tensors: &[Vec<u8>]) -> Vec<u64> {
    // Bytes between the tensors that must not count.
    let mut payload = Vec::new();
    let mut places = Vec::new();
    for tensor in tensors {
        payload.resize(payload.len().next_multiple_of(ALIGN), 0xEE);
        places.push(payload.len() as u64);
        payload.extend_from_slice(tensor);
    }
    payload.extend([0xEE; ALIGN]);
    let (slot, out) = (
        Slot::new(gpu, &payload),
        Slot::new(gpu, &vec![0xAA; 8 * tensors.len()]),
    );
    let (context, stream) = gpu.handles();
    let places = places.iter().zip(tensors).map(|(at, tensor)| DeviceTensor {
        address: slot.address + at,
        bytes: tensor.len() as u64,
    });
    let places: Vec<_> = places.collect();
    // SAFETY: context and stream are those of `gpu`, which outlives this; both slots live beyond `read`, which waits.
    let read = unsafe {
        let digests =
            DeviceDigests::new(context, stream, payload.len() as u64).expect("digests can be made");
        digests
            .enqueue(&places, out.address)
            .expect("they are enqueued");
        out.read(gpu)
    };
    let (words, _) = read.as_chunks::<8>();
    words.iter().map(|word| u64::from_le_bytes(*word)).collect()
}

fn on_host(tensors: &[Vec<u8>]) -> Vec<u64> {
    tensors.iter().map(|tensor| tensor_digest(tensor)).collect()
}

/// Every edge: of a word, of a block, of the last level, of what one grid takes at a time; alone and together.
fn digests_are_those_of_the_host(gpu: &Gpu, small: bool) {
    let block = 4096;
    let mut sizes = vec![
        0,
        1,
        2,
        6,
        7,
        8,
        9,
        63,
        64,
        65,
        1023,
        1024,
        1025,
        3 * 1024 + 1,
    ];
    for edge in [block, 2 * block, 33 * block, 512 * block, 513 * block] {
        sizes.extend([edge - 8, edge - 1, edge, edge + 1]);
    }
    if !small {
        // Three levels begin at a GiB, which is no test's; two full ones, and what a payload of video takes.
        sizes.extend([8_294_400, 22_118_400, 512 * 512 * 16, (64 << 20) + 5]);
    }
    for (seed, size) in sizes.iter().enumerate() {
        let tensors = [noise(*size, seed as u64)];
        assert_eq!(on_device(gpu, &tensors), on_host(&tensors), "{size} bytes");
    }
    for together in sizes.chunks(MOST) {
        let tensors: Vec<_> = together
            .iter()
            .map(|size| noise(*size, *size as u64))
            .collect();
        assert_eq!(on_device(gpu, &tensors), on_host(&tensors), "{together:?}");
    }
}

fn every_byte_counts_on_the_device(gpu: &Gpu, small: bool) {
    let bytes = noise(3 * 4096 + 100, 5);
    let whole = on_device(gpu, std::slice::from_ref(&bytes));
    let step = if small { 1021 } else { 61 };
    for at in (0..bytes.len()).step_by(step) {
        let mut other = bytes.clone();
        other[at] ^= 0x10;
        assert_ne!(on_device(gpu, &[other]), whole, "byte {at}");
    }
}

fn digests_that_do_not_fit_are_refused(gpu: &Gpu, _: bool) {
    let (context, stream) = gpu.handles();
    let tensor = |bytes| DeviceTensor { address: 0, bytes };
    // SAFETY: as above; what is refused touches no memory.
    unsafe {
        let digests = DeviceDigests::new(context, stream, 4096).expect("digests can be made");
        let many = vec![tensor(1); MOST + 1];
        let refused = digests.enqueue(&many, 0).expect_err("too many").to_string();
        assert!(refused.contains("at most 16"), "{refused}");
        let large = [tensor(4096 * 18)];
        let refused = digests
            .enqueue(&large, 0)
            .expect_err("too large")
            .to_string();
        assert!(refused.contains("room"), "{refused}");
        digests.enqueue(&[], 0).expect("nothing is nothing");
    }
}
