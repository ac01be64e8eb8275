//! What the rounds of a benchmark come to.

use anyhow::{Context, Result};
use serde_json::Value;

// The rule of the program that is measured.
#[path = "../../../crates/pp-runtime/src/report/far.rs"]
#[allow(unreachable_pub, reason = "it is public there")]
pub(super) mod far;

pub(super) const ROUNDS: usize = 5;

/// The middle one of the rounds that gave a value; NaN where none did.
pub(super) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n => (values[(n - 1) / 2] + values[n / 2]) / 2.0,
    }
}

/// Median and half the distance of the quartiles, as text; `n/a` where no round gave a value.
pub(super) fn spread(values: &mut [f64], digits: usize) -> String {
    if values.is_empty() {
        return "n/a".into();
    }
    let middle = median(values);
    let quartile = |share: f64| values[(share * values.len() as f64) as usize];
    format!(
        "{middle:.digits$} ±{:.digits$}",
        (quartile(0.75) - quartile(0.25)) / 2.0
    )
}

/// `!` behind a median that is far from the mean beside it: no ratio of medians can be trusted.
pub(super) fn mark(median: f64, mean: f64) -> &'static str {
    match far::are_far_apart(median, mean) {
        true => "!",
        false => "",
    }
}

/// Milliseconds from chunk to chunk in the rounds of a contender: the median and the mean of each round.
#[derive(Default)]
pub(super) struct Periods {
    pub(super) medians: Vec<f64>,
    pub(super) means: Vec<f64>,
}

impl Periods {
    /// Adds a round, and says whether it was even: its chunks came in no bursts.
    pub(super) fn add(&mut self, printed: &Value) -> Result<bool> {
        let period = |key: &str| {
            let ms = printed[key].as_f64();
            ms.with_context(|| format!("no {key} in {printed}"))
        };
        let (median, mean) = (period("period_ms")?, period("period_mean_ms")?);
        self.medians.push(median);
        self.means.push(mean);
        Ok(!far::are_far_apart(median, mean))
    }

    /// Two columns and the mark: `figure` makes of a period what they show.
    pub(super) fn columns(&mut self, figure: impl Fn(f64) -> f64, digits: usize) -> String {
        let mut shown: Vec<f64> = self.medians.iter().map(|period| figure(*period)).collect();
        let (period, mean) = (median(&mut self.medians), median(&mut self.means));
        format!(
            "{:>20} {:>14.digits$} {:<1}",
            spread(&mut shown, digits),
            figure(mean),
            mark(period, mean)
        )
    }
}

/// What the mark means, below a table.
pub(super) fn print_mark() {
    println!(
        "{:>14}  ! median and mean differ by more than {:.0} %: chunks came in bursts",
        "",
        100.0 * far::FAR
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_quartiles() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0]), 2.5);
        assert!(median(&mut []).is_nan());
        assert_eq!(spread(&mut [], 1), "n/a");
        assert_eq!([mark(10.0, 10.4), mark(10.0, 9.4)], ["", "!"]);
        assert_eq!(spread(&mut [5.0, 1.0, 2.0, 3.0, 4.0], 1), "3.0 ±1.0");
    }
}
