//! How fast data moves that somebody really writes and reads: each chunk is written by the front, read and written by
//! phase B, and read by the front. The figure counts each payload byte once per direction.

use anyhow::{Context, Result};

use super::peers::{Case, Contender, Contenders, DEPTH};
use super::{ROUNDS, median, spread};

const SIZES: [usize; 3] = [65_536, 1_048_576, 22_118_400];

/// Prints gigabytes a second by size, with the distance of the cores in the same round.
pub(super) fn run(contenders: &Contenders) -> Result<()> {
    println!("\nTouch, fresh bytes written and every byte read, both directions, {ROUNDS} rounds");
    println!(
        "{:>14}  {:<8} {:>20} {:>10} {:>10}",
        "bytes", "", "GB/s", "of limit", "hop us"
    );
    for bytes in SIZES {
        let chunks = (8_000_000_000 / bytes).clamp(300, 20_000);
        let case = Case {
            bytes,
            decode_ms: 0.0,
            phase_b_ms: 0.0,
            touch: true,
            chunks,
            // Deep enough that neither side waits for the other's last write to leave its cache.
            depth: if bytes > 4 << 20 { DEPTH } else { 16 },
        };
        let (mut ours, mut limit, mut hops) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            ours.push(gigabytes_per_second(contenders, Contender::Pp, &case)?);
            limit.push(gigabytes_per_second(contenders, Contender::Limit, &case)?);
            hops.push(contenders.hop_us()?);
        }
        let of_limit = median(&mut ours) / median(&mut limit);
        let hop = median(&mut hops);
        println!(
            "{bytes:>14}  {:<8} {:>20} {of_limit:>10.2} {hop:>10.3}",
            "pp",
            spread(&mut ours, 1)
        );
        println!("{:>14}  {:<8} {:>20}", "", "limit", spread(&mut limit, 1));
    }
    Ok(())
}

fn gigabytes_per_second(contenders: &Contenders, contender: Contender, case: &Case) -> Result<f64> {
    let result = contenders.run(contender, case)?;
    let period_ms = result["period_ms"]
        .as_f64()
        .with_context(|| format!("{contender:?} printed no period_ms"))?;
    Ok(2.0 * case.bytes as f64 / (period_ms * 1e6))
}
