//! How much of the transfer disappears: two stages of fixed length, 22 MB each way, and the bare hand-over.

use anyhow::{Context, Result};

use super::peers::{Case, Contender, Contenders, DEPTH};
use super::{ROUNDS, spread};

const FRAME_BYTES: usize = 22_118_400;
/// Decode and phase B in milliseconds.
const STAGES: [[f64; 2]; 4] = [[1.0, 1.0], [5.0, 5.0], [20.0, 20.0], [5.0, 20.0]];
const HAND_OVERS: [usize; 3] = [64, 65_536, FRAME_BYTES];

/// Prints a row per case and contender.
pub(super) fn run(contenders: &Contenders) -> Result<()> {
    println!(
        "\nOverlap, {FRAME_BYTES} bytes each way, stages that sleep and then spin to their mark, {ROUNDS} rounds"
    );
    println!(
        "{:>14}  {:<8} {:>20} {:>20}",
        "decode/phase B", "", "period ms", "efficiency"
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
            "period_ms",
            1.0,
            3,
        )?;
    }
    println!(
        "\nHand-over alone, no work in the stages\n{:>14}  {:<8} {:>20}",
        "bytes", "", "us a chunk"
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
        rows(contenders, &case, &bytes.to_string(), "period_ms", 1e3, 2)?;
    }
    Ok(())
}

fn rows(
    contenders: &Contenders,
    case: &Case,
    label: &str,
    key: &str,
    scale: f64,
    digits: usize,
) -> Result<()> {
    let names = contenders.names();
    let mut periods = vec![Vec::new(); names.len()];
    let mut efficiencies = vec![Vec::new(); names.len()];
    for _ in 0..ROUNDS {
        for (i, &name) in names.iter().enumerate() {
            let result = contenders.run(name, case)?;
            let period = result[key]
                .as_f64()
                .with_context(|| format!("{name:?} printed no {key}"))?;
            periods[i].push(period * scale);
            efficiencies[i].extend(result["efficiency"].as_f64());
        }
    }
    for (i, &name) in names.iter().enumerate() {
        let label = if name == Contender::Pp { label } else { "" };
        let efficiency = match case.decode_ms > 0.0 {
            true => spread(&mut efficiencies[i], 4),
            false => String::new(),
        };
        println!(
            "{label:>14}  {:<8} {:>20} {efficiency:>20}",
            format!("{name:?}").to_lowercase(),
            spread(&mut periods[i], digits)
        );
    }
    Ok(())
}
