//! The pass over the seeds, the same each time: each as it is, and with a few bytes changed, cut,
//! repeated or moved.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::*;

/// Changed copies of each seed, and as many inputs of nothing but chance.
const CHANGED: u64 = 400;

fn folder(target: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds");
    root.join(target)
}

/// The bytes of a seed: hexadecimal, with comments.
fn seeds(target: &str) -> Vec<Vec<u8>> {
    let read = |path: PathBuf| {
        let text = std::fs::read_to_string(path).unwrap();
        let lines = text.lines().map(|line| line.split('#').next().unwrap());
        let digits: String = lines.flat_map(str::split_whitespace).collect();
        let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
        (0..digits.len()).step_by(2).map(byte).collect()
    };
    let mut paths: Vec<PathBuf> = std::fs::read_dir(folder(target))
        .unwrap_or_else(|error| panic!("no seeds for {target}: {error}"))
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.sort();
    paths.into_iter().map(read).collect()
}

struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: usize) -> usize {
        // xorshift64
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound.max(1) as u64) as usize
    }

    fn change(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            match self.below(5) {
                0 | 1 if !bytes.is_empty() => bytes[at] = self.below(256) as u8,
                2 => bytes.truncate(at),
                3 => {
                    let part = bytes[at..(at + self.below(24)).min(bytes.len())].to_vec();
                    bytes.splice(at..at, part);
                }
                _ => bytes.push(self.below(256) as u8),
            }
        }
        bytes.truncate(4096);
    }
}

fn pass(name: &str, target: Target) {
    println!("{name}");
    let seeds = seeds(name);
    assert!(seeds.len() >= 2, "{name} has {} seeds", seeds.len());
    let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
    let until = Instant::now() + Duration::from_secs(120);
    for seed in &seeds {
        target(seed);
        for _ in 0..CHANGED / seeds.len() as u64 {
            let mut bytes = seed.clone();
            chance.change(&mut bytes);
            target(&bytes);
            assert!(Instant::now() < until, "{name} hangs");
        }
    }
    for _ in 0..CHANGED {
        let bytes: Vec<u8> = (0..chance.below(300))
            .map(|_| chance.below(256) as u8)
            .collect();
        target(&bytes);
    }
}

#[test]
fn every_target_holds_its_guarantees() {
    for (name, target) in TARGETS {
        pass(name, target);
    }
}
