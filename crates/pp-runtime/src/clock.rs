//! The monotonic clock, in nanoseconds, as records and traces use it.

use rustix::time::{ClockId, clock_gettime};

/// Nanoseconds on `CLOCK_MONOTONIC`, which all processes of one host share.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // The clock starts at 0 when the machine does and is never negative.
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Where the work of Phase B lies on the front's clock, rebuilt from durations alone.
///
/// Phase B reports how long it waited and how long it computed; laid end to end that is its
/// whole history. Each chunk anchors it anew: a compute cannot begin before its envelope was
/// sent nor end after its result was received. So no clocks need agree, on one host or two.
#[derive(Debug, Default)]
pub(crate) struct PeerClock {
    end_ns: u64,
}

impl PeerClock {
    /// Start and end of a compute on the front's clock.
    pub(crate) fn place(
        &mut self,
        sent_ns: u64,
        received_ns: u64,
        idle_us: u64,
        compute_us: u64,
    ) -> (u64, u64) {
        let compute_ns = compute_us.saturating_mul(1000);
        let end = self
            .end_ns
            .saturating_add(idle_us.saturating_mul(1000))
            .saturating_add(compute_ns);
        let earliest = sent_ns.saturating_add(compute_ns).min(received_ns);
        self.end_ns = end.clamp(earliest, received_ns);
        (self.end_ns.saturating_sub(compute_ns), self.end_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_clock_does_not_run_backwards() {
        let first = now_ns();
        assert!(first > 0 && now_ns() >= first);
    }

    #[test]
    fn computes_lie_end_to_end_between_sent_and_received() {
        let mut clock = PeerClock::default();
        // Truth: computes 100..200 and 210..310 µs; received 20 µs after each.
        assert_eq!(clock.place(90_000, 220_000, 100, 100), (100_000, 200_000));
        assert_eq!(clock.place(95_000, 330_000, 10, 100), (210_000, 310_000));
    }

    #[test]
    fn a_history_that_drifts_is_pulled_back_by_the_next_chunk() {
        let mut clock = PeerClock::default();
        assert_eq!(clock.place(0, 50_000, 9_999, 10), (40_000, 50_000));
        assert_eq!(clock.place(200_000, 300_000, 0, 10), (200_000, 210_000));
    }

    #[test]
    fn nonsense_durations_stay_inside_the_flight() {
        let mut clock = PeerClock::default();
        let (_, end) = clock.place(5, 10, u64::MAX, u64::MAX);
        assert_eq!(end, 10);
    }
}
