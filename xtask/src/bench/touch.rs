//! How fast data moves that somebody really writes and reads: each chunk is written by rank 0, read and written by
//! rank 1, and read by rank 0. The figure counts each payload byte once per direction.

use anyhow::Result;

use super::figures::{Periods, ROUNDS, median, print_mark};
use super::peers::{Case, Contender, Contenders, DEPTH};

const SIZES: [usize; 3] = [65_536, 1_048_576, 22_118_400];

/// Prints gigabytes a second by size, with the distance of the cores in the same round.
pub(super) fn run(contenders: &Contenders) -> Result<()> {
    println!("\nTouch, fresh bytes written and every byte read, both directions, {ROUNDS} rounds");
    println!(
        "{:>14} {:>6}  {:<8} {:>20} {:>14}   {:>10} {:>10}",
        "bytes", "slots", "", "GB/s by the median", "by the mean", "of limit", "hop us"
    );
    for bytes in SIZES {
        let chunks = (8_000_000_000 / bytes).clamp(300, 20_000);
        let case = Case {
            bytes,
            touch: true,
            chunks,
            // Deep enough that neither side waits for the other's last write to leave its cache.
            depth: if bytes > 4 << 20 { DEPTH } else { 16 },
            ..Case::default()
        };
        let [mut ours, mut limit] = [Periods::default(), Periods::default()];
        let mut hops = Vec::new();
        for _ in 0..ROUNDS {
            ours.add(&contenders.run(Contender::Pp, &case)?)?;
            limit.add(&contenders.run(Contender::Limit, &case)?)?;
            hops.push(contenders.hop_us()?);
        }
        let rate = |period_ms: f64| 2.0 * bytes as f64 / (period_ms * 1e6);
        let of_limit = median(&mut limit.medians) / median(&mut ours.medians);
        let hop = median(&mut hops);
        println!(
            "{bytes:>14} {:>6}  {:<8} {} {of_limit:>10.2} {hop:>10.3}",
            case.depth,
            "pp",
            ours.columns(rate, 1)
        );
        let limit = limit.columns(rate, 1);
        println!("{:>14} {:>6}  {:<8} {limit}", "", "", "limit");
    }
    print_mark();
    Ok(())
}
