//! How fast a processor digests tensors, by the size of the blocks, beside a copy. Medians of rounds in turn.
//!
//!     cargo run --release -p pp-contract --example digest_rate [BYTES]

use std::hint::black_box;
use std::time::Instant;

use pp_contract::{digest, tensor_digest};

/// Digests of blocks of this size, and of those digests at once: what the size of a block alone changes.
fn in_blocks(bytes: &[u8], block: usize) -> u64 {
    let digests: Vec<u8> = bytes
        .chunks(block)
        .flat_map(|block| digest(block).to_le_bytes())
        .collect();
    digest(&digests)
}

fn main() {
    let bytes = std::env::args().nth(1).map_or(22_118_400, |text| {
        text.parse().expect("BYTES is a number of bytes")
    });
    let from: Vec<u8> = (0..bytes as u32)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    let mut to = vec![0u8; bytes];
    let blocks = [1 << 10, 4 << 10, 16 << 10, 64 << 10];
    let mut names: Vec<String> = blocks
        .iter()
        .map(|block| format!("blocks of {block}"))
        .collect();
    names.extend(["one block".into(), "tensor_digest".into(), "copy".into()]);
    let mut times = vec![Vec::new(); names.len()];
    for _ in 0..41 {
        for (index, times) in times.iter_mut().enumerate() {
            let start = Instant::now();
            match index {
                0..4 => drop(black_box(in_blocks(black_box(&from), blocks[index]))),
                4 => drop(black_box(digest(black_box(&from)))),
                5 => drop(black_box(tensor_digest(black_box(&from)))),
                _ => black_box(&mut to[..]).copy_from_slice(black_box(&from)),
            }
            times.push(start.elapsed());
        }
    }
    for (name, times) in names.iter().zip(&mut times) {
        times.sort_unstable();
        let median = times[times.len() / 2].as_secs_f64();
        println!(
            "{name:>18}: {:6.2} GB/s, {:7.3} ms",
            bytes as f64 / median / 1e9,
            median * 1e3
        );
    }
}
