//! How much of the transfer disappears: two stages of fixed length, 22 MB each way, and the bare hand-over.

use anyhow::Result;

use super::figures::{Periods, ROUNDS, print_mark, spread};
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
            chunks,
            depth: DEPTH,
            ..Case::default()
        };
        rows(contenders, &case, &format!("{decode_ms}/{phase_b_ms} ms"))?;
    }
    print_mark();
    println!(
        "\nHand-over alone, no work in the stages, {DEPTH} slots\n{:>14}  {:<8} {:>20} {:>14}",
        "bytes", "", "us, median", "mean"
    );
    for bytes in HAND_OVERS {
        let case = Case {
            bytes,
            chunks: 20_000,
            depth: DEPTH,
            ..Case::default()
        };
        rows(contenders, &case, &bytes.to_string())?;
    }
    print_mark();
    Ok(())
}

/// What the rounds of one contender gave.
#[derive(Default)]
struct Seen {
    periods: Periods,
    efficiencies: Vec<f64>,
    by_mean: Vec<f64>,
}

fn rows(contenders: &Contenders, case: &Case, label: &str) -> Result<()> {
    let has_work = case.decode_ms > 0.0;
    // Milliseconds, or microseconds.
    let (scale, digits) = if has_work { (1.0, 3) } else { (1e3, 2) };
    let names = contenders.names();
    let mut seen: Vec<Seen> = names.iter().map(|_| Seen::default()).collect();
    for _ in 0..ROUNDS {
        for (&name, seen) in names.iter().zip(&mut seen) {
            let result = contenders.run(name, case)?;
            let is_even = seen.periods.add(&result)?;
            // The same rule for all: ours gives none where it means nothing.
            let efficiency = result["efficiency"].as_f64();
            seen.efficiencies.extend(efficiency.filter(|_| is_even));
            seen.by_mean.extend(result["efficiency_by_mean"].as_f64());
        }
    }
    for (&name, seen) in names.iter().zip(&mut seen) {
        let label = if name == Contender::Pp { label } else { "" };
        print!(
            "{label:>14}  {:<8} {}",
            format!("{name:?}").to_lowercase(),
            seen.periods.columns(|period| period * scale, digits)
        );
        match has_work {
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
