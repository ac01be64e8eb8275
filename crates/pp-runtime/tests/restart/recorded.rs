//! What a flight recorder tells of payloads that are kept for a restart.

use std::sync::Mutex;

use pp_contract::{Generation, Rank};
use pp_runtime::driver::{Driven, RankRun};
use pp_testing::{Seat, TellPanic, capabilities, local, seats};
use pp_transport::flight::{EdgeLog, FlightRecorder, Kind, Recorded, RecordedLocal, State};
use pp_transport::host::Host;

use crate::stages::{SLOT, Seen, stages};
use crate::world::options;
use crate::{CHAIN, PAIR, SIX};

#[test]
fn a_send_that_is_kept_is_recorded_as_done() {
    for pipeline in [PAIR, CHAIN] {
        let (options, seen) = (options(pipeline, 2, 1), Mutex::new(Seen::default()));
        let seats = seats(&options, SLOT);
        let switches: Vec<_> = seats.iter().map(|seat| seat.switch.clone()).collect();
        let recorder = FlightRecorder::new(64);
        std::thread::scope(|scope| {
            for (rank, Seat { switch, ends }) in options.pipeline.world_size().ranks().zip(seats) {
                let (options, seen, recorder) = (&options, &seen, &recorder);
                let switches = &switches;
                scope.spawn(move || {
                    let _tell = TellPanic(switches);
                    let own = stages(&options.pipeline, rank, &SIX, seen);
                    let slots = |_, _| Ok(RecordedLocal(local(options, SLOT)));
                    let run = RankRun::new(rank, own, options.clone(), slots);
                    let mut run: RankRun<'_, Recorded<Host>, _> = run.unwrap();
                    let edges: Vec<_> = options.pipeline.edges().collect();
                    for (number, end) in ends {
                        let recorder = match rank == Rank::new(0) {
                            true => recorder.clone(),
                            false => FlightRecorder::new(64),
                        };
                        let log = EdgeLog {
                            recorder,
                            peer: edges[number].target,
                            generation: Generation::new(0),
                            edge: number as u32,
                        };
                        run.attach(number, Recorded::end(end, &capabilities(), log));
                    }
                    assert_eq!(run.drive(&switch), Ok(Driven::Finished));
                });
            }
        });
        let (operations, _) = recorder.operations();
        let sends = operations.iter();
        let sends = sends.filter(|send| send.kind == Kind::Send && send.bytes > 0);
        let states: Vec<State> = sends.map(|send| send.state).collect();
        // That the last slot came back may be seen too late.
        assert_eq!(states[..SIX.len() - 1], [State::Done; SIX.len() - 1]);
    }
}
