//! How much of the transfer disappears: two stages of fixed length, 22 MB each way, and the bare hand-over.

use anyhow::{Context, Result};

use super::figures::far::are_far_apart;
use super::figures::{ROUNDS, mark, median, print_mark, spread};
use super::peers::{Case, Contender, Contenders, DEPTH};

const FRAME_BYTES: usize = 22_118_400;
/// The stages of rank 0 and of rank 1, in milliseconds.
const STAGES: [[f64; 2]; 4] = [[1.0, 1.0], [5.0, 5.0], [20.0, 20.0], [5.0, 20.0]];
const HAND_OVERS: [usize; 3] = [64, 65_536, FRAME_BYTES];

/// Prints a row per case and contender.
pub(super) fn run(contenders: &Contenders) -> Result<()> {
    println!(
        "\nOverlap, {FRAME_BYTES} bytes each way, stages that sleep and then spin to their mark, {ROUNDS} rounds"
    );
    println!(
        "{:>14}  {:<8} {:>20} {:>14}   {:>20} {:>20}",
        "rank 0/rank 1", "", "period ms, median", "mean", "efficiency", "by the mean"
    );
    for [decode_ms, phase_b_ms] in STAGES {
        let chunks = (2_000.0 / decode_ms.max(phase_b_ms)) as usize;
        let case = Case {
            bytes: FRAME_BYTES,
            decode_ms,
            phase_b_ms,
            touch: false,
            chunks,
            depth: DEPTH,
        };
        rows(
            contenders,
            &case,
            &format!("{decode_ms}/{phase_b_ms} ms"),
            1.0,
            3,
        )?;
    }
    print_mark();
    println!(
        "\nHand-over alone, no work in the stages, {DEPTH} slots\n{:>14}  {:<8} {:>20} {:>14}",
        "bytes", "", "us, median", "mean"
    );
    for bytes in HAND_OVERS {
        let case = Case {
            bytes,
            decode_ms: 0.0,
            phase_b_ms: 0.0,
            touch: false,
            chunks: 20_000,
            depth: DEPTH,
        };
        rows(contenders, &case, &bytes.to_string(), 1e3, 2)?;
    }
    print_mark();
    Ok(())
}

/// What the rounds of one contender gave.
#[derive(Default)]
struct Seen {
    periods: Vec<f64>,
    means: Vec<f64>,
    efficiencies: Vec<f64>,
    by_mean: Vec<f64>,
}

fn rows(
    contenders: &Contenders,
    case: &Case,
    label: &str,
    scale: f64,
    digits: usize,
) -> Result<()> {
    let names = contenders.names();
    let mut seen: Vec<Seen> = names.iter().map(|_| Seen::default()).collect();
    for _ in 0..ROUNDS {
        for (&name, seen) in names.iter().zip(&mut seen) {
            let result = contenders.run(name, case)?;
            let period = |key: &str| {
                let ms = result[key].as_f64();
                ms.with_context(|| format!("{name:?} printed no {key}"))
            };
            let (median, mean) = (period("period_ms")?, period("period_mean_ms")?);
            seen.periods.push(median * scale);
            seen.means.push(mean * scale);
            // The same rule for all: ours gives none where it means nothing.
            let efficiency = result["efficiency"].as_f64();
            let is_even = !are_far_apart(median, mean);
            seen.efficiencies.extend(efficiency.filter(|_| is_even));
            seen.by_mean.extend(result["efficiency_by_mean"].as_f64());
        }
    }
    for (&name, seen) in names.iter().zip(&mut seen) {
        let label = if name == Contender::Pp { label } else { "" };
        let (period, mean) = (median(&mut seen.periods), median(&mut seen.means));
        print!(
            "{label:>14}  {:<8} {:>20} {mean:>14.digits$} {:<1}",
            format!("{name:?}").to_lowercase(),
            spread(&mut seen.periods, digits),
            mark(period, mean)
        );
        match case.decode_ms > 0.0 {
            true => println!(
                " {:>20} {:>20}",
                spread(&mut seen.efficiencies, 4),
                spread(&mut seen.by_mean, 4)
            ),
            false => println!(),
        }
    }
    Ok(())
}
