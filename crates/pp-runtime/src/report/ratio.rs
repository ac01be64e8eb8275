//! The one rule for ratios that mean nothing. The text, the picture, the JSON and the benchmarks share it.

use super::far::are_far_apart;
use super::measures::{Measures, WhyNull};

/// A ratio that is this little above 1 is 1: the work of stages is told in whole microseconds, and the medians of a rank's
/// work and of the period come from different chunks.
pub const MEASUREMENT_ERROR: f64 = 0.02;

impl Measures {
    /// Work of so many milliseconds a chunk over the median period.
    ///
    /// # Errors
    /// Why it means nothing.
    pub fn over_median(&self, work_ms: f64) -> Result<f64, WhyNull> {
        let (median, _) = self.period()?;
        let share = share(work_ms, median);
        match self.is_uneven() && share != Err(WhyNull::NoWork) {
            true => Err(WhyNull::Bursts),
            false => share,
        }
    }

    /// Work of so many milliseconds a chunk over the mean period, which bursts do not spoil.
    ///
    /// # Errors
    /// Why it means nothing.
    pub fn over_mean(&self, work_ms: f64) -> Result<f64, WhyNull> {
        let (_, mean) = self.period()?;
        share(work_ms, mean)
    }

    /// Nothing was asked of the stages: what they took is no work, and its ratios mean nothing.
    pub fn forget_work(&mut self) {
        let why = Some(WhyNull::NoWork);
        (self.efficiency, self.efficiency_why_null) = (None, why);
        (self.efficiency_by_mean, self.efficiency_by_mean_why_null) = (None, why);
        (self.overlap_score, self.overlap_score_why_null) = (None, why);
        self.hidden_ms = None;
    }

    /// The overlap score, if chunks had one. `others_ms` is the most that could be hidden, `scatter_ms` the distance of
    /// the tenth and the ninetieth percentile of the period.
    pub(super) fn score(
        &self,
        score: Option<f64>,
        others_ms: f64,
        scatter_ms: f64,
    ) -> Result<f64, WhyNull> {
        self.period()?;
        if self.ranks.len() < 2 {
            return Err(WhyNull::OneRank);
        }
        let score = score.ok_or(WhyNull::NoWork)?;
        if self.is_uneven() {
            return Err(WhyNull::Bursts);
        }
        if others_ms < scatter_ms {
            return Err(WhyNull::Scatter);
        }
        at_most_one(score)
    }

    /// The ratios that are not given, each reason once, for a person.
    pub fn missing_ratios(&self) -> Vec<String> {
        let mut missing: Vec<(WhyNull, String)> = Vec::new();
        for (name, why) in [
            ("efficiency", self.efficiency_why_null),
            ("efficiency by the mean", self.efficiency_by_mean_why_null),
            ("overlap score", self.overlap_score_why_null),
        ] {
            let Some(why) = why else { continue };
            match missing.iter_mut().find(|(other, _)| *other == why) {
                Some((_, names)) => *names += &format!(", {name}"),
                None => missing.push((why, name.into())),
            }
        }
        let line = |(why, names): (WhyNull, String)| format!("{names} n/a: {why}");
        missing.into_iter().map(line).collect()
    }

    /// Says whether the period has a median that is far from its mean.
    pub fn is_uneven(&self) -> bool {
        let period = self.period_ms.zip(self.period_mean_ms);
        period.is_some_and(|(median, mean)| are_far_apart(median, mean))
    }

    fn period(&self) -> Result<(f64, f64), WhyNull> {
        let period = self.period_ms.zip(self.period_mean_ms);
        let period = period.ok_or(WhyNull::NothingMeasured)?;
        match self.spans_restart {
            true => Err(WhyNull::SpansRestart),
            false => Ok(period),
        }
    }
}

fn share(work_ms: f64, period_ms: f64) -> Result<f64, WhyNull> {
    if work_ms <= 0.0 {
        return Err(WhyNull::NoWork);
    }
    at_most_one(work_ms / period_ms)
}

fn at_most_one(ratio: f64) -> Result<f64, WhyNull> {
    match ratio <= 1.0 + MEASUREMENT_ERROR {
        true => Ok(ratio.min(1.0)),
        // Also a period of nothing.
        false => Err(WhyNull::AboveOne),
    }
}

#[cfg(test)]
mod tests {
    use super::super::RankMeasures;
    use super::*;

    /// Median and mean of the period in milliseconds, and the work of a chunk.
    fn both(median: f64, mean: f64, work_ms: f64) -> [Result<f64, WhyNull>; 2] {
        let m = Measures {
            period_ms: Some(median),
            period_mean_ms: Some(mean),
            ..Measures::default()
        };
        [m.over_median(work_ms), m.over_mean(work_ms)]
    }

    #[test]
    fn an_efficiency_is_given_where_it_means_something_and_never_above_one() {
        use WhyNull::{AboveOne, Bursts, NoWork};
        for (median, mean, work, expected) in [
            (10.0, 10.0, 8.0, [Ok(0.8), Ok(0.8)]),
            // Just as far apart as they may be, to either side.
            (20.0, 21.0, 10.5, [Ok(0.525), Ok(0.5)]),
            (20.0, 19.0, 9.5, [Ok(0.475), Ok(0.5)]),
            (10.0, 12.5, 10.0, [Err(Bursts), Ok(0.8)]),
            (10.0, 8.0, 8.0, [Err(Bursts), Ok(1.0)]),
            // Within the error of measurement of 1, and beyond.
            (10.0, 10.0, 10.1, [Ok(1.0), Ok(1.0)]),
            (10.0, 10.0, 10.3, [Err(AboveOne), Err(AboveOne)]),
            (10.0, 12.5, 37.5, [Err(Bursts), Err(AboveOne)]),
            (10.0, 10.0, 0.0, [Err(NoWork), Err(NoWork)]),
            (10.0, 12.5, 0.0, [Err(NoWork), Err(NoWork)]),
            (0.0, 0.0, 1.0, [Err(AboveOne), Err(AboveOne)]),
        ] {
            assert_eq!(both(median, mean, work), expected, "{median} {mean} {work}");
        }
    }

    #[test]
    fn a_score_is_given_where_the_scatter_lets_it_be_seen() {
        use WhyNull::{AboveOne, NoWork, OneRank, Scatter};
        let mut m = Measures {
            period_ms: Some(10.0),
            period_mean_ms: Some(10.0),
            ranks: vec![RankMeasures::default(); 2],
            ..Measures::default()
        };
        for (score, others, scatter, expected) in [
            (Some(0.0), 4.0, 1.0, Ok(0.0)),
            (Some(0.9), 4.0, 4.0, Ok(0.9)),
            (Some(0.9), 3.9, 4.0, Err(Scatter)),
            (Some(1.01), 4.0, 1.0, Ok(1.0)),
            (Some(1.74), 4.0, 1.0, Err(AboveOne)),
            (None, 0.0, 1.0, Err(NoWork)),
        ] {
            assert_eq!(
                m.score(score, others, scatter),
                expected,
                "{score:?} {others}"
            );
        }
        m.ranks.pop();
        assert_eq!(m.score(None, 0.0, 1.0), Err(OneRank));
    }

    #[test]
    fn nothing_measured_and_a_restart_leave_no_ratio() {
        let nothing = Measures::default();
        let restart = Measures {
            period_ms: Some(10.0),
            period_mean_ms: Some(10.0),
            spans_restart: true,
            ..Measures::default()
        };
        for (m, why) in [
            (nothing, WhyNull::NothingMeasured),
            (restart, WhyNull::SpansRestart),
        ] {
            assert_eq!(m.over_median(8.0), Err(why));
            assert_eq!(m.over_mean(8.0), Err(why));
            assert_eq!(m.score(Some(0.9), 4.0, 1.0), Err(why));
        }
    }
}
