//! How fast data moves that somebody really writes and reads: each chunk is written by rank 0, read and written by
//! rank 1, and read by rank 0. The figure counts each payload byte once per direction.

use anyhow::{Context, Result};

use super::figures::{ROUNDS, mark, median, print_mark, spread};
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
            decode_ms: 0.0,
            phase_b_ms: 0.0,
            touch: true,
            chunks,
            // Deep enough that neither side waits for the other's last write to leave its cache.
            depth: if bytes > 4 << 20 { DEPTH } else { 16 },
        };
        let (mut ours, mut limit, mut hops) = (Rates::default(), Rates::default(), Vec::new());
        for _ in 0..ROUNDS {
            ours.add(contenders, Contender::Pp, &case)?;
            limit.add(contenders, Contender::Limit, &case)?;
            hops.push(contenders.hop_us()?);
        }
        let of_limit = median(&mut ours.by_median) / median(&mut limit.by_median);
        let hop = median(&mut hops);
        println!(
            "{bytes:>14} {:>6}  {:<8} {} {of_limit:>10.2} {hop:>10.3}",
            case.depth,
            "pp",
            ours.columns()
        );
        println!("{:>14} {:>6}  {:<8} {}", "", "", "limit", limit.columns());
    }
    print_mark();
    Ok(())
}

/// Gigabytes a second of the rounds of one contender.
#[derive(Default)]
struct Rates {
    by_median: Vec<f64>,
    by_mean: Vec<f64>,
}

impl Rates {
    fn add(&mut self, contenders: &Contenders, contender: Contender, case: &Case) -> Result<()> {
        let result = contenders.run(contender, case)?;
        let rate = |key: &str| {
            let period_ms = result[key].as_f64();
            let period_ms = period_ms.with_context(|| format!("{contender:?} printed no {key}"))?;
            anyhow::Ok(2.0 * case.bytes as f64 / (period_ms * 1e6))
        };
        self.by_median.push(rate("period_ms")?);
        self.by_mean.push(rate("period_mean_ms")?);
        Ok(())
    }

    fn columns(&mut self) -> String {
        let (rate, by_mean) = (median(&mut self.by_median), median(&mut self.by_mean));
        // Of the periods, of which these are the reciprocals.
        let mark = mark(1.0 / rate, 1.0 / by_mean);
        format!(
            "{:>20} {by_mean:>14.1} {mark:<1}",
            spread(&mut self.by_median, 1)
        )
    }
}
