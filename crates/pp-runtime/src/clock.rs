//! The monotonic clock, in nanoseconds, as records and traces use it.

use pp_contract::Outcome;
use rustix::time::{ClockId, clock_gettime};

use crate::report::PhaseBTimes;

/// Nanoseconds on `CLOCK_MONOTONIC`, which all processes of one host share.
pub fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    // The clock starts at 0 when the machine does and is never negative.
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Where the work of Phase B lies on the front's clock, rebuilt from durations alone.
///
/// Phase B reports how long it waited and how long it computed; laid end to end that is its
/// whole history. Each chunk anchors it anew: a compute neither begins before its envelope was
/// sent nor ends after its result was received. So no clocks need agree, on one host or two.
#[derive(Debug, Default)]
pub(crate) struct PeerClock {
    end_ns: u64,
}

impl PeerClock {
    /// The times of one chunk, in this order: sent, received by Phase B, compute started, compute
    /// ended, received back. `payload_moves`: payloads take time to arrive.
    ///
    /// A front that was not scheduled between its send and its look at the clock has sent later
    /// than Phase B began. Then the compute is drawn from the send on, shorter than it was.
    pub(crate) fn place(
        &mut self,
        sent_ns: u64,
        received_ns: u64,
        outcome: &Outcome,
        payload_moves: bool,
    ) -> PhaseBTimes {
        let compute_ns = outcome.phase_b_us.saturating_mul(1000);
        let idle_ns = outcome.idle_us.saturating_mul(1000);
        let received_ns = received_ns.max(sent_ns);
        let end = self
            .end_ns
            .saturating_add(idle_ns)
            .saturating_add(compute_ns);
        let earliest = sent_ns.saturating_add(compute_ns).min(received_ns);
        self.end_ns = end.clamp(earliest, received_ns);
        let start = self.end_ns.saturating_sub(compute_ns).max(sent_ns);
        // Neither side looks while it computes, so neither saw a payload arrive. Where payloads are
        // handed over they were there at once; where they move, no later than this.
        let recv_ns = match payload_moves {
            true => start.saturating_sub(idle_ns).max(sent_ns),
            false => sent_ns,
        };
        PhaseBTimes {
            recv_ns,
            compute_start_ns: start,
            compute_end_ns: self.end_ns,
            sent_ns: self.end_ns,
        }
    }
}

#[cfg(test)]
mod tests {
    use pp_contract::Manifest;

    use super::*;

    /// Start and end of a compute of which Phase B said how long it waited and took.
    fn place(clock: &mut PeerClock, sent: u64, received: u64, us: [u64; 2]) -> (u64, u64) {
        let [idle_us, phase_b_us] = us;
        let outcome = Outcome {
            observed_calls: 1,
            phase_b_us,
            idle_us,
            start_frame: 0,
            seal: None,
            outputs: Manifest::empty(),
        };
        let end_ns = clock.end_ns;
        let [handed_over, moved] = [false, true].map(|payload_moves| {
            clock.end_ns = end_ns;
            clock.place(sent, received, &outcome, payload_moves)
        });
        for times in [handed_over, moved] {
            let order = [
                sent,
                times.recv_ns,
                times.compute_start_ns,
                times.compute_end_ns,
                times.sent_ns,
                received,
            ];
            assert!(order.is_sorted(), "{order:?}");
        }
        assert_eq!(handed_over.recv_ns, sent);
        (moved.compute_start_ns, moved.compute_end_ns)
    }

    #[test]
    fn the_clock_does_not_run_backwards() {
        let first = now_ns();
        assert!(first > 0 && now_ns() >= first);
    }

    #[test]
    fn computes_lie_end_to_end_between_sent_and_received() {
        let clock = &mut PeerClock::default();
        // Truth: computes 100..200 and 210..310 µs; received 20 µs after each.
        assert_eq!(
            place(clock, 90_000, 220_000, [100, 100]),
            (100_000, 200_000)
        );
        assert_eq!(place(clock, 95_000, 330_000, [10, 100]), (210_000, 310_000));
    }

    #[test]
    fn a_history_that_drifts_is_pulled_back_by_the_next_chunk() {
        let clock = &mut PeerClock::default();
        assert_eq!(place(clock, 0, 50_000, [9_999, 10]), (40_000, 50_000));
        assert_eq!(place(clock, 200_000, 300_000, [0, 10]), (200_000, 210_000));
    }

    #[test]
    fn a_compute_that_began_before_the_front_noted_its_send_is_drawn_from_the_send_on() {
        let clock = &mut PeerClock::default();
        // It took 300 µs, and the front saw 200 µs pass.
        assert_eq!(place(clock, 100_000, 300_000, [0, 300]), (100_000, 300_000));
        assert_eq!(place(clock, 310_000, 420_000, [0, 100]), (310_000, 410_000));
    }

    #[test]
    fn nonsense_durations_stay_inside_the_flight() {
        let clock = &mut PeerClock::default();
        assert_eq!(place(clock, 5, 10, [u64::MAX; 2]), (5, 10));
    }
}
